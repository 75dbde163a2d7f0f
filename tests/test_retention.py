"""Retained pages leave after all others: by priority, and only as long as was asked for."""

import random
import tracemalloc
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import make_key, make_spec

import pagedkv as pk
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.retention import Retaining, Retention

A, B, C, D, E, F = (make_key(number) for number in range(6))
SPEC = make_spec(page_tokens=4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retaining(clock: Clock, base: Any = pk.LRU) -> Retaining:
    return Retaining(base(), clock)


def retain(policy: Retaining, keys: list[Any], priority: int, ttl: float | None = None) -> None:
    policy.retain(keys, Retention(priority, ttl))
    policy.use(keys, [None, *keys[:-1]])


def test_lower_priorities_leave_first(clock: Clock) -> None:
    policy = retaining(clock)
    policy.use([A, B], [None, A])
    retain(policy, [A], 2)
    retain(policy, [C, D], 1)
    policy.use([E], [None])
    assert list(policy.victims()) == [B, E, D, C, A]
    assert len(policy) == 5


def test_a_page_keeps_the_highest_priority_and_the_longest_time(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A], 3, ttl=5)
    retain(policy, [A, B], 1, ttl=50)
    retain(policy, [C], 2)
    assert list(policy.victims()) == [B, C, A]
    clock.now += 49
    assert list(policy.victims()) == [B, C, A]
    clock.now += 2
    assert list(policy.victims()) == [B, A, C]


def test_time_runs_from_the_last_use_and_not_while_a_page_is_held(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A], 1, ttl=10)
    policy.use([B], [None])
    clock.now += 9
    policy.use([A], [None])
    clock.now += 9
    assert list(policy.victims()) == [B, A]
    policy.hold([A])
    clock.now += 100
    assert list(policy.victims()) == [B]
    policy.use([A], [None])
    clock.now += 9
    policy.use([B], [None])
    assert list(policy.victims()) == [B, A]
    clock.now += 1
    policy.use([B], [None])
    assert list(policy.victims()) == [B, A]  # its time ends as it is looked for: a use
    assert list(policy.upcoming()) == [B, A]
    policy.use([B], [None])
    assert list(policy.victims()) == [A, B]


def test_priority_0_ends_retention(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A], 7)
    policy.use([B], [None])
    retain(policy, [A], 0)
    policy.use([B], [None])
    assert list(policy.victims()) == [A, B]


def test_retention_ends_when_a_page_leaves(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A], 1)
    policy.evict([A])
    policy.use([A], [None])
    policy.use([B], [None])
    assert list(policy.victims()) == [A, B]


@pytest.mark.parametrize("base", [pk.LRU, pk.FIFO])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_parent_leaves_before_its_child(base: Any, data: st.DataObject) -> None:
    clock = Clock()
    policy = retaining(clock, base)
    paths = [[A, B, C], [A, B, D], [A, E], [F]]
    parents = {A: None, B: A, C: B, D: B, E: A, F: None}
    present: set[Any] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        path = data.draw(st.sampled_from(paths))
        path = path[: data.draw(st.integers(1, len(path)))]
        priority = data.draw(st.sampled_from([None, 0, 1, 2]))
        if priority is not None and present.issuperset(path):
            policy.retain(path, Retention(priority, data.draw(st.sampled_from([None, 1, 5]))))
        policy.use(path, [parents[key] for key in path])
        present.update(path)
        clock.now += data.draw(st.integers(0, 4))
        order = list(policy.victims())
        assert sorted(order) == sorted(present)
        assert len(policy) == len(present)
        places = {key: at for at, key in enumerate(order)}
        for key in present:
            parent = parents[key]
            assert parent is None or places[key] < places[parent]
        count = data.draw(st.integers(0, 2))
        policy.evict(order[:count])
        present.difference_update(order[:count])


def test_a_parent_is_retained_as_long_as_its_child(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A, B], 1, ttl=10)
    clock.now += 6
    policy.use([B], [A])
    clock.now += 6
    policy.use([C], [None])
    assert list(policy.victims()) == [C, B, A]
    clock.now += 6
    assert list(policy.victims()) == [C, B, A]  # both are ranked as all others by now
    policy.use([C], [None])
    assert list(policy.victims()) == [B, A, C]


def test_a_parent_that_comes_back_does_not_leave_before_a_retained_child(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A, B], 1)
    policy.hold([B])
    policy.evict([A])  # a sequence gave up its first pages
    policy.use([B], [A])
    policy.use([A], [None])
    policy.use([C], [None])
    assert list(policy.victims()) == [C, B, A]
    policy.evict([B])
    assert list(policy.victims()) == [C, A]
    policy.use([C], [None])
    assert list(policy.victims()) == [A, C]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_is_used_twice_in_one_moment_expires_once(clock: Clock, name: str) -> None:
    base = make_policy(name)
    base.start(8)
    policy = Retaining(base, clock)
    retain(policy, [A, B], 1, ttl=1)
    policy.use([A, B], [None, A])
    clock.now += 2
    assert list(policy.victims()) == [B, A]
    assert len(policy) == 2


