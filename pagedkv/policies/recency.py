"""``LRU`` and ``FIFO``: pages leave in the order in which they were used, or came."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import filterfalse
from typing import ClassVar

from pagedkv.spec import PageKey


class LRU:
    """Least recently used: the page whose last use is longest ago leaves first.

    Of one use the root counts as the last, so that it stays longest. Takes about half a microsecond
    a page.

    Source: P. J. Denning, "The working set model for program behavior", CACM 11 (1968), for the
    idea that what was used lately is used again.
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[PageKey, PageKey | None] = OrderedDict()  # parents by key
        self._num_children: dict[PageKey, int] = {}  # of those that have a candidate as a child

    def start(self, num_slots: int) -> None:
        """Nothing depends on the number of slots."""

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Make the pages the last to leave, the first of ``keys`` the very last."""
        order, num_children = self._order, self._num_children
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            if key in order:
                order.move_to_end(key)
            else:
                order[key] = parent
                if parent is not None:
                    num_children[parent] = num_children.get(parent, 0) + 1

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Take the pages out of the order; ``use`` puts them at its end."""
        self._leave(keys)

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages."""
        self._leave(keys)

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages, if there are such."""
        self._leave([key for key in keys if key in self._order])

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the least recently used first, but children before parents."""
        order, num_children = self._order, self._num_children
        gone: dict[PageKey, int] = {}  # children that were named
        passed: set[PageKey] = set()  # whose children had not all been named
        for key in order:
            at: PageKey | None = key
            while at is not None and num_children.get(at, 0) == gone.get(at, 0):
                yield at
                passed.discard(at)
                at = order[at]
                if at is not None:
                    gone[at] = gone.get(at, 0) + 1
                    if at not in passed:  # its own turn comes
                        break
            else:
                if at is not None:
                    passed.add(at)

    def upcoming(self) -> Iterator[PageKey]:
        """The same as ``victims``."""
        return self.victims()

    def __len__(self) -> int:
        return len(self._order)

    def _leave(self, keys: Sequence[PageKey]) -> None:
        order, num_children = self._order, self._num_children
        for key in keys:
            parent = order.pop(key)
            if parent is not None:
                left = num_children[parent] - 1
                if left:
                    num_children[parent] = left
                else:
                    del num_children[parent]

