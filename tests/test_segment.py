import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    Array,
    as_arrays,
    empty_like,
    make_pages,
    make_smooth_pages,
    make_spec,
    same_bits,
)

from pagedkv import segment as module
from pagedkv.codec import Codec, Int8, Lossless, Raw
from pagedkv.format import Geometry
from pagedkv.memory import Numbers, PageArrays
from pagedkv.segment import Piece, SegmentFormat, transfer_buffer
from pagedkv.segment_map import SegmentMap, bounds_of
from pagedkv.spec import KVSpec

NUM_PAGES = 6
CODECS = [Raw(), Int8(), Lossless()]


class Sample:
    """A segment file with pages in it."""

    def __init__(self, path: Path, codec: Codec, dtype: str = "float32") -> None:
        self.spec = make_spec(dtype=dtype)
        self.format = SegmentFormat(self.spec, codec, Geometry.of(self.spec, codec, rows=8))
        self.pages = make_smooth_pages(self.spec, NUM_PAGES)
        self.path = path / "segment"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        arrays = as_arrays(self.spec, self.pages)
        self.map: SegmentMap = self.format.write(self.fd, arrays, 0, NUM_PAGES)

    def read(
        self, rows: Sequence[int], layer: int | None = None, segment_map: SegmentMap | None = None
    ) -> tuple[list[int], list[Array]]:
        """Positions of the damaged pages, and what was read, extent by extent as ``plan`` says."""
        used = self.map if segment_map is None else segment_map
        wanted = [self.pages[row] if layer is None else self.pages[row][layer] for row in rows]
        out = empty_like(wanted)
        pages = PageArrays(
            out,
            None,
            self.spec.page_shape if layer is None else self.spec.layer_shape,
            self.spec.np_dtype,
            "out",
        )
        order = np.argsort(rows, kind="stable")
        sorted_rows = np.array(rows, np.int64)[order]
        damaged: set[int] = set()
        for extent in self.format.plan(used, sorted_rows, layer):
            for piece in extent:
                stored = np.zeros(piece.nbytes, np.uint8)
                found = os.pread(self.fd, piece.nbytes, piece.offset)
                stored[: len(found)] = np.frombuffer(found, np.uint8)
                good = self.format.decode(stored, piece, used, sorted_rows, pages, order, layer)
                damaged.update(order[piece.pages][~good].tolist())
        return sorted(damaged), out

    def flip(self, at: int) -> None:
        (byte,) = os.pread(self.fd, 1, at)
        os.pwrite(self.fd, bytes([byte ^ 0x10]), at)


@pytest.fixture
def sample(tmp_path: Path) -> Iterator[Sample]:
    sample = Sample(tmp_path, Raw())
    yield sample
    os.close(sample.fd)


def kept(codec: Codec, spec: KVSpec, pages: Sequence[Array]) -> list[Array]:
    """What is left of pages that went through the codec layer by layer."""
    if isinstance(codec, Lossless):
        return list(pages)
    back = empty_like(pages)
    for page, target in zip(pages, back, strict=True):
        for layer, numbers in zip(page, target, strict=True):
            payload = np.zeros(codec.layer_nbytes(spec), np.uint8)
            codec.encode(spec, layer, payload)
            codec.decode(spec, payload, numbers)
    return back


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_pages_come_back_as_the_codec_keeps_them(tmp_path: Path, codec: Codec, dtype: str) -> None:
    sample = Sample(tmp_path, codec, dtype)
    damaged, out = sample.read(range(NUM_PAGES))
    expected = kept(codec, sample.spec, sample.pages)
    assert damaged == []
    assert same_bits(out, expected)
    for layer in range(sample.spec.held_layers):
        damaged, out = sample.read([4, 0, 4], layer)
        assert damaged == []
        assert same_bits(out, [expected[row][layer] for row in (4, 0, 4)])
    os.close(sample.fd)


def test_the_file_is_as_long_as_the_geometry_says(sample: Sample) -> None:
    geometry = sample.format.geometry
    most = NUM_PAGES * geometry.page_nbytes + geometry.index_nbytes
    assert sample.path.stat().st_size == most


def test_a_file_of_pages_of_variable_size_is_shorter(tmp_path: Path) -> None:
    sample = Sample(tmp_path, Lossless())
    geometry = sample.format.geometry
    most = NUM_PAGES * geometry.page_nbytes + geometry.index_nbytes
    assert sample.path.stat().st_size < most
    os.close(sample.fd)