def test_uses_in_a_long_time_leave_nothing_behind(clock: Clock) -> None:
    policy = retaining(clock)
    retain(policy, [A], 1, ttl=1e6)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            clock.now += 1
            policy.use([A], [None])
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_whatever_happens_candidates_leave_children_first(clock: Clock, name: str) -> None:
    rng = random.Random(name)
    base = make_policy(name)
    base.start(8)
    policy = Retaining(base, clock)
    parents: dict[Any, Any] = {A: None, B: A, C: B, D: B, E: A, F: None}
    paths = [[A, B, C], [A, B, D], [A, E], [F]]
    candidates: set[Any] = set()
    held: set[Any] = set()
    for _ in range(400):
        path = rng.choice(paths)
        own = [key for key in path if key in candidates]
        resident = [*takewhile(lambda key: key in candidates | held, path)]
        action = rng.choice(["come", "come", "hold", "release", "leave", "drop", "retain", "wait"])
        if action == "come" and not held.intersection(path):
            policy.use(path, [parents[key] for key in path])
            candidates.update(path)
        elif action == "hold":
            policy.hold(own)
            candidates.difference_update(own)
            held.update(own)
        elif action == "release":
            freed = [key for key in path if key in held]
            policy.use(freed, [parents[key] for key in freed])
            held.difference_update(freed)
            candidates.update(freed)
        elif action == "leave":
            gone = [*islice(policy.victims(), rng.randrange(3))]
            policy.evict(gone)
            candidates.difference_update(gone)
        elif action == "drop":
            key = rng.choice([*parents])
            policy.discard([key])
            candidates.discard(key)
            held.discard(key)
        elif action == "retain":
            policy.retain(resident, Retention(rng.randrange(3), rng.choice([None, 1, 5])))
            own = [key for key in resident if key in candidates]
            policy.use(own, [parents[key] for key in own])
        else:
            clock.now += rng.choice([0.5, 1, 3, 6])
        order = list(policy.victims())
        assert len(order) == len(policy)
        assert set(order) == candidates == set(policy.upcoming())
        for place, key in enumerate(order):
            assert parents[key] not in order[:place]


@pytest.mark.parametrize(
    ("values", "error"),
    [((-1,), ValueError), ((1.5,), TypeError), ((1, 0), ValueError), ((1, -2.0), ValueError)],
)
def test_what_makes_no_sense_is_refused(values: Any, error: type[Exception]) -> None:
    with pk.PagedKVCache(SPEC, 2) as cache, cache.open_sequence() as sequence:
        with pytest.raises(error):
            sequence.retain(*values)
        with pytest.raises(error):
            cache.retain([A], *values)


def kv(num_tokens: int) -> Any:
    return np.zeros((SPEC.num_layers, num_tokens, SPEC.num_kv_heads, SPEC.head_dim), SPEC.np_dtype)


def test_a_retained_sequence_outlives_later_ones() -> None:
    with pk.PagedKVCache(SPEC, 6) as cache:
        first = [*range(8)]
        with cache.open_sequence(first) as sequence:
            sequence.append(kv(8), kv(8), first)
            sequence.retain()
        for start in range(100, 200, 20):
            tokens = [*range(start, start + 16)]
            with cache.open_sequence(tokens) as sequence:
                sequence.append(kv(16), kv(16), tokens)
        assert cache.match(pk.page_keys(SPEC, first)) == 2
        cache.check_invariants()
        assert cache.retain(pk.page_keys(SPEC, first), 0) == 2
        tokens = [*range(300, 324)]
        with cache.open_sequence(tokens) as sequence:
            sequence.append(kv(24), kv(24), tokens)
        assert cache.match(pk.page_keys(SPEC, first)) == 0


def test_pages_are_retained_by_key() -> None:
    tokens = [*range(12)]
    keys = pk.page_keys(SPEC, tokens)
    pages = np.zeros((3, *SPEC.page_shape), SPEC.np_dtype)
    with pk.PagedKVCache(SPEC, 4) as cache:
        cache.put(keys[:2], pages[:2])
        assert cache.retain(keys, priority=2) == 2
        for number in range(5):
            cache.put([make_key(number)], pages[:1])
        assert cache.match(keys) == 2
        cache.check_invariants()


def test_a_page_that_only_the_store_has_is_retained_when_it_comes_back(tmp_path: Path) -> None:
    """It leads to pages that are retained in the pool: it must not leave before them."""
    tokens = [*range(12)]
    keys = pk.page_keys(SPEC, tokens)
    with pk.PagedKVCache(SPEC, 3, pk.PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        with cache.open_sequence(tokens) as sequence:
            sequence.append(kv(12), kv(12), tokens)
            cache.flush()
            places = cache._groups[0].places
            with cache._lock:
                places.evict(sequence.table(0)[1])
            sequence.retain()
        cache.get(keys[1:2])  # there is a free slot
        cache.check_invariants()
        assert list(places._policy.victims()) == list(keys[::-1])
        cache.put([make_key(1)], np.zeros((1, *SPEC.page_shape), SPEC.np_dtype))
        assert [key in places.index for key in keys] == [True, True, False]


def test_of_nothing_nothing_is_retained() -> None:
    with pk.PagedKVCache(SPEC, 4) as cache:
        assert cache.retain(pk.page_keys(SPEC, range(12))) == 0
        assert cache.retain([]) == 0
        with cache.open_sequence() as sequence:
            sequence.retain()
        with cache.open_sequence([1, 2]) as sequence:
            sequence.append(kv(2), kv(2), [1, 2])
            sequence.retain()
        cache.check_invariants()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_key_may_be_named_twice(name: str) -> None:
    with pk.PagedKVCache(SPEC, 4, policy=make_policy(name)) as cache:
        cache.put([A, B], np.zeros((2, *SPEC.page_shape), SPEC.np_dtype))
        for priority in (0, 1, 0):
            cache.retain([A, A, B], priority)
            cache.check_invariants()


def test_what_is_retained_leaves_when_nothing_else_can() -> None:
    tokens = [*range(16)]
    with pk.PagedKVCache(SPEC, 4) as cache:
        with cache.open_sequence(tokens) as sequence:
            sequence.append(kv(16), kv(16), tokens)
            sequence.retain(9)
        other = [*range(100, 116)]
        with cache.open_sequence(other) as sequence:
            sequence.append(kv(16), kv(16), other)
        assert cache.match(pk.page_keys(SPEC, tokens)) == 0
