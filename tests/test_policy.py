"""Every eviction policy keeps one contract; what tells them apart follows."""

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_samples import make_key, make_spec

from pagedkv import FIFO, LFU, LRU, EvictionPolicy, PagedKVCache
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.policies.entry_policy import EntryPolicy

NUM_SLOTS = 8
A, B, C, D, E, F = (make_key(number) for number in range(6))
UNKNOWN = make_key(99)


def started(name: str, num_slots: int = NUM_SLOTS) -> EvictionPolicy:
    policy = make_policy(name)
    policy.start(num_slots)
    return policy


@pytest.fixture(params=POLICY_NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return started(request.param)


def use_path(policy: EvictionPolicy, *keys: Any) -> None:
    """Consecutive pages of a prompt, the root first."""
    policy.use(keys, [None, *keys[:-1]])


def use_each(policy: EvictionPolicy, *keys: Any) -> None:
    """Pages of which no parent is known, each a request of its own."""
    for key in keys:
        policy.use([key], [None])


def evict_next(policy: EvictionPolicy, num: int = 1) -> list[Any]:
    gone = list(islice(policy.victims(), num))
    policy.evict(gone)
    return gone


def test_a_name_makes_a_policy_of_that_name() -> None:
    assert [make_policy(name).name for name in POLICY_NAMES] == list(POLICY_NAMES)
    assert make_policy("lru") is not make_policy("lru")


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ValueError, match="'mru'") as raised:
        make_policy("mru")
    assert all(name in str(raised.value) for name in POLICY_NAMES)