@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
def test_a_page_is_one_run_of_payloads_each_with_its_checksum(tmp_path: Path, codec: Codec) -> None:
    sample = Sample(tmp_path, codec)
    data = sample.path.read_bytes()
    starts, ends = sample.format.extents(sample.map)
    assert starts.tolist() == [0, *ends.tolist()[:-1]]
    index = np.frombuffer(data[-(8 * 3 * 16 + 4) : -4], "<u8").reshape(8, 3, 2)
    assert ends[-1] == len(data) - (8 * 3 * 16 + 4)
    for row in range(NUM_PAGES):
        at = int(starts[row])
        for layer in range(sample.spec.held_layers):
            offset, size = (int(number) for number in index[row, layer])
            assert offset == at
            (crc,) = struct.unpack_from("<I", data, at + size - 4)
            assert crc == sample.map.crcs[row, layer]
            if codec == Raw():
                assert data[at : at + size - 4] == sample.pages[row][layer].tobytes()
            at += size
        assert at == ends[row]
    assert (index[NUM_PAGES:] == 2**64 - 1).all()
    os.close(sample.fd)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_part_of_the_pages_is_written(tmp_path: Path, codec: Codec) -> None:
    sample = Sample(tmp_path, codec)
    expected = kept(codec, sample.spec, sample.pages)[2:5]
    os.ftruncate(sample.fd, 0)
    os.lseek(sample.fd, 0, os.SEEK_SET)
    sample.map = sample.format.write(sample.fd, as_arrays(sample.spec, sample.pages), 2, 3)
    damaged, out = sample.read([0, 1, 2])
    assert damaged == []
    assert same_bits(out, expected)
    os.close(sample.fd)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_stored_bytes_are_moved_as_they_are(tmp_path: Path, codec: Codec) -> None:
    sample = Sample(tmp_path, codec)
    expected = sample.read([1, 4])[1]
    starts, ends = sample.format.extents(sample.map)
    stored = [
        np.frombuffer(os.pread(sample.fd, int(ends[row] - starts[row]), int(starts[row])), np.uint8)
        for row in (1, 4)
    ]
    if sample.map.bounds is None:
        sizes = np.full((2, 3), sample.format.geometry.payload_nbytes, np.uint32)
    else:
        sizes = (np.diff(sample.map.bounds, axis=1) - 4)[[1, 4]].astype(np.uint32)
    os.ftruncate(sample.fd, 0)
    os.lseek(sample.fd, 0, os.SEEK_SET)
    sample.format.write_stored(sample.fd, stored, sizes)
    moved = SegmentMap(
        holds=np.ones(2, np.bool_),
        crcs=sample.map.crcs[[1, 4]],
        bounds=None if sample.map.bounds is None else bounds_of(sizes),
    )
    damaged, out = sample.read([0, 1], segment_map=moved)
    assert damaged == []
    assert same_bits(out, expected)
    os.close(sample.fd)


@pytest.mark.parametrize("piece_pages", [0.2, 0.5, 1, 2, 100])
@pytest.mark.parametrize("gap_nbytes", [0, 2**14])
@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
@pytest.mark.parametrize("rows", [[3], [5, 0, 1, 4, 2, 3], [1, 3, 4], [2, 2, 2], [0, 5]])
def test_rows_are_read_in_any_order_however_they_are_batched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: Codec,
    rows: list[int],
    piece_pages: float,
    gap_nbytes: int,
) -> None:
    sample = Sample(tmp_path, codec)
    page_nbytes = int(np.diff(sample.format.extents(sample.map), axis=0).max())
    monkeypatch.setattr(module, "PIECE_NBYTES", int(piece_pages * page_nbytes))
    monkeypatch.setattr(module, "EXTENT_NBYTES", int(3 * piece_pages * page_nbytes))
    monkeypatch.setattr(module, "_GAP_NBYTES", gap_nbytes)
    for layer in (None, 0, 2):
        damaged, out = sample.read(rows, layer)
        assert damaged == []
        pages = [sample.pages[row] for row in rows]
        assert same_bits(out, pages if layer is None else [page[layer] for page in pages])
    os.close(sample.fd)


def test_strided_pages_are_written_and_read_in_place(tmp_path: Path) -> None:
    sample = Sample(tmp_path, Raw())
    layers, kinds, *rest = sample.spec.page_shape
    pool = np.zeros((layers, kinds, NUM_PAGES, *rest), np.float32)
    out = np.zeros_like(pool)
    for slot, page in enumerate(sample.pages):
        pool[:, :, slot] = page
    slots = np.array([4, 1, 3])
    shape, dtype = sample.spec.page_shape, sample.spec.np_dtype
    os.ftruncate(sample.fd, 0)
    os.lseek(sample.fd, 0, os.SEEK_SET)
    source = PageArrays(np.moveaxis(pool, 2, 0), slots, shape, dtype, "a page")
    segment_map = sample.format.write(sample.fd, source, 0, 3)
    target = PageArrays(np.moveaxis(out, 2, 0), slots, shape, dtype, "out")
    rows = np.arange(3)
    for extent in sample.format.plan(segment_map, rows, None):
        for piece in extent:
            stored = np.frombuffer(os.pread(sample.fd, piece.nbytes, piece.offset), np.uint8)
            args = (stored, piece, segment_map, rows, target, rows, None)
            assert sample.format.decode(*args).all()
    os.close(sample.fd)
    pool[:, :, [0, 2, 5]] = 0
    assert same_bits([out], [pool])


