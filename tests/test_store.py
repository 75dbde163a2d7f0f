import gc
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import (
    Array,
    all_files,
    bits,
    chunk_nbytes,
    empty_like,
    make_entries,
    make_key,
    make_pages,
    make_smooth_pages,
    make_spec,
    run_python,
    same_bits,
    serve_nothing_now,
)

from pagedkv import contents, files
from pagedkv import format as fmt
from pagedkv.codec import Int8, Lossless, Raw
from pagedkv.errors import (
    ClosedError,
    FormatVersionError,
    PageNotFoundError,
    SpecMismatchError,
    StoreError,
    StoreFullError,
)
from pagedkv.format import PageEntry, StoreRow
from pagedkv.header import checksum
from pagedkv.store import PageStore

SPEC = make_spec()
PAGES = make_pages(SPEC, 10)
ENTRIES = make_entries(SPEC, 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


@pytest.fixture
def store(path: Path) -> Iterator[PageStore]:
    with PageStore.open(path, SPEC) as store:
        yield store
        store.check_invariants()


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """New stores have segments of four rows."""
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


def read(store: PageStore, rows: list[StoreRow]) -> list[Array]:
    out = [np.full(store.specs[row.group].page_shape, 7, SPEC.np_dtype) for row in rows]
    store.read(rows, out)
    return out


def rows_of(store: PageStore, entries: list[PageEntry], group: int = 0) -> list[StoreRow]:
    rows = [store.find(entry.key, group) for entry in entries]
    assert None not in rows
    return [row for row in rows if row is not None]


class TestWriteAndRead:
    def test_pages_come_back_bit_for_bit(self, store: PageStore) -> None:
        rows = store.write(0, ENTRIES, PAGES)
        assert rows == [StoreRow(0, 0, number) for number in range(10)]
        assert same_bits(read(store, rows), PAGES)
        assert store.num_pages == 10

    def test_pages_come_back_after_reopening(self, path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, ENTRIES, PAGES)
        for mode in ("r", "a"):
            with PageStore.open(path, SPEC, mode=mode) as store:
                assert rows_of(store, ENTRIES) == rows
                assert same_bits(read(store, rows), PAGES)
                store.check_invariants()

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("kinds", [1, 2])
    def test_every_dtype_and_number_of_kinds(self, path: Path, dtype: str, kinds: int) -> None:
        spec = make_spec(dtype=dtype, num_kinds=kinds)
        pages = make_pages(spec, 3)
        with PageStore.open(path, spec) as store:
            rows = store.write(0, make_entries(spec, 3), pages)
            out = empty_like(pages)
            store.read(rows, out)
        assert same_bits(out, pages)

    def test_a_part_of_the_layers_and_heads_is_a_page_of_its_own_shape(self, path: Path) -> None:
        spec = make_spec(layer_range=(1, 3), head_range=(1, 2))
        (page,) = make_pages(spec, 1)
        assert page.shape == (2, 2, 4, 1, 8)
        with PageStore.open(path, spec) as store:
            rows = store.write(0, make_entries(spec, 1), [page])
            out = empty_like([page[1]])
            store.read_layer(rows, 1, out)
        assert same_bits(out, [page[1]])

    def test_rows_are_read_in_any_order_and_repeatedly(self, store: PageStore) -> None:
        rows = store.write(0, ENTRIES, PAGES)
        order = [7, 2, 3, 4, 2, 9]
        out = read(store, [rows[n] for n in order])
        assert same_bits(out, [PAGES[n] for n in order])

    def test_one_layer_is_read_alone(self, store: PageStore) -> None:
        rows = store.write(0, ENTRIES, PAGES)
        for layer in range(SPEC.held_layers):
            out = empty_like([page[layer] for page in PAGES])
            store.read_layer(rows, layer, out)
            assert same_bits(out, [page[layer] for page in PAGES])

    def test_nothing_can_be_written_and_read(self, store: PageStore, path: Path) -> None:
        before = all_files(path)
        assert store.write(0, [], []) == []
        store.read([], [])
        assert all_files(path) == before

    def test_a_partly_filled_segment_leaves_its_other_rows_unused(
        self, path: Path, short_segments: None
    ) -> None:
        with PageStore.open(path, SPEC) as store:
            first = store.write(0, ENTRIES[:3], PAGES[:3])
            second = store.write(0, ENTRIES[3:5], PAGES[3:5])
            assert [row.row for row in first + second] == [0, 1, 2, 4, 5]
            assert same_bits(read(store, first + second), PAGES[:5])
            with pytest.raises(PageNotFoundError, match="has no page in"):
                store.read([StoreRow(0, 0, 3)], empty_like(PAGES[:1]))

    def test_a_write_is_split_into_segments(self, path: Path, short_segments: None) -> None:
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, ENTRIES, PAGES)
            assert [row.row for row in rows] == list(range(10))
            assert same_bits(read(store, rows[::-1]), PAGES[::-1])
            names = [p.name for p in path.glob("lane-0000/group-0/kv/c.*")]
            assert sorted(names) == [f"c.{n}.0.0.0.0.0" for n in range(3)]
        with PageStore.open(path, mode="r") as store:
            assert same_bits(read(store, rows), PAGES)

    def test_rows_are_not_reused_by_a_later_writer(self, path: Path, short_segments: None) -> None:
        rows = []
        for number in range(3):
            with PageStore.open(path, SPEC) as store:
                rows += store.write(0, ENTRIES[number : number + 1], PAGES[number : number + 1])
        assert [row.row for row in rows] == [0, 4, 8]
        with PageStore.open(path, SPEC) as store:
            assert same_bits(read(store, rows), PAGES[:3])

    def test_the_arrays_grow_with_many_small_writes(self, path: Path, short_segments: None) -> None:
        pages, entries = make_pages(SPEC, 40), make_entries(SPEC, 40)
        with PageStore.open(path, SPEC) as store:
            for entry, page in zip(entries, pages, strict=True):
                store.write(0, [entry], [page])
        document = json.loads((path / "lane-0000/group-0/kv/zarr.json").read_text())
        assert document["shape"][0] == 40 * 4
        with PageStore.open(path, mode="r") as store:
            assert same_bits(read(store, rows_of(store, entries)), pages)

    def test_strided_views_of_a_pool_are_written_and_read_in_place(
        self, path: Path, short_segments: None
    ) -> None:
        spec = make_spec(num_layers=6, num_kv_heads=3, head_dim=32, page_tokens=16)
        layers, kinds, *rest = spec.page_shape
        pages, slots = make_pages(spec, 50), np.random.default_rng(5).permutation(50).tolist()
        pool = np.zeros((layers, kinds, 50, *rest), np.float32)
        for slot, page in zip(slots, pages, strict=True):
            pool[:, :, slot] = page
        out = np.zeros_like(pool)
        with PageStore.open(path, spec) as store:
            rows = store.write(0, make_entries(spec, 50), [pool[:, :, s] for s in slots])
            order = np.random.default_rng(6).permutation(50).tolist()
            store.read([rows[n] for n in order], [out[:, :, slots[n]] for n in order])
            assert same_bits([out], [pool])
            part = np.zeros_like(pool)
            store.read_layer(rows, 4, [part[4][:, slot] for slot in slots])
        assert same_bits([part[4]], [pool[4]])
        assert not part[:4].any()
        assert not part[5].any()

    def test_a_tail_is_stored_without_what_lies_beyond_its_tokens(self, path: Path) -> None:
        page = PAGES[0].copy()
        page[:, :, 3:] = np.nan  # what the pool's slot held before
        tail = PageEntry(key=make_key(1), num_tokens=3, tokens=np.arange(3, dtype=np.int32))
        for codec in ("raw", "int8"):
            with PageStore.open(path.with_suffix(f".{codec}"), SPEC, codec=codec) as store:
                rows = store.write(0, [tail], [page])
                (out,) = read(store, rows)
                assert not out[:, :, 3:].any()
                assert np.allclose(out[:, :, :3], page[:, :, :3], atol=0.05)
                assert store.entry(rows[0]).num_tokens == 3

    def test_int8_comes_back_within_its_error(self, path: Path) -> None:
        with PageStore.open(path, SPEC, codec="int8") as store:
            assert store.codec == Int8()
            rows = store.write(0, ENTRIES, PAGES)
            out = read(store, rows)
            error = np.abs(np.stack(out) - np.stack(PAGES)).max()
            assert 0 < error <= np.abs(np.stack(PAGES)).max() / 127
            layers = empty_like([page[2] for page in PAGES])
            store.read_layer(rows, 2, layers)
            assert same_bits(layers, [page[2] for page in out])

    def test_layer_groups_have_pages_of_their_own(self, path: Path) -> None:
        specs = [SPEC, make_spec(group="windowed", head_dim=4, num_layers=2)]
        others = make_pages(specs[1], 3)
        with PageStore.open(path, specs) as store:
            assert store.specs == tuple(specs)
            first = store.write(0, ENTRIES[:3], PAGES[:3])
            second = store.write(1, make_entries(specs[1], 3, start=50), others)
            assert [row.group for row in first + second] == [0, 0, 0, 1, 1, 1]
            mixed = [first[0], second[1], first[2], second[0]]
            expected = [PAGES[0], others[1], PAGES[2], others[0]]
            out = empty_like(expected)
            store.read(mixed, out)
            assert same_bits(out, expected)
            layers = empty_like([page[1] for page in expected])
            store.read_layer(mixed, 1, layers)
            assert same_bits(layers, [page[1] for page in expected])
        with PageStore.open(path) as store:
            assert rows_of(store, make_entries(specs[1], 3, start=50), group=1) == second

    def test_one_key_in_two_layer_groups_names_two_pages(self, path: Path) -> None:
        specs = [SPEC, make_spec(group="windowed")]
        others = make_pages(specs[1], 3, seed=8)
        with PageStore.open(path, specs) as store:
            store.write(0, ENTRIES[:3], PAGES[:3])
            assert store.find(ENTRIES[0].key, 1) is None
            store.write(1, ENTRIES[:3], others)
            assert store.num_pages == 6
            store.check_invariants()
        with PageStore.open(path) as store:
            assert same_bits(read(store, rows_of(store, ENTRIES[:3], group=0)), PAGES[:3])
            assert same_bits(read(store, rows_of(store, ENTRIES[:3], group=1)), others)
        for array in ("kv", "catalog"):  # equal geometries: only the records tell them apart
            first, second = sorted(path.glob(f"lane-0000/group-*/{array}/c.0.*"))
            data = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(data)
        with PageStore.open(path) as store:
            assert store.num_torn_chunks == 2
            assert store.num_pages == 0


