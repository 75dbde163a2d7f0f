"""How large a tier under LRU must be for each access to hit: all capacities in one pass."""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel
from pagedkv.trace import Numbers, Trace

NEVER = 2**62
"""More slots than any tier has."""


def leading_distances(trace: Trace) -> Numbers:
    """The least number of slots with which LRU has the page, and those before it, ``(access,)``.

    An access is a hit of its request's leading run if the tier has at least so many slots; it is
    ``NEVER`` from a page on that was not requested before. Takes O(accesses x log accesses).

    Of a page and its parent the parent was always used last, so that plain LRU keeps the parents
    of what it keeps, and is what ``LRU`` does. Where a page came behind several ones that differs:
    such a trace needs a replay.

    Source: R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
    Journal 9 (1970); counted with the tree of P. M. Fenwick, "A new data structure for cumulative
    frequency tables" (1994).

    Raises:
        ValueError: The trace is chained, and a page came behind several ones.
    """
    if trace.is_chained and not trace.is_prefix_closed:
        raise ValueError(f"{trace.source} has pages with several parents: replay it")
    distances = np.empty(trace.num_pages, np.int64)
    last = np.full(trace.num_distinct, -1, np.int64)
    tree = np.zeros(trace.num_pages + 1, np.int32)
    _fill(trace.pages, trace.starts, last, tree, distances)
    return distances


@kernel
def _fill(pages: Any, starts: Any, last: Any, tree: Any, distances: Any) -> None:
    """``last``: when each page was used last; ``tree``: how many pages were used last when."""
    size = len(pages)
    num_known = 0
    for request in range(len(starts) - 1):
        start = starts[request]
        stop = starts[request + 1]
        largest = 0
        for access in range(start, stop):
            when = last[pages[access]]
            distance = NEVER
            if when >= 0:
                distance = num_known  # less those that were used before it
                at = when
                while at > 0:
                    distance -= tree[at]
                    at &= at - 1
            largest = max(largest, distance)
            distances[access] = largest
        for access in range(start, stop):
            page = pages[access]
            when = last[page]
            if when >= 0:
                at = when + 1
                while at <= size:
                    tree[at] -= 1
                    at += at & -at
            else:
                num_known += 1
            when = start + stop - 1 - access  # the root was used last
            last[page] = when
            at = when + 1
            while at <= size:
                tree[at] += 1
                at += at & -at
