"""The cache: pages by key, from pool or disk, never wrong; and what it refuses."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import (
    Array,
    bits,
    make_key,
    make_kv,
    make_page,
    make_pages,
    make_spec,
    not_writable,
    state_of,
    through_int8,
    unchanged,
    wait_for_writers,
)

import pagedkv as pk
from pagedkv import files
from pagedkv.page import PageState

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()
KEYS = [make_key(number) for number in range(64)]
PAGES = make_pages(SPEC, range(64))


def open_cache(path: Path, num_slots: int = 2, mode: Any = "a", **options: Any) -> pk.PagedKVCache:
    """A cache over the store at ``path``; options of the store are told apart by name."""
    of_store = {name: options.pop(name) for name in ("codec", "max_nbytes") if name in options}
    store = pk.PageStore.open(path, SPEC, mode=mode, **of_store)
    return pk.PagedKVCache(SPEC, num_slots, store, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


@pytest.fixture
def cache(path: Path) -> Iterator[pk.PagedKVCache]:
    """Two slots and a store."""
    with open_cache(path) as cache:
        yield cache


@pytest.fixture
def memory_cache() -> Iterator[pk.PagedKVCache]:
    """Eight slots and no store."""
    with pk.PagedKVCache(SPEC, 8) as cache:
        yield cache


# -- put, get, match -------------------------------------------------------------------------


def test_more_pages_than_slots_all_come_back(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS, PAGES)
    assert cache.match(KEYS) == 64
    assert bits(cache.get(KEYS)) == bits(PAGES)
    assert bits(cache.get(KEYS[::-1])) == bits(PAGES[::-1])
    stats = cache.stats()
    assert stats.num_pages_evicted >= 62
    assert stats.num_pages_dropped == 0
    assert stats.num_pages_stored >= 62


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_kinds", [1, 2])
def test_all_bits_come_back(path: Path, dtype: str, num_kinds: int) -> None:
    spec = make_spec(dtype=dtype, num_kinds=num_kinds)
    raw = np.random.default_rng(0).bytes(9 * spec.page_nbytes)  # NaN and infinity among them
    pages = np.frombuffer(raw, spec.np_dtype).reshape(9, *spec.page_shape)
    with pk.PagedKVCache(spec, 2, pk.PageStore.open(path, spec)) as cache:
        cache.put(KEYS[:9], pages)
        assert bits(cache.get(KEYS[:9])) == raw
    with pk.PagedKVCache(spec, 3, pk.PageStore.open(path, spec)) as cache:
        assert bits(cache.get(KEYS[:9])) == raw


def test_without_a_store_the_last_plain_keys_stay(memory_cache: pk.PagedKVCache) -> None:
    memory_cache.put(KEYS[:20], PAGES[:20])
    assert bits(memory_cache.get(KEYS[12:20])) == bits(PAGES[12:20])
    assert memory_cache.match(KEYS) == 0
    assert memory_cache.stats().num_pages_dropped == 12


@pytest.mark.parametrize("num_pages", [3, 8, 20])
def test_of_a_prefix_the_root_stays_longest(memory_cache: pk.PagedKVCache, num_pages: int) -> None:
    keys = pk.page_keys(SPEC, range(4 * num_pages))
    memory_cache.put(keys, PAGES[:num_pages])
    kept = min(num_pages, 8)
    assert memory_cache.match(keys) == kept
    assert bits(memory_cache.get(keys[:kept])) == bits(PAGES[:kept])
    for number in range(8 - kept):  # fill up
        memory_cache.put(KEYS[40 + number : 41 + number], PAGES[40 + number : 41 + number])
    for number in range(kept):
        memory_cache.put(KEYS[50 + number : 51 + number], PAGES[50 + number : 51 + number])
        assert memory_cache.match(keys) == kept - 1 - number


@pytest.mark.parametrize("how", ["get", "acquire", "sequence"])
def test_use_of_a_prefix_keeps_its_root_longest(memory_cache: pk.PagedKVCache, how: str) -> None:
    keys = pk.page_keys(SPEC, range(16))
    memory_cache.put(keys, PAGES[:4])
    memory_cache.put(KEYS[40:44], PAGES[40:44])
    if how == "get":
        memory_cache.get(keys)
    elif how == "acquire":
        with memory_cache.acquire(keys):
            pass
    else:
        memory_cache.open_sequence(range(16)).close()
    memory_cache.put(KEYS[50:54], PAGES[50:54])
    assert memory_cache.match(keys) == 4, "what was used must stay"
    for number in range(4):
        memory_cache.put(KEYS[60 + number : 61 + number], PAGES[60 + number : 61 + number])
        assert memory_cache.match(keys) == 3 - number


def test_what_is_acquired_was_used_last_when_it_is_given_back() -> None:
    with pk.PagedKVCache(SPEC, 2) as cache:
        cache.put(KEYS[:2], PAGES[:2])
        with cache.acquire(KEYS[:1]):
            cache.get(KEYS[1:2])
        cache.put(KEYS[2:3], PAGES[2:3])
        assert [cache.match([key]) for key in KEYS[:3]] == [1, 0, 1]


def test_lru_and_fifo_choose_different_victims() -> None:
    kept = {}
    for policy in (pk.LRU(), pk.FIFO()):
        with pk.PagedKVCache(SPEC, 2, policy=policy) as cache:
            cache.put(KEYS[:1], PAGES[:1])
            cache.put(KEYS[1:2], PAGES[1:2])
            cache.get(KEYS[:1])
            cache.put(KEYS[2:3], PAGES[2:3])
            kept[type(policy).__name__] = [cache.match([key]) for key in KEYS[:3]]
    assert kept == {"LRU": [1, 0, 1], "FIFO": [0, 1, 1]}


@pytest.mark.parametrize("between", ["nothing", "flush", "eviction"])
def test_the_first_bytes_under_a_key_win(cache: pk.PagedKVCache, between: str) -> None:
    cache.put(KEYS[:1], PAGES[:1])
    if between == "flush":
        cache.flush()
    elif between == "eviction":
        cache.put(KEYS[10:20], PAGES[10:20])
    cache.put(KEYS[:1], PAGES[30:31])
    assert bits(cache.get(KEYS[:1])) == bits(PAGES[:1])


def test_the_first_bytes_win_over_a_sequence_and_after_a_restart(path: Path) -> None:
    first, other = make_kv(SPEC, 4), make_kv(SPEC, 4, seed=1)
    keys = pk.page_keys(SPEC, range(4))
    page = bits(np.stack(first, axis=1))
    with open_cache(path) as cache:
        cache.open_sequence().append(*first, range(4))
    with open_cache(path) as cache:
        sequence = cache.open_sequence()
        sequence.append(*other, range(4))
        assert bits(cache.get(keys)) == page
        with sequence.gather(0) as (k, _):
            assert bits(k) == bits(other[0][0])
        sequence.close()
        assert bits(cache.get(keys)) == page


def test_keys_may_repeat_within_a_call(cache: pk.PagedKVCache) -> None:
    numbers = [0, 1, 0, 2, 2, 0]
    cache.put([KEYS[n] for n in numbers], np.concatenate([PAGES[[0, 1]], PAGES[30:34]]))
    expected = PAGES[[0, 1, 0, 31, 31, 0]]
    assert bits(cache.get([KEYS[n] for n in numbers])) == bits(expected)
    with cache.acquire([KEYS[n] for n in numbers[:3]]) as views:
        assert [bits(view) for view in views] == [bits(page) for page in expected[:3]]
    cache.check_invariants()


def test_empty_calls_do_nothing(cache: pk.PagedKVCache) -> None:
    cache.put([], PAGES[:0])
    assert cache.match([]) == 0
    assert cache.get([]).shape == (0, *SPEC.page_shape)
    with cache.acquire([]) as views:
        assert views == []


def test_get_fills_the_callers_array_also_a_strided_one(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:5], PAGES[:5])
    out = np.zeros((10, *SPEC.page_shape), np.float32)
    assert np.shares_memory(cache.get(KEYS[:5], out=out[::2]), out)
    assert bits(out[::2]) == bits(PAGES[:5])
    assert not out[1::2].any()


def test_get_names_the_first_key_that_is_missing(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:5], PAGES[:5])
    wanted = [KEYS[0], KEYS[3], KEYS[20], KEYS[21]]
    with (
        unchanged(cache),
        pytest.raises(pk.PageNotFoundError, match=rf"{KEYS[20].hex()} \(number 2 of 4\)"),
    ):
        cache.get(wanted)
    assert isinstance(pk.PageNotFoundError(""), LookupError)


def test_match_stops_at_the_first_gap(cache: pk.PagedKVCache) -> None:
    cache.put([KEYS[0], KEYS[1], KEYS[3]], PAGES[[0, 1, 3]])
    assert cache.match(KEYS) == 2


def test_put_copies_what_it_is_given(memory_cache: pk.PagedKVCache) -> None:
    pages = PAGES[:3].copy()
    memory_cache.put(KEYS[:3], pages)
    pages[...] = 0
    got = memory_cache.get(KEYS[:3])
    got[...] = 1
    assert bits(memory_cache.get(KEYS[:3])) == bits(PAGES[:3])


def test_strided_pages_are_put(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:8], PAGES[:16:2])
    assert bits(cache.get(KEYS[:8])) == bits(PAGES[:16:2])


def test_a_load_hit_is_kept_in_the_pool(path: Path) -> None:
    with open_cache(path) as cache:
        cache.put(KEYS[:8], PAGES[:8])
    with open_cache(path, 4) as cache:
        cache.get(KEYS[:2])
        cache.get(KEYS[:2])
        stats = cache.stats()
    assert (stats.num_store_hits, stats.num_pool_hits, stats.num_pages_loaded) == (2, 2, 2)


def test_plain_keys_of_two_groups_are_kept_apart(path: Path) -> None:
    specs = make_spec(group="a"), make_spec(group="b"), make_spec(group="c", num_layers=3)
    c_page = make_pages(specs[2], [7])
    with pk.PagedKVCache(specs, 1, pk.PageStore.open(path, specs)) as cache:
        for flush in (False, True):
            key = KEYS[flush : flush + 1]
            cache.put(key, PAGES[:1], group=0)
            if flush:
                cache.flush()
            assert cache.match(key, group=1) == 0
            with pytest.raises(pk.PageNotFoundError):
                cache.get(key, group=1)
            cache.put(key, PAGES[1:2], group=1)
            cache.put(key, c_page, group=2)
        cache.flush()
    with pk.PagedKVCache(specs, 1, pk.PageStore.open(path, specs)) as cache:
        for key in KEYS[:2]:
            assert bits(cache.get([key], group=0)) == bits(PAGES[:1])
            assert bits(cache.get([key], group=1)) == bits(PAGES[1:2])
            assert bits(cache.get([key], group=2)) == bits(c_page)
            with cache.acquire([key], group=2) as (view,):
                assert bits(view) == bits(c_page)


def test_page_keys_find_their_own_group() -> None:
    specs = make_spec(group="a"), make_spec(group="b", num_layers=3)
    with pk.PagedKVCache(specs, 4) as cache:
        for spec in specs:
            cache.put(pk.page_keys(spec, range(8)), make_pages(spec, [1, 2]))
        for spec in specs:
            got = cache.get(pk.page_keys(spec, range(8)))
            assert bits(got) == bits(make_pages(spec, [1, 2]))


# -- acquire ---------------------------------------------------------------------------------


def test_acquire_gives_read_only_views_of_the_pool(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:5], PAGES[:5])
    with cache.acquire(KEYS[1:3]) as views:
        for number, view in enumerate(views, 1):
            assert bits(view) == bits(PAGES[number])
            assert np.shares_memory(view, cache._groups[0].places.pool.array)
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
        assert cache.stats().num_pinned_slots == 2
        assert bits(cache.get(KEYS[:5])) == bits(PAGES[:5])
    assert cache.stats().num_pinned_slots == 0


def test_acquired_pages_stay_whatever_is_put(path: Path) -> None:
    with open_cache(path, 3) as cache:
        cache.put(KEYS[:2], PAGES[:2])
        with cache.acquire(KEYS[:2]) as views:
            cache.put(KEYS[10:30], PAGES[10:30])
            sequence = cache.open_sequence()
            sequence.append(*make_kv(SPEC, 30))
            assert [bits(view) for view in views] == [bits(page) for page in PAGES[:2]]
            assert bits(cache.get(KEYS[10:30])) == bits(PAGES[10:30])


def test_acquire_stops_at_the_first_gap(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:2], PAGES[:2])
    with cache.acquire([KEYS[0], KEYS[9], KEYS[1]]) as views:
        assert len(views) == 1
    with cache.acquire(KEYS[9:]) as views:
        assert views == []


def test_acquire_of_more_than_the_pool_is_refused_and_pins_nothing(path: Path) -> None:
    with open_cache(path, 3) as cache:
        cache.put(KEYS[:5], PAGES[:5])
        cache.flush()
        with (
            pytest.raises(pk.PoolExhaustedError, match="of the pool's 3, "),
            cache.acquire(KEYS[:5]),
        ):
            pass
        assert cache.stats().num_pinned_slots == 0
        with cache.acquire(KEYS[:2]):
            with (
                pytest.raises(pk.PoolExhaustedError, match="of the pool's 3, "),
                cache.acquire(KEYS[2:4]),
            ):
                pass
            assert cache.stats().num_pinned_slots == 2
            with cache.acquire(KEYS[:3]) as views:
                assert len(views) == 3
        cache.check_invariants()


def test_with_all_slots_pinned_put_is_refused_and_get_still_works(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:5], PAGES[:5])
    with cache.acquire(KEYS[:2]):
        with unchanged(cache), pytest.raises(pk.PoolExhaustedError, match="2 are pinned"):
            cache.put(KEYS[10:12], PAGES[10:12])
        cache.put(KEYS[:5], PAGES[:5])  # all known
        assert bits(cache.get(KEYS[:5])) == bits(PAGES[:5])
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 9))
        with sequence.gather(1) as (k, _):
            assert bits(k) == bits(make_kv(SPEC, 9)[0][1])
    cache.put(KEYS[10:12], PAGES[10:12])


def test_an_error_inside_acquire_gives_the_pins_back(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:1], PAGES[:1])
    with pytest.raises(KeyError), cache.acquire(KEYS[:1]):
        raise KeyError
    assert cache.stats().num_pinned_slots == 0


def test_acquire_moves_live_sequences_to_disk_if_need_be(cache: pk.PagedKVCache) -> None:
    kv = make_kv(SPEC, 7)
    cache.put(KEYS[:2], PAGES[:2])
    sequence = cache.open_sequence()
    sequence.append(*kv)
    with cache.acquire(KEYS[:2]) as views:
        assert len(views) == 2
        with sequence.gather(0) as (k, v):
            assert (bits(k), bits(v)) == (bits(kv[0][0]), bits(kv[1][0]))


# -- durability ------------------------------------------------------------------------------


def test_flush_makes_resident_pages_durable(path: Path, cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:2], PAGES[:2])
    sequence = cache.open_sequence()
    sequence.append(*make_kv(SPEC, 8), range(8))
    with pk.PageStore.open(path, mode="r") as before:
        assert before.num_pages < 4
    cache.flush()
    with pk.PageStore.open(path, mode="r") as after:
        assert after.num_pages == 4
        with pk.PagedKVCache(SPEC, 4, after) as reader:
            assert bits(reader.get(KEYS[:2])) == bits(PAGES[:2])
            assert reader.open_sequence(range(8)).num_tokens == 8


def test_close_flushes(path: Path) -> None:
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:3], PAGES[:3])
    with open_cache(path, mode="r") as cache:
        assert bits(cache.get(KEYS[:3])) == bits(PAGES[:3])


def test_write_through_stores_at_once(path: Path) -> None:
    with open_cache(path, 8, write_policy="write-through") as cache:
        assert cache.store is not None
        cache.put(KEYS[:3], PAGES[:3])
        assert cache.store.num_pages == 3
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 9), range(9))
        assert cache.store.num_pages == 5
        stored = cache.stats().num_pages_stored
        cache.put(KEYS[10:30], PAGES[10:30])
        cache.flush()
        assert cache.stats().num_pages_stored == stored + 20


def test_on_evict_writes_nothing_early(path: Path) -> None:
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:6], PAGES[:6])  # a quarter of the slots is still free
        wait_for_writers(cache)
        assert cache.stats().num_pages_stored == 0
        assert cache.stats().bytes_written == 0


def test_no_page_is_written_twice(cache: pk.PagedKVCache) -> None:
    cache.put(KEYS[:8], PAGES[:8])
    for _ in range(3):
        cache.get(KEYS[:8])
        cache.flush()
    cache.put(KEYS[:8], PAGES[:8])
    assert cache.stats().num_pages_stored == 8


@pytest.mark.parametrize(("codec", "spills"), [("raw", False), ("int8", True)])
def test_what_the_store_gives_back_exactly_is_not_spilled_too(
    path: Path, codec: str, spills: bool
) -> None:
    with open_cache(path, 4, codec=codec) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 16), range(16))
        other = cache.open_sequence()
        other.append(*make_kv(SPEC, 16, seed=1), range(100, 116))
        stats = cache.stats()
        assert stats.num_pages_stored >= 3
        assert (stats.num_pages_spilled > 0) == spills


def test_tokens_and_parents_reach_the_catalogue(path: Path) -> None:
    keys = pk.page_keys(SPEC, range(12), salt=b"tenant")
    with open_cache(path) as cache:
        cache.put(keys, PAGES[:3])
    with pk.PageStore.open(path, mode="r") as store:
        entries = {entry.key: entry for _, entry in store.entries()}
        for number, key in enumerate(keys):
            assert entries[key].parent == keys.parents[number]
            tokens = entries[key].tokens
            assert tokens is not None
            assert tokens.tolist() == list(range(4 * number, 4 * number + 4))


# -- a read-only store -----------------------------------------------------------------------


def test_over_a_read_only_store_new_pages_are_forgotten_and_old_ones_found(path: Path) -> None:
    with open_cache(path) as cache:
        cache.put(KEYS[:4], PAGES[:4])
    with open_cache(path, mode="r") as cache:
        assert cache.store is not None
        cache.put(KEYS[10:20], PAGES[10:20])
        cache.flush()
        assert bits(cache.get(KEYS[:4])) == bits(PAGES[:4])
        assert cache.store.num_pages == 4
        with pytest.raises(pk.PageNotFoundError):
            cache.get(KEYS[10:20])
        cache.check_invariants()


def test_over_a_read_only_store_sequences_must_fit(path: Path) -> None:
    with open_cache(path) as cache:
        cache.open_sequence().append(*make_kv(SPEC, 12), range(12))
    with open_cache(path, mode="r") as cache:
        sequence = cache.open_sequence(range(12))
        assert sequence.num_tokens == 12
        sequence.append(*make_kv(SPEC, 8, seed=1))  # its clean pages make room
        with unchanged(cache, sequence), pytest.raises(pk.PoolExhaustedError, match="read-only"):
            sequence.append(*make_kv(SPEC, 1))
        sequence.commit(range(20))
        with unchanged(cache, sequence), pytest.raises(pk.StoreError, match="can be written"):
            sequence.save()


def test_a_saved_tail_that_finds_no_slot_is_left_out(path: Path) -> None:
    with open_cache(path) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 6), range(6))
        sequence.save()
    with open_cache(path, 1, mode="r") as cache:
        busy = cache.open_sequence()
        busy.append(*make_kv(SPEC, 3))
        assert cache.open_sequence(range(6)).num_tokens == 4
        cache.check_invariants()


# -- INT8 ------------------------------------------------------------------------------------


def test_int8_pages_are_exact_in_the_pool_and_rounded_from_disk(path: Path) -> None:
    rounded = np.stack([through_int8(SPEC, page) for page in PAGES[:6]])
    with open_cache(path, 3, codec="int8") as cache:
        cache.put(KEYS[:2], PAGES[:2])
        assert bits(cache.get(KEYS[:2])) == bits(PAGES[:2])
        cache.put(KEYS[2:6], PAGES[2:6])
        assert bits(cache.get(KEYS[:2])) == bits(rounded[:2])
    with open_cache(path, 8) as cache:
        assert bits(cache.get(KEYS[:6])) == bits(rounded)
        cache.put(KEYS[:6], PAGES[:6])
        assert bits(cache.get(KEYS[:6])) == bits(rounded)


def test_int8_leaves_live_sequences_exact(path: Path) -> None:
    kv = make_kv(SPEC, 22)
    with open_cache(path, 2, codec="int8") as cache:
        sequence = cache.open_sequence()
        sequence.append(*kv, range(22))
        cache.put(KEYS[:8], PAGES[:8])
        cache.flush()
        for layer in range(2):
            with sequence.gather(layer) as (k, v):
                assert (bits(k), bits(v)) == (bits(kv[0][layer]), bits(kv[1][layer]))
        fork = sequence.fork()
        fork.truncate(10)
        fork.append(*(array[:, 10:] for array in kv))
        with fork.gather(1) as (k, _):
            assert bits(k) == bits(kv[0][1])
        sequence.save()
    with open_cache(path, 2) as cache:
        sequence = cache.open_sequence(range(22))
        assert sequence.num_tokens == 22
        with sequence.gather(0) as (k, _):
            assert bits(k) != bits(kv[0][0])
            np.testing.assert_allclose(k, kv[0][0], atol=0.03)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_refuses_what_it_cannot_hold_at_put(path: Path, bad: float) -> None:
    pages = PAGES[:3].copy()
    pages[1, 1, 0, 2, 0, 1] = bad
    with open_cache(path, codec="int8") as cache:
        cache.put(KEYS[10:14], PAGES[10:14])
        with (
            unchanged(cache),
            pytest.raises(ValueError, match=rf"pages has {bad} at \(1, 1, 0, 2, 0, 1\)"),
        ):
            cache.put(KEYS[:3], pages)


def test_raw_takes_nan(cache: pk.PagedKVCache) -> None:
    pages = np.full_like(PAGES[:3], np.nan)
    cache.put(KEYS[:3], pages)
    assert bits(cache.get(KEYS[:3])) == bits(pages)


# -- a bounded store -------------------------------------------------------------------------


def test_a_bounded_store_forgets_old_pages_but_nothing_of_live_sequences(path: Path) -> None:
    kv, named = make_kv(SPEC, 6), make_kv(SPEC, 16, seed=1)
    with open_cache(path, 3, max_nbytes=600_000) as cache:
        sequence, stored = cache.open_sequence(), cache.open_sequence()
        sequence.append(*kv)
        stored.append(*named, range(16))
        for number in range(64):
            cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
            for layer in range(2):
                for live, exact in ((sequence, kv), (stored, named)):
                    with live.gather(layer) as (k, v):
                        assert (bits(k), bits(v)) == (bits(exact[0][layer]), bits(exact[1][layer]))
            assert cache.stats().store_nbytes <= 600_000
        found = [number for number in range(64) if cache.match([KEYS[number]])]
        assert 63 in found
        assert len(found) < 64
        for number in found:
            assert bits(cache.get([KEYS[number]])[0]) == bits(PAGES[number])
        cache.check_invariants()


def test_a_full_store_makes_the_cache_forget_but_not_its_sequences(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(SPEC, 6)
    cache = open_cache(path, 3)
    store = cache.store
    assert store is not None
    sequence = cache.open_sequence()
    sequence.append(*kv)
    cache.put(KEYS[:10], PAGES[:10])
    wait_for_writers(cache)

    def write(*args: Any, **options: Any) -> Any:
        raise pk.StoreFullError("the store has no room")

    monkeypatch.setattr(store, "write", write)
    for number in range(10, 64):
        cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
        for layer in range(2):
            with sequence.gather(layer) as (k, v):
                assert (bits(k), bits(v)) == (bits(kv[0][layer]), bits(kv[1][layer]))
    wait_for_writers(cache)
    assert cache.stats().num_pages_dropped > 0
    assert "no room" in caplog.text
    found = [number for number in range(64) if cache.match([KEYS[number]])]
    assert 63 in found
    for number in found:
        assert bits(cache.get([KEYS[number]])[0]) == bits(PAGES[number])
    cache.check_invariants()
    sequence.commit(range(6))
    with pytest.raises(pk.StoreFullError, match="no room"):
        cache.flush()
    with sequence.gather(0) as (k, _):
        assert bits(k) == bits(kv[0][0])
    caplog.clear()
    cache.close()
    assert "forgetting" in caplog.text


# -- a disk that fails -----------------------------------------------------------------------


class FullDisk:
    """``OSError(ENOSPC)`` from every write, while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        for name in ("write_all", "pwrite_all"):
            monkeypatch.setattr(files, name, self.checked(getattr(files, name)))

    def checked(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            if self.is_on:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return write


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_a_put_that_cannot_evict_keeps_every_page_and_names_the_path(
    path: Path, cache: pk.PagedKVCache, full_disk: FullDisk
) -> None:
    cache.put(KEYS[:2], PAGES[:2])
    full_disk.is_on = True
    with unchanged(cache), pytest.raises(pk.StoreError, match=rf"{path}.*No space left"):
        cache.put(KEYS[2:3], PAGES[2:3])
    assert bits(cache.get(KEYS[:2])) == bits(PAGES[:2])
    full_disk.is_on = False
    cache.put(KEYS[2:3], PAGES[2:3])
    assert bits(cache.get(KEYS[:3])) == bits(PAGES[:3])


def test_a_sequence_that_cannot_spill_is_left_as_it_was(
    path: Path, cache: pk.PagedKVCache, full_disk: FullDisk
) -> None:
    kv, more = make_kv(SPEC, 7), make_kv(SPEC, 9, seed=1)
    sequence = cache.open_sequence()
    sequence.append(*kv)
    full_disk.is_on = True
    with unchanged(cache, sequence):
        with pytest.raises(pk.StoreError, match=str(path)):
            sequence.append(*more)
        with pytest.raises(pk.StoreError, match=str(path)):
            sequence.append_layer(1, more[0][1], more[1][1])
    full_disk.is_on = False
    sequence.append(*more)
    for layer in range(2):
        with sequence.gather(layer) as (k, _):
            assert bits(k) == bits(np.concatenate([kv[0][layer], more[0][layer]]))


def test_a_write_that_fails_half_way_loses_no_token(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = make_kv(SPEC, 3)
    real = files.pwrite_all

    def torn(fd: int, data: Any, offset: int) -> None:
        real(fd, data[: len(data) - 8], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_cache(path, 1) as cache:
        cache.put(KEYS[:1], PAGES[:1])
        with cache.acquire(KEYS[:1]):  # so that the sequence lives on disk
            sequence = cache.open_sequence()
            sequence.append(k[:, :2], v[:, :2])
            with monkeypatch.context() as patch, pytest.raises(pk.StoreError, match=str(path)):
                patch.setattr(files, "pwrite_all", torn)
                sequence.append(k[:, 2:], v[:, 2:])
            for count in (2, 3):
                for layer in range(2):
                    with sequence.gather(layer) as kinds:
                        assert bits(kinds[0]) == bits(k[layer, :count])
                        assert bits(kinds[1]) == bits(v[layer, :count])
                if count == 2:
                    sequence.append(k[:, 2:], v[:, 2:])


def test_a_flush_that_fails_can_be_repeated(
    path: Path, cache: pk.PagedKVCache, full_disk: FullDisk
) -> None:
    cache.put(KEYS[:2], PAGES[:2])
    full_disk.is_on = True
    for call in (cache.flush, cache.close):
        with unchanged(cache), pytest.raises(pk.StoreError, match=str(path)):
            call()
    full_disk.is_on = False
    assert bits(cache.load(KEYS[:2]).result()) == bits(PAGES[:2])
    cache.close()
    with pk.PageStore.open(path, mode="r") as store:
        assert store.num_pages == 2


def test_a_save_or_commit_that_fails_can_be_repeated(
    path: Path, cache: pk.PagedKVCache, full_disk: FullDisk
) -> None:
    kv = make_kv(SPEC, 22)
    sequence = cache.open_sequence()
    sequence.append(*kv)
    full_disk.is_on = True
    with pytest.raises(pk.StoreError, match=str(path)):
        sequence.commit(range(22))
    with pytest.raises((pk.StoreError, ValueError)):
        sequence.save()
    cache.check_invariants()
    for layer in range(2):
        with sequence.gather(layer) as (k, _):
            assert bits(k) == bits(kv[0][layer])
    full_disk.is_on = False
    sequence.commit(range(22))
    sequence.save()
    with pk.PageStore.open(path, mode="r") as store:
        assert store.num_pages == 6
        with pk.PagedKVCache(SPEC, 4, store) as reader:
            assert reader.open_sequence(range(22)).num_tokens == 22


def test_a_save_after_a_commit_that_failed_names_what_is_missing(
    path: Path, full_disk: FullDisk
) -> None:
    specs = make_spec(group="a"), make_spec(group="b")
    k, v = make_kv(SPEC, 22)
    store = pk.PageStore.open(path, specs)
    with pk.PagedKVCache(specs, 1, store) as cache:
        sequence = cache.open_sequence()
        sequence.append([k, k], [v, v])
        full_disk.is_on = True
        with pytest.raises(pk.StoreError, match=str(path)):
            sequence.commit(range(22))
        full_disk.is_on = False
        sequence.save()
        with cache.open_sequence(range(22)) as again:
            assert again.num_tokens == 22
            for layer in range(4):
                with again.gather(layer) as kinds:
                    assert bits(kinds[0]) == bits(k[layer % 2])


def test_reading_goes_on_while_writing_fails(cache: pk.PagedKVCache, full_disk: FullDisk) -> None:
    cache.put(KEYS[:8], PAGES[:8])
    cache.flush()
    full_disk.is_on = True
    assert bits(cache.get(KEYS[:8])) == bits(PAGES[:8])
    with cache.acquire(KEYS[4:6]) as views:
        assert bits(views[1]) == bits(PAGES[5])
    full_disk.is_on = False


def test_a_folder_that_becomes_read_only_keeps_what_is_in_memory(public_folder: Path) -> None:
    kv = make_kv(SPEC, 7)
    with open_cache(public_folder / "cache.zarr", 4) as cache:
        cache.put(KEYS[:2], PAGES[:2])
        sequence = cache.open_sequence()
        sequence.append(*kv)
        wait_for_writers(cache)
        with not_writable(public_folder):
            message = rf"{public_folder}.*Permission denied"
            cache.put(KEYS[2:3], PAGES[2:3])  # in the slot of a page that is stored
            with unchanged(cache, sequence), pytest.raises(pk.StoreError, match=message):
                cache.flush()
            with pytest.raises(pk.StoreError, match=message):
                pk.PageStore.open(public_folder / "new.zarr", SPEC)
            with pytest.raises(PermissionError, match="pool"):
                pk.PagedKVCache(SPEC, 2, pool_path=public_folder / "pool")
        cache.put(KEYS[2:3], PAGES[2:3])
        assert bits(cache.get(KEYS[:3])) == bits(PAGES[:3])


def test_a_sequence_goes_on_while_the_disk_fails_as_long_as_cached_pages_can_be_forgotten(
    path: Path, full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    kv, more = make_kv(SPEC, 8), make_kv(SPEC, 8, seed=1)
    with open_cache(path, 4) as cache:
        cache.put(KEYS[:2], PAGES[:2])
        sequence = cache.open_sequence()
        sequence.append(*kv)
        full_disk.is_on = True
        sequence.append(*more)
        assert "forgetting" in caplog.text
        assert cache.stats().num_pages_dropped == 2
        with unchanged(cache, sequence), pytest.raises(pk.StoreError, match=str(path)):
            sequence.append(*kv)  # nothing is left to forget
        for layer in range(2):
            with sequence.gather(layer) as (k, _):
                assert bits(k) == bits(np.concatenate([kv[0][layer], more[0][layer]]))
        full_disk.is_on = False
        sequence.append(*kv)


def test_an_open_that_fails_holds_nothing(path: Path, full_disk: FullDisk) -> None:
    specs = make_spec(group="a"), make_spec(group="b", num_layers=3)
    with pk.PagedKVCache(specs, 1, pk.PageStore.open(path, specs)) as cache:
        for spec in specs:
            cache.put(pk.page_keys(spec, range(4)), make_pages(spec, [1]))
        cache.flush()
        cache.put(KEYS[:1], make_pages(specs[1], [2]), group=1)  # has to leave, and cannot
        full_disk.is_on = True
        try:
            cache.open_sequence(range(4)).close()
        except pk.StoreError as error:
            assert str(path) in str(error)
        cache.check_invariants()
        assert cache.stats().num_pages_held == 0
        full_disk.is_on = False
        assert cache.open_sequence(range(4)).num_tokens == 4


# -- the background writer ---------------------------------------------------------------------


class Gate:
    """Lets writes of segments pass, or wait; knows which threads have written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.was_reached = threading.Event()
        self.writers: set[str] = set()
        real = files.write_all

        def write_all(fd: int, data: Any) -> None:
            self.writers.add(threading.current_thread().name)
            self.was_reached.set()
            assert self.is_open.wait(60)
            real(fd, data)

        monkeypatch.setattr(files, "write_all", write_all)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


def test_evicted_pages_are_written_by_another_thread(path: Path, gate: Gate) -> None:
    main = threading.current_thread().name
    with open_cache(path, 8) as cache:
        gate.writers.clear()
        for number in range(64):
            cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
        assert main not in gate.writers
        assert len(gate.writers) == 1
        wait_for_writers(cache)
        assert cache.stats().num_pages_stored >= 56
        assert bits(cache.get(KEYS)) == bits(PAGES)


def test_without_evictions_or_a_store_that_can_be_written_there_is_no_thread(path: Path) -> None:
    before = set(threading.enumerate())
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:5], PAGES[:5])
        cache.get(KEYS[:5])
        assert set(threading.enumerate()) <= before
    with open_cache(path, 2, mode="r") as reader, pk.PagedKVCache(SPEC, 2) as alone:
        for cache in (reader, alone):
            cache.put(KEYS, PAGES)
        assert set(threading.enumerate()) <= before


def test_pages_are_written_before_their_slots_are_needed(path: Path) -> None:
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:7], PAGES[:7])
        wait_for_writers(cache)
        stats = cache.stats()
        assert (stats.num_pages_stored, stats.num_pages_evicted) == (2, 0)
        assert cache.store is not None
        assert [cache.store.find(key) is not None for key in KEYS[:4]] == [True, True, False, False]


def test_a_page_that_is_being_written_can_be_read(path: Path, gate: Gate) -> None:
    keys, pages, (k, _) = chain_pages()
    with open_cache(path, 4) as cache:
        gate.was_reached.clear()
        gate.is_open.clear()
        cache.put(keys, pages)  # three quarters are taken after the first two
        assert gate.was_reached.wait(60)
        with cache._lock:
            places = cache._groups[0].places
            assert any(page.state is PageState.WRITING for page in places.index.values())
        assert bits(cache.get(keys)) == bits(pages)
        with cache.acquire(keys) as views:
            assert bits(np.stack(views)) == bits(pages)
        with cache.open_sequence(range(16)) as sequence, sequence.fork() as fork:
            for reader in (sequence, fork):
                with reader.gather(0) as (got, _):
                    assert bits(got) == bits(k[0])
        assert cache.match(keys) == 4
        gate.is_open.set()


def test_who_needs_a_slot_waits_for_the_writer(path: Path, gate: Gate) -> None:
    with open_cache(path, 4) as cache:
        cache.put(KEYS[:4], PAGES[:4])
        wait_for_writers(cache)
        gate.is_open.clear()
        putter = threading.Thread(target=lambda: cache.put(KEYS[4:12], PAGES[4:12]), daemon=True)
        putter.start()
        putter.join(0.1)
        assert putter.is_alive()
        assert bits(cache.get(KEYS[:1])) == bits(PAGES[:1])
        gate.is_open.set()
        putter.join(60)
        assert not putter.is_alive()
        assert bits(cache.get(KEYS[:12])) == bits(PAGES[:12])


def test_a_failure_in_the_background_is_told_once_by_flush(path: Path, full_disk: FullDisk) -> None:
    with open_cache(path, 4) as cache:
        full_disk.is_on = True
        cache.put(KEYS[:4], PAGES[:4])  # fits; what is written ahead fails
        wait_for_writers(cache)
        full_disk.is_on = False
        with pytest.raises(pk.StoreError, match=rf"{path}.*No space left"):
            cache.flush()
        assert cache.store is not None
        assert cache.store.num_pages == 4
        cache.flush()


def test_a_failing_disk_is_left_alone_until_somebody_needs_it(
    path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(path, 8) as cache:
        store = cache.store
        assert store is not None
        num_writes = 0
        real = store.write

        def write(*args: Any, **options: Any) -> Any:
            nonlocal num_writes
            num_writes += 1
            return real(*args, **options)

        monkeypatch.setattr(store, "write", write)
        full_disk.is_on = True
        for number in range(8):
            cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
        wait_for_writers(cache)
        assert num_writes == 1
        for _ in range(2):
            with pytest.raises(pk.StoreError, match=str(path)):
                cache.put(KEYS[8:9], PAGES[8:9])
        assert num_writes == 3
        full_disk.is_on = False
        cache.put(KEYS[8:9], PAGES[8:9])
        assert bits(cache.get(KEYS[:9])) == bits(PAGES[:9])


def test_close_waits_for_what_is_being_written(path: Path, gate: Gate) -> None:
    cache = open_cache(path, 4)
    gate.was_reached.clear()
    gate.is_open.clear()
    cache.put(KEYS[:4], PAGES[:4])
    assert gate.was_reached.wait(60)
    closer = threading.Thread(target=cache.close, daemon=True)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    gate.is_open.set()
    closer.join(60)
    assert not closer.is_alive()
    with open_cache(path) as again:
        assert bits(again.get(KEYS[:4])) == bits(PAGES[:4])


def test_who_waits_for_the_writer_is_told_when_the_cache_is_closed(
    path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(path, 2)
    cache.put(KEYS[:2], PAGES[:2])
    wait_for_writers(cache)
    gate.was_reached.clear()
    gate.is_open.clear()
    errors: list[BaseException] = []

    def put() -> None:
        try:
            cache.put(KEYS[2:40], PAGES[2:40])
        except pk.PagedKVError as error:
            errors.append(error)

    putter = threading.Thread(target=put, daemon=True)
    putter.start()
    assert gate.was_reached.wait(60)
    with monkeypatch.context() as patch:  # a close whose flush has nothing to do
        patch.setattr(type(cache._groups[0]), "flush", lambda _: None)
        closer = threading.Thread(target=cache.close, daemon=True)
        closer.start()
        putter.join(60)
        assert not putter.is_alive()
        gate.is_open.set()
        closer.join(60)
    assert not closer.is_alive()
    assert isinstance(errors[0], pk.ClosedError)


# -- damage ----------------------------------------------------------------------------------


def damage(path: Path, number: int) -> None:
    """Flip one bit in the stored page ``number``, found by its bytes."""
    for file in path.rglob("*"):
        if not file.is_file():
            continue
        data = bytearray(file.read_bytes())
        at = bytes(data).find(bits(make_page(SPEC, number)[0]))
        if at >= 0:
            data[at + 5] ^= 4
            file.write_bytes(data)
            return
    raise AssertionError("the page is not on disk")


def test_a_damaged_page_is_not_found_and_can_be_put_again(path: Path) -> None:
    with open_cache(path) as cache:
        cache.put(KEYS[:6], PAGES[:6])
    damage(path, 3)
    with open_cache(path) as cache:
        with pytest.raises(pk.PageNotFoundError, match=rf"{KEYS[3].hex()} \(number 1 of 3\)"):
            cache.get([KEYS[2], KEYS[3], KEYS[4]])
        assert cache.match(KEYS[:6]) == 3
        assert bits(cache.get([KEYS[2], KEYS[4]])) == bits(PAGES[[2, 4]])
        assert cache.stats().misses_by_reason == {"corrupt": 1}
        cache.put(KEYS[:6], PAGES[:6])
        assert bits(cache.get(KEYS[:6])) == bits(PAGES[:6])
        cache.check_invariants()


def test_acquire_stops_at_a_damaged_page(path: Path) -> None:
    with open_cache(path) as cache:
        cache.put(KEYS[:6], PAGES[:6])
    damage(path, 1)
    with open_cache(path, 4) as cache:
        with cache.acquire(KEYS[:4]) as views:
            assert [bits(view) for view in views] == [bits(PAGES[0])]
        cache.check_invariants()
        assert cache.stats().misses_by_reason["corrupt"] >= 1
        assert cache.match(KEYS) == 1


def chain_pages() -> tuple[pk.PageKeys, Array, tuple[Array, Array]]:
    """Four pages of a prefix, and the same numbers as a sequence has them."""
    keys = pk.page_keys(SPEC, range(16))
    kv = PAGES[:4].transpose(2, 1, 0, 3, 4, 5).reshape(2, 2, 16, 1, 2)
    return keys, PAGES[:4], (kv[0], kv[1])


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_a_damaged_prefix_is_reused_up_to_the_damage(path: Path, num_slots: int) -> None:
    keys, pages, (k, v) = chain_pages()
    with open_cache(path) as cache:
        cache.put(keys, pages)
    damage(path, 2)
    with open_cache(path, num_slots) as cache:
        sequence = cache.open_sequence(range(16))
        # what has no slot is not read when the sequence is opened, but when it is gathered
        if num_slots >= 4:
            assert sequence.num_tokens == 8
        if sequence.num_tokens > 8:
            with pytest.raises(pk.CorruptPageError) as error, sequence.gather(0):
                pass
            assert error.value.keys == (keys[2],)
            with sequence.gather(1) as (got, _):  # this layer is whole
                assert bits(got) == bits(k[1])
            sequence.close()
            sequence = cache.open_sequence(range(16))
        assert sequence.num_tokens == 8
        sequence.append(k[:, 8:], v[:, 8:], range(8, 16))
        for layer in range(2):
            with sequence.gather(layer) as (got, _):
                assert bits(got) == bits(k[layer])
        assert bits(cache.get(keys)) == bits(pages)
        cache.check_invariants()


def test_damage_under_a_live_sequence_is_an_error_and_never_numbers(path: Path) -> None:
    keys, pages, (k, v) = chain_pages()
    with open_cache(path, 2) as cache:
        cache.put(keys, pages)
        cache.flush()
        sequence = cache.open_sequence(range(16))
        cache.put(KEYS[20:24], PAGES[20:24])
        damage(path, 3)
        with pytest.raises(pk.CorruptPageError) as error, sequence.gather(0):
            pass
        assert error.value.keys == (keys[3],)
        with sequence.gather(0, 12) as (got, _):
            assert bits(got) == bits(k[0, :12])
        with cache.acquire(keys[3:]) as views:
            assert views == []
        cache.check_invariants()
        with pytest.raises(pk.PageNotFoundError):
            cache.get(keys)
        assert cache.match(keys) == 3
        cache.put(keys, pages)
        assert bits(cache.get(keys)) == bits(pages)
        cache.check_invariants()
        sequence.truncate(12)
        sequence.append(k[:, 12:], v[:, 12:])
        with sequence.gather(1) as (got, _):
            assert bits(got) == bits(k[1])
        sequence.close()
        cache.check_invariants()
        assert bits(cache.get(keys)) == bits(pages)


def test_a_damaged_tail_is_left_out(path: Path) -> None:
    with open_cache(path) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 6), range(6))
        sequence.save()
    tail = np.zeros((2, 4, 1, 2), np.float32)
    k, v = make_kv(SPEC, 6)
    tail[0, :2], tail[1, :2] = k[0, 4:], v[0, 4:]
    for file in path.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        at = data.find(bits(tail))
        if at >= 0:
            file.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with open_cache(path) as cache:
        assert cache.open_sequence(range(6)).num_tokens == 4
        assert cache.stats().misses_by_reason["corrupt"] == 1


def test_a_store_that_lost_its_segments_is_a_cache_of_misses(path: Path) -> None:
    keys, pages, _ = chain_pages()
    with open_cache(path) as cache:
        cache.put(keys, pages)
    cache = open_cache(path)
    segments = list(path.glob("lane-*/group-*/kv/c.*"))
    assert segments
    for file in segments:
        file.unlink()
    with cache:
        with pytest.raises(pk.PageNotFoundError):
            cache.get(keys)
        assert cache.open_sequence(range(16)).num_tokens in (0, 16)
        cache.check_invariants()


# -- statistics ------------------------------------------------------------------------------


def test_hits_are_counted_by_tier(path: Path) -> None:
    keys = pk.page_keys(SPEC, range(32))
    with open_cache(path) as cache:
        cache.put(keys, PAGES[:8])
    with open_cache(path, 8) as cache:
        cache.get(keys[:2])
        cache.get(keys[:2])
        cache.open_sequence(range(16))
        with cache.acquire(keys[:6]):
            pass
        with pytest.raises(pk.PageNotFoundError):
            cache.get(KEYS[:1])
        stats = cache.stats()
        assert stats.num_store_hits == 2 + 2 + 2
        assert stats.num_pool_hits == 2 + 2 + 4
        assert stats.num_misses == 1
        assert stats.misses_by_reason == {"absent": 1}
        assert stats.num_pages_loaded == 6
        assert stats.bytes_read == 6 * SPEC.page_nbytes
        assert stats.num_pages_held == 4
        assert (stats.num_slots, stats.num_free_slots) == (8, 2)


def test_statistics_are_a_snapshot(cache: pk.PagedKVCache) -> None:
    before = cache.stats()
    cache.put(KEYS[:8], PAGES[:8])
    assert before.num_pages_evicted == 0
    assert cache.stats().num_pages_evicted >= 6
    with pytest.raises(AttributeError):
        before.num_slots = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        before.misses_by_reason["x"] = 1  # type: ignore[index]


def test_sizes_are_those_on_disk_and_in_memory(path: Path) -> None:
    with open_cache(path, 3) as cache:
        cache.put(KEYS[:20], PAGES[:20])
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 40))
        wait_for_writers(cache)
        stats = cache.stats()
        assert stats.pool_nbytes == 3 * SPEC.page_nbytes
        spill = cache._groups[0].places.spill
        assert spill is not None
        assert cache.store is not None
        cache.store._contents.groups[0, 0].write_columns()
        on_disk = sum(
            file.stat().st_size
            for file in path.rglob("*")
            if file.is_file() and file.suffix != ".lock"
        )
        assert stats.store_nbytes == on_disk + spill.nbytes


# -- memory ----------------------------------------------------------------------------------


def metadata_nbytes(cache: pk.PagedKVCache, put: Callable[[], None]) -> int:
    """Bytes that Python and numpy hold more after ``put``; the pool is mapped, so not counted."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        put()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_resident_page_costs_less_than_512_bytes_of_metadata(has_tokens: bool) -> None:
    spec = make_spec(num_layers=1, head_dim=1, page_tokens=16)
    num_pages = 20_000
    pages = np.zeros((num_pages, *spec.page_shape), np.float32)
    with pk.PagedKVCache(spec, num_pages) as cache:

        def put() -> None:
            if has_tokens:
                cache.put(pk.page_keys(spec, np.arange(16 * num_pages)), pages)
            else:
                cache.put([make_key(number) for number in range(num_pages)], pages)

        nbytes = metadata_nbytes(cache, put)
        assert cache.stats().num_free_slots == 0
        assert nbytes / num_pages < 512


def test_pages_of_sequences_cost_less_than_512_bytes_of_metadata() -> None:
    spec = make_spec(num_layers=1, head_dim=1, page_tokens=16)
    num_pages = 20_000
    k, v = make_kv(spec, 16 * 1000)
    with pk.PagedKVCache(spec, num_pages) as cache:

        def append() -> None:
            for number in range(20):
                sequence = cache.open_sequence()
                sequence.append(k, v, np.arange(16 * 1000) + number)

        nbytes = metadata_nbytes(cache, append)
        assert cache.stats().num_free_slots == 0
        assert nbytes / num_pages < 512


def test_pages_that_come_and_go_leave_no_memory_behind(memory_cache: pk.PagedKVCache) -> None:
    def churn() -> None:
        for number in range(2000):
            key = make_key(number)
            memory_cache.put([key], PAGES[:1])
            with memory_cache.open_sequence() as sequence:
                sequence.append(*make_kv(SPEC, 9), [number + at for at in range(9)])

    churn()
    assert metadata_nbytes(memory_cache, churn) < 20_000


# -- construction ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [0, -1, [0], [2, 2], []])
def test_a_pool_without_slots_is_refused(num_slots: Any) -> None:
    with pytest.raises(ValueError, match="num_slots"):
        pk.PagedKVCache(SPEC, num_slots)


@pytest.mark.parametrize("num_slots", [2.5, "4", None, True, np.float32(2), [2.0]])
def test_a_number_of_slots_that_is_no_integer_is_refused(num_slots: Any) -> None:
    with pytest.raises(TypeError, match="num_slots"):
        pk.PagedKVCache(SPEC, num_slots)


def test_numpy_integers_are_fine() -> None:
    with pk.PagedKVCache(SPEC, np.int64(4)) as cache:  # type: ignore[arg-type]
        assert cache.num_slots == 4


@pytest.mark.parametrize("spec", [None, [], "spec", [SPEC, "spec"]])
def test_what_is_no_spec_is_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match="spec is"):
        pk.PagedKVCache(spec, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_spec(group="b", model="sha256:other"), "differ in model"),
        (make_spec(group="b", page_tokens=8), "differ in page_tokens"),
        (make_spec(num_layers=3), "one group"),
    ],
)
def test_specs_that_do_not_fit_together_are_refused(other: pk.KVSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.PagedKVCache([SPEC, other], 2)


@pytest.mark.parametrize("write_policy", ["", "write-back", None])
def test_an_unknown_write_policy_is_refused(write_policy: Any) -> None:
    with pytest.raises(ValueError, match="write_policy is"):
        pk.PagedKVCache(SPEC, 2, write_policy=write_policy)


def test_a_used_policy_is_refused_and_a_shared_one_does_no_harm() -> None:
    policy = pk.LRU()
    policy.use([KEYS[0]], [None])
    with pytest.raises(ValueError, match="policy"):
        pk.PagedKVCache(SPEC, 2, policy=policy)
    policy = pk.LRU()
    with (
        pk.PagedKVCache(SPEC, 2, policy=policy) as one,
        pk.PagedKVCache(SPEC, 2, policy=policy) as two,
    ):
        for cache in (one, two):
            for number in range(8):
                cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
            cache.check_invariants()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "sha256:other"}, "model is 'sha256:test' there and 'sha256:other' here"),
        ({"page_tokens": 8}, "page_tokens is 4 there and 8 here"),
        ({"dtype": "float16"}, "dtype is 'float32' there and 'float16' here"),
        ({"head_dim": 4}, "head_dim is 2 there and 4 here"),
    ],
)
def test_a_store_of_another_spec_is_refused(path: Path, changes: Any, message: str) -> None:
    with pk.PageStore.open(path, SPEC) as store:
        with pytest.raises(pk.SpecMismatchError, match=message):
            pk.PagedKVCache(make_spec(**changes), 2, store)
        store.check_invariants()  # still open: the cache has not taken it over
        with pytest.raises(pk.SpecMismatchError, match="1 specs, the cache 2"):
            pk.PagedKVCache([SPEC, make_spec(group="b")], 2, store)
    with pytest.raises(pk.SpecMismatchError, match=message):
        pk.PageStore.open(path, make_spec(**changes))


