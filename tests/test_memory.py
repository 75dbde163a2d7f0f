import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_samples import Array, bits, make_pages, make_spec, same_bits

from pagedkv.memory import PageArrays, PageMemory

SPEC = make_spec()
SHAPE, DTYPE = SPEC.page_shape, SPEC.np_dtype
PAGES = make_pages(SPEC, 5)
BLOCK = (SPEC.page_tokens, SPEC.held_heads, SPEC.head_dim)


def arrays_of(arrays: Any, at: Any = None, shape: tuple[int, ...] = SHAPE) -> PageArrays:
    return PageArrays(
        arrays, None if at is None else np.array(at, np.int64), shape, DTYPE, "a page"
    )


def in_memory(memory: PageMemory, number: int, shape: tuple[int, ...] = SHAPE) -> Array:
    """What a kernel would see as one page."""
    layers, kinds = shape[0] if len(shape) == 5 else 1, shape[-4]
    out = np.empty((layers, kinds, *BLOCK), DTYPE)
    for layer in range(layers):
        for kind in range(kinds):
            address = int(memory.addresses[number])
            address += layer * memory.layer_stride + kind * memory.kind_stride
            raw = ctypes.string_at(address, out[layer, kind].nbytes)
            out[layer, kind] = np.frombuffer(raw, DTYPE).reshape(BLOCK)
    return out.reshape(shape)


def stacked() -> Array:
    return np.stack(PAGES)


