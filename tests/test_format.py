import struct

import google_crc32c
import numpy as np
import pytest
from store_samples import make_entries, make_key, make_spec

from pagedkv import format as fmt
from pagedkv.codec import Int8, Lossless, Raw
from pagedkv.format import Geometry, PageEntry, StoreRow


@pytest.mark.parametrize("lane", [0, 7, 9999, 10000])
def test_lane_names_name_their_lane(lane: int) -> None:
    assert fmt.lane_number(fmt.lane_name(lane)) == lane


@pytest.mark.parametrize("name", ["lane-", "lane-1", "lane-00001", "lane--001", "kv", "lane-000a"])
def test_other_names_name_no_lane(name: str) -> None:
    assert fmt.lane_number(name) is None


@pytest.mark.parametrize("segment", [0, 5, 123456])
def test_chunk_names_name_their_segment(segment: int) -> None:
    assert fmt.chunk_name(segment, 2) == f"c.{segment}.0"
    assert fmt.segment_number(fmt.chunk_name(segment, 2), 2) == segment


@pytest.mark.parametrize(
    "name", ["zarr.json", "c.1", "c.1.0.0", "c.01.0", "c.-1.0", "c..0", "c.1.1", "d.1.0", "c.²"]
)
def test_other_names_name_no_segment(name: str) -> None:
    assert fmt.segment_number(name, 2) is None


def test_a_segment_of_a_model_is_about_48_mib() -> None:
    spec = make_spec(num_layers=30, num_kv_heads=3, head_dim=64, page_tokens=16)
    geometry = Geometry.of(spec, Raw())
    assert geometry.page_nbytes == spec.page_nbytes + 30 * 4
    assert 40 * 2**20 < geometry.rows * geometry.page_nbytes < 50 * 2**20


def test_a_page_larger_than_a_segment_gets_one_of_its_own() -> None:
    spec = make_spec(num_layers=60, num_kv_heads=64, head_dim=256, page_tokens=64)
    assert spec.page_nbytes > fmt.SEGMENT_NBYTES
    assert Geometry.of(spec, Raw()).rows == 1


def test_small_pages_get_segments_that_cost_little_beside_them() -> None:
    spec = make_spec(num_layers=1, num_kv_heads=1, head_dim=15, page_tokens=1, num_kinds=1)
    geometry = Geometry.of(spec, Raw())
    assert 500 < geometry.rows <= fmt.MAX_SEGMENT_ROWS
    assert geometry.write_nbytes(1) - geometry.page_nbytes <= fmt.MAX_OVERHEAD_NBYTES + 12


def test_write_nbytes_counts_every_segment_that_is_begun() -> None:
    geometry = Geometry.of(make_spec(), Raw(), rows=4)
    overhead = geometry.write_nbytes(1) - geometry.page_nbytes
    assert geometry.write_nbytes(0) == 0
    assert geometry.write_nbytes(4) == 4 * geometry.page_nbytes + overhead
    assert geometry.write_nbytes(9) == 9 * geometry.page_nbytes + 3 * overhead


def test_the_tag_tells_specs_and_codecs_apart() -> None:
    geometries = [
        Geometry.of(make_spec(), Raw()),
        Geometry.of(make_spec(model="other"), Raw()),
        Geometry.of(make_spec(), Int8()),
        Geometry.of(make_spec(), Int8(key_scales="token")),
    ]
    assert len({geometry.tag for geometry in geometries}) == 4


def test_the_index_says_where_each_layer_of_each_page_is() -> None:
    geometry = Geometry.of(make_spec(num_layers=2), Raw(), rows=3)
    index = fmt.segment_index(geometry, np.full((2, 2), geometry.payload_nbytes, np.uint32))
    assert len(index) == 3 * 2 * 16 + 4
    assert geometry.index_nbytes == len(index)
    size = geometry.chunk_nbytes
    expected = [(number * size, size) for number in range(4)] + [(2**64 - 1, 2**64 - 1)] * 2
    assert list(struct.iter_unpack("<QQ", index[:-4])) == expected
    assert index[-4:] == struct.pack("<I", google_crc32c.value(index[:-4]))


