"""What attention reads ahead is never outdated, and nothing is lost by it."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from kv_samples import Array, make_kv, make_spec
from test_page_attention import error, reference

import pagedkv as pk
from pagedkv import layer_scan
from pagedkv.format import unpack_row
from pagedkv.spill import SpillFile

SPEC = make_spec(num_kv_heads=2, head_dim=16, page_tokens=16, num_layers=3)
Q = np.random.default_rng(0).standard_normal((1, 4, 16), np.float32)
NUM_TOKENS = 1300  # three chunks of 32 pages, the last one not full


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave is a chunk of pages."""
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 1)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[pk.PagedKVCache]:
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC)
    with pk.PagedKVCache(SPEC, 8, store) as cache:
        yield cache
        cache.check_invariants()


def filled(cache: pk.PagedKVCache, k: Array, v: Array) -> pk.Sequence:
    """A sequence of these tokens; each layer has been attended, so that the next one is known."""
    sequence = cache.open_sequence()
    sequence.append(k, v)
    for layer in (0, 1, 2, 0):
        check(sequence, layer, k, v)
    return sequence


def check(sequence: pk.Sequence, layer: int, k: Array, v: Array) -> None:
    assert error(sequence.attend(layer, Q), reference(Q, k[layer], v[layer])) <= 1e-5


def num_loaded(cache: pk.PagedKVCache, sequence: pk.Sequence) -> int:
    for one in sequence._staging[0]._ahead:
        one.future.result()
    return cache.stats().num_slices_loaded


def ahead(sequence: pk.Sequence) -> int:
    """Waves that are being read ahead, or have been."""
    return len(sequence._staging[0]._ahead)


