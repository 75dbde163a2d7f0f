import pytest

from pagedkv.errors import StoreFullError
from pagedkv.space import Space


def test_everything_counts_against_the_bound() -> None:
    space = Space("x.zarr", 100)
    space.count(40)
    space.grow_scratch(20)
    space.reserve(30)
    space.require(10)
    with pytest.raises(StoreFullError, match=r"x\.zarr has .*\(90\) of .*\(100\) .*\(11\) more"):
        space.require(11)
    assert space.nbytes == 60


def test_what_has_no_room_changes_nothing() -> None:
    space = Space("x.zarr", 100)
    for method in (space.require, space.reserve, space.grow_scratch):
        with pytest.raises(StoreFullError):
            method(101)
    space.reserve(100)


def test_a_reservation_ends_as_bytes_or_as_room() -> None:
    space = Space("x.zarr", 100)
    space.reserve(60)
    space.release(60, written=False)
    assert space.nbytes == 0
    space.reserve(60)
    space.release(60, written=True)
    assert space.nbytes == 60
    with pytest.raises(StoreFullError):
        space.reserve(41)
    space.check_invariants()


def test_without_a_bound_there_is_always_room() -> None:
    space = Space("x.zarr", None)
    space.reserve(2**60)
    space.grow_scratch(2**60)


def test_a_store_over_its_bound_takes_nothing_but_is_not_at_fault_for_nothing() -> None:
    space = Space("x.zarr", 10)
    space.count(20)
    space.reserve(0)
    with pytest.raises(StoreFullError):
        space.reserve(1)