def strided(pages: list[Array]) -> Array:
    """The pages in one array, with unused places between the channels."""
    wide = np.full((len(pages), *pages[0].shape[:-1], 16), 7, np.float32)
    wide[..., ::2] = pages
    return wide[..., ::2]


class TestOneArray:
    """Pages as a pool has them: one array, of which some places are meant."""

    @pytest.fixture
    def pool(self) -> Array:
        layers, kinds, *rest = SPEC.page_shape
        pool = np.zeros((layers, kinds, 12, *rest), np.float32)
        pool[:, :, 1:11] = np.moveaxis(np.stack(PAGES), 0, 2)
        return np.moveaxis(pool, 2, 0)

    @pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
    def test_places_of_a_pool_are_written_and_read(
        self, path: Path, short_segments: None, pool: Array, codec: Any
    ) -> None:
        at = np.random.default_rng(2).permutation(10) + 1
        chosen = [ENTRIES[place - 1] for place in at.tolist()]
        with PageStore.open(path, SPEC, codec=codec) as store:
            rows = store.write(0, chosen, pool, at=at)
            assert same_bits(read(store, rows_of(store, ENTRIES)), PAGES)
            out = np.zeros_like(pool)
            store.read(rows, out, at=at)
            assert same_bits(out, pool)
            assert store.find_rows([entry.key for entry in chosen]).tolist() == [
                fmt.pack_row(row) for row in rows
            ]

    def test_only_the_new_ones_of_them_are_written(self, store: PageStore, pool: Array) -> None:
        store.write(0, ENTRIES[2:5], PAGES[2:5])
        rows = store.write(0, ENTRIES, pool, at=np.arange(1, 11))
        assert store.num_pages == 10
        assert same_bits(read(store, rows), PAGES)

    @pytest.mark.parametrize("codec", [Raw(), Lossless(), Int8()], ids=str)
    def test_arrays_of_any_strides_are_written_and_read(self, path: Path, codec: Any) -> None:
        with PageStore.open(path, SPEC, codec=codec) as store:
            rows = store.write(0, ENTRIES[:5], strided(PAGES[:5]))
            rows += store.write(0, ENTRIES[3:], list(strided(PAGES[3:])))[2:]
            straight = read(store, rows)
            out = strided([page * 0 for page in PAGES])
            store.read(rows, out)
            assert same_bits(out, straight)
            assert codec == Int8() or same_bits(out, PAGES)

    @pytest.mark.parametrize("form", ["one array", "sequence", "unlike strides"])
    def test_tails_among_arrays_of_any_strides_are_written(self, path: Path, form: str) -> None:
        tail = replace(ENTRIES[2], num_tokens=2, tokens=None)
        pages: Any = strided(PAGES[:3])
        if form == "sequence":
            pages = list(pages)
        elif form == "unlike strides":
            pages = [PAGES[0], np.asfortranarray(PAGES[1]), PAGES[2]]
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, [*ENTRIES[:2], tail], pages)
            out = read(store, rows)
        assert same_bits(out[:2], PAGES[:2])
        assert same_bits([out[2][:, :, :2]], [PAGES[2][:, :, :2]])
        assert not out[2][:, :, 2:].any()


