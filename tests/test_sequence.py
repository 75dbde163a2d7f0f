"""Sequences: what they hold comes back exactly, wherever it was meanwhile."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import Array, bits, make_kv, make_spec, unchanged
from test_attention import reference

from pagedkv import (
    ClosedError,
    KVSpec,
    PagedKVCache,
    PageStore,
    PoolExhaustedError,
    Sequence,
    StoreError,
    page_keys,
)

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()


@pytest.fixture(params=[1, 6], ids=lambda n: f"{n} slots")
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PagedKVCache]:
    """A cache with a store; with few slots most of what it holds is on disk."""
    store = PageStore.open(tmp_path / "cache.zarr", SPEC)
    with PagedKVCache(SPEC, request.param, store) as cache:
        yield cache


@pytest.fixture
def small_cache(tmp_path: Path) -> Iterator[PagedKVCache]:
    """A cache with a store and two slots."""
    with PagedKVCache(SPEC, 2, PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        yield cache


@pytest.fixture
def memory_cache() -> Iterator[PagedKVCache]:
    """A cache without a store."""
    with PagedKVCache(SPEC, 6) as cache:
        yield cache


def check(sequence: Sequence, k: Array, v: Array) -> None:
    """The sequence holds exactly these ``(layer, token, head, channel)``."""
    assert sequence.num_tokens == k.shape[1]
    for layer in range(k.shape[0]):
        with sequence.gather(layer) as (got_k, got_v):
            assert bits(got_k) == bits(k[layer])
            assert bits(got_v) == bits(v[layer])


def joined(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    k, v = zip(*parts, strict=True)
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


def cut(kv: tuple[Array, Array], start: int, stop: int) -> tuple[Array, Array]:
    return kv[0][:, start:stop], kv[1][:, start:stop]


# -- append and gather -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_bits_come_back(tmp_path: Path, dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    rng = np.random.default_rng(0)
    raw = rng.bytes(2 * 2 * 30 * 2 * spec.np_dtype.itemsize)  # NaN and infinity among them
    k, v = np.frombuffer(raw, spec.np_dtype).reshape(2, 2, 30, 1, 2)
    with PagedKVCache(spec, 2, PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v)
        check(sequence, k, v)
        sequence.commit(range(30))
        check(sequence, k, v)


def test_token_by_token_is_the_same_as_at_once(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 23)
    with cache.open_sequence() as sequence:
        for at in range(23):
            sequence.append(k[:, at : at + 1], v[:, at : at + 1])
            check(sequence, k[:, : at + 1], v[:, : at + 1])
        assert sequence.num_pages == 6


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 11), max_size=8), num_slots=st.integers(1, 4))
def test_pieces_of_any_size_are_put_together(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_slots: int
) -> None:
    k, v = make_kv(SPEC, sum(sizes))
    path = tmp_path_factory.mktemp("pieces") / "cache.zarr"
    with PagedKVCache(SPEC, num_slots, PageStore.open(path, SPEC)) as cache:
        sequence = cache.open_sequence()
        start = 0
        for size in sizes:
            sequence.append(k[:, start : start + size], v[:, start : start + size])
            start += size
        check(sequence, k, v)
        cache.check_invariants()


def test_layers_may_run_ahead_of_each_other(small_cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 19)
    with small_cache.open_sequence() as sequence:
        sequence.append_layer(0, k[0, :19], v[0, :19])
        assert sequence.num_tokens == 0
        sequence.append_layer(1, k[1, :3], v[1, :3])
        assert sequence.num_tokens == 3
        with sequence.gather(0) as (got, _):
            assert bits(got) == bits(k[0])
        with sequence.gather(1) as (got, _):
            assert bits(got) == bits(k[1, :3])
        with unchanged(small_cache, sequence):
            for refused in (sequence.fork, sequence.save, lambda: sequence.append(k, v)):
                with pytest.raises(ValueError, match="layer 1 holds 3 and another 19"):
                    refused()
            with pytest.raises(ValueError, match="4 token ids.*holds 3 tokens"):
                sequence.commit(range(4))
        sequence.append_layer(1, k[1, 3:], v[1, 3:])
        check(sequence, k, v)


def test_a_prompt_longer_than_the_pool_can_be_appended_at_once(tmp_path: Path) -> None:
    k, v = make_kv(SPEC, 200)
    with PagedKVCache(SPEC, 2, PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        sequence = cache.open_sequence()
        for layer in range(2):
            sequence.append_layer(layer, k[layer], v[layer])
        check(sequence, k, v)
        stats = cache.stats()
        assert stats.num_slices_spilled > 0
        assert stats.num_slices_loaded > 0
        assert stats.pool_nbytes == 2 * SPEC.page_nbytes


def test_gather_of_the_first_tokens_only(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 13)
    with cache.open_sequence() as sequence:
        sequence.append(k, v)
        for count in range(14):
            with sequence.gather(1, count) as (got_k, got_v):
                assert bits(got_k) == bits(k[1, :count])
                assert got_v.shape == (count, 1, 2)


def test_gather_from_any_token_on(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 13)
    with cache.open_sequence() as sequence:
        sequence.append(k, v)
        for start, stop in itertools.combinations_with_replacement(range(14), 2):
            with sequence.gather(1, stop, start) as (got_k, got_v):
                assert got_k.shape == got_v.shape == (stop - start, 1, 2)
                assert bits(got_k) == bits(k[1, start:stop])
                assert bits(got_v) == bits(v[1, start:stop])


def test_gather_brings_only_the_pages_that_are_asked_for(small_cache: PagedKVCache) -> None:
    with small_cache.open_sequence() as sequence:
        sequence.append(*make_kv(SPEC, 40))
        before = small_cache.stats().num_slices_loaded
        with sequence.gather(0, 30, 13):  # pages 3 to 7
            assert small_cache.stats().num_slices_loaded - before == 5


def test_gather_is_a_view_where_pages_lie_one_behind_the_other(memory_cache: PagedKVCache) -> None:
    sequence = memory_cache.open_sequence()
    for seed in range(15):
        sequence.append(*make_kv(SPEC, 1, seed))
    for start in (0, 4, 6):
        with sequence.gather(0, start=start) as kinds:
            for kind in kinds:
                assert len(kind) == 15 - start
                assert np.shares_memory(kind, memory_cache._groups[0].places.pool.array)
    assert memory_cache.stats().num_slices_loaded == 0


def test_nobody_can_write_into_what_gather_gives(cache: PagedKVCache) -> None:
    with cache.open_sequence() as sequence:
        for count in (1, 12):
            sequence.append(*make_kv(SPEC, count))
            with sequence.gather(0) as kinds:
                for kind in kinds:
                    with pytest.raises(ValueError, match="read-only"):
                        kind[...] = 0


def test_nested_gathers_do_not_disturb_each_other(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 13)
    other_k, other_v = make_kv(SPEC, 13, seed=1)
    one, other = cache.open_sequence(), cache.open_sequence()
    one.append(k, v)
    other.append(other_k, other_v)
    with one.gather(0) as (a, _), one.gather(1) as (b, _), other.gather(0) as (c, _):
        assert [bits(x) for x in (a, b, c)] == [bits(x) for x in (k[0], k[1], other_k[0])]
        with one.gather(0, 5) as (d, _):
            assert bits(d) == bits(k[0, :5])
        assert bits(a) == bits(k[0])
    assert cache.stats().num_pinned_slots == 0


def test_what_is_gathered_stays_while_the_sequence_goes_on(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 6)
    sequence = cache.open_sequence()
    sequence.append(k, v)
    with sequence.gather(0) as (got, _):
        sequence.append(*make_kv(SPEC, 9, seed=1))
        assert bits(got) == bits(k[0])
        sequence.truncate(2)
        sequence.append(*make_kv(SPEC, 1, seed=2))
        sequence.close()
        other = cache.open_sequence()
        other.append(*make_kv(SPEC, 3, seed=3))
        if cache.num_slots > 1:  # with one slot, the view's own page was cut and written anew
            assert bits(got[:2]) == bits(k[0, :2])
    cache.check_invariants()
    assert cache.stats().num_pinned_slots == 0


def test_an_error_inside_gather_gives_the_pins_back(memory_cache: PagedKVCache) -> None:
    sequence = memory_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    with pytest.raises(KeyError), sequence.gather(0):
        assert memory_cache.stats().num_pinned_slots == 1
        raise KeyError
    assert memory_cache.stats().num_pinned_slots == 0


def test_a_single_kind_has_no_values(tmp_path: Path) -> None:
    spec = make_spec(num_kinds=1)
    k, _ = make_kv(spec, 11)
    with PagedKVCache(spec, 2, PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        sequence = cache.open_sequence()
        sequence.append(k)
        sequence.append_layer(0, k[0])
        with sequence.gather(1) as kinds:
            assert len(kinds) == 1
            assert bits(kinds[0]) == bits(k[1])
        with pytest.raises(ValueError, match="v was given"):
            sequence.append_layer(0, k[0], k[0])
        with pytest.raises(ValueError, match="num_kinds 1"):
            sequence.attend(0, np.zeros((1, 1, 2), np.float32))


def test_a_part_of_the_layers_and_heads_is_numbered_from_zero(memory_cache: PagedKVCache) -> None:
    spec = make_spec(num_layers=6, num_kv_heads=4, layer_range=(2, 4), head_range=(1, 2))
    with PagedKVCache(spec, 4) as cache:
        k, v = make_kv(spec, 5)
        assert k.shape == (2, 5, 1, 2)
        sequence = cache.open_sequence()
        sequence.append(k, v)
        check(sequence, k, v)
        assert cache.num_layers == 2


# -- several groups --------------------------------------------------------------------------


def two_specs() -> tuple[KVSpec, KVSpec]:
    return make_spec(group="full"), make_spec(group="window", num_layers=3, head_dim=4)


def test_two_groups_have_shapes_of_their_own(tmp_path: Path) -> None:
    specs = two_specs()
    kvs = [make_kv(spec, 21, seed) for seed, spec in enumerate(specs)]
    store = PageStore.open(tmp_path / "cache.zarr", specs)
    with PagedKVCache(specs, [1, 2], store) as cache:
        assert (cache.num_layers, cache.num_slots) == (5, 3)
        sequence = cache.open_sequence()
        sequence.append([k for k, _ in kvs], [v for _, v in kvs], range(21))
        for layer in range(5):
            k, v = kvs[layer >= 2]
            local = layer - 2 * (layer >= 2)
            with sequence.gather(layer) as (got_k, got_v):
                assert bits(got_k) == bits(k[local])
                assert bits(got_v) == bits(v[local])
        sequence.save()
        sequence.close()
        with cache.open_sequence(range(21)) as again:
            assert again.num_tokens == 21
            with again.gather(4) as (got_k, _):
                assert bits(got_k) == bits(kvs[1][0][2])


def test_groups_share_only_what_all_of_them_hold(tmp_path: Path) -> None:
    specs = two_specs()
    kvs = [make_kv(spec, 12, seed) for seed, spec in enumerate(specs)]
    store = PageStore.open(tmp_path / "cache.zarr", specs)
    with PagedKVCache(specs, 4, store) as cache:
        k, v = kvs[0]
        pages = np.stack([k, v], axis=1).reshape(2, 2, 3, 4, 1, 2).transpose(2, 0, 1, 3, 4, 5)
        cache.put(page_keys(specs[0], range(12)), pages)
        k, v = kvs[1]
        pages = np.stack([k, v], axis=1).reshape(3, 2, 3, 4, 1, 4).transpose(2, 0, 1, 3, 4, 5)
        cache.put(page_keys(specs[1], range(8)), pages[:2])
        with cache.open_sequence(range(12)) as sequence:
            assert sequence.num_tokens == 8
        cache.check_invariants()
        assert cache.stats().num_pages_held == 0


@pytest.mark.parametrize("wrong", ["one array", "one spec less", "uneven counts", "swapped"])
def test_two_groups_refuse_arrays_that_do_not_fit(wrong: str) -> None:
    specs = two_specs()
    (k0, v0), (k1, v1) = (make_kv(spec, 5) for spec in specs)
    arguments: dict[str, Any] = {
        "one array": (k0, v0),
        "one spec less": ([k0], [v0]),
        "uneven counts": ([k0, k1[:, :4]], [v0, v1[:, :4]]),
        "swapped": ([k1, k0], [v1, v0]),
    }
    with PagedKVCache(specs, 4) as cache:
        sequence = cache.open_sequence()
        sequence.append([k0, k1], [v0, v1])
        with unchanged(cache, sequence), pytest.raises(ValueError, match=r"shape|give 2|different"):
            sequence.append(*arguments[wrong])


def test_a_group_that_has_no_room_leaves_the_others_as_they_were() -> None:
    specs = two_specs()
    (k0, v0), (k1, v1) = (make_kv(spec, 9) for spec in specs)
    with PagedKVCache(specs, [8, 2]) as cache:
        sequence = cache.open_sequence()
        sequence.append([k0[:, :5], k1[:, :5]], [v0[:, :5], v1[:, :5]])
        with unchanged(cache, sequence), pytest.raises(PoolExhaustedError):
            sequence.append([k0, k1], [v0, v1])


# -- commit and sharing ----------------------------------------------------------------------


def test_a_committed_prefix_is_reused(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 14)
    with cache.open_sequence() as sequence:
        sequence.append(k, v, range(14))
    with cache.open_sequence(range(14)) as again:
        assert again.num_tokens == 12
        check(again, k[:, :12], v[:, :12])
        assert again.tokens.tolist() == list(range(12))
        again.append(k[:, 12:], v[:, 12:], [12, 13])
        check(again, k, v)
    with cache.open_sequence([*range(8), 99, 99, 99, 99]) as branch:
        assert branch.num_tokens == 8
    with cache.open_sequence([99, *range(1, 14)]) as other:
        assert other.num_tokens == 0


def test_shared_pages_take_one_slot(memory_cache: PagedKVCache) -> None:
    first = memory_cache.open_sequence()
    first.append(*make_kv(SPEC, 12), range(12))
    others = [memory_cache.open_sequence(range(12)) for _ in range(3)]
    stats = memory_cache.stats()
    assert stats.num_pages_held == 3
    assert stats.num_slots - stats.num_free_slots == 3
    assert stats.num_pool_hits == 9
    for other in others:
        other.close()
    first.close()


def test_equal_pages_become_one_at_commit(memory_cache: PagedKVCache) -> None:
    kv = make_kv(SPEC, 8)
    one, other = memory_cache.open_sequence(), memory_cache.open_sequence()
    one.append(*kv)
    other.append(*kv)
    assert memory_cache.stats().num_free_slots == 2
    one.commit(range(8))
    other.commit(range(8))
    assert memory_cache.stats().num_free_slots == 4
    check(other, *kv)


def test_other_bytes_for_the_same_tokens_stay_private(cache: PagedKVCache) -> None:
    first_kv, other_kv = make_kv(SPEC, 8), make_kv(SPEC, 8, seed=1)
    one, other = cache.open_sequence(), cache.open_sequence()
    one.append(*first_kv, range(8))
    other.append(*other_kv, range(8))
    check(one, *first_kv)
    check(other, *other_kv)
    with cache.open_sequence(range(8)) as third:
        check(third, *first_kv)
    one.close()
    check(other, *other_kv)
    with cache.open_sequence(range(8)) as third:
        check(third, *first_kv)


def test_commit_by_parts_is_the_same_as_at_once(cache: PagedKVCache) -> None:
    kv = make_kv(SPEC, 15)
    with cache.open_sequence() as sequence:
        sequence.append(*kv)
        for count in (0, 3, 4, 3, 9, 15, 15):
            sequence.commit(range(count))
        assert sequence.tokens.tolist() == list(range(15))
        assert cache.match(page_keys(SPEC, range(15))) == 3


def test_commit_of_fewer_ids_than_before_forgets_none(cache: PagedKVCache) -> None:
    with cache.open_sequence() as sequence:
        sequence.append(*make_kv(SPEC, 9), range(9))
        sequence.commit(range(2))
        assert sequence.tokens.tolist() == list(range(9))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(10), "10 token ids.*holds 9 tokens"),
        ([0, 1, 5], "token 2 was named 2 before and is 5 now"),
        ([[0, 1]], r"tokens have shape \(1, 2\)"),
        ([0.5], "tokens are float64"),
        ([-1], "-1"),
    ],
)
def test_ids_that_contradict_are_refused(small_cache: PagedKVCache, ids: Any, message: str) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 9), range(9))
    with unchanged(small_cache, sequence), pytest.raises(ValueError, match=message):
        sequence.commit(ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(4), "4 token ids were given for 5 tokens"),
        (range(6), "6 token ids were given for 5 tokens"),
        ([0, 1, 2, 3, -4], "-4"),
        (["a"] * 5, "tokens are"),
    ],
)
def test_append_with_ids_that_do_not_fit_writes_nothing(
    small_cache: PagedKVCache, ids: Any, message: str
) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3), range(3))
    with unchanged(small_cache, sequence), pytest.raises(ValueError, match=message):
        sequence.append(*make_kv(SPEC, 5), ids)


def test_append_with_ids_behind_unnamed_tokens_is_refused(small_cache: PagedKVCache) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    with (
        unchanged(small_cache, sequence),
        pytest.raises(ValueError, match="only 0 of the 3 tokens"),
    ):
        sequence.append(*make_kv(SPEC, 1), [0])


def test_salt_and_extra_keep_sequences_apart(cache: PagedKVCache) -> None:
    for salt, extra in [(b"", None), (b"tenant", None), (b"", b"lora")]:
        with cache.open_sequence(salt=salt, extra=extra) as sequence:
            sequence.append(*make_kv(SPEC, 4, seed=len(salt)), range(4))
    for salt, extra, found in [
        (b"", None, 4),
        (b"tenant", None, 4),
        (b"other", None, 0),
        (b"", b"lora", 4),
        (b"", [b"lora"], 4),
        (b"", b"image", 0),
        (b"tenant", b"lora", 0),
    ]:
        with cache.open_sequence(range(4), salt=salt, extra=extra) as sequence:
            assert sequence.num_tokens == found


def test_extra_for_each_page_ends_where_its_list_does(small_cache: PagedKVCache) -> None:
    sequence = small_cache.open_sequence(extra=[b"a", b"b"])
    sequence.append(*make_kv(SPEC, 11), range(11))
    with (
        unchanged(small_cache, sequence),
        pytest.raises(ValueError, match="extra names 2 pages, but 3"),
    ):
        sequence.append(*make_kv(SPEC, 1), [11])
    sequence.close()
    with small_cache.open_sequence(range(8), extra=[b"a", b"x"]) as again:
        assert again.num_tokens == 4


@pytest.mark.parametrize("tokens", [(), range(8)])
@pytest.mark.parametrize(
    "wrong",
    [
        {"salt": "tenant"},
        {"salt": 5},
        {"salt": None},
        {"extra": "lora"},
        {"extra": ["a", "b"]},
        {"extra": [b"a", None]},
        {"extra": 5},
        {"extra": bytearray(b"lora")},
    ],
)
def test_a_salt_or_extra_of_another_type_is_refused_at_once(
    memory_cache: PagedKVCache, wrong: dict[str, Any], tokens: Any
) -> None:
    (name,) = wrong
    with unchanged(memory_cache), pytest.raises(TypeError, match=name):
        memory_cache.open_sequence(tokens, **wrong)


# -- fork and truncate -----------------------------------------------------------------------


def test_forks_write_apart(cache: PagedKVCache) -> None:
    base = make_kv(SPEC, 10)
    parent = cache.open_sequence()
    parent.append(*base)
    children = [parent.fork() for _ in range(3)]
    added = [make_kv(SPEC, 7, seed) for seed in (1, 2, 3)]
    for child, kv in zip(children, added, strict=True):
        child.append(*kv)
    own = make_kv(SPEC, 1, seed=9)
    parent.append(*own)
    check(parent, *joined(base, own))
    for child, kv in zip(children, added, strict=True):
        check(child, *joined(base, kv))
    parent.close()
    for child, kv in zip(children, added, strict=True):
        check(child, *joined(base, kv))
        child.close()
    cache.check_invariants()
    assert cache.stats().num_pages_held == 0


def test_a_fork_shares_pages_until_it_writes(memory_cache: PagedKVCache) -> None:
    parent = memory_cache.open_sequence()
    parent.append(*make_kv(SPEC, 10))
    child = parent.fork()
    assert memory_cache.stats().num_pages_held == 3
    child.append(*make_kv(SPEC, 1))
    assert memory_cache.stats().num_pages_held == 4
    parent.append(*make_kv(SPEC, 1))  # the last holder of its tail need not copy it
    assert memory_cache.stats().num_pages_held == 4


@pytest.mark.parametrize("count", range(11))
def test_truncate_keeps_the_first_tokens(small_cache: PagedKVCache, count: int) -> None:
    base, more = make_kv(SPEC, 10), make_kv(SPEC, 9, seed=1)
    sequence = small_cache.open_sequence()
    sequence.append(*base, range(10))
    child = sequence.fork()
    sequence.truncate(count)
    check(sequence, *cut(base, 0, count))
    assert sequence.tokens.tolist() == list(range(count))
    assert sequence.num_pages == -(-count // 4)
    sequence.append(*more, range(100, 109))
    check(sequence, *joined(cut(base, 0, count), more))
    check(child, *base)
    with small_cache.open_sequence(range(10)) as again:  # a page of the other begins as this ends
        check(again, *cut(base, 0, max(8, count)))
    small_cache.check_invariants()


def test_truncate_evens_the_layers(cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 11)
    sequence = cache.open_sequence()
    sequence.append_layer(0, k[0], v[0])
    sequence.append_layer(1, k[1, :5], v[1, :5])
    sequence.truncate(5)
    check(sequence, k[:, :5], v[:, :5])
    sequence.append(k[:, 5:], v[:, 5:])
    check(sequence, k, v)


@pytest.mark.parametrize("count", [-1, 11, 2**40])
def test_truncate_to_what_is_not_there_is_refused(small_cache: PagedKVCache, count: int) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 10))
    with unchanged(small_cache, sequence), pytest.raises(ValueError, match=f"10 tokens.* {count}"):
        sequence.truncate(count)


# -- save ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 14))
def test_a_saved_sequence_resumes_token_exact(tmp_path: Path, count: int) -> None:
    kv, more = make_kv(SPEC, count), make_kv(SPEC, 5, seed=1)
    path = tmp_path / "cache.zarr"
    with PagedKVCache(SPEC, 2, PageStore.open(path, SPEC)) as cache:
        sequence = cache.open_sequence()
        sequence.append(*kv, range(count))
        sequence.save()
    with PagedKVCache(SPEC, 2, PageStore.open(path, SPEC)) as cache:
        sequence = cache.open_sequence(range(count + 1))
        check(sequence, *kv)
        sequence.append(*more, range(count, count + 5))
        check(sequence, *joined(kv, more))
        with cache.open_sequence(range(count)) as again:
            check(again, *kv)


def test_save_is_durable_before_the_cache_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "cache.zarr"
    first_kv, other_kv = make_kv(SPEC, 10), make_kv(SPEC, 10, seed=1)
    store = PageStore.open(path, SPEC)
    with PagedKVCache(SPEC, 8, store) as cache:
        one = cache.open_sequence()
        one.append(*first_kv, range(10))
        other = cache.open_sequence()
        other.append(*other_kv, range(10))
        other.save()
        with PageStore.open(path, SPEC, mode="r") as reader:
            assert all(key in reader for key in page_keys(SPEC, range(10)))
            with PagedKVCache(SPEC, 4, reader) as resumed:
                assert resumed.open_sequence(range(10)).num_tokens == 10


def test_the_longest_saved_tail_is_taken(tmp_path: Path) -> None:
    kv = make_kv(SPEC, 7)
    with PagedKVCache(SPEC, 4, PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        sequence = cache.open_sequence()
        for count in (5, 6, 7):
            sequence.append(*cut(kv, sequence.num_tokens, count))
            sequence.commit(range(count))
            sequence.save()
        sequence.close()
        for ids, found in [
            (range(7), 7),
            (range(6), 6),
            ([*range(6), 99], 6),
            ([*range(5), 99, 6], 5),
            ([*range(4), 99], 4),
            ([99, *range(1, 7)], 0),
        ]:
            with cache.open_sequence(ids) as again:
                check(again, *cut(kv, 0, found))


def test_save_needs_names_and_a_store(tmp_path: Path, memory_cache: PagedKVCache) -> None:
    sequence = memory_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 5), range(5))
    with unchanged(memory_cache, sequence), pytest.raises(StoreError, match="can be written"):
        sequence.save()
    store = PageStore.open(tmp_path / "cache.zarr", SPEC)
    with PagedKVCache(SPEC, 4, store) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 5))
        sequence.commit(range(3))
        with (
            unchanged(cache, sequence),
            pytest.raises(ValueError, match="3 of 5 tokens are named"),
        ):
            sequence.save()


def test_save_of_nothing_is_nothing(tmp_path: Path) -> None:
    with PagedKVCache(SPEC, 4, PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        cache.open_sequence().save()
        assert cache.store is not None
        assert cache.store.num_pages == 0


# -- attend ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_queries", [1, 5, 30])
def test_attend_reads_pages_from_disk_exactly(tmp_path: Path, num_queries: int) -> None:
    spec = make_spec(num_kv_heads=2, head_dim=8)
    k, v = make_kv(spec, 30)
    q = np.random.default_rng(5).standard_normal((num_queries, 6, 8), np.float32)
    with PagedKVCache(spec, 2, PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v)
        for layer in range(2):
            np.testing.assert_allclose(
                sequence.attend(layer, q), reference(q, k[layer], v[layer]), rtol=1e-4, atol=1e-5
            )
        np.testing.assert_allclose(
            sequence.attend(0, q, scale=0.5), reference(q, k[0], v[0], 0.5), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "shape", [(1, 2), (1, 3, 8), (1, 2, 7), (0, 2, 8), (6, 2, 8), (1, 0, 8), (1, 2, 8, 1)]
)
def test_attend_refuses_queries_that_do_not_fit(shape: tuple[int, ...]) -> None:
    spec = make_spec(num_kv_heads=2, head_dim=8)
    with PagedKVCache(spec, 4) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(spec, 5))
        with (
            unchanged(cache, sequence),
            pytest.raises(ValueError, match=r"^q has (shape|0 tokens|6 tokens)"),
        ):
            sequence.attend(0, np.zeros(shape, np.float32))


# -- bad input -------------------------------------------------------------------------------


def bad_arrays() -> dict[str, tuple[Any, Any, str]]:
    k, v = make_kv(SPEC, 3)
    return {
        "one layer too few": (k[:1], v[:1], r"k has shape \(1, 3, 1, 2\)"),
        "no layer axis": (k[0], v[0], r"k has shape \(3, 1, 2\)"),
        "too many heads": (np.repeat(k, 2, 2), np.repeat(v, 2, 2), r"\(2, 3, 2, 2\)"),
        "too few channels": (k[..., :1], v[..., :1], r"\(2, 3, 1, 1\)"),
        "uneven token counts": (k, v[:, :2], r"v has shape \(2, 2, 1, 2\)"),
        "values missing": (k, None, "v "),
        "float64": (k.astype(np.float64), v.astype(np.float64), "k is float64.*float32"),
        "values in half precision": (k, v.astype(np.float16), "v is float16.*float32"),
        "big endian": (k.astype(">f4"), v.astype(">f4"), "k is >f4"),
        "integers": (k.astype(np.int32), v.astype(np.int32), "k is int32"),
        "text": ("k", "v", "k has shape"),
        "nothing": (None, None, "k has shape"),
    }


@pytest.mark.parametrize("case", bad_arrays())
def test_arrays_that_do_not_fit_are_refused(small_cache: PagedKVCache, case: str) -> None:
    k, v, message = bad_arrays()[case]
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 6))
    with unchanged(small_cache, sequence), pytest.raises(ValueError, match=message):
        sequence.append(k, v)


@pytest.mark.parametrize(
    ("layer", "error"),
    [(-1, ValueError), (2, ValueError), (0.0, TypeError), ("0", TypeError), (True, TypeError)],
)
def test_a_layer_that_does_not_exist_is_refused(
    small_cache: PagedKVCache, layer: Any, error: type
) -> None:
    k, v = make_kv(SPEC, 3)
    sequence = small_cache.open_sequence()
    sequence.append(k, v)
    with unchanged(small_cache, sequence):
        with pytest.raises(error, match=f"layer is {layer!r}"):
            sequence.append_layer(layer, k[0], v[0])
        with pytest.raises(error, match=f"layer is {layer!r}"), sequence.gather(layer):
            pass
        with pytest.raises(error, match=f"layer is {layer!r}"):
            sequence.attend(layer, np.zeros((1, 1, 2), np.float32))


@pytest.mark.parametrize("count", [-1, 4, 2**40])
def test_gather_of_more_than_is_there_is_refused(small_cache: PagedKVCache, count: int) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    with (
        unchanged(small_cache, sequence),
        pytest.raises(ValueError, match=f"holds 3 tokens, {count} were"),
        sequence.gather(0, count),
    ):
        pass


@pytest.mark.parametrize("start", [-1, 3, 2**40])
def test_gather_from_a_token_that_is_not_there_is_refused(
    small_cache: PagedKVCache, start: int
) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    with (
        unchanged(small_cache, sequence),
        pytest.raises(ValueError, match=rf"start is {start}: it must be one of 0..2$"),
        sequence.gather(0, 2, start),
    ):
        pass


@pytest.mark.parametrize("count", [1.5, "2"])
def test_counts_that_are_no_integers_are_refused_by_name(
    small_cache: PagedKVCache, count: Any
) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 3))
    with unchanged(small_cache, sequence):
        with pytest.raises(TypeError, match="num_tokens is"):
            sequence.truncate(count)
        with pytest.raises(TypeError, match="num_tokens is"):
            sequence.drop_before(count)
        with pytest.raises(TypeError, match="num_tokens is"), sequence.gather(0, count):
            pass
        with pytest.raises(TypeError, match="start is"), sequence.gather(0, start=count):
            pass


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_int8_cannot_hold_are_refused_at_append(tmp_path: Path, bad: float) -> None:
    k, v = make_kv(SPEC, 6)
    v[1, 4, 0, 1] = bad
    store = PageStore.open(tmp_path / "cache.zarr", SPEC, codec="int8")
    with PagedKVCache(SPEC, 2, store) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 5))
        with unchanged(cache, sequence):
            with pytest.raises(ValueError, match=rf"v has {bad} at \(1, 4, 0, 1\)"):
                sequence.append(k, v)
            with pytest.raises(ValueError, match=rf"v has {bad} at \(4, 0, 1\)"):
                sequence.append_layer(1, k[1], v[1])


def test_a_pool_that_is_too_small_without_a_store_leaves_the_sequence_as_it_is(
    memory_cache: PagedKVCache,
) -> None:
    kv = make_kv(SPEC, 22)
    sequence = memory_cache.open_sequence()
    sequence.append(*kv)
    with (
        unchanged(memory_cache, sequence),
        pytest.raises(
            PoolExhaustedError, match=r"of the pool's 6, 0 are free.* 6 hold pages of live"
        ),
    ):
        sequence.append(*make_kv(SPEC, 3))
    k, v = make_kv(SPEC, 3)
    with unchanged(memory_cache, sequence), pytest.raises(PoolExhaustedError):
        sequence.append_layer(1, k[1], v[1])
    sequence.append(*make_kv(SPEC, 2, seed=1))
    check(sequence, *joined(kv, make_kv(SPEC, 2, seed=1)))


def test_a_closed_sequence_refuses_everything(small_cache: PagedKVCache) -> None:
    k, v = make_kv(SPEC, 25)
    sequence = small_cache.open_sequence()
    sequence.append(k, v, range(25))
    sequence.close()
    sequence.close()
    assert "closed" in repr(sequence)
    calls: list[Any] = [
        lambda: sequence.append(k, v),
        lambda: sequence.append_layer(0, k[0], v[0]),
        lambda: sequence.commit([]),
        sequence.save,
        sequence.fork,
        lambda: sequence.truncate(0),
        lambda: sequence.drop_before(0),
        lambda: sequence.gather(0).__enter__(),
        lambda: sequence.attend(0, np.zeros((1, 1, 2), np.float32)),
        lambda: sequence.attend(0, np.zeros((20, 1, 2), np.float32)),
        sequence.__enter__,
    ]
    with unchanged(small_cache):
        for call in calls:
            with pytest.raises(ClosedError, match="the sequence is closed"):
                call()


def test_with_closes_also_after_an_error(small_cache: PagedKVCache) -> None:
    with pytest.raises(KeyError), small_cache.open_sequence() as sequence:
        sequence.append(*make_kv(SPEC, 5))
        raise KeyError
    assert small_cache.stats().num_pages_held == 0


def test_repr_tells_the_size(small_cache: PagedKVCache) -> None:
    sequence = small_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 5))
    assert repr(sequence) == "<Sequence: 5 tokens, 2 pages>"


def test_pages_that_are_gathered_stay_in_their_slots_though_the_sequence_is_closed() -> None:
    k, v = make_kv(SPEC, 8)
    with PagedKVCache(SPEC, 4) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v, range(8))
        with sequence.gather(0) as (keys, values):
            sequence.close()
            others = make_kv(SPEC, 8, seed=1)
            other = cache.open_sequence()
            other.append(*others)  # takes the two slots that are left
            with pytest.raises(PoolExhaustedError):
                other.append(*make_kv(SPEC, 1, seed=2))
            np.testing.assert_array_equal(keys, k[0])
            np.testing.assert_array_equal(values, v[0])
        other.append(*make_kv(SPEC, 1, seed=2))
        cache.check_invariants()
