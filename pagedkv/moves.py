"""``Mover``: how the bytes of one layer group's pages move between pool, spill file and store."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.admission import AdmissionPolicy, AdmitAll
from pagedkv.child_rows import Child
from pagedkv.codec import Int8, Raw
from pagedkv.errors import CorruptPageError, StoreError, StoreFullError
from pagedkv.format import PackedRows, PageEntry, StoreRow, pack_row, unpack_row
from pagedkv.int8 import Int8Layout
from pagedkv.memory import Numbers
from pagedkv.page import Page, PageState
from pagedkv.page_reader import PayloadViews
from pagedkv.pool import SlotPool
from pagedkv.prefix import Tokens
from pagedkv.records import compiled
from pagedkv.residency import Residency
from pagedkv.spec import KVSpec, PageKey
from pagedkv.spill import SpillFile
from pagedkv.store import PageStore

Array = npt.NDArray[Any]

logger = logging.getLogger("pagedkv")
_BATCH_NBYTES = 32 << 20
_CHECK_PAGES = 8
_UNBOUNDED_POOLS = 16


class Mover:
    """Reads and writes one spec's pages.

    A page is *resident* in a slot, *spilled* in the spill file (exactly; only while a live
    sequence holds it), *stored* in a row of the store under its key, or several of these. A row
    may be gone when it is read: another process, or the store itself, has taken its space back or
    moved it. Then the key is looked up again.

    Every method is called with the cache's lock held, unless it says otherwise. The lock is
    released during I/O, so that what was true before a call must be looked at again after it.

    Args:
        number: Index of the group among the store's specs.
        places: Where the pages are.
        store: The tier below, or ``None``.
        admission: Which cached pages the store takes when they leave the pool.

    Attributes:
        batch: Most pages that are read or written at once.
        can_write: Whether there is a store that takes pages.
        maps_store: Whether pages in the store are attended where they are.
        payload_nbytes: Bytes of one layer of a page in the store; the most they can be.
    """

    def __init__(
        self,
        number: int,
        places: Residency,
        store: PageStore | None,
        admission: AdmissionPolicy,
    ) -> None:
        self.number = number
        self.places = places
        self.store = store
        self._admission = admission
        self._spec = places.spec
        self._pool = places.pool
        self._counters = places.counters
        self.can_write = store is not None and not store.read_only
        self._is_selective = self.can_write and not isinstance(admission, AdmitAll)
        if self._is_selective:
            admission.start(self._pool.num_slots + _store_pages(store, self._spec, self._pool))
        self._num_given_up = 0
        self._page_nbytes = self._spec.page_nbytes
        self.batch = max(1, _BATCH_NBYTES // self._spec.page_nbytes)
        self.maps_store = store is not None and store.memory_map
        codec = Raw() if store is None else store.codec
        self.payload_nbytes = codec.layer_nbytes(self._spec)

    @cached_property
    def record_layout(self) -> Int8Layout | None:
        """What one layer of a page looks like in the store, if it is attended as it is."""
        codec = None if self.store is None else self.store.codec
        if not isinstance(codec, Int8) or self._spec.num_kinds != 2 or compiled() is None:
            return None
        return codec.layout(self._spec)

    # -- what is where -----------------------------------------------------------------------

    def find_row(self, key: PageKey) -> StoreRow | None:
        """The store's row of this key."""
        return None if self.store is None else self.store.find(key, self.number)

    def find_rows(self, keys: Sequence[PageKey]) -> npt.NDArray[np.int64]:
        """The store's rows of many keys, packed; -1 where it has none."""
        if self.store is None or not keys:
            return np.full(len(keys), -1, dtype=np.int64)
        return self.store.find_rows(keys, self.number)

    def find_child(
        self, parent: PageKey, tokens: Tokens, salt: bytes, extra: bytes, *, whole: bool
    ) -> Child | None:
        """What ``PageStore.find_child`` finds, without the lock."""
        if self.store is None:
            return None
        with self.places.lock.unlocked:
            return self.store.find_child(parent, tokens, salt, extra, self.number, whole=whole)

    def refresh(self) -> bool:
        """Look what other processes did to the store; whether anything has changed."""
        if self.store is None:
            return False
        with self.places.lock.unlocked:
            return self.store.refresh()

    def look_again(self) -> None:
        """Notice that the store gave up, or moved, rows of resident pages.

        A page that is only thought to be stored would leave the pool unwritten.
        """
        if self.store is None or self.store.num_segments_given_up == self._num_given_up:
            return
        self._num_given_up = self.store.num_segments_given_up
        for key, page in self.places.index.items():
            # A row may leave the index before it is gone: its page is found anew when it is.
            if (
                page.row is not None
                and page.state is PageState.READY
                and not self.store.holds(page.row)
            ):
                row = self._find_held(key)
                self.places.set_row(page, row, exact=row is not None and page.exact)

    def is_safe(self, page: Page) -> bool:
        """Whether the page's slot can be taken without losing what must not be lost.

        A cached page may rely on any row; one of a live sequence only on an exact row in the own
        lane, since the owner of another lane may take its row back.
        """
        if page.ref_count == 0:
            return page.row is not None or not self.can_write or not self.admits(page)
        if page.row is None:
            return page.key is None and page.spill is not None
        if page.spill is not None:
            return True
        return page.exact and (not self.can_write or self._is_kept(page))

    def note_request(self, keys: Sequence[PageKey]) -> None:
        """Let the admission policy know which pages were asked for, the root first."""
        if self._is_selective and len(keys):
            self._admission.note(keys)

    def admits(self, page: Page) -> bool:
        """Whether the store takes a cached page that leaves the pool."""
        return not self._is_selective or self._admission.admits(_key(page))

    def front_to_write(self, count: int) -> list[Page]:
        """Of the pages that may leave the next ``count`` that the store does not have and takes."""
        return self.places.dirty_front(count, self.admits)

    # -- reading -----------------------------------------------------------------------------

    def read_pages(
        self, pages: Sequence[Page], out: Sequence[Array], *, deadline: float | None = None
    ) -> set[PageKey]:
        """Read whole pages from disk, each into ``(layer, kind, token, head, channel)``.

        Where the store has another copy of a damaged page, that one is read.

        Args:
            pages: Which.
            out: For each page where to.
            deadline: Seconds that a read of the store may take.

        Returns:
            The keys of those whose bytes in the store are damaged or gone.
        """
        if not pages:
            return set()
        spilled = [
            (page.spill, to) for page, to in zip(pages, out, strict=True) if page.spill is not None
        ]
        stored = [(page, to) for page, to in zip(pages, out, strict=True) if page.spill is None]
        lost: set[PageKey] = set()
        began = time.perf_counter()
        if spilled:
            with self.places.lock.unlocked:
                for record, to in spilled:
                    assert self.places.spill is not None
                    assert record is not None
                    self.places.spill.read_page(record, to)
        while stored:
            lost |= {_key(page) for page, _ in stored if page.row is None}  # given up meanwhile
            stored = [(page, to) for page, to in stored if page.row is not None]
            rows = [_row(page.row) for page, _ in stored]
            damaged = self._read_rows(rows, [to for _, to in stored], deadline)
            stored = [stored[number] for number in damaged]
            tried = [rows[number] for number in damaged]
            lost |= self._find_anew([page for page, _ in stored], tried)
            stored = [(page, to) for page, to in stored if page.row is not None]
        self._counters.num_pages_loaded += len(pages)
        self._counters.bytes_read += len(pages) * self._spec.page_nbytes
        self._counters.read_seconds += time.perf_counter() - began
        return lost

    def read_quickly(self, key: PageKey, out: Array) -> bool:
        """Read one page from the store without letting go of the lock; whether that could be done.

        Args:
            key: Of the page.
            out: ``(layer, kind, token, head, channel)``.
        """
        if self.store is None:
            return False
        began = time.perf_counter()
        if not self.store.read_quickly(key, self.number, out):
            return False
        self._counters.num_pages_loaded += 1
        self._counters.bytes_read += self._page_nbytes
        self._counters.read_seconds += time.perf_counter() - began
        return True

    def read_rows(
        self,
        keys: Sequence[PageKey],
        rows: npt.NDArray[np.int64],
        out: Array,
        at: npt.NDArray[np.int64] | None,
        deadline: float | None = None,
    ) -> set[PageKey]:
        """Read pages from the store for which there is no ``Page``.

        Args:
            keys: Which.
            rows: Their rows, packed.
            out: ``(page, layer, kind, token, head, channel)``.
            at: For each page its place in ``out``; 0, 1, … by default.
            deadline: Seconds that a read of the store may take.

        Returns:
            The keys of those whose bytes in the store are damaged or gone.
        """
        num_pages = len(keys)
        if not num_pages:
            return set()
        assert self.store is not None
        lost: set[PageKey] = set()
        began = time.perf_counter()
        while len(rows):
            with self.places.lock.unlocked:
                try:
                    self.store.read(rows, out, at=at, deadline=deadline)
                    break
                except CorruptPageError as error:
                    bad = list(error.positions)
                    if not bad:
                        raise
            keys, at = [keys[n] for n in bad], np.array(bad) if at is None else at[bad]
            before, rows = rows[bad], self.find_rows(keys)
            good = (rows >= 0) & (rows != before)
            lost.update(key for key, is_good in zip(keys, good, strict=True) if not is_good)
            keys = [key for key, is_good in zip(keys, good, strict=True) if is_good]
            rows, at = rows[good], at[good]
        self._counters.num_pages_loaded += num_pages
        self._counters.bytes_read += num_pages * self._spec.page_nbytes
        self._counters.read_seconds += time.perf_counter() - began
        return lost

    def check_stored(self, pages: Sequence[Page]) -> None:
        """Read pages that are only in the store and verify them, so that damage is found now.

        Those that turn out damaged have lost their row afterwards (``Page.is_lost``). Those in
        other lanes, which may vanish at any time, are copied to the spill file; where that cannot
        be done, they count as lost too.
        """
        rest = [page for page in pages if page.slot is None and page.spill is None]
        for start in range(0, len(rest), _CHECK_PAGES):
            batch = [page for page in rest[start : start + _CHECK_PAGES] if page.row is not None]
            scratch = np.empty((len(batch), *self._spec.page_shape), dtype=self._spec.np_dtype)
            lost = self.read_pages(batch, list(scratch))
            foreign = [
                (page, values)
                for page, values in zip(batch, scratch, strict=True)
                if page.key not in lost and not self.is_safe(page) and page.slot is None
            ]
            try:
                self._spill([page for page, _ in foreign], [values for _, values in foreign])
            except StoreError as error:
                logger.warning("pages of other processes are not reused: %s", error)
                for page, _ in foreign:
                    self.places.set_row(page, None, exact=False)

    def read_slices(
        self, pages: Sequence[Page], layer: int, out: Array, at: Numbers | None = None
    ) -> None:
        """Read one layer of pages from disk.

        Called without the lock, by the owner of a sequence that holds the pages.

        Args:
            pages: Which.
            layer: Layer within the group.
            out: ``(page, kind, token, head, channel)``.
            at: For each page its place in ``out``; 0, 1, … by default.

        Raises:
            CorruptPageError: A page came back damaged.
        """
        if not pages:
            return
        began = time.perf_counter()
        at = np.arange(len(pages)) if at is None else at
        with self.places.lock.mutex:
            spills = [page.spill for page in pages]
            found = [record for record in spills if record is not None]
            spill = self.places.spill
            if found:  # they may be freed while they are read
                assert spill is not None
                spill.hold(found)
        spilled = [number for number, record in enumerate(spills) if record is not None]
        if found:
            assert spill is not None
            try:
                spill.read_layers(found, layer, out, at[spilled])
            finally:
                spill.let_go(found)
        if len(spilled) < len(pages):
            left = np.delete(np.arange(len(pages)), spilled)
            stored = [pages[number] for number in left.tolist()]
            assert self.store is not None
            self._read_stored(self.store.read_layer, stored, layer, out, at[left])
        self._count_loaded(len(pages), began)

    def has_payload(self, page: Page) -> bool:
        """Whether a page that is not in the pool is attended as the store holds it."""
        is_attended_so = self.record_layout is not None or self.maps_store
        return is_attended_so and page.spill is None and page.row is not None

    def staged_nbytes(self, page: Page) -> int:
        """What one layer of a page takes in a staging buffer if it is not in the pool."""
        return self.payload_nbytes if self.has_payload(page) else self._spec.layer_nbytes

    def packed_rows(self, pages: Sequence[Page]) -> PackedRows:
        """Where the store has pages; ``CorruptPageError`` if it has lost one."""
        return np.array([pack_row(row) for row in _rows_of(pages)], np.int64)

    def read_payloads(
        self, pages: Sequence[Page], rows: PackedRows, layer: int, out: Array
    ) -> None:
        """Read one layer of pages as the store holds them.

        Called without the lock, by the owner of a sequence that holds the pages.

        Args:
            pages: Which.
            rows: Where they were a while ago.
            layer: Layer within the group.
            out: uint8 ``(page, 1, 1, 1, byte)``.

        Raises:
            CorruptPageError: A page came back damaged.
        """
        began = time.perf_counter()
        assert self.store is not None
        self._read_stored(self.store.read_payloads, pages, layer, out, np.arange(len(pages)), rows)
        self._count_loaded(len(pages), began)

    def view_payloads(self, pages: Sequence[Page], rows: PackedRows, layer: int) -> PayloadViews:
        """Where the store holds one layer of pages; it is mapped into memory.

        Called without the lock, by the owner of a sequence that holds the pages.

        Args:
            pages: Which.
            rows: Where they were a while ago.
            layer: Layer within the group.

        Raises:
            CorruptPageError: A page is damaged.
        """
        assert self.store is not None
        began = time.perf_counter()
        while True:
            try:
                views = self.store.view_payloads(rows, layer)
                break
            except CorruptPageError as error:
                bad = [*error.positions]
                self._find_moved([pages[number] for number in bad], rows[bad], error)
                rows = self.packed_rows(pages)
        self._count_loaded(len(pages), began)
        return views

    # -- writing -----------------------------------------------------------------------------

    def store_pages(self, pages: Iterable[Page]) -> None:
        """Write those of the pages that have a key and no row to the store, durably.

        Raises:
            StoreError: Some could not be written; they are still where they were.
        """
        if not self.can_write:
            return
        todo = [page for page in dict.fromkeys(pages) if _is_unstored(page)]
        for start in range(0, len(todo), self.batch):
            batch = todo[start : start + self.batch]
            self.places.wait_ready(batch)
            self.write([page for page in batch if _is_unstored(page)], spill=False)

    def write(self, pages: Sequence[Page], *, spill: bool) -> None:
        """Write pages to the store, and (``spill``) exactly for the sequences that hold them."""
        if not pages:
            return
        began = time.perf_counter()
        try:
            self.places.begin_writing(pages)
            self._write_to_store(pages)
            if spill:
                todo = [p for p in pages if p.ref_count and p.spill is None and not self.is_safe(p)]
                self._spill(todo, [self._pool.page(_slot(page)) for page in todo])
        finally:
            self._counters.write_seconds += time.perf_counter() - began
            self.places.publish([p for p in reversed(pages) if p.state is PageState.WRITING])

    def write_entries(self, entries: Sequence[PageEntry], pages: Sequence[Array]) -> None:
        """Write pages that are not the cache's to the store, durably; called without the lock."""
        assert self.store is not None
        began = time.perf_counter()
        self.store.write(self.number, entries, pages)
        with self.places.lock:
            self._count_stored(len(pages))
            self._counters.write_seconds += time.perf_counter() - began

    def allocate_spill(self, count: int) -> list[int]:
        """Records of the spill file for pages that never had a slot.

        Raises:
            StoreFullError: The store's bound leaves no room.
        """
        if not count:
            return []
        assert self.store is not None
        spill = self.spill_file()
        try:
            return spill.allocate(count)
        except StoreFullError:
            with self.places.lock.unlocked:
                self.store.make_room(count * self._spec.page_nbytes)
            return spill.allocate(count)

    def spill_file(self) -> SpillFile:
        """The spill file, made when first needed."""
        if self.places.spill is None:
            assert self.store is not None
            self.places.spill = SpillFile(
                self._spec,
                self.store.scratch_dir,
                self.store.reserve_scratch,
                self.store.read_deadline,
            )
        return self.places.spill

    def close(self) -> None:
        """Drop the spill file."""
        if self.places.spill is not None:
            self.places.spill.close()

    # -- inside ------------------------------------------------------------------------------

    def _is_kept(self, page: Page) -> bool:
        """Whether the own lane has a page of a live sequence, and is not about to give it up.

        Its row may be outdated. A row that ``find`` knows is kept: whoever gives its segment up
        asks afterwards which pages are held.
        """
        assert page.key is not None
        row = self.find_row(page.key)
        return row is not None and self.store is not None and row.lane == self.store.own_lane

    def _read_rows(
        self, rows: Sequence[StoreRow], out: Sequence[Array], deadline: float | None
    ) -> Sequence[int]:
        """Read rows of the store without the lock; which of them are damaged or gone."""
        assert self.store is not None
        with self.places.lock.unlocked:
            try:
                self.store.read(rows, out, deadline=deadline)
            except CorruptPageError as error:
                if not error.positions:
                    raise
                return error.positions
        return ()

    def _find_held(self, key: PageKey) -> StoreRow | None:
        """The store's row of a page that is held, though it is just being moved."""
        assert self.store is not None
        return self.find_row(key) or self.store.find_leaving(key, self.number)

    def _find_anew(self, pages: Sequence[Page], tried: Sequence[StoreRow]) -> set[PageKey]:
        """Find another row of pages that could not be read in these; the keys that have none."""
        lost = set()
        for page, old in zip(pages, tried, strict=True):
            if page.row is not None and page.row != old:
                continue  # another thread has found it meanwhile
            row = self._find_held(_key(page))
            if row is None or row == old:
                self.places.set_row(page, None, exact=False)
                lost.add(_key(page))
            else:
                self.places.set_row(page, row, exact=page.exact)
        return lost

    def _read_stored(
        self,
        read: Callable[..., None],
        pages: Sequence[Page],
        layer: int,
        out: Array,
        at: Numbers,
        rows: PackedRows | None = None,
    ) -> None:
        """Read one layer of pages in the store, without the lock; moved ones where they are now."""
        while len(pages):
            tried = self.packed_rows(pages) if rows is None else rows
            try:
                read(tried, layer, out, at=at)
                return
            except CorruptPageError as error:
                bad = [*error.positions]
                pages, at = [pages[number] for number in bad], at[bad]
                self._find_moved(pages, tried[bad], error)
                rows = None

    def _find_moved(
        self, pages: Sequence[Page], tried: PackedRows, error: CorruptPageError
    ) -> None:
        """Find where pages are now that could not be read; raises the error if one is nowhere."""
        rows = [unpack_row(row) for row in tried.tolist()]
        with self.places.lock.mutex:
            if not pages or self._find_anew(pages, rows):
                raise error

    def _count_loaded(self, num_slices: int, began: float) -> None:
        with self.places.lock.mutex:
            self._counters.num_slices_loaded += num_slices
            self._counters.bytes_read += num_slices * self._spec.layer_nbytes
            self._counters.read_seconds += time.perf_counter() - began

    def _write_to_store(self, pages: Sequence[Page]) -> None:
        assert self.store is not None
        named = [page for page in pages if page.key is not None and page.row is None]
        known = self.find_rows([page.key for page in named if page.key is not None]) >= 0
        for at in np.flatnonzero(known).tolist():
            key = named[at].key
            assert key is not None
            self.places.set_row(named[at], self.find_row(key), exact=False)
        todo = [page for page, is_known in zip(named, known.tolist(), strict=True) if not is_known]
        if not todo:
            return
        entries = [_entry(page, self._spec) for page in todo]
        homes = [(page.slot, page.spill) for page in todo]
        slots = [slot for slot, _ in homes if slot is not None]
        with self.places.lock.unlocked:
            if len(slots) == len(todo):
                rows = self.store.write(
                    self.number,
                    entries,
                    self._pool.by_page,
                    at=np.array(slots, dtype=np.int64),
                )
            else:
                sources = [self._exact_bytes(slot, record) for slot, record in homes]
                rows = self.store.write(self.number, entries, sources)
        self.places.set_stored(todo, rows, exact=self.store.codec.lossless)
        self._count_stored(len(todo))

    def _spill(self, pages: Sequence[Page], values: Sequence[Array]) -> None:
        """Write the exact bytes of pages to the spill file."""
        if not pages:
            return
        spill = self.spill_file()
        records: list[int | None] = [*self.allocate_spill(len(pages))]
        try:
            with self.places.lock.unlocked:
                for record, page_values in zip(records, values, strict=True):
                    assert record is not None
                    spill.write_page(record, page_values)
            for number, page in enumerate(pages):
                if page.spill is None:  # else another thread was faster
                    page.spill, records[number] = records[number], None
        finally:
            for record in records:
                if record is not None:
                    spill.free(record)
        self._counters.num_pages_spilled += len(pages)
        self._counters.bytes_written += len(pages) * self._spec.page_nbytes

    def _count_stored(self, num_pages: int) -> None:
        self._counters.num_pages_stored += num_pages
        self._counters.bytes_written += num_pages * self._spec.page_nbytes

    def _exact_bytes(self, slot: int | None, record: int | None) -> Array:
        if slot is not None:
            return self._pool.page(slot)
        assert record is not None
        assert self.places.spill is not None
        page = np.empty(self._spec.page_shape, dtype=self._spec.np_dtype)
        self.places.spill.read_page(record, page)
        return page


