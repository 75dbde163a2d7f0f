"""Why a prompt hits as far as it does in a cache that is in use."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from kv_samples import make_key, make_kv, make_pages, make_spec, unchanged, wait_for_writers

from pagedkv import (
    FIFO,
    ClosedError,
    PagedKVCache,
    PageNotFoundError,
    PageStore,
    StopReason,
    live_explain,
    page_keys,
)
from pagedkv import format as fmt
from pagedkv.dropped import MAX_DROPPED
from pagedkv.explain import explain_prefix
from pagedkv.explanation import Tier

SPEC = make_spec()
TOKENS = np.arange(24)
"""Six pages of four tokens."""
KEYS = page_keys(SPEC, TOKENS)
PAGES = make_pages(SPEC, range(6))


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 2)


def open_cache(tmp_path: Path, num_slots: int = 16) -> PagedKVCache:
    return PagedKVCache(SPEC, num_slots, PageStore.open(tmp_path / "cache.zarr", SPEC))


def test_pages_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with PagedKVCache(SPEC, 8) as cache:
        cache.put(KEYS[:4], PAGES[:4])
        with unchanged(cache):
            found = cache.explain(TOKENS)
            hits = cache.stats()
            cache.explain(TOKENS)
            assert cache.stats() == hits
        assert (found.reason, found.num_pages, found.stop_page) == (StopReason.NEVER_WRITTEN, 4, 4)
        assert found.groups[0].num_pool_pages == 4
        assert found.store is None
        assert cache.explain(TOKENS[:16]).reason is StopReason.COMPLETE
        assert cache.explain(TOKENS[:3]).reason is StopReason.TOO_SHORT
        assert cache.explain(TOKENS, salt=b"tenant").num_pages == 0


def test_a_page_that_the_pool_dropped() -> None:
    before = time.time_ns()
    with PagedKVCache(SPEC, 6, policy=FIFO()) as cache:
        cache.put(KEYS, PAGES)
        other = page_keys(SPEC, TOKENS[:8] + 50)
        cache.put(other, PAGES[:2])
        found = cache.explain(TOKENS)
        (group,) = found.groups
        assert (found.reason, found.num_pages) == (StopReason.EVICTED, 4)
        assert group.eviction is not None
        assert before <= group.eviction.time_ns <= time.time_ns()
        assert (group.eviction.tier, group.eviction.policy) == (Tier.POOL, "fifo")
        assert "left the pool" in str(found)


def test_what_the_pool_has_forgotten_is_not_said_to_be_certain() -> None:
    with PagedKVCache(SPEC, 6) as cache:
        cache.put(KEYS[:1], PAGES[:1])
        for number in range(MAX_DROPPED + 4):
            cache.put([make_key(number)], PAGES[:1])
        found = cache.explain(TOKENS + 50)
        assert found.groups[0].notes == ()
        assert "because: the page was never written" in str(found)
        assert cache.explain(TOKENS).reason is StopReason.EVICTED
        for number in range(2):
            cache.put([make_key(10_000 + number)], PAGES[:1])
        found = cache.explain(TOKENS)
        assert found.reason is StopReason.NEVER_WRITTEN
        assert found.groups[0].notes == ("the pool remembers the last 1,024 that it dropped",)
        assert "because: as far as can be told (see the notes), the page was never" in str(found)


def test_pages_by_tier(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(KEYS[:4], PAGES[:4])
    with open_cache(tmp_path, 2) as cache:
        cache.get(KEYS[:1])
        found = cache.explain(TOKENS)
        (group,) = found.groups
        assert (group.num_pool_pages, group.num_store_pages, group.num_pages) == (1, 3, 4)
        assert found.store == str(tmp_path / "cache.zarr")
        assert found.reason is StopReason.NEVER_WRITTEN


def test_pages_that_live_sequences_spilled(tmp_path: Path) -> None:
    with PagedKVCache(
        SPEC, 2, PageStore.open(tmp_path / "cache.zarr", SPEC, codec="int8")
    ) as cache:
        with cache.open_sequence() as seq:
            seq.append(*make_kv(SPEC, 24), TOKENS)
            wait_for_writers(cache)
            found = cache.explain(TOKENS)
            (group,) = found.groups
            assert found.reason is StopReason.COMPLETE
            assert group.num_pool_pages + group.num_spill_pages + group.num_store_pages == 6
            assert group.num_spill_pages + group.num_store_pages >= 4


def test_what_another_process_stored_is_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.zarr"
    with open_cache(tmp_path) as writer:
        store = PageStore.open(path, mode="r")
        with PagedKVCache(SPEC, 2, store) as cache:
            assert cache.explain(TOKENS).num_pages == 0
            writer.put(KEYS, PAGES)
            writer.flush()
            assert cache.explain(TOKENS).reason is StopReason.COMPLETE


def test_a_page_that_the_store_gave_up(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(KEYS, PAGES)
    with open_cache(tmp_path) as cache:
        assert cache.store is not None
        cache.store.collect("1KiB")
        found = cache.explain(TOKENS)
        assert found.reason is StopReason.EVICTED
        eviction = found.groups[0].eviction
        assert eviction is not None
        assert (eviction.tier, eviction.cause) == (Tier.STORE, "gc")


def test_a_damaged_page_before_and_after_it_is_forgotten(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(KEYS, PAGES)
        cache.flush()
    with open_cache(tmp_path) as cache:
        assert cache.store is not None
        row = cache.store.find(KEYS[3])
        assert row is not None
        name = fmt.chunk_name(row.row // 2, 6)
        chunk = tmp_path / "cache.zarr" / "lane-0000" / "group-0" / "kv" / name
        good = chunk.read_bytes()
        at = row.row % 2 * len(good) // 2 + 10
        chunk.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        found = cache.explain(TOKENS)
        assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 3)
        with cache.open_sequence(TOKENS) as seq:
            assert seq.num_tokens == found.num_found_tokens == 12  # no sibling shares more
        again = cache.explain(TOKENS)
        assert (again.reason, again.num_pages) == (StopReason.CORRUPT, 3)
        assert "CRC32C is wrong" in again.groups[0].detail
        assert again.groups[0].num_pages_behind == 2
        chunk.write_bytes(good)
        assert "it could not read it before" in cache.explain(TOKENS).groups[0].detail


def test_a_damaged_page_that_was_forgotten_and_then_given_up(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(KEYS, PAGES)
    with open_cache(tmp_path) as cache:
        assert cache.store is not None
        row = cache.store.find(KEYS[0])
        assert row is not None
        name = fmt.chunk_name(row.row // 2, 6)
        (tmp_path / "cache.zarr" / "lane-0000" / "group-0" / "kv" / name).write_bytes(b"")
        with pytest.raises(PageNotFoundError):
            cache.get(KEYS[:1])
        cache.store.collect("1KiB")
        found = cache.explain(TOKENS)
        assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 0)
        assert found.groups[0].eviction is not None
        assert found.groups[0].eviction.cause == "damaged"


def test_nothing_is_told_of_other_tenants(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(page_keys(SPEC, TOKENS, b"tenant"), PAGES)
        cache.put(page_keys(SPEC, TOKENS, extra=[b"lora"] * 6), PAGES)
        alone = cache.explain(TOKENS)
        cache.flush()
        for found in (alone, cache.explain(TOKENS)):
            (group,) = found.groups
            assert (found.reason, found.num_pages) == (StopReason.NEVER_WRITTEN, 0)
            assert (group.common_tokens, group.num_pages_elsewhere, group.detail) == (0, 0, "")
            assert group.notes == ()
    with open_cache(tmp_path) as cache:
        assert cache.explain(TOKENS) == found


def test_how_many_tokens_of_the_next_page_another_shares(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(KEYS[:2], PAGES[:2])
        for shared, end in ((1, 98), (3, 99)):
            ids = [*TOKENS[: 8 + shared], *[end] * (4 - shared)]
            cache.put(page_keys(SPEC, ids), PAGES[:3])
            assert cache.explain(TOKENS).groups[0].common_tokens == shared
        assert cache.explain(TOKENS[:10]).groups[0].common_tokens == 2
        assert cache.explain(TOKENS, extra=b"lora").groups[0].common_tokens == 0
    with open_cache(tmp_path) as cache:
        assert cache.explain(TOKENS).groups[0].common_tokens == 3


def test_a_page_that_one_layer_group_lacks() -> None:
    specs = [make_spec(group="full"), make_spec(group="window")]
    with PagedKVCache(specs, 8) as cache:
        for spec, count in zip(specs, (6, 4), strict=True):
            cache.put(page_keys(spec, TOKENS[: 4 * count]), PAGES[:count])
        found = cache.explain(TOKENS)
        assert (found.reason, found.num_pages) == (StopReason.MISSING_IN_GROUP, 4)
        assert [group.num_pages for group in found.groups] == [6, 4]


def test_a_prompt_in_the_pool_reads_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise AssertionError

    monkeypatch.setattr(live_explain, "read_store", fail)
    with open_cache(tmp_path) as cache:
        cache.put(KEYS, PAGES)
        assert cache.explain(TOKENS).reason is StopReason.COMPLETE


def test_it_says_what_opening_a_sequence_finds(tmp_path: Path) -> None:
    """Random prompts that share prefixes, in pool and store, dropped, given up and damaged."""
    rng = random.Random(7)
    prompts = [np.array([rng.randrange(2) for _ in range(26)]) for _ in range(12)]
    reasons = set()
    for trial in range(6):
        path = tmp_path / str(trial)
        for _ in range(2):
            with PagedKVCache(SPEC, 6, PageStore.open(path, SPEC)) as cache:
                for ids in rng.sample(prompts, 4):
                    keys = page_keys(SPEC, ids, rng.choice([b"", b"", b"tenant"]))
                    start = rng.choice([0, 0, 0, 3])
                    stop = rng.choice([len(keys), rng.randrange(start, len(keys))])
                    cache.put(keys[start:stop], make_pages(SPEC, range(start, stop)))
        with PagedKVCache(SPEC, 6, PageStore.open(path)) as cache:
            assert cache.store is not None
            if trial % 2:
                cache.store.collect(cache.store.nbytes - 2000)
            for chunk in sorted(path.glob("lane-*/group-*/kv/c.*")):
                if rng.random() < 0.2:
                    data = bytearray(chunk.read_bytes())
                    data[rng.randrange(40)] ^= 1
                    chunk.write_bytes(data)
            for ids in rng.choices(prompts, k=20):
                alone = explain_prefix(path, ids)
                found = cache.explain(ids)
                reasons.add(found.reason)
                assert alone.num_pages <= found.num_pages
                with cache.open_sequence(ids) as sequence:
                    assert sequence.num_tokens // 4 == found.num_pages
                again = cache.explain(ids)
                assert (again.num_pages, again.reason) == (found.num_pages, found.reason)
    wanted = {StopReason.NEVER_WRITTEN, StopReason.EVICTED, StopReason.CORRUPT, StopReason.COMPLETE}
    assert reasons == wanted


def test_bad_arguments() -> None:
    with PagedKVCache(SPEC, 8) as cache:
        with pytest.raises(ValueError, match="they must be in 0"):
            cache.explain([-1])
        with pytest.raises(ValueError, match="extra names 1 pages, but the tokens fill 6"):
            cache.explain(TOKENS, extra=[b""])
        with pytest.raises(TypeError, match="salt is 'x'"):
            cache.explain(TOKENS, salt="x")  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        cache.explain(TOKENS)
