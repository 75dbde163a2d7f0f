import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import (
    Array,
    empty_like,
    make_entries,
    make_key,
    make_pages,
    make_spec,
    same_bits,
    serve_nothing_now,
)

from pagedkv import files, segment_files
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError, PageNotFoundError
from pagedkv.format import PackedRows, StoreRow, pack_row
from pagedkv.row_reader import RowReader
from pagedkv.segment import SegmentFormat
from pagedkv.spec import KVSpec
from pagedkv.store import PageStore

SPEC = make_spec()
ONE_LAYER = make_spec(num_layers=1)
WINDOWED = make_spec(group="windowed")
NUM_PAGES = 10


class Sample:
    """A store of two specs with pages in three segments each, and its pages by row."""

    def __init__(self, path: Path, specs: list[KVSpec]) -> None:
        self.path = path
        self.store = PageStore.open(path, specs)
        self.pages: dict[StoreRow, Array] = {}
        self.rows: list[list[StoreRow]] = []
        for number, spec in enumerate(specs):
            pages = make_pages(spec, NUM_PAGES, seed=number)
            entries = make_entries(spec, NUM_PAGES, parent=None)
            rows = self.store.write(number, entries, pages)
            self.pages |= dict(zip(rows, pages, strict=True))
            self.rows.append(rows)

    def packed(self, rows: list[StoreRow]) -> PackedRows:
        return np.array([pack_row(row) for row in rows], np.int64)

    def flip(self, row: StoreRow) -> None:
        """Damage the last layer of a page."""
        segment, place = divmod(row.row, 4)
        name = f"lane-0000/group-{self.store.specs[row.group].group}/kv/c.{segment}.0.0.0.0.0"
        with (self.path / name).open("r+b") as file:
            size = self.store.specs[row.group].page_nbytes
            size += self.store.specs[row.group].held_layers * 4
            file.seek((place + 1) * size - 20)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


@pytest.fixture(params=["cached", "cold"])
def sample(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sample]:
    if request.param == "cold":
        serve_nothing_now(monkeypatch)
    sample = Sample(tmp_path / "cache.zarr", [SPEC, WINDOWED])
    yield sample
    sample.store.check_invariants()
    sample.store.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Sample]:
    """Pages that are a small chunk each."""
    sample = Sample(tmp_path / "cache.zarr", [ONE_LAYER, make_spec(num_layers=1, group="other")])
    yield sample
    sample.store.close()


