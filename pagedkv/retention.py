"""``Retaining``: pages that leave later than an eviction policy would have it."""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from pagedkv.policies.lru import LRU
from pagedkv.policy import EvictionPolicy
from pagedkv.spec import PageKey

_FEW = 64
"""Outdated entries that are not worth clearing away."""


@dataclass(frozen=True, slots=True)
class Retention:
    """For whom the pages of a prompt are worth more than others.

    Args:
        priority: From 1; pages of a lower one leave before. Pages without retention have 0, which
            ends it.
        ttl: Seconds after their last use until they count as all others; None for ever.

    Raises:
        ValueError: A number is out of range.
        TypeError: ``priority`` is no integer.
    """

    priority: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority is {self.priority!r}: it must be an integer")
        if self.priority < 0:
            raise ValueError(f"priority is {self.priority}: it must be at least 0")
        if self.ttl is not None and not 0 < self.ttl < math.inf:
            raise ValueError(f"ttl is {self.ttl}: it must be a positive number of seconds, or None")

    def joined(self, other: "Retention | None") -> "Retention":
        """What holds for a page of which both are wanted: the higher, the longer."""
        if other is None:
            return self
        is_for_ever = self.ttl is None or other.ttl is None
        ttl = None if is_for_ever else max(self.ttl or 0.0, other.ttl or 0.0)
        return Retention(max(self.priority, other.priority), ttl)


class Retaining:
    """An eviction policy over another one: retained pages are ranked apart, and leave last.

    Of one priority the least recently used leaves first. Retention is for whole prefixes from the
    root, so that a parent's is never less than its child's. It ends when the page leaves, or its
    time is up; but while a child of the page is retained, the page is ranked as if it had not
    ended, so that it does not leave before the child.

    Args:
        base: Ranks all other pages.
        clock: Tells the time in seconds.
    """

    name: ClassVar[str] = "retaining"

    def __init__(self, base: EvictionPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._clock = clock
        self._retained: dict[PageKey, Retention] = {}
        self._ended: set[PageKey] = set()  # those of them that only wait for their children
        self._parents: dict[PageKey, PageKey | None] = {}  # of what is retained
        self._num_children: dict[PageKey, int] = {}  # the same
        self._ranks: dict[int, LRU] = {}  # by priority
        self._places: dict[PageKey, tuple[int, PageKey | None]] = {}  # priority, parent
        self._expires: dict[PageKey, float] = {}
        self._due: list[tuple[float, PageKey]] = []  # a heap; some entries are outdated

    def retain(self, keys: Sequence[PageKey], retention: Retention) -> None:
        """Retain a prefix, whose candidates ``use`` must name next.

        Priority 0 ends that, but for what leads to another page that is retained.
        """
        self._base.discard(keys)
        self._leave(keys)
        if not retention.priority:
            self._end(keys)
            return
        for key, parent in zip(keys, (None, *keys), strict=False):
            if key not in self._retained:
                self._parents[key] = parent
                if parent is not None:
                    self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self._retained[key] = retention.joined(self._retained.get(key))
        self._ended.difference_update(keys)

    def start(self, num_slots: int) -> None:
        """Nothing: the base was started before."""

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Pages were used; the time that they are retained begins anew."""
        if not self._retained:
            self._base.use(keys, parents)
            return
        parts: dict[int, tuple[list[PageKey], list[PageKey | None]]] = {}
        for key, parent in zip(keys, parents, strict=True):
            retention = self._retained.get(key)
            priority = 0 if retention is None else retention.priority
            own_keys, own_parents = parts.setdefault(priority, ([], []))
            own_keys.append(key)
            own_parents.append(parent)
            if retention is not None:
                self._places[key] = priority, parent
                self._expires.pop(key, None)
                if retention.ttl is not None and key not in self._ended:
                    self._expire_at(key, self._clock() + retention.ttl)
        for priority, (own_keys, own_parents) in parts.items():
            self._rank(priority).use(own_keys, own_parents)

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Pages are in use: no candidates, and their time does not run."""
        self._leave(keys)
        for key in keys:
            self._expires.pop(key, None)
        self._base.hold([key for key in keys if key not in self._retained])

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Pages left; they are retained no more."""
        self._leave(keys)
        self._base.evict([key for key in keys if key not in self._retained])
        self._end(keys)

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget pages."""
        self._leave(keys)
        self._base.discard(keys)
        self._end(keys)

    def victims(self) -> Iterator[PageKey]:
        """What is not retained, then the lowest priority first."""
        self._expire()
        return chain(self._base.victims(), *self._in_order())

    def upcoming(self) -> Iterator[PageKey]:
        """The same, as of the last time that ``victims`` was called."""
        return chain(self._base.upcoming(), *self._in_order())

    def __len__(self) -> int:
        return len(self._base) + sum(len(rank) for rank in self._ranks.values())

    # -- inside ------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[Iterator[PageKey]]:
        return (self._ranks[priority].victims() for priority in sorted(self._ranks))

    def _rank(self, priority: int) -> EvictionPolicy:
        return self._ranks.setdefault(priority, LRU()) if priority else self._base

    def _leave(self, keys: Sequence[PageKey]) -> None:
        """Take retained candidates out of their ranks."""
        for key in keys:
            if key in self._places:
                priority, _ = self._places.pop(key)
                self._ranks[priority].discard((key,))
                if not len(self._ranks[priority]):
                    del self._ranks[priority]

    def _end(self, keys: Sequence[PageKey]) -> None:
        """End the retention of pages, once no child of theirs is retained.

        What is a candidate then is one of the base, as if it was used just now.
        """
        over: list[PageKey] = []
        parents: list[PageKey | None] = []
        for key in keys:
            if key in self._retained:
                self._ended.add(key)
                self._expires.pop(key, None)
            at: PageKey | None = key
            while at in self._ended and at not in self._num_children:
                if at in self._places:
                    over.append(at)
                    parents.append(self._places[at][1])
                at = self._forget(at)
        if over:
            self._leave(over)
            self._base.use(over[::-1], parents[::-1])

    def _forget(self, key: PageKey) -> PageKey | None:
        """Forget that a page is retained; its parent."""
        del self._retained[key]
        self._ended.discard(key)
        parent = self._parents.pop(key)
        if parent is not None:
            left = self._num_children[parent] - 1
            if left:
                self._num_children[parent] = left
            else:
                del self._num_children[parent]
        return parent

    def _expire_at(self, key: PageKey, expires: float) -> None:
        self._expires[key] = expires
        heapq.heappush(self._due, (expires, key))
        if len(self._due) > 2 * len(self._expires) + _FEW:  # most are outdated
            self._due = [(at, one) for one, at in self._expires.items()]
            heapq.heapify(self._due)

    def _expire(self) -> None:
        """End the retention of those whose time is up."""
        now = self._clock() if self._due else 0.0
        over: list[PageKey] = []
        while self._due and self._due[0][0] <= now:
            expires, key = heapq.heappop(self._due)
            if self._expires.get(key) == expires:
                del self._expires[key]
                over.append(key)
        self._end(over)