def test_a_closed_store_is_refused(path: Path) -> None:
    store = pk.PageStore.open(path, SPEC)
    store.close()
    with pytest.raises(pk.ClosedError, match=str(path)):
        pk.PagedKVCache(SPEC, 2, store)


def test_a_pool_path_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("precious")
    with pytest.raises(FileExistsError, match="pool"):
        pk.PagedKVCache(SPEC, 2, pool_path=tmp_path / "pool")
    assert (tmp_path / "pool").read_text() == "precious"


def test_a_file_mapped_pool_works_like_memory(tmp_path: Path) -> None:
    specs = SPEC, make_spec(group="b")
    with pk.PagedKVCache(specs, 4, pool_path=tmp_path / "pool") as cache:
        for number, spec in enumerate(specs):
            cache.put(KEYS[:4], PAGES[4 * number : 4 * number + 4], group=number)
            assert spec.page_shape == SPEC.page_shape
        for number in range(2):
            got = cache.get(KEYS[:4], group=number)
            assert bits(got) == bits(PAGES[4 * number : 4 * number + 4])
    assert list(tmp_path.iterdir()) == []


# -- bad input -------------------------------------------------------------------------------


def wrong_pages() -> dict[str, tuple[Any, type[Exception], str]]:
    return {
        "one page too few": (PAGES[:1], ValueError, r"shape \(1, .*must be \(2, "),
        "one page too many": (PAGES[:3], ValueError, r"shape \(3, .*must be \(2, "),
        "no page axis": (PAGES[0], ValueError, "shape"),
        "axes swapped": (PAGES[:2].transpose(0, 2, 1, 3, 4, 5)[:, :, :1], ValueError, "shape"),
        "fewer tokens": (PAGES[:2, :, :, :3], ValueError, "shape"),
        "float64": (PAGES[:2].astype(np.float64), ValueError, "pages is float64.*float32"),
        "float16": (PAGES[:2].astype(np.float16), ValueError, "pages is float16.*float32"),
        "big endian": (PAGES[:2].astype(">f4"), ValueError, "pages is >f4"),
        "a list": (PAGES[:2].tolist(), TypeError, "pages must be a numpy array, not list"),
        "nothing": (None, TypeError, "pages must be a numpy array, not NoneType"),
    }


