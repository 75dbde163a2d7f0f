"""Four faults of the prototype that this library grew from; none of them may come back."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import Array, bits, make_key, make_kv, make_page, make_pages, make_spec

import pagedkv as pk
from pagedkv.format import Geometry
from pagedkv.pool import SlotPool
from pagedkv.spill import SpillFile

pytestmark = pytest.mark.usefixtures("no_fsync")

ODD = {
    "15 floats": {"num_layers": 1, "num_kinds": 1, "page_tokens": 5, "head_dim": 3},
    "21 halves": {
        "num_layers": 7, "num_kinds": 1, "page_tokens": 1, "head_dim": 3, "dtype": "float16",
    },
    "90 bfloat16": {
        "num_layers": 3, "page_tokens": 5, "num_kv_heads": 1, "head_dim": 3, "dtype": "bfloat16",
    },
    "part of a model": {
        "num_layers": 9, "layer_range": (4, 7), "num_kv_heads": 5, "head_range": (1, 4),
        "head_dim": 7, "page_tokens": 3,
    },
}  # fmt: skip
"""Geometries in which no two quantities that might be mistaken for each other are equal."""


@pytest.fixture(params=ODD)
def spec(request: pytest.FixtureRequest) -> pk.KVSpec:
    return make_spec(**ODD[request.param])


# -- an allocation sized by the wrong quantity -----------------------------------------------


def test_the_pool_is_as_large_as_all_its_pages(spec: pk.KVSpec) -> None:
    for num_slots in (1, 2, 11):
        pool = SlotPool(spec, num_slots)
        one = np.empty(spec.page_shape, spec.np_dtype)
        assert pool.nbytes == num_slots * one.nbytes == num_slots * spec.page_nbytes
        for slot in range(num_slots):  # to the very last number
            pool.page(slot)[...] = make_page(spec, slot)
        for slot in range(num_slots):
            assert bits(pool.page(slot)) == bits(make_page(spec, slot))


def test_a_mapped_pool_takes_its_whole_size_from_the_disk(
    spec: pk.KVSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.posix_fallocate

    def posix_fallocate(fd: int, offset: int, nbytes: int) -> None:
        real(fd, offset, nbytes)
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    SlotPool(spec, 11, tmp_path / "pool").page(10)[...] = make_page(spec, 1)
    assert sizes == [11 * spec.page_nbytes]


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_files_hold_as_many_bytes_as_their_pages_need(
    spec: pk.KVSpec, tmp_path: Path, codec: str
) -> None:
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec, codec=codec)
    payload = store.codec.layer_nbytes(spec)
    rows = Geometry.of(spec, store.codec).rows
    index_nbytes = rows * spec.held_layers * 16 + 4  # offset and length of each chunk, a checksum
    if codec == "raw":
        assert payload == spec.layer_nbytes
    with pk.PagedKVCache(spec, 3, store) as cache:
        cache.put([make_key(n) for n in range(7)], make_pages(spec, range(7)))
        cache.flush()
        segments = list((tmp_path / "cache.zarr").glob("lane-*/group-*/kv/c.*"))
        nbytes = sum(path.stat().st_size for path in segments)
        pages_nbytes = 7 * spec.held_layers * (payload + 4)
        assert nbytes == pages_nbytes + len(segments) * index_nbytes


def test_a_staging_buffer_is_as_large_as_what_is_gathered(spec: pk.KVSpec, tmp_path: Path) -> None:
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 1, store) as cache, cache.open_sequence() as sequence:
        parts: list[Array] = []
        for count in (1, spec.page_tokens, 1, 7 * spec.page_tokens + 1, 1):
            kv = make_kv(spec, count, seed=len(parts))
            parts.append(kv[0])
            sequence.append(*kv[: spec.num_kinds])
            for layer in range(spec.held_layers):
                with sequence.gather(layer) as kinds:
                    expected = np.concatenate(parts, axis=1)[layer]
                    assert bits(kinds[0]) == bits(expected)


# -- padding forgotten, so that neighbours overlap after reuse -------------------------------


def test_reused_slots_do_not_reach_into_their_neighbours(spec: pk.KVSpec) -> None:
    pool = SlotPool(spec, 9)
    holds = dict(zip(pool.allocate(9), range(9), strict=True))
    number = 9
    for stride in (2, 3, 4, 1):
        for slot in range(0, 9, stride):
            pool.free(slot)
            del holds[slot]
        for slot in pool.allocate(9 - len(holds)):
            holds[slot] = number
            number += 1
        for slot, page in holds.items():
            pool.page(slot)[...] = make_page(spec, page)
        for slot, page in holds.items():
            assert bits(pool.page(slot)) == bits(make_page(spec, page))


def test_reused_spill_records_do_not_reach_into_their_neighbours(
    spec: pk.KVSpec, tmp_path: Path
) -> None:
    spill = SpillFile(spec, tmp_path, lambda _: None)
    holds = dict.fromkeys(spill.allocate(9), 0)
    out = np.empty(spec.page_shape, spec.np_dtype)
    number = 0
    for stride in (1, 2, 3):
        for record in range(0, 9, stride):
            spill.free(record)
        for record in spill.allocate(-(-9 // stride)):
            number += 1
            holds[record] = number
            spill.write_page(record, make_page(spec, number))
        for record, page in holds.items():
            spill.read_page(record, out)
            assert bits(out) == bits(make_page(spec, page))
    assert spill.nbytes == 9 * spec.page_nbytes
    spill.close()


@pytest.mark.parametrize("policy", [pk.LRU, pk.FIFO])
def test_pages_of_odd_size_survive_many_evictions(
    spec: pk.KVSpec, tmp_path: Path, policy: Any
) -> None:
    keys, pages = [make_key(n) for n in range(40)], make_pages(spec, range(40))
    rng = np.random.default_rng(3)
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 7, store, policy()) as cache:
        for _ in range(60):
            some = rng.integers(0, 40, rng.integers(1, 12)).tolist()
            cache.put([keys[n] for n in some], pages[some])
            assert bits(cache.get([keys[n] for n in some])) == bits(pages[some])
        cache.put(keys, pages)
        assert bits(cache.get(keys)) == bits(pages)
        assert cache.stats().num_pages_evicted > 30
    with pk.PagedKVCache(spec, 7, pk.PageStore.open(tmp_path / "cache.zarr")) as cache:
        assert bits(cache.get(keys)) == bits(pages)


# -- recency state left behind after an eviction ---------------------------------------------


def check_ranking(cache: pk.PagedKVCache) -> None:
    """The policy ranks the resident pages that nobody holds or has acquired, and no others."""
    cache.check_invariants()
    for group in cache._groups:
        places = group.places
        resident = {
            key
            for key, page in places.index.items()
            if page.slot is not None
            and page.ref_count == 0
            and (page.ranked or not places.pool.is_pinned(page.slot))
        }
        assert set(places._policy.victims()) == resident


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("policy", [pk.LRU, pk.FIFO])
def test_an_evicted_page_leaves_no_trace_and_can_be_put_again(
    tmp_path: Path, policy: Any, has_store: bool
) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec) if has_store else None
    keys, pages = [make_key(n) for n in range(6)], make_pages(spec, range(6))
    rng = np.random.default_rng(5)
    with pk.PagedKVCache(spec, 2, store, policy()) as cache:
        for number in [*range(6), *range(6), *rng.integers(0, 6, 80).tolist()]:
            cache.put(keys[number : number + 1], pages[number : number + 1])
            check_ranking(cache)
            assert bits(cache.get(keys[number : number + 1])) == bits(pages[number])
            with cache.acquire(keys[number : number + 1]) as views:
                assert len(views) == 1
                check_ranking(cache)
            check_ranking(cache)
        assert cache.stats().num_pages_evicted > 30


@pytest.mark.parametrize("policy", [pk.LRU, pk.FIFO])
def test_pages_that_sequences_take_and_give_back_are_ranked_once(
    tmp_path: Path, policy: Any
) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 3, store, policy()) as cache:
        for turn in range(12):
            ids = [turn % 3, *range(11)]
            with cache.open_sequence(ids) as sequence:
                missing = 12 - sequence.num_tokens
                sequence.append(
                    *make_kv(spec, missing, seed=turn % 3), ids[-missing:] if missing else []
                )
                check_ranking(cache)
                with cache.open_sequence(ids) as other:
                    assert other.num_tokens == 12
                    check_ranking(cache)
                cache.put([make_key(turn)], make_pages(spec, [turn]))
                check_ranking(cache)
            check_ranking(cache)
        assert cache.stats().num_pages_evicted > 20


# -- a benchmark whose parameters never trigger eviction -------------------------------------


def test_the_statistics_tell_whether_a_workload_evicted_at_all(tmp_path: Path) -> None:
    spec = make_spec()
    keys, pages = [make_key(n) for n in range(20)], make_pages(spec, range(20))
    for num_slots, num_evicted in [(20, 0), (40, 0), (19, 1), (10, 10), (1, 19)]:
        store = pk.PageStore.open(tmp_path / f"{num_slots}.zarr", spec)
        with pk.PagedKVCache(spec, num_slots, store) as cache:
            cache.put(keys, pages)
            stats = cache.stats()
            assert stats.num_pages_evicted == num_evicted
            assert stats.num_pages_stored >= num_evicted
            assert (stats.num_pages_dropped, stats.num_pages_spilled) == (0, 0)


def test_the_statistics_tell_whether_a_sequence_left_the_pool(tmp_path: Path) -> None:
    spec = make_spec()
    for num_slots, leaves in [(8, False), (9, False), (7, True), (1, True)]:
        store = pk.PageStore.open(tmp_path / f"{num_slots}.zarr", spec)
        with pk.PagedKVCache(spec, num_slots, store) as cache:
            sequence = cache.open_sequence()
            for at in range(32):
                sequence.append(*make_kv(spec, 1, seed=at))
                with sequence.gather(0):
                    pass
            stats = cache.stats()
            assert (stats.num_pages_spilled > 0) == leaves
            assert (stats.num_slices_loaded > 0) == leaves
            assert (stats.num_pages_evicted > 0) == leaves
