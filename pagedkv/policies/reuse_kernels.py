"""Compiled steps of ``ReuseIndex``: pages as numbered nodes of fixed arrays.

A *node* is a page that is remembered: resident, or a *ghost* that has left. All of them are in one
list by last use, the *recency list*, of which each age (``reuse_model.py``) is a run; its newest
``num_slots`` nodes are what LRU would hold (its stack property; Mattson et al. 1970), so that a
shadow of LRU costs one flag a node. Candidates without candidate children are in the list of their
cell, oldest first, from which victims are taken.

Victims are *planned*: taken out of their lists for as long as nothing else changes, and put back in
the reverse order, which leaves every list as it was ("dancing links"; Hitotumatu and Noshita 1979).
"""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel
from pagedkv.policies.reuse_model import (
    EVENTS,
    EXPOSURE,
    NUM_AGES,
    NUM_CELLS,
    NUM_CLASSES,
    OCCUPANTS,
    SINCE,
    class_of,
    learn,
    rank,
)

NODE = np.dtype(
    [
        ("last", np.int64),  # time of the last use; no two nodes have the same
        ("parent", np.int32),  # of a ghost: half of its fingerprint
        ("children", np.int32),  # candidates whose parent this is; of a ghost: the other half
        ("older", np.int32),
        ("newer", np.int32),
        ("before", np.int32),  # in the list of the cell
        ("after", np.int32),  # the same; of a ghost: the next one in its bucket; the next free node
        ("label", np.int16),  # the class
        ("length", np.uint16),  # pages of the last request, or the most that fits
        ("age", np.uint8),
        ("seen", np.uint8),
        ("flags", np.uint8),
    ],
    align=True,
)
RESIDENT, GHOST, HELD, LISTED, SHADOW, PLANNED, MARKED = 1, 2, 4, 8, 16, 32, 64

(
    NOW,
    NEWEST,
    OLDEST,
    EDGE,  # the oldest node in the shadow
    NUM_SHADOW,
    NUM_SLOTS,
    FREE,
    NUM_FREE,
    NUM_GHOSTS,
    OLD_GHOST,  # no ghost is older than this node; -1 if there is none
    NUM_CANDIDATES,
    NUM_PLANNED,
    TAKEN,  # victims of the plan that have left
    FIRST,  # no cell of lower rank has candidates
    REFRESH,  # time of the next one
    IS_LRU,  # the guard's order is in force
    NUM_SWITCHES,
    SWITCHED,  # when it came into force
    NUM_SCALARS,
) = range(19)
OWN_HITS, LRU_HITS, RECENT_OWN, RECENT_LRU, LOSS, NUM_SUMS = range(6)
HEAD, TAIL, RANK, ORDER, NUM_COLUMNS = range(5)

REFRESH_EVERY = 2000
"""Pages requested between two fits of the model."""
_MOST_SEEN = 64


@kernel
def reset(nodes: Any, scalars: Any, heads: Any, cells: Any, buckets: Any, num_slots: Any) -> None:
    """Make all nodes free."""
    scalars[:] = 0
    for name in (NEWEST, OLDEST, EDGE, OLD_GHOST):
        scalars[name] = -1
    scalars[NUM_SLOTS] = num_slots
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


# --- Fingerprints of ghosts ---------------------------------------------------------------------


@kernel
def _fingerprint(words: Any, number: Any) -> Any:
    """64 bits of a key that is eight int32 words; those that differ seldom agree."""
    mixed = np.uint64(0)
    for word in range(8):
        mixed ^= np.uint64(np.uint32(words[8 * number + word]))
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@kernel
def _find_ghost(nodes: Any, buckets: Any, mixed: Any) -> Any:
    """The ghost with this fingerprint, out of its bucket now; -1 if there is none."""
    low = np.int32(np.uint32(mixed & np.uint64(0xFFFFFFFF)))
    high = np.int32(np.uint32(mixed >> np.uint64(32)))
    bucket = np.int64(mixed % np.uint64(len(buckets)))
    before = -1
    node = buckets[bucket]
    while node >= 0:
        after = nodes[node].after
        if nodes[node].parent == low and nodes[node].children == high:
            if before < 0:
                buckets[bucket] = after
            else:
                nodes[before].after = after
            return node
        before = node
        node = after
    return -1


@kernel
def _own_fingerprint(nodes: Any, node: Any) -> Any:
    low = np.uint64(np.uint32(nodes[node].parent))
    return low | np.uint64(np.uint32(nodes[node].children)) << np.uint64(32)