class TestLossless:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("kinds", [1, 2])
    def test_pages_come_back_bit_for_bit(
        self, path: Path, short_segments: None, dtype: str, kinds: int
    ) -> None:
        spec = make_spec(dtype=dtype, num_kinds=kinds)
        pages = make_smooth_pages(spec, 5) + make_pages(spec, 4)
        pages.append(np.full(spec.page_shape, np.nan, spec.np_dtype))
        with PageStore.open(path, spec, codec="lossless") as store:
            rows = store.write(0, make_entries(spec, 10), pages)
            out = empty_like(pages)
            store.read(rows, out)
            assert same_bits(out, pages)
        with PageStore.open(path, mode="r") as store:
            assert store.codec == Lossless()
            order = [9, 0, 4, 3, 0]
            out = empty_like([pages[n] for n in order])
            store.read([rows[n] for n in order], out)
            assert same_bits(out, [pages[n] for n in order])
            for layer in range(spec.held_layers):
                layers = empty_like([page[layer] for page in pages])
                store.read_layer(rows, layer, layers)
                assert same_bits(layers, [page[layer] for page in pages])

    def test_maps_that_were_forgotten_are_read_again(
        self, path: Path, short_segments: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(contents, "MAX_MAPS_NBYTES", 1)
        with PageStore.open(path, SPEC, codec="lossless") as store:
            rows = store.write(0, ENTRIES, PAGES)
            assert same_bits(read(store, rows), PAGES)
            assert len(store._contents._maps) == 1
            store.check_invariants()
        with PageStore.open(path, mode="r") as store:
            assert same_bits(read(store, rows[::-1]), PAGES[::-1])

    def test_nbytes_are_the_bytes_on_disk(self, path: Path, short_segments: None) -> None:
        with PageStore.open(path, SPEC, codec="lossless") as store:
            before = store.nbytes - files.tree_nbytes(path)
            store.write(0, ENTRIES, make_smooth_pages(SPEC, 10))
            store._contents.groups[0, 0].write_columns()
            assert store.nbytes - files.tree_nbytes(path) == before

    def test_a_bounded_store_does_not_fill_up_for_good(
        self, path: Path, short_segments: None
    ) -> None:
        pages, entries = make_smooth_pages(SPEC, 800), make_entries(SPEC, 800, parent=None)
        with PageStore.open(path, SPEC, codec="lossless", max_nbytes=400_000) as store:
            for at in range(0, 800, 4):
                store.write(0, entries[at : at + 4], pages[at : at + 4])
            assert chunk_nbytes(path) > 250_000


class TestKeys:
    def test_an_unknown_key_is_not_found(self, store: PageStore) -> None:
        assert store.find(make_key(1)) is None
        assert make_key(1) not in store
        store.write(0, ENTRIES[:2], PAGES[:2])
        assert make_key(1) in store
        assert make_key(2) not in store

    def test_first_bytes_win(self, store: PageStore, path: Path) -> None:
        rows = store.write(0, ENTRIES[:3], PAGES[:3])
        before = all_files(path)
        assert store.write(0, ENTRIES[:3], PAGES[5:8]) == rows
        assert all_files(path) == before
        more = store.write(0, ENTRIES[1:5], PAGES[5:9])
        assert more[:2] == rows[1:3]
        assert same_bits(read(store, rows + more[2:]), PAGES[:3] + PAGES[7:9])

    def test_a_key_given_twice_is_written_once(self, store: PageStore) -> None:
        rows = store.write(0, [ENTRIES[0], ENTRIES[1], ENTRIES[0]], PAGES[:3])
        assert rows[0] == rows[2]
        assert store.num_pages == 2
        assert same_bits(read(store, rows[:2]), PAGES[:2])

    def test_threads_that_write_one_key_agree_on_its_bytes(self, store: PageStore) -> None:
        results: list[list[StoreRow]] = [[] for _ in range(4)]
        barrier = threading.Barrier(4)

        def write(number: int) -> None:
            pages = make_pages(SPEC, 8, seed=number)
            barrier.wait()
            for at in (0, 4):
                results[number] += store.write(0, ENTRIES[at : at + 4], pages[at : at + 4])

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = rows_of(store, ENTRIES[:8])
        assert results == [rows] * 4
        candidates = [make_pages(SPEC, 8, seed=n) for n in range(4)]
        for number, page in enumerate(read(store, rows)):
            assert bits(page) in [bits(pages[number]) for pages in candidates]
        assert store.num_pages == 8


class TestEntries:
    def test_an_entry_says_what_was_written(self, store: PageStore) -> None:
        rows = store.write(0, ENTRIES, PAGES)
        for row, entry in zip(rows, ENTRIES, strict=True):
            found = store.entry(row)
            assert (found.key, found.parent) == (entry.key, entry.parent)
            assert np.array_equal(found.tokens, entry.tokens)
            assert found.salt == b""

    def test_entries_come_in_the_order_of_their_rows(
        self, path: Path, short_segments: None
    ) -> None:
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, ENTRIES[5:], PAGES[5:]) + store.write(0, ENTRIES[:5], PAGES[:5])
        with PageStore.open(path, mode="r") as store:
            found = list(store.entries())
        assert [row for row, _ in found] == rows
        assert [e.key for _, e in found] == [e.key for e in ENTRIES[5:] + ENTRIES[:5]]

    def test_a_row_without_a_page_has_no_entry(self, store: PageStore) -> None:
        for row in (StoreRow(0, 0, 0), StoreRow(3, 0, 0), StoreRow(0, 9, 0), StoreRow(0, 0, -1)):
            with pytest.raises(PageNotFoundError):
                store.entry(row)

    @pytest.mark.parametrize("when", ["at creation", "for one writer"])
    def test_without_store_tokens_no_token_is_on_the_disk(self, path: Path, when: str) -> None:
        ids = np.array([0x5A5B5C5D] * 4, np.int32)
        if when == "for one writer":
            PageStore.open(path, SPEC).close()
        with PageStore.open(path, SPEC, store_tokens=False) as store:
            (row,) = store.write(0, make_entries(SPEC, 1, tokens=ids), PAGES[:1])
            assert store.entry(row).tokens is None
            assert store.entry(row).parent == make_key(-1)
        if when == "at creation":
            with PageStore.open(path, SPEC, store_tokens=True) as store:
                store.write(0, make_entries(SPEC, 1, start=1, tokens=ids), PAGES[:1])
        assert not [name for name, data in all_files(path).items() if ids[:1].tobytes() in data]

    def test_with_store_tokens_they_are(self, path: Path) -> None:
        ids = np.array([0x5A5B5C5D] * 4, np.int32)
        with PageStore.open(path, SPEC) as store:
            store.write(0, make_entries(SPEC, 1, tokens=ids), PAGES[:1])
        assert [name for name, data in all_files(path).items() if ids.tobytes() in data]

    def test_salts_are_on_the_disk_only_as_their_hash(self, path: Path) -> None:
        salt = b"the tenant's secret"
        with PageStore.open(path, SPEC) as store:
            store.write(0, make_entries(SPEC, 2, salt=salt), PAGES[:2])
        contents = all_files(path).values()
        assert not any(salt in data for data in contents)
        assert any(hashlib.sha256(salt).digest() in data for data in contents)