@pytest.mark.parametrize("case", wrong_pages())
def test_pages_that_do_not_fit_are_refused(cache: pk.PagedKVCache, case: str) -> None:
    pages, error, message = wrong_pages()[case]
    cache.put(KEYS[10:14], PAGES[10:14])
    with unchanged(cache), pytest.raises(error, match=message):
        cache.put(KEYS[:2], pages)


@pytest.mark.parametrize(
    "key", [b"", b"short", b"x" * 33, "x" * 32, 5, None, bytearray(32), memoryview(b"x" * 32)]
)
def test_keys_that_are_not_32_bytes_are_refused(cache: pk.PagedKVCache, key: Any) -> None:
    cache.put(KEYS[10:14], PAGES[10:14])
    keys = [KEYS[0], key]
    with unchanged(cache):
        for call in (
            lambda: cache.put(keys, PAGES[:2]),
            lambda: cache.get(keys),
            lambda: cache.match(keys),
            lambda: cache.load(keys),
            lambda: cache.acquire(keys).__enter__(),
        ):
            with pytest.raises(ValueError, match="a key is 32 bytes"):
                call()


def test_a_single_key_instead_of_a_list_is_refused(cache: pk.PagedKVCache) -> None:
    with unchanged(cache), pytest.raises(ValueError, match="a key is 32 bytes"):
        cache.get(KEYS[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"model": "sha256:other"}, {"page_tokens": 8}, {"dtype": "float16"}]
)
def test_page_keys_of_another_spec_are_refused(
    cache: pk.PagedKVCache, changes: dict[str, Any]
) -> None:
    other = make_spec(**changes)
    keys = pk.page_keys(other, range(other.page_tokens))
    (name,) = changes
    with unchanged(cache):
        for call in (
            lambda: cache.put(keys, make_pages(other, [1])),
            lambda: cache.get(keys),
            lambda: cache.match(keys),
        ):
            with pytest.raises(pk.SpecMismatchError, match=name):
                call()


