"""ReuseIndex alone: the contract where it is hard to keep, its memory, its guard, what it hits."""

import copy
import hashlib
import random
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from pagedkv.policies import reuse_nodes
from pagedkv.policies.lru import LRU
from pagedkv.policies.reuse_index import ReuseIndex
from pagedkv.spec import PageKey

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import _workloads

sys.path.pop(0)


def key(number: int) -> PageKey:
    return PageKey(hashlib.sha256(b"%d" % number).digest())


def run_of(*numbers: int) -> list[PageKey]:
    return [key(number) for number in numbers]


def parents(keys: list[PageKey]) -> list[PageKey | None]:
    return [None, *keys[:-1]]


def started(num_slots: int = 100) -> ReuseIndex:
    policy = ReuseIndex()
    policy.start(num_slots)
    return policy


def use(policy: Any, *numbers: int) -> None:
    keys = run_of(*numbers)
    policy.use(keys, parents(keys))


def replay(
    requests: list[list[int]], policy: Any, num_slots: int, check: Any = None
) -> tuple[int, list[PageKey]]:
    """Hits of leading runs, and what left in which order."""
    policy.start(num_slots)
    keys = {number: key(number) for request in requests for number in request}
    resident: set[PageKey] = set()
    hits, left = 0, []
    for request in requests:
        run = [keys[number] for number in request][:num_slots]
        held = run[: next((at for at, k in enumerate(run) if k not in resident), len(run))]
        hits += len(held)
        policy.hold(held)
        missing = len(resident) + len(run) - len(held) - num_slots
        if missing > 0:
            victims = list(islice(policy.victims(), missing))
            if check is not None:
                check(policy, held, victims)
            policy.evict(victims)
            resident.difference_update(victims)
            left += victims
        policy.use(run, parents(run))
        resident.update(run)
        assert len(policy) == len(resident)
    return hits, left


def lru_hits(requests: list[list[int]], num_slots: int) -> int:
    return replay(requests, LRU(), num_slots)[0]


def index_of_guard(policy: ReuseIndex) -> int:
    """What the shadow says that LRU would have hit."""
    return int(policy._sums[reuse_nodes.LRU_HITS])


def test_a_parent_never_leaves_before_its_child() -> None:
    requests = _workloads.chats(600, users=2, pause=20)
    parent_of = {
        key(child): key(parent) for request in requests for parent, child in pairwise(request)
    }
    inside: set[PageKey] = set()

    def check(policy: ReuseIndex, held: list[PageKey], victims: list[PageKey]) -> None:
        everyone = list(policy.victims())
        assert everyone[: len(victims)] == victims
        gone: set[PageKey] = set()
        for victim in everyone:
            gone.add(victim)
        assert len(gone) == len(everyone) == len(policy)
        place = {victim: at for at, victim in enumerate(everyone)}
        for child, at in place.items():
            parent = parent_of.get(child)
            assert parent is None or at < place.get(parent, len(place))
        inside.update(gone)

    replay(requests, ReuseIndex(), 150, check)
    assert len(inside) > 500


def test_no_page_that_is_held_is_a_victim() -> None:
    def check(policy: ReuseIndex, held: list[PageKey], victims: list[PageKey]) -> None:
        assert not set(held) & set(policy.victims())

    replay(_workloads.zipf_prefixes(300, prefixes=30), ReuseIndex(), 100, check)


def test_a_held_page_is_a_candidate_again_when_it_is_used() -> None:
    policy = started()
    use(policy, 1, 2, 3)
    policy.hold(run_of(1, 2))
    assert list(policy.victims()) == run_of(3)
    assert len(policy) == 1
    use(policy, 1, 2)
    assert sorted(policy.victims()) == sorted(run_of(1, 2, 3))


def test_asking_again_gives_the_same_order_and_looking_ahead_changes_nothing() -> None:
    policy = started(300)
    for request in _workloads.chats(30, users=2, pause=5):
        use(policy, *request)
    first = list(islice(policy.victims(), 5))
    assert list(policy.upcoming())[:5] == first
    everyone = list(policy.victims())
    assert everyone[:5] == first
    assert list(policy.upcoming()) == everyone
    assert len(policy) == len(everyone)


