import hashlib
import struct

import google_crc32c
import numpy as np
import pytest
from store_samples import make_entries, make_key, make_spec

from pagedkv.catalog import (
    derived_chunks,
    entry_of,
    map_of,
    pack_catalog,
    repack_catalog,
    unpack_catalog,
)
from pagedkv.codec import Lossless, Raw
from pagedkv.format import Geometry, PageEntry
from pagedkv.segment_map import SegmentMap, bounds_of

SPEC = make_spec(num_layers=2, page_tokens=4)
GEOMETRY = Geometry.of(SPEC, Raw(), rows=5)
VARIABLE = Geometry.of(SPEC, Lossless(), rows=5)
CRCS = np.arange(6, dtype=np.uint32).reshape(3, 2)
SIZES = np.array([[10, 20], [1, 7], [30, 3]], np.uint32)


def make_map(count: int, *, variable: bool = False) -> SegmentMap:
    bounds = bounds_of(SIZES[:count]) if variable else None
    return SegmentMap(holds=np.ones(count, np.bool_), crcs=CRCS[:count], bounds=bounds)


def pack(entries: list[PageEntry], segment: int = 2, *, store_tokens: bool = True) -> bytes:
    segment_map = make_map(len(entries))
    chunk = pack_catalog(GEOMETRY, segment, entries, segment_map, store_tokens=store_tokens)
    return chunk.tobytes()


def pack_variable(segment: int = 2) -> bytes:
    entries, segment_map = make_entries(SPEC, 3), make_map(3, variable=True)
    return pack_catalog(VARIABLE, segment, entries, segment_map, store_tokens=True).tobytes()


def sealed(chunk: bytes) -> bytes:
    """``chunk`` with the right checksum of the chunk, whatever its records say."""
    return chunk[:-4] + struct.pack("<I", google_crc32c.value(chunk[:-4]))


def test_a_chunk_gives_back_its_entries() -> None:
    entries = make_entries(SPEC, 3, salt=b"tenant")
    records, holds = unpack_catalog(GEOMETRY, 2, pack(entries))
    assert holds.tolist() == [True, True, True, False, False]
    assert records["row"].tolist() == [10, 11, 12, 0, 0]
    assert np.array_equal(records["layer_crcs"][:3], CRCS)
    for entry, record in zip(entries, records, strict=False):
        found = entry_of(record)
        assert (found.key, found.parent, found.num_tokens) == (entry.key, entry.parent, 4)
        assert np.array_equal(found.tokens, entry.tokens)
        assert found.salt == b""
        assert record["salt_sha256"].tobytes() == hashlib.sha256(b"tenant").digest()


def test_an_opaque_page_has_no_parent_and_no_tokens() -> None:
    records, _ = unpack_catalog(GEOMETRY, 2, pack([PageEntry(key=make_key(1), num_tokens=4)]))
    entry = entry_of(records[0])
    assert entry.parent is None
    assert entry.tokens is None


def test_a_tail_has_only_its_own_tokens() -> None:
    tail = PageEntry(key=make_key(1), num_tokens=2, tokens=np.array([5, 6], np.int32))
    records, _ = unpack_catalog(GEOMETRY, 2, pack([tail]))
    entry = entry_of(records[0])
    assert entry.num_tokens == 2
    assert entry.tokens is not None
    assert entry.tokens.tolist() == [5, 6]


def test_without_store_tokens_no_token_id_is_in_the_chunk() -> None:
    ids = np.array([0x11223344] * 4, np.int32)
    entries = make_entries(SPEC, 1, tokens=ids)
    assert struct.pack("<i", 0x11223344) in pack(entries)
    chunk = pack(entries, store_tokens=False)
    assert struct.pack("<i", 0x11223344) not in chunk
    assert entry_of(unpack_catalog(GEOMETRY, 2, chunk)[0][0]).tokens is None


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_chunk_of_another_length_is_torn(cut: int) -> None:
    chunk = pack(make_entries(SPEC, 3))
    with pytest.raises(ValueError, match=r"it has \d+ bytes instead of"):
        unpack_catalog(GEOMETRY, 2, chunk[:cut])


def test_every_flipped_bit_is_noticed() -> None:
    chunk = bytearray(pack(make_entries(SPEC, 3)))
    for at in range(0, len(chunk), 7):
        chunk[at] ^= 1 << at % 8
        with pytest.raises(ValueError, match="its CRC32C is wrong"):
            unpack_catalog(GEOMETRY, 2, bytes(chunk))
        chunk[at] ^= 1 << at % 8


def test_a_chunk_of_another_place_is_foreign() -> None:
    with pytest.raises(ValueError, match="another place or store"):
        unpack_catalog(GEOMETRY, 3, pack(make_entries(SPEC, 3), segment=2))


def test_a_chunk_of_another_model_is_foreign() -> None:
    other = Geometry.of(make_spec(num_layers=2, page_tokens=4, model="other"), Raw(), rows=5)
    with pytest.raises(ValueError, match="another place or store"):
        unpack_catalog(other, 2, pack(make_entries(SPEC, 3)))