def wrong_outs() -> dict[str, tuple[Any, type[Exception], str]]:
    read_only = np.empty_like(PAGES[:2])
    read_only.flags.writeable = False
    return {
        "too few": (np.empty_like(PAGES[:1]), ValueError, "out has shape"),
        "float64": (np.empty(PAGES[:2].shape), ValueError, "out is float64"),
        "a list": ([], TypeError, "out must be a numpy array"),
        "read-only": (read_only, ValueError, "out is read-only"),
    }


@pytest.mark.parametrize("case", wrong_outs())
def test_an_out_that_does_not_fit_is_refused(cache: pk.PagedKVCache, case: str) -> None:
    out, error, message = wrong_outs()[case]
    cache.put(KEYS[:4], PAGES[:4])
    with unchanged(cache):
        with pytest.raises(error, match=message):
            cache.get(KEYS[:2], out=out)
        with pytest.raises(error, match=message):
            cache.load(KEYS[:2], out=out)


def test_plain_keys_of_several_specs_need_their_group() -> None:
    specs = make_spec(group="a"), make_spec(group="b")
    with pk.PagedKVCache(specs, 4) as cache, unchanged(cache):
        with pytest.raises(ValueError, match="give group="):
            cache.put(KEYS[:1], PAGES[:1])
        for group in (-1, 2):
            with pytest.raises(ValueError, match=f"group is {group}: the cache has specs 0..1"):
                cache.put(KEYS[:1], PAGES[:1], group=group)


