"""Sequences whose first pages were dropped go on as before, and need no more room than the rest."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import Array, bits, make_kv, make_pages, make_spec, unchanged
from test_page_attention import error, reference
from test_sequence import two_specs

import pagedkv as pk
from pagedkv import layer_scan, records

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec(num_kv_heads=2, head_dim=8)  # pages of 4 tokens
LARGE = make_spec(num_kv_heads=2, head_dim=16, page_tokens=16)


def queries(spec: pk.KVSpec, count: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3 * spec.held_heads, spec.head_dim), np.float32)


def check_rest(sequence: pk.Sequence, k: Array, v: Array, num_dropped: int) -> None:
    """The sequence holds these ``(layer, token, head, channel)``, but for the first ones."""
    assert sequence.num_tokens == k.shape[1]
    assert sequence.num_dropped_tokens == num_dropped
    for layer in range(k.shape[0]):
        with sequence.gather(layer, start=num_dropped) as (got_k, got_v):
            assert bits(got_k) == bits(k[layer, num_dropped:])
            assert bits(got_v) == bits(v[layer, num_dropped:])


@pytest.fixture
def memory_cache() -> Iterator[pk.PagedKVCache]:
    """A cache without a store."""
    with pk.PagedKVCache(SPEC, 8) as cache:
        yield cache
        cache.check_invariants()


@pytest.fixture
def small_cache(tmp_path: Path) -> Iterator[pk.PagedKVCache]:
    """A cache with a store and two slots."""
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC)
    with pk.PagedKVCache(SPEC, 2, store) as cache:
        yield cache
        cache.check_invariants()


# -- what is held ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 20])
def test_pages_held_stay_as_few_as_the_window_needs(step: int) -> None:
    window, count = 10, 1000
    k, v = make_kv(SPEC, count)
    num_slots = -(-(window - 1 + step) // 4) + 1
    with pk.PagedKVCache(SPEC, num_slots) as cache:
        with cache.open_sequence() as keeper, pytest.raises(pk.PoolExhaustedError):
            keeper.append(k, v)
        sequence = cache.open_sequence()
        for start in range(0, count, step):
            stop = min(start + step, count)
            q = queries(SPEC, stop - start, seed=start)
            for layer in range(2):
                sequence.append_layer(layer, k[layer, start:stop], v[layer, start:stop])
                expected = reference(q, k[layer, :stop], v[layer, :stop], window=window)
                assert error(sequence.attend(layer, q, window=window), expected) <= 1e-5
            sequence.drop_before(sequence.num_tokens - window + 1)
            assert sequence.num_pages <= -(-window // 4) + 1
            assert cache.stats().num_pages_held == sequence.num_pages
            cache.check_invariants()
        assert sequence.num_tokens == count
        check_rest(sequence, k, v, (count - window + 1) // 4 * 4)


@pytest.mark.parametrize("committed", [False, True])
def test_dropped_pages_need_neither_slot_nor_spill_space(
    small_cache: pk.PagedKVCache, committed: bool
) -> None:
    with small_cache.open_sequence() as sequence:
        sequence.append(*make_kv(SPEC, 40), range(40) if committed else None)
        spill = small_cache._groups[0].places.spill
        assert spill is not None
        for count in (8, 30, 40):
            sequence.drop_before(count)
            num_held = 10 - count // 4
            assert sequence.num_pages == small_cache.stats().num_pages_held == num_held
            assert spill.num_used <= num_held
            small_cache.check_invariants()
        assert spill.num_used == 0


def test_room_of_private_pages_is_free_at_once(memory_cache: pk.PagedKVCache) -> None:
    sequence = memory_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 30))
    for count, num_free in [(3, 0), (4, 1), (7, 1), (8, 2), (28, 7), (30, 7)]:
        sequence.drop_before(count)
        assert memory_cache.stats().num_free_slots == num_free
    with memory_cache.open_sequence() as other:
        other.append(*make_kv(SPEC, 28))


def test_nothing_is_dropped_twice_and_nothing_comes_back(memory_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 21)
    sequence = memory_cache.open_sequence()
    assert sequence.num_dropped_tokens == 0
    sequence.append(k, v)
    sequence.drop_before(13)
    check_rest(sequence, k, v, 12)
    with unchanged(memory_cache, sequence):
        for count in (15, 13, 12, 11, 4, 0, -1, -(10**9)):
            sequence.drop_before(count)
    assert sequence.num_pages == 3


def test_a_sequence_goes_on_after_all_of_its_pages_were_dropped(
    small_cache: pk.PagedKVCache,
) -> None:
    k, v = make_kv(SPEC, 31)
    sequence = small_cache.open_sequence()
    sequence.append(k[:, :16], v[:, :16], range(16))
    sequence.drop_before(16)
    assert (sequence.num_pages, sequence.num_tokens, sequence.num_dropped_tokens) == (0, 16, 16)
    check_rest(sequence, k[:, :16], v[:, :16], 16)
    sequence.append(k[:, 16:], v[:, 16:], range(16, 31))
    check_rest(sequence, k, v, 16)
    assert sequence.tokens.tolist() == list(range(31))


def test_only_what_every_layer_holds_can_be_dropped(memory_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 20)
    sequence = memory_cache.open_sequence()
    sequence.append_layer(0, k[0], v[0])
    sequence.append_layer(1, k[1, :9], v[1, :9])
    with unchanged(memory_cache, sequence), pytest.raises(ValueError, match="holds 9 .* drop 10"):
        sequence.drop_before(10)
    sequence.drop_before(9)
    assert (sequence.num_dropped_tokens, sequence.num_pages) == (8, 3)
    sequence.append_layer(1, k[1, 9:], v[1, 9:])
    check_rest(sequence, k, v, 8)


def test_what_is_gathered_stays_though_it_is_dropped(memory_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 30)
    with memory_cache.open_sequence() as sequence, memory_cache.open_sequence() as other:
        sequence.append(k, v)
        with sequence.gather(0) as (got_k, got_v):
            sequence.drop_before(30)
            assert memory_cache.stats().num_free_slots == 0
            with pytest.raises(pk.PoolExhaustedError):
                other.append(*make_kv(SPEC, 4, seed=1))
            assert bits(got_k) == bits(k[0])
            assert bits(got_v) == bits(v[0])
        assert memory_cache.stats().num_free_slots == 7
        other.append(*make_kv(SPEC, 28, seed=1))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_group_that_fails_leaves_the_others_right(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    specs = two_specs()
    (k0, v0), (k1, v1) = (make_kv(spec, 20) for spec in specs)
    with pk.PagedKVCache(specs, 6) as cache:
        sequence = cache.open_sequence()
        sequence.append([k0, k1], [v0, v1])
        group = cache._groups[failing]
        release = group.release

        def interrupted(pages: Any) -> None:
            release(pages)
            raise KeyboardInterrupt

        monkeypatch.setattr(group, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.drop_before(9)
        monkeypatch.undo()
        assert (sequence.num_dropped_tokens, sequence.num_pages) == (8, 6)
        cache.check_invariants()
        for layer in range(5):
            with sequence.gather(layer, start=8) as (got, _):
                assert bits(got) == bits((k0[layer] if layer < 2 else k1[layer - 2])[8:])


# -- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_queries", [1, 5, 40])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(
    ("num_slots", "memory_map"), [(80, False), (3, False), (3, True), (20, False), (20, True)]
)
@pytest.mark.parametrize("window", [50, 700])
def test_attention_within_what_is_held_stays_the_same_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_queries: int,
    codec: str,
    num_slots: int,
    memory_map: bool,
    window: int,
) -> None:
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 1)
    path, tokens = tmp_path / "cache.zarr", np.arange(1200)
    k, v = make_kv(LARGE, 1203)
    with pk.PagedKVCache(LARGE, 80, pk.PageStore.open(path, LARGE, codec=codec)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(k[:, :1200], v[:, :1200], tokens)
        cache.flush()
    store = pk.PageStore.open(path, LARGE, memory_map=memory_map)
    with pk.PagedKVCache(LARGE, num_slots, store) as cache:
        sequence = cache.open_sequence(tokens)
        sequence.append(k[:, 1200:], v[:, 1200:])
        q = queries(LARGE, num_queries)
        before = [sequence.attend(layer, q, window=window) for layer in (0, 1, 0, 1)]
        first = 1203 - num_queries - window + 1
        sequence.drop_before(first)
        assert sequence.num_dropped_tokens == first // 16 * 16
        after = [sequence.attend(layer, q, window=window) for layer in (0, 1, 0, 1)]
        assert [bits(one) for one in after] == [bits(one) for one in before]
        for layer in range(2):
            with sequence.gather(layer, start=sequence.num_dropped_tokens) as kinds:
                expected = reference(q, *kinds, window=window)
                assert error(after[layer], expected) <= 1e-5
        cache.check_invariants()


@pytest.mark.parametrize("num_queries", [1, 40])
def test_without_the_kernels_numpy_does_the_same(
    monkeypatch: pytest.MonkeyPatch, num_queries: int
) -> None:
    monkeypatch.setattr(records, "compiled", lambda: None)
    k, v = make_kv(LARGE, 300)
    with pk.PagedKVCache(LARGE, 20) as cache, cache.open_sequence() as sequence:
        sequence.append(k, v)
        sequence.drop_before(300 - num_queries - 50 + 1)
        q = queries(LARGE, num_queries)
        found = sequence.attend(1, q, window=50)
        assert error(found, reference(q, k[1], v[1], window=50)) <= 1e-5


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("memory_map", [False, True])
def test_a_window_slides_over_pages_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, memory_map: bool
) -> None:
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 1)
    window, count = 600, 720
    k, v = make_kv(LARGE, count)
    store = pk.PageStore.open(tmp_path / "cache.zarr", LARGE, codec=codec, memory_map=memory_map)
    q = queries(LARGE, 1)
    with pk.PagedKVCache(LARGE, 3, store) as cache, cache.open_sequence() as sequence:
        sequence.append(k[:, :600], v[:, :600], range(600))
        cache.flush()
        for at in range(600, count):
            ids = [at] if at % 3 == 0 and len(sequence.tokens) == at else None
            sequence.append(k[:, at : at + 1], v[:, at : at + 1], ids)
            num_dropped = sequence.num_dropped_tokens
            for layer in range(2):
                with sequence.gather(layer, start=num_dropped) as kinds:
                    expected = reference(q, *kinds, window=window)
                assert error(sequence.attend(layer, q, window=window), expected) <= 1e-5
                if codec == "raw":
                    exact = reference(q, k[layer, : at + 1], v[layer, : at + 1], window=window)
                    assert error(expected, exact) <= 1e-6
            sequence.drop_before(sequence.num_tokens - window + 1)
            assert sequence.num_pages <= 39
        cache.check_invariants()


def test_pages_are_dropped_while_they_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 1)
    k, v = make_kv(LARGE, 1300)
    q = queries(LARGE, 1)
    may_read, stage = threading.Event(), layer_scan._Wave.stage
    may_read.set()

    def slow(wave: Any, buffer: Any) -> None:
        assert wave._layer == 1 or may_read.wait(60)
        stage(wave, buffer)

    monkeypatch.setattr(layer_scan._Wave, "stage", slow)
    store = pk.PageStore.open(tmp_path / "cache.zarr", LARGE)
    with pk.PagedKVCache(LARGE, 4, store) as cache:
        sequence, other = cache.open_sequence(), cache.open_sequence()
        sequence.append(k, v)
        for layer in (0, 1, 0):
            sequence.attend(layer, q)
        may_read.clear()
        sequence.attend(1, q)
        ahead = [one.future for one in sequence._staging[0]._ahead]
        assert ahead
        assert not any(future.done() for future in ahead)
        threading.Timer(0.05, may_read.set).start()
        sequence.drop_before(1000)
        assert all(future.done() for future in ahead)  # nobody reads what others may have now
        other.append(*make_kv(LARGE, 1000, seed=1))
        for layer in (0, 1, 0, 1):
            expected = reference(q, k[layer], v[layer], window=300)
            assert error(sequence.attend(layer, q, window=300), expected) <= 1e-5
        cache.check_invariants()


def test_sequences_drop_pages_while_others_push_them_out(tmp_path: Path) -> None:
    window = 200
    store = pk.PageStore.open(tmp_path / "cache.zarr", LARGE, codec="int8")
    with pk.PagedKVCache(LARGE, 12, store) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                k, v = make_kv(LARGE, 600, seed)
                q = queries(LARGE, 1, seed)
                with cache.open_sequence(salt=bytes([seed])) as sequence:
                    for stop in range(20, 601, 20):
                        part = slice(stop - 20, stop)
                        ids = range(part.start, stop) if seed else None
                        sequence.append(k[:, part], v[:, part], ids)
                        for layer in range(2):
                            expected = reference(q, k[layer, :stop], v[layer, :stop], window=window)
                            found = sequence.attend(layer, q, window=window)
                            assert error(found, expected) <= (0.05 if seed else 1e-5)
                        sequence.drop_before(stop - window + 1)
                        assert sequence.num_pages <= 15
            except BaseException as caught:  # noqa: BLE001 - told below
                errors.append(caught)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        cache.check_invariants()
        assert cache.stats().num_pages_held == cache.stats().num_pinned_slots == 0


# -- keys, forks, truncation -----------------------------------------------------------------


def test_committed_pages_that_were_dropped_are_found_by_others(
    small_cache: pk.PagedKVCache,
) -> None:
    k, v = make_kv(SPEC, 30)
    sequence = small_cache.open_sequence()
    sequence.append(k[:, :22], v[:, :22], range(22))
    sequence.drop_before(17)
    sequence.append(k[:, 22:], v[:, 22:], range(22, 30))
    sequence.drop_before(30)
    with small_cache.open_sequence(range(30)) as again:
        assert again.num_tokens == 28
        check_rest(again, k[:, :28], v[:, :28], 0)
        assert again.num_pages == 7
    sequence.close()
    with small_cache.open_sequence(range(30)) as again:
        check_rest(again, k[:, :28], v[:, :28], 0)


def test_committed_pages_that_were_dropped_may_be_evicted(memory_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 32)
    sequence = memory_cache.open_sequence()
    sequence.append(k, v, range(32))
    sequence.drop_before(16)
    assert memory_cache.match(pk.page_keys(SPEC, range(16))) == 4
    with memory_cache.open_sequence() as other:
        other.append(*make_kv(SPEC, 12, seed=1))
        assert memory_cache.match(pk.page_keys(SPEC, range(16))) == 1  # the root stays longest
    check_rest(sequence, k, v, 16)


@pytest.mark.parametrize("named_before", [0, 6, 12])
def test_pages_behind_dropped_ones_get_the_keys_that_they_would_have_had(
    memory_cache: pk.PagedKVCache, named_before: int
) -> None:
    k, v = make_kv(SPEC, 30)
    keys = pk.page_keys(SPEC, range(30), salt=b"tenant", extra=[b"%d" % n for n in range(7)])
    sequence = memory_cache.open_sequence(salt=b"tenant", extra=[b"%d" % n for n in range(7)])
    sequence.append(k, v)
    sequence.commit(range(named_before))
    sequence.drop_before(19)
    num_named = named_before // 4
    assert memory_cache.match(keys) == num_named
    sequence.commit(range(30))
    assert memory_cache.match(keys) == num_named  # what had no key was not stored
    held = memory_cache.get(keys[4:])
    for kind, values in enumerate((k, v)):
        part = np.moveaxis(held[:, :, kind], 0, 1).reshape(2, -1, 2, 8)
        assert bits(part) == bits(values[:, 16:28])
    check_rest(sequence, k, v, 16)


def test_the_whole_is_found_when_the_dropped_part_is_there_again(
    small_cache: pk.PagedKVCache,
) -> None:
    k, v = make_kv(SPEC, 30)
    sequence = small_cache.open_sequence()
    sequence.append(k, v)
    sequence.drop_before(9)
    sequence.commit(range(30))
    first = make_pages(SPEC, [1, 2])
    small_cache.put(pk.page_keys(SPEC, range(8)), first)
    with small_cache.open_sequence(range(30)) as again:
        assert again.num_tokens == 28
        with again.gather(1) as (got_k, _):
            assert bits(got_k[:4]) == bits(first[0, 1, 0])
            assert bits(got_k[8:]) == bits(k[1, 8:28])


def test_ids_of_dropped_tokens_are_checked_as_before(memory_cache: pk.PagedKVCache) -> None:
    sequence = memory_cache.open_sequence()
    sequence.append(*make_kv(SPEC, 20), range(20))
    sequence.drop_before(20)
    with (
        unchanged(memory_cache, sequence),
        pytest.raises(ValueError, match="token 2 was named 2 before and is 5 now"),
    ):
        sequence.commit([0, 1, 5])
    assert sequence.tokens.tolist() == list(range(20))


def test_forks_hold_and_drop_apart(small_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 22)
    others = [make_kv(SPEC, 7, seed) for seed in (1, 2)]
    parent = small_cache.open_sequence()
    parent.append(k, v)
    parent.drop_before(8)
    child = parent.fork()
    check_rest(child, k, v, 8)
    parent.drop_before(18)
    check_rest(child, k, v, 8)
    both = {}
    for sequence, (more_k, more_v) in zip((parent, child), others, strict=True):
        sequence.append(more_k, more_v)
        both[sequence] = [np.concatenate(two, axis=1) for two in ((k, more_k), (v, more_v))]
    check_rest(parent, *both[parent], 16)
    check_rest(child, *both[child], 8)
    small_cache.check_invariants()
    parent.close()
    check_rest(child, *both[child], 8)
    child.close()
    assert small_cache.stats().num_pages_held == 0


@pytest.mark.parametrize("count", range(12, 23))
def test_truncate_down_to_what_was_dropped(small_cache: pk.PagedKVCache, count: int) -> None:
    k, v = make_kv(SPEC, 22)
    more_k, more_v = make_kv(SPEC, 9, seed=1)
    sequence = small_cache.open_sequence()
    sequence.append(k, v, range(22))
    sequence.drop_before(14)
    sequence.truncate(count)
    check_rest(sequence, k[:, :count], v[:, :count], 12)
    assert sequence.num_pages == -(-count // 4) - 3
    assert sequence.tokens.tolist() == list(range(count))
    sequence.append(more_k, more_v, range(100, 109))
    check_rest(
        sequence,
        np.concatenate([k[:, :count], more_k], axis=1),
        np.concatenate([v[:, :count], more_v], axis=1),
        12,
    )
    keys = pk.page_keys(SPEC, [*range(count), *range(100, 109)])
    assert small_cache.match(keys) == len(keys)


def test_truncate_to_nothing_is_a_new_beginning(small_cache: pk.PagedKVCache) -> None:
    k, v = make_kv(SPEC, 22)
    sequence = small_cache.open_sequence()
    sequence.append(k, v, range(22))
    sequence.drop_before(14)
    sequence.truncate(0)
    assert (sequence.num_pages, sequence.num_dropped_tokens, sequence.num_tokens) == (0, 0, 0)
    assert small_cache.stats().num_pages_held == 0
    sequence.append(k[:, :10], v[:, :10], range(50, 60))
    check_rest(sequence, k[:, :10], v[:, :10], 0)
    assert small_cache.match(pk.page_keys(SPEC, range(50, 60))) == 2


# -- what is refused -------------------------------------------------------------------------


def attend(num_queries: int, window: int | None) -> Callable[[pk.Sequence], Any]:
    return lambda sequence: sequence.attend(0, queries(SPEC, num_queries), window=window)


REFUSED: dict[str, tuple[Callable[[pk.Sequence], Any], str]] = {
    "more than there is": (lambda s: s.drop_before(31), "holds 30 tokens.* drop 31"),
    "gather": (lambda s: s.gather(0).__enter__(), "start is 0, .* 12 tokens were dropped"),
    "gather a part": (lambda s: s.gather(0, 20, 11).__enter__(), "is 11, .* 12 tokens were"),
    "gather nothing": (lambda s: s.gather(0, 0).__enter__(), "first 12 tokens were dropped"),
    "truncate": (lambda s: s.truncate(11), "first 12 tokens were dropped: .* cut to 11"),
    "truncate to one": (lambda s: s.truncate(1), "first 12 tokens were dropped"),
    "truncate below nothing": (lambda s: s.truncate(-1), "30 tokens and cannot .* -1"),
    "save": (lambda s: s.save(), "first 12 tokens were dropped, but a sequence resumes"),
    "attend": (attend(1, None), "token 29 sees all from token 0 on, but the first 12"),
    "attend a window": (attend(1, 19), "token 29 sees all from token 11 on, but the first 12"),
    "attend some": (attend(5, 15), "token 25 sees all from token 11 on, but the first 12"),
    "attend many": (attend(17, 3), "token 13 sees all from token 11 on, but the first 12"),
    "attend too many": (attend(25, 1), "token 5 sees all from token 5 on, but the first 12"),
}
"""What a sequence of 30 tokens cannot do after ``drop_before(14)``, and what the error says."""


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_needs_dropped_tokens_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_kernels: bool
) -> None:
    k, v = make_kv(SPEC, 30)
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC)
    with pk.PagedKVCache(SPEC, 3, store) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v, range(30))
        sequence.drop_before(14)
        if not has_kernels:
            monkeypatch.setattr(records, "compiled", lambda: None)
        call, message = REFUSED[name]
        with unchanged(cache, sequence), pytest.raises(ValueError, match=message):
            call(sequence)
        check_rest(sequence, k, v, 12)
        for num_queries, window in [(1, 18), (5, 14), (17, 2), (18, 1)]:
            q = queries(SPEC, num_queries)
            expected = reference(q, k[1], v[1], window=window)
            assert error(sequence.attend(1, q, window=window), expected) <= 1e-5