def pool() -> Array:
    """Pages as a pool has them: layer and kind before the page."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(stacked(), 0, 2)), 2, 0)


def token_major() -> Array:
    """Layer, kind and page before the tokens, with unused places between the pages."""
    wide = np.zeros((2, 3, 10, 2, *BLOCK), np.float32).transpose(2, 1, 0, 3, 4, 5, 6)[
        ..., 0, :, :, :
    ]
    view = wide[::2]
    view[...] = stacked()
    return view


def reversed_pages() -> Array:
    return np.ascontiguousarray(stacked()[::-1])[::-1]


def reversed_layers() -> Array:
    return np.ascontiguousarray(stacked()[:, ::-1])[:, ::-1]


def every_other_channel() -> Array:
    wide = np.zeros((*stacked().shape[:-1], 16), np.float32)
    wide[..., ::2] = stacked()
    return wide[..., ::2]


def some_heads() -> Array:
    wide = np.zeros((*stacked().shape[:-2], 5, 8), np.float32)
    wide[..., 1:3, :] = stacked()
    return wide[..., 1:3, :]


def reversed_tokens() -> Array:
    return np.ascontiguousarray(stacked()[:, :, :, ::-1])[:, :, :, ::-1]


def fortran_order() -> Array:
    return np.asfortranarray(stacked())


def misaligned() -> Array:
    raw = np.zeros(stacked().nbytes + 1, np.uint8)
    view = raw[1:].view(np.float32).reshape(stacked().shape)
    view[...] = stacked()
    assert not view.flags.aligned
    return view


IN_PLACE = [stacked, pool, token_major, reversed_pages, reversed_layers]
STAGED = [every_other_channel, some_heads, reversed_tokens, fortran_order, misaligned]


@pytest.mark.parametrize("make", IN_PLACE + STAGED)
@pytest.mark.parametrize("at", [None, [3, 0, 4], [2], [1, 1], [0, 1, 2, 3, 4]])
def test_pages_of_one_array_are_where_the_memory_says(
    make: Callable[[], Array], at: list[int] | None
) -> None:
    whole = make()
    arrays = arrays_of(whole, at)
    arrays.fill()
    numbers = range(5) if at is None else at
    assert arrays.count == len(numbers) == len(arrays.memory.addresses)
    for number, place in enumerate(numbers):
        assert bits(in_memory(arrays.memory, number)) == bits(PAGES[place])
        assert bits(arrays.page(number)) == bits(PAGES[place])


@pytest.mark.parametrize("make", IN_PLACE + STAGED)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_pages_of_a_sequence_are_where_the_memory_says(
    make: Callable[[], Array], count: int
) -> None:
    arrays = arrays_of(list(make()[:count]))
    arrays.fill()
    assert arrays.count == count
    for number in range(count):
        assert bits(in_memory(arrays.memory, number)) == bits(PAGES[number])


@pytest.mark.parametrize("make", IN_PLACE)
def test_what_a_kernel_can_walk_is_not_copied(make: Callable[[], Array]) -> None:
    whole = make()
    arrays = arrays_of(whole)
    for number, page in enumerate(whole):
        assert int(arrays.memory.addresses[number]) == page.__array_interface__["data"][0]
        assert np.shares_memory(arrays.page(number), page)


@pytest.mark.parametrize("make", STAGED)
def test_what_a_kernel_cannot_walk_comes_back_through_the_staging_area(
    make: Callable[[], Array],
) -> None:
    whole = make()
    arrays = arrays_of(whole, [4, 2])
    for number, value in enumerate((40, 20)):
        arrays.page(number)[...] = value
    assert same_bits(whole, PAGES)
    arrays.deliver()
    assert (whole[4] == 40).all()
    assert (whole[2] == 20).all()
    assert same_bits(whole[[0, 1, 3]], [PAGES[0], PAGES[1], PAGES[3]])


def test_arrays_of_unlike_strides_are_staged() -> None:
    mixed = [pool()[0], PAGES[1], fortran_order()[2]]
    arrays = arrays_of(mixed)
    arrays.fill()
    for number in range(3):
        assert bits(in_memory(arrays.memory, number)) == bits(PAGES[number])
    arrays.page(0)[...] = 1
    arrays.deliver()
    assert (mixed[0] == 1).all()


@pytest.mark.parametrize("make", IN_PLACE + STAGED)
def test_a_part_has_the_pages_that_were_chosen(make: Callable[[], Array]) -> None:
    for arrays, places in (
        (arrays_of(make()), [0, 1, 2, 3, 4]),
        (arrays_of(list(make())), [0, 1, 2, 3, 4]),
        (arrays_of(make(), [4, 0, 2]), [4, 0, 2]),
    ):
        part = arrays.part(np.array([2, 0]))
        part.fill()
        again = part.part(np.array([1]))
        assert (part.count, again.count) == (2, 1)
        for found, place in ((part, places[2]), (again, places[0])):
            assert bits(found.page(0)) == bits(PAGES[place])
            assert bits(in_memory(found.memory, 0)) == bits(PAGES[place])


@pytest.mark.parametrize("make", IN_PLACE + STAGED)
def test_one_layer_of_each_page_is_found(make: Callable[[], Array]) -> None:
    layers = make()[:, 1]
    arrays = arrays_of(layers, [3, 1], SPEC.layer_shape)
    arrays.fill()
    for number, place in enumerate((3, 1)):
        found = in_memory(arrays.memory, number, SPEC.layer_shape)
        assert bits(found) == bits(PAGES[place][1])


def test_pages_of_one_token_head_or_channel_need_no_strides_for_it() -> None:
    spec = make_spec(page_tokens=1, num_kv_heads=1, head_dim=3)
    (page,) = make_pages(spec, 1)
    wide = np.zeros((1, *page.shape[:2], 7, 2, 3), np.float32)
    view = wide[:, :, :, 4:5, 1:2]
    view[0] = page
    arrays = PageArrays(view, None, spec.page_shape, spec.np_dtype, "a page")
    assert np.shares_memory(arrays.page(0), wide)
    address = int(arrays.memory.addresses[0]) + arrays.memory.layer_stride
    assert ctypes.string_at(address, 12) == page[1, 0].tobytes()


@pytest.mark.parametrize("arrays", [[], np.zeros((0, *SHAPE), np.float32)])
def test_no_pages_are_pages_too(arrays: Any) -> None:
    found = arrays_of(arrays)
    assert found.count == 0
    assert len(found.memory.addresses) == 0
    found.fill()
    found.deliver()
    assert found.is_writable


def test_no_places_of_an_array_are_no_pages() -> None:
    assert arrays_of(stacked(), []).count == 0


@pytest.mark.parametrize("at", [[-1], [5], [0, 5], [2, -3, 1]])
def test_a_place_beyond_the_array_is_refused(at: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a page has 5 places: at names -?\d\.\.-?\d"):
        arrays_of(stacked(), at)


def test_places_of_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="at chooses places of one array"):
        arrays_of(PAGES, [0])


@pytest.mark.parametrize(
    "arrays",
    [
        np.zeros((5, 2, 2, 4, 2, 8), np.float32),
        np.zeros(SHAPE, np.float32),
        np.zeros((), np.float32),
        stacked().astype(np.float64),
        stacked().astype(">f4"),
        [PAGES[0], PAGES[1][:2]],
        [PAGES[0], PAGES[1].astype(np.float16)],
        [PAGES[0].astype(">f4")],
    ],
    ids=str,
)
def test_another_shape_dtype_or_byte_order_is_refused(arrays: Any) -> None:
    with pytest.raises(ValueError, match=r"a page is .*: the spec needs float32 of shape \(3, 2"):
        arrays_of(arrays)


def test_one_read_only_array_makes_all_unwritable() -> None:
    read_only = stacked()
    read_only.flags.writeable = False
    assert not arrays_of(read_only).is_writable
    assert not arrays_of([PAGES[0], read_only[1]]).is_writable
    assert arrays_of(PAGES).is_writable
    assert arrays_of(stacked(), [1]).is_writable


def test_part_of_the_memory_keeps_the_strides() -> None:
    memory = PageMemory(np.array([10, 20, 30]), 4, 2)
    assert memory.part(slice(1, 3)).addresses.tolist() == [20, 30]
    assert memory.part(np.array([2, 0]))[1:] == (4, 2)