@pytest.mark.parametrize("tokens", [[-1] * 4, [2**31], [0.5], [[1, 2]], 5, "text"])
def test_tokens_that_are_none_are_refused(cache: pk.PagedKVCache, tokens: Any) -> None:
    with unchanged(cache), pytest.raises(ValueError, match="token"):
        cache.open_sequence(tokens)


def test_extra_that_does_not_cover_the_prompt_is_refused(cache: pk.PagedKVCache) -> None:
    with unchanged(cache), pytest.raises(ValueError, match="extra names 1 pages.* fill 2"):
        cache.open_sequence(range(8), extra=[b"x"])


def calls_on(cache: pk.PagedKVCache) -> list[Callable[[], Any]]:
    return [
        lambda: cache.put(KEYS[:1], PAGES[:1]),
        lambda: cache.get(KEYS[:1]),
        lambda: cache.match(KEYS[:1]),
        lambda: cache.load(KEYS[:1]),
        lambda: cache.acquire(KEYS[:1]).__enter__(),
        cache.open_sequence,
        cache.flush,
        cache.stats,
        cache.__enter__,
    ]


@pytest.mark.parametrize("has_store", [False, True])
def test_a_closed_cache_refuses_everything(path: Path, has_store: bool) -> None:
    cache = open_cache(path) if has_store else pk.PagedKVCache(SPEC, 2)
    sequence = cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    cache.close()
    cache.close()
    assert cache.is_closed
    assert "closed" in repr(cache)
    for call in calls_on(cache):
        with pytest.raises(pk.ClosedError, match="the cache is closed"):
            call()
    for call in (
        lambda: sequence.append(*make_kv(SPEC, 1)),
        sequence.fork,
        lambda: sequence.commit([]),
        lambda: sequence.truncate(0),
        lambda: sequence.gather(0).__enter__(),
    ):
        with pytest.raises(pk.ClosedError, match="the cache is closed"):
            call()
    sequence.close()
    if has_store:
        assert cache.store is not None
        with pytest.raises(pk.ClosedError):
            cache.store.find(KEYS[0])
        pk.PageStore.open(path, SPEC).close()


