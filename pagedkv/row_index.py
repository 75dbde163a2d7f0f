"""``RowIndex``: which row of the store holds the page of a key."""

from collections.abc import Iterator

from pagedkv.format import StoreRow
from pagedkv.spec import PageKey


class RowIndex:
    """Rows by page key. The first row of a key counts; later ones are kept as its copies.

    A row is kept as one integer, since an index may hold millions. Not thread-safe for changes;
    ``get``, ``in`` and ``len`` may run beside one.
    """

    def __init__(self) -> None:
        self._rows: dict[PageKey, int] = {}
        self._copies: dict[PageKey, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[tuple[PageKey, StoreRow]]:
        return ((key, _unpack(packed)) for key, packed in self._rows.items())

    def get(self, key: PageKey) -> StoreRow | None:
        """The row that counts for ``key``, if there is one."""
        packed = self._rows.get(key)
        return None if packed is None else _unpack(packed)

    def add(self, key: PageKey, row: StoreRow) -> StoreRow:
        """Add a row of ``key``; the row that counts, which is another if the key had one."""
        packed = _pack(row)
        first = self._rows.setdefault(key, packed)
        if first != packed:
            self._copies.setdefault(key, []).append(packed)
        return _unpack(first)

    def remove(self, key: PageKey, row: StoreRow) -> bool:
        """Remove one row of ``key``, so that its next copy counts; whether the row was there."""
        packed, copies = _pack(row), self._copies.get(key, [])
        if packed in copies:
            copies.remove(packed)
        elif self._rows.get(key) != packed:
            return False
        elif copies:
            self._rows[key] = copies.pop(0)
        else:
            del self._rows[key]
        if not copies:
            self._copies.pop(key, None)
        return True

    def check_invariants(self) -> None:
        """Assert that no row is there twice and that every copy has a row before it."""
        rows = [*self._rows.values(), *(row for rows in self._copies.values() for row in rows)]
        assert len(rows) == len(set(rows))
        assert all(copies and key in self._rows for key, copies in self._copies.items())


def _pack(row: StoreRow) -> int:
    return (row.lane << 16 | row.group) << 40 | row.row


def _unpack(packed: int) -> StoreRow:
    return StoreRow(packed >> 56, packed >> 40 & 0xFFFF, packed & (1 << 40) - 1)