@kernel
def _make_ghost(nodes: Any, scalars: Any, buckets: Any, node: Any, mixed: Any) -> None:
    nodes[node].parent = np.int32(np.uint32(mixed & np.uint64(0xFFFFFFFF)))
    nodes[node].children = np.int32(np.uint32(mixed >> np.uint64(32)))
    bucket = np.int64(mixed % np.uint64(len(buckets)))
    nodes[node].after = buckets[bucket]
    buckets[bucket] = node
    nodes[node].flags = GHOST | nodes[node].flags & SHADOW
    scalars[NUM_GHOSTS] += 1
    old = scalars[OLD_GHOST]
    if old < 0 or nodes[node].last < nodes[old].last:
        scalars[OLD_GHOST] = node


# --- The recency list, ages, cells --------------------------------------------------------------


@kernel
def _count(nodes: Any, statistics: Any, cell: Any, now: Any, node: Any, sign: Any) -> None:
    """A node comes into a cell or leaves it: so much of a request as it is."""
    row = statistics[cell]
    row[EXPOSURE] += row[OCCUPANTS] * (now - row[SINCE])
    row[SINCE] = now
    row[OCCUPANTS] += sign / nodes[node].length


@kernel
def _unlink(nodes: Any, scalars: Any, heads: Any, node: Any) -> None:
    """Take a node out of the recency list, and so out of the shadow."""
    older, newer = nodes[node].older, nodes[node].newer
    age = nodes[node].age
    if heads[age] == node:
        heads[age] = newer if newer >= 0 and nodes[newer].age == age else -1
    for name in (EDGE, OLD_GHOST):
        if scalars[name] == node:
            scalars[name] = newer
    if older >= 0:
        nodes[older].newer = newer
    else:
        scalars[OLDEST] = newer
    if newer >= 0:
        nodes[newer].older = older
    else:
        scalars[NEWEST] = older
    if nodes[node].flags & SHADOW:
        nodes[node].flags &= ~SHADOW & 255
        scalars[NUM_SHADOW] -= 1


@kernel
def _append(nodes: Any, scalars: Any, heads: Any, node: Any) -> None:
    """Make a node the newest of the recency list, in the shadow."""
    newest = scalars[NEWEST]
    nodes[node].older = newest
    nodes[node].newer = -1
    if newest >= 0:
        nodes[newest].newer = node
    else:
        scalars[OLDEST] = node
    scalars[NEWEST] = node
    nodes[node].age = 0
    if heads[0] < 0:
        heads[0] = node
    if scalars[EDGE] < 0:
        scalars[EDGE] = node
    nodes[node].flags |= SHADOW
    scalars[NUM_SHADOW] += 1


@kernel
def _enlist(nodes: Any, scalars: Any, cells: Any, node: Any) -> None:
    """Put a candidate into the list of its cell: first if it is older than the first, else last."""
    cell = nodes[node].label * NUM_AGES + nodes[node].age
    head = cells[cell, HEAD]
    nodes[node].flags |= LISTED
    if head >= 0 and nodes[node].last <= nodes[head].last:
        nodes[node].before = -1
        nodes[node].after = head
        nodes[head].before = node
        cells[cell, HEAD] = node
    else:
        tail = cells[cell, TAIL]
        nodes[node].before = tail
        nodes[node].after = -1
        if tail >= 0:
            nodes[tail].after = node
        else:
            cells[cell, HEAD] = node
        cells[cell, TAIL] = node
    scalars[FIRST] = min(scalars[FIRST], cells[cell, RANK])


@kernel
def _delist(nodes: Any, cells: Any, node: Any) -> None:
    """Take a candidate out of the list of its cell; the node remembers its neighbours."""
    cell = nodes[node].label * NUM_AGES + nodes[node].age
    before, after = nodes[node].before, nodes[node].after
    if before >= 0:
        nodes[before].after = after
    else:
        cells[cell, HEAD] = after
    if after >= 0:
        nodes[after].before = before
    else:
        cells[cell, TAIL] = before
    nodes[node].flags &= ~LISTED & 255


@kernel
def _relist(nodes: Any, cells: Any, node: Any) -> None:
    """Undo the last ``_delist``."""
    cell = nodes[node].label * NUM_AGES + nodes[node].age
    before, after = nodes[node].before, nodes[node].after
    if before >= 0:
        nodes[before].after = node
    else:
        cells[cell, HEAD] = node
    if after >= 0:
        nodes[after].before = node
    else:
        cells[cell, TAIL] = node
    nodes[node].flags |= LISTED


