"""What attention reads ahead is never outdated, and nothing is lost by it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kv_samples import Array, make_kv, make_spec
from test_page_attention import error, reference

import pagedkv as pk
from pagedkv import layer_scan
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