class TestBadArguments:
    @pytest.mark.parametrize(
        ("group", "entries", "pages", "message"),
        [
            (1, ENTRIES[:1], PAGES[:1], "group is 1: the store has 1 specs"),
            (-1, ENTRIES[:1], PAGES[:1], "group is -1"),
            (0, ENTRIES[:2], PAGES[:1], "3 entries for 2 pages"),
            (0, ENTRIES[:1], [PAGES[0][:2]], r"shape \(2, 2, 4, 2, 8\).* shape \(3, 2, 4, 2, 8\)"),
            (0, ENTRIES[:1], [PAGES[0].astype(np.float16)], "a page is float16"),
            (0, [replace(ENTRIES[0], key=b"short")], PAGES[:1], "a page key has 32 bytes"),
            (0, [replace(ENTRIES[0], num_tokens=5)], PAGES[:1], "num_tokens is 5"),
        ],
    )
    def test_a_write_that_does_not_fit_changes_nothing(
        self, store: PageStore, path: Path, group: int, entries: Any, pages: Any, message: str
    ) -> None:
        before = all_files(path)
        with pytest.raises(ValueError, match=message):
            store.write(group, ENTRIES[5:6] + entries, PAGES[5:6] + pages)
        assert all_files(path) == before
        assert store.num_pages == 0

    def test_nan_in_the_last_of_many_int8_pages_changes_nothing(
        self, path: Path, short_segments: None
    ) -> None:
        bad = PAGES[9].copy()
        bad[2, 1, 3, 1, 7] = np.nan
        with PageStore.open(path, SPEC, codec="int8") as store:
            nbytes = chunk_nbytes(path)
            with pytest.raises(ValueError, match=r"a page has nan at \(\d, 2, 1, 3, 1, 7\)"):
                store.write(0, ENTRIES, [*PAGES[:9], bad])
            assert (store.num_pages, chunk_nbytes(path)) == (0, nbytes)
            assert not [name for name in all_files(path) if ".tmp-" in name]
            store.check_invariants()
            assert store.write(0, ENTRIES[:9], PAGES[:9])

    @pytest.mark.parametrize("first", [0, 2])
    def test_the_page_with_a_nan_is_named_by_its_number_in_the_call(
        self, path: Path, short_segments: None, first: int
    ) -> None:
        bad = PAGES[9].copy()
        bad[2, 1, 3, 1, 7] = np.nan
        with PageStore.open(path, SPEC, codec="int8") as store:
            store.write(0, ENTRIES[:first], PAGES[:first])
            with pytest.raises(ValueError, match=r"nan at \(9, 2, 1, 3, 1, 7\)"):
                store.write(0, ENTRIES, [*PAGES[:9], bad])

    def test_an_out_array_that_does_not_fit_is_refused(self, store: PageStore) -> None:
        rows = store.write(0, ENTRIES[:2], PAGES[:2])
        good = np.full(SPEC.page_shape, 7, np.float32)
        for bad in (np.zeros(SPEC.layer_shape, np.float32), good.astype(np.float64)):
            with pytest.raises(ValueError, match="an out array is"):
                store.read(rows, [good, bad])
        locked = good.copy()
        locked.flags.writeable = False
        with pytest.raises(ValueError, match="an out array is read-only"):
            store.read(rows, [good, locked])
        with pytest.raises(ValueError, match="2 rows for 1 arrays"):
            store.read(rows, [good])
        assert (good == 7).all()

    @pytest.mark.parametrize("layer", [-1, 3])
    def test_a_layer_that_the_spec_lacks_is_refused(self, store: PageStore, layer: int) -> None:
        rows = store.write(0, ENTRIES[:1], PAGES[:1])
        with pytest.raises(ValueError, match=f"layer is {layer}: the spec holds 3 layers"):
            store.read_layer(rows, layer, [np.zeros(SPEC.layer_shape, np.float32)])

    def test_unknown_modes_codecs_and_sizes_are_refused(self, path: Path) -> None:
        with pytest.raises(ValueError, match="mode is 'w'"):
            PageStore.open(path, SPEC, mode="w")  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ValueError, match="there is no codec 'zip'"):
            PageStore.open(path, SPEC, codec="zip")
        with pytest.raises(ValueError, match="no byte size"):
            PageStore.open(path, SPEC, max_nbytes="much")
        with pytest.raises(ValueError, match="must be positive"):
            PageStore.open(path, SPEC, max_nbytes=0)
        assert not path.exists()


