"""``LayerGroup``: what a cache does with the pages of one layer group, by key and by sequence."""

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import CorruptPageError, PageNotFoundError, PoolExhaustedError
from pagedkv.format import PageEntry, StoreRow
from pagedkv.moves import Mover
from pagedkv.page import Page, PageState
from pagedkv.prefix import PageKeys, Tokens, longest_match
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]


class LayerGroup:
    """The pages of one spec: stored and found by key, shared and owned by sequences.

    All methods take the cache's lock themselves; page bytes are copied without it.

    Args:
        moves: Moves the group's pages between the tiers.
    """

    def __init__(self, moves: Mover) -> None:
        self.moves = moves
        self.places = places = moves.places
        self.spec = places.spec
        self._lock = places.lock
        self._pool = places.pool
        self._counters = places.counters

    # -- by key ------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey]) -> int:
        """Length of the longest leading run of ``keys`` that any tier holds."""
        with self._lock:
            return self._match(keys)

    def put(self, keys: Sequence[PageKey], pages: Array, *, write_through: bool) -> None:
        """Add those pages ``(page, layer, kind, token, head, channel)`` that no tier holds."""
        start = 0
        while start < len(keys):
            with self._lock:
                batch, stop = self._start_put(keys, start)
            try:
                for number, page in batch:
                    self._view(page)[...] = pages[number]
            finally:
                with self._lock:
                    for _, page in reversed(batch):
                        self.places.publish(page)
            if write_through:
                self.store([page for _, page in batch])
            start = stop

    def get(self, keys: Sequence[PageKey], out: Array) -> None:
        """Copy pages into ``out``; ``PageNotFoundError`` names the first that no tier holds."""
        with self._lock:
            resident, absent = self._locate(keys)
            with self.places.copying(list(resident.values())):
                for number, page in resident.items():
                    out[number] = self._view(page)
            self.places.touch(list(resident.values()))
            self._counters.num_pool_hits += len(resident)
            if absent:
                self._get_absent(keys, absent, out)

    def acquire(self, keys: Sequence[PageKey]) -> list[Page]:
        """Pin the longest leading run of ``keys`` that any tier holds, all of it resident.

        Raises:
            PoolExhaustedError: The run does not fit beside what may not leave; nothing is pinned.
        """
        with self._lock:
            run = self._hold_run(keys)
            pinned: list[Page] = []
            try:
                for page in run:
                    if page.slot is not None:
                        self.places.pin(page)
                        pinned.append(page)
                num_hits = len(pinned)
                missing = len(set(run) - set(pinned))
                self.moves.promote(run, at_least=missing, spare_held=False)
                usable = list(takewhile(lambda page: page.slot is not None, run))
                for page in usable:
                    self.places.pin(page)
            finally:
                for page in pinned:
                    self.places.unpin(page)
                for page in reversed(run):
                    self.places.drop_holder(page)
            self._count_hits(num_hits, len(run), len(usable), len(keys))
            return usable

    def readonly_view(self, page: Page) -> Array:
        """The resident page, ``(layer, kind, token, head, channel)``, not writable."""
        view = self._view(page)
        view.flags.writeable = False
        return view

    def release_pins(self, pages: Sequence[Page]) -> None:
        """Take back the pins of ``acquire``."""
        with self._lock:
            self.places.touch(pages)
            for page in pages:
                self.places.unpin(page)
            self._lock.notify_all()

    # -- by sequence -------------------------------------------------------------------------

    def hold(self, keys: Sequence[PageKey]) -> list[Page]:
        """Hold the longest leading run of ``keys`` that any tier has, for a sequence.

        Pages that are only on disk are read into the pool as far as slots can be had without
        taking them from live sequences; the others stay where they are.
        """
        with self._lock:
            run = self._hold_run(keys)
            num_resident = sum(page.slot is not None for page in run)
            try:
                self.moves.promote(run, at_least=0, spare_held=True)
            except BaseException:
                for page in reversed(run):
                    self.places.drop_holder(page)
                raise
            usable = list(takewhile(lambda page: not page.is_lost, run))
            for page in reversed(run[len(usable) :]):
                self.places.drop_holder(page)
            self._count_hits(num_resident, len(run), len(usable), len(keys))
            return usable

    def share(self, pages: Sequence[Page]) -> None:
        """Hold pages once more, for a forked sequence."""
        with self._lock:
            for page in pages:
                self.places.add_holder(page)

    def release(self, pages: Sequence[Page]) -> None:
        """Give up a sequence's hold; of a prefix the root is kept longest."""
        with self._lock:
            for page in reversed(pages):
                self.places.drop_holder(page)
            self._lock.notify_all()

    def new_pages(self, count: int, after: Page | None) -> list[Page]:
        """Fresh private pages for a sequence, held once.

        Slots are taken from pages that nobody holds. Pages for which they do not suffice live in
        the spill file from the start, the last one excepted where it can have the slot of another
        page of a live sequence.

        Raises:
            PoolExhaustedError: There is no room, and no writable store to spill to.
            StoreError: A page that had to leave could not be written.
        """
        with self._lock:
            slots = self._slots_for(count, after)
            try:
                if len(slots) < count and not self.moves.can_write:
                    raise self.moves.exhausted(count - len(slots))
                records = self.moves.allocate_spill(count - len(slots))
            except BaseException:
                for slot in slots:
                    self._pool.free(slot)
                raise
            pages = [Page() for _ in range(count)]
            num_leading = max(0, len(slots) - 1)
            homes = (*pages[:num_leading], *pages[count - min(1, len(slots)) :])
            for page, slot in zip(homes, slots, strict=True):
                self.places.place(page, slot)
            without = pages[num_leading : num_leading + len(records)]
            for page, record in zip(without, records, strict=True):
                page.spill = record
            for page in pages:
                self.places.add_holder(page)
            return pages

    def private_copy(self, page: Page, after: Page | None) -> Page:
        """A fresh private page with the bytes of ``page`` (copy on write), held once."""
        values = np.empty(self.spec.page_shape, dtype=self.spec.np_dtype)
        self.read_page(page, values)
        return self._new_filled(values, after)

    def bring_back(self, page: Page) -> None:
        """Make a sequence's tail resident again, if a slot can be had, since it will be written."""
        with self._lock:
            self.places.wait_ready([page])
            self.moves.promote([page], at_least=0, spare_held=False)

    def read_page(self, page: Page, out: Array) -> None:
        """Copy a page of the caller's sequence into ``(layer, kind, token, head, channel)``.

        Raises:
            CorruptPageError: The page is only on disk, and damaged there.
        """
        with self._lock:
            self.places.wait_ready([page])
            if page.slot is not None:
                with self.places.copying([page]):
                    out[...] = self._view(page)
            elif page.is_lost or self.moves.read_pages([page], [out]):
                raise CorruptPageError(f"{page!r} of a live sequence was lost on disk")

    def give_key(
        self, page: Page, key: PageKey, parent: PageKey, tokens: Tokens, salt: bytes
    ) -> Page:
        """Make a full page of a sequence shareable under ``key``; return what to hold instead.

        The first bytes under a key win: when another page has the key, it takes this one's place
        if their bytes are equal, and else this one stays private.
        """
        with self._lock:
            self.places.wait_ready([page])
            other = self.places.index.get(key)
            if page.key is not None or other is page:
                return page
            if other is None:
                page.key, page.parent, page.tokens, page.salt = key, parent, tokens, salt
                page.row = self.moves.find_row(key)
                self.places.index[key] = page
                return page
            self.places.wait_ready([other])
            if page.slot is None or other.slot is None or self.places.index.get(key) is not other:
                return page
            with self.places.copying([page, other]):
                is_equal = np.array_equal(_bits(self._view(page)), _bits(self._view(other)))
            if not is_equal or other.slot is None:
                return page
            self.places.add_holder(other)
            self.places.drop_holder(page)
            self._lock.notify_all()
            return other

    def has_tail(self, key: PageKey) -> bool:
        """Whether the store holds a saved tail under this key."""
        return self.moves.find_row(key) is not None

    def load_tail(self, key: PageKey, after: Page | None) -> Page | None:
        """A fresh private page with a saved tail's bytes, held once; ``None`` if it is damaged."""
        source = Page()
        source.key, source.row = key, self.moves.find_row(key)
        values = np.empty(self.spec.page_shape, dtype=self.spec.np_dtype)
        with self._lock:
            lost = source.row is None or self.moves.read_pages([source], [values])
            self._counters.misses["corrupt"] += bool(lost)
        return None if lost else self._new_filled(values, after)

    def save_tail(self, page: Page, entry: PageEntry) -> None:
        """Write the first tokens of a sequence's last page to the store, durably."""
        assert self.moves.store is not None
        tail = np.zeros(self.spec.page_shape, dtype=self.spec.np_dtype)
        self.read_page(page, tail)
        tail[:, :, entry.num_tokens :] = 0
        self.moves.store.write(self.moves.number, [entry], [tail])

    def store(self, pages: Sequence[Page]) -> None:
        """Write those pages that have a key and no row to the store; durable on return."""
        with self._lock:
            self.moves.store_pages(pages)

    def shed_spill(self, pages: Sequence[Page]) -> None:
        """Give back the spill records of pages that the store holds exactly by now.

        Called by the sequence that holds the pages, while it does not read them. Those that other
        sequences hold too are left alone: they may be reading them.
        """
        with self._lock:
            for page in pages:
                is_stored = page.row is not None and page.exact
                if is_stored and page.ref_count == 1 and page.state is PageState.READY:
                    self.places.free_spill(page)

    def flush(self) -> None:
        """Write every page that has a key and no row to the store; durable on return."""
        with self._lock:
            self.moves.store_pages(list(self.places.index.values()))

    # -- inside ------------------------------------------------------------------------------

    def _slots_for(self, count: int, after: Page | None) -> list[int]:
        """Up to ``count`` slots for a sequence; none if all are in use and it can spill."""
        try:
            return self.moves.take_some(count, after)
        except PoolExhaustedError:
            if not self.moves.can_write:
                raise
            return []

    def _new_filled(self, values: Array, after: Page | None) -> Page:
        """A fresh private page with these bytes, held once."""
        (page,) = self.new_pages(1, after)
        try:
            with self._lock:
                self.places.wait_ready([page])
                if page.slot is not None:
                    with self.places.copying([page]):
                        self._view(page)[...] = values
                else:
                    assert page.spill is not None
                    with self.places.unlocked():
                        self.moves.spill_file().write_page(page.spill, values)
        except BaseException:
            self.release([page])
            raise
        return page

    def _match(self, keys: Sequence[PageKey]) -> int:
        tiers = (
            (self.places.index,)
            if self.moves.store is None
            else (self.places.index, self.moves.store)
        )
        return longest_match(keys, *tiers)

    def _start_put(self, keys: Sequence[PageKey], start: int) -> tuple[list[tuple[int, Page]], int]:
        """Give slots to the next of ``keys[start:]`` that no tier holds; where to go on."""
        unknown = (n for n in range(start, len(keys)) if not self._match(keys[n : n + 1]))
        want = list(islice(unknown, max(1, self._pool.num_slots // 2)))
        if not want:
            return [], len(keys)
        slots = self.moves.take_some(len(want))
        batch: list[tuple[int, Page]] = []
        stop = len(keys)
        for number in want:
            if self._match(keys[number : number + 1]):  # twice in keys, or put by another thread
                continue
            if not slots:
                stop = number
                break
            page = _keyed(keys, number)
            self.places.index[keys[number]] = page
            self.places.place(page, slots.pop(0), PageState.LOADING)
            batch.append((number, page))
            stop = number + 1
        for slot in slots:
            self._pool.free(slot)
        return batch, stop

    def _locate(self, keys: Sequence[PageKey]) -> tuple[dict[int, Page], dict[int, StoreRow]]:
        resident: dict[int, Page] = {}
        absent: dict[int, StoreRow] = {}
        self.places.wait_ready(
            page for key in keys if (page := self.places.index.get(key)) is not None
        )
        for number, key in enumerate(keys):
            page = self.places.index.get(key)
            row = self.moves.find_row(key)
            if page is not None and page.slot is not None:
                resident[number] = page
            elif row is not None:
                absent[number] = row
            else:
                self._counters.misses["absent"] += 1
                raise PageNotFoundError(
                    f"page {key.hex()} (number {number} of {len(keys)}) is in no tier: compute it"
                )
        return resident, absent

    def _get_absent(self, keys: Sequence[PageKey], absent: dict[int, StoreRow], out: Array) -> None:
        """Read pages from the store into ``out``, and keep copies where slots are to be had."""
        pages = {number: _keyed(keys, number) for number in absent}
        for number, page in pages.items():
            page.row, page.exact = absent[number], True
        lost = self.moves.read_pages(list(pages.values()), [out[number] for number in pages])
        self._counters.num_store_hits += len(absent) - len(lost)
        self._counters.misses["corrupt"] += len(lost)
        if lost:
            first = next(number for number in absent if keys[number] in lost)
            raise PageNotFoundError(
                f"page {keys[first].hex()} (number {first} of {len(keys)}) was damaged in the "
                "store and has been forgotten: compute it"
            )
        wanted = min(len(pages), max(1, self._pool.num_slots // 2))
        slots = self.moves.take_slots(wanted, at_least=0, spare_held=True, clean_only=True)
        placed: list[tuple[int, Page]] = []
        for number, page in pages.items():
            if slots and keys[number] not in self.places.index:
                self.places.index[keys[number]] = page
                self.places.place(page, slots.pop(0), PageState.LOADING)
                placed.append((number, page))
        for slot in slots:
            self._pool.free(slot)
        with self.places.unlocked():
            for number, page in placed:
                self._view(page)[...] = out[number]
        for _, page in reversed(placed):
            self.places.publish(page)

    def _hold_run(self, keys: Sequence[PageKey]) -> list[Page]:
        run: list[Page] = []
        for number in range(self._match(keys)):
            page = self.places.index.get(keys[number])
            if page is None:
                page = _keyed(keys, number)
                page.row, page.exact = self.moves.find_row(keys[number]), True
                self.places.index[keys[number]] = page
            self.places.add_holder(page)
            run.append(page)
        self.places.wait_ready(run)
        return run

    def _count_hits(self, num_resident: int, num_run: int, num_usable: int, num_keys: int) -> None:
        self._counters.num_pool_hits += min(num_resident, num_usable)
        self._counters.num_store_hits += max(0, num_usable - num_resident)
        self._counters.misses["corrupt"] += num_run - num_usable
        self._counters.misses["absent"] += num_keys - num_run

    def _view(self, page: Page) -> Array:
        assert page.slot is not None
        return self._pool.page(page.slot)


def _keyed(keys: Sequence[PageKey], number: int) -> Page:
    page = Page()
    page.key = keys[number]
    if isinstance(keys, PageKeys):
        page.parent = keys.parents[number]
        page.tokens = keys.tokens[number]
        page.salt = keys.salt
    return page


def _bits(page: Array) -> Array:
    return page.view(f"u{page.dtype.itemsize}")
