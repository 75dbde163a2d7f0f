import pytest
from store_samples import make_key

from pagedkv.format import StoreRow, pack_row
from pagedkv.row_index import RowIndex

KEY = make_key(1)


@pytest.fixture
def index() -> RowIndex:
    index = RowIndex()
    for row in range(3):
        index.add(KEY, StoreRow(0, 0, row))
    index.check_invariants()
    return index


@pytest.mark.parametrize("row", [StoreRow(0, 0, 0), StoreRow(32767, 255, 2**40 - 1)])
def test_rows_come_back_as_they_went_in(row: StoreRow) -> None:
    index = RowIndex()
    assert index.add(KEY, row) == row
    assert index.get(KEY) == row
    assert list(index) == [(KEY, row)]
    assert KEY in index
    assert len(index) == 1


def test_an_unknown_key_has_no_row(index: RowIndex) -> None:
    assert index.get(make_key(2)) is None
    assert make_key(2) not in index


def test_the_first_row_of_a_key_counts(index: RowIndex) -> None:
    assert index.get(KEY) == StoreRow(0, 0, 0)
    assert index.add(KEY, StoreRow(1, 0, 0)) == StoreRow(0, 0, 0)
    assert len(index) == 1


def test_adding_a_row_again_makes_no_copy(index: RowIndex) -> None:
    index.add(KEY, StoreRow(0, 0, 0))
    index.check_invariants()


def test_removing_the_row_that_counts_brings_its_copies_up_in_order(index: RowIndex) -> None:
    for row in range(3):
        assert index.get(KEY) == StoreRow(0, 0, row)
        assert index.remove(KEY, StoreRow(0, 0, row))
        index.check_invariants()
    assert KEY not in index


def test_removing_a_copy_leaves_the_row_that_counts(index: RowIndex) -> None:
    assert index.remove(KEY, StoreRow(0, 0, 1))
    index.check_invariants()
    assert index.get(KEY) == StoreRow(0, 0, 0)
    index.remove(KEY, StoreRow(0, 0, 0))
    assert index.get(KEY) == StoreRow(0, 0, 2)


def test_removing_an_unknown_row_changes_nothing(index: RowIndex) -> None:
    assert not index.remove(KEY, StoreRow(5, 0, 0))
    assert not index.remove(make_key(2), StoreRow(0, 0, 0))
    assert index.get(KEY) == StoreRow(0, 0, 0)
    index.check_invariants()


def test_many_keys_are_looked_up_at_once(index: RowIndex) -> None:
    index.add(make_key(2), StoreRow(3, 1, 9))
    found = index.get_many([make_key(2), make_key(9), KEY, make_key(2)])
    second = pack_row(StoreRow(3, 1, 9))
    assert found.tolist() == [second, -1, 0, second]
    assert index.get_many([]).tolist() == []
    assert index.get_many([]).dtype == found.dtype


def test_the_rows_of_a_segment_are_added_at_once(index: RowIndex) -> None:
    keys = [make_key(4), None, KEY, make_key(4), make_key(5)]
    index.add_many(keys, StoreRow(2, 1, 10))
    index.check_invariants()
    assert index.get(make_key(4)) == StoreRow(2, 1, 10)
    assert index.get(make_key(5)) == StoreRow(2, 1, 14)
    assert index.get(KEY) == StoreRow(0, 0, 0)
    assert len(index) == 3
    for row in range(3):
        index.remove(KEY, StoreRow(0, 0, row))
    assert index.get(KEY) == StoreRow(2, 1, 12)
    index.remove(make_key(4), StoreRow(2, 1, 10))
    assert index.get(make_key(4)) == StoreRow(2, 1, 13)
    index.check_invariants()
