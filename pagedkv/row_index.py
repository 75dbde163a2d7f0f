"""``RowIndex``: which row of the store holds the page of a key."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pagedkv.format import PackedRows, StoreRow, pack_row, unpack_row
from pagedkv.spec import PageKey


class RowIndex:
    """Rows by page key. The first row of a key counts; later ones are kept as its copies.

    A row is kept packed into one integer, since an index may hold millions. Not thread-safe for
    changes; ``get``, ``in`` and ``len`` may run beside one.
    """

    def __init__(self) -> None:
        self._rows: dict[PageKey, int] = {}
        self._copies: dict[PageKey, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[tuple[PageKey, StoreRow]]:
        return ((key, unpack_row(packed)) for key, packed in self._rows.items())

    def get(self, key: PageKey) -> StoreRow | None:
        """The row that counts for ``key``, if there is one."""
        packed = self._rows.get(key)
        return None if packed is None else unpack_row(packed)

    def get_packed(self, key: PageKey) -> int | None:
        """The packed row that counts for ``key``, if there is one."""
        return self._rows.get(key)

    def get_many(self, keys: Sequence[PageKey]) -> PackedRows:
        """The packed row that counts for each key; -1 where there is none."""
        get = self._rows.get
        return np.array([get(key, -1) for key in keys], dtype=np.int64)

    def add_many(self, keys: Iterable[PageKey | None], first: StoreRow) -> None:
        """Add the rows from ``first`` on, one for each key; None stands for a row without page."""
        rows, packed = self._rows, pack_row(first)
        for key in keys:
            if key is not None and rows.setdefault(key, packed) != packed:
                self._copies.setdefault(key, []).append(packed)
            packed += 1

    def add(self, key: PageKey, row: StoreRow) -> StoreRow:
        """Add a row of ``key``; the row that counts, which is another if the key had one."""
        packed = pack_row(row)
        first = self._rows.setdefault(key, packed)
        if first != packed:
            self._copies.setdefault(key, []).append(packed)
        return unpack_row(first)

    def remove(self, key: PageKey, row: StoreRow) -> bool:
        """Remove one row of ``key``, so that its next copy counts; whether the row was there."""
        packed, copies = pack_row(row), self._copies.get(key, [])
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
