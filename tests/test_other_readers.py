"""Other people's software reads our stores: every page, bit for bit."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from store_samples import (
    Array,
    empty_like,
    make_entries,
    make_key,
    make_pages,
    make_spec,
    run_python,
    same_bits,
)

from pagedkv import format as fmt
from pagedkv.catalog import unpack_catalog
from pagedkv.codec import Codec, Int8, Raw
from pagedkv.format import Geometry, PageEntry
from pagedkv.spec import KVSpec
from pagedkv.store import PageStore

GROUP = "lane-0000/group-0"
STORES: list[tuple[str, Codec]] = [
    ("float32", Raw()),
    ("float16", Raw()),
    ("bfloat16", Raw()),
    ("float32", Int8()),
    ("float16", Int8(key_scales="token")),
    ("bfloat16", Int8(value_scales="channel")),
]
NUM_PAGES = 11


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """New stores have segments of four rows."""
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


class Sample:
    """A closed store: 11 pages in segments of 4, 3, and 4 rows, the last of them a tail."""

    def __init__(self, path: Path, dtype: str, codec: Codec, **changes: Any) -> None:
        self.path = path / "cache.zarr"
        self.spec: KVSpec = make_spec(dtype=dtype, **changes)
        self.entries = make_entries(self.spec, NUM_PAGES)
        self.entries[-1] = PageEntry(
            key=make_key(10), num_tokens=2, tokens=np.array([7, 8], np.int32)
        )
        pages = make_pages(self.spec, NUM_PAGES)
        with PageStore.open(self.path, self.spec, codec=codec) as store:
            rows = store.write(0, self.entries[:7], pages[:7])
            rows += store.write(0, self.entries[7:], pages[7:])
            self.rows = [row.row for row in rows]
            self.read: list[Array] = empty_like(pages)
            store.read(rows, self.read)
        assert self.rows == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


@pytest.mark.parametrize(("dtype", "codec"), STORES, ids=str)
def test_zarr_python_reads_every_page_equal(
    tmp_path: Path, short_segments: None, dtype: str, codec: Codec
) -> None:
    sample = Sample(tmp_path, dtype, codec)
    kv = zarr.open_group(sample.path, mode="r")[f"{GROUP}/kv"]
    assert kv.shape == (12, *sample.spec.page_shape)
    assert kv.dtype == sample.spec.np_dtype
    assert kv.metadata.dimension_names == ("row", "layer", "kind", "token", "head", "channel")
    whole = kv[:]
    assert same_bits([whole[row] for row in sample.rows], sample.read)
    assert same_bits([kv[row] for row in sample.rows], sample.read)
    assert same_bits([kv[5, 1]], [sample.read[5][1]])
    assert not whole[7].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensorstore_reads_every_page_of_a_raw_store_equal(
    tmp_path: Path, short_segments: None, dtype: str
) -> None:
    sample = Sample(tmp_path, dtype, Raw())
    kv = tensorstore.open(
        {"driver": "zarr3", "kvstore": f"file://{sample.path}/{GROUP}/kv/"}, read=True
    ).result()
    assert kv.shape == (12, *sample.spec.page_shape)
    assert kv.dtype.numpy_dtype == sample.spec.np_dtype
    assert kv.domain.labels == ("row", "layer", "kind", "token", "head", "channel")
    whole = kv.read().result()
    assert same_bits([whole[row] for row in sample.rows], sample.read)
    assert same_bits([kv[9, 2].read().result()], [sample.read[8][2]])
    assert not whole[7].any()


@pytest.mark.parametrize("array", ["catalog", "key", "parent", "tokens", "num_tokens"])
def test_tensorstore_reads_the_other_arrays_as_zarr_python_does(
    tmp_path: Path, short_segments: None, array: str
) -> None:
    sample = Sample(tmp_path, "float32", Raw())
    theirs = tensorstore.open(
        {"driver": "zarr3", "kvstore": f"file://{sample.path}/{GROUP}/{array}/"}, read=True
    ).result()
    ours = zarr.open_group(sample.path, mode="r")[f"{GROUP}/{array}"]
    assert same_bits([theirs.read().result()], [ours[:]])


def test_tensorstore_notices_a_flipped_bit(tmp_path: Path, short_segments: None) -> None:
    sample = Sample(tmp_path, "float32", Raw())
    segment = sample.path / GROUP / "kv/c.0.0.0.0.0.0"
    data = bytearray(segment.read_bytes())
    data[77] ^= 4
    segment.write_bytes(data)
    kv = tensorstore.open(
        {"driver": "zarr3", "kvstore": f"file://{sample.path}/{GROUP}/kv/"}, read=True
    ).result()
    with pytest.raises(ValueError, match="DATA_LOSS"):
        kv[0].read().result()


@pytest.mark.parametrize(("dtype", "codec"), [STORES[0], STORES[1], STORES[3]], ids=str)
def test_xarray_opens_a_layer_group_with_named_dimensions(
    tmp_path: Path, short_segments: None, dtype: str, codec: Codec
) -> None:
    sample = Sample(tmp_path, dtype, codec)
    with xarray.open_zarr(sample.path, group=GROUP, consolidated=False) as data:
        assert data.kv.dims == ("row", "layer", "kind", "token", "head", "channel")
        assert data.kv.dtype == sample.spec.np_dtype
        assert dict(data.sizes) == {
            **dict(zip(data.kv.dims, (12, *sample.spec.page_shape), strict=True)),
            "byte": 32,
            "record": data.sizes["record"],
            "entry": 1024,
            "field": 48,
        }
        held = data.sel(row=data.num_tokens.values > 0)
        assert same_bits(list(held.kv.values), sample.read)
        assert data.num_tokens.values.tolist() == [4] * 7 + [0] + [4] * 3 + [2]
        assert [key.tobytes() for key in held.key.values] == [e.key for e in sample.entries]
        assert held.tokens.values[0].tolist() == [0, 1, 2, 3]
        assert held.tokens.values[-1].tolist() == [7, 8, -1, -1]
        parents = [e.parent or bytes(32) for e in sample.entries]
        assert [parent.tobytes() for parent in held.parent.values] == parents
        keys = held.kv.isel(row=3, layer=1, kind=0).values
        assert same_bits([keys], [sample.read[3][1, 0]])


def test_the_catalogue_array_holds_the_records(tmp_path: Path, short_segments: None) -> None:
    sample = Sample(tmp_path, "float32", Raw())
    array = zarr.open_group(sample.path, mode="r")[f"{GROUP}/catalog"]
    geometry = Geometry.of(sample.spec, Raw())
    assert array.metadata.dimension_names == ("row", "record")
    records = np.ascontiguousarray(array[:]).view(geometry.record_dtype)[:, 0]
    chunk = (sample.path / GROUP / "catalog/c.1.0").read_bytes()
    assert records[4:8].tobytes() == unpack_catalog(geometry, 1, chunk)[0].tobytes()


def test_a_store_of_one_kind_and_two_groups_opens(tmp_path: Path, short_segments: None) -> None:
    specs = [make_spec(num_kinds=1), make_spec(group="windowed", dtype="float16", num_layers=1)]
    pages = [make_pages(spec, 3) for spec in specs]
    with PageStore.open(tmp_path / "cache.zarr", specs) as store:
        for number, spec in enumerate(specs):
            store.write(number, make_entries(spec, 3, start=10 * number), pages[number])
    lane = zarr.open_group(tmp_path / "cache.zarr", mode="r")["lane-0000"]
    assert same_bits([lane["group-0/kv"][:3]], [np.stack(pages[0])])
    assert same_bits([lane["group-windowed/kv"][:3]], [np.stack(pages[1])])


def test_a_store_that_is_open_for_writing_can_be_read(tmp_path: Path, short_segments: None) -> None:
    spec = make_spec()
    pages = make_pages(spec, 6)
    with PageStore.open(tmp_path / "cache.zarr", spec) as store:
        for number in range(6):
            store.write(0, make_entries(spec, 1, start=number), pages[number : number + 1])
            kv = zarr.open_group(tmp_path / "cache.zarr", mode="r")[f"{GROUP}/kv"]
            assert kv.shape[0] >= 4 * (number + 1)
            held = [kv[4 * row] for row in range(number + 1)]
            assert same_bits(held, pages[: number + 1])
            assert not kv[4 * number + 1 :].any()


def test_an_int8_store_opens_in_a_process_that_has_only_the_plugin(
    tmp_path: Path, short_segments: None
) -> None:
    sample = Sample(tmp_path, "bfloat16", Int8())
    np.save(tmp_path / "expected.npy", np.stack(sample.read).astype(np.float32))
    run_python(
        """
import sys
import numpy as np
import zarr
import pagedkv.zarr_plugin
kv = zarr.open_group(sys.argv[1], mode="r")["lane-0000/group-0/kv"]
rows = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
assert np.array_equal(kv[:][rows].astype(np.float32), np.load(sys.argv[2]))
""",
        sample.path,
        tmp_path / "expected.npy",
    )


def test_zarr_s_asynchronous_interface_reads_it_too(tmp_path: Path, short_segments: None) -> None:
    sample = Sample(tmp_path, "float32", Raw())

    async def read() -> Array:
        group = await zarr.api.asynchronous.open_group(sample.path, mode="r")
        kv: Any = await group.getitem(f"{GROUP}/kv")
        return await kv.getitem((3,))

    assert same_bits([asyncio.run(read())], [sample.read[3]])