class _Half:
    name = "half"

    def use(self, keys: Any, parents: Any) -> None: ...


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("lru", r"policy is 'lru': give an object, such as pagedkv.LRU\(\)"),
        (LFU, "policy is the class LFU: give an object"),
        (_Half(), "lacks start, hold, evict, discard, victims, upcoming, __len__$"),
    ],
)
def test_what_is_no_policy_is_refused_by_a_cache(policy: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PagedKVCache(make_spec(), 2, policy=policy)


def test_a_new_policy_has_no_candidates(policy: EvictionPolicy) -> None:
    assert len(policy) == 0
    assert list(policy.victims()) == list(policy.upcoming()) == []


def test_the_deepest_page_of_a_prompt_leaves_first(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C, D)
    assert list(policy.victims()) == list(policy.upcoming()) == [D, C, B, A]
    assert len(policy) == 4


def test_a_parent_waits_for_all_its_children(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C)
    use_path(policy, A, B, D)
    use_path(policy, A, E)
    order = list(policy.victims())
    assert sorted(order) == sorted([A, B, C, D, E])
    assert order.index(B) > max(order.index(C), order.index(D))
    assert order[-1] == A


def test_a_child_may_come_before_its_parent(policy: EvictionPolicy) -> None:
    policy.use([B], [A])
    assert list(policy.victims()) == [B]
    policy.use([A], [None])
    assert list(policy.victims()) == [B, A]


def test_asking_again_gives_the_same(policy: EvictionPolicy) -> None:
    for _ in range(2):
        use_each(policy, A, B)
        use_path(policy, C, D, E)
    use_each(policy, F, B)
    first = list(islice(policy.victims(), 2))
    order = list(policy.victims())
    assert order[:2] == first
    assert list(policy.victims()) == order
    assert list(zip(policy.victims(), policy.victims(), strict=True)) == [
        (key, key) for key in order
    ]


def test_what_leaves_one_by_one_leaves_in_the_order_of_the_whole(policy: EvictionPolicy) -> None:
    for _ in range(3):
        use_path(policy, A, B, C)
    use_path(policy, A, D)
    use_each(policy, E, F)
    order = list(policy.victims())
    assert [evict_next(policy)[0] for _ in order] == order
    assert len(policy) == 0


def test_held_pages_are_no_victims_until_they_are_used_again(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C)
    policy.hold([A, B])
    assert len(policy) == 1
    assert list(policy.victims()) == list(policy.upcoming()) == [C]
    use_path(policy, A, B)
    assert len(policy) == 3
    assert list(policy.victims()) == [C, B, A]


def test_a_held_child_does_not_keep_its_parent(policy: EvictionPolicy) -> None:
    use_path(policy, A, B)
    policy.hold([B])
    assert list(policy.victims()) == list(policy.upcoming()) == [A]
    assert evict_next(policy) == [A]
    policy.use([B], [A])
    assert list(policy.victims()) == [B]


def test_what_was_named_may_be_held_instead_of_leaving(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C)
    assert list(islice(policy.victims(), 2)) == [C, B]
    policy.hold([A, B])
    assert list(policy.victims()) == [C]


def test_pages_may_be_skipped(policy: EvictionPolicy) -> None:
    use_each(policy, A, B, C, D)
    first, second, third, fourth = policy.victims()
    policy.evict([second])
    policy.evict([fourth, third])
    assert list(policy.victims()) == [first]
    use_each(policy, second)
    assert sorted(policy.victims()) == sorted([first, second])


def test_one_named_page_may_leave_and_a_use_follow(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C)
    assert list(policy.victims()) == [C, B, A]
    policy.evict([C])
    use_path(policy, A, B, D)
    assert list(policy.victims()) == [D, B, A]


@pytest.mark.parametrize("method", ["hold", "evict"])
def test_what_is_no_candidate_is_refused(policy: EvictionPolicy, method: str) -> None:
    use_each(policy, A, B)
    policy.hold([B])
    for key in (UNKNOWN, B):
        with pytest.raises(KeyError):
            getattr(policy, method)([key])
    assert list(policy.victims()) == [A]


def test_discarded_pages_are_gone_whatever_they_were(policy: EvictionPolicy) -> None:
    use_path(policy, A, B, C, D)
    policy.hold([B])
    policy.discard([UNKNOWN, B, D])
    assert list(policy.victims()) == [C, A]
    policy.discard([B, D])
    assert len(policy) == 2
    use_path(policy, A, B, C, D)
    assert sorted(policy.victims()) == sorted([A, B, C, D])


def test_pages_that_left_may_be_discarded(policy: EvictionPolicy) -> None:
    use_each(policy, A, B)
    gone = evict_next(policy, 2)
    policy.discard(gone)
    use_each(policy, A)
    assert list(policy.victims()) == [A]


def test_looking_ahead_changes_nothing(policy: EvictionPolicy) -> None:
    other = started(policy.name)
    for ranking in (policy, other):
        for _ in range(3):
            use_path(ranking, A, B, C)
        use_path(ranking, A, D)
        use_each(ranking, E, F)
        if ranking is policy:
            assert sorted(ranking.upcoming()) == sorted([A, B, C, D, E, F])
            next(ranking.upcoming())
    assert list(policy.victims()) == list(other.victims())
    assert sorted(policy.upcoming()) == sorted([A, B, C, D, E, F])


def test_a_copy_goes_its_own_way(policy: EvictionPolicy) -> None:
    fresh = make_policy(policy.name)
    other = copy.deepcopy(fresh)
    for ranking, key in ((fresh, A), (other, B)):
        ranking.start(NUM_SLOTS)
        use_each(ranking, key)
    assert list(fresh.victims()) == [A]
    assert list(other.victims()) == [B]


def test_policies_know_no_more_than_keys() -> None:
    assert {name for name in dir(EvictionPolicy) if name[0] != "_"} == {
        "discard",
        "evict",
        "hold",
        "start",
        "upcoming",
        "use",
        "victims",
    }


def some(keys: set[Any], pick: int, num: int) -> list[Any]:
    start = pick % len(keys) if keys else 0
    return sorted(keys)[start : start + num]


class PolicyMachine(RuleBasedStateMachine):
    """A policy against a plain model of which pages there are.

    The pages form a binary tree: page n has the parent (n - 1) // 2.
    """

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy = started(self.name)
        self.candidates: set[Any] = set()
        self.held: set[Any] = set()
        self.parents: dict[Any, Any] = {}
        self.ranks: dict[Any, int] = {}  # last uses, or when it came
        self.time = 0

    def request(self, keys: Seq[Any], parents: Seq[Any]) -> None:
        """As a cache does it: what is there is held, others make room, all are used."""
        found = [key for key in keys if key in self.candidates]
        self.policy.hold(found)
        self.candidates -= set(found)
        self.held |= set(found)
        need = len(self.held | self.candidates | set(keys)) - NUM_SLOTS
        if need > len(self.candidates):  # sequences hold too much
            self.policy.use(found, [self.parents[key] for key in found])
            self.note_use(found, [self.parents[key] for key in found])
            return
        if need > 0:
            self.leave(list(islice(self.policy.victims(), need)))
        self.policy.use(keys, parents)
        self.note_use(keys, parents)

    def note_use(self, keys: Seq[Any], parents: Seq[Any]) -> None:
        has_come = False
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            if key not in self.candidates | self.held:
                has_come = True
                self.parents[key] = parent
            if has_come or self.name != "fifo":
                self.time += 1
                self.ranks[key] = self.time
        self.held -= set(keys)
        self.candidates |= set(keys)

    def leave(self, keys: list[Any]) -> None:
        self.policy.evict(keys)
        self.candidates -= set(keys)

    @rule(number=st.integers(0, 14))
    def use_prompt(self, number: int) -> None:
        path = [number]
        while path[0]:
            path.insert(0, (path[0] - 1) // 2)
        keys = [make_key(at) for at in path]
        self.request(keys, [None, *keys[:-1]])

    @rule(number=st.integers(15, 24))
    def use_page_alone(self, number: int) -> None:
        self.request([make_key(number)], [None])

    @rule(pick=st.integers(0, 20), num=st.integers(1, 3))
    def hold(self, pick: int, num: int) -> None:
        keys = some(self.candidates, pick, num)
        self.policy.hold(keys)
        self.candidates -= set(keys)
        self.held |= set(keys)

    @rule(pick=st.integers(0, 20))
    def give_back(self, pick: int) -> None:
        keys = some(self.held, pick, 1)
        parents = [self.parents[key] for key in keys]
        self.policy.use(keys, parents)
        self.note_use(keys, parents)

    @rule(num=st.integers(1, 3))
    def evict(self, num: int) -> None:
        self.leave(list(islice(self.policy.victims(), num)))

    @rule(skip=st.integers(0, 3))
    def evict_another(self, skip: int) -> None:
        """The first ones are pinned; what leaves after them is no parent of candidates."""
        parents = {self.parents[key] for key in self.candidates}
        free = [key for key in self.policy.victims() if key not in parents]
        self.leave(free[skip : skip + 1])

    @rule(pick=st.integers(0, 20), knows=st.booleans())
    def discard(self, pick: int, knows: bool) -> None:
        keys = some(self.candidates | self.held, pick, 1) if knows else [make_key(pick)]
        self.policy.discard(keys)
        self.candidates -= set(keys)
        self.held -= set(keys)

    def check_order(self, order: list[Any]) -> None:
        assert len(order) == len(set(order)) == len(self.candidates)
        assert set(order) == self.candidates
        places = {key: place for place, key in enumerate(order)}
        for key in order:
            parent = self.parents[key]
            assert parent not in places or places[parent] > places[key]

    @invariant()
    def candidates_are_those_of_the_model(self) -> None:
        assert len(self.policy) == len(self.candidates)
        if isinstance(self.policy, EntryPolicy):
            self.policy.check_invariants()

    @invariant()
    def children_leave_before_their_parents(self) -> None:
        self.check_order(list(self.policy.upcoming()))
        order = list(self.policy.victims())
        self.check_order(order)
        assert list(self.policy.victims()) == order
        self.check_order(list(self.policy.upcoming()))
        if self.name in {"lru", "fifo"}:
            assert order == list(self.plain_order())

    def plain_order(self) -> Iterator[Any]:
        """Of those that are no parent, the one of the lowest rank, again and again."""
        left = set(self.candidates)
        while left:
            parents = {self.parents[key] for key in left}
            key = min(left - parents, key=self.ranks.__getitem__)
            left.remove(key)
            yield key


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_any_sequence_of_calls_keeps_the_contract(name: str) -> None:
    machine = type("Machine", (PolicyMachine,), {"name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


# What tells the policies apart.


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "pagedkv"])
def test_looking_ahead_sees_what_leaves_next(name: str) -> None:
    policy = started(name)
    use_each(policy, A, B, C, D, A, B, D)
    ahead = list(policy.upcoming())
    assert ahead == list(policy.victims())
    assert list(policy.upcoming()) == ahead  # now that second chances were given
    policy.evict(ahead[1:2])
    assert sorted(policy.upcoming()) == sorted(policy.victims())


def test_fifo_does_not_count_uses() -> None:
    policy = started("fifo")
    use_each(policy, A, B, C, A)
    assert list(policy.victims()) == [A, B, C]


def test_lru_keeps_what_was_used_last() -> None:
    policy = started("lru")
    use_each(policy, A, B, C, A)
    assert list(policy.victims()) == [B, C, A]


def test_lfu_keeps_what_was_used_most() -> None:
    policy = started("lfu")
    use_each(policy, A, B, C, D, A, A, B, C)
    assert list(policy.victims()) == [D, B, C, A]


def test_lfu_counts_from_when_a_page_came_unless_it_is_told_to_remember() -> None:
    for num_ghosts_per_slot, order in ((0, [B, A]), (1, [A, B])):
        policy = LFU(num_ghosts_per_slot)
        policy.start(NUM_SLOTS)
        use_each(policy, B, B, B)
        policy.evict([B])
        use_each(policy, A, A, B)
        assert list(policy.victims()) == order


def test_lfu_remembers_no_more_than_it_may() -> None:
    policy = LFU(1)
    policy.start(1)
    use_each(policy, A, A)
    policy.evict([A])
    use_each(policy, B)
    policy.evict([B])
    use_each(policy, C)  # A, that left first, is forgotten
    policy.evict([C])
    use_each(policy, D, D, A)
    assert list(policy.victims()) == [A, D]
    with pytest.raises(ValueError, match="-1"):
        LFU(-1)


def test_clock_gives_what_was_used_a_second_chance() -> None:
    policy = started("clock")
    use_each(policy, A, B, C, A)
    assert evict_next(policy) == [B]
    use_each(policy, D)
    assert list(policy.victims()) == [C, A, D]


def test_the_hand_of_clock_takes_no_notice_of_children() -> None:
    policy = started("clock")
    use_path(policy, A, B)
    use_each(policy, C)
    use_path(policy, A, B)
    assert evict_next(policy) == [C]  # A has gone to the end too, though it waits for B
    use_each(policy, D)
    assert list(policy.victims()) == [B, A, D]


def test_sieve_lets_what_it_spared_keep_its_place() -> None:
    policy = started("sieve")
    use_each(policy, A, B, C, A)
    assert evict_next(policy) == [B]
    use_each(policy, D)
    assert list(policy.victims()) == [C, D, A]


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "pagedkv"])
def test_what_was_named_in_vain_is_the_first_again(name: str) -> None:
    policy, other = started(name), started(name)
    for ranking in (policy, other):
        use_each(ranking, A, B, C, D, A, B)
    order = list(other.victims())
    assert list(islice(policy.victims(), 1)) == order[:1]
    policy.hold([])
    assert list(policy.victims()) == order