@kernel
def _grow_older(
    nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, ends: Any
) -> None:
    """Move nodes on whose age has ended."""
    now = scalars[NOW]
    for age in range(NUM_AGES - 1):
        node = heads[age]
        while node >= 0 and now - nodes[node].last >= ends[age]:
            newer = nodes[node].newer
            heads[age] = newer if newer >= 0 and nodes[newer].age == age else -1
            cell = nodes[node].label * NUM_AGES + age
            _count(nodes, statistics, cell, now, node, -1)
            _count(nodes, statistics, cell + 1, now, node, 1)
            is_listed = nodes[node].flags & LISTED
            if is_listed:
                _delist(nodes, cells, node)
            nodes[node].age = age + 1
            if heads[age + 1] < 0:
                heads[age + 1] = node
            if is_listed:
                _enlist(nodes, scalars, cells, node)
            node = heads[age]


@kernel
def _forget(nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, node: Any) -> None:
    """Make a node free that is in no list but the recency list."""
    cell = nodes[node].label * NUM_AGES + nodes[node].age
    _count(nodes, statistics, cell, scalars[NOW], node, -1)
    _unlink(nodes, scalars, heads, node)
    nodes[node].flags = 0
    nodes[node].after = scalars[FREE]
    scalars[FREE] = node
    scalars[NUM_FREE] += 1


@kernel
def _forget_oldest_ghost(
    nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, buckets: Any
) -> None:
    node = scalars[OLD_GHOST]
    while not nodes[node].flags & GHOST:
        node = nodes[node].newer
    scalars[OLD_GHOST] = nodes[node].newer
    _find_ghost(nodes, buckets, _own_fingerprint(nodes, node))
    scalars[NUM_GHOSTS] -= 1
    _forget(nodes, scalars, heads, cells, statistics, node)


# --- What the policy does -----------------------------------------------------------------------


@kernel
def _gain_child(nodes: Any, cells: Any, parent: Any) -> None:
    nodes[parent].children += 1
    if nodes[parent].flags & LISTED:
        _delist(nodes, cells, parent)


@kernel
def _lose_child(nodes: Any, scalars: Any, cells: Any, parent: Any) -> None:
    nodes[parent].children -= 1
    if nodes[parent].children == 0 and not nodes[parent].flags & (HELD | PLANNED):
        _enlist(nodes, scalars, cells, parent)


@kernel
def _leave(nodes: Any, scalars: Any, cells: Any, node: Any) -> None:
    """A candidate is one no longer."""
    scalars[NUM_CANDIDATES] -= 1
    if nodes[node].flags & LISTED:
        _delist(nodes, cells, node)
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
        has_waited = scalars[NOW] - scalars[SWITCHED] >= 4 * num_slots
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
    _grow_older(nodes, scalars, heads, cells, statistics, ends)
    own, known, lru = _recall(nodes, scalars, buckets, words, ids)
    for number in range(length - 1, -1, -1):  # the root becomes the newest
        node = ids[number]
        if node < 0:
            if scalars[NUM_FREE] == 0:
                _forget_oldest_ghost(nodes, scalars, heads, cells, statistics, buckets)
            node = _take_free(nodes, scalars)
            ids[number] = node
        else:
            cell = nodes[node].label * NUM_AGES + nodes[node].age
            _count(nodes, statistics, cell, now, node, -1)
            statistics[cell, EVENTS] += 1.0 / nodes[node].length
            if nodes[node].flags & LISTED:
                _delist(nodes, cells, node)
            _unlink(nodes, scalars, heads, node)
        nodes[node].seen = min(nodes[node].seen + 1, _MOST_SEEN)
        nodes[node].last = now + length - 1 - number
        nodes[node].label = class_of(nodes[node].seen, known, length, number)
        _append(nodes, scalars, heads, node)
        nodes[node].length = min(length, 65535)
        _count(nodes, statistics, nodes[node].label * NUM_AGES, now, node, 1)
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
            node = _find_ghost(nodes, buckets, _fingerprint(words, number))
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
            _enlist(nodes, scalars, cells, node)


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
        _make_ghost(nodes, scalars, buckets, node, _fingerprint(words, number))


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
        _forget(nodes, scalars, heads, cells, statistics, node)


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
        _delist(nodes, cells, node)
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
                _delist(nodes, cells, parent)
            nodes[parent].children += 1
        _relist(nodes, cells, node)
        nodes[node].flags &= ~PLANNED & 255
        scalars[NUM_CANDIDATES] += 1
        cell = nodes[node].label * NUM_AGES + nodes[node].age
        scalars[FIRST] = min(scalars[FIRST], cells[cell, RANK])
    scalars[NUM_PLANNED] = scalars[TAKEN] = 0
