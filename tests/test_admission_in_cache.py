"""What leaves the pool and is not admitted is not written; what a caller was promised is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import make_key, make_pages, make_spec

import pagedkv as pk

SPEC = make_spec(page_tokens=4)


class AdmitSome:
    """Admits the keys that it is told, and remembers what was requested."""

    name = "some"

    def __init__(self, admitted: set[Any]) -> None:
        self.admitted = admitted
        self.requests: list[list[Any]] = []
        self.num_slots = 0

    def __deepcopy__(self, memo: object) -> "AdmitSome":
        return self

    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def note(self, keys: Any) -> None:
        self.requests.append(list(keys))

    def admits(self, key: Any) -> bool:
        return key in self.admitted


def kv(num_tokens: int) -> Any:
    return np.zeros((SPEC.num_layers, num_tokens, SPEC.num_kv_heads, SPEC.head_dim), SPEC.np_dtype)


def make_cache(path: Path, admission: Any, num_slots: int = 4, **options: Any) -> pk.PagedKVCache:
    store = pk.PageStore.open(path / "cache.zarr", SPEC)
    return pk.PagedKVCache(SPEC, num_slots, store, admission=admission, **options)


def test_only_admitted_pages_are_written_when_they_leave(tmp_path: Path) -> None:
    keys, pages = [make_key(n) for n in range(40)], make_pages(SPEC, range(40))
    admission = AdmitSome(set(keys[::3]))
    with make_cache(tmp_path, admission) as cache:
        for n in range(40):
            cache.put(keys[n : n + 1], pages[n : n + 1])
        store = cache.store
        assert store is not None
        stats = cache.stats()
        left = list(range(36))
        assert [n for n in left if store.find(keys[n])] == left[::3]
        assert stats.num_pages_refused == stats.num_pages_dropped == 24
        assert stats.num_pages_stored >= 12
        np.testing.assert_array_equal(cache.get(keys[3:4]), pages[3:4])
        cache.check_invariants()
    assert admission.num_slots > 4


def test_flush_and_close_write_what_is_in_the_pool(tmp_path: Path) -> None:
    keys, pages = [make_key(n) for n in range(5)], make_pages(SPEC, range(5))
    with make_cache(tmp_path, AdmitSome(set())) as cache:
        cache.put(keys[:2], pages[:2])
        cache.flush()
        cache.put(keys[2:4], pages[2:4])
    with pk.PageStore.open(tmp_path / "cache.zarr", mode="r") as store:
        assert [store.find(key) is not None for key in keys] == [True] * 4 + [False]


def test_pages_of_a_live_sequence_are_never_refused(tmp_path: Path) -> None:
    tokens = [*range(40)]
    with make_cache(tmp_path, AdmitSome(set())) as cache, cache.open_sequence(tokens) as sequence:
        values = np.random.default_rng(3).random(kv(40).shape).astype(SPEC.np_dtype)
        sequence.append(values, values, tokens)
        with sequence.gather(0) as (k, _):
            np.testing.assert_array_equal(k, values[0])
        assert cache.stats().num_pages_refused == 0


def test_requests_are_noted_once_with_all_their_pages(tmp_path: Path) -> None:
    tokens = [*range(10)]
    keys = list(pk.page_keys(SPEC, tokens))
    admission = AdmitSome(set())
    with make_cache(tmp_path, admission) as cache:
        with cache.open_sequence(tokens) as sequence:
            sequence.append(kv(10), kv(10), tokens)
        cache.get(keys)
        with cache.acquire([*keys, make_key(9)]):
            pass
        cache.put([make_key(9)], make_pages(SPEC, [9]))
    assert admission.requests == [keys, keys, keys, [make_key(9)]]


@pytest.mark.parametrize("admission", [pk.AdmitSeenTwice(), pk.AdmitLikely(), pk.AdmitAll()])
def test_a_scan_is_spared_and_what_returns_is_kept(tmp_path: Path, admission: Any) -> None:
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(0, 1000, 8)] for _ in range(6)]
    once = iter(range(10**6, 10**7))
    with make_cache(tmp_path, admission, 8) as cache:
        for number in range(300):
            tokens = prompts[number % 6] if number % 2 else [next(once) for _ in range(8)]
            with cache.open_sequence(tokens) as sequence:
                held = sequence.num_tokens
                if held < 8:
                    sequence.append(kv(8 - held), kv(8 - held), tokens[held:])
        stats = cache.stats()
    assert stats.num_store_hits > 200
    if isinstance(admission, pk.AdmitAll):
        assert stats.num_pages_refused == 0
        assert stats.num_pages_stored > 280
    else:
        assert stats.num_pages_refused > 150
        assert stats.num_pages_stored < 140


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="class AdmitLikely: give an object"):
        pk.PagedKVCache(SPEC, 2, admission=pk.AdmitLikely)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'likely': give an object, .* lacks name, start, note"):
        pk.PagedKVCache(SPEC, 2, admission="likely")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write-through"):
        pk.PagedKVCache(SPEC, 2, admission=pk.AdmitLikely(), write_policy="write-through")