def test_the_index_of_layers_of_variable_size_adds_them_up() -> None:
    geometry = Geometry.of(make_spec(num_layers=2), Lossless(), rows=2)
    index = fmt.segment_index(geometry, np.array([[10, 20]], np.uint32))
    found = list(struct.iter_unpack("<QQ", index[:-4]))
    assert found == [(0, 14), (14, 24)] + [(2**64 - 1, 2**64 - 1)] * 2


@pytest.mark.parametrize("max_nbytes", [10**6, 10**7, 10**9])
def test_a_segment_of_a_bounded_store_is_at_most_a_sixteenth_of_the_bound(max_nbytes: int) -> None:
    for spec in (make_spec(), make_spec(num_layers=30, head_dim=64, page_tokens=16)):
        geometry = Geometry.of(spec, Raw(), max_nbytes=max_nbytes)
        assert 1 <= geometry.rows <= Geometry.of(spec, Raw()).rows
        assert geometry.rows == 1 or geometry.write_nbytes(geometry.rows) <= max_nbytes // 16


def test_a_bound_that_is_smaller_than_a_page_leaves_a_row() -> None:
    assert Geometry.of(make_spec(), Raw(), max_nbytes=1).rows == 1


def test_records_of_variable_size_say_where_the_layers_are() -> None:
    fixed, variable = (
        Geometry.of(make_spec(num_layers=2), codec, rows=3) for codec in (Raw(), Lossless())
    )
    assert fixed.fixed_size
    assert not variable.fixed_size
    assert variable.record_dtype.itemsize == fixed.record_dtype.itemsize + 8 + 2 * 4
    names = variable.record_dtype.names
    assert names is not None
    assert names[names.index("layer_crcs") + 1 :][:2] == ("offset", "layer_nbytes")


@pytest.mark.parametrize(
    "row", [StoreRow(0, 0, 0), StoreRow(5, 3, 2**40 - 1), StoreRow(2**15 - 1, 2**8 - 1, 1)]
)
def test_a_packed_row_is_one_integer(row: StoreRow) -> None:
    packed = fmt.pack_row(row)
    assert np.int64(packed) == packed
    assert fmt.unpack_row(packed) == row
    if row.row:
        assert fmt.pack_row(row._replace(row=row.row - 1)) == packed - 1


def test_derived_columns_add_up_to_the_derived_bytes() -> None:
    geometry = Geometry.of(make_spec(page_tokens=4), Raw(), rows=10)
    assert geometry.derived_nbytes == 10 * (32 + 32 + 4 * 4 + 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": b"short"}, "key is b'short'"),
        ({"key": "x" * 32}, "a page key has 32 bytes"),
        ({"parent": b"\0" * 31}, "parent is"),
        ({"num_tokens": 0, "tokens": None}, "num_tokens is 0"),
        ({"num_tokens": 5, "tokens": None}, "num_tokens is 5: a page of this spec has 1 to 4"),
        ({"num_tokens": 3}, r"tokens have shape \(4,\), but num_tokens is 3"),
        ({"tokens": np.zeros((4, 1), np.int32)}, r"shape \(4, 1\)"),
        ({"tokens": np.zeros(4, np.float32)}, "float32"),
        ({"salt": "text"}, "salt is 'text'"),
    ],
)
def test_an_entry_that_fits_no_page_is_refused(changes: dict, message: str) -> None:
    spec = make_spec(page_tokens=4)
    (entry,) = make_entries(spec, 1, **changes)
    with pytest.raises(ValueError, match=message):
        entry.check(spec)


def test_an_opaque_key_and_a_tail_are_entries() -> None:
    spec = make_spec(page_tokens=4)
    PageEntry(key=make_key(1), num_tokens=4).check(spec)
    PageEntry(key=make_key(1), num_tokens=1, tokens=np.array([3], np.int32)).check(spec)
