"""Pages are copied between places, whatever their size and strides."""

import numpy as np
import pytest
from kv_samples import Array, bits, make_pages, make_spec

from pagedkv.arrays import SMALL_PAGE_NBYTES, copy_pages


@pytest.mark.parametrize("head_dim", [2, 1024])
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("numbers", [[], [3], [4, 0, 2], [1, 1]])
def test_pages_are_copied_to_their_places(
    head_dim: int, is_strided: bool, numbers: list[int]
) -> None:
    spec = make_spec(head_dim=head_dim)
    assert (spec.page_nbytes <= SMALL_PAGE_NBYTES) == (head_dim == 2)
    pages = make_pages(spec, range(5))
    to: Array = np.zeros((12, *spec.page_shape), np.float32)[:: 2 if is_strided else 1]
    places = [5, 1, 3][: len(numbers)]
    copy_pages(to, places, pages, numbers)
    for place in range(6):
        expected = pages[numbers[places.index(place)]] if place in places else np.zeros_like(to[0])
        assert bits(to[place]) == bits(expected)
