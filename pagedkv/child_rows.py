"""``ChildRows``: which rows of a store hold the pages that follow a page, in token order.

A page may have very many children that begin alike: all first pages follow the root key. So the
one that shares most tokens with a prompt is searched for, not compared one by one.

A row takes 16 bytes: a number that its page's *family* (parent and salt) has in common, and the
row, sorted by family. Token ids are not kept but read from the catalogue: once for all of a family
when it is first asked for, and a few of them in each search. The numbers are 64 bits of SHA-256;
should two families share one, pages are found that belong to the other, so whoever asks checks what
was found.
"""

import heapq
import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.catalog import NO_FAMILY, Families, Kinship
from pagedkv.format import PackedRows
from pagedkv.spec import PageKey
from pagedkv.token_order import nearest

_MAX_RECENT = 8192
"""So many rows are taken in one by one before they are sorted into the others."""
_MAX_LATE = 16
"""A family that is in order is not disturbed by fewer late rows than one in so many."""
_MAX_READ = 4096
"""So many rows' ids are kept after a search: every search in a family begins with the same few."""
_MAX_TRIES = 32
"""Pages that are looked at for one answer: those of another ``extra`` stand among the others."""
_MAX_ROUNDS = 4
"""So often is a search begun again, since rows had gone."""


class Child(NamedTuple):
    """A page that follows another.

    Args:
        key: Its key.
        num_tokens: Leading tokens that it shares with those that were asked for.
    """

    key: PageKey
    num_tokens: int


class Rows(Protocol):
    """What is known of rows elsewhere."""

    def ids_of_rows(self, rows: PackedRows) -> list[bytes | None]:
        """Token ids of their pages, as int32 in bytes; None where they cannot be read."""

    def is_known(self, rows: PackedRows) -> npt.NDArray[np.bool_]:
        """Whether they are there, ``(row,)``."""


class _GoneError(Exception):
    """A row's ids cannot be read."""


class _Late:
    """Rows of one family that were added lately: with their ids, in order; and others, in none."""

    def __init__(self) -> None:
        self.ordered: list[tuple[bytes, int]] = []
        self.others: list[int] = []

    def rows(self) -> list[int]:
        return [*(row for _, row in self.ordered), *self.others]


