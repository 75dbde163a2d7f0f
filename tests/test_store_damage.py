"""Whatever happens to the files: never a wrong byte, and the undamaged pages are still served."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    Array,
    bits,
    empty_like,
    make_entries,
    make_key,
    make_pages,
    make_spec,
    same_bits,
)

from pagedkv import Int8, files, metadata, root
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError, StoreError
from pagedkv.format import StoreRow
from pagedkv.store import PageStore

SPEC = make_spec()
PAGES = make_pages(SPEC, 12)
ENTRIES = make_entries(SPEC, 12)
KEYS = [entry.key for entry in ENTRIES]
GROUP = Path("lane-0000/group-0")
SEGMENTS = [GROUP / "kv" / fmt.chunk_name(n, 6) for n in range(3)]
CHUNKS = [GROUP / "catalog" / fmt.chunk_name(n, 2) for n in range(3)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of twelve pages in three segments of four."""
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)
    path = tmp_path / "cache.zarr"
    with PageStore.open(path, SPEC) as store:
        rows = store.write(0, ENTRIES, PAGES)
    assert [row.row for row in rows] == list(range(12))
    return path


def flip(file: Path, at: int, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def swap(left: Path, right: Path) -> None:
    data = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(data)


def served(store: PageStore) -> list[int]:
    """Numbers of the pages that ``store`` still gives back, each of them checked."""
    good = []
    for number, key in enumerate(KEYS):
        row = store.find(key)
        if row is None:
            continue
        out = empty_like(PAGES[:1])
        try:
            store.read([row], out)
        except CorruptPageError as error:
            assert error.keys == (key,)
            assert store.find(key) != row
            continue
        assert same_bits(out, PAGES[number : number + 1])
        good.append(number)
    return good


def without(*lost: int) -> list[int]:
    return [number for number in range(12) if number not in lost]


class TestReading:
    def test_one_damaged_page_is_named_forgotten_and_counted_and_the_others_read(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with PageStore.open(path) as store:
            flip(path / SEGMENTS[1], 2 * (SPEC.page_nbytes + 12) + 100)
            rows = [store.find(key) for key in KEYS]
            out = empty_like(PAGES)
            with pytest.raises(CorruptPageError, match="1 pages of .* damaged or gone") as caught:
                store.read(rows, out)
            assert caught.value.keys == (KEYS[6],)
            assert KEYS[6].hex() in caplog.text
            assert same_bits(out[:6] + out[7:], PAGES[:6] + PAGES[7:])
            assert store.find(KEYS[6]) is None
            assert (store.num_pages, store.num_damaged_pages) == (11, 1)
            store.check_invariants()

    def test_reading_a_forgotten_row_again_is_no_better(self, path: Path) -> None:
        with PageStore.open(path) as store:
            flip(path / SEGMENTS[0], 5)
            for _ in range(2):
                with pytest.raises(CorruptPageError) as caught:
                    store.read([StoreRow(0, 0, 0)], empty_like(PAGES[:1]))
                assert caught.value.keys == (KEYS[0],)
            assert store.num_damaged_pages == 1

    def test_a_damaged_page_can_be_written_again_and_is_the_one_that_counts(
        self, path: Path
    ) -> None:
        flip(path / SEGMENTS[0], 5)
        with PageStore.open(path) as store:
            assert served(store) == without(0)
            (row,) = store.write(0, ENTRIES[:1], PAGES[:1])
            assert row == StoreRow(0, 0, 12)
            assert served(store) == without()
        with PageStore.open(path) as store:
            assert store.find(KEYS[0]) == StoreRow(0, 0, 0)
            assert served(store) == without(0)  # found damaged, now the copy counts
            assert served(store) == without()
            store.check_invariants()

    def test_only_the_damaged_layer_of_a_page_is_lost(self, path: Path) -> None:
        with PageStore.open(path) as store:
            flip(path / SEGMENTS[0], SPEC.layer_nbytes + 4 + 9)
            rows = [StoreRow(0, 0, number) for number in range(4)]
            for layer in (0, 2):
                out = empty_like([page[layer] for page in PAGES[:4]])
                store.read_layer(rows, layer, out)
                assert same_bits(out, [page[layer] for page in PAGES[:4]])
            out = empty_like([page[1] for page in PAGES[:4]])
            with pytest.raises(CorruptPageError) as caught:
                store.read_layer(rows, 1, out)
            assert caught.value.keys == (KEYS[0],)
            assert same_bits(out[1:], [page[1] for page in PAGES[1:4]])

    @pytest.mark.parametrize("size", [0, 1, 2000, 7000])
    def test_a_truncated_segment_loses_only_what_is_cut(self, path: Path, size: int) -> None:
        os.truncate(path / SEGMENTS[1], size)
        whole = size // (SPEC.page_nbytes + 12)
        for mode in ("r", "a"):
            with PageStore.open(path, mode=mode) as store:
                assert served(store) == without(*range(4 + whole, 8))

    def test_a_segment_that_vanishes_while_open_is_a_miss(self, path: Path) -> None:
        with PageStore.open(path) as store:
            (path / SEGMENTS[2]).unlink()
            assert served(store) == without(8, 9, 10, 11)
            assert store.num_damaged_pages == 4

    def test_a_segment_that_is_gone_on_opening_is_skipped(self, path: Path) -> None:
        (path / SEGMENTS[2]).unlink()
        with PageStore.open(path) as store:
            assert store.num_torn_chunks == 1
            assert store.num_pages == 8
            assert served(store) == without(8, 9, 10, 11)

    @pytest.mark.parametrize("stand_in", ["a folder", "a link", "a dangling link", "a pipe"])
    def test_what_is_no_file_of_its_own_is_a_miss(
        self, path: Path, tmp_path: Path, stand_in: str
    ) -> None:
        segment = path / SEGMENTS[0]
        with PageStore.open(path) as store:
            shutil.move(segment, tmp_path / "elsewhere")
            if stand_in == "a folder":
                segment.mkdir()
            elif stand_in == "a pipe":
                os.mkfifo(segment)
            else:
                target = "elsewhere" if stand_in == "a link" else "nowhere"
                segment.symlink_to(tmp_path / target)
            assert served(store) == without(0, 1, 2, 3)
        with PageStore.open(path, mode="r") as store:
            assert served(store) == without(0, 1, 2, 3)

    def test_a_disk_error_is_no_loss_and_names_the_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with PageStore.open(path) as store:
            monkeypatch.setattr(files, "preadv2_address", lambda: 0)
            monkeypatch.setattr(os, "preadv", broken)
            with pytest.raises(StoreError, match=f"cannot read .*{SEGMENTS[0].name}.*Input/output"):
                store.read([StoreRow(0, 0, 0)], empty_like(PAGES[:1]))
            with pytest.raises(StoreError, match=f"cannot read .*{CHUNKS[0].name}.*Input/output"):
                store.entry(StoreRow(0, 0, 0))
            monkeypatch.undo()
            assert served(store) == without()


class TestSwappedFiles:
    def test_swapped_segments_are_noticed(self, path: Path) -> None:
        swap(path / SEGMENTS[0], path / SEGMENTS[2])
        with PageStore.open(path) as store:
            assert served(store) == without(0, 1, 2, 3, 8, 9, 10, 11)

    def test_swapped_catalogue_chunks_are_noticed(self, path: Path) -> None:
        swap(path / CHUNKS[0], path / CHUNKS[2])
        with PageStore.open(path) as store:
            assert store.num_torn_chunks == 2
            assert served(store) == without(0, 1, 2, 3, 8, 9, 10, 11)

    def test_segments_swapped_with_their_catalogue_are_noticed(self, path: Path) -> None:
        swap(path / SEGMENTS[0], path / SEGMENTS[2])
        swap(path / CHUNKS[0], path / CHUNKS[2])
        with PageStore.open(path) as store:
            assert served(store) == without(0, 1, 2, 3, 8, 9, 10, 11)

    def test_segments_of_another_model_s_store_are_noticed(
        self, path: Path, tmp_path: Path
    ) -> None:
        with PageStore.open(tmp_path / "other.zarr", make_spec(model="other")) as other:
            other.write(0, ENTRIES, make_pages(SPEC, 12, seed=9))
        for name in (SEGMENTS[1], CHUNKS[1]):
            shutil.copy(tmp_path / "other.zarr" / name, path / name)
        with PageStore.open(path) as store:
            assert store.num_torn_chunks == 1
            assert served(store) == without(4, 5, 6, 7)

    def test_pages_swapped_within_a_segment_are_noticed(self, path: Path) -> None:
        data, size = bytearray((path / SEGMENTS[0]).read_bytes()), SPEC.page_nbytes + 12
        data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
        (path / SEGMENTS[0]).write_bytes(data)
        with PageStore.open(path) as store:
            assert served(store) == without(0, 1)

    def test_layers_swapped_within_a_page_are_noticed(self, path: Path) -> None:
        data, size = bytearray((path / SEGMENTS[0]).read_bytes()), SPEC.layer_nbytes + 4
        data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
        (path / SEGMENTS[0]).write_bytes(data)
        with PageStore.open(path) as store:
            assert served(store) == without(0)


class TestCatalogue:
    @pytest.mark.parametrize("where", [0, 40, 300, -1])
    def test_a_flipped_bit_loses_that_segment_only(self, path: Path, where: int) -> None:
        flip(path / CHUNKS[1], where)
        for mode in ("r", "a"):
            with PageStore.open(path, mode=mode) as store:
                assert store.num_torn_chunks == 1
                assert served(store) == without(4, 5, 6, 7)
        assert (path / SEGMENTS[1]).exists()  # it may still be repaired

    def test_a_segment_without_its_catalogue_chunk_does_not_exist(self, path: Path) -> None:
        (path / CHUNKS[2]).unlink()
        with PageStore.open(path, mode="r") as store:
            assert served(store) == without(8, 9, 10, 11)
        assert (path / SEGMENTS[2]).exists()
        with PageStore.open(path) as store:  # its writer cleans up, but does not reuse the rows
            assert not (path / SEGMENTS[2]).exists()
            assert store.nbytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            rows = store.write(0, ENTRIES[8:], PAGES[8:])
            assert [row.row for row in rows] == [12, 13, 14, 15]
            assert served(store) == without()

    def test_leftovers_of_an_interrupted_write_are_removed_by_the_next_writer(
        self, path: Path
    ) -> None:
        left = [path / GROUP / name / ".tmp-c.3-00ff" for name in ("kv", "catalog", "tokens")]
        left += [path / GROUP / ".tmp-zarr.json-1", path / "lane-0000" / ".tmp-zarr.json-2"]
        for file in left:
            file.write_bytes(b"half")
        PageStore.open(path, mode="r").close()
        assert all(file.exists() for file in left)
        PageStore.open(path).close()
        assert not any(file.exists() for file in left)

    def test_a_record_that_is_damaged_while_open_has_no_entry(self, path: Path) -> None:
        with PageStore.open(path) as store:
            flip(path / CHUNKS[0], 60)
            with pytest.raises(CorruptPageError, match="its CRC32C is wrong") as caught:
                store.entry(StoreRow(0, 0, 0))
            assert caught.value.keys == (KEYS[0],)
            swap(path / CHUNKS[1], path / CHUNKS[2])
            with pytest.raises(CorruptPageError, match="it is the record of row 8"):
                store.entry(StoreRow(0, 0, 4))
            os.truncate(path / CHUNKS[0], 10)
            with pytest.raises(CorruptPageError, match="ends .* bytes too early"):
                store.entry(StoreRow(0, 0, 1))
            (path / CHUNKS[0]).unlink()
            with pytest.raises(CorruptPageError, match="No such file"):
                store.entry(StoreRow(0, 0, 2))
            assert served(store) == without()  # the pages themselves are whole

    @pytest.mark.parametrize("damage", ["missing", "short"])
    def test_derived_columns_are_rebuilt(self, path: Path, damage: str) -> None:
        columns = [p for p in (path / GROUP).glob("*/c.1*") if p not in (path / SEGMENTS[1],)]
        derived = [p for p in columns if p.parent.name not in ("kv", "catalog")]
        assert len(derived) == 4
        before = {file: file.read_bytes() for file in derived}
        for file in derived:
            if damage == "missing":
                file.unlink()
            else:
                os.truncate(file, 3)
        PageStore.open(path).close()
        assert {file: file.read_bytes() for file in derived} == before


def test_a_store_that_says_another_codec_gives_no_wrong_page(path: Path, tmp_path: Path) -> None:
    spec = make_spec(page_tokens=8)  # as many tokens as channels: all scales have equal sizes
    pages: list[Array] = make_pages(spec, 4)
    place = tmp_path / "int8.zarr"
    with PageStore.open(place, spec, codec="int8") as store:
        rows = store.write(0, make_entries(spec, 4), pages)
        right = empty_like(pages)
        store.read(rows, right)
    header = root.read_header(place)
    assert header is not None
    other = replace(header, codec=Int8(key_scales="token", value_scales="channel"))
    (place / "zarr.json").write_bytes(metadata.root_document(other))
    with PageStore.open(place, spec) as store:
        assert store.num_torn_chunks == 1
        assert store.find(make_key(0)) is None
    assert bits(np.stack(right)) != bits(np.stack(pages))
