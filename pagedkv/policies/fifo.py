"""``FIFO``: pages leave in the order in which they came."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pagedkv.policies.lru import LRU
from pagedkv.spec import PageKey


class FIFO(LRU):
    """First in, first out: the page that came first leaves first; uses do not count.

    A page that must wait for its children leaves right after the last of them, as if it had come
    with them. Half a microsecond a page.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self._held: set[PageKey] = set()  # these keep their places in the order

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Make unknown pages, with those of ``keys`` before them, the last to leave."""
        order, parked, held = self._order, self._parked, self._held
        num_children = self._num_children
        has_come = False
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            if key in order or (parked and key in parked):
                if has_come:
                    if key in parked:
                        order[key] = self._unpark(key)
                    order.move_to_end(key)
                if key not in held:
                    continue
                held.discard(key)
                if key in order:
                    parent = order[key]  # noqa: PLW2901
                else:
                    parent = parked[key]  # noqa: PLW2901
                    self._freed.append((self._places[key], key))
            else:
                has_come = True
                order[key] = parent
            if parent in num_children:
                num_children[parent] += 1
            elif parent is not None:
                num_children[parent] = 1

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Let the pages keep their places, though they are no candidates."""
        order, held = self._order, self._held
        for key in keys:
            if key in held:
                raise KeyError(key)
            self._drop_child(order[key] if key in order else self._parked[key])
            held.add(key)

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages."""
        if not self._held.isdisjoint(keys):
            raise KeyError(next(key for key in keys if key in self._held))
        super().evict(keys)

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages, if there are such."""
        for key in keys:
            if key in self._order or key in self._parked:
                if key in self._held:
                    self._held.discard(key)
                else:
                    self._drop_child(self._parent(key))
                if self._order.pop(key, None) is None and key in self._parked:
                    self._unpark(key)

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the first that came first, but children before parents."""
        return self._leaving(self._held)

    def __len__(self) -> int:
        return super().__len__() - len(self._held)

    def _parent(self, key: PageKey) -> PageKey | None:
        return self._order[key] if key in self._order else self._parked[key]
