import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_samples import Array, empty_like, make_pages, make_spec, same_bits

from pagedkv import segment as module
from pagedkv.codec import Codec, Int8, Raw
from pagedkv.format import Geometry, LayerCrcs
from pagedkv.segment import SegmentFormat

NUM_PAGES = 6


class Sample:
    """A segment file with pages in it."""

    def __init__(self, path: Path, codec: Codec, dtype: str = "float32") -> None:
        self.spec = make_spec(dtype=dtype)
        self.format = SegmentFormat(self.spec, codec, Geometry.of(self.spec, codec, rows=8))
        self.pages = make_pages(self.spec, NUM_PAGES)
        self.path = path / "segment"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        self.crcs: LayerCrcs = self.format.write(self.fd, self.pages)

    def read(self, rows: list[int], crcs: LayerCrcs | None = None) -> tuple[list[int], list[Array]]:
        out = empty_like([self.pages[row] for row in rows])
        used = self.crcs if crcs is None else crcs
        return self.format.read_pages(self.fd, rows, used, out), out

    def read_layer(self, rows: list[int], layer: int) -> tuple[list[int], list[Array]]:
        out = empty_like([self.pages[row][layer] for row in rows])
        return self.format.read_layers(self.fd, rows, layer, self.crcs, out), out

    def flip(self, at: int) -> None:
        (byte,) = os.pread(self.fd, 1, at)
        os.pwrite(self.fd, bytes([byte ^ 0x10]), at)


@pytest.fixture
def sample(tmp_path: Path) -> Iterator[Sample]:
    sample = Sample(tmp_path, Raw())
    yield sample
    os.close(sample.fd)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", [Raw(), Int8()], ids=str)
def test_pages_come_back_as_the_codec_keeps_them(tmp_path: Path, codec: Codec, dtype: str) -> None:
    sample = Sample(tmp_path, codec, dtype)
    damaged, out = sample.read(list(range(NUM_PAGES)))
    os.close(sample.fd)
    assert damaged == []
    expected = empty_like(sample.pages)
    for page, kept in zip(sample.pages, expected, strict=True):
        for layer, keeps in zip(page, kept, strict=True):
            payload = np.zeros(codec.layer_nbytes(sample.spec), np.uint8)
            codec.encode(sample.spec, layer, payload)
            codec.decode(sample.spec, payload, keeps)
    assert same_bits(out, expected)


def test_the_file_is_as_long_as_the_geometry_says(sample: Sample) -> None:
    assert sample.path.stat().st_size == sample.format.geometry.segment_nbytes(NUM_PAGES)


def test_a_page_is_one_run_of_payloads_each_with_its_checksum(sample: Sample) -> None:
    data = sample.path.read_bytes()
    size = sample.spec.layer_nbytes
    for row, page in enumerate(sample.pages):
        for layer, numbers in enumerate(page):
            at = (row * len(page) + layer) * (size + 4)
            assert data[at : at + size] == numbers.tobytes()
            (crc,) = struct.unpack_from("<I", data, at + size)
            assert crc == sample.crcs[row, layer]


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("rows", [[3], [5, 0, 1, 4, 2, 3], [1, 3, 4], [2, 2, 2], []])
def test_rows_are_read_in_any_order_however_they_are_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int], at_once: int
) -> None:
    page_nbytes = Geometry.of(make_spec(), Raw()).page_nbytes
    monkeypatch.setattr(module, "_TRANSFER_NBYTES", at_once * page_nbytes)
    sample = Sample(tmp_path, Raw())
    damaged, out = sample.read(rows)
    os.close(sample.fd)
    assert damaged == []
    assert same_bits(out, [sample.pages[row] for row in rows])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layer_is_read_alone(sample: Sample, layer: int) -> None:
    damaged, out = sample.read_layer([4, 0, 4], layer)
    assert damaged == []
    assert same_bits(out, [sample.pages[row][layer] for row in (4, 0, 4)])


def test_strided_pages_are_written_and_read_in_place(tmp_path: Path) -> None:
    sample = Sample(tmp_path, Raw())
    layers, kinds, *rest = sample.spec.page_shape
    pool = np.zeros((layers, kinds, NUM_PAGES, *rest), np.float32)
    out = np.zeros_like(pool)
    for slot, page in enumerate(sample.pages):
        pool[:, :, slot] = page
    slots = [4, 1, 3]
    with (tmp_path / "other").open("w+b") as file:
        crcs = sample.format.write(file.fileno(), [pool[:, :, slot] for slot in slots])
        views = [out[:, :, slot] for slot in slots]
        assert sample.format.read_pages(file.fileno(), [0, 1, 2], crcs, views) == []
    os.close(sample.fd)
    pool[:, :, [0, 2, 5]] = 0
    assert same_bits([out], [pool])


@pytest.mark.parametrize("row", [0, 2, 5])
@pytest.mark.parametrize("place", ["payload", "trailer"])
def test_a_flipped_bit_spoils_one_page_only(sample: Sample, row: int, place: str) -> None:
    chunk_nbytes = sample.format.geometry.chunk_nbytes
    at = sample.format.geometry.page_nbytes * row + chunk_nbytes
    sample.flip(at + (17 if place == "payload" else chunk_nbytes - 2))
    damaged, out = sample.read(list(range(NUM_PAGES)))
    assert damaged == [row]
    assert same_bits(out[:row] + out[row + 1 :], sample.pages[:row] + sample.pages[row + 1 :])
    assert sample.read_layer([row], 1)[0] == [0]
    assert sample.read_layer([row], 0)[0] == []
    assert sample.read_layer([row], 2)[0] == []


def test_bytes_that_agree_only_with_themselves_are_damaged(sample: Sample) -> None:
    other = sample.crcs[[1, 0, 2, 3, 4, 5]]  # the catalogue of a segment with two pages swapped
    damaged, out = sample.read(list(range(NUM_PAGES)), other)
    assert damaged == [0, 1]
    assert same_bits(out[2:], sample.pages[2:])
    layers = empty_like([page[1] for page in sample.pages])
    assert sample.format.read_layers(sample.fd, list(range(NUM_PAGES)), 1, other, layers) == [0, 1]
    assert same_bits(layers[2:], [page[1] for page in sample.pages[2:]])


def test_a_truncated_file_keeps_the_pages_before_the_cut(sample: Sample) -> None:
    os.ftruncate(sample.fd, sample.format.geometry.page_nbytes * 4 - 1)
    damaged, out = sample.read([5, 4, 3, 2, 1, 0])
    assert sorted(damaged) == [0, 1, 2]
    assert same_bits(out[3:], sample.pages[2::-1])
    assert sample.read_layer([3, 2], 2)[0] == [0]
    assert sample.read_layer([3, 2], 0)[0] == []


def test_what_the_codec_cannot_represent_is_named(tmp_path: Path) -> None:
    spec = make_spec()
    form = SegmentFormat(spec, Int8(), Geometry.of(spec, Int8(), rows=8))
    (page,) = make_pages(spec, 1)
    page[2, 1, 0, 0, 0] = np.nan
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(ValueError, match="layer 2 of a pag"),
    ):
        form.write(file.fileno(), [page])
