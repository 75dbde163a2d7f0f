"""``LRU``: pages leave in the order in which they were used."""

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import chain
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
        # Older than all in the order, but hindered by a child or a holder; parents by key.
        self._parked: dict[PageKey, PageKey | None] = {}
        self._places: dict[PageKey, int] = {}  # of what is parked: which one is older
        self._num_parked = 0  # so far
        self._freed: list[tuple[int, PageKey]] = []  # of what is parked; some are hindered again

    def start(self, num_slots: int) -> None:
        """Nothing depends on the number of slots."""

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Make the pages the last to leave, the first of ``keys`` the very last."""
        order, parked, num_children = self._order, self._parked, self._num_children
        if len(keys) == 1 and keys[0] in order:  # of single pages, half of the time
            order.move_to_end(keys[0])
            return
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            if key in order:
                order.move_to_end(key)
            elif parked and key in parked:
                order[key] = self._unpark(key)
            else:
                order[key] = parent
                if parent in num_children:
                    num_children[parent] += 1
                elif parent is not None:
                    num_children[parent] = 1

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Take the pages out of the order; ``use`` puts them at its end."""
        self.evict(keys)

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages."""
        order, parked, num_children = self._order, self._parked, self._num_children
        for key in keys:
            try:
                parent = order.pop(key)
            except KeyError:
                parent = self._unpark(key)
            if parent is not None:  # as in _drop_child, which would take a third of the time
                if num_children[parent] > 1:
                    num_children[parent] -= 1
                else:
                    del num_children[parent]
                    if parked and parent in parked:
                        self._freed.append((self._places[parent], parent))

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages, if there are such."""
        self.evict([key for key in keys if key in self._order or key in self._parked])

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the least recently used first, but children before parents."""
        return self._leaving(())

    def upcoming(self) -> Iterator[PageKey]:
        """The same as ``victims``."""
        return self.victims()

    def __len__(self) -> int:
        return len(self._order) + len(self._parked)

    # -- inside ------------------------------------------------------------------------------

    def _leaving(self, held: Container[PageKey]) -> Iterator[PageKey]:
        """All that is not held.

        The oldest ones are parked as long as they are hindered, so that they are met only once.
        """
        self._park(held)
        order, num_children, parked = self._order, self._num_children, self._parked
        first = None
        if order and not self._freed:  # often one is enough
            first = next(iter(order))
            yield first
        named: dict[PageKey, int] = {}  # children that were named, by parent that has several
        childless: set[PageKey] = set()  # parents whose children were all named
        passed: set[PageKey] = set()  # met before their children

        def name(parent: PageKey) -> bool:
            """Count a child that was named; whether it was the last one."""
            named[parent] = named.get(parent, 0) + 1
            return named[parent] == num_children[parent]

        freed = [(key, parked[key]) for _, key in self._freed]
        for key, parent in chain(freed, order.items()) if freed else order.items():
            if key in held:
                continue
            if key in num_children and key not in childless:
                passed.add(key)
                continue
            if key is not first:
                yield key
            at = parent
            while at is not None and (num_children[at] == 1 or name(at)):
                childless.add(at)
                if at in held or not (at in passed or at in parked):  # its own turn comes
                    break
                yield at
                at = order[at] if at in passed else parked[at]

    def _park(self, held: Container[PageKey]) -> None:
        """Park what is hindered of the oldest, and sort out who is no more."""
        order, num_children = self._order, self._num_children
        while order:
            key = next(iter(order))
            if key not in num_children and key not in held:
                break
            self._num_parked += 1
            self._places[key] = self._num_parked
            self._parked[key] = order.pop(key)
        if self._freed:
            places = self._places
            self._freed = sorted(
                (place, key)
                for place, key in set(self._freed)
                if places.get(key) == place and key not in num_children and key not in held
            )

    def _unpark(self, key: PageKey) -> PageKey | None:
        """Take a page from where the hindered are; its parent. ``KeyError`` if it is not there."""
        parent = self._parked.pop(key)
        del self._places[key]
        return parent

    def _drop_child(self, parent: PageKey | None) -> None:
        if parent is not None:
            left = self._num_children[parent] - 1
            if left:
                self._num_children[parent] = left
            else:
                del self._num_children[parent]
                if parent in self._parked:
                    self._freed.append((self._places[parent], parent))