def test_victims_that_were_looked_at_do_not_matter_later() -> None:
    looked, not_looked = started(300), started(300)
    for number, request in enumerate(_workloads.chats(200, users=2, pause=5)):
        for policy in (looked, not_looked):
            use(policy, *request)
        list(islice(looked.upcoming(), number % 70))
        excess = len(looked) - 300
        if excess > 0:
            for policy in (looked, not_looked):
                policy.evict(list(islice(policy.victims(), excess)))
    assert list(looked.victims()) == list(not_looked.victims())


def test_victims_may_be_evicted_while_they_are_named() -> None:
    policy = started()
    use(policy, *range(90))
    expected = list(policy.victims())
    named = []
    for victim in policy.victims():
        policy.evict([victim])
        named.append(victim)
    assert named == expected
    assert len(policy) == 0


def test_another_change_while_victims_are_named_is_refused() -> None:
    policy = started()
    use(policy, *range(90))
    named = policy.victims()
    next(named)
    use(policy, 200)
    with pytest.raises(RuntimeError, match="ask for victims again"):
        list(named)


def test_any_candidate_may_be_evicted_a_parent_too() -> None:
    policy = started()
    use(policy, 1, 2, 3)
    policy.evict(run_of(1))
    assert list(policy.victims()) == run_of(3, 2)
    use(policy, 1, 2, 3)
    assert list(policy.victims())[-1] == key(1)


def test_what_is_no_candidate_is_refused_and_nothing_changes() -> None:
    policy = started()
    use(policy, 1, 2, 3)
    policy.hold(run_of(1))
    for keys in (run_of(3, 9), run_of(3, 1), run_of(3, 3)):
        for method in (policy.hold, policy.evict):
            with pytest.raises(KeyError) as raised:
                method(keys)
            assert raised.value.args == (keys[1],)
    assert list(policy.victims()) == run_of(3, 2)
    with pytest.raises(ValueError, match="twice"):
        use(policy, 7, 7)
    assert len(policy) == 2
    with pytest.raises(ValueError, match="at least one"):
        ReuseIndex().start(0)


def test_a_discarded_page_is_forgotten() -> None:
    policy = started()
    use(policy, 1, 2, 3)
    policy.hold(run_of(1))
    policy.discard(run_of(1, 3, 3, 50))
    assert list(policy.victims()) == run_of(2)
    use(policy, 3)
    assert policy._node_array["seen"][policy._nodes[key(3)]] == 1


def test_an_evicted_page_is_remembered_but_only_so_many_are() -> None:
    policy = started(10)
    use(policy, 1, 2)
    policy.evict(run_of(2, 1))
    use(policy, 1, 2)
    assert policy._node_array["seen"][policy._nodes[key(2)]] == 2
    policy.evict(run_of(2, 1))
    for number in range(100, 100 + 2 * policy._num_nodes, 100):
        use(policy, *range(number, number + 100))
        policy.evict(list(policy.victims()))
    assert len(policy) == 0
    assert policy._scalars[reuse_nodes.NUM_GHOSTS] == policy._num_nodes
    use(policy, 1, 2)
    assert policy._node_array["seen"][policy._nodes[key(2)]] == 1
    assert not any(
        policy._keys[node]
        for node in set(range(policy._num_nodes)) - {policy._nodes[key(1)], policy._nodes[key(2)]}
    )


def test_its_memory_is_fixed_and_small() -> None:
    def nbytes(policy: ReuseIndex) -> int:
        arrays = [value for value in vars(policy).values() if hasattr(value, "nbytes")]
        return sum(array.nbytes for array in arrays)

    small, large = started(1), started(100_001)
    assert nbytes(small) < 2 << 20
    assert (nbytes(large) - nbytes(small)) / 100_000 < 200
    before = nbytes(small)
    replay(_workloads.one_hit(200), small, 20)
    assert nbytes(small) - before < 20 * 200