ORDERS = [
    [0],
    list(range(NUM_PAGES)),
    [9, 0, 5, 4, 3],
    [3, 3, 3],
    [8, 1, 8, 9, 1, 1],
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_read_in_the_order_that_was_asked_for(
    sample: Sample, order: list[int], *, packed: bool
) -> None:
    rows = [sample.rows[0][number] for number in order]
    expected = [sample.pages[row] for row in rows]
    out = empty_like(expected)
    sample.store.read(sample.packed(rows) if packed else rows, out)
    assert same_bits(out, expected)
    for layer in range(SPEC.held_layers):
        layers = empty_like([page[layer] for page in expected])
        sample.store.read_layer(sample.packed(rows) if packed else rows, layer, layers)
        assert same_bits(layers, [page[layer] for page in expected])


@pytest.mark.parametrize("order", ORDERS)
def test_rows_go_to_the_places_of_one_array(sample: Sample, order: list[int]) -> None:
    rows = [sample.rows[1][number] for number in order]
    places = np.random.default_rng(len(order)).permutation(12)[: len(order)]
    pool = np.full((*SPEC.page_shape[:2], 12, *SPEC.page_shape[2:]), 7, np.float32)
    expected = pool.copy()
    for row, place in zip(rows, places.tolist(), strict=True):
        expected[:, :, place] = sample.pages[row]
    sample.store.read(rows, np.moveaxis(pool, 2, 0), at=places)
    assert same_bits([pool], [expected])
    layer = np.full((len(order), *SPEC.layer_shape), 7, np.float32)
    sample.store.read_layer(sample.packed(rows), 1, layer)
    assert same_bits(layer, [sample.pages[row][1] for row in rows])


def test_a_longer_array_is_filled_from_its_beginning(sample: Sample) -> None:
    out = np.full((12, *SPEC.page_shape), 7, np.float32)
    sample.store.read(sample.rows[0][2:5], out)
    assert same_bits(out[:3], [sample.pages[row] for row in sample.rows[0][2:5]])
    assert (out[3:] == 7).all()


def test_rows_of_several_specs_are_read_together(sample: Sample) -> None:
    first, second = sample.rows
    rows = [second[3], first[0], second[9], second[3], first[0], first[7]]
    expected = [sample.pages[row] for row in rows]
    for asked in (rows, sample.packed(rows)):
        out = empty_like(expected)
        sample.store.read(asked, out)
        assert same_bits(out, expected)


def test_rows_of_several_specs_for_one_array_are_refused_or_right(sample: Sample) -> None:
    rows = [sample.rows[0][0], sample.rows[1][0]]
    out = np.zeros((2, *SPEC.page_shape), np.float32)
    try:
        sample.store.read(rows, out)
    except ValueError:
        return
    assert same_bits(out, [sample.pages[row] for row in rows])


def test_damaged_rows_are_named_by_position_and_key(sample: Sample) -> None:
    first, second = sample.rows
    sample.flip(first[6])
    sample.flip(second[2])
    rows = [second[2], first[0], first[6], second[5], first[6]]
    out = empty_like([sample.pages[row] for row in rows])
    with pytest.raises(CorruptPageError, match="damaged or gone") as caught:
        sample.store.read(rows, out)
    assert set(caught.value.keys) == {make_key(6), make_key(2)}
    assert sorted(caught.value.positions) == [0, 2, 4]
    assert same_bits([out[1], out[3]], [sample.pages[first[0]], sample.pages[second[5]]])
    assert sample.store.find(make_key(6), 0) is None
    assert sample.store.find(make_key(2), 1) is None
    assert sample.store.find(make_key(6), 1) == second[6]
    assert sample.store.num_damaged_pages == 2


def test_a_damaged_layer_spoils_the_read_of_that_layer_only(sample: Sample) -> None:
    row = sample.rows[0][6]
    sample.flip(row)
    out = empty_like([sample.pages[row][0]])
    sample.store.read_layer([row], 0, out)
    assert same_bits(out, [sample.pages[row][0]])
    with pytest.raises(CorruptPageError):
        sample.store.read_layer([row], 2, out)
    assert sample.store.find(make_key(6)) is None


def test_a_damaged_page_is_written_again_and_found(sample: Sample) -> None:
    row = sample.rows[0][6]
    sample.flip(row)
    page = sample.pages[row]
    with pytest.raises(CorruptPageError):
        sample.store.read([row], empty_like([page]))
    (again,) = sample.store.write(0, make_entries(SPEC, 1, start=6, parent=None), [page])
    assert again != row
    out = empty_like([page])
    sample.store.read([again], out)
    assert same_bits(out, [page])


def test_rows_of_a_segment_file_that_vanished_are_lost(sample: Sample) -> None:
    rows = sample.rows[0]
    with PageStore.open(sample.path, mode="r") as store:
        (sample.path / "lane-0000/group-0/kv/c.1.0.0.0.0.0").unlink()
        out = empty_like([sample.pages[row] for row in rows])
        with pytest.raises(CorruptPageError) as caught:
            store.read(rows, out)
        assert caught.value.positions == (4, 5, 6, 7)
        assert same_bits(out[:4], [sample.pages[row] for row in rows[:4]])
        assert same_bits(out[8:], [sample.pages[row] for row in rows[8:]])


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_rows_of_a_segment_whose_map_is_not_to_be_had_are_lost(sample: Sample, damage: str) -> None:
    rows = sample.rows[0]
    with PageStore.open(sample.path, mode="r") as store:
        chunk = sample.path / "lane-0000/group-0/catalog/c.1.0"
        if damage == "gone":
            chunk.unlink()
        else:
            os.truncate(chunk, 100)
        out = empty_like([sample.pages[row] for row in rows])
        store.read(rows, out)  # the map is in memory
        assert same_bits(out, [sample.pages[row] for row in rows])
        store._contents._maps.clear()
        store._contents._maps_nbytes = 0
        with pytest.raises(CorruptPageError) as caught:
            store.read(rows, out)
        assert caught.value.positions == (4, 5, 6, 7)
        assert caught.value.keys == tuple(make_key(number) for number in range(4, 8))


@pytest.mark.parametrize("row", [StoreRow(0, 0, 10), StoreRow(0, 0, 4000), StoreRow(3, 0, 0)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_row_that_never_held_a_page_is_not_found(
    sample: Sample, row: StoreRow, count: int
) -> None:
    out = np.zeros((count, *SPEC.page_shape), np.float32)
    with pytest.raises(PageNotFoundError, match="has no page in"):
        sample.store.read([row] * count, out)


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_of_an_unknown_spec_is_not_found(sample: Sample, count: int) -> None:
    out = np.zeros((count, *SPEC.page_shape), np.float32)
    with pytest.raises(PageNotFoundError):
        sample.store.read([StoreRow(0, 9, 0)] * count, out)


def test_what_find_rows_did_not_find_cannot_be_read(sample: Sample) -> None:
    out = np.zeros((1, *SPEC.page_shape), np.float32)
    with pytest.raises(PageNotFoundError):
        sample.store.read(sample.store.find_rows([make_key(99)]), out)


@pytest.mark.parametrize(
    ("out", "at", "message"),
    [
        (np.zeros((1, *SPEC.page_shape), np.float32), None, "2 rows for 1 arrays"),
        (np.zeros((3, *SPEC.page_shape), np.float32), [0], "2 rows for 1 arrays"),
        (np.zeros((3, *SPEC.page_shape), np.float32), [0, 3], "an out array has 3 places"),
        (np.zeros((3, *SPEC.page_shape), np.float32), [-1, 0], "an out array has 3 places"),
        (np.zeros((2, *SPEC.page_shape), np.float16), None, "an out array is float16"),
        (np.zeros((2, *SPEC.page_shape), ">f4"), None, "an out array is >f4"),
        (np.zeros((2, *SPEC.layer_shape), np.float32), None, "an out array is float32 of shape"),
        ([np.zeros(SPEC.page_shape, np.float32)] * 3, None, "2 rows for 3 arrays"),
        ([np.zeros(SPEC.page_shape, np.float32)] * 2, [0, 1], "at chooses places of one array"),
    ],
)
def test_an_out_array_that_does_not_fit_is_refused(
    sample: Sample, out: Any, at: Any, message: str
) -> None:
    places = None if at is None else np.array(at)
    with pytest.raises(ValueError, match=message):
        sample.store.read(sample.rows[0][:2], out, at=places)


def test_a_read_only_out_array_is_refused(sample: Sample) -> None:
    out = np.zeros((2, *SPEC.page_shape), np.float32)
    out.flags.writeable = False
    for count in (1, 2):
        with pytest.raises(ValueError, match="an out array is read-only"):
            sample.store.read(sample.rows[0][:count], out)
        with pytest.raises(ValueError, match="an out array is read-only"):
            sample.store.read(sample.rows[0][:count], list(out[:count]))
    assert not out.any()


@pytest.mark.parametrize("layer", [-1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_beyond_the_spec_is_refused(sample: Sample, layer: int, count: int) -> None:
    out = np.zeros((count, *SPEC.layer_shape), np.float32)
    with pytest.raises(ValueError, match=f"layer is {layer}: the spec holds 3 layers"):
        sample.store.read_layer(sample.rows[0][:count], layer, out)


class TestSmallChunks:
    """One small chunk in the page cache has a path of its own."""

    def test_it_is_read_into_any_array(self, small: Sample) -> None:
        for number, row in enumerate(small.rows[0]):
            page = small.pages[row]
            pool = np.zeros((*page.shape[:2], 3, *page.shape[2:-1], 16), np.float32)[..., ::2]
            small.store.read([row], np.moveaxis(pool, 2, 0), at=np.array([number % 3]))
            assert same_bits([pool[:, :, number % 3]], [page])
            layer = empty_like([page[0]])
            small.store.read_layer(small.packed([row]), 0, layer)
            assert same_bits(layer, [page[0]])

    def test_it_is_read_as_well_when_its_segment_is_not_known_well(self, small: Sample) -> None:
        row = small.rows[0][0]
        small.store._contents._maps.clear()
        small.store._contents._maps_nbytes = 0
        out = empty_like([small.pages[row]])
        small.store.read([row], out)
        assert same_bits(out, [small.pages[row]])

    def test_damage_is_found(self, small: Sample) -> None:
        small.flip(small.rows[0][5])
        out = empty_like([small.pages[small.rows[0][5]]])
        with pytest.raises(CorruptPageError) as caught:
            small.store.read([small.rows[0][5]], out)
        assert caught.value.keys == (make_key(5),)
        assert caught.value.positions == (0,)
        assert small.store.find(make_key(5)) is None

    def test_a_truncated_file_is_damage(self, small: Sample) -> None:
        os.truncate(small.path / "lane-0000/group-0/kv/c.1.0.0.0.0.0", 700)
        out = empty_like([small.pages[small.rows[0][5]]])
        small.store.read([small.rows[0][4]], out)
        assert same_bits(out, [small.pages[small.rows[0][4]]])
        with pytest.raises(CorruptPageError):
            small.store.read([small.rows[0][5]], out)

    @pytest.mark.parametrize(
        ("out", "at"),
        [
            (np.zeros((3, *ONE_LAYER.page_shape), np.float32), [-1]),
            (np.zeros((3, *ONE_LAYER.page_shape), np.float32), [3]),
            (np.zeros((3, *ONE_LAYER.page_shape), np.float32), [0, 1]),
            (np.zeros((3, *ONE_LAYER.page_shape), np.float32), []),
            ([np.zeros(ONE_LAYER.page_shape, np.float32)] * 2, None),
            ([np.zeros(ONE_LAYER.page_shape, np.float32)], [0]),
            ([], None),
        ],
        ids=range(7),
    )
    def test_arguments_that_do_not_fit_are_refused(self, small: Sample, out: Any, at: Any) -> None:
        places = None if at is None else np.array(at, np.int64)
        with pytest.raises(ValueError, match="array"):
            small.store.read(small.rows[0][:1], out, at=places)


def test_a_read_that_is_interrupted_by_another_read_is_right_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler may do it, between any two steps."""
    sample = Sample(tmp_path / "cache.zarr", [make_spec(head_dim=64, page_tokens=16)])
    pages = make_pages(sample.store.specs[0], NUM_PAGES)
    out, other = empty_like(pages[:1]), empty_like(pages[:1])
    read_now = SegmentFormat.read_now
    interrupts: list[int] = []

    def interrupted(form: SegmentFormat, *arguments: Any) -> int:
        if not interrupts:
            interrupts.append(1)
            sample.store.read(sample.rows[0][5:6], other)
        return read_now(form, *arguments)

    monkeypatch.setattr(SegmentFormat, "read_now", interrupted)
    sample.store.read(sample.rows[0][2:3], out)
    assert bool(interrupts) == bool(files.preadv2_address())
    assert same_bits(out, pages[2:3])
    sample.store.close()


def test_a_deadline_is_for_the_disk_and_not_for_what_comes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may have to be compiled."""
    sample = Sample(tmp_path / "cache.zarr", [SPEC])
    pages = make_pages(SPEC, NUM_PAGES)
    really_wanted = RowReader._wanted

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return really_wanted(*arguments)

    serve_nothing_now(monkeypatch)
    monkeypatch.setattr(RowReader, "_wanted", slowly)
    out = empty_like(pages[:2])
    sample.store.read(sample.rows[0][:2], out, deadline=0.4)
    assert same_bits(out, pages[:2])
    sample.store.close()


def test_a_batch_over_more_files_than_may_be_open_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "MAX_OPEN", 1)
    sample = Sample(tmp_path / "cache.zarr", [SPEC])
    pages = make_pages(SPEC, NUM_PAGES)
    sample.store.close()
    with PageStore.open(sample.store.path, SPEC, mode="r") as store:
        open_file, opened = files.open_file, set[int]()
        close_file = files.close_file

        def limited(path: Path, **options: Any) -> int:
            if len(opened) >= 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            fd = open_file(path, **options)
            opened.add(fd)
            return fd

        def closing(fd: int) -> None:
            opened.discard(fd)
            close_file(fd)

        monkeypatch.setattr(files, "open_file", limited)
        monkeypatch.setattr(files, "close_file", closing)
        out = empty_like(pages)
        store.read(sample.rows[0], out)
        assert same_bits(out, pages)