def test_each_slice_is_read_once_a_step(cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    sequence = filled(cache, k, v)
    assert ahead(sequence) == 2
    before = num_loaded(cache, sequence)
    for layer in (1, 2, 0) * 4:
        check(sequence, layer, k, v)
    num_absent = sum(page.slot is None for page in sequence.table(0))
    assert num_loaded(cache, sequence) - before == 12 * num_absent
    sequence.close()


def test_a_window_that_moves_on_is_read_ahead_all_the_same(cache: pk.PagedKVCache) -> None:
    window, count = 600, NUM_TOKENS + 60
    k, v = make_kv(SPEC, count)
    with filled(cache, k[:, :NUM_TOKENS], v[:, :NUM_TOKENS]) as sequence:
        for stop in range(NUM_TOKENS + 1, count + 1):  # over the ends of pages
            for layer in range(3):
                sequence.append_layer(layer, k[layer, stop - 1 : stop], v[layer, stop - 1 : stop])
                expected = reference(Q, k[layer, :stop], v[layer, :stop], window=window)
                assert error(sequence.attend(layer, Q, window=window), expected) <= 1e-5
                assert ahead(sequence) or stop == NUM_TOKENS + 1


def test_layers_in_any_order_are_attended_right(cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as sequence:
        for layer in np.random.default_rng(0).integers(0, 3, 20).tolist():
            check(sequence, layer, k, v)


def test_tokens_that_are_appended_later_are_seen(cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS + 40)
    with filled(cache, k[:, :NUM_TOKENS], v[:, :NUM_TOKENS]) as sequence:
        for stop in range(NUM_TOKENS + 1, NUM_TOKENS + 41):
            for layer in range(3):
                sequence.append_layer(layer, k[layer, stop - 1 : stop], v[layer, stop - 1 : stop])
                check(sequence, layer, k[:, :stop], v[:, :stop])


def test_a_layer_that_lags_behind_is_not_read_before_it_is_written(
    cache: pk.PagedKVCache,
) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as sequence:
        sequence.truncate(40)
        k[:, 40:], v[:, 40:] = (array[:, 40:] for array in make_kv(SPEC, NUM_TOKENS, seed=1))
        for layer in (0, 1, 2, 0):
            if layer or sequence._filled[0] == 40:
                sequence.append_layer(layer, k[layer, 40:], v[layer, 40:])
            check(sequence, layer, k, v)


def test_what_was_cut_off_and_written_anew_is_seen(cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as sequence:
        sequence.truncate(500)
        k[:, 500:], v[:, 500:] = (array[:, 500:] for array in make_kv(SPEC, NUM_TOKENS, seed=1))
        sequence.append(k[:, 500:], v[:, 500:])
        for layer in (1, 2, 0):
            check(sequence, layer, k, v)


def test_a_fork_and_its_parent_go_separate_ways(cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as parent, parent.fork() as child:
        others = make_kv(SPEC, NUM_TOKENS + 5, seed=1)
        both = {}
        for sequence, part in ((parent, slice(0, 5)), (child, slice(5, 10))):
            new = [array[:, part] for array in others]
            both[sequence] = [
                np.concatenate([old, more], axis=1) for old, more in zip((k, v), new, strict=True)
            ]
            sequence.append(*new)
        for layer in (1, 2, 0, 1):
            for sequence, kinds in both.items():
                check(sequence, layer, *kinds)


def test_a_record_that_is_freed_while_it_is_read_is_not_given_to_another_page(
    cache: pk.PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    sequence, others = filled(cache, k, v), cache.open_sequence()
    reading, may_read = threading.Event(), threading.Event()
    read = SpillFile._read

    def slow(spill: SpillFile, *arguments: Any) -> npt.NDArray[np.bool_]:
        if threading.current_thread().name.startswith("pagedkv-reader"):
            reading.set()
            assert may_read.wait(60)
        return read(spill, *arguments)

    def commit() -> None:
        assert reading.wait(60)
        sequence.commit(np.arange(1296))  # pages are stored, and their records freed
        others.append(*make_kv(SPEC, 600, seed=2))  # which takes free records
        may_read.set()

    monkeypatch.setattr(SpillFile, "_read", slow)
    thread = threading.Thread(target=commit)
    thread.start()
    check(sequence, 1, k, v)
    thread.join()
    check(sequence, 2, k, v)
    spill = cache._groups[0].places.spill
    assert spill is not None
    sequence.close()
    others.close()
    assert spill.num_used == 0


def test_an_error_ahead_is_told_when_its_layer_is_attended(
    cache: pk.PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as sequence:
        sequence._staging[0].forget_ahead()
        read = SpillFile.read_layers

        def fail(spill: SpillFile, records: Any, layer: int, *arguments: Any) -> None:
            if layer == 2:
                raise pk.StoreError("the disk is gone")
            read(spill, records, layer, *arguments)

        monkeypatch.setattr(SpillFile, "read_layers", fail)
        check(sequence, 1, k, v)
        with pytest.raises(pk.StoreError, match="the disk is gone"):
            sequence.attend(2, Q)
        monkeypatch.setattr(SpillFile, "read_layers", read)
        check(sequence, 2, k, v)
        assert cache.stats().num_pinned_slots == 0


def test_a_cache_is_closed_while_it_reads_ahead(tmp_path: Path) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    for number in range(20):
        store = pk.PageStore.open(tmp_path / f"{number}.zarr", SPEC)
        with pk.PagedKVCache(SPEC, 8, store) as cache:
            sequence = filled(cache, k, v)
            assert ahead(sequence)
        with pytest.raises(pk.ClosedError):
            sequence.attend(0, Q)
        sequence.close()


def test_pages_come_into_the_pool_while_their_layer_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1600
    k, v = make_kv(SPEC, count)
    tokens = np.arange(count)
    stage = layer_scan._Wave.stage

    def slow(wave: Any, buffer: Any) -> None:
        time.sleep(0.02)
        stage(wave, buffer)

    monkeypatch.setattr(layer_scan._Wave, "stage", slow)
    with pk.PagedKVCache(SPEC, 104, pk.PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(k, v, tokens)
        other = cache.open_sequence()
        other.append(*make_kv(SPEC, 800, seed=1))
        with cache.open_sequence(tokens) as sequence:
            assert sequence.num_tokens == count
            for layer in (0, 1, 2, 0):
                check(sequence, layer, k, v)
            assert ahead(sequence)
            other.close()
            with cache.open_sequence(tokens):  # it brings the pages into the pool
                assert all(page.slot is not None for page in sequence.table(0))
                check(sequence, 1, k, v)
            assert not ahead(sequence)
        cache.check_invariants()


def test_a_wait_that_is_interrupted_leaves_no_late_reader_in_a_buffer(
    cache: pk.PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    with filled(cache, k, v) as sequence:
        sequence._staging[0].forget_ahead()
        go_on, stage = threading.Event(), layer_scan._Wave.stage
        result = Future.result

        def slow(wave: Any, buffer: Any) -> None:
            assert go_on.wait(60)
            stage(wave, buffer)

        def interrupted(future: Any, timeout: Any = None) -> Any:
            del timeout
            assert not future.done()
            raise KeyboardInterrupt

        monkeypatch.setattr(layer_scan._Wave, "stage", slow)
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.attend(1, Q)
        monkeypatch.setattr(Future, "result", result)
        monkeypatch.setattr(layer_scan._Wave, "stage", stage)
        threading.Timer(0.1, go_on.set).start()
        for layer in (2, 1, 0):
            check(sequence, layer, k, v)


def test_a_copy_that_finds_no_slot_is_seen(tmp_path: Path) -> None:
    k, v = make_kv(SPEC, 41)
    with (
        pk.PagedKVCache(SPEC, 3, pk.PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache,
        cache.open_sequence() as parent,
    ):
        parent.append(k[:, :40], v[:, :40])
        with parent.fork() as child, parent.gather(0):  # which pins all slots
            check(child, 0, k[:, :40], v[:, :40])
            for layer in range(3):
                child.append_layer(layer, k[layer, 40:], v[layer, 40:])
                check(child, layer, k, v)
        check(parent, 0, k[:, :40], v[:, :40])


def test_moved_pages_are_found_by_several_sequences_at_once(tmp_path: Path) -> None:
    k, v = make_kv(SPEC, NUM_TOKENS)
    tokens = np.arange(NUM_TOKENS)
    path = tmp_path / "cache.zarr"
    with pk.PagedKVCache(SPEC, 90, pk.PageStore.open(path, SPEC)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(k, v, tokens)
        cache.flush()
    with (
        pk.PagedKVCache(SPEC, 2, pk.PageStore.open(path, SPEC)) as cache,
        cache.open_sequence(tokens) as first,
        cache.open_sequence(tokens) as second,
    ):
        moves, store = cache._groups[0].moves, cache.store
        assert store is not None
        pages = [page for page in first.table(0) if page.slot is None]
        true_rows = [page.row for page in pages]
        for page in pages:  # as if the store had moved them
            assert page.row is not None
            moves.places.set_row(page, page.row._replace(row=page.row.row + 10**6), exact=True)
        stale = moves.packed_rows(pages)
        tried = [unpack_row(row) for row in stale.tolist()]
        with moves.places.lock:
            assert moves._find_anew(pages, tried) == set()  # the first one finds them
            assert moves._find_anew(pages, tried) == set()  # the second one comes too late
        assert [page.row for page in pages] == true_rows
        for sequence in (first, second):
            count = sequence.num_tokens
            check(sequence, 0, k[:, :count], v[:, :count])


class FakeWave:
    """A wave of one span, which notes its buffer."""

    def __init__(self, span: int) -> None:
        self.span = span
        self.buffer: Any = None

    def stage(self, buffer: Any) -> None:
        self.buffer = buffer

    def is_of(self, _: int, span: Any) -> bool:
        return self.span == span.first


class FakeSpan(NamedTuple):
    first: int


def test_no_buffer_is_given_to_two_waves_of_which_one_is_attended() -> None:
    staging = layer_scan.Staging()
    a, b, c, d, e = (FakeWave(number) for number in range(5))
    reading: deque[Any] = deque()
    staging.start_some(deque([a, b]), reading)  # type: ignore[list-item]
    staging.keep_ahead(reading)
    reading = staging.take_ahead(0, [FakeSpan(0), FakeSpan(7)])  # type: ignore[list-item]
    assert [one.wave for one in reading] == [a]  # b is forgotten
    todo: deque[Any] = deque([c, d, e])
    staging.start_some(todo, reading)
    attended = layer_scan._next_of(reading)
    staging.start_some(todo, reading)
    in_use = [attended, *reading]
    assert [one.wave for one in in_use] == [a, c, d]
    for one in in_use:
        one.future.result()
        assert one.wave.buffer is one.buffer
    assert len({one.buffer.ctypes.data for one in in_use}) == 3
    staging.give_back(attended.buffer)
    layer_scan._next_of(reading)
    staging.start_some(todo, reading)
    assert reading[-1].buffer is attended.buffer