class TestOpening:
    def test_a_missing_store_is_not_made_for_reading(self, path: Path) -> None:
        with pytest.raises(StoreError, match=f"no store at {re.escape(str(path))}"):
            PageStore.open(path, SPEC, mode="r")
        assert not path.exists()

    def test_a_new_store_needs_a_spec(self, path: Path) -> None:
        with pytest.raises(ValueError, match="give the spec"):
            PageStore.open(path)
        assert not path.exists()

    def test_an_existing_store_tells_its_spec_and_codec(self, path: Path) -> None:
        codec = Int8(value_scales="channel")
        PageStore.open(path, SPEC, codec=codec).close()
        with PageStore.open(path, mode="r") as store:
            assert (store.specs, store.codec, store.max_nbytes) == ((SPEC,), codec, None)
            assert store.read_only
            assert store.path == path

    def test_folders_above_are_made(self, tmp_path: Path) -> None:
        PageStore.open(tmp_path / "a" / "b" / "cache.zarr", SPEC).close()
        assert (tmp_path / "a" / "b" / "cache.zarr" / "zarr.json").exists()

    def test_a_file_is_refused_and_kept(self, path: Path) -> None:
        path.write_text("precious")
        for mode in ("a", "r"):
            with pytest.raises(StoreError, match=f"{re.escape(str(path))} is a file"):
                PageStore.open(path, SPEC, mode=mode)
        assert path.read_text() == "precious"

    def test_a_folder_with_other_files_is_refused_and_kept(self, path: Path) -> None:
        path.mkdir()
        (path / "thesis.tex").write_text("precious")
        before = all_files(path)
        with pytest.raises(StoreError, match="is no store, but holds 'thesis.tex'"):
            PageStore.open(path, SPEC)
        assert all_files(path) == before

    def test_a_foreign_zarr_group_is_refused_and_kept(self, path: Path) -> None:
        import zarr

        group = zarr.create_group(path, attributes={"theirs": 1})
        group.create_array("kv", shape=(4,), dtype="float32")[:] = 1
        before = all_files(path)
        for mode in ("a", "r"):
            with pytest.raises(StoreError, match="something else"):
                PageStore.open(path, SPEC, mode=mode)
        assert all_files(path) == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "sha256:other"}, "model is 'sha256:test' there and 'sha256:other' here"),
            ({"page_tokens": 8}, "page_tokens is 4 there and 8 here"),
            ({"dtype": "float16"}, "dtype is 'float32' there and 'float16' here"),
        ],
    )
    @pytest.mark.parametrize("mode", ["a", "r"])
    def test_a_store_of_another_spec_is_refused_naming_both(
        self, path: Path, mode: Any, change: dict[str, Any], message: str
    ) -> None:
        PageStore.open(path, SPEC).close()
        before = all_files(path)
        with pytest.raises(SpecMismatchError, match=message):
            PageStore.open(path, make_spec(**change), mode=mode)
        assert all_files(path) == before

    def test_a_store_of_another_codec_is_refused_naming_both(self, path: Path) -> None:
        PageStore.open(path, SPEC, codec=Raw()).close()
        with pytest.raises(SpecMismatchError, match=r"codec Raw\(\), not Int8\("):
            PageStore.open(path, SPEC, codec="int8")

    def test_a_later_format_is_refused_naming_both(self, path: Path) -> None:
        PageStore.open(path, SPEC).close()
        document = json.loads((path / "zarr.json").read_text())
        header = document["attributes"]["pagedkv"]
        header["format_version"] = 7
        header["crc32c"] = checksum(header)
        (path / "zarr.json").write_text(json.dumps(document))
        before = all_files(path)
        with pytest.raises(FormatVersionError, match="format version 7; this release reads up to"):
            PageStore.open(path, SPEC)
        assert all_files(path) == before

    @pytest.mark.parametrize("keep", [None, 0, 10, 200])
    def test_a_torn_root_document_is_mended_by_the_next_writer(
        self, path: Path, keep: int | None
    ) -> None:
        with PageStore.open(path, SPEC, max_nbytes="1GiB") as store:
            store.write(0, ENTRIES, PAGES)
        document = (path / "zarr.json").read_bytes()
        (path / "zarr.json").unlink()
        if keep is not None:
            (path / "zarr.json").write_bytes(document[:keep])
        before = all_files(path)
        with PageStore.open(path, mode="r") as store:
            assert store.max_nbytes == 2**30
            assert same_bits(read(store, rows_of(store, ENTRIES)), PAGES)
        assert all_files(path) == before
        with PageStore.open(path) as store:
            assert same_bits(read(store, rows_of(store, ENTRIES)), PAGES)
        assert json.loads((path / "zarr.json").read_text()) == json.loads(document)

    @pytest.mark.parametrize("keep", [0, 10, 200])
    @pytest.mark.parametrize("mode", ["a", "r"])
    def test_a_torn_root_document_of_which_no_lane_has_a_copy_is_refused(
        self, path: Path, keep: int, mode: Any
    ) -> None:
        PageStore.open(path, SPEC).close()
        document = (path / "zarr.json").read_bytes()
        (path / "zarr.json").write_bytes(document[:keep])
        (path / "lane-0000" / "zarr.json").write_bytes(b"{}")
        before = all_files(path)
        with pytest.raises(StoreError, match=r"zarr\.json is damaged"):
            PageStore.open(path, SPEC, mode=mode)
        assert all_files(path) == before

    @pytest.mark.parametrize("left", [[], [".tmp-zarr.json-1a2b"]])
    def test_an_interrupted_creation_is_completed(self, path: Path, left: list[str]) -> None:
        path.mkdir(mode=0o755)
        for name in left:
            (path / name).touch()
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, ENTRIES, PAGES)
            assert same_bits(read(store, rows), PAGES)
        assert not list(path.glob(".tmp-*"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def test_an_interrupted_creation_of_a_lane_is_completed(self, path: Path) -> None:
        PageStore.open(path, SPEC).close()
        complete = sorted(all_files(path))
        metadata = [name for name in complete if name.endswith("zarr.json") and "/" in name]
        assert len(metadata) == 9
        for name in metadata:
            for damage in (b"", b"{}", None):
                (path / name).unlink()
                if damage is not None:
                    (path / name).write_bytes(damage)
                with PageStore.open(path, SPEC) as store:
                    store.write(0, ENTRIES, PAGES)
                assert json.loads((path / name).read_text())["zarr_format"] == 3
        shutil.rmtree(path / "lane-0000" / "group-0" / "tokens")
        with PageStore.open(path, SPEC) as store:
            assert same_bits(read(store, rows_of(store, ENTRIES)), PAGES)
        assert set(complete) < set(all_files(path))

    def test_a_store_behind_a_symbolic_link_opens(self, path: Path, tmp_path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            store.write(0, ENTRIES, PAGES)
        (tmp_path / "link").symlink_to(path)
        with PageStore.open(tmp_path / "link", mode="r") as store:
            assert store.num_pages == 10

    def test_folders_and_files_are_private(self, path: Path) -> None:
        before = os.umask(0)
        try:
            with PageStore.open(path, SPEC, max_nbytes="1GiB") as store:
                store.write(0, ENTRIES, PAGES)
            PageStore.open(path, max_nbytes="2GiB").close()
        finally:
            os.umask(before)
        for place in [path, *path.rglob("*")]:
            expected = 0o700 if place.is_dir() else 0o600
            assert stat.S_IMODE(place.stat().st_mode) == expected, place

    def test_windows_is_refused_with_the_reason(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(StoreError, match="Windows lacks"):
            PageStore.open(path, SPEC)
        monkeypatch.undo()
        assert not path.exists()

    def test_an_existing_store_opens_reads_and_writes_without_zarr_python(self, path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            store.write(0, ENTRIES[:5], PAGES[:5])
        run_python(
            """
import sys
from store_samples import *
from pagedkv.store import PageStore
with PageStore.open(sys.argv[1]) as store:
    pages = make_pages(store.specs[0], 10)
    rows = store.write(0, make_entries(store.specs[0], 10), pages)
    out = empty_like(pages)
    store.read(rows, out)
    assert same_bits(out, pages)
assert "zarr" not in sys.modules
""",
            path,
        )


class TestReadOnly:
    def test_a_read_only_store_refuses_writes_and_leaves_the_disk_alone(self, path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            rows = store.write(0, ENTRIES[:5], PAGES[:5])
        before = all_files(path)
        with PageStore.open(path, SPEC, mode="r", max_nbytes="1GiB") as store:
            assert store.read_only
            assert same_bits(read(store, rows), PAGES[:5])
            with pytest.raises(StoreError, match="was opened read-only"):
                store.write(0, ENTRIES[5:], PAGES[5:])
            with pytest.raises(StoreError, match="was opened read-only"):
                _ = store.scratch_dir
        assert all_files(path) == before

    @pytest.fixture
    def locked_folder(self) -> Iterator[Path]:
        """A folder in which this process may not write, even if root runs the tests."""
        folder = Path(tempfile.mkdtemp())
        PageStore.open(folder / "cache.zarr", SPEC).close()
        for place in [folder, *folder.rglob("*")]:
            place.chmod(0o555 if place.is_dir() else 0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if user == 0:
                os.seteuid(0)
            for place in [folder, *folder.rglob("*")]:
                place.chmod(0o755)
            shutil.rmtree(folder)

    def test_a_folder_without_write_permission_is_named(self, locked_folder: Path) -> None:
        for name in ("new.zarr", "cache.zarr"):
            message = rf"{re.escape(str(locked_folder / name))}.*Permission denied"
            with pytest.raises(StoreError, match=message) as caught:
                PageStore.open(locked_folder / name, SPEC)
            assert isinstance(caught.value.__cause__, OSError)
        assert os.listdir(locked_folder) == ["cache.zarr"]

    def test_it_still_opens_for_reading(self, locked_folder: Path) -> None:
        with PageStore.open(locked_folder / "cache.zarr", SPEC, mode="r") as store:
            assert store.num_pages == 0


class TestBound:
    def test_nbytes_are_the_bytes_on_disk(self, path: Path, short_segments: None) -> None:
        with PageStore.open(path, SPEC, max_nbytes="1MiB") as store:
            store.write(0, ENTRIES[:3], PAGES[:3])
            store.write(0, ENTRIES[3:], PAGES[3:])
            store._contents.groups[0, 0].write_columns()
            assert store.nbytes == files.tree_nbytes(path)
            assert store.nbytes > chunk_nbytes(path) > 10 * SPEC.page_nbytes
        for mode in ("r", "a"):
            with PageStore.open(path, mode=mode) as store:
                assert store.nbytes == files.tree_nbytes(path)

    def test_a_write_that_is_larger_than_the_bound_changes_nothing(self, path: Path) -> None:
        pages, entries = make_pages(SPEC, 300), make_entries(SPEC, 300, parent=None)
        with PageStore.open(path, SPEC, max_nbytes=400_000) as store:
            rows = store.write(0, entries[:1], pages[:1])
            before, nbytes = all_files(path), store.nbytes
            with pytest.raises(StoreFullError, match=r"\(400000\) in use: no room for"):
                store.write(0, entries[1:], pages[1:])
            assert all_files(path) == before
            assert store.nbytes == nbytes <= 400_000
            assert store.num_pages == 1
            assert store.write(0, entries[:1], pages[:1]) == rows
            store.check_invariants()

    def test_old_pages_leave_for_new_ones(self, path: Path) -> None:
        pages, entries = make_pages(SPEC, 400), make_entries(SPEC, 400, parent=None)
        with PageStore.open(path, SPEC, max_nbytes=400_000) as store:
            for at in range(0, 400, 10):
                part = slice(at, at + 10)
                rows = store.write(0, entries[part], pages[part])
                assert same_bits(read(store, rows), pages[part])
                assert chunk_nbytes(path) <= store.nbytes <= 400_000
                store.check_invariants()
            assert store.find(entries[0].key) is None
            held = [n for n in range(400) if store.find(entries[n].key) is not None]
            assert 20 < len(held) < 300
            found = rows_of(store, [entries[n] for n in held])
            assert same_bits(read(store, found), [pages[n] for n in held])
        with PageStore.open(path, mode="r") as store:
            assert same_bits(read(store, found), [pages[n] for n in held])
            assert store.num_pages == len(held)

    def test_pages_that_leave_for_others_of_the_same_write_have_rows_still(
        self, path: Path, short_segments: None
    ) -> None:
        pages, entries = make_pages(SPEC, 400), make_entries(SPEC, 400, parent=None)
        with PageStore.open(path, SPEC, max_nbytes=400_000) as store:
            for at in range(0, 400, 4):
                batch = [at // 2, *range(at, at + 4)]  # the first may be about to leave
                rows = store.write(0, [entries[n] for n in batch], [pages[n] for n in batch])
                assert same_bits(read(store, rows), [pages[n] for n in batch])

    def test_another_bound_replaces_the_store_s(self, path: Path) -> None:
        PageStore.open(path, SPEC, max_nbytes=20_000).close()
        with PageStore.open(path, SPEC) as store:
            assert store.max_nbytes == 20_000
            with pytest.raises(StoreFullError):
                store.write(0, ENTRIES, PAGES)
        with PageStore.open(path, SPEC, max_nbytes="1GiB") as store:
            store.write(0, ENTRIES, PAGES)
        with PageStore.open(path, mode="r") as store:
            assert store.max_nbytes == 2**30
            assert store.num_pages == 10

    def test_the_bound_of_an_open_store_is_not_changed_by_a_refused_writer(
        self, store: PageStore, path: Path
    ) -> None:
        with pytest.raises(StoreError, match="already open for writing"):
            PageStore.open(path, SPEC, max_nbytes=1)
        with PageStore.open(path, mode="r") as reader:
            assert reader.max_nbytes is None

    def test_scratch_counts_against_the_bound(self, path: Path) -> None:
        with PageStore.open(path, SPEC, max_nbytes=500_000) as store:
            nbytes = store.nbytes
            store.reserve_scratch(400_000)
            assert store.scratch_nbytes == 400_000
            assert store.nbytes == nbytes + 400_000
            with pytest.raises(StoreFullError):
                store.reserve_scratch(100_001)
            pages, entries = make_pages(SPEC, 100), make_entries(SPEC, 100, parent=None)
            with pytest.raises(StoreFullError):
                store.write(0, entries, pages)
            assert store.num_pages == 0

    def test_room_is_made_for_scratch(self, path: Path, short_segments: None) -> None:
        pages, entries = make_pages(SPEC, 100), make_entries(SPEC, 100, parent=None)
        with PageStore.open(path, SPEC, max_nbytes=500_000) as store:
            for at in range(0, 100, 4):
                rows = store.write(0, entries[at : at + 4], pages[at : at + 4])
            with pytest.raises(StoreFullError):
                store.reserve_scratch(320_000)
            store.make_room(320_000)
            store.reserve_scratch(320_000)
            assert store.nbytes <= 500_000
            assert store.num_pages < 80
            assert same_bits(read(store, rows), pages[-4:])
            store.check_invariants()

    def test_scratch_of_an_earlier_writer_is_removed(self, path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            assert store.scratch_dir == path / "lane-0000"
            left = store.scratch_dir / f"{files.TEMP_PREFIX}spill"
            left.write_bytes(b"left by a crash")
        with PageStore.open(path, SPEC) as store:
            assert not left.exists()
            assert stat.S_IMODE(store.scratch_dir.stat().st_mode) == 0o700


class TestFullDisk:
    def test_a_write_that_the_system_refuses_changes_nothing(
        self, store: PageStore, path: Path
    ) -> None:
        store.write(0, ENTRIES[:2], PAGES[:2])
        before, nbytes = all_files(path), store.nbytes
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (0, 1000, 90_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                message = rf"cannot write pages to {re.escape(str(path))}.*File too large"
                with pytest.raises(StoreError, match=message):
                    store.write(0, ENTRIES[2:], PAGES[2:])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert all_files(path) == before
            assert (store.nbytes, store.num_pages) == (nbytes, 2)
            store.check_invariants()
        rows = store.write(0, ENTRIES, PAGES)
        assert same_bits(read(store, rows), PAGES)

    def test_a_write_that_loses_its_folder_names_the_path(self, path: Path) -> None:
        store = PageStore.open(path, SPEC)
        shutil.rmtree(path / "lane-0000" / "group-0" / "kv")
        with pytest.raises(StoreError, match=re.escape(str(path / "lane-0000" / "group-0"))):
            store.write(0, ENTRIES, PAGES)
        assert store.num_pages == 0
        with pytest.raises(StoreError, match="cannot close the store"):
            store.close()
        PageStore.open(path, SPEC).close()


class TestClosing:
    CALLS: tuple[Callable[[PageStore], object], ...] = (
        lambda s: s.find(make_key(1)),
        lambda s: make_key(1) in s,
        lambda s: s.entry(StoreRow(0, 0, 0)),
        lambda s: list(s.entries()),
        lambda s: s.write(0, ENTRIES, PAGES),
        lambda s: s.read([], []),
        lambda s: s.read_layer([], 0, []),
        lambda s: s.reserve_scratch(1),
        lambda s: s.scratch_dir,
        lambda s: s.check_invariants(),
        lambda s: s.find_rows([make_key(1)]),
        lambda s: s.refresh(),
        lambda s: s.make_room(1),
        lambda s: s.collect(1),
        lambda s: s.touch([StoreRow(0, 0, 0)]),
    )

    @pytest.mark.parametrize("mode", ["a", "r"])
    def test_every_call_after_close_raises(self, path: Path, mode: Any) -> None:
        PageStore.open(path, SPEC).close()
        with PageStore.open(path, SPEC, mode=mode) as store:
            pass
        for call in self.CALLS:
            with pytest.raises(ClosedError, match=re.escape(str(path))):
                call(store)
        store.close()
        assert "closed" in repr(store)

    def test_close_waits_for_a_write_in_progress(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, rows = PageStore.open(path, SPEC), []
        syncing, go_on, sync = threading.Event(), threading.Event(), os.fsync

        def slow_sync(fd: int) -> None:
            syncing.set()
            go_on.wait()
            sync(fd)

        monkeypatch.setattr(os, "fsync", slow_sync)
        writer = threading.Thread(target=lambda: rows.extend(store.write(0, ENTRIES, PAGES)))
        writer.start()
        syncing.wait()
        closer = threading.Thread(target=store.close)
        closer.start()
        closer.join(timeout=0.3)
        assert closer.is_alive()
        with pytest.raises(ClosedError):
            store.find(make_key(1))
        go_on.set()
        closer.join()
        writer.join()
        with PageStore.open(path, mode="r") as reader:
            assert same_bits(read(reader, rows), PAGES)

    def test_a_store_that_is_dropped_leaves_no_file_and_no_thread(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        serve_nothing_now(monkeypatch)
        descriptors = len(os.listdir("/proc/self/fd"))
        threads = threading.active_count()
        store = PageStore.open(path, SPEC)
        read(store, store.write(0, ENTRIES, PAGES))
        del store
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            gc.collect()
            time.sleep(0.02)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert threading.active_count() == threads

    def test_a_closed_store_leaves_no_file_and_no_thread(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        serve_nothing_now(monkeypatch)
        descriptors = len(os.listdir("/proc/self/fd"))
        threads = set(threading.enumerate())
        with PageStore.open(path, SPEC) as store:
            read(store, store.write(0, ENTRIES, PAGES))
            mine = set(threading.enumerate()) - threads
            assert mine
        for thread in mine:
            thread.join(30)
            assert not thread.is_alive()
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_a_store_tells_what_it_is(self, store: PageStore, path: Path) -> None:
        store.write(0, ENTRIES, PAGES)
        assert repr(store) == f"<PageStore {path}: 10 pages, raw, open>"


def test_a_skipped_chunk_is_logged(
    path: Path, short_segments: None, caplog: pytest.LogCaptureFixture
) -> None:
    with PageStore.open(path, SPEC) as store:
        store.write(0, ENTRIES, PAGES)
    chunk = path / "lane-0000/group-0/catalog/c.1.0"
    os.truncate(chunk, 10)
    with caplog.at_level(logging.WARNING, "pagedkv"), PageStore.open(path, mode="r") as store:
        assert store.num_torn_chunks == 1
    assert f"skipped {chunk}: it has 10 bytes instead of" in caplog.text
