"""SlotPool: what is allocated, where, and that neighbours never overlap."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_samples import make_page, make_spec

from pagedkv import PoolExhaustedError
from pagedkv.pool import SlotPool


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_kinds", [1, 2])
def test_the_array_is_layer_first_and_holds_exactly_its_slots(dtype: str, num_kinds: int) -> None:
    spec = make_spec(num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype, num_kinds=num_kinds)
    pool = SlotPool(spec, 7)
    assert pool.array.shape == (3, num_kinds, 7, 4, 2, 5)
    assert pool.array.dtype == spec.np_dtype
    assert pool.array.flags.c_contiguous
    assert pool.nbytes == 7 * spec.page_nbytes
    assert not pool.array.any()


def test_bfloat16_memory_can_be_seen_as_int16() -> None:
    pool = SlotPool(make_spec(dtype="bfloat16"), 2)
    pool.array[...] = ml_dtypes.bfloat16(1.5)
    assert (pool.array.view(np.int16) == 0x3FC0).all()


def test_page_layer_and_run_are_views_of_one_array() -> None:
    pool = SlotPool(make_spec(), 4)
    pool.array[...] = np.arange(pool.array.size, dtype=np.float32).reshape(pool.array.shape)
    assert np.array_equal(pool.page(2), pool.array[:, :, 2])
    assert np.array_equal(pool.layer(1, 2), pool.array[1, :, 2])
    run = pool.run(1, 0, 1, 3)
    assert run.shape == (12, 1, 2)
    assert run.flags.c_contiguous
    assert np.array_equal(run, np.concatenate([pool.array[1, 0, slot] for slot in (1, 2, 3)]))
    for view in (pool.page(2), pool.layer(1, 2), run):
        assert np.shares_memory(view, pool.array)


def test_no_page_reaches_into_another() -> None:
    pool = SlotPool(make_spec(num_layers=3, head_dim=15), 5)
    for slot in range(5):
        pool.page(slot)[...] = make_page(pool.spec, slot)
    for slot in range(5):
        assert np.array_equal(pool.page(slot), make_page(pool.spec, slot))


@pytest.mark.parametrize("num_slots", [0, -1, -(2**40)])
def test_a_pool_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots is {num_slots}"):
        SlotPool(make_spec(), num_slots)


@pytest.mark.parametrize("num_slots", [2.0, "2", None, True])
def test_a_number_of_slots_that_is_no_integer_is_refused(num_slots: Any) -> None:
    with pytest.raises(TypeError, match=f"num_slots is {num_slots!r}"):
        SlotPool(make_spec(), num_slots)


def test_a_pool_path_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="pool"):
        SlotPool(make_spec(), 2, path)
    assert path.read_bytes() == b"precious"


def test_a_file_mapped_pool_leaves_no_name_behind(tmp_path: Path) -> None:
    pool = SlotPool(make_spec(), 2, tmp_path / "pool")
    assert list(tmp_path.iterdir()) == []
    pool.page(1)[...] = 3
    assert (pool.page(1) == 3).all()
    assert not pool.page(0).any()
    SlotPool(make_spec(), 2, str(tmp_path / "pool"))


def test_a_pool_in_a_folder_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        SlotPool(make_spec(), 2, tmp_path / "missing" / "pool")


def test_allocate_prefers_consecutive_slots() -> None:
    pool = SlotPool(make_spec(), 8)
    assert pool.allocate(8) == list(range(8))
    for slot in (0, 2, 4, 5, 6):
        pool.free(slot)
    assert pool.allocate(3) == [4, 5, 6]
    assert sorted(pool.allocate(2)) == [0, 2]


def test_allocate_after_a_slot_continues_there() -> None:
    pool = SlotPool(make_spec(), 8)
    pool.allocate(3)
    pool.free(0)
    assert pool.allocate(2, after=2) == [3, 4]
    assert pool.allocate(1, after=4) == [5]
    assert pool.allocate(1, after=1) == [0]  # slot 2 is taken
    assert pool.allocate(2, after=5) == [6, 7]
    pool.check_invariants()


def test_allocate_after_the_last_slot_looks_elsewhere() -> None:
    pool = SlotPool(make_spec(), 3)
    pool.allocate(3)
    pool.free(0)
    assert pool.allocate(1, after=2) == [0]


def test_allocate_when_exhausted_changes_nothing() -> None:
    pool = SlotPool(make_spec(), 3)
    pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="2 slots were asked for, but only 1 of 3"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(1) == [2]
    assert pool.allocate(0) == []


def test_one_slot_is_the_first_that_is_free() -> None:
    pool = SlotPool(make_spec(), 3)
    assert [pool.allocate_one() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(AssertionError, match="no slot is free"):
        pool.allocate_one()
    for slot in (2, 1):
        pool.free(slot)
    assert pool.allocate(2) == [1, 2]
    pool.free(1)
    assert pool.allocate_one() == 1
    pool.check_invariants()


def test_pins_count() -> None:
    pool = SlotPool(make_spec(), 2)
    (slot,) = pool.allocate(1)
    pool.pin(slot)
    pool.pin(slot)
    pool.unpin(slot)
    assert pool.is_pinned(slot)
    assert pool.num_pinned == 1
    pool.unpin(slot)
    assert not pool.is_pinned(slot)
    assert pool.num_pinned == 0


def test_wrong_use_is_an_assertion() -> None:
    pool = SlotPool(make_spec(), 2)
    (slot,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="not pinned"):
        pool.unpin(slot)
    pool.pin(slot)
    with pytest.raises(AssertionError, match="is pinned"):
        pool.free(slot)
    pool.unpin(slot)
    pool.free(slot)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(slot)
    with pytest.raises(AssertionError, match="is free"):
        pool.pin(slot)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a set of slots, each filled with a number of its own."""

    @initialize(num_slots=st.integers(1, 9))
    def start(self, num_slots: int) -> None:
        self.pool = SlotPool(make_spec(num_layers=1), num_slots)
        self.taken: dict[int, int] = {}
        self.pinned: list[int] = []
        self.next_number = 1

    @rule(count=st.integers(0, 10), after=st.none() | st.integers(0, 8))
    def allocate(self, count: int, after: int | None) -> None:
        place = None if after is None else after % self.pool.num_slots
        if count > self.pool.num_slots - len(self.taken):
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(count, place)
            return
        slots = self.pool.allocate(count, place)
        assert len(set(slots)) == count
        for slot in slots:
            assert slot not in self.taken
            self.taken[slot] = self.next_number
            self.pool.page(slot)[...] = self.next_number
            self.next_number += 1

    @precondition(lambda self: len(self.taken) < self.pool.num_slots)
    @rule()
    def allocate_one(self) -> None:
        slot = self.pool.allocate_one()
        assert slot not in self.taken
        self.taken[slot] = self.next_number
        self.pool.page(slot)[...] = self.next_number
        self.next_number += 1

    @precondition(lambda self: set(self.taken) - set(self.pinned))
    @rule(pick=st.integers(0, 8))
    def free(self, pick: int) -> None:
        slots = sorted(set(self.taken) - set(self.pinned))
        slot = slots[pick % len(slots)]
        self.pool.free(slot)
        del self.taken[slot]

    @precondition(lambda self: self.taken)
    @rule(pick=st.integers(0, 8))
    def pin(self, pick: int) -> None:
        slot = sorted(self.taken)[pick % len(self.taken)]
        self.pool.pin(slot)
        self.pinned.append(slot)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 8))
    def unpin(self, pick: int) -> None:
        self.pool.unpin(self.pinned.pop(pick % len(self.pinned)))

    @invariant()
    def agrees_with_the_set(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == self.pool.num_slots - len(self.taken)
        assert self.pool.num_pinned == len(set(self.pinned))
        for slot, number in self.taken.items():
            assert (self.pool.page(slot) == number).all()
            assert self.pool.is_pinned(slot) == (slot in self.pinned)


TestPool = PoolMachine.TestCase
