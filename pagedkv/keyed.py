"""``KeyedPages``: the pages of one layer group by their keys."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import SMALL_PAGE_NBYTES, copy_pages
from pagedkv.errors import PageNotFoundError
from pagedkv.page import Page, PageState
from pagedkv.prefix import PageKeys
from pagedkv.recent import RecentKeys
from pagedkv.retention import Retention
from pagedkv.room import Room
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]

_MATCH_AT_ONCE = 256


class KeyedPages:
    """The pages of one spec, stored and found by key.

    Unless they say otherwise, methods take the cache's lock themselves; page bytes are copied
    without it.

    Args:
        room: Makes room in the group's pool.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._moves = room.moves
        self._places = room.places
        self._lock = room.places.lock
        self._pool = room.places.pool
        self._index = room.places.index
        self._counters = room.places.counters
        self._recent = RecentKeys(self._pool.num_slots)
        self._is_small = self._places.spec.page_nbytes <= SMALL_PAGE_NBYTES

    def match(self, keys: Sequence[PageKey]) -> int:
        """Length of the longest leading run of ``keys`` that any tier holds."""
        with self._lock:
            return self._match(keys)

    def put(self, keys: Sequence[PageKey], pages: Array, *, write_through: bool) -> None:
        """Add those pages ``(page, layer, kind, token, head, channel)`` that no tier holds.

        Of a prefix the deepest page goes first, so that the root stays in the pool longest.
        """
        if len(keys) == 1 and not write_through and self._put_quickly(keys, pages):
            return
        with self._lock:
            self._moves.note_request(keys)
        first_numbers = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        numbers = sorted(first_numbers.values(), reverse=type(keys) is PageKeys)
        size = max(1, self._pool.num_slots // 2)
        while numbers:
            chunk, numbers = numbers[:size], numbers[size:]
            left = self._put_chunk(keys, chunk, pages, write_through=write_through)
            if left:
                numbers = left + numbers

    def get(self, keys: Sequence[PageKey], out: Array, deadline: float | None = None) -> None:
        """Copy pages into ``out``; ``PageNotFoundError`` names the first that no tier holds.

        A page that only the store has is put into a free slot, if there is one. Into a full pool
        it comes if it was read before, not long ago: reading many pages once leaves it as it is.

        Args:
            keys: Which pages.
            out: Where to, ``(page, layer, kind, token, head, channel)``.
            deadline: Seconds that a read of the store may take.
        """
        if len(keys) == 1 and self._get_quickly(keys, out):
            return
        with self._lock:
            self._moves.note_request(keys)
            pages, stored, rows = self._locate(keys)
            known = [(n, page) for n, page in enumerate(pages) if page] if any(pages) else []
            resident = {n: page for n, page in known if page.slot is not None}
            held = {n: page for n, page in known if page.slot is None}
            at = None if len(stored) == len(keys) else np.array(stored, dtype=np.int64)
            only_stored = keys if at is None else [keys[n] for n in stored]
            with self._places.holding(list(held.values())):
                if resident:
                    self._copy_out(resident, out)
                if len(resident) < len(keys):
                    lost = self._moves.read_rows(only_stored, rows, out, at, deadline)
                    lost |= self._moves.read_pages(
                        list(held.values()), [out[n] for n in held], deadline=deadline
                    )
                    self._check_none_lost(keys, lost, len(stored) + len(held))
            self._keep_copies(keys, only_stored, stored, out)

    def acquire(self, keys: Sequence[PageKey]) -> list[Page]:
        """Pin the longest leading run of ``keys`` that any tier holds, all of it resident.

        Raises:
            PoolExhaustedError: The run does not fit beside what may not leave; nothing is pinned.
        """
        with self._lock:
            run = self.hold_run(keys)
            self._moves.note_request(keys[: len(run)])
            usable: list[Page] = []
            pinned: dict[Page, None] = {}
            try:
                num_hits = sum(page.slot is not None for page in run)
                while absent := self._pin_resident(run, pinned):
                    self._room.promote(absent, at_least=len(absent), spare_held=False)
                for page in takewhile(lambda page: page.slot is not None, run):
                    self._places.pin(page)
                    usable.append(page)
                self.count_hits(num_hits, len(run), len(usable), len(keys))
            except BaseException:
                self._places.unpin_all(usable)
                raise
            finally:
                self._places.unpin_all([*pinned])
                self._places.drop_holders(run)
            return usable

    def retain(self, keys: Sequence[PageKey], retention: Retention) -> int:
        """Retain the leading run of ``keys`` that is in the pool; how many pages that is."""
        with self._lock:
            found = [self._index.get(key) for key in keys]
            run = [page for page in takewhile(lambda p: p and p.slot is not None, found) if page]
            self._places.wait_readable(run)
            self._places.retain(run, retention)
            return len(run)

    def readonly_view(self, page: Page) -> Array:
        """The resident page, ``(layer, kind, token, head, channel)``, not writable."""
        assert page.slot is not None
        view = self._pool.page(page.slot)
        view.flags.writeable = False
        return view

    def release_pins(self, pages: Sequence[Page]) -> None:
        """Take back the pins of ``acquire``."""
        with self._lock:
            self._places.unpin_all(pages)
            self._lock.notify_all()

    def hold_run(self, keys: Sequence[PageKey]) -> list[Page]:
        """Hold the longest leading run of ``keys`` that any tier has; called with the lock held.

        The caller drops the holders. A page that another thread fails to load meanwhile is lost
        (``Page.is_lost``) when this returns.
        """
        length = self._match(keys)
        found = {key: page for key in keys[:length] if (page := self._index.get(key))}
        stored = {
            keys[number]: self._stored(keys, number)
            for number in range(length)
            if keys[number] not in found
        }
        run = [found.get(key) or stored[key] for key in keys[:length]]
        self._places.add_holders(run)
        try:
            for key, page in stored.items():
                self._index[key] = page
            self._places.wait_readable(run)
        except BaseException:
            self._places.drop_holders(run)
            raise
        return run

    def count_hits(self, num_resident: int, num_run: int, num_usable: int, num_keys: int) -> None:
        """Count a run of ``num_run`` of ``num_keys`` keys; called with the lock held."""
        self._counters.num_pool_hits += min(num_resident, num_usable)
        self._counters.num_store_hits += max(0, num_usable - num_resident)
        self._counters.misses["corrupt"] += num_run - num_usable
        self._counters.misses["absent"] += num_keys - num_run

    # -- one small page, without Python objects that can be spared ---------------------------

    def _put_quickly(self, keys: Sequence[PageKey], pages: Array) -> bool:
        """``put`` of one page; whether it could be done under the lock, without I/O."""
        if not self._is_small or type(pages) is not np.ndarray:
            return False
        key = keys[0]
        with self._lock.mutex:
            known = self._index.get(key)
            if known is not None:
                return known.slot is not None
            if self._moves.find_row(key) is not None:
                return True
            slot = self._room.take_quickly()
            if slot is None:
                return False
            self._pool.by_page[slot] = pages[0]
            self._places.add_cached(_keyed(keys, 0), slot)
            self._moves.note_request(keys)
        return True

    def _get_quickly(self, keys: Sequence[PageKey], out: Array) -> bool:
        """``get`` of one page; whether it could be done, and nothing else than that was done."""
        if not self._is_small or type(out) is not np.ndarray:
            return False
        key, counters, moves = keys[0], self._counters, self._moves
        with self._lock.mutex:
            page = self._index.get(key)
            if page is not None:
                if page.slot is None or page.state is PageState.LOADING:
                    return False
                out[0] = self._pool.by_page[page.slot]
                if page.ranked:
                    self._places.touch_one(page)
                counters.num_pool_hits += 1
                moves.note_request(keys)
                return True
            if not moves.read_quickly(key, out[0]):
                return False
            counters.num_store_hits += 1
            moves.note_request(keys)
            if self._pool.num_free or key in self._recent:
                self._keep_copies(keys, keys, (0,), out)
            else:
                self._recent.add(keys)
        return True

    # -- inside, with the lock held ----------------------------------------------------------

    def _pin_resident(self, run: Sequence[Page], pinned: dict[Page, None]) -> list[Page]:
        """Pin those pages that are resident, and add them to ``pinned``; those that are on disk."""
        self._places.wait_readable(run)
        rest = [page for page in dict.fromkeys(run) if page not in pinned]
        for page in rest:
            if page.slot is not None:
                self._places.pin(page)
                pinned[page] = None
        return [page for page in rest if page.slot is None and not page.is_lost]

    def _match(self, keys: Sequence[PageKey]) -> int:
        """The leading run that any tier holds; other processes are asked when it ends early.

        The lock may have been released before the run was looked for, but not since.
        """
        length = self._held_run(keys)
        if length < len(keys) and self._moves.refresh():
            length = self._held_run(keys)
        return length

    def _held_run(self, keys: Sequence[PageKey]) -> int:
        for start in range(0, len(keys), _MATCH_AT_ONCE):
            numbers = range(start, min(start + _MATCH_AT_ONCE, len(keys)))
            missing = self._not_held(keys, numbers)
            if missing:
                return missing[0]
        return len(keys)

    def _not_held(self, keys: Sequence[PageKey], numbers: Sequence[int]) -> list[int]:
        """Those of the numbers whose page no tier holds; a row that was damaged does not count."""
        index = self._index
        absent = [
            n
            for n in numbers
            if (page := index.get(keys[n])) is None or (page.slot is None and page.spill is None)
        ]
        if not absent or self._moves.store is None:
            return absent
        if len(absent) == 1:
            return absent if self._moves.find_row(keys[absent[0]]) is None else []
        rows = self._moves.find_rows([keys[n] for n in absent])
        return [absent[at] for at in np.flatnonzero(rows < 0).tolist()]

    def _put_chunk(
        self, keys: Sequence[PageKey], numbers: list[int], pages: Array, *, write_through: bool
    ) -> list[int]:
        """Add the pages of these numbers, in turn; those that are left for another try, in turn."""
        with self._lock:
            batch, left = self._place_new(keys, numbers)
        if not batch:
            return left
        fresh = list(batch.values())
        end = self._places.withdraw
        try:
            copy_pages(self._pool.by_page, [_slot(page) for page in fresh], pages, list(batch))
            end = self._places.publish
        finally:
            with self._lock:
                end(fresh)
        if write_through:
            with self._lock:
                self._moves.store_pages(fresh)
        return left

    def _place_new(
        self, keys: Sequence[PageKey], numbers: list[int]
    ) -> tuple[dict[int, Page], list[int]]:
        """Give slots to those of the numbers that no tier holds; and those that are left."""
        self._keep_spilled(keys, numbers)
        wanted = self._not_held(keys, numbers)
        if not wanted:
            return {}, []
        before = self._lock.num_releases
        slots = self._room.take_some(len(wanted))[::-1]
        batch: dict[int, Page] = {}
        try:
            if before != self._lock.num_releases:  # others may have been faster
                wanted = self._not_held(keys, wanted)
            for number in wanted[: len(slots)]:
                self._detach_lost(keys[number])
                page = batch[number] = _keyed(keys, number)
                self._places.place(page, slots.pop(), PageState.LOADING)
                self._index[keys[number]] = page
        except BaseException:
            self._places.withdraw([page for page in batch.values() if page.slot is not None])
            raise
        finally:
            for slot in slots:
                self._pool.free(slot)
        return batch, wanted[len(batch) :]

    def _keep_spilled(self, keys: Sequence[PageKey], numbers: list[int]) -> None:
        """Bring pages into the pool whose bytes only the spill file has.

        They have keys, but could not be stored. They would be gone with the last sequence that
        holds them, while whoever puts them now may rely on them.
        """
        if self._places.spill is None:
            return
        found = [self._index.get(keys[number]) for number in numbers]
        for page in found:
            if page and page.slot is None and page.row is None and page.spill is not None:
                with self._places.holding([page]):
                    self._room.promote([page], at_least=1, spare_held=False)

    def _locate(
        self, keys: Sequence[PageKey]
    ) -> tuple[list[Page | None], Sequence[int], npt.NDArray[np.int64]]:
        """The pages that have places here; numbers and rows of those that only the store has.

        Raises:
            PageNotFoundError: No tier has one of them.
        """
        has_refreshed = False
        while True:
            pages = [*map(self._index.get, keys)]
            stored: Sequence[int] = range(len(keys))
            if any(pages):
                loading = [p for p in pages if p and p.state is PageState.LOADING]
                if loading:
                    self._places.wait_readable(loading)
                    continue
                pages = [None if page and page.is_lost else page for page in pages]
                stored = [n for n, page in enumerate(pages) if page is None]
            is_all = len(stored) == len(keys)
            rows = self._moves.find_rows(keys if is_all else [keys[n] for n in stored])
            missing = np.flatnonzero(rows < 0)
            if not len(missing):
                return pages, stored, rows
            if has_refreshed or not self._moves.refresh():
                number = stored[int(missing[0])]
                self._counters.misses["absent"] += 1
                raise PageNotFoundError(
                    f"page {keys[number].hex()} (number {number} of {len(keys)}) is in no tier: "
                    "compute it"
                )
            has_refreshed = True

    def _copy_out(self, resident: Mapping[int, Page], out: Array) -> None:
        """Copy resident pages to their numbers in ``out``."""
        pages = list(resident.values())
        with self._places.copying(pages):
            copy_pages(out, list(resident), self._pool.by_page, [_slot(page) for page in pages])
        self._places.touch(pages)
        self._counters.num_pool_hits += len(pages)

    def _check_none_lost(
        self, keys: Sequence[PageKey], lost: set[PageKey], num_absent: int
    ) -> None:
        """Count what was read from disk; ``PageNotFoundError`` if any of it was damaged."""
        numbers = [n for n, key in enumerate(keys) if key in lost] if lost else []
        self._counters.num_store_hits += num_absent - len(numbers)
        if numbers:
            self._counters.misses["corrupt"] += len(numbers)
            raise PageNotFoundError(
                f"page {keys[numbers[0]].hex()} (number {numbers[0]} of {len(keys)}) was damaged "
                "in the store and has been forgotten: compute it"
            )

    def _keep_copies(
        self,
        keys: Sequence[PageKey],
        stored: Sequence[PageKey],
        numbers: Sequence[int],
        out: Array,
    ) -> None:
        """Keep what was read into ``out`` in free slots; what was read before, in any clean one.

        Args:
            keys: What was asked for.
            stored: Those of them that were read from the store.
            numbers: Their places in ``keys``, and in ``out``.
            out: ``(page, layer, kind, token, head, channel)``.
        """
        again = self._recent.among(stored)
        num_free = self._pool.num_free
        if not again and not num_free:
            self._recent.add(stored)
            return
        where = dict(zip(stored, numbers, strict=True))
        most = max(1, self._pool.num_slots // 2)
        wanted = max(min(len(again), most), min(num_free, len(where)))
        slots = self._room.take_slots(wanted, at_least=0, spare_held=True, clean_only=True)[::-1]
        kept: dict[int, Page] = {}
        end = self._places.withdraw
        try:
            for key in [*again, *(where.keys() - again)]:
                row = None if key in self._index or not slots else self._moves.find_row(key)
                if row is not None:
                    page = kept[where[key]] = _keyed(keys, where[key])
                    page.row, page.exact = row, True
                    self._places.place(page, slots.pop(), PageState.LOADING)
                    self._index[key] = page
            self._recent.discard(again)
            self._recent.add([key for key in where if key not in self._index])
            kept = dict(sorted(kept.items()))
            with self._lock.unlocked:
                homes = [_slot(page) for page in kept.values()]
                copy_pages(self._pool.by_page, homes, out, list(kept))
            end = self._places.publish
        finally:
            for slot in slots:
                self._pool.free(slot)
            end([page for page in reversed(kept.values()) if page.state is PageState.LOADING])

    def _detach_lost(self, key: PageKey) -> None:
        """Take the key from a page that no tier holds any more, so that it can be put anew."""
        page = self._index.get(key)
        if page is not None:
            del self._index[key]
            page.key = page.row = None

    def _stored(self, keys: Sequence[PageKey], number: int) -> Page:
        page = _keyed(keys, number)
        page.row, page.exact = self._moves.find_row(keys[number]), True
        return page


def _slot(page: Page) -> int:
    assert page.slot is not None
    return page.slot


def _keyed(keys: Sequence[PageKey], number: int) -> Page:
    page = Page(keys[number])
    if type(keys) is PageKeys:  # much quicker than isinstance with an abstract class
        extra = b"" if keys.extra is None else keys.extra[number]
        page.name(keys[number], keys.parents[number], keys.tokens[number], keys.salt, extra)
    return page