@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
@pytest.mark.parametrize("row", [0, 2, 5])
@pytest.mark.parametrize("place", ["payload", "trailer"])
def test_a_flipped_bit_spoils_one_page_only(
    tmp_path: Path, codec: Codec, row: int, place: str
) -> None:
    sample = Sample(tmp_path, codec)
    if sample.map.bounds is None:
        chunk_nbytes = sample.format.geometry.chunk_nbytes
        start = sample.format.geometry.page_nbytes * row + chunk_nbytes
        end = start + chunk_nbytes
    else:
        start, end = sample.map.bounds[row, 1:3].tolist()
    sample.flip(start + 17 if place == "payload" else end - 2)
    damaged, out = sample.read(range(NUM_PAGES))
    assert damaged == [row]
    assert same_bits(out[:row] + out[row + 1 :], sample.pages[:row] + sample.pages[row + 1 :])
    assert sample.read([row], 1)[0] == [0]
    assert sample.read([row], 0)[0] == []
    assert sample.read([row], 2)[0] == []
    assert sample.read([row, row, 1], 1)[0] == [0, 1]
    os.close(sample.fd)


def test_bytes_that_agree_only_with_themselves_are_damaged(sample: Sample) -> None:
    crcs = sample.map.crcs[[1, 0, 2, 3, 4, 5]]  # the catalogue of a segment with two pages swapped
    other = SegmentMap(holds=sample.map.holds, crcs=crcs, bounds=None)
    damaged, out = sample.read(range(NUM_PAGES), segment_map=other)
    assert damaged == [0, 1]
    assert same_bits(out[2:], sample.pages[2:])
    damaged, out = sample.read(range(NUM_PAGES), 1, other)
    assert damaged == [0, 1]
    assert same_bits(out[2:], [page[1] for page in sample.pages[2:]])


def test_a_row_that_holds_no_page_is_damaged(sample: Sample) -> None:
    holds = sample.map.holds.copy()
    holds[2] = False
    other = SegmentMap(holds=holds, crcs=sample.map.crcs, bounds=None)
    assert sample.read([1, 2, 3], segment_map=other)[0] == [1]


@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
def test_a_truncated_file_keeps_the_pages_before_the_cut(tmp_path: Path, codec: Codec) -> None:
    sample = Sample(tmp_path, codec)
    os.ftruncate(sample.fd, int(sample.format.extents(sample.map)[1][3]) - 1)
    damaged, out = sample.read([5, 4, 3, 2, 1, 0])
    assert damaged == [0, 1, 2]
    assert same_bits(out[3:], sample.pages[2::-1])
    assert sample.read([3, 2], 2)[0] == [0]
    assert sample.read([3, 2], 0)[0] == []
    os.close(sample.fd)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("row", [0, 5])
def test_a_nan_that_int8_cannot_represent_is_named_with_its_page(
    tmp_path: Path, row: int, layer: int
) -> None:
    spec = make_spec()
    form = SegmentFormat(spec, Int8(), Geometry.of(spec, Int8(), rows=8))
    pages = make_pages(spec, NUM_PAGES)
    pages[row][layer, 1, 0, 1, 3] = np.nan
    message = rf"a page has nan at \({row}, {layer}, 1, 0, 1, 3\)"
    with (tmp_path / "file").open("wb") as file, pytest.raises(ValueError, match=message):
        form.write(file.fileno(), as_arrays(spec, pages), 0, NUM_PAGES)


class Planned:
    """What ``plan`` says for rows of a segment, checked against what it promises."""

    def __init__(self, form: SegmentFormat, segment_map: SegmentMap, layer: int | None) -> None:
        self.form, self.map, self.layer = form, segment_map, layer

    def check(self, rows: Numbers) -> list[list[Piece]]:
        extents = list(self.form.plan(self.map, rows, self.layer))
        num_layers = self.form.geometry.num_layers
        first, stop = (0, num_layers) if self.layer is None else (self.layer, self.layer + 1)
        seen: list[tuple[int, int]] = []
        for extent in extents:
            assert extent
            for piece in extent:
                chosen = rows[piece.pages]
                assert len(chosen) == len(piece.starts)
                layers = range(piece.first_layer, piece.first_layer + piece.num_layers)
                for row, start in zip(chosen.tolist(), piece.starts.tolist(), strict=True):
                    begin, end = self.place(row, layers[0], layers[-1] + 1)
                    assert piece.offset + start == begin
                    assert end <= piece.offset + piece.nbytes
                    seen += [(row, layer) for layer in layers]
        assert seen == [(row, layer) for row in rows.tolist() for layer in range(first, stop)]
        return extents

    def place(self, row: int, first: int, stop: int) -> tuple[int, int]:
        if self.map.bounds is not None:
            return int(self.map.bounds[row, first]), int(self.map.bounds[row, stop])
        at = row * self.form.geometry.page_nbytes
        size = self.form.geometry.chunk_nbytes
        return at + first * size, at + stop * size


