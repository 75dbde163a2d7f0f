"""Compiled steps of ``ReuseIndex``: what it does with its nodes (``reuse_nodes.py``).

Victims are *planned*: taken out of their lists for as long as nothing else changes, and put back in
the reverse order, which leaves every list as it was ("dancing links"; Hitotumatu and Noshita 1979).
"""

from typing import Any

from pagedkv.kernel_cache import kernel
from pagedkv.policies.reuse_model import (
    EVENTS,
    NUM_AGES,
    NUM_CELLS,
    NUM_CLASSES,
    class_of,
    learn,
    rank,
)
from pagedkv.policies.reuse_nodes import (
    EDGE,
    FIRST,
    FREE,
    GHOST,
    HEAD,
    HELD,
    IS_LRU,
    LISTED,
    LOSS,
    LRU_HITS,
    MARKED,
    NEWEST,
    NOW,
    NUM_CANDIDATES,
    NUM_FREE,
    NUM_GHOSTS,
    NUM_PLANNED,
    NUM_SHADOW,
    NUM_SLOTS,
    NUM_SWITCHES,
    OLD_GHOST,
    OLDEST,
    ORDER,
    OWN_HITS,
    PLANNED,
    RANK,
    RECENT_LRU,
    RECENT_OWN,
    REFRESH,
    RESIDENT,
    SHADOW,
    SWITCHED,
    TAIL,
    TAKEN,
    append,
    count_node,
    delist,
    enlist,
    find_ghost,
    fingerprint,
    forget,
    forget_oldest_ghost,
    grow_older,
    make_ghost,
    relist,
    unlink,
)

REFRESH_EVERY = 2000
"""Pages requested between two fits of the model."""
_MOST_SEEN = 64
_LRU_AT_FIRST = 3
"""So many times as many pages as there are slots are requested before ours is tried."""
_LRU_AGAIN = 4
"""And so many, before it is tried again."""


@kernel
def reset(nodes: Any, scalars: Any, heads: Any, cells: Any, buckets: Any, num_slots: Any) -> None:
    """Make all nodes free."""
    scalars[:] = 0
    for name in (NEWEST, OLDEST, EDGE, OLD_GHOST):
        scalars[name] = -1
    scalars[NUM_SLOTS] = num_slots
    scalars[IS_LRU] = 1
    scalars[SWITCHED] = (_LRU_AT_FIRST - _LRU_AGAIN) * num_slots
    scalars[NUM_FREE] = len(nodes)
    for node in range(len(nodes)):
        nodes[node].after = node + 1
    heads[:] = -1
    buckets[:] = -1
    cells[:, HEAD] = -1
    cells[:, TAIL] = -1
    for place in range(NUM_CELLS):
        cells[place, RANK] = place
        cells[place, ORDER] = place


# --- What the policy does -----------------------------------------------------------------------


@kernel
def _gain_child(nodes: Any, cells: Any, parent: Any) -> None:
    nodes[parent].children += 1
    if nodes[parent].flags & LISTED:
        delist(nodes, cells, parent)


@kernel
def _lose_child(nodes: Any, scalars: Any, cells: Any, parent: Any) -> None:
    nodes[parent].children -= 1
    if nodes[parent].children == 0 and not nodes[parent].flags & (HELD | PLANNED):
        enlist(nodes, scalars, cells, parent)


@kernel
def _leave(nodes: Any, scalars: Any, cells: Any, node: Any) -> None:
    """A candidate is one no longer."""
    scalars[NUM_CANDIDATES] -= 1
    if nodes[node].flags & LISTED:
        delist(nodes, cells, node)
    parent = nodes[node].parent
    if parent >= 0:
        _lose_child(nodes, scalars, cells, parent)


@kernel
def _orphan(nodes: Any, node: Any) -> None:
    """The children of a node that goes have no parent any more."""
    for child in range(len(nodes)):
        if nodes[child].flags & RESIDENT and nodes[child].parent == node:
            nodes[child].parent = -1


