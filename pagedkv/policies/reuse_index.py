"""``ReuseIndex``: pages leave by a learnt chance of reuse, for the time they would be held."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pagedkv.spec import PageKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_GHOSTS_A_SLOT = 3
_MORE_GHOSTS = 32_768
_CHUNK = 32
"""Victims that are looked for at once, at first."""


class ReuseIndex:
    """PagedKV's own policy: pages leave by a learnt index, or as with LRU where that is better.

    What is learnt is how soon pages are used again, by what was known of them at their last use and
    by the time since then (``reuse_model.py``). Pages that left are remembered for a while, so
    that what was evicted too early is noticed. A shadow of LRU of the same size counts what LRU
    would have hit; while the index hits less, pages leave in LRU's order.

    Time is counted in requested pages. Nothing is random: the same calls give the same victims. It
    takes 200 bytes a slot and two megabytes; beside them Python refers to the resident keys.

    Sources: the ``reuse_….py`` beside this one name them. That a use before the last one tells more
    than the last one is LRU-2's idea (O'Neil 1993); that two orders compete by what each would have
    hit is ARC's (Megiddo and Modha 2003).
    """

    name: ClassVar[str] = "pagedkv"

    def __init__(self) -> None:
        self._nodes: dict[PageKey, int] = {}
        self._keys: list[Any] = []  # of resident nodes
        self._num_nodes = 0
        self._awaited: dict[PageKey, set[PageKey]] = {}  # children by a parent that is not here
        self._awaits: dict[PageKey, PageKey] = {}  # the same the other way round
        self._changes = 0  # of what iterators rely on
        self._num_taken = 0  # victims of the plan that have left, and those that are in it
        self._plan_keys: list[PageKey] = []

    def start(self, num_slots: int) -> None:
        """Make room for what is to be remembered; ``ValueError`` without slots."""
        import numpy as np

        from pagedkv.policies import reuse_kernels, reuse_model, reuse_nodes

        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}: a tier holds at least one page")
        self._num_nodes = (1 + _GHOSTS_A_SLOT) * num_slots + _MORE_GHOSTS
        self._kernels: Any = reuse_kernels
        self._layout: Any = reuse_nodes
        self._node_array = np.zeros(self._num_nodes, reuse_nodes.NODE)
        self._scalars = np.zeros(reuse_nodes.NUM_SCALARS, np.int64)
        self._sums = np.zeros(reuse_nodes.NUM_SUMS, np.float64)
        self._heads = np.zeros(reuse_model.NUM_AGES, np.int32)
        self._cells = np.zeros((reuse_model.NUM_CELLS, reuse_nodes.NUM_COLUMNS), np.int32)
        self._statistics = np.zeros((reuse_model.NUM_CELLS, reuse_model.NUM_COLUMNS), np.float64)
        self._factors = np.ones(
            (reuse_model.NUM_FACTORS, reuse_model.SEEN, reuse_model.NUM_GROUPS), np.float64
        )
        self._ends = np.zeros(reuse_model.NUM_AGES, np.float64)
        self._buckets = np.zeros(self._num_nodes, np.int32)
        self._plan = np.zeros(self._num_nodes, np.int32)
        self._no_words = self._words([PageKey(bytes(32))])  # of the same type as others: read-only
        self._keys = [None] * self._num_nodes
        self._nodes = {}
        reuse_model.age_ends(self._ends)
        reuse_kernels.reset(
            self._node_array, self._scalars, self._heads, self._cells, self._buckets, num_slots
        )

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Note a request for these pages, the root first.

        ``ValueError`` if a page is named twice, or more come in than can be remembered.
        """
        if not keys:
            return
        nodes = self._nodes
        node_of = nodes.get
        numbers = [node_of(key, -1) for key in keys]
        new = [place for place, node in enumerate(numbers) if node < 0] if -1 in numbers else []
        if new:
            if len(new) > 1 and len(set(keys)) < len(keys):
                raise ValueError("a page is named twice: name each page of a request once")
            if len(nodes) + len(new) > self._num_nodes:
                raise ValueError(
                    f"{len(nodes) + len(new)} pages in a tier that was started with "
                    f"{self._scalars[self._layout.NUM_SLOTS]} slots: tell of those that left"
                )
        is_chain = list(parents[1:]) == list(keys[:-1])
        first = parents[0]
        ids = self._array(numbers)
        self._forget_plan()
        self._kernels.use(
            self._node_array,
            self._scalars,
            self._sums,
            self._heads,
            self._cells,
            self._statistics,
            self._factors,
            self._ends,
            self._buckets,
            self._plan,
            self._words(keys) if new else self._no_words,
            ids,
            -1 if first is None else node_of(first, -1),
            is_chain,
        )
        if new:
            own = self._keys
            numbers = ids.tolist()
            nodes.update(zip(keys, numbers, strict=True))
            for place in new:
                own[numbers[place]] = keys[place]
            if self._awaited:
                for place in new:
                    self._adopt(keys[place])
        if not is_chain:
            known = self._array([-1 if key is None else node_of(key, -1) for key in parents])
            self._kernels.link(self._node_array, self._scalars, self._cells, self._plan, ids, known)
            for key, parent in zip(keys, parents, strict=True):
                self._await(key, parent)
        elif first is not None:
            self._await(keys[0], first)

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Take candidates out of the order; what is known of them stays."""
        if not keys:
            return
        ids = self._candidates(keys)
        self._forget_plan()
        self._await_no_more(keys)
        self._kernels.hold(self._node_array, self._scalars, self._cells, self._plan, ids)

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Candidates left; they are remembered as ghosts."""
        if not keys:
            return
        ahead = self._plan_keys
        start = self._num_taken
        is_planned = list(keys) == ahead[start : start + len(keys)]
        if is_planned:
            ids = self._plan[start : start + len(keys)]
            self._num_taken += len(keys)
        else:
            ids = self._candidates(keys)
            self._forget_plan()
            self._orphan(ids)
        self._await_no_more(keys)
        nodes, own = self._nodes, self._keys
        for key in keys:
            own[nodes.pop(key)] = None
        self._kernels.evict(
            self._node_array,
            self._scalars,
            self._cells,
            self._plan,
            self._buckets,
            self._words(keys),
            ids,
            is_planned,
        )

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget pages, candidates or held ones, if they are known."""
        known = [key for key in dict.fromkeys(keys) if key in self._nodes]
        if not known:
            return
        self._forget_plan()
        ids = self._array([self._nodes[key] for key in known])
        self._orphan(ids)
        self._await_no_more(known)
        for key in known:
            del self._nodes[key]
        self._kernels.discard(
            self._node_array,
            self._scalars,
            self._heads,
            self._cells,
            self._statistics,
            self._plan,
            ids,
        )
        for node in ids.tolist():
            self._keys[node] = None

    def victims(self) -> Iterator[PageKey]:
        """The candidates, the lowest index first; children before their parents.

        Those named may be evicted meanwhile. ``RuntimeError`` where another change is noticed.
        """
        changes, at = self._changes, self._num_taken
        count = _CHUNK
        while True:
            if changes != self._changes:
                raise RuntimeError("the policy has changed: ask for victims again")
            if at == len(self._plan_keys):
                self._extend(count)
                count *= 2
            chunk = self._plan_keys[at:]
            if not chunk:
                return
            yield from chunk
            at += len(chunk)

    def upcoming(self) -> Iterator[PageKey]:
        """The same as ``victims``."""
        return self.victims()

    def __len__(self) -> int:
        if not self._num_nodes:
            return 0
        layout, scalars = self._layout, self._scalars
        planned = scalars[layout.NUM_PLANNED] - scalars[layout.TAKEN]
        return int(scalars[layout.NUM_CANDIDATES] + planned)

    def _extend(self, count: int) -> None:
        """Plan more victims, if there are any."""
        if not self._num_nodes:
            return
        num = self._kernels.extend(self._node_array, self._scalars, self._cells, self._plan, count)
        own = self._keys
        start = len(self._plan_keys)
        self._plan_keys += [own[node] for node in self._plan[start : start + num].tolist()]

    def _forget_plan(self) -> None:
        """The kernels put back what is left of it."""
        self._changes += 1
        self._num_taken = 0
        self._plan_keys = []

    def _await(self, child: PageKey, parent: PageKey | None) -> None:
        """Remember whose child a candidate is, if its parent is not here."""
        if parent is not None and parent not in self._nodes and child not in self._awaits:
            self._awaits[child] = parent
            self._awaited.setdefault(parent, set()).add(child)

    def _adopt(self, parent: PageKey) -> None:
        """A page has come in: candidates that were waiting for it are its children now."""
        children = sorted(self._awaited.pop(parent, ()))
        for child in children:
            del self._awaits[child]
        if children:
            ids = self._array([self._nodes[child] for child in children])
            parents = self._array([self._nodes[parent]] * len(children))
            self._kernels.link(
                self._node_array, self._scalars, self._cells, self._plan, ids, parents
            )

    def _await_no_more(self, children: Sequence[PageKey]) -> None:
        """They are candidates no longer."""
        if not self._awaits:
            return
        for child in children:
            parent = self._awaits.pop(child, None)
            if parent is not None:
                siblings = self._awaited[parent]
                siblings.remove(child)
                if not siblings:
                    del self._awaited[parent]

    def _orphan(self, ids: "npt.NDArray[np.int32]") -> None:
        """Pages leave: their candidate children, if there are any, wait for them from now on."""
        array = self._node_array
        self._kernels.cancel(array, self._scalars, self._cells, self._plan)  # children count again
        for node in ids[array["children"][ids] > 0].tolist():
            is_child = (array["parent"] == node) & (array["flags"] & self._layout.RESIDENT != 0)
            for child in is_child.nonzero()[0].tolist():
                self._awaits[self._keys[child]] = self._keys[node]
                self._awaited.setdefault(self._keys[node], set()).add(self._keys[child])

    def _candidates(self, keys: Sequence[PageKey]) -> "npt.NDArray[np.int32]":
        """The nodes of candidates; ``KeyError`` names a key that is none, or comes twice."""
        node_of = self._nodes.get
        ids = self._array([node_of(key, -1) for key in keys])
        bad = self._kernels.first_unfit(self._node_array, ids)
        if bad >= 0:
            raise KeyError(keys[bad])
        return ids

    @staticmethod
    def _array(numbers: list[int]) -> "npt.NDArray[np.int32]":
        import numpy as np

        return np.array(numbers, np.int32)

    @staticmethod
    def _words(keys: Sequence[PageKey]) -> "npt.NDArray[np.int32]":
        import numpy as np

        return np.frombuffer(b"".join(keys), np.int32)