def test_sieve_starts_again_with_the_oldest() -> None:
    policy = started("sieve")
    use_each(policy, A, B, C, A, B)
    assert evict_next(policy) == [C]  # the hand has come to the end
    use_each(policy, D)
    assert list(policy.victims()) == [A, B, D]


def test_s3_fifo_keeps_what_was_used_twice_or_comes_again() -> None:
    policy = started("s3-fifo", 20)  # two for the small queue
    keys = [make_key(number) for number in range(100, 124)]
    use_each(policy, *keys[:2])
    use_each(policy, keys[0], keys[0])
    use_each(policy, *keys[2:20])
    assert evict_next(policy) == [keys[1]]  # keys[0] has gone on to the main queue
    use_each(policy, keys[20], keys[21], keys[1])
    order = list(policy.victims())
    assert order[:2] == [keys[20], keys[2]]  # then the small queue is short
    assert order[-2:] == [keys[1], keys[21]]


def test_s3_fifo_keeps_what_others_build_on() -> None:
    policy = started("s3-fifo", 20)
    use_each(policy, F)
    assert evict_next(policy) == [F]
    use_path(policy, A, B)
    policy.use([B], [A])
    policy.use([B], [A])
    use_each(policy, C, D)
    assert evict_next(policy) == [C]  # B and, since B stays, A have gone on to the main queue
    assert list(policy.victims()) == [B, A, D]