FORKED = """
    import os, sys, threading
    import numpy as np
    import pagedkv as pk

    spec = pk.KVSpec(
        num_layers=1, num_kv_heads=1, head_dim=2, page_tokens=4, dtype="float32", model="m"
    )
    store = pk.PageStore.open(sys.argv[1], spec)
    cache = pk.PagedKVCache(spec, 2, store)
    key, pages = [b"k" * 32], np.ones((1, 1, 2, 4, 1, 2), np.float32)
    kv = np.ones((1, 3, 1, 2), np.float32)
    cache.put(key, pages)
    cache.load(key).result()
    sequence = cache.open_sequence()
    sequence.append(kv, kv)
    calls = {
        "put": lambda: cache.put(key, pages),
        "get": lambda: cache.get(key),
        "match": lambda: cache.match(key),
        "load": lambda: cache.load(key),
        "acquire": lambda: cache.acquire(key).__enter__(),
        "open_sequence": lambda: cache.open_sequence(),
        "flush": lambda: cache.flush(),
        "stats": lambda: cache.stats(),
        "close": lambda: cache.close(),
        "append": lambda: sequence.append(kv, kv),
        "append_layer": lambda: sequence.append_layer(0, kv[0], kv[0]),
        "gather": lambda: sequence.gather(0).__enter__(),
        "commit": lambda: sequence.commit([1]),
        "save": lambda: sequence.save(),
        "fork": lambda: sequence.fork(),
        "truncate": lambda: sequence.truncate(0),
        "find": lambda: store.find(key[0]),
    }
    taken, done = threading.Event(), threading.Event()

    def hold_the_lock():
        with cache._lock:
            taken.set()
            done.wait(60)

    if sys.argv[2] == "locked":
        thread = threading.Thread(target=hold_the_lock)
        thread.start()
        taken.wait(60)
    child = os.fork()
    if child == 0:
        wrong = []
        for name, call in calls.items():
            try:
                call()
                wrong.append(name)
            except pk.ClosedError:
                pass
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
        try:
            sequence.close()
        except pk.ClosedError:
            pass
        if wrong:
            print(wrong, flush=True)
        os._exit(bool(wrong))
    _, status = os.waitpid(child, 0)
    done.set()
    assert status == 0, status
    with sequence.gather(0) as (k, _):
        assert (k == 1).all() and len(k) == 3
    assert (cache.get(key) == 1).all()
    cache.close()
    pk.PageStore.open(sys.argv[1], spec).close()
    print("fine")
"""


