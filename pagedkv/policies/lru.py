"""``LRU``: pages leave in the order in which they were used."""

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import ClassVar

from pagedkv.spec import PageKey


class LRU:
    """Least recently used: the page whose last use is longest ago leaves first.

    Of one use the root counts as the last, so that it stays longest. Half a microsecond a page.

    Source: P. J. Denning, "The working set model for program behavior", CACM 11 (1968).
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[PageKey, PageKey | None] = OrderedDict()  # parents by key
        self._num_children: dict[PageKey, int] = {}  # candidates by parent, where there are any

    def start(self, num_slots: int) -> None:
        """Nothing depends on the number of slots."""

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Make the pages the last to leave, the first of ``keys`` the very last."""
        order, num_children = self._order, self._num_children
        if len(keys) == 1 and keys[0] in order:  # of single pages, half of the time
            order.move_to_end(keys[0])
            return
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            if key in order:
                order.move_to_end(key)
            else:
                order[key] = parent
                if parent is not None:
                    num_children[parent] = num_children.get(parent, 0) + 1

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Take the pages out of the order; ``use`` puts them at its end."""
        order = self._order
        for key in keys:
            self._drop_child(order.pop(key))

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages."""
        order, num_children = self._order, self._num_children
        for key in keys:
            parent = order.pop(key)
            if parent is not None:  # as in _drop_child, which would take a third of the time
                left = num_children[parent] - 1
                if left:
                    num_children[parent] = left
                else:
                    del num_children[parent]

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages, if there are such."""
        self.evict([key for key in keys if key in self._order])

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the least recently used first, but children before parents."""
        return self._leaving(())

    def upcoming(self) -> Iterator[PageKey]:
        """The same as ``victims``."""
        return self.victims()

    def __len__(self) -> int:
        return len(self._order)

    def _leaving(self, held: Container[PageKey]) -> Iterator[PageKey]:
        """All of the order but what is held."""
        order, num_children = self._order, self._num_children
        named: dict[PageKey, int] = {}  # children that were named, by parent
        passed: set[PageKey] = set()  # met before their children
        for key in order:
            if key in held:
                continue
            if key in num_children and num_children[key] != named.get(key):
                passed.add(key)
                continue
            yield key
            parent = order[key]
            while parent is not None:
                named[parent] = named.get(parent, 0) + 1
                if parent not in passed or num_children[parent] != named[parent]:
                    break
                yield parent
                parent = order[parent]

    def _drop_child(self, parent: PageKey | None) -> None:
        if parent is not None:
            left = self._num_children[parent] - 1
            if left:
                self._num_children[parent] = left
            else:
                del self._num_children[parent]
