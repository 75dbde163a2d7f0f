import hashlib
import struct

import google_crc32c
import numpy as np
import pytest
from store_samples import make_entries, make_key, make_spec

from pagedkv.catalog import derived_chunks, entry_of, pack_catalog, unpack_catalog
from pagedkv.codec import Raw
from pagedkv.format import Geometry, PageEntry

SPEC = make_spec(num_layers=2, page_tokens=4)
GEOMETRY = Geometry.of(SPEC, Raw(), rows=5)
CRCS = np.arange(6, dtype=np.uint32).reshape(3, 2)


def pack(entries: list[PageEntry], segment: int = 2, *, store_tokens: bool = True) -> bytes:
    crcs = CRCS[: len(entries)]
    return pack_catalog(GEOMETRY, segment, entries, crcs, store_tokens=store_tokens).tobytes()


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


def test_a_record_whose_own_checksum_is_wrong_holds_no_page() -> None:
    chunk = bytearray(pack(make_entries(SPEC, 3)))
    chunk[GEOMETRY.record_dtype.itemsize + 50] ^= 1
    _, holds = unpack_catalog(GEOMETRY, 2, sealed(bytes(chunk)))
    assert holds.tolist() == [True, False, True, False, False]


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
