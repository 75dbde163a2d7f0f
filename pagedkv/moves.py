"""``Mover``: how the pages of one layer group move between pool, spill file and store."""

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import CorruptPageError, PoolExhaustedError, StoreFullError
from pagedkv.format import PageEntry, StoreRow
from pagedkv.page import Page, PageState
from pagedkv.residency import Residency
from pagedkv.spec import KVSpec, PageKey
from pagedkv.spill import SpillFile
from pagedkv.store import PageStore

Array = npt.NDArray[Any]

_LOG = logging.getLogger("pagedkv")
_BATCH_NBYTES = 32 << 20
_CHECK_PAGES = 8


class Mover:
    """Moves one spec's pages between the tiers.

    A page is *resident* in a slot, *spilled* in the spill file (exactly; only while a live
    sequence holds it), *stored* in a row of the store under its key, or several of these.

    Pages that no sequence holds leave the pool first, and may be forgotten when no store takes
    them. Pages of live sequences leave only when nothing else can, the longest resident first,
    and never without an exact copy below.

    Every method is called with the cache's lock held, unless it says otherwise. The lock is
    released during I/O, so that what was true before a call must be looked at again after it.

    Args:
        number: Index of the group among the store's specs.
        places: Where the pages are.
        store: The tier below, or ``None``.
    """

    def __init__(self, number: int, places: Residency, store: PageStore | None) -> None:
        self.number = number
        self.places = places
        self.store = store
        self._spec = places.spec
        self._pool = places.pool
        self._counters = places.counters
        self._batch = max(1, _BATCH_NBYTES // self._spec.page_nbytes)
        self._eviction_batch = max(1, min(self._pool.num_slots // 8, self._batch))

    # -- slots -------------------------------------------------------------------------------

    def take_slots(
        self,
        count: int,
        *,
        at_least: int,
        spare_held: bool,
        after: Page | None = None,
        clean_only: bool = False,
    ) -> list[int]:
        """Free and allocate up to ``count`` slots; the lock may be released meanwhile.

        Args:
            count: Slots wanted.
            at_least: Fewer than this many is an error.
            spare_held: Leave the pages of live sequences where they are.
            after: Prefer the slots behind this page's.
            clean_only: Evict only what is on disk already.

        Raises:
            PoolExhaustedError: Fewer than ``at_least`` could be had.
            StoreError: A page could not be written; it is still where it was.
        """
        while True:
            missing = count - self._pool.num_free
            if missing <= 0:
                return self._allocate(count, after)
            victims = self._victims(missing, spare_held=spare_held)
            safe = [page for page in victims if self._is_safe(page)]
            for page in safe:
                self.places.evict(page)
            if len(safe) == missing:
                continue
            if clean_only or not victims:
                if self._pool.num_free >= at_least:
                    return self._allocate(min(count, self._pool.num_free), after)
                if not self.places.num_moving and not self.places.num_copying:
                    raise self._exhausted(at_least)
                self.places.lock.wait()
            elif len(safe) < len(victims):
                self._make_safe(missing - len(safe), spare_held=spare_held)

    def take_some(self, count: int, after: Page | None = None) -> list[int]:
        """Between 1 and ``count`` slots: those that pages nobody holds can leave, or else one.

        Raises:
            PoolExhaustedError: Not even one could be had.
            StoreError: A page could not be written; it is still where it was.
        """
        slots = self.take_slots(count, at_least=0, spare_held=True, after=after)
        return slots or self.take_slots(1, at_least=1, spare_held=False, after=after)

    # -- moves -------------------------------------------------------------------------------

    def promote(self, pages: Sequence[Page], *, at_least: int, spare_held: bool) -> None:
        """Read pages that are only on disk into the pool, the leading ones if not all fit.

        A page that turns out damaged has lost its row afterwards, and perhaps all it had.

        Raises:
            PoolExhaustedError: Fewer than ``at_least`` slots could be had; nothing was read.
        """
        absent = [p for p in dict.fromkeys(pages) if p.slot is None and not p.is_lost]
        slots = self.take_slots(len(absent), at_least=at_least, spare_held=spare_held)
        loading = []
        for page in absent:
            if slots and page.slot is None and page.state is PageState.READY:
                self.places.place(page, slots.pop(0), PageState.LOADING)
                loading.append(page)
        for slot in slots:
            self._pool.free(slot)
        lost: set[PageKey] = set()
        for start in range(0, len(loading), self._batch):
            batch = loading[start : start + self._batch]
            try:
                lost |= self.read_pages(batch, [self._pool.page(_slot(page)) for page in batch])
            except BaseException:
                for page in loading[start:]:
                    self.places.withdraw(page)
                raise
            for page in batch:
                if page.key in lost:
                    self.places.withdraw(page)
                else:
                    if page.spill is None:
                        page.exact = True
                    self.places.publish(page)
        self.places.wait_ready(pages)

    def read_pages(self, pages: Sequence[Page], out: Sequence[Array]) -> set[PageKey]:
        """Read whole pages from disk, each into ``(layer, kind, token, head, channel)``.

        Where the store has another copy of a damaged page, that one is read.

        Returns:
            The keys of those whose bytes in the store are damaged or gone.
        """
        spilled = [
            (page.spill, to) for page, to in zip(pages, out, strict=True) if page.spill is not None
        ]
        stored = [(page, to) for page, to in zip(pages, out, strict=True) if page.spill is None]
        lost: set[PageKey] = set()
        began = time.perf_counter()
        with self.places.unlocked():
            for record, to in spilled:
                assert self.places.spill is not None
                assert record is not None
                self.places.spill.read_page(record, to)
        while stored:
            damaged = self._read_rows([page.row for page, _ in stored], [to for _, to in stored])
            stored = [(page, to) for page, to in stored if page.key in damaged]
            for page, _ in stored:
                assert page.key is not None
                page.row = self.find_row(page.key)  # another copy, if there is one
            lost |= {page.key for page, _ in stored if page.key and page.row is None}
            stored = [(page, to) for page, to in stored if page.row is not None]
        self._counters.num_pages_loaded += len(pages)
        self._counters.bytes_read += len(pages) * self._spec.page_nbytes
        self._counters.read_seconds += time.perf_counter() - began
        return lost

    def check_stored(self, pages: Sequence[Page]) -> None:
        """Read pages that are only in the store and verify them, so that damage is found now.

        Those that turn out damaged have lost their row afterwards (``Page.is_lost``).
        """
        rest = [page for page in pages if page.slot is None and page.spill is None]
        for start in range(0, len(rest), _CHECK_PAGES):
            batch = [page for page in rest[start : start + _CHECK_PAGES] if page.row is not None]
            scratch = np.empty((len(batch), *self._spec.page_shape), dtype=self._spec.np_dtype)
            self.read_pages(batch, list(scratch))

    def read_slices(self, pages: Sequence[Page], layer: int, out: Sequence[Array]) -> None:
        """Read one layer of pages from disk, each into ``(kind, token, head, channel)``.

        Called without the lock, by the owner of a sequence that holds the pages.

        Raises:
            CorruptPageError: A page came back damaged.
        """
        if not pages:
            return
        began = time.perf_counter()
        stored = []
        for page, to in zip(pages, out, strict=True):
            if page.spill is None:
                stored.append((page, to))
            else:
                assert self.places.spill is not None
                self.places.spill.read_layer(page.spill, layer, to)
        if stored:
            assert self.store is not None
            for page, _ in stored:
                if page.row is None:
                    raise CorruptPageError(
                        f"page {_short(page.key)} of a live sequence was lost on disk: "
                        "close the sequence and compute it again",
                        () if page.key is None else (page.key,),
                    )
            self.store.read_layer(
                [_row(page.row) for page, _ in stored], layer, [to for _, to in stored]
            )
        with self.places.lock:
            self._counters.num_slices_loaded += len(pages)
            self._counters.bytes_read += len(pages) * self._spec.layer_nbytes
            self._counters.read_seconds += time.perf_counter() - began

    def store_pages(self, pages: Iterable[Page]) -> None:
        """Write those of the pages that have a key and no row to the store, durably.

        Raises:
            StoreError: Some could not be written; they are still where they were.
        """
        if not self.can_write:
            return
        todo = [page for page in dict.fromkeys(pages) if self._is_unstored(page)]
        for start in range(0, len(todo), self._batch):
            batch = todo[start : start + self._batch]
            self.places.wait_ready(batch)
            self._write([page for page in batch if self._is_unstored(page)], spill=False)

    def allocate_spill(self, count: int) -> list[int]:
        """Records of the spill file for pages that never had a slot.

        Raises:
            StoreFullError: The store's bound leaves no room.
        """
        if not count:
            return []
        assert self.can_write
        return self.spill_file().allocate(count)

    def spill_file(self) -> SpillFile:
        """The spill file, made when first needed."""
        if self.places.spill is None:
            assert self.store is not None
            self.places.spill = SpillFile(
                self._spec, self.store.scratch_dir, self.store.reserve_scratch
            )
        return self.places.spill

    @property
    def can_write(self) -> bool:
        """Whether there is a store that takes pages."""
        return self.store is not None and not self.store.read_only

    def find_row(self, key: PageKey) -> StoreRow | None:
        """The store's row of this key."""
        return None if self.store is None else self.store.find(key, self.number)

    def close(self) -> None:
        """Drop the spill file."""
        if self.places.spill is not None:
            self.places.spill.close()

    # -- inside ------------------------------------------------------------------------------

    def _victims(self, count: int, *, spare_held: bool) -> list[Page]:
        """The next ``count`` pages to leave, if there are so many."""
        found = list(islice(self.places.candidates(), count))
        if not spare_held and len(found) < count:
            movable = (
                p for p in self.places.held_candidates() if self._is_safe(p) or self.can_write
            )
            found += islice(movable, count - len(found))
        return found

    def _is_safe(self, page: Page) -> bool:
        """Whether the page's slot can be taken without losing what must not be lost."""
        if page.ref_count == 0:
            return page.row is not None or not self.can_write
        if page.row is not None and page.exact:
            return True
        return page.spill is not None and (page.key is None or page.row is not None)

    def _make_safe(self, count: int, *, spare_held: bool) -> None:
        """Write the next ``count`` victims that need it, and some that will need it soon."""
        batch = self._unsafe(self.places.candidates(), count + self._eviction_batch)
        if len(batch) < count and not spare_held:
            batch += self._unsafe(self.places.held_candidates(), count - len(batch))
        try:
            self._write(batch, spill=True)
        except StoreFullError as error:
            forgettable = [p for p in batch if p.ranked and self.places.may_leave(p)]
            if not forgettable:
                raise
            _LOG.warning("the store is full, forgetting cached pages: %s", error)
            for page in forgettable[:count]:
                self.places.evict(page)

    def _is_unstored(self, page: Page) -> bool:
        """Whether the page has a key and bytes, and the store does not hold it."""
        return page.key is not None and page.row is None and not page.is_lost

    def _unsafe(self, pages: Iterable[Page], count: int) -> list[Page]:
        return list(islice((page for page in pages if not self._is_safe(page)), count))

    def _read_rows(self, rows: Sequence[StoreRow | None], out: Sequence[Array]) -> set[PageKey]:
        """Read rows of the store without the lock; the keys of those that are damaged or gone."""
        assert self.store is not None
        with self.places.unlocked():
            try:
                self.store.read([_row(row) for row in rows], out)
            except CorruptPageError as error:
                return {PageKey(key) for key in error.keys}
        return set()

    def _write(self, pages: Sequence[Page], *, spill: bool) -> None:
        """Write pages to the store, and (``spill``) exactly for the sequences that hold them."""
        for page in pages:
            self.places.set_state(page, PageState.WRITING)
        began = time.perf_counter()
        try:
            self._write_to_store(pages)
            if spill:
                self._write_to_spill(pages)
        finally:
            self._counters.write_seconds += time.perf_counter() - began
            for page in reversed(pages):
                self.places.publish(page)

    def _write_to_store(self, pages: Sequence[Page]) -> None:
        assert self.store is not None
        todo = []
        for page in pages:
            if page.key is not None and page.row is None:
                page.row, page.exact = self.find_row(page.key), False
                if page.row is None:
                    todo.append(page)
        if not todo:
            return
        entries = [_entry(page, self._spec) for page in todo]
        homes = [(page.slot, page.spill) for page in todo]
        with self.places.unlocked():
            sources = [self._exact_bytes(slot, record) for slot, record in homes]
            rows = self.store.write(self.number, entries, sources)
        for page, row in zip(todo, rows, strict=True):
            page.row, page.exact = row, self.store.codec.lossless
        self._counters.num_pages_stored += len(todo)
        self._counters.bytes_written += len(todo) * self._spec.page_nbytes

    def _write_to_spill(self, pages: Sequence[Page]) -> None:
        todo = [
            page
            for page in pages
            if page.ref_count and page.spill is None and not (page.row is not None and page.exact)
        ]
        if not todo:
            return
        spill = self.spill_file()
        records = spill.allocate(len(todo))
        try:
            with self.places.unlocked():
                for page, record in zip(todo, records, strict=True):
                    spill.write_page(record, self._pool.page(_slot(page)))
        except BaseException:
            for record in records:
                spill.free(record)
            raise
        for page, record in zip(todo, records, strict=True):
            page.spill = record
        self._counters.num_pages_spilled += len(todo)
        self._counters.bytes_written += len(todo) * self._spec.page_nbytes

    def _exact_bytes(self, slot: int | None, record: int | None) -> Array:
        if slot is not None:
            return self._pool.page(slot)
        assert record is not None
        assert self.places.spill is not None
        page = np.empty(self._spec.page_shape, dtype=self._spec.np_dtype)
        self.places.spill.read_page(record, page)
        return page

    def _allocate(self, count: int, after: Page | None) -> list[int]:
        return self._pool.allocate(count, None if after is None else after.slot)

    def _exhausted(self, count: int) -> PoolExhaustedError:
        where = (
            "there is no store to spill to"
            if self.store is None
            else "the store is read-only"
            if self.store.read_only
            else "the others may not leave now"
        )
        return PoolExhaustedError(
            f"{count} more slots are needed, but of {self._pool.num_slots} slots "
            f"{self._pool.num_free} are free, {self._pool.num_pinned} are pinned and "
            f"{self.places.num_resident_held} hold pages of live sequences, and {where}: close "
            "sequences, give the cache more slots, or a writable store"
        )


def _slot(page: Page) -> int:
    assert page.slot is not None
    return page.slot


def _row(row: StoreRow | None) -> StoreRow:
    assert row is not None
    return row


def _short(key: PageKey | None) -> str:
    return "(private)" if key is None else key.hex()[:12]


def _entry(page: Page, spec: KVSpec) -> PageEntry:
    assert page.key is not None
    return PageEntry(
        key=page.key,
        num_tokens=spec.page_tokens,
        parent=page.parent,
        tokens=None if page.tokens is None else np.frombuffer(page.tokens, dtype=np.int32),
        salt=page.salt,
    )