class ChildRows:
    """Rows of one spec's pages by what they follow. Thread-safe.

    Rows are only added. Those that have gone are noticed when they are met, and all of them when
    they have become many.

    Args:
        rows: Reads the rows' token ids.

    Attributes:
        has_nameless_tails: Whether there may be saved tails whose tokens are not known.
    """

    def __init__(self, rows: Rows) -> None:
        self.has_nameless_tails = False
        self._source = rows
        self._lock = threading.Lock()  # of those who search; whoever adds does not wait for them
        self._adding = threading.Lock()  # of the next two
        self._runs: list[tuple[int, int]] = []
        self._added = array("Q")  # the families of the rows of these runs
        self._families: Families = np.empty(0, np.uint64)
        self._rows: PackedRows = np.empty(0, np.int64)
        self._ordered: set[int] = set()
        self._late: dict[int, _Late] = {}
        self._num_late = 0  # since the last were sorted in
        self._num_dropped = 0
        self._read: dict[int, bytes] = {}  # ids of rows that were looked at lately

    def add_many(self, first: int, kinship: Kinship) -> None:
        """Add the packed rows from ``first`` on."""
        self.has_nameless_tails |= kinship.has_nameless_tails
        if kinship.families.any():
            with self._adding:
                self._runs.append((first, len(kinship.families)))
                self._added.frombytes(kinship.families.tobytes())

    def note_dropped(self, count: int) -> None:
        """Note that so many rows have gone."""
        self._num_dropped += count

    def find(
        self, family: int, ids: bytes, key_of: Callable[[bytes], PageKey | None]
    ) -> Child | None:
        """The page of a family that shares most leading tokens with ``ids``.

        Costs time logarithmic in the size of the family: about as many records are read. The first
        search for a family reads all of its records.

        Args:
            family: Of parent and salt.
            ids: Token ids as int32, in bytes.
            key_of: The key of the page with these ids; None if there is none, or another's.
        """
        with self._lock:
            self._take_in()
            for _ in range(_MAX_ROUNDS):
                try:
                    is_last, child = self._search(family, ids, key_of)
                except _GoneError:
                    self._purge(family)
                    continue
                if child is not None or is_last or not self._purge(family):
                    return child
        return None

    def take_in(self) -> None:
        """Sort in what was added; ``find`` does it too, and is quicker after it."""
        with self._lock:
            self._take_in()

    def check_invariants(self) -> None:
        """Assert that families are together, and rows are there once."""
        with self._lock:
            self._take_in()
            assert len(self._families) == len(self._rows)
            assert (self._families[1:] >= self._families[:-1]).all()
            late = [row for one in self._late.values() for row in one.rows()]
            rows = [*self._rows[self._rows >= 0].tolist(), *late]
            assert len(rows) == len(set(rows))

    # -- a search, with the lock held ----------------------------------------------------------

    def _search(
        self, family: int, ids: bytes, key_of: Callable[[bytes], PageKey | None]
    ) -> tuple[bool, Child | None]:
        """The best child, and whether all that could be one were looked at."""
        tries = 0
        parts = heapq.merge(
            self._nearest_sorted(family, ids),
            self._nearest_late(family, ids),
            key=lambda found: -found[0],
        )
        for num_common, found in islice(parts, _MAX_TRIES):
            tries += 1
            key = key_of(found)
            if key is not None:
                return True, Child(key, num_common)
        return tries < _MAX_TRIES, None

    def _nearest_sorted(self, family: int, ids: bytes) -> Iterator[tuple[int, bytes]]:
        start, stop = self._range(family)
        if stop - start > 1 and family not in self._ordered:
            stop = self._order(family, start, stop)
        rows, read = self._rows, self._read
        if len(read) > _MAX_READ:
            read.clear()

        def ids_of(place: int) -> bytes:
            row = int(rows[place])
            ids = read.get(row)
            if ids is None:
                (ids,) = self._source.ids_of_rows(rows[place : place + 1])
                if ids is None:
                    self._remove(start, stop, np.arange(start, stop) != place)
                    raise _GoneError
                read[row] = ids
            return ids

        for num_common, place in nearest(range(start, stop), ids, ids_of):
            yield num_common, ids_of(place)

    def _nearest_late(self, family: int, ids: bytes) -> Iterator[tuple[int, bytes]]:
        late = self._late.get(family)
        if late is None:
            return
        if late.others:
            found = self._source.ids_of_rows(np.array(late.others, np.int64))
            for one, row in zip(found, late.others, strict=True):
                if one is not None:
                    insort(late.ordered, (one, row))
            late.others = []
        for num_common, (one, _) in nearest(late.ordered, ids, itemgetter(0)):
            yield num_common, one

    # -- the sorted rows, with the lock held ---------------------------------------------------

    def _range(self, family: int) -> tuple[int, int]:
        """Places of a family's rows; those that have gone stand behind them."""
        wanted, rows = np.uint64(family), self._rows
        start = int(np.searchsorted(self._families, wanted, "left"))
        stop = int(np.searchsorted(self._families, wanted, "right"))
        return start, bisect_left(range(stop), True, start, key=lambda place: rows[place] < 0)

    def _order(self, family: int, start: int, stop: int) -> int:
        """Put a family's rows into the order of their tokens; where they end now."""
        rows = self._rows[start:stop].copy()
        found = self._source.ids_of_rows(rows)
        pairs = zip(found, rows.tolist(), strict=True)
        known = sorted((ids, row) for ids, row in pairs if ids is not None)
        self._rows[start:stop] = -1
        self._rows[start : start + len(known)] = [row for _, row in known]
        self._ordered.add(family)
        return start + len(known)

    def _remove(self, start: int, stop: int, keep: npt.NDArray[np.bool_]) -> None:
        left = self._rows[start:stop][keep]
        self._rows[start:stop] = -1
        self._rows[start : start + len(left)] = left

    def _purge(self, family: int) -> bool:
        """Forget the rows of a family that have gone; whether there were any."""
        start, stop = self._range(family)
        keep = self._source.is_known(self._rows[start:stop])
        self._remove(start, stop, keep)
        num_gone = int(np.count_nonzero(~keep))
        late = self._late.get(family)
        if late is not None:
            rows = late.rows()
            known = self._source.is_known(np.array(rows, np.int64))
            left = {row for row, is_known in zip(rows, known.tolist(), strict=True) if is_known}
            late.ordered = [one for one in late.ordered if one[1] in left]
            late.others = [row for row in late.others if row in left]
            num_gone += len(rows) - len(left)
        return num_gone > 0

    def _take_in(self) -> None:
        with self._adding:
            runs, self._runs = self._runs, []
            added, self._added = self._added, array("Q")
        if len(added) > _MAX_RECENT:
            self._merge(_rows_of(runs, len(added)), np.frombuffer(added, np.uint64))
        elif added:
            self._num_late += len(added)
            for row, family in zip(_rows_of(runs, len(added)).tolist(), added, strict=True):
                if family != NO_FAMILY:
                    self._late.setdefault(family, _Late()).others.append(row)
            if self._num_late > _MAX_RECENT:
                self._merge_late()
        if self._num_dropped > max(_MAX_RECENT, len(self._rows) // 4):
            self._purge_all()

    def _merge_late(self) -> None:
        """Sort late rows in, but for those that would disturb a much larger family's order."""
        rows: list[int] = []
        families: list[int] = []
        for family, late in list(self._late.items()):
            found = late.rows()
            start, stop = self._range(family) if family in self._ordered else (0, 0)
            if stop - start < _MAX_LATE * len(found):
                rows += found
                families += [family] * len(found)
                del self._late[family]
        self._merge(np.array(rows, np.int64), np.array(families, np.uint64))
        self._num_late = 0

    def _merge(self, rows: PackedRows, families: Families) -> None:
        """Sort rows in. They are millions at times, so no more arrays live than have to."""
        order = np.argsort(families)
        order = order[np.searchsorted(families, NO_FAMILY, "right", sorter=order) :]
        rows, families = rows[order], families[order]
        del order
        keep = self._rows >= 0
        if not keep.any():
            self._rows, self._families = rows, families
        else:
            self._rows, self._families = self._rows[keep], self._families[keep]
            places = np.searchsorted(self._families, families, "right")
            self._rows = np.insert(self._rows, places, rows)
            self._families = np.insert(self._families, places, families)
            if self._ordered:
                self._ordered.difference_update(families.tolist())

    def _purge_all(self) -> None:
        self._num_dropped = 0
        keep = self._rows >= 0
        keep[keep] = self._source.is_known(self._rows[keep])
        self._rows, self._families = self._rows[keep], self._families[keep]
        for family in list(self._late):
            self._purge(family)
            if not self._late[family].rows():
                del self._late[family]


def _rows_of(runs: list[tuple[int, int]], count: int) -> PackedRows:
    """The rows of runs, each given by its first row and its length."""
    rows = np.empty(count, np.int64)
    at = 0
    for first, length in runs:
        rows[at : at + length] = np.arange(first, first + length)
        at += length
    return rows
