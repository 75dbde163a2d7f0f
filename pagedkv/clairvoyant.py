"""What a policy that knew all later requests would hit: the bound of every other one."""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel
from pagedkv.trace import Numbers, Trace


class Clairvoyant:
    """Replays a trace under a policy that knows what comes.

    Of pages that form prefixes it keeps, after each request, of what it held and what was
    requested, those whose next request is soonest, of equal ones the deepest last; a page that is
    never requested again is not kept. A parent's next request is never later than its child's, so
    what is kept is closed under prefixes, and no schedule hits more. It may decline to keep what
    was requested, which no policy of a cache can.

    Pages of a trace that is not chained are each taken in when they are requested, as in a cache;
    what leaves is that whose next request is furthest: L. A. Belady's MIN, "A study of replacement
    algorithms for a virtual-storage computer", IBM Systems Journal 5 (1966).

    Args:
        trace: What is replayed.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        next_access = np.empty(trace.num_pages, np.int64)
        _find_next(trace.pages, np.full(trace.num_distinct, -1, np.int64), next_access)
        self._next = next_access

    def replay(self, slots: int) -> tuple[Numbers, int]:
        """Hits of each request's leading run ``(request,)``, and of all pages on their own.

        Takes O(accesses x log accesses).
        """
        trace = self._trace
        hits = np.zeros(trace.num_requests, np.int64)
        held = np.zeros(trace.num_distinct, np.bool_)
        heap = np.empty(trace.num_pages + 1, np.int64)
        num_held_hits = _replay(
            trace.pages, trace.starts, self._next, slots, trace.is_chained, held, heap, hits
        )
        return hits, int(num_held_hits)


@kernel
def _find_next(pages: Any, seen: Any, next_access: Any) -> None:
    """The access at which each access's page is requested next; -1 for never."""
    for access in range(len(pages) - 1, -1, -1):
        page = pages[access]
        next_access[access] = seen[page]
        seen[page] = access


@kernel
def _replay(
    pages: Any,
    starts: Any,
    next_access: Any,
    slots: Any,
    may_decline: Any,
    held: Any,
    heap: Any,
    hits: Any,
) -> Any:
    """``heap``: next accesses of held pages, the latest on top; what has passed sinks down.

    A page that never comes again stands there as its own access behind the trace's end.
    """
    num_accesses = len(pages)
    num_held = 0
    num_heap = 0
    num_held_hits = 0
    for request in range(len(starts) - 1):
        start = starts[request]
        stop = starts[request + 1]
        is_leading = True
        num_new = 0
        for access in range(start, stop):
            if held[pages[access]]:
                num_held_hits += 1
                hits[request] += is_leading
            else:
                is_leading = False
                if access - start < slots:
                    num_new += 1
        if not may_decline:
            while num_held + num_new > slots:
                num_heap = _drop_top(pages, heap, num_heap, held)
                num_held -= 1
        for access in range(start, stop):
            page = pages[access]
            later = next_access[access]
            if not held[page]:
                if (later < 0 and may_decline) or (access - start >= slots and not may_decline):
                    continue
                held[page] = True
                num_held += 1
            elif later < 0 and may_decline:
                held[page] = False
                num_held -= 1
                continue
            heap[num_heap] = later if later >= 0 else num_accesses + access
            num_heap += 1
            _lift(heap, num_heap - 1)
        while num_held > slots:
            num_heap = _drop_top(pages, heap, num_heap, held)
            num_held -= 1
    return num_held_hits


@kernel
def _drop_top(pages: Any, heap: Any, num_heap: Any, held: Any) -> Any:
    top = heap[0]
    num_accesses = len(pages)
    held[pages[top if top < num_accesses else top - num_accesses]] = False
    num_heap -= 1
    moving = heap[num_heap]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= num_heap:
            break
        if child + 1 < num_heap and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= moving:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving
    return num_heap


@kernel
def _lift(heap: Any, at: Any) -> None:
    moving = heap[at]
    while at > 0:
        above = (at - 1) // 2
        if heap[above] >= moving:
            break
        heap[at] = heap[above]
        at = above
    heap[at] = moving
