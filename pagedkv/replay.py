"""A trace replayed through an eviction policy, in one tier or in two."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pagedkv.admission import AdmissionPolicy
from pagedkv.policies.lru import LRU
from pagedkv.policy import EvictionPolicy
from pagedkv.spec import PageKey
from pagedkv.trace import Request

Batches = Iterable[list[Request]]
Advance = Callable[[int], None]
"""Is told of so many more page accesses."""


@dataclass(slots=True)
class Replay:
    """What a replay counted.

    Args:
        hits: Pages of each request's leading run that any tier held.
        store_hits: Those of them that only the store held; empty if there is none.
        num_held_hits: Requested pages that any tier held, behind a miss too.
        num_pages_written: Pages that the store took in.
    """

    hits: list[int] = field(default_factory=list)
    store_hits: list[int] = field(default_factory=list)
    num_held_hits: int = 0
    num_pages_written: int = 0


def replay_pool(
    batches: Batches,
    policy: EvictionPolicy,
    slots: int,
    *,
    is_prefix_closed: bool,
    advance: Advance,
) -> Replay:
    """Replay in one tier, as a cache does: hits are held, others make room, all are used.

    Of a request for more pages than the tier has slots the leading ones are kept.

    Args:
        batches: What ``Trace.requests`` gives.
        policy: Fresh; is started here.
        slots: Pages that the tier holds.
        is_prefix_closed: Behind the first miss of a request nothing can be held.
        advance: Is told how far it is.
    """
    policy.start(slots)
    result = Replay()
    resident: set[PageKey] = set()
    note = result.hits.append
    for batch in batches:
        num_pages = 0
        for whole, parents in batch:
            num_hits = 0
            for key in whole:
                if key not in resident:
                    break
                num_hits += 1
            note(num_hits)
            num_pages += len(whole)
            keys = whole
            if len(whole) > slots:
                keys, parents = whole[:slots], parents[:slots]  # noqa: PLW2901
            if is_prefix_closed:
                held, fresh = keys[:num_hits], keys[num_hits:]
            else:
                held = [key for key in keys if key in resident]
                fresh = [key for key in keys if key not in resident]
                result.num_held_hits += sum(key in resident for key in whole)
            if held:
                policy.hold(held)
            _make_room(policy, resident, len(resident) + len(fresh) - slots)
            resident.update(fresh)
            policy.use(keys, parents)
        advance(num_pages)
    if is_prefix_closed:
        result.num_held_hits = sum(result.hits)
    return result


def _make_room(policy: EvictionPolicy, resident: set[PageKey], missing: int) -> list[PageKey]:
    """Let as many pages leave a tier as slots are missing, if any are; those that left."""
    if missing <= 0:
        return []
    victims = list(islice(policy.victims(), missing))
    policy.evict(victims)
    resident.difference_update(victims)
    return victims


class _Store:
    """The lower tier: what leaves the pool comes in if it is admitted; LRU leaves it.

    Args:
        num_pages: How many it holds.
        admission: Says what comes in.
        parent_of: The parent of each page.
    """

    def __init__(
        self,
        num_pages: int,
        admission: AdmissionPolicy,
        parent_of: dict[PageKey, PageKey | None],
    ) -> None:
        self.held: set[PageKey] = set()
        self.num_written = 0
        self._num_pages = num_pages
        self._admission = admission
        self._parent_of = parent_of
        self._policy = LRU()
        self._policy.start(num_pages)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Held pages were read, the root first."""
        self._use(keys[::-1])

    def offer(self, leaving: Sequence[PageKey]) -> None:
        """Pages leave the pool, a child before its parent."""
        admits, held = self._admission.admits, self.held
        taken = [key for key in leaving if key not in held and admits(key)]
        if not taken:
            return
        self.num_written += len(taken)
        held.update(taken)
        self._use(taken)
        _make_room(self._policy, held, len(held) - self._num_pages)

    def _use(self, pages: Sequence[PageKey]) -> None:
        """Count pages, children before parents, as used, and with them the held ones before them.

        Else a prefix would age while what is behind it is read, or comes in.
        """
        found = dict.fromkeys(pages)
        for page in pages:
            parent = self._parent_of[page]
            while parent in self.held and parent not in found:
                found[parent] = None
                parent = self._parent_of[parent]
        used = list(found)[::-1]
        self._policy.use(used, [self._parent_of[key] for key in used])


def replay_tiers(
    batches: Batches,
    policy: EvictionPolicy,
    slots: int,
    *,
    store_slots: int,
    admission: AdmissionPolicy,
    parent_of: dict[PageKey, PageKey | None],
    advance: Advance,
) -> Replay:
    """Replay in a pool above a store.

    The leading run that either holds hits, and comes into the pool. What leaves the pool is written
    to the store, unless it is there already or not admitted; so is what does not fit into the pool.

    Args:
        batches: What ``Trace.requests`` gives.
        policy: The pool's; fresh.
        slots: Pages that the pool holds.
        store_slots: Pages that the store holds; at least 1.
        admission: Fresh.
        parent_of: The parent of each page.
        advance: Is told how far it is.
    """
    policy.start(slots)
    admission.start(slots + store_slots)
    store = _Store(store_slots, admission, parent_of)
    result = Replay()
    resident: set[PageKey] = set()
    for batch in batches:
        num_pages = 0
        for whole, parents in batch:
            num_pages += len(whole)
            admission.note(whole)
            num_hits, read = _leading_run(whole, resident, store.held)
            result.hits.append(num_hits)
            result.store_hits.append(len(read))
            result.num_held_hits += sum(key in resident or key in store.held for key in whole)
            if read:
                store.touch(read)
            keys, used_parents = whole[:slots], parents[:slots]
            held = [key for key in keys if key in resident]
            fresh = [key for key in keys if key not in resident]
            if held:
                policy.hold(held)
            store.offer(_make_room(policy, resident, len(resident) + len(fresh) - slots))
            if len(whole) > slots:
                store.offer([key for key in reversed(whole[slots:]) if key not in resident])
            resident.update(fresh)
            policy.use(keys, used_parents)
        advance(num_pages)
    result.num_pages_written = store.num_written
    return result


def _leading_run(
    keys: Sequence[PageKey], resident: set[PageKey], stored: set[PageKey]
) -> tuple[int, list[PageKey]]:
    """How many leading pages either tier holds, and those of them that only the store does."""
    read: list[PageKey] = []
    for number, key in enumerate(keys):
        if key not in resident:
            if key not in stored:
                return number, read
            read.append(key)
    return len(keys), read