def test_arc_gives_room_to_what_it_lost_too_early() -> None:
    policy = started("arc", 2)
    use_each(policy, A, A)  # often
    use_each(policy, B)
    assert evict_next(policy) == [B]
    use_each(policy, B)  # comes again, so that once should have had more room
    use_each(policy, C)
    assert list(policy.victims()) == [A, B, C]


def test_2q_keeps_what_comes_again_after_its_trial() -> None:
    policy = started("2q", 8)  # two on trial
    use_each(policy, A, B, C, A)
    assert evict_next(policy) == [A]
    use_each(policy, A, D)
    assert list(policy.victims()) == [B, A, C, D]


def test_lru_2_goes_by_the_use_before_the_last() -> None:
    policy = started("lru-2")
    use_each(policy, A, B, B, C, A)
    assert list(policy.victims()) == [C, A, B]


def test_lru_2_remembers_the_last_use_of_what_left() -> None:
    policy = started("lru-2")
    use_each(policy, A)
    assert evict_next(policy) == [A]
    use_each(policy, B, A)
    assert list(policy.victims()) == [B, A]
    policy.evict([A, B])
    policy.discard([A])
    use_each(policy, B, A)
    assert list(policy.victims()) == [A, B]


@pytest.mark.parametrize("policy", [LRU(), FIFO()])
def test_what_waits_for_its_children_is_met_once(policy: LRU) -> None:
    """A prompt put page by page, its root first: no search walks over all of it again."""
    chain = [make_key(number) for number in range(300)]
    for key, parent in zip(chain, [None, *chain[:-1]], strict=True):
        policy.use([key], [parent])
    assert next(policy.victims()) == chain[-1]
    assert list(policy._order) == chain[-1:]
    policy.evict(chain[-1:])
    assert list(policy.victims()) == chain[-2::-1]
    assert len(policy) == 299
