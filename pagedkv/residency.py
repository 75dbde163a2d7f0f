"""``Residency``: which page is in which slot, who holds it, and which may leave."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from pagedkv.dropped import DroppedPages
from pagedkv.format import StoreRow
from pagedkv.lock import CacheLock
from pagedkv.memory import Numbers
from pagedkv.page import Page, PageState
from pagedkv.page_index import PageIndex
from pagedkv.policy import EvictionPolicy
from pagedkv.pool import SlotPool
from pagedkv.retention import Retaining, Retention
from pagedkv.spec import KVSpec, PageKey
from pagedkv.spill import SpillFile
from pagedkv.stats import Counters

_READY, _LOADING = PageState.READY, PageState.LOADING


class Residency:
    """The bookkeeping of one spec's pages: slots, holders, pins, rankings. It does no I/O.

    The policy ranks the resident pages that no sequence holds; what is in use by a caller then
    becomes a candidate at the end of that use. Every method is called with ``lock`` held. A page
    that is ``LOADING`` or ``WRITING`` belongs to the thread that set it; a pin keeps a slot's page
    where it is.

    Args:
        spec: Geometry of a page.
        pool: The slots.
        policy: Ranks what may leave; must be empty.
        lock: The cache's lock; notified of every finished move.
        counters: The cache's counters.
    """

    def __init__(
        self,
        *,
        spec: KVSpec,
        pool: SlotPool,
        policy: EvictionPolicy,
        lock: CacheLock,
        counters: Counters,
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.lock = lock
        self.counters = counters
        self.index = PageIndex()
        """Pages with a key that are resident, or held by a sequence."""
        self.num_held = 0
        """Pages of live sequences, wherever they are."""
        self.num_holders = 0
        """The sum of all ref counts."""
        self.num_moving = 0
        """Pages that are ``LOADING`` or ``WRITING``."""
        self.num_copying = 0
        """Threads inside ``copying``."""
        self.num_clean = 0
        """Pages among the policy's candidates that are in the store."""
        self.num_dirty = 0
        """The other candidates of the policy."""
        self.spill: SpillFile | None = None
        """Exact copies of pages of live sequences, once there are any."""
        self.version = 0
        """Changes with every change of any page's slot, or of where the store has it; not when the
        store gets a page that it had not (``set_stored``), since the page is still where it was."""
        self.dropped = DroppedPages(policy.name)
        """The pages that left last although no store had them."""
        self._policy = policy
        policy.start(pool.num_slots)
        self._owner: list[Page | None] = [None] * pool.num_slots
        self._held: OrderedDict[Page, None] = OrderedDict()  # resident and of a live sequence

    def wait_ready(self, pages: Iterable[Page]) -> None:
        """Wait until no other thread moves any of these pages: before they change, or are freed."""
        pages = tuple(pages)
        while self.num_moving and any(page.state is not _READY for page in pages):
            self.lock.wait()

    def wait_readable(self, pages: Iterable[Page]) -> None:
        """Wait until none of these pages is on its way into its slot."""
        pages = tuple(pages)
        while self.num_moving and any(page.state is _LOADING for page in pages):
            self.lock.wait()

    # -- holders and pins --------------------------------------------------------------------

    def add_holder(self, page: Page) -> None:
        """Count one more live sequence that holds the page."""
        self.add_holders((page,))

    def add_holders(self, pages: Sequence[Page]) -> None:
        """Count one more for each page of a run."""
        ranked = [*dict.fromkeys(page for page in pages if page.ranked)]
        if ranked:
            self._policy.hold([_key(page) for page in ranked])
            for page in ranked:
                self._forget_rank(page)
        counted: list[Page] = []
        try:
            for page in pages:
                self._count_holder(page)
                counted.append(page)
        except BaseException:
            self.drop_holders(counted)
            raise

    def _count_holder(self, page: Page) -> None:
        if page.ref_count == 0:
            self.num_held += 1
            if page.slot is not None:
                self._held[page] = None
        page.ref_count += 1
        self.num_holders += 1

    def drop_holder(self, page: Page) -> None:
        """Count one less; a page that nobody holds becomes a candidate, or is gone."""
        self.drop_holders((page,))

    def drop_holders(self, pages: Sequence[Page]) -> None:
        """Count one less for each page of a run, root first."""
        free: list[Page] = []
        for page in reversed(pages):
            page.ref_count -= 1
            self.num_holders -= 1
            if page.ref_count == 0:
                self.num_held -= 1
                self._held.pop(page, None)
                free.append(page)
        self._settle_all(free)

    @contextmanager
    def holding(self, pages: Sequence[Page]) -> Iterator[None]:
        """Hold pages inside the block."""
        self.add_holders(pages)
        try:
            yield
        finally:
            self.drop_holders(pages)

    def pin(self, page: Page) -> None:
        """Keep a resident page in its slot."""
        assert page.slot is not None
        self.pool.pin(page.slot)

    def unpin(self, page: Page) -> None:
        """Take one pin back."""
        self.unpin_all((page,))

    def unpin_all(self, pages: Sequence[Page]) -> None:
        """Take one pin of each page of a run back, root first."""
        for page in pages:
            self.pool.unpin(_slot(page))
        self._settle_all(pages[::-1])

    @contextmanager
    def copying(self, pages: Sequence[Page]) -> Iterator[None]:
        """Pin resident pages, and let go of the lock, inside the block: for a short copy.

        Who needs a slot waits for the block's end.
        """
        self.num_copying += 1
        for page in pages:
            self.pin(page)
        try:
            with self.lock.unlocked:
                yield
        finally:
            self.num_copying -= 1
            self.unpin_all(pages)
            self.lock.notify_all()

    @contextmanager
    def using(self, slots: Numbers) -> Iterator[None]:
        """The same for many slots whose pages the caller's live sequence holds."""
        self.num_copying += 1
        self.pool.use(slots)
        try:
            with self.lock.unlocked:
                yield
        finally:
            self.num_copying -= 1
            self.pool.end_use(slots)
            self.lock.notify_all()

    def pin_run(self, first: int, stop: int) -> None:
        """Pin the slots ``first..stop - 1``, whose pages the caller holds, in little time."""
        self.pool.use(slice(first, stop))

    def unpin_run(self, pages: Sequence[Page], first: int, stop: int) -> None:
        """Take the pins of ``pin_run`` back.

        Args:
            pages: Those in the slots; the caller may have given them up meanwhile.
            first: As for ``pin_run``.
            stop: The same.
        """
        self.pool.end_use(slice(first, stop))
        self._settle_all([page for page in reversed(pages) if not page.ref_count])

    def touch(self, pages: Sequence[Page]) -> None:
        """Note that a run of pages, root first, was used."""
        ranked = [page for page in pages if page.ranked]
        if ranked:
            self._policy.use([_key(page) for page in ranked], [page.parent for page in ranked])

    def touch_one(self, page: Page) -> None:
        """Note that a candidate was used, in little time."""
        self._policy.use((page.key,), (page.parent,))  # type: ignore[arg-type] # candidates have keys

    def retain(self, pages: Sequence[Page], retention: Retention) -> None:
        """Let those of a prefix's pages that have keys and slots leave later than others.

        Those without a slot that lead to them do so too, should they come back before.
        """
        policy = self._policy
        if not isinstance(policy, Retaining):
            policy = self._policy = Retaining(policy)
        known = [page for page in dict.fromkeys(pages) if page.key is not None]
        policy.retain([_key(page) for page in known], retention)
        policy.discard([_key(page) for page in known if page.slot is None])
        self.touch(known)

    # -- slots -------------------------------------------------------------------------------

    def place(self, page: Page, slot: int, state: PageState = PageState.READY) -> None:
        """Put a page that has no slot into an allocated one."""
        assert page.slot is None
        page.slot = slot
        self.version += 1
        self._owner[slot] = page
        if page.ref_count:
            self._held[page] = None
        if state is not page.state:
            self.set_state(page, state)

    def set_state(self, page: Page, state: PageState) -> None:
        """Begin to move a page; ``publish`` or ``withdraw`` ends it."""
        self.num_moving += (state is not _READY) - (page.state is not _READY)
        page.state = state

    def begin_writing(self, pages: Sequence[Page]) -> None:
        """Begin to write pages that nobody moves."""
        for page in pages:
            page.state = PageState.WRITING
            self.num_moving += 1

    def publish(self, pages: Iterable[Page]) -> None:
        """End the ``LOADING`` or ``WRITING`` of pages.

        What nobody holds becomes a candidate, the last of ``pages`` the one that stays longest.
        """
        free: list[Page] = []
        for page in pages:
            self.num_moving -= page.state is not _READY
            page.state = _READY
            if not page.ref_count:
                free.append(page)
        self._settle_all(free)
        self.lock.notify_all()

    def withdraw(self, pages: Iterable[Page]) -> None:
        """End a ``LOADING`` that failed: the slots are free again."""
        for page in pages:
            self.set_state(page, _READY)
            self._unplace(page)
            self._settle(page)
        self.lock.notify_all()

    def set_row(self, page: Page, row: StoreRow | None, *, exact: bool) -> None:
        """Note where the store has the page, and whether it gives these very bytes back."""
        if page.ranked and (page.row is None) != (row is None):
            change = 1 if row is not None else -1
            self.num_clean += change
            self.num_dirty -= change
        page.row, page.exact = row, exact
        self.version += 1

    def add_cached(self, page: Page, slot: int) -> None:
        """Put a fresh page with a key, and no row, into a slot that has its bytes already."""
        assert page.key is not None
        page.slot = slot
        self.version += 1
        self._owner[slot] = page
        self.index[page.key] = page
        page.ranked = True
        self._policy.use((page.key,), (page.parent,))
        self.num_dirty += 1
        self.lock.notify_all()

    def take_over(self, page: Page) -> int:
        """Evict a cached page that may leave; its slot, which stays allocated."""
        slot, key = page.slot, page.key
        assert slot is not None
        assert key is not None
        self.counters.num_pages_evicted += 1
        if page.row is None:
            self.counters.num_pages_dropped += 1
            self.dropped.add(key)
            self.num_dirty -= 1
        else:
            self.num_clean -= 1
        page.ranked = False
        self._policy.evict((key,))
        del self.index[key]
        page.slot = self._owner[slot] = None
        self.version += 1
        return slot

    def set_stored(self, pages: Sequence[Page], rows: Sequence[StoreRow], *, exact: bool) -> None:
        """``set_row`` for pages that had none."""
        num_ranked = 0
        for page, row in zip(pages, rows, strict=True):
            num_ranked += page.ranked
            page.row, page.exact = row, exact
        self.num_clean += num_ranked
        self.num_dirty -= num_ranked

    def front(self, count: int) -> list[Page]:
        """The next ``count`` pages to leave, those included that are being written."""
        found: list[Page] = []
        is_pinned, index = self.pool.is_pinned, self.index
        for key in self._policy.victims():
            page = index[key]
            if not is_pinned(page.slot):  # type: ignore[arg-type] # candidates have slots
                found.append(page)
                if len(found) == count:
                    break
        return found

    def dirty_front(self, count: int, is_wanted: Callable[[Page], bool]) -> list[Page]:
        """Of the pages that may leave the next ``count`` wanted ones that the store does not have.

        Args:
            count: How many.
            is_wanted: Asked of what the store does not have.
        """
        pages = (self.index[key] for key in self._policy.upcoming())
        return list(
            islice(
                (p for p in pages if p.row is None and self.may_leave(p) and is_wanted(p)), count
            )
        )

    def candidates(self) -> Iterator[tuple[PageKey, PageKey | None]]:
        """Key and parent of the pages that no sequence holds, the first to leave first."""
        return ((key, self.index[key].parent) for key in self._policy.upcoming())

    def held_candidates(self) -> Iterator[Page]:
        """Resident pages of live sequences that may leave, the longest resident first."""
        return (page for page in self._held if self.may_leave(page))

    def may_leave(self, page: Page) -> bool:
        """Whether a resident page is neither in use nor on the move."""
        assert page.slot is not None
        return page.state is _READY and not self.pool.is_pinned(page.slot)

    @property
    def num_resident_held(self) -> int:
        """Resident pages of live sequences."""
        return len(self._held)

    def evict(self, page: Page) -> None:
        """Take the slot of a page that may leave."""
        self.counters.num_pages_evicted += 1
        if page.ref_count == 0 and page.row is None:
            self.counters.num_pages_dropped += 1
            if page.key is not None:
                self.dropped.add(page.key)
        self._unplace(page)
        if page.ref_count == 0 and page.key is not None:
            del self.index[page.key]

    def free_spill(self, page: Page) -> None:
        """Give the page's spill record back, if it has one."""
        if page.spill is not None:
            assert self.spill is not None
            self.spill.free(page.spill)
            page.spill = None

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if places, counts and rankings contradict each other."""
        self.pool.check_invariants()
        self.index.check_invariants()
        owners = [page for page in self._owner if page is not None]
        assert self.pool.num_free == self.pool.num_slots - len(owners)
        ranked = set(self._policy.upcoming())
        assert len(self._policy) == len(ranked)  # every candidate's turn comes
        for slot, page in enumerate(self._owner):
            assert page is None or page.slot == slot
            if page is not None and page.state is PageState.READY:
                assert (page in self._held) == (page.ref_count > 0)
                is_free = page.ref_count == 0 and page.key is not None
                assert page.ranked == is_free or (is_free and self.pool.is_pinned(slot))
                assert page.ranked == (page.key in ranked)
        assert len(ranked) == sum(page.ranked for page in owners)
        assert self.num_clean == sum(page.ranked and page.row is not None for page in owners)
        assert self.num_dirty == sum(page.ranked and page.row is None for page in owners)
        for key, page in self.index.items():
            assert page.key == key
            assert page.slot is not None or page.ref_count > 0
        spilled = {p for p in (*owners, *self.index.values()) if p.spill is not None}
        assert all(page.ref_count > 0 for page in spilled if page.state is PageState.READY)

    # -- inside ------------------------------------------------------------------------------

    def _settle(self, page: Page) -> None:
        self._settle_all((page,))

    def _settle_all(self, pages: Sequence[Page]) -> None:
        """Rank, or forget, pages that nobody holds, moves or uses; the first is first to leave."""
        fresh: list[Page] = []
        for page in pages:
            if page.ref_count or page.state is not _READY:
                continue
            if page.key is not None:
                self.free_spill(page)
                if page.slot is None:
                    if self.index.get(page.key) is page:
                        del self.index[page.key]
                elif not page.ranked and not self.pool.is_pinned(page.slot):
                    page.ranked = True
                    fresh.append(page)
            elif page.slot is None or not self.pool.is_pinned(page.slot):
                self.free_spill(page)
                if page.slot is not None:
                    self._unplace(page)
        if fresh:
            num_clean = sum(page.row is not None for page in fresh)
            self.num_clean += num_clean
            self.num_dirty += len(fresh) - num_clean
            fresh.reverse()
            self._policy.use([_key(page) for page in fresh], [page.parent for page in fresh])

    def _unplace(self, page: Page) -> None:
        slot = _slot(page)
        if page.ranked:
            self._policy.evict((_key(page),))
            self._forget_rank(page)
        elif page.ref_count:
            self._held.pop(page, None)
            if page.key is not None:
                self._policy.discard((page.key,))
        self._owner[slot] = None
        page.slot = None
        self.version += 1
        self.pool.free(slot)

    def _forget_rank(self, page: Page) -> None:
        page.ranked = False
        if page.row is None:
            self.num_dirty -= 1
        else:
            self.num_clean -= 1


def _slot(page: Page) -> int:
    assert page.slot is not None
    return page.slot


def _key(page: Page) -> PageKey:
    assert page.key is not None
    return page.key
