from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import (
    Array,
    as_arrays,
    bits,
    empty_like,
    make_entries,
    make_key,
    make_smooth_pages,
    make_spec,
)

from pagedkv import files
from pagedkv.catalog import entry_of, map_of, unpack_catalog
from pagedkv.codec import Bytes, Codec, Int8, Lossless, Raw
from pagedkv.format import Geometry
from pagedkv.lane import LaneGroup, SegmentSource
from pagedkv.memory import PageArrays
from pagedkv.segment import SegmentFormat
from pagedkv.segment_map import SegmentMap
from pagedkv.segment_sources import MovedPages, NewPages

SPEC = make_spec()
NUM_PAGES = 7
PAGES = make_smooth_pages(SPEC, NUM_PAGES)
ENTRIES = make_entries(SPEC, NUM_PAGES, salt=b"tenant")

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(params=[Raw(), Int8(), Lossless()], ids=str)
def form(request: pytest.FixtureRequest) -> SegmentFormat:
    codec: Codec = request.param
    return SegmentFormat(SPEC, codec, Geometry.of(SPEC, codec, rows=3))


def new_pages(form: SegmentFormat, *, store_tokens: bool = True) -> NewPages:
    return NewPages(form, ENTRIES, as_arrays(SPEC, PAGES), store_tokens=store_tokens)


class Written:
    """Segments that a source wrote, read back."""

    def __init__(self, form: SegmentFormat, folder: Path, source: SegmentSource) -> None:
        self.form = form
        self.stored: list[Bytes] = []
        self.pages: list[Array] = []
        self.records: list[Any] = []
        self.tails: list[bytes] = []
        for number, start in enumerate(range(0, len(source.keys), form.geometry.rows)):
            count = min(form.geometry.rows, len(source.keys) - start)
            path = folder / str(number)
            with path.open("wb") as file:
                segment_map = source.write(file.fileno(), start, count)
            chunk = source.catalog(10 + number, start, segment_map)
            self.look(path, 10 + number, chunk.tobytes(), segment_map)

    def look(self, path: Path, number: int, chunk: bytes, segment_map: SegmentMap) -> None:
        records, holds = unpack_catalog(self.form.geometry, number, chunk)
        found = map_of(self.form.geometry, records, holds)
        assert np.array_equal(found.crcs, segment_map.crcs)
        assert (found.bounds is None) == (segment_map.bounds is None)
        assert found.bounds is None or np.array_equal(found.bounds, segment_map.bounds)
        self.records += list(records[holds])
        data = np.frombuffer(path.read_bytes(), np.uint8)
        out = empty_like(PAGES[: len(found.holds)])
        pages, rows = as_arrays(SPEC, out), np.arange(len(out))
        for extent in self.form.plan(found, rows, None):
            for piece in extent:
                stored = data[piece.offset : piece.offset + piece.nbytes]
                assert self.form.decode(stored, piece, found, rows, pages, rows, None).all()
        starts, ends = self.form.extents(found)
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        self.stored += [data[start:end].copy() for start, end in places]
        self.tails.append(data[int(ends[-1]) :].tobytes())
        self.pages += out


def test_new_pages_are_written_segment_by_segment(form: SegmentFormat, tmp_path: Path) -> None:
    source = new_pages(form)
    assert list(source.keys) == [entry.key for entry in ENTRIES]
    written = Written(form, tmp_path, source)
    assert len(written.tails) == 3
    assert [int(record["row"]) for record in written.records] == [*range(30, 37)]
    for entry, record in zip(ENTRIES, written.records, strict=True):
        found = entry_of(record)
        assert (found.key, found.parent) == (entry.key, entry.parent)
        assert np.array_equal(found.tokens, entry.tokens)
    error = np.abs(np.stack(written.pages) - np.stack(PAGES)).max()
    assert error == 0 if form.codec != Int8() else error < 0.1


def test_tokens_are_kept_out(form: SegmentFormat, tmp_path: Path) -> None:
    written = Written(form, tmp_path, new_pages(form, store_tokens=False))
    assert all(entry_of(record).tokens is None for record in written.records)


def test_moved_pages_are_what_they_were(form: SegmentFormat, tmp_path: Path) -> None:
    before = Written(form, tmp_path, new_pages(form))
    chosen = [6, 1, 2, 5]
    records = np.array([before.records[n] for n in chosen], form.geometry.record_dtype)
    source = MovedPages(form, records, [before.stored[n] for n in chosen])
    assert list(source.keys) == [make_key(n) for n in chosen]
    after = Written(form, tmp_path, source)
    assert [bits(page) for page in after.pages] == [bits(before.pages[n]) for n in chosen]
    assert [bits(page) for page in after.stored] == [bits(before.stored[n]) for n in chosen]
    assert [int(record["row"]) for record in after.records] == [30, 31, 32, 33]
    for number, record in zip(chosen, after.records, strict=True):
        for name in ("created_ns", "key", "parent", "salt_sha256", "tokens", "layer_crcs"):
            assert np.array_equal(record[name], before.records[number][name])


def test_pages_that_were_moved_are_committed_like_new_ones(
    form: SegmentFormat, tmp_path: Path
) -> None:
    before = Written(form, tmp_path, new_pages(form))
    group = LaneGroup(tmp_path / "group-0", form)
    group.prepare()
    group.arrays.grow(4)
    group.commit(0, new_pages(form))
    records = np.array(before.records[2:4], form.geometry.record_dtype)
    made = group.commit(3, MovedPages(form, records, before.stored[2:4]))
    group.write_columns()
    assert [(one.segment.number, one.segment.keys) for one in made] == [
        (3, (make_key(2), make_key(3)))
    ]
    again = LaneGroup(tmp_path / "group-0", form)
    loaded = again.load()
    assert [one.segment.number for one in loaded] == [0, 1, 2, 3]
    for array in ("key", "parent", "tokens", "num_tokens"):
        old = group.chunk_path(array, 0).read_bytes()
        moved = group.chunk_path(array, 3).read_bytes()
        row = len(old) // 3
        assert moved[:row] == old[2 * row :]
    assert files.read_bytes(group.chunk_path("kv", 3))[: len(before.stored[2])] == bits(
        before.stored[2]
    )


def test_pages_of_a_pool_are_taken_by_their_places(form: SegmentFormat, tmp_path: Path) -> None:
    pool = np.zeros((*SPEC.page_shape[:2], 9, *SPEC.page_shape[2:]), np.float32)
    at = np.array([8, 0, 3, 2, 7, 5, 1])
    pool[:, :, at] = np.moveaxis(np.stack(PAGES), 0, 2)
    arrays = PageArrays(np.moveaxis(pool, 2, 0), at, SPEC.page_shape, SPEC.np_dtype, "a page")
    straight = Written(form, tmp_path, new_pages(form))
    pooled = Written(form, tmp_path, NewPages(form, ENTRIES, arrays, store_tokens=True))
    assert [bits(page) for page in pooled.stored] == [bits(page) for page in straight.stored]