@kernel
def _guard(scalars: Any, sums: Any, own: Any, lru: Any, length: Any) -> None:
    """Compare with LRU; fall back to its order when ours falls behind, and try again later.

    Over all, 0.028 of LRU's hits may be lost, and a hundredth of the slots, since at first every
    loss is large. Ours is given up when it has lost half of that, or, tried again, a third of what
    was left; or a twentieth of late. It is tried again when the slots have been filled anew.
    """
    num_slots = scalars[NUM_SLOTS]
    keep = 20.0 * num_slots / (20.0 * num_slots + length)
    sums[OWN_HITS] += own
    sums[LRU_HITS] += lru
    sums[RECENT_OWN] = sums[RECENT_OWN] * keep + own
    sums[RECENT_LRU] = sums[RECENT_LRU] * keep + lru
    allowance = 0.01 * num_slots
    budget = 0.028 * sums[LRU_HITS]
    loss = sums[LRU_HITS] - sums[OWN_HITS] - allowance
    recent = sums[RECENT_OWN] + allowance - 0.95 * sums[RECENT_LRU]
    if scalars[IS_LRU]:
        has_waited = scalars[NOW] - scalars[SWITCHED] >= _LRU_AGAIN * num_slots
        if has_waited and loss <= 0.75 * budget and recent >= 0.01 * sums[RECENT_LRU]:
            scalars[IS_LRU] = 0
            scalars[FIRST] = 0
            sums[LOSS] = loss
    elif recent < 0 or loss > max(budget / 2, sums[LOSS] + (budget - sums[LOSS]) / 3):
        scalars[IS_LRU] = 1
        scalars[SWITCHED] = scalars[NOW]
        scalars[NUM_SWITCHES] += 1


@kernel
def use(
    nodes: Any,
    scalars: Any,
    sums: Any,
    heads: Any,
    cells: Any,
    statistics: Any,
    factors: Any,
    ends: Any,
    buckets: Any,
    plan: Any,
    words: Any,
    ids: Any,
    first_parent: Any,
    is_chain: Any,
) -> None:
    """Pages were used.

    ``words`` are their keys, eight int32 each, and ``ids`` their nodes, int32, -1 where a page is
    not resident: filled in. ``first_parent`` is the node of the first one's parent, or -1;
    ``is_chain`` says that each page is the parent of the next one: if not, parents are left open.
    """
    cancel(nodes, scalars, cells, plan)
    length = len(ids)
    now = scalars[NOW]
    if now >= scalars[REFRESH]:
        _refresh(scalars, cells, statistics, factors, ends)
    grow_older(nodes, scalars, heads, cells, statistics, ends)
    own, known, lru = _recall(nodes, scalars, buckets, words, ids)
    for number in range(length - 1, -1, -1):  # the root becomes the newest
        node = ids[number]
        if node < 0:
            if scalars[NUM_FREE] == 0:
                forget_oldest_ghost(nodes, scalars, heads, cells, statistics, buckets)
            node = _take_free(nodes, scalars)
            ids[number] = node
        else:
            cell = nodes[node].label * NUM_AGES + nodes[node].age
            count_node(nodes, statistics, cell, now, node, -1)
            statistics[cell, EVENTS] += 1.0 / nodes[node].length
            if nodes[node].flags & LISTED:
                delist(nodes, cells, node)
            unlink(nodes, scalars, heads, node)
        nodes[node].seen = min(nodes[node].seen + 1, _MOST_SEEN)
        nodes[node].last = now + length - 1 - number
        nodes[node].label = class_of(nodes[node].seen, known, length, number)
        append(nodes, scalars, heads, node)
        nodes[node].length = min(length, 65535)
        count_node(nodes, statistics, nodes[node].label * NUM_AGES, now, node, 1)
    _come_in(nodes, scalars, cells, ids, first_parent, is_chain)
    scalars[NOW] = now + length
    _shrink_shadow(nodes, scalars)
    _guard(scalars, sums, own, lru, length)