def make_map(codec: Codec, geometry: Geometry, count: int) -> SegmentMap:
    shape = (count, geometry.num_layers)
    bounds = None
    if not geometry.fixed_size:
        rng = np.random.default_rng(3)
        sizes = rng.integers(1, geometry.payload_nbytes, shape).astype(np.uint32)
        bounds = bounds_of(sizes)
    return SegmentMap(
        holds=np.ones(count, np.bool_), crcs=np.zeros(shape, np.uint32), bounds=bounds
    )


@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
@pytest.mark.parametrize("layer", [None, 0, 4])
@pytest.mark.parametrize(
    "rows",
    [
        [0],
        [99],
        list(range(100)),
        list(range(0, 100, 2)),
        list(range(0, 100, 10)),
        [0, 1, 50, 51, 99],
        [0, 0, 1, 1, 99, 99],
    ],
    ids=len,
)
@pytest.mark.parametrize(("piece_chunks", "gap_chunks"), [(0.5, 0), (1, 1), (5, 3), (12, 40)])
def test_a_plan_reads_every_layer_once_in_pieces_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
    codec: Codec,
    layer: int | None,
    rows: list[int],
    piece_chunks: float,
    gap_chunks: int,
) -> None:
    spec = make_spec(num_layers=5)
    geometry = Geometry.of(spec, codec, rows=100)
    size = geometry.chunk_nbytes
    piece_nbytes, gap_nbytes = int(piece_chunks * size), gap_chunks * size
    monkeypatch.setattr(module, "PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr(module, "EXTENT_NBYTES", 4 * piece_nbytes)
    monkeypatch.setattr(module, "_GAP_NBYTES", gap_nbytes)
    form = SegmentFormat(spec, codec, geometry)
    planned = Planned(form, make_map(codec, geometry, 100), layer)
    # A page that is small goes whole, so that a piece may reach a page beyond its size.
    largest = piece_nbytes + min(geometry.page_nbytes, max(piece_nbytes, size)) + gap_nbytes
    for extent in planned.check(np.array(rows)):
        assert all(piece.nbytes <= largest for piece in extent)
        total = extent[-1].offset + extent[-1].nbytes - extent[0].offset
        assert len(extent) == 1 or total <= 4 * piece_nbytes
        for one, other in itertools.pairwise(extent):
            assert other.offset - one.offset - one.nbytes <= gap_nbytes


@pytest.mark.parametrize("piece_chunks", [1, 2])
def test_pieces_of_an_extent_follow_one_another_though_a_page_is_wanted_twice(
    monkeypatch: pytest.MonkeyPatch, piece_chunks: int
) -> None:
    spec = make_spec(num_layers=5)
    geometry = Geometry.of(spec, Raw(), rows=100)
    monkeypatch.setattr(module, "PIECE_NBYTES", piece_chunks * geometry.chunk_nbytes)
    monkeypatch.setattr(module, "EXTENT_NBYTES", 3 * geometry.chunk_nbytes)
    planned = Planned(SegmentFormat(spec, Raw(), geometry), make_map(Raw(), geometry, 100), None)
    for extent in planned.check(np.array([1, 1, 2, 2])):
        first, last = extent[0], extent[-1]
        assert all(first.offset <= piece.offset for piece in extent)
        assert all(piece.offset + piece.nbytes <= last.offset + last.nbytes for piece in extent)


def test_a_transfer_buffer_grows_and_is_used_again() -> None:
    with transfer_buffer(10) as small:
        assert len(small) == 10
    with transfer_buffer(20) as again:
        assert np.shares_memory(small, again)
    with transfer_buffer(3 * 2**20) as large:
        assert len(large) == 3 * 2**20


def test_who_interrupts_the_use_of_a_transfer_buffer_gets_another() -> None:
    with transfer_buffer(10) as outer:
        with transfer_buffer(10) as inner:
            assert not np.shares_memory(outer, inner)
        with transfer_buffer(10) as inner:
            assert not np.shares_memory(outer, inner)
