"""``ReuseIndex``'s pages as numbered nodes of fixed arrays, and the lists in which they are.

A *node* is a page that is remembered: resident, or a *ghost* that has left. All of them are in one
list by last use, the *recency list*, of which each age (``reuse_model.py``) is a run; its newest
``num_slots`` nodes are what LRU would hold (its stack property; Mattson et al. 1970), so that a
shadow of LRU costs one flag a node. Candidates without candidate children are in the list of their
cell, oldest first, from which victims are taken. Ghosts are found by a fingerprint of their keys.
"""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel
from pagedkv.policies.reuse_model import EXPOSURE, NUM_AGES, OCCUPANTS, SINCE

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


# --- Fingerprints of ghosts ---------------------------------------------------------------------


@kernel
def fingerprint(words: Any, number: Any) -> Any:
    """64 bits of a key that is eight int32 words; those that differ seldom agree."""
    mixed = np.uint64(0)
    for word in range(8):
        mixed ^= np.uint64(np.uint32(words[8 * number + word]))
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@kernel
def find_ghost(nodes: Any, buckets: Any, mixed: Any) -> Any:
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
def make_ghost(nodes: Any, scalars: Any, buckets: Any, node: Any, mixed: Any) -> None:
    """Make a resident node, which is in no list of a cell, a ghost with this fingerprint."""
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
def count_node(nodes: Any, statistics: Any, cell: Any, now: Any, node: Any, sign: Any) -> None:
    """A node comes into a cell or leaves it: so much of a request as it is."""
    row = statistics[cell]
    row[EXPOSURE] += row[OCCUPANTS] * (now - row[SINCE])
    row[SINCE] = now
    row[OCCUPANTS] += sign / nodes[node].length


@kernel
def unlink(nodes: Any, scalars: Any, heads: Any, node: Any) -> None:
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
def append(nodes: Any, scalars: Any, heads: Any, node: Any) -> None:
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
def enlist(nodes: Any, scalars: Any, cells: Any, node: Any) -> None:
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
def delist(nodes: Any, cells: Any, node: Any) -> None:
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
def relist(nodes: Any, cells: Any, node: Any) -> None:
    """Undo the last ``delist``."""
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
def grow_older(
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
            count_node(nodes, statistics, cell, now, node, -1)
            count_node(nodes, statistics, cell + 1, now, node, 1)
            is_listed = nodes[node].flags & LISTED
            if is_listed:
                delist(nodes, cells, node)
            nodes[node].age = age + 1
            if heads[age + 1] < 0:
                heads[age + 1] = node
            if is_listed:
                enlist(nodes, scalars, cells, node)
            node = heads[age]


@kernel
def forget(nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, node: Any) -> None:
    """Make a node free that is in no list but the recency list."""
    cell = nodes[node].label * NUM_AGES + nodes[node].age
    count_node(nodes, statistics, cell, scalars[NOW], node, -1)
    unlink(nodes, scalars, heads, node)
    nodes[node].flags = 0
    nodes[node].after = scalars[FREE]
    scalars[FREE] = node
    scalars[NUM_FREE] += 1


@kernel
def forget_oldest_ghost(
    nodes: Any, scalars: Any, heads: Any, cells: Any, statistics: Any, buckets: Any
) -> None:
    """Make the node of the ghost whose last use is longest ago free; there must be a ghost."""
    node = scalars[OLD_GHOST]
    while not nodes[node].flags & GHOST:
        node = nodes[node].newer
    scalars[OLD_GHOST] = nodes[node].newer
    find_ghost(nodes, buckets, _own_fingerprint(nodes, node))
    scalars[NUM_GHOSTS] -= 1
    forget(nodes, scalars, heads, cells, statistics, node)
