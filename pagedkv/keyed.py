"""``KeyedPages``: the pages of one layer group by their keys."""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy.typing as npt

from pagedkv.errors import PageNotFoundError
from pagedkv.moves import Mover
from pagedkv.page import Page, PageState
from pagedkv.prefix import PageKeys
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]


class KeyedPages:
    """The pages of one spec, stored and found by key.

    Unless they say otherwise, methods take the cache's lock themselves; page bytes are copied
    without it.

    Args:
        moves: Moves the group's pages between the tiers.
    """

    def __init__(self, moves: Mover) -> None:
        self._moves = moves
        self._places = moves.places
        self._lock = moves.places.lock
        self._pool = moves.places.pool
        self._index = moves.places.index
        self._counters = moves.places.counters

    def match(self, keys: Sequence[PageKey]) -> int:
        """Length of the longest leading run of ``keys`` that any tier holds."""
        with self._lock:
            return self._match(keys)

    def put(self, keys: Sequence[PageKey], pages: Array, *, write_through: bool) -> None:
        """Add those pages ``(page, layer, kind, token, head, channel)`` that no tier holds.

        Of a prefix the deepest page goes first, so that the root stays in the pool longest.
        """
        numbers: dict[PageKey, int] = {}
        for number, key in enumerate(keys):
            numbers.setdefault(key, number)
        todo = deque(numbers.values())
        if isinstance(keys, PageKeys):
            todo.reverse()
        while todo:
            with self._lock:
                batch = self._start_put(keys, todo)
            num_copied = 0
            try:
                for number, page in batch:
                    self._view(page)[...] = pages[number]
                    num_copied += 1
            finally:
                with self._lock:
                    for _, page in batch[:num_copied]:
                        self._places.publish(page)
                    for _, page in batch[num_copied:]:
                        self._places.withdraw(page)
            if write_through:
                with self._lock:
                    self._moves.store_pages([page for _, page in batch])

    def get(self, keys: Sequence[PageKey], out: Array) -> None:
        """Copy pages into ``out``; ``PageNotFoundError`` names the first that no tier holds."""
        with self._lock:
            resident, absent = self._locate(keys)
            held = [page for page in absent.values() if page.ref_count]
            for page in held:
                self._places.add_holder(page)
            try:
                with self._places.copying(list(resident.values())):
                    for number, page in resident.items():
                        out[number] = self._view(page)
                self._places.touch(list(resident.values()))
                self._counters.num_pool_hits += len(resident)
                if absent:
                    self._read_absent(keys, absent, out)
            finally:
                for page in held:
                    self._places.drop_holder(page)
            self._keep_copies({n: p for n, p in absent.items() if not p.ref_count}, out)

    def acquire(self, keys: Sequence[PageKey]) -> list[Page]:
        """Pin the longest leading run of ``keys`` that any tier holds, all of it resident.

        Raises:
            PoolExhaustedError: The run does not fit beside what may not leave; nothing is pinned.
        """
        with self._lock:
            run = self.hold_run(keys)
            num_hits = sum(page.slot is not None for page in run)
            pinned: dict[Page, None] = {}
            try:
                while absent := self._pin_resident(run, pinned):
                    self._moves.promote(absent, at_least=len(absent), spare_held=False)
                usable = list(takewhile(lambda page: page.slot is not None, run))
                for page in usable:
                    self._places.pin(page)
            finally:
                for page in pinned:
                    self._places.unpin(page)
                for page in reversed(run):
                    self._places.drop_holder(page)
            self.count_hits(num_hits, len(run), len(usable), len(keys))
            return usable

    def readonly_view(self, page: Page) -> Array:
        """The resident page, ``(layer, kind, token, head, channel)``, not writable."""
        view = self._view(page)
        view.flags.writeable = False
        return view

    def release_pins(self, pages: Sequence[Page]) -> None:
        """Take back the pins of ``acquire``."""
        with self._lock:
            self._places.touch(pages)
            for page in pages:
                self._places.unpin(page)
            self._lock.notify_all()

    def hold_run(self, keys: Sequence[PageKey]) -> list[Page]:
        """Hold the longest leading run of ``keys`` that any tier has; called with the lock held.

        The caller drops the holders. A page that another thread fails to load meanwhile is lost
        (``Page.is_lost``) when this returns.
        """
        run: list[Page] = []
        for number in range(self._match(keys)):
            page = self._index.get(keys[number])
            if page is None:
                page = self._stored(keys, number)
                self._index[keys[number]] = page
            self._places.add_holder(page)
            run.append(page)
        self._places.wait_ready(run)
        return run

    def count_hits(self, num_resident: int, num_run: int, num_usable: int, num_keys: int) -> None:
        """Count a run of ``num_run`` of ``num_keys`` keys; called with the lock held."""
        self._counters.num_pool_hits += min(num_resident, num_usable)
        self._counters.num_store_hits += max(0, num_usable - num_resident)
        self._counters.misses["corrupt"] += num_run - num_usable
        self._counters.misses["absent"] += num_keys - num_run

    # -- inside, with the lock held ----------------------------------------------------------

    def _pin_resident(self, run: Sequence[Page], pinned: dict[Page, None]) -> list[Page]:
        """Pin those pages that are resident, and add them to ``pinned``; those that are on disk."""
        self._places.wait_ready(run)
        rest = [page for page in dict.fromkeys(run) if page not in pinned]
        for page in rest:
            if page.slot is not None:
                self._places.pin(page)
                pinned[page] = None
        return [page for page in rest if page.slot is None and not page.is_lost]

    def _match(self, keys: Sequence[PageKey]) -> int:
        return next((n for n, key in enumerate(keys) if not self._is_held(key)), len(keys))

    def _is_held(self, key: PageKey) -> bool:
        """Whether a tier holds the page; one whose row was found damaged is held no more."""
        page = self._index.get(key)
        if page is not None and (page.slot is not None or page.spill is not None):
            return True
        return self._moves.find_row(key) is not None

    def _start_put(self, keys: Sequence[PageKey], todo: deque[int]) -> list[tuple[int, Page]]:
        """Give slots to the next of the numbers ``todo`` that no tier holds, and take them off."""
        want: list[int] = []
        while todo and len(want) < max(1, self._pool.num_slots // 2):
            number = todo.popleft()
            if not self._is_held(keys[number]):
                want.append(number)
        if not want:
            return []
        slots = self._moves.take_some(len(want))
        batch: list[tuple[int, Page]] = []
        for place, number in enumerate(want):
            if self._is_held(keys[number]):  # another thread was faster
                continue
            if not slots:
                todo.extendleft(reversed(want[place:]))
                break
            self._detach_lost(keys[number])
            page = _keyed(keys, number)
            self._index[keys[number]] = page
            self._places.place(page, slots.pop(0), PageState.LOADING)
            batch.append((number, page))
        for slot in slots:
            self._pool.free(slot)
        return batch

    def _locate(self, keys: Sequence[PageKey]) -> tuple[dict[int, Page], dict[int, Page]]:
        """The pages by number: those in the pool, and those on disk only."""
        while moving := [p for key in keys if (p := self._index.get(key)) and not p.is_ready]:
            self._places.wait_ready(moving)
        resident: dict[int, Page] = {}
        absent: dict[int, Page] = {}
        for number, key in enumerate(keys):
            page = self._index.get(key)
            if page is not None and page.slot is not None:
                resident[number] = page
            elif not self._is_held(key):
                self._counters.misses["absent"] += 1
                raise PageNotFoundError(
                    f"page {key.hex()} (number {number} of {len(keys)}) is in no tier: compute it"
                )
            else:
                absent[number] = page or self._stored(keys, number)
        return resident, absent

    def _read_absent(self, keys: Sequence[PageKey], absent: dict[int, Page], out: Array) -> None:
        lost = self._moves.read_pages(list(absent.values()), [out[number] for number in absent])
        num_lost = sum(keys[number] in lost for number in absent)
        self._counters.num_store_hits += len(absent) - num_lost
        self._counters.misses["corrupt"] += num_lost
        if lost:
            first = next(number for number in absent if keys[number] in lost)
            raise PageNotFoundError(
                f"page {keys[first].hex()} (number {first} of {len(keys)}) was damaged in the "
                "store and has been forgotten: compute it"
            )

    def _keep_copies(self, pages: dict[int, Page], out: Array) -> None:
        """Place pages that were read into ``out`` into slots that can be had without I/O."""
        wanted = min(len(pages), max(1, self._pool.num_slots // 2))
        slots = self._moves.take_slots(wanted, at_least=0, spare_held=True, clean_only=True)
        placed: list[tuple[int, Page]] = []
        for number, page in pages.items():
            assert page.key is not None
            if slots and page.key not in self._index:
                self._index[page.key] = page
                self._places.place(page, slots.pop(0), PageState.LOADING)
                placed.append((number, page))
        for slot in slots:
            self._pool.free(slot)
        with self._places.unlocked():
            for number, page in placed:
                self._view(page)[...] = out[number]
        for _, page in reversed(placed):
            self._places.publish(page)

    def _detach_lost(self, key: PageKey) -> None:
        """Take the key from a page that no tier holds any more, so that it can be put anew."""
        page = self._index.pop(key, None)
        if page is not None:
            page.key = page.row = None

    def _stored(self, keys: Sequence[PageKey], number: int) -> Page:
        page = _keyed(keys, number)
        page.row, page.exact = self._moves.find_row(keys[number]), True
        return page

    def _view(self, page: Page) -> Array:
        assert page.slot is not None
        return self._pool.page(page.slot)


def _keyed(keys: Sequence[PageKey], number: int) -> Page:
    page = Page()
    if isinstance(keys, PageKeys):
        page.name(keys[number], keys.parents[number], keys.tokens[number], keys.salt)
    else:
        page.key = keys[number]
    return page