def test_every_record_has_its_own_checksum() -> None:
    chunk = pack(make_entries(SPEC, 3))
    size = GEOMETRY.record_dtype.itemsize
    for place in range(3):
        record = chunk[place * size : (place + 1) * size]
        assert struct.unpack("<I", record[-4:]) == (google_crc32c.value(record[:-4]),)
    assert not any(chunk[3 * size : -4])


@pytest.mark.parametrize("field", ["magic", "row", "tag", "num_tokens"])
def test_a_record_that_is_not_of_its_place_holds_no_page(field: str) -> None:
    chunk = bytearray(pack(make_entries(SPEC, 3)))
    dtype = GEOMETRY.record_dtype
    at = dtype.itemsize + dtype.fields[field][1]
    chunk[at] ^= 0x40
    _, holds = unpack_catalog(GEOMETRY, 2, sealed(bytes(chunk)))
    assert holds.tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_record_of_more_tokens_than_a_page_has_holds_none(num_tokens: int) -> None:
    chunk = bytearray(pack(make_entries(SPEC, 2)))
    struct.pack_into("<I", chunk, GEOMETRY.record_dtype.fields["num_tokens"][1], num_tokens)
    assert unpack_catalog(GEOMETRY, 2, sealed(bytes(chunk)))[1].tolist()[:2] == [False, True]


def test_a_map_reaches_to_the_last_page_that_there_is() -> None:
    chunk = bytearray(pack(make_entries(SPEC, 3)))
    chunk[0] ^= 1
    segment_map = map_of(GEOMETRY, *unpack_catalog(GEOMETRY, 2, sealed(bytes(chunk))))
    assert segment_map.holds.tolist() == [False, True, True]
    assert np.array_equal(segment_map.crcs, CRCS)
    assert segment_map.bounds is None
    assert segment_map.nbytes == 3 + 3 * 2 * 4


def test_a_map_of_variable_sizes_says_where_each_layer_is() -> None:
    records, holds = unpack_catalog(VARIABLE, 2, pack_variable())
    assert records["offset"][:3].tolist() == [0, 38, 54]
    assert np.array_equal(records["layer_nbytes"][:3], SIZES)
    segment_map = map_of(VARIABLE, records, holds)
    assert segment_map.bounds is not None
    assert segment_map.bounds.tolist() == [[0, 14, 38], [38, 43, 54], [54, 88, 95]]
    assert segment_map.nbytes == 3 + 3 * 2 * 4 + 3 * 3 * 8


def test_a_layer_larger_than_any_can_be_is_refused() -> None:
    chunk = bytearray(pack_variable())
    at = VARIABLE.record_dtype.itemsize + VARIABLE.record_dtype.fields["layer_nbytes"][1]
    for size in (VARIABLE.payload_nbytes, VARIABLE.payload_nbytes + 1):
        struct.pack_into("<I", chunk, at, size)
        records, holds = unpack_catalog(VARIABLE, 2, sealed(bytes(chunk)))
        if size == VARIABLE.payload_nbytes:
            map_of(VARIABLE, records, holds)
        else:
            with pytest.raises(ValueError, match=rf"a layer of {size + 4} bytes"):
                map_of(VARIABLE, records, holds)


@pytest.mark.parametrize("variable", [False, True])
def test_moved_pages_keep_their_records_at_their_new_place(*, variable: bool) -> None:
    geometry = VARIABLE if variable else GEOMETRY
    chunk = pack_variable() if variable else pack(make_entries(SPEC, 3, salt=b"tenant"))
    records, _ = unpack_catalog(geometry, 2, chunk)
    chosen = records[[2, 0]]
    moved_map = SegmentMap(
        holds=np.ones(2, np.bool_),
        crcs=CRCS[[2, 0]],
        bounds=bounds_of(SIZES[[2, 0]]) if variable else None,
    )
    again = repack_catalog(geometry, 7, chosen, moved_map).tobytes()
    moved, holds = unpack_catalog(geometry, 7, again)
    assert holds.tolist() == [True, True, False, False, False]
    assert moved["row"][:2].tolist() == [35, 36]
    for name in geometry.record_dtype.names:
        if name not in ("row", "crc", "offset"):
            assert np.array_equal(moved[name][:2], chosen[name]), name
    found = map_of(geometry, moved, holds)
    assert np.array_equal(found.crcs, moved_map.crcs)
    if variable:
        assert np.array_equal(found.bounds, moved_map.bounds)
    size = geometry.record_dtype.itemsize
    assert struct.unpack("<I", again[size - 4 : size]) == (google_crc32c.value(again[: size - 4]),)


def test_derived_columns_say_what_the_records_say() -> None:
    entries = make_entries(SPEC, 2)
    tail = PageEntry(key=make_key(9), num_tokens=1, tokens=np.array([7], np.int32))
    records, holds = unpack_catalog(GEOMETRY, 2, pack([*entries, tail]))
    columns = derived_chunks(GEOMETRY, records, holds)
    assert columns["num_tokens"].tolist() == [4, 4, 1, 0, 0]
    assert columns["tokens"].tolist() == [
        [0, 1, 2, 3],
        [1000, 1001, 1002, 1003],
        [7, -1, -1, -1],
        [-1] * 4,
        [-1] * 4,
    ]
    assert columns["key"][1].tobytes() == make_key(1)
    assert columns["parent"][1].tobytes() == make_key(0)
    assert not columns["parent"][2:].any()
