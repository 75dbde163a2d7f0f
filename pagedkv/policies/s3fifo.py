"""``S3FIFO``: a small queue lets go what is used once, a main one keeps the rest."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from pagedkv.policies.entries import Entry, Queue
from pagedkv.policies.entry_policy import EntryPolicy
from pagedkv.spec import PageKey


class S3FIFO(EntryPolicy):
    """Three queues: new pages pass a small one; those used twice there go on to the main one.

    The small queue holds a tenth of the slots. What leaves it is remembered, nine tenths of the
    slots at most: a page that comes again goes to the main queue at once, where a page that was
    used goes round as many times as it was used, three at most. Three microseconds a page.

    A page of the small queue whose children are candidates goes on to the main queue, used or not:
    other pages build on it. In the main queue it waits for them.

    Source: J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. As in its
    authors' libCacheSim, pages may enter the main queue until the first one has been evicted, if
    the small one is full; but only pages without a parent, since whole prompts would stay there
    long after their last use.
    """

    name: ClassVar[str] = "s3-fifo"

    def __init__(self) -> None:
        super().__init__()
        self._small, self._main = Queue(), Queue()
        self._ghosts: OrderedDict[PageKey, None] = OrderedDict()
        self._num_small = self._num_ghosts = 0
        self._has_evicted = False

    def start(self, num_slots: int) -> None:
        """Size the small queue and the memory of what left it."""
        super().start(num_slots)
        self._num_small = num_slots // 10
        self._num_ghosts = num_slots * 9 // 10

    def _come(self, entry: Entry) -> None:
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main.append(entry)
        elif not self._has_evicted and entry.parent is None and len(self._small) >= self._num_small:
            self._main.append(entry)
        else:
            self._small.append(entry)

    def _touch(self, entry: Entry) -> None:
        entry.count += 1

    def _next(self) -> Entry | None:
        if len(self._small) < self._num_small:
            return self._next_of_main() or self._next_of_small()
        return self._next_of_small() or self._next_of_main()

    def _next_of_small(self) -> Entry | None:
        small = self._small
        while (entry := small.first()) is not None:
            if entry.is_held:
                small.park(entry)
                continue
            small.remove(entry)
            if entry.count < 2 and self._may_leave(entry):
                return entry
            entry.count = 0
            self._main.append(entry)
        return None

    def _next_of_main(self) -> Entry | None:
        main = self._main
        while (entry := main.first()) is not None:
            if entry.count:
                entry.count = min(entry.count, 3) - 1
                main.move_to_end(entry)
            elif self._may_leave(entry):
                main.remove(entry)
                return entry
            else:
                main.park(entry)
        return None

    def _remember(self, entry: Entry) -> None:
        self._has_evicted = True
        if entry.queue is self._small:
            self._ghosts[entry.key] = None

    def _forget(self, key: PageKey) -> None:
        self._ghosts.pop(key, None)

    def _end_request(self) -> None:
        # Not before: what the request brings back counts, though room was made for it.
        while len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def _ranking(self) -> Iterable[Entry]:
        small, main = self._small, self._main
        unused = (
            (entry for entry in small if entry.count < 2),
            (entry for entry in main if not entry.count),
        )
        used = chain((entry for entry in small if entry.count >= 2), (e for e in main if e.count))
        return chain(*(reversed(unused) if len(small) < self._num_small else unused), used)
