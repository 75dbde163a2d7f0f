"""Rows of ids in order: the nearest are those that begin most like another row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.token_order import nearest, num_common

rows_of_ids = st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=5)


def as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def shared(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(left=rows_of_ids, right=rows_of_ids)
def test_common_ids_are_counted_as_one_by_one(left: list[int], right: list[int]) -> None:
    assert num_common(as_bytes(left), as_bytes(right)) == shared(left, right)


def test_ids_with_some_equal_bytes_are_different() -> None:
    assert num_common(as_bytes([7, 0x01020304]), as_bytes([7, 0x0F020304])) == 1


@given(items=st.lists(rows_of_ids, max_size=30), wanted=rows_of_ids)
def test_the_nearest_come_first_and_none_is_left_out(
    items: list[list[int]], wanted: list[int]
) -> None:
    ordered = sorted(map(as_bytes, items))
    found = list(nearest(ordered, as_bytes(wanted), bytes))
    expected = sorted((shared(one, wanted) for one in items), reverse=True)
    assert [count for count, _ in found] == [count for count in expected if count]
    assert all(num_common(one, as_bytes(wanted)) == count for count, one in found)


def test_of_many_items_few_are_looked_at() -> None:
    ordered = sorted(as_bytes([1, 2, number]) for number in range(100_000))
    looked_at = []

    def ids_of(item: bytes) -> bytes:
        looked_at.append(item)
        return item

    count, _ = next(nearest(ordered, as_bytes([1, 2, 100_001]), ids_of))
    assert count == 2
    assert len(looked_at) < 25