def _store_pages(store: PageStore | None, spec: KVSpec, pool: SlotPool) -> int:
    """Pages of a spec that a store holds at most, about; of an unbounded one some pools' worth."""
    if store is None or store.max_nbytes is None:
        return _UNBOUNDED_POOLS * pool.num_slots
    return max(
        1,
        store.max_nbytes // (len(store.specs) * store.codec.layer_nbytes(spec) * spec.held_layers),
    )


def _is_unstored(page: Page) -> bool:
    """Whether the page has a key and bytes, and the store does not hold it."""
    return page.key is not None and page.row is None and not page.is_lost


def _slot(page: Page) -> int:
    assert page.slot is not None
    return page.slot


def _key(page: Page) -> PageKey:
    assert page.key is not None
    return page.key


def _rows_of(pages: Sequence[Page]) -> list[StoreRow]:
    """Their rows; ``CorruptPageError`` if one has none."""
    rows = []
    for page in pages:
        if page.row is None:
            raise _lost(page.key)
        rows.append(page.row)
    return rows


def _row(row: StoreRow | None) -> StoreRow:
    assert row is not None
    return row


def _lost(key: PageKey | None) -> CorruptPageError:
    name = "(private)" if key is None else key.hex()[:12]
    return CorruptPageError(
        f"page {name} of a live sequence was lost on disk: close the sequence and compute it again",
        () if key is None else (key,),
    )


def _entry(page: Page, spec: KVSpec) -> PageEntry:
    assert page.key is not None
    return PageEntry(
        key=page.key,
        num_tokens=spec.page_tokens,
        parent=page.parent,
        tokens=None if page.tokens is None else np.frombuffer(page.tokens, dtype=np.int32),
        salt=page.salt,
    )
