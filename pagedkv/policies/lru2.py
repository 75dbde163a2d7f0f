"""``LRU2``: pages leave by their use before the last."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import ClassVar

from pagedkv.policies.entries import Entry
from pagedkv.policies.entry_policy import EntryPolicy
from pagedkv.spec import PageKey


class LRU2(EntryPolicy):
    """LRU-K with K = 2: the page whose use before the last is longest ago leaves first.

    Before all others leave the pages that were used once, the least recently used first. When a
    page was last used is remembered after it left, for four times as many pages as there are slots
    (the paper's retained information period). Uses of one request by another right after it are
    not told apart (no correlated reference period). A heap: O(log n), four microseconds a page.

    Source: E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K page replacement algorithm for
    database disk buffering", SIGMOD 1993.
    """

    name: ClassVar[str] = "lru-2"

    def __init__(self) -> None:
        super().__init__()
        self._time = 0  # in uses of pages
        self._heap: list[tuple[tuple[int, int], Entry]] = []
        self._parked: set[Entry] = set()
        self._ghosts: OrderedDict[PageKey, int] = OrderedDict()  # last uses
        self._num_ghosts = 0

    def start(self, num_slots: int) -> None:
        """Size the memory of what left."""
        super().start(num_slots)
        self._num_ghosts = 4 * num_slots

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` too if an entry is neither in the heap nor beside it."""
        super().check_invariants()
        known = set(self._entries.values())
        in_heap = [entry for _, entry in self._heap if entry in known]
        assert len(in_heap) == len(set(in_heap))
        assert self._parked <= known
        assert known == {*in_heap, *self._parked, *self._named}

    def _come(self, entry: Entry) -> None:
        self._time += 1
        entry.uses = (self._ghosts.pop(entry.key, 0), self._time)
        heappush(self._heap, (entry.uses, entry))

    def _touch(self, entry: Entry) -> None:
        self._time += 1
        entry.uses = (entry.uses[1], self._time)  # in the heap it rises when its turn comes

    def _next(self) -> Entry | None:
        heap = self._heap
        while heap:
            uses, entry = heappop(heap)
            if self._entries.get(entry.key) is not entry:
                continue
            if uses != entry.uses:
                heappush(heap, (entry.uses, entry))
            elif self._may_leave(entry):
                return entry
            else:
                self._parked.add(entry)
        return None

    def _put_back(self, entry: Entry) -> None:
        heappush(self._heap, (entry.uses, entry))

    def _unpark(self, entry: Entry) -> None:
        if entry in self._parked:
            self._parked.remove(entry)
            heappush(self._heap, (entry.uses, entry))

    def _is_parked(self, entry: Entry) -> bool:
        return entry in self._parked

    def _take_out(self, entry: Entry) -> None:
        if entry in self._parked:
            self._parked.remove(entry)
        elif len(self._heap) > 2 * len(self._entries) + 64:  # what left out of turn is in it
            known = self._entries
            self._heap = [item for item in self._heap if known.get(item[1].key) is item[1]]
            heapify(self._heap)

    def _remember(self, entry: Entry) -> None:
        self._ghosts[entry.key] = entry.uses[1]

    def _forget(self, key: PageKey) -> None:
        self._ghosts.pop(key, None)

    def _end_request(self) -> None:
        while len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def _ranking(self) -> Iterator[Entry]:
        heap = self._heap.copy()
        while heap:
            uses, entry = heappop(heap)
            if uses != entry.uses:
                heappush(heap, (entry.uses, entry))
            elif self._entries.get(entry.key) is entry:
                yield entry
