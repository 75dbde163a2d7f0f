"""A prompt gets all tokens that any cached page shares with it, and none of another tenant's."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_model import page_of, token_hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import Array, bits, make_pages, make_spec, unchanged
from store_samples import run_python

import pagedkv as pk
from pagedkv.token_order import num_common

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()
OTHER = make_spec(num_layers=1, head_dim=3, group="b")
BASE = list(range(100, 110))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


@pytest.fixture(params=["pool", "store"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_cache(path: Path | None, num_slots: int = 16, **options: Any) -> pk.PagedKVCache:
    store = None if path is None else pk.PageStore.open(path, SPEC, **options)
    return pk.PagedKVCache(SPEC, num_slots, store)


def kv_of(ids: Sequence[int], flavour: int = 0, spec: pk.KVSpec = SPEC) -> tuple[Array, Array]:
    """KV of these tokens, ``(layer, token, head, channel)``: other for other tokens before."""
    names = token_hashes(ids, flavour)
    shape = (spec.held_layers, spec.num_kinds, 0, spec.held_heads, spec.head_dim)
    pages = [
        page_of(spec, part, 0, finite=True)[:, :, : len(part)]
        for part in (names[at : at + 4] for at in range(0, len(names), 4))
    ]
    together = np.concatenate([np.empty(shape, spec.np_dtype), *pages], axis=2)
    return together[:, 0], together[:, 1]


def compute(cache: pk.PagedKVCache, ids: Sequence[int], flavour: int = 0, **options: Any) -> None:
    """Let a sequence compute these tokens, and close it."""
    with cache.open_sequence(**options) as sequence:
        sequence.append(*kv_of(ids, flavour), ids)


def check(sequence: pk.Sequence, ids: Sequence[int], flavour: int = 0) -> None:
    """The sequence holds exactly the KV of these tokens."""
    assert sequence.num_tokens == len(ids)
    assert sequence.tokens.tolist() == list(ids)
    k, v = kv_of(ids, flavour)
    for layer in range(SPEC.held_layers):
        with sequence.gather(layer) as (got_k, got_v):
            assert bits(got_k) == bits(k[layer])
            assert bits(got_v) == bits(v[layer])


def forget_pool(cache: pk.PagedKVCache, tier: str) -> None:
    """Let the pages be in the store only, if that is the tier."""
    if tier == "store":
        cache.flush()
        with cache.open_sequence() as sequence:
            sequence.append(*kv_of(range(cache.num_slots * 4)))
        assert not cache._groups[0].places.index


# -- what is found ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(13))
def test_a_prompt_that_ends_inside_a_page_gets_all_of_its_tokens(
    path: Path, tier: str, count: int
) -> None:
    ids = range(100, 112)
    with open_cache(path) as cache:
        compute(cache, ids)
        forget_pool(cache, tier)
        with cache.open_sequence(ids[:count]) as sequence:
            check(sequence, ids[:count])
            cache.check_invariants()
        cache.check_invariants()
        assert cache.stats().num_pages_held == 0


@pytest.mark.parametrize("common", range(13))
def test_a_prompt_that_branches_off_gets_what_it_shares(path: Path, tier: str, common: int) -> None:
    ids = list(range(100, 112))
    prompt = [*ids[:common], *range(200, 208)]
    with open_cache(path) as cache:
        compute(cache, ids)
        forget_pool(cache, tier)
        with cache.open_sequence(prompt) as sequence:
            check(sequence, ids[:common])
            k, v = kv_of(prompt)
            sequence.append(k[:, common:], v[:, common:], prompt[common:])
            check(sequence, prompt)
        with cache.open_sequence(prompt) as again:
            check(again, prompt[: len(prompt) // 4 * 4])
        with cache.open_sequence(ids) as again:  # what the other wrote over its copy is its own
            check(again, ids)


def test_of_several_pages_the_one_that_shares_most_is_taken(path: Path, tier: str) -> None:
    with open_cache(path) as cache:
        for last in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 7, 7, 7], [1, 2, 8, 1]):
            compute(cache, [*BASE[:4], *last])
        forget_pool(cache, tier)
        for wanted, common in (([1, 2, 9, 0], 3), ([1, 2, 5, 5], 2), ([1, 0], 1), ([0], 0)):
            prompt = [*BASE[:4], *wanted]
            with cache.open_sequence(prompt) as sequence:
                check(sequence, prompt[: 4 + common])


def test_pool_and_store_are_searched_together(path: Path) -> None:
    with open_cache(path) as cache:
        compute(cache, [*BASE[:4], 1, 2, 3, 4])
        forget_pool(cache, "store")
        compute(cache, [*BASE[:4], 1, 9, 9, 9])
        for last, common in (([1, 2, 3, 9], 3), ([1, 9, 9, 1], 3), ([1, 5, 5, 5], 1)):
            with cache.open_sequence([*BASE[:4], *last]) as sequence:
                check(sequence, [*BASE[:4], *last[:common]])


def test_without_a_store_the_pool_is_enough() -> None:
    with open_cache(None) as cache:
        compute(cache, BASE)
        with cache.open_sequence(BASE[:7]) as sequence:
            check(sequence, BASE[:7])


def test_a_page_that_was_put_by_its_key_is_found_too(path: Path, tier: str) -> None:
    with open_cache(path) as cache:
        keys, pages = pk.page_keys(SPEC, range(8)), make_pages(SPEC, range(2))
        cache.put(keys, pages)
        forget_pool(cache, tier)
        with cache.open_sequence([*range(6), 99]) as sequence:
            assert sequence.num_tokens == 6
            with sequence.gather(1) as (k, _):
                assert bits(k[4:]) == bits(pages[1, 1, 0, :2])


def test_a_page_that_a_live_sequence_holds_is_found(path: Path) -> None:
    with open_cache(path, 2) as cache, cache.open_sequence() as live:
        live.append(*kv_of(range(100, 130)), range(100, 130))  # most of it is on disk
        for count in (3, 7, 26, 27):
            with cache.open_sequence([*range(100, 100 + count), 1]) as sequence:
                check(sequence, range(100, 100 + count))


# -- saved tails -----------------------------------------------------------------------------


def test_a_saved_tail_gives_those_tokens_that_are_shared(path: Path) -> None:
    with open_cache(path) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(*kv_of(BASE[:7]), BASE[:7])
            sequence.save()
        for count in (5, 6, 7):
            with cache.open_sequence([*BASE[:count], 1]) as sequence:
                check(sequence, BASE[:count])


def test_tail_and_full_page_compete(path: Path) -> None:
    with open_cache(path) as cache:
        compute(cache, [*BASE[:4], 1, 2, 8, 8])
        with cache.open_sequence() as sequence:
            sequence.append(*kv_of([*BASE[:4], 1, 2, 3]), [*BASE[:4], 1, 2, 3])
            sequence.save()
        for last, common in (([1, 2, 3, 4], 3), ([1, 2, 8, 4], 3), ([1, 2], 2), ([1, 2, 7], 2)):
            with cache.open_sequence([*BASE[:4], *last]) as sequence:
                check(sequence, [*BASE[:4], *last[:common]])


# -- whose pages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "others", [{"salt": b"b"}, {"extra": b"lora"}, {"salt": b"b", "extra": b"lora"}], ids=str
)
def test_other_salts_and_extras_never_match(path: Path, tier: str, others: dict[str, Any]) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE, flavour=1, **others)
        forget_pool(cache, tier)
        for count in (3, 6):
            with cache.open_sequence(BASE[:count]) as sequence:
                assert sequence.num_tokens == 0
            with cache.open_sequence(BASE[:count], **others) as sequence:
                check(sequence, BASE[:count], flavour=1)
        compute(cache, BASE, flavour=2)
        forget_pool(cache, tier)
        for count in (3, 6):
            with cache.open_sequence(BASE[:count]) as sequence:
                check(sequence, BASE[:count], flavour=2)
            with cache.open_sequence(BASE[:count], **others) as sequence:
                check(sequence, BASE[:count], flavour=1)


def test_many_pages_of_another_tenant_hide_none_of_ones_own(path: Path, tier: str) -> None:
    with open_cache(path, 600) as cache:
        ids = np.array([[100, 101, 102, n] for n in range(500)])
        pages = make_pages(SPEC, range(1))
        for row in ids:
            cache.put(pk.page_keys(SPEC, row, b"other"), pages)
        compute(cache, [100, 101, 5, 5])
        forget_pool(cache, tier)
        with cache.open_sequence([100, 101, 102, 50]) as sequence:
            check(sequence, [100, 101])


def test_each_page_may_have_its_own_extra(path: Path, tier: str) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE[:8], extra=[b"cat", b"dog"])
        compute(cache, [*BASE[:4], 1, 2, 3, 4], extra=[b"cat", b"cow"])
        forget_pool(cache, tier)
        for extra, common in (([b"cat", b"dog"], 6), ([b"cat", b"cow"], 4), ([b"dog", b"dog"], 0)):
            with cache.open_sequence([*BASE[:6], 9, 9], extra=extra) as sequence:
                check(sequence, BASE[:common])


def test_a_page_whose_key_was_made_up_gives_nothing(path: Path, tier: str) -> None:
    keys = pk.page_keys(SPEC, [100, 101, 102, 103], salt=b"theirs")
    made_up = pk.PageKeys(
        spec=SPEC, keys=keys.keys, parents=keys.parents, tokens=keys.tokens, salt=b"mine"
    )
    with open_cache(path) as cache:
        cache.put(made_up, make_pages(SPEC, [1]))
        forget_pool(cache, tier)
        with cache.open_sequence([100, 101], salt=b"mine") as sequence:
            assert sequence.num_tokens == 0


# -- switched off ----------------------------------------------------------------------------


def test_it_can_be_switched_off(path: Path) -> None:
    store = pk.PageStore.open(path, SPEC)
    with pk.PagedKVCache(SPEC, 16, store, token_match=False) as cache:
        compute(cache, BASE)
        with cache.open_sequence(BASE[:7]) as sequence:
            check(sequence, BASE[:4])
        with cache.open_sequence() as sequence:
            sequence.append(*kv_of(BASE[:7]), BASE[:7])
            sequence.save()
        for prompt, count in ((BASE[:7], 7), (BASE, 8), ([*BASE[:6], 1], 4)):
            with cache.open_sequence(prompt) as sequence:
                check(sequence, BASE[:count])


# -- several layer groups --------------------------------------------------------------------


@pytest.fixture
def pair(path: Path) -> Iterator[pk.PagedKVCache]:
    """A cache of two layer groups."""
    specs = SPEC, OTHER
    with pk.PagedKVCache(specs, 16, pk.PageStore.open(path, specs)) as cache:
        yield cache


def test_all_layer_groups_must_have_the_tokens(pair: pk.PagedKVCache) -> None:
    first, second = (pk.page_keys(spec, [1, 2, 3, 4]) for spec in (SPEC, OTHER))
    shorter = pk.page_keys(OTHER, [1, 2, 9, 9])
    pair.put(first, make_pages(SPEC, [1]))
    with pair.open_sequence([1, 2, 3]) as sequence:
        assert sequence.num_tokens == 0
    pair.put(shorter, make_pages(OTHER, [2]))
    with pair.open_sequence([1, 2, 3]) as sequence:
        assert sequence.num_tokens == 2
        with sequence.gather(0) as (k, _), sequence.gather(2) as (other_k, _):
            assert bits(k) == bits(make_pages(SPEC, [1])[0, 0, 0, :2])
            assert bits(other_k) == bits(make_pages(OTHER, [2])[0, 0, 0, :2])
    pair.put(second, make_pages(OTHER, [3]))
    with pair.open_sequence([1, 2, 3]) as sequence:
        assert sequence.num_tokens == 3
    pair.check_invariants()


def test_a_page_that_one_group_lacks_gives_the_others_part(pair: pk.PagedKVCache) -> None:
    pair.put(pk.page_keys(SPEC, [1, 2, 3, 4]), make_pages(SPEC, [1]))
    pair.put(pk.page_keys(OTHER, [1, 2, 3, 9]), make_pages(OTHER, [2]))
    with pair.open_sequence([1, 2, 3, 4, 5]) as sequence:
        assert sequence.num_tokens == 3


# -- restarts and other processes ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r"])
def test_it_works_after_a_restart(path: Path, mode: Any) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE)
    with open_cache(path, mode=mode) as cache, cache.open_sequence(BASE[:6]) as sequence:
        check(sequence, BASE[:6])


def test_what_another_process_stored_is_found(path: Path) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE[:4])
    with open_cache(path, mode="r") as cache:
        with open_cache(path) as other, other.open_sequence() as sequence:
            sequence.append(*kv_of(BASE), BASE)
            sequence.save()
        for prompt, count in ((BASE[:7], 7), (BASE, 10)):
            with cache.open_sequence(prompt) as sequence:
                check(sequence, BASE[:count])


def test_a_store_that_a_fresh_process_wrote_is_searched(path: Path) -> None:
    run_python(
        "import sys; from pathlib import Path; from test_token_match import *\n"
        "with open_cache(Path(sys.argv[1])) as cache: compute(cache, BASE)",
        path,
    )
    with open_cache(path) as cache, cache.open_sequence(BASE[:6]) as sequence:
        check(sequence, BASE[:6])


@pytest.mark.parametrize("is_saved", [False, True])
def test_without_tokens_in_the_store_exact_tails_are_found(path: Path, is_saved: bool) -> None:
    with open_cache(path, store_tokens=False) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(*kv_of(BASE[:7]), BASE[:7])
            if is_saved:
                sequence.save()
    with open_cache(path) as cache:
        for prompt, count in (
            (BASE[:3], 0),
            (BASE[:6], 4),
            (BASE[:7], 7 if is_saved else 4),
            (BASE, 7 if is_saved else 4),
        ):
            with cache.open_sequence(prompt) as sequence:
                check(sequence, BASE[:count])
        compute(cache, BASE[:8])  # the pool knows its tokens
        with cache.open_sequence(BASE[:6]) as sequence:
            check(sequence, BASE[:6])


# -- damage, and no room ---------------------------------------------------------------------


def damage(path: Path, ids: Sequence[int]) -> None:
    """Change a byte of the last page of these tokens in the closed store."""
    page = np.stack(kv_of(ids), axis=1)[:1, :, len(ids) - 4 :]
    for file in path.glob("lane-*/group-*/kv/c.*"):
        data = file.read_bytes()
        at = data.find(bits(page))
        assert at >= 0
        file.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])


def test_a_damaged_page_falls_back_to_the_next_best(path: Path) -> None:
    best, second = [*BASE[:4], 1, 2, 3, 4], [*BASE[:4], 1, 2, 9, 9]
    with open_cache(path) as cache:
        compute(cache, best)
        compute(cache, second)
    damage(path, best)
    with open_cache(path) as cache:
        with cache.open_sequence([*best[:7], 5]) as sequence:
            check(sequence, best[:6])
        assert cache.stats().misses_by_reason["corrupt"] == 1
        cache.check_invariants()


def test_where_all_are_damaged_the_full_pages_stay(path: Path) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE[:8])
    damage(path, BASE[:8])
    with open_cache(path) as cache, cache.open_sequence(BASE[:7]) as sequence:
        check(sequence, BASE[:4])
        cache.check_invariants()


def test_a_damaged_record_is_no_candidate(path: Path) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE[:8])
        cache.flush()
        forget_pool(cache, "store")
        assert cache.store is not None
        (row,) = [row for row, entry in cache.store.entries() if entry.tokens[0] == BASE[4]]
        record_dtype = cache.store._contents.formats[0].geometry.record_dtype
        for file in path.glob("lane-*/group-*/catalog/c.*"):
            data = bytearray(file.read_bytes())
            at = row.row % cache.store._contents.rows_of(0) * record_dtype.itemsize
            data[at + record_dtype.fields["tokens"][1]] ^= 1
            file.write_bytes(data)
        with cache.open_sequence(BASE[:7]) as sequence:
            check(sequence, BASE[:4])


def test_without_a_slot_the_full_pages_are_enough() -> None:
    with open_cache(None, 3) as cache, cache.open_sequence() as busy:
        busy.append(*kv_of(BASE[:8]), BASE[:8])
        with cache.open_sequence() as other:
            other.append(*kv_of([1]))
            with cache.open_sequence(BASE[:6]) as sequence:
                check(sequence, BASE[:4])
                cache.check_invariants()


def test_an_error_while_copying_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(path) as cache:
        compute(cache, BASE)

        def fail(*_: Any) -> None:
            raise pk.StoreError("the disk failed")

        monkeypatch.setattr(cache._groups[0], "read_page", fail)
        with unchanged(cache), pytest.raises(pk.StoreError, match="the disk failed"):
            cache.open_sequence(BASE[:6])


def test_pages_that_leave_meanwhile_do_no_harm(path: Path) -> None:
    stop = threading.Event()
    errors: list[Exception] = []
    with open_cache(path, 4, max_nbytes="200 KB") as cache:

        def churn(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                while not stop.is_set():
                    compute(cache, [*BASE[:5], *rng.integers(0, 3, 7).tolist()])
            except Exception as error:  # noqa: BLE001 -- it is the main thread's to tell
                errors.append(error)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(60):
                prompt = [*BASE[:5], number % 3, *BASE[6:10]]
                with cache.open_sequence(prompt) as sequence:
                    check(sequence, prompt[: sequence.num_tokens])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors
        cache.check_invariants()


# -- against an oracle -----------------------------------------------------------------------

short_ids = st.lists(st.integers(0, 1), max_size=11)


@settings(max_examples=60, deadline=None)
@given(
    written=st.lists(
        st.tuples(short_ids, st.sampled_from([b"", b"s"]), st.sampled_from(["", "save", "spread"])),
        max_size=8,
    ),
    prompts=st.lists(st.tuples(short_ids, st.sampled_from([b"", b"s"])), min_size=1, max_size=8),
    num_slots=st.sampled_from([2, 30]),
    is_reopened=st.booleans(),
)
def test_it_finds_what_comparing_with_all_finds(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[tuple[list[int], bytes, str]],
    prompts: list[tuple[list[int], bytes]],
    num_slots: int,
    is_reopened: bool,
) -> None:
    path = tmp_path_factory.mktemp("oracle") / "cache.zarr"
    known: list[tuple[bytes, list[int]]] = []
    cache = open_cache(path, num_slots)
    try:
        for ids, salt, how in written:
            with cache.open_sequence(salt=salt) as sequence:
                sequence.append(*kv_of(ids), ids)
                if how == "save":
                    sequence.save()
            known.append((salt, ids if how == "save" else ids[: len(ids) // 4 * 4]))
        if is_reopened:
            cache.close()
            cache = open_cache(path, num_slots)
        for prompt, salt in prompts:
            wanted = np.array(prompt, "<i4").tobytes()
            counts = [
                num_common(np.array(ids, "<i4").tobytes(), wanted)
                for one, ids in known
                if one == salt
            ]
            with cache.open_sequence(prompt, salt) as sequence:
                check(sequence, prompt[: max(counts, default=0)])
            cache.check_invariants()
        if cache.store is not None:
            cache.store.check_invariants()
    finally:
        cache.close()
