"""Eviction policies: the order in which pages that no sequence holds leave the pool."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pagedkv.spec import PageKey


class EvictionPolicy(Protocol):
    """Ranks the resident pages that no live sequence holds.

    A policy knows keys, never bytes or slots. The cache calls ``add`` when a page becomes a
    candidate, ``touch`` when it is used, and ``discard`` when it has left or is held again; after
    ``discard`` no trace of the key may stay in ``victims``. Of a prefix the cache adds and touches
    the deepest page first, so that a child leaves before its parent.
    """

    def add(self, key: PageKey) -> None:
        """Make ``key`` a candidate."""

    def touch(self, key: PageKey) -> None:
        """Note that the candidate ``key`` was used."""

    def discard(self, key: PageKey) -> None:
        """Forget the candidate ``key``."""

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the first to leave first; the policy is not changed meanwhile."""

    def __len__(self) -> int:
        """How many candidates there are."""


class FIFO:
    """First in, first out: the page that became a candidate first leaves first."""

    def __init__(self) -> None:
        self._order: OrderedDict[PageKey, None] = OrderedDict()

    def add(self, key: PageKey) -> None:
        """Make ``key`` the last to leave; ``ValueError`` if it is a candidate already."""
        if key in self._order:
            raise ValueError(f"page {key.hex()[:12]} is a candidate already")
        self._order[key] = None

    def touch(self, key: PageKey) -> None:
        """Change nothing: a use does not count."""
        self._require(key)

    def discard(self, key: PageKey) -> None:
        """Forget ``key``; ``KeyError`` if it is no candidate."""
        try:
            del self._order[key]
        except KeyError:
            raise _unknown(key) from None

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the oldest first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def _require(self, key: PageKey) -> None:
        if key not in self._order:
            raise _unknown(key)


class LRU(FIFO):
    """Least recently used: the page whose last use is longest ago leaves first."""

    def touch(self, key: PageKey) -> None:
        """Make ``key`` the last to leave."""
        try:
            self._order.move_to_end(key)
        except KeyError:
            raise _unknown(key) from None


def _unknown(key: PageKey) -> KeyError:
    return KeyError(f"page {key.hex()[:12]} is no candidate")