@kernel
def _recall(nodes: Any, scalars: Any, buckets: Any, words: Any, ids: Any) -> Any:
    """Fill in the nodes of ghosts, which are none from now on.

    Returns: the leading pages of the request that were resident, those that were remembered, and
    those that LRU would have held.
    """
    length = len(ids)
    own = 0
    while own < length and ids[own] >= 0:
        own += 1
    for number in range(own, length):
        if ids[number] < 0:
            node = find_ghost(nodes, buckets, fingerprint(words, number))
            if node >= 0:
                scalars[NUM_GHOSTS] -= 1
                nodes[node].flags &= ~GHOST & 255
                nodes[node].parent = -1
                nodes[node].children = 0
                ids[number] = node
    known = own
    while known < length and ids[known] >= 0:
        known += 1
    lru = 0
    while lru < known and nodes[ids[lru]].flags & SHADOW:
        lru += 1
    return own, known, lru


@kernel
def _take_free(nodes: Any, scalars: Any) -> Any:
    """A free node, for a page that was never seen."""
    node = scalars[FREE]
    scalars[FREE] = nodes[node].after
    scalars[NUM_FREE] -= 1
    nodes[node].flags = 0
    nodes[node].seen = 0
    nodes[node].parent = -1
    nodes[node].children = 0
    return node


@kernel
def _come_in(
    nodes: Any, scalars: Any, cells: Any, ids: Any, first_parent: Any, is_chain: Any
) -> None:
    """Make the pages candidates, children of their parents."""
    for number in range(len(ids)):
        node = ids[number]
        is_candidate = nodes[node].flags & RESIDENT and not nodes[node].flags & HELD
        if nodes[node].parent < 0:
            parent = first_parent
            if number > 0:
                parent = ids[number - 1] if is_chain else -1
            if parent >= 0 and parent != node:
                nodes[node].parent = parent
                if is_candidate:
                    _gain_child(nodes, cells, parent)
        if not is_candidate:
            nodes[node].flags = RESIDENT | nodes[node].flags & SHADOW
            scalars[NUM_CANDIDATES] += 1
            if nodes[node].parent >= 0:
                _gain_child(nodes, cells, nodes[node].parent)
    for number in range(len(ids)):
        node = ids[number]
        if nodes[node].children == 0 and not nodes[node].flags & LISTED:
            enlist(nodes, scalars, cells, node)


@kernel
def _shrink_shadow(nodes: Any, scalars: Any) -> None:
    """LRU would hold so many and no more."""
    while scalars[NUM_SHADOW] > scalars[NUM_SLOTS]:
        edge = scalars[EDGE]
        nodes[edge].flags &= ~SHADOW & 255
        scalars[EDGE] = nodes[edge].newer
        scalars[NUM_SHADOW] -= 1


@kernel
def _refresh(scalars: Any, cells: Any, statistics: Any, factors: Any, ends: Any) -> None:
    """Learn, and rank the cells anew."""
    now = scalars[NOW]
    learn(statistics, factors, ends, now)
    order = cells[:, ORDER]
    rank(statistics, order)
    for place in range(NUM_CELLS):
        cells[order[place], RANK] = place
    scalars[FIRST] = 0
    scalars[REFRESH] = now + REFRESH_EVERY


@kernel
def link(nodes: Any, scalars: Any, cells: Any, plan: Any, ids: Any, parents: Any) -> None:
    """Say who the parents of candidates are, where that is open; -1: not known."""
    cancel(nodes, scalars, cells, plan)
    for number in range(len(ids)):
        node = ids[number]
        parent = parents[number]
        if parent >= 0 and parent != node and nodes[node].parent < 0:
            nodes[node].parent = parent
            _gain_child(nodes, cells, parent)


@kernel
def first_unfit(nodes: Any, ids: Any) -> Any:
    """Which is the first of these nodes that is no candidate, or was named before; -1: none."""
    unfit = -1
    for number in range(len(ids)):
        if ids[number] < 0 or nodes[ids[number]].flags & (HELD | MARKED):
            unfit = number
            break
        nodes[ids[number]].flags |= MARKED
    for number in range(len(ids) if unfit < 0 else unfit):
        nodes[ids[number]].flags &= ~MARKED & 255
    return unfit


