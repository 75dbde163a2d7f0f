"""``TwoQueue``: new pages are on trial; what comes again after it stays as LRU says."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from pagedkv.policies.entries import Entry, Queue
from pagedkv.policies.entry_policy import EntryPolicy
from pagedkv.spec import PageKey


class TwoQueue(EntryPolicy):
    """2Q: new pages pass a first-in-first-out queue; those asked for again later are kept by LRU.

    The queue of the new, A1in, holds a quarter of the slots; uses there do not count. What leaves
    it is remembered, half as many pages as there are slots (A1out), and a page that comes again
    meanwhile enters Am, the queue of the least recently used. Three microseconds a page.

    Source: T. Johnson, D. Shasha, "2Q: a low overhead high performance buffer management
    replacement algorithm", VLDB 1994.
    """

    name: ClassVar[str] = "2q"

    def __init__(self) -> None:
        super().__init__()
        self._new, self._main = Queue(), Queue()  # A1in, Am
        self._ghosts: OrderedDict[PageKey, None] = OrderedDict()  # A1out
        self._num_new = self._num_ghosts = 0

    def start(self, num_slots: int) -> None:
        """Size the queue of the new, and the memory of what left it."""
        super().start(num_slots)
        self._num_new = num_slots // 4
        self._num_ghosts = num_slots // 2

    def _come(self, entry: Entry) -> None:
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main.append(entry)
        else:
            self._new.append(entry)

    def _touch(self, entry: Entry) -> None:
        if entry.queue is self._main:
            self._main.move_to_end(entry)

    def _next(self) -> Entry | None:
        for queue in self._by_turn():
            if (entry := self._first_free(queue)) is not None:
                queue.remove(entry)
                return entry
        return None

    def _remember(self, entry: Entry) -> None:
        if entry.queue is self._new:
            self._ghosts[entry.key] = None

    def _forget(self, key: PageKey) -> None:
        self._ghosts.pop(key, None)

    def _end_request(self) -> None:
        while len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def _ranking(self) -> Iterable[Entry]:
        return chain(*self._by_turn())

    def _by_turn(self) -> tuple[Queue, Queue]:
        """The queue that a page is to leave, and the one to turn to if none of it may."""
        new, main = self._new, self._main
        return (new, main) if len(new) > self._num_new else (main, new)
