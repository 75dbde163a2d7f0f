"""Pages that follow one parent and share nearly all tokens: how long the best one is looked for."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from measure.compare import SECONDS, Bench, Timed, Unit
from measure.long_prompt import SPEC
from measure.pages import seconds_of

Tokens = npt.NDArray[np.int32]

_NUM_SEARCHES = 200
_SHARED = 14
"""Of a page's sixteen tokens so many are the same in all siblings."""
_UNIT = Unit(name="µs a prompt", amount=1e6 / _NUM_SEARCHES, is_rate=False)
_PEER = "numpy, the prompt compared with all siblings' tokens in one array; nothing else"


def siblings(bench: Bench) -> None:
    """``open_sequence`` and ``close`` of prompts that share 14 or 15 tokens with many pages."""
    for num_siblings in (1, 1_000, bench.count(100_000, 2_000)):
        ids = _siblings(num_siblings)
        prompts = _prompts(ids)
        for tier, num_slots in (("pool", num_siblings + 1), ("store", 2)):
            path = bench.folder / f"{tier}-{num_siblings}.zarr"
            with pk.PageStore.open(path, SPEC) as store:
                if tier == "store":
                    _write(store, ids)
                with pk.PagedKVCache(SPEC, num_slots, store) as cache:
                    if tier == "pool":
                        _put(cache, ids)
                    if tier == "store":
                        _add_first(bench, cache, prompts[:1], num_siblings)
                    bench.compare(
                        f"best of {num_siblings:,} siblings in the {tier}",
                        _UNIT,
                        _opened(cache, prompts),
                        {_PEER: _compared(ids, prompts)},
                    )
                    cache.flush()


def _add_first(bench: Bench, cache: pk.PagedKVCache, prompts: Tokens, num_siblings: int) -> None:
    """The first search, which puts the siblings in order; beside reading their entries."""
    assert cache.store is not None
    bench.add(
        f"first search of {num_siblings:,} siblings in the store",
        SECONDS,
        seconds_of(lambda: _search(cache, prompts)),
        seconds_of(lambda: sum(1 for _ in cache.store.entries())),
        "reading their entries one by one (PageStore.entries)",
    )


def _siblings(count: int) -> Tokens:
    """Token ids, ``(page, token)``: the last two differ."""
    ids = np.full((count, SPEC.page_tokens), 7, np.int32)
    ids[:, _SHARED], ids[:, _SHARED + 1] = np.divmod(np.arange(count), 300)
    return ids


def _prompts(ids: Tokens) -> Tokens:
    """``(prompt, token)``: a page that is there, but for its last token, and one token more."""
    rng = np.random.default_rng(2)
    prompts = np.full((_NUM_SEARCHES, SPEC.page_tokens + 1), 8, np.int32)
    prompts[:, : SPEC.page_tokens] = ids[rng.integers(0, len(ids), _NUM_SEARCHES)]
    prompts[:, SPEC.page_tokens - 1] = 1000
    return prompts


def _entries(ids: Tokens) -> list[pk.PageEntry]:
    root = SPEC.root_key()
    return [
        pk.PageEntry(key=pk.page_keys(SPEC, row)[0], num_tokens=len(row), parent=root, tokens=row)
        for row in ids
    ]


def _write(store: pk.PageStore, ids: Tokens) -> None:
    for start in range(0, len(ids), 16_000):
        entries = _entries(ids[start : start + 16_000])
        store.write(0, entries, np.zeros((len(entries), *SPEC.page_shape), SPEC.np_dtype))


def _put(cache: pk.PagedKVCache, ids: Tokens) -> None:
    page = np.zeros((1, *SPEC.page_shape), SPEC.np_dtype)
    for row in ids:
        cache.put(pk.page_keys(SPEC, row), page)


def _opened(cache: pk.PagedKVCache, prompts: Tokens) -> Timed:
    return lambda: seconds_of(lambda: _search(cache, prompts))


def _search(cache: pk.PagedKVCache, prompts: Tokens) -> None:
    for prompt in prompts:
        with cache.open_sequence(prompt) as sequence:
            assert sequence.num_tokens == SPEC.page_tokens - 1


def _compared(ids: Tokens, prompts: Tokens) -> Callable[[], float]:
    def search() -> None:
        for prompt in prompts:
            same = ids == prompt[: SPEC.page_tokens]
            assert np.logical_and.accumulate(same, axis=1).sum(axis=1).max() == SPEC.page_tokens - 1

    return lambda: seconds_of(search)
