"""``Room``: how slots of one layer group's pool become free, and pages from disk get into them."""

import logging
from collections.abc import Sequence
from itertools import islice

from pagedkv.errors import PoolExhaustedError, StoreError, StoreFullError
from pagedkv.moves import Mover
from pagedkv.page import Page, PageState
from pagedkv.writer import Writer

logger = logging.getLogger("pagedkv")

_AHEAD = 4
"""A quarter of the pool is kept free or clean, and written at once: a commit takes about as long
for few pages as for many."""


class Room:
    """Takes slots of one spec's pool.

    Pages that no sequence holds leave the pool first, in the policy's order, and may be forgotten
    when no store takes them. A thread writes them ahead of time, so that who needs a slot seldom
    waits for the disk; where it is too slow, they wait for it. Pages of live sequences leave only
    when nothing else can, the longest resident first, and never without an exact copy below;
    whoever needs their slot writes them.

    Every method is called with the cache's lock held, unless it says otherwise; it may be released
    meanwhile, so that what was true before a call must be looked at again after it.

    Args:
        moves: Reads and writes the pages.
    """

    def __init__(self, moves: Mover) -> None:
        self.moves = moves
        self.places = moves.places
        self._pool = moves.places.pool
        self._counters = moves.places.counters
        self._num_ahead = max(1, self._pool.num_slots // _AHEAD)
        self._num_quiet = 0  # so often not to look again, since nothing was to be written
        name = f"pagedkv-write-{moves.places.spec.group}"
        self.writer = Writer(self.places.lock, self._write_ahead, name)

    def take_slots(
        self,
        count: int,
        *,
        at_least: int,
        spare_held: bool,
        after: Page | None = None,
        clean_only: bool = False,
        forget: bool = False,
    ) -> list[int]:
        """Free and allocate up to ``count`` slots.

        Args:
            count: Slots wanted.
            at_least: Fewer than this many is an error.
            spare_held: Leave the pages of live sequences where they are.
            after: Prefer the slots behind this page's.
            clean_only: Evict only what is on disk already: wait for nothing.
            forget: Rather forget cached pages than fail because they cannot be written.

        Raises:
            PoolExhaustedError: Fewer than ``at_least`` could be had.
            StoreError: A page could not be written; it is still where it was.
            ClosedError: The cache was closed meanwhile.
        """
        ticket: int | None = None
        can_write = self.moves.can_write
        self.moves.look_again()
        while True:
            missing = count - self._pool.num_free
            if missing <= 0:
                slots = self._pool.allocate(count, None if after is None else after.slot)
                if self.moves.can_write and self._is_low():
                    self.writer.hint()
                return slots
            front = self.places.front(missing)
            num_evicted = 0
            for page in front:
                if page.state is PageState.READY and self.moves.is_safe(page):
                    self._counters.num_pages_refused += can_write and page.row is None
                    self.places.evict(page)
                    num_evicted += 1
            if num_evicted == missing:
                continue
            if not clean_only:
                if num_evicted < len(front):
                    ticket = self._await_writer(ticket, missing - num_evicted, forget=forget)
                    continue
                if not spare_held and self._move_held(missing - num_evicted):
                    continue
            if self._pool.num_free >= at_least:
                count = min(count, self._pool.num_free)
            elif self.places.num_moving or self.places.num_copying:
                self.places.lock.wait()
            else:
                raise self._exhausted(at_least)

    def take_quickly(self) -> int | None:
        """One slot that is free, or held by a clean page that is the next to leave; else None.

        Does not let go of the lock.
        """
        can_write = self.moves.can_write
        self.moves.look_again()
        if self._pool.num_free:
            slot = self._pool.allocate_one()
        else:
            for page in self.places.front(1):
                if page.state is PageState.READY and self.moves.is_safe(page):
                    self._counters.num_pages_refused += can_write and page.row is None
                    slot = self.places.take_over(page)
                    break
            else:
                return None
        if can_write and self._is_low():
            self.writer.hint()
        return slot

    def take_some(
        self, count: int, after: Page | None = None, *, forget: bool = False
    ) -> list[int]:
        """Between 1 and ``count`` slots: those that pages nobody holds can leave, or else one.

        Raises:
            PoolExhaustedError: Not even one could be had.
            StoreError: A page could not be written; it is still where it was.
        """
        slots = self.take_slots(count, at_least=0, spare_held=True, after=after, forget=forget)
        return slots or self.take_slots(1, at_least=1, spare_held=False, after=after, forget=forget)

    def promote(
        self,
        pages: Sequence[Page],
        *,
        at_least: int,
        spare_held: bool,
    ) -> None:
        """Read pages that are only on disk into the pool, the leading ones if not all fit.

        A page that turns out damaged has lost its row afterwards, and perhaps all it had.

        Raises:
            PoolExhaustedError: Fewer than ``at_least`` slots could be had; nothing was read.
        """
        absent = [p for p in dict.fromkeys(pages) if p.slot is None and not p.is_lost]
        slots = self.take_slots(len(absent), at_least=at_least, spare_held=spare_held)
        loading: list[Page] = []
        try:
            for page in absent:
                if slots and page.slot is None and page.state is PageState.READY:
                    loading.append(page)
                    self.places.place(page, slots.pop(0), PageState.LOADING)
            while loading:
                self._load(loading[: self.moves.batch])
                del loading[: self.moves.batch]
        finally:
            for slot in slots:
                self._pool.free(slot)
            self.places.withdraw([p for p in loading if p.state is PageState.LOADING])
        self.places.wait_ready([page for page in absent if page.slot is None])
        self.places.wait_readable(pages)

    # -- inside ------------------------------------------------------------------------------

    def _load(self, pages: Sequence[Page]) -> None:
        """Read pages into the slots in which they were placed."""
        homes = [self._pool.page(page.slot) for page in pages if page.slot is not None]
        lost = self.moves.read_pages(pages, homes)
        good = [page for page in pages if page.key not in lost]
        for page in good:
            if page.spill is None:
                page.exact = True
        self.places.withdraw([page for page in pages if page.key in lost])
        self.places.publish(good)

    def _is_low(self) -> bool:
        """Whether so few slots are free, or clean, that pages should be written ahead."""
        places = self.places
        if self._num_quiet > 0:
            self._num_quiet -= 1
            return False
        return self._pool.num_free + places.num_clean < self._num_ahead and places.num_dirty > 0

    def _write_ahead(self) -> bool:
        """Write the next pages to leave, in the writer's thread; whether more should follow."""
        self.moves.look_again()
        batch = self.moves.front_to_write(min(self._num_ahead, self.moves.batch))
        self.moves.write(batch, spill=False)
        self._num_quiet = 0 if batch else self._num_ahead
        return bool(batch) and self._is_low()

    def _await_writer(self, ticket: int | None, count: int, *, forget: bool) -> int | None:
        """Wait until something has changed; the ticket of the request to write.

        Raises:
            StoreError: The writing failed, and nothing may be forgotten instead.
        """
        error = None if ticket is None else self.writer.error_since(ticket)
        if error is None:
            if ticket is None:
                ticket = self.writer.ask()
            else:
                self.writer.ask_again()
            self.places.lock.wait()
            return ticket
        if not (isinstance(error, StoreFullError) or (forget and isinstance(error, StoreError))):
            raise error
        front = self.places.front(count)
        pages = [page for page in front if page.state is PageState.READY]
        if front and not pages:  # the writer tries again
            self.places.lock.wait()
            return ticket
        if not front:
            raise error
        logger.warning("cannot write, forgetting cached pages: %s", error)
        for page in pages:
            self.places.evict(page)
        return None

    def _move_held(self, count: int) -> bool:
        """Free up to ``count`` slots of live sequences, or make that possible; whether it did."""
        can_write = self.moves.can_write
        movable = (p for p in self.places.held_candidates() if can_write or self.moves.is_safe(p))
        pages = list(islice(movable, count))
        unsafe = []
        for page in pages:
            if self.moves.is_safe(page):
                self.places.evict(page)
            else:
                unsafe.append(page)
        self.moves.write(unsafe, spill=True)
        return bool(pages)

    def _exhausted(self, count: int) -> PoolExhaustedError:
        store = self.moves.store
        where = (
            "there is no store to spill to"
            if store is None
            else "the store is read-only"
            if store.read_only
            else "the others may not leave now"
        )
        return PoolExhaustedError(
            f"{count} more slots are needed, but of the pool's {self._pool.num_slots}, "
            f"{self._pool.num_free} are free, {self._pool.num_pinned} are pinned and "
            f"{self.places.num_resident_held} hold pages of live sequences, and {where}: close "
            "sequences, give the cache more slots, or a writable store"
        )