@kernel
def hold(nodes: Any, scalars: Any, cells: Any, plan: Any, ids: Any) -> None:
    """Candidates are in use."""
    cancel(nodes, scalars, cells, plan)
    for number in range(len(ids)):
        node = ids[number]
        nodes[node].flags |= HELD
        _leave(nodes, scalars, cells, node)
        nodes[node].parent = -1  # so that it may go


@kernel
def evict(
    nodes: Any,
    scalars: Any,
    cells: Any,
    plan: Any,
    buckets: Any,
    words: Any,
    ids: Any,
    is_planned: Any,
) -> None:
    """Candidates become ghosts.

    ``words`` are their keys, eight int32 each, ``ids`` their nodes; ``is_planned`` says that they
    are the next ones of the plan, in its order: what is left of it stands.
    """
    if is_planned:
        scalars[TAKEN] += len(ids)
    else:
        cancel(nodes, scalars, cells, plan)
    for number in range(len(ids)):
        node = ids[number]
        if not is_planned:
            _leave(nodes, scalars, cells, node)
            if nodes[node].children:
                _orphan(nodes, node)
        make_ghost(nodes, scalars, buckets, node, fingerprint(words, number))


@kernel
def discard(
    nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, plan: Any, ids: Any
) -> None:
    """Pages are forgotten, candidates or held ones."""
    cancel(nodes, scalars, cells, plan)
    for number in range(len(ids)):
        node = ids[number]
        if not nodes[node].flags & HELD:
            _leave(nodes, scalars, cells, node)
        if nodes[node].children:
            _orphan(nodes, node)
        forget(nodes, scalars, heads, cells, statistics, node)


# --- Victims ------------------------------------------------------------------------------------


@kernel
def _next_victim(nodes: Any, scalars: Any, cells: Any) -> Any:
    """The listed candidate that leaves first; -1 if there is none."""
    if not scalars[IS_LRU]:
        place = scalars[FIRST]
        while place < NUM_CELLS and cells[cells[place, ORDER], HEAD] < 0:
            place += 1
        scalars[FIRST] = place
        return cells[cells[place, ORDER], HEAD] if place < NUM_CELLS else -1
    oldest = -1
    for age in range(NUM_AGES - 1, -1, -1):
        for label in range(NUM_CLASSES):
            node = cells[label * NUM_AGES + age, HEAD]
            if node >= 0 and (oldest < 0 or nodes[node].last < nodes[oldest].last):
                oldest = node
        if oldest >= 0:
            break
    return oldest


@kernel
def extend(nodes: Any, scalars: Any, cells: Any, plan: Any, count: Any) -> Any:
    """Plan up to ``count`` more victims; how many there were."""
    planned = scalars[NUM_PLANNED]
    added = 0
    while added < count:
        node = _next_victim(nodes, scalars, cells)
        if node < 0:
            break
        delist(nodes, cells, node)
        nodes[node].flags |= PLANNED
        plan[planned + added] = node
        added += 1
        scalars[NUM_CANDIDATES] -= 1
        parent = nodes[node].parent
        if parent >= 0:
            _lose_child(nodes, scalars, cells, parent)
    scalars[NUM_PLANNED] = planned + added
    return added


@kernel
def cancel(nodes: Any, scalars: Any, cells: Any, plan: Any) -> None:
    """Put what is left of the plan back."""
    while scalars[NUM_PLANNED] > scalars[TAKEN]:
        scalars[NUM_PLANNED] -= 1
        node = plan[scalars[NUM_PLANNED]]
        parent = nodes[node].parent
        if parent >= 0:
            if nodes[parent].flags & LISTED:
                delist(nodes, cells, parent)
            nodes[parent].children += 1
        relist(nodes, cells, node)
        nodes[node].flags &= ~PLANNED & 255
        scalars[NUM_CANDIDATES] += 1
        cell = nodes[node].label * NUM_AGES + nodes[node].age
        scalars[FIRST] = min(scalars[FIRST], cells[cell, RANK])
    scalars[NUM_PLANNED] = scalars[TAKEN] = 0
