"""Rows of token ids in order: which of them share most leading ids with another row.

Ids are compared as their bytes. The order of these is not that of the numbers, but in any order of
this kind the rows with the longest common beginning are those beside the place where the other row
would stand: a search looks at a few of many.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

ID_NBYTES = 4
"""Bytes of one token id."""


def num_common(left: bytes, right: bytes) -> int:
    """Leading token ids that two rows have in common, each given as int32 in bytes."""
    low, high = 0, min(len(left), len(right)) + 1  # low bytes are equal, high bytes are not
    if left.startswith(right) or right.startswith(left):
        return (high - 1) // ID_NBYTES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle)
    return low // ID_NBYTES


def nearest(
    items: Sequence[Item], wanted: bytes, ids_of: Callable[[Item], bytes]
) -> Iterator[tuple[int, Item]]:
    """Those items that share leading ids with ``wanted``, those that share most of them first.

    Args:
        items: In the order of ``ids_of``; they must not change while this runs.
        wanted: Token ids as int32, in bytes.
        ids_of: The same of an item.

    Yields:
        How many leading ids are the same, at least one, and the item. Finding the first costs
        ``log2(len(items))`` calls of ``ids_of``, each other one call.
    """
    right = bisect_left(items, wanted, key=ids_of)
    left = right - 1
    on_left = _shared(items, left, wanted, ids_of)
    on_right = _shared(items, right, wanted, ids_of)
    while on_left or on_right:
        if on_left >= on_right:
            yield on_left, items[left]
            left -= 1
            on_left = _shared(items, left, wanted, ids_of)
        else:
            yield on_right, items[right]
            right += 1
            on_right = _shared(items, right, wanted, ids_of)


def _shared(items: Sequence[Item], at: int, wanted: bytes, ids_of: Callable[[Item], bytes]) -> int:
    return num_common(ids_of(items[at]), wanted) if 0 <= at < len(items) else 0