@pytest.mark.parametrize("lock", ["free", "locked"])
def test_in_a_forked_child_every_call_is_refused_and_the_parent_goes_on(
    path: Path, lock: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), str(path), lock],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.strip() == "fine", run.stdout + run.stderr
    assert run.returncode == 0


def test_repr_tells_slots_and_store(path: Path, cache: pk.PagedKVCache) -> None:
    assert "2 slots" in repr(cache)
    assert str(path) in repr(cache)


def test_leaving_with_an_error_closes_the_cache(path: Path) -> None:
    with pytest.raises(KeyError), open_cache(path) as cache:
        cache.put(KEYS[:1], PAGES[:1])
        raise KeyError
    assert cache.is_closed
    with open_cache(path) as cache:
        assert cache.match(KEYS[:1]) == 1


def test_a_second_cache_on_the_same_store_is_told_who_holds_it(path: Path) -> None:
    with open_cache(path), pytest.raises(pk.StoreLockedError, match=str(os.getpid())):
        pk.PageStore.open(path, SPEC)


def test_state_of_sees_what_changes(cache: pk.PagedKVCache) -> None:
    sequence = cache.open_sequence()
    before = state_of(cache, sequence)
    assert before == state_of(cache, sequence)
    sequence.append(*make_kv(SPEC, 1))
    assert before != state_of(cache, sequence)


def test_a_damaged_prefix_is_recomputed_once_and_found_again(path: Path) -> None:
    ids = np.arange(40)
    k, v = make_kv(SPEC, 40)

    def run() -> tuple[int, Mapping[str, int]]:
        """Reuse, compute the rest, name it, and look at all of it; tokens reused, and misses."""
        with open_cache(path, 2) as cache, cache.open_sequence(ids) as sequence:
            reused = sequence.num_tokens
            if reused < 40:
                sequence.append(k[:, reused:], v[:, reused:])
                sequence.commit(ids)
            for layer in range(2):
                with sequence.gather(layer) as (keys, values):
                    assert (bits(keys), bits(values)) == (bits(k[layer]), bits(v[layer]))
            return reused, cache.stats().misses_by_reason

    assert run()[0] == 0
    assert run() == (40, {})
    segment = min((path / "lane-0000" / "group-0" / "kv").glob("c.*"))
    damaged = bytearray(segment.read_bytes())
    damaged[0] ^= 1  # some page of the prefix: found when it is opened, not in the middle of it
    segment.write_bytes(damaged)
    reused, misses = run()
    assert reused < 40
    assert misses["corrupt"] >= 1
    assert run() == (40, {})
