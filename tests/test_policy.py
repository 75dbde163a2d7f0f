"""Every eviction policy keeps one contract; what tells them apart follows."""

import copy
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_samples import make_key

from pagedkv import FIFO, LRU, EvictionPolicy

POLICIES = [LRU, FIFO]
A, B, C, D = (make_key(number) for number in range(4))


def filled(policy: EvictionPolicy) -> EvictionPolicy:
    for key in (A, B, C, D):
        policy.add(key)
    return policy


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return request.param()


def test_a_new_policy_has_no_candidates(policy: EvictionPolicy) -> None:
    assert len(policy) == 0
    assert list(policy.victims()) == []


def test_candidates_leave_in_the_order_in_which_they_came(policy: EvictionPolicy) -> None:
    filled(policy)
    assert list(policy.victims()) == [A, B, C, D]
    assert len(policy) == 4


def test_asking_for_victims_changes_nothing(policy: EvictionPolicy) -> None:
    filled(policy)
    next(iter(policy.victims()))
    assert list(policy.victims()) == list(policy.victims()) == [A, B, C, D]


def test_a_discarded_key_leaves_no_trace(policy: EvictionPolicy) -> None:
    filled(policy)
    policy.touch(B)
    policy.discard(B)
    assert B not in list(policy.victims())
    assert len(policy) == 3
    policy.add(B)
    assert list(policy.victims()) == [A, C, D, B]


def test_a_candidate_cannot_be_added_twice(policy: EvictionPolicy) -> None:
    filled(policy)
    with pytest.raises(ValueError, match=A.hex()[:12]):
        policy.add(A)
    assert list(policy.victims()) == [A, B, C, D]


@pytest.mark.parametrize("method", ["touch", "discard"])
def test_an_unknown_key_is_refused(policy: EvictionPolicy, method: str) -> None:
    policy.add(A)
    with pytest.raises(KeyError, match=B.hex()[:12]):
        getattr(policy, method)(B)
    assert list(policy.victims()) == [A]


def test_a_copy_goes_its_own_way(policy: EvictionPolicy) -> None:
    policy.add(A)
    other = copy.deepcopy(policy)
    other.add(B)
    policy.discard(A)
    assert list(policy.victims()) == []
    assert list(other.victims()) == [A, B]


def test_policies_know_no_more_than_keys() -> None:
    assert issubclass(LRU, FIFO)
    assert {name for name in dir(EvictionPolicy) if name[0] != "_"} == {
        "add",
        "discard",
        "touch",
        "victims",
    }


def test_fifo_does_not_count_uses() -> None:
    policy = filled(FIFO())
    policy.touch(A)
    assert list(policy.victims()) == [A, B, C, D]


def test_lru_keeps_what_was_used_last() -> None:
    policy = filled(LRU())
    policy.touch(B)
    policy.touch(A)
    assert list(policy.victims()) == [C, D, B, A]


class PolicyMachine(RuleBasedStateMachine):
    """A policy against a plain list."""

    policy_type: Any

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.policy_type()
        self.order: list[Any] = []

    @rule(number=st.integers(0, 5))
    def add(self, number: int) -> None:
        key = make_key(number)
        if key not in self.order:
            self.policy.add(key)
            self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(pick=st.integers(0, 5))
    def touch(self, pick: int) -> None:
        key = self.order[pick % len(self.order)]
        self.policy.touch(key)
        if self.policy_type is LRU:
            self.order.remove(key)
            self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(pick=st.integers(0, 5))
    def discard(self, pick: int) -> None:
        self.policy.discard(self.order.pop(pick % len(self.order)))

    @invariant()
    def order_is_that_of_the_list(self) -> None:
        assert list(self.policy.victims()) == self.order
        assert len(self.policy) == len(self.order)


class LRUMachine(PolicyMachine):
    policy_type = LRU


class FIFOMachine(PolicyMachine):
    policy_type = FIFO


TestLRU = LRUMachine.TestCase
TestFIFO = FIFOMachine.TestCase