def test_pages_without_known_parents_leave_too() -> None:
    policy = started()
    keys = run_of(5, 6, 7)
    policy.use(keys, [None, None, None])
    policy.use(run_of(6), [None])
    assert sorted(policy.victims()) == sorted(keys)
    policy.use(run_of(9, 8), [key(6), key(7)])  # two branches in one call
    order = list(policy.victims())
    assert order.index(key(9)) < order.index(key(6))
    assert order.index(key(8)) < order.index(key(7))


def test_a_parent_that_comes_back_has_its_children_again() -> None:
    policy = started()
    use(policy, 1, 2, 3)
    assert len(list(policy.upcoming())) == 3
    policy.discard(run_of(2))
    use(policy, 1, 2)
    assert list(policy.victims()).index(key(3)) < list(policy.victims()).index(key(2))
    policy.evict(run_of(2, 3))
    assert not policy._awaits
    assert not policy._awaited


def test_the_same_calls_give_the_same_victims() -> None:
    requests = _workloads.chats(500, users=2, pause=20)
    fresh = ReuseIndex()
    assert replay(requests, fresh, 150) == replay(requests, ReuseIndex(), 150)
    assert replay(requests, copy.deepcopy(ReuseIndex()), 150)[1]


def test_more_pages_than_can_be_remembered_are_refused() -> None:
    policy = started(1)
    num = policy._num_nodes
    use(policy, *range(num))
    with pytest.raises(ValueError, match="1 slots"):
        use(policy, num)
    assert len(policy) == num


@pytest.mark.parametrize("num_slots", [10, 100, 700])
def test_the_shadow_hits_what_lru_hits(num_slots: int) -> None:
    requests = _workloads.one_after_the_other(
        _workloads.chats(400, users=2, pause=20), _workloads.zipf_prefixes(300, prefixes=40)
    )
    requests = [request[:num_slots] for request in requests]
    policy = ReuseIndex()
    replay(requests, policy, num_slots)
    assert index_of_guard(policy) == lru_hits(requests, num_slots)


def test_it_hits_more_than_lru_where_some_prefixes_are_popular() -> None:
    requests = _workloads.zipf_prefixes(2000, prefixes=500)
    assert replay(requests, ReuseIndex(), 200)[0] > 1.3 * lru_hits(requests, 200)


@pytest.mark.parametrize("num_slots", [10, 50, 200, 700])
def test_it_is_never_far_behind_lru(num_slots: int) -> None:
    streams = [
        _workloads.recent_sets(4000, working=50, change=0.02),
        _workloads.one_after_the_other(
            _workloads.one_hit(1000), _workloads.chats(1200, users=3, pause=20)
        ),
        _workloads.agents(600, at_once=40),
    ]
    for requests in streams:
        hits = replay(requests, ReuseIndex(), num_slots)[0]
        assert hits >= 0.97 * lru_hits(requests, num_slots)


def test_any_order_of_calls_keeps_the_lists_whole() -> None:
    draw = random.Random(5)
    policy = started(40)
    inside: set[PageKey] = set()
    held: set[PageKey] = set()
    for step in range(3000):
        what = draw.randrange(6)
        free = sorted(inside - held)
        if what < 2:
            root = draw.randrange(12)
            run = [1000 * root + at for at in range(draw.randint(1, 9))]
            use(policy, *run)
            inside |= set(run_of(*run))
            held -= set(run_of(*run))
        elif what == 2 and free:
            some = draw.sample(free, min(len(free), 3))
            policy.hold(some)
            held |= set(some)
        elif what == 3 and free:
            some = draw.sample(free, 1)
            policy.evict(some)
            inside -= set(some)
        elif what == 4 and inside:
            some = draw.sample(sorted(inside), 1)
            policy.discard(some)
            inside -= set(some)
            held -= set(some)
        else:
            some = list(islice(policy.victims(), draw.randrange(5)))
            policy.evict(some)
            inside -= set(some)
        assert len(policy) == len(inside - held)
        if step % 50 == 0:
            assert sorted(policy.victims()) == sorted(inside - held)
