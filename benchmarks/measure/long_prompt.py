"""A prompt of 131,072 tokens, matched against a million stored pages, its keys included."""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from measure.compare import Bench, Target, Timed, Unit
from measure.pages import seconds_of

SPEC = pk.KVSpec(
    num_layers=1,
    num_kinds=1,
    num_kv_heads=1,
    head_dim=1,
    page_tokens=16,
    dtype="float16",
    model="random numbers",
)
"""Pages of 32 bytes: what they hold plays no part here."""
_CHAIN_PAGES = 8_000
_MILLISECONDS = Unit(name="ms", amount=1e3, is_rate=False)
_HASHES = "{} of each page's tokens and the key before it, then a lookup in a dict"

Tokens = npt.NDArray[np.int64]


def long_prompt(bench: Bench) -> None:
    """``page_keys`` and ``match``, beside what other systems hash, looked up in a dict."""
    num_pages, num_wanted = bench.count(1_000_000, 300), bench.count(8_192, 20)
    path = bench.folder / "long-prompt.zarr"
    prompt = np.random.default_rng(0).integers(0, 150_000, num_wanted * SPEC.page_tokens)
    _write(bench, path, prompt, num_pages)
    words = prompt.tolist()
    peers = {
        _HASHES.format("plain SHA-256"): _looked_up(prompt, _plain_keys),
        _HASHES.format("vLLM's way, SHA-256 of a pickle"): _looked_up(words, _pickled_keys),
    }
    targets = {name: Target(at_most=40) for name in peers}
    with pk.PageStore.open(path, SPEC, mode="r") as store, pk.PagedKVCache(SPEC, 1, store) as cache:

        def match(ids: Tokens | list[int]) -> None:
            found = cache.match(pk.page_keys(SPEC, ids))
            assert found == num_wanted, f"{found} pages of {num_wanted} were found"

        case = f"match of {prompt.size:,} tokens, {store.num_pages:,} stored pages"
        for what, ids in (("an array", prompt), ("a list", words)):
            bench.compare(
                f"{case}, given as {what}",
                _MILLISECONDS,
                lambda ids=ids: seconds_of(lambda: match(ids)),
                peers,
                targets=targets,
            )


def _write(bench: Bench, path: Path, prompt: Tokens, num_pages: int) -> None:
    """A store of that many pages: the prompt's, and chains of other tokens."""
    rng = np.random.default_rng(1)
    with pk.PageStore.open(path, SPEC) as store:
        task = bench.progress.add_task(f"write {num_pages:,} pages", total=num_pages)
        write_chain(store, prompt)
        while store.num_pages < num_pages:
            count = min(_CHAIN_PAGES, num_pages - store.num_pages)
            write_chain(store, rng.integers(0, 150_000, count * SPEC.page_tokens))
            bench.progress.update(task, completed=store.num_pages)
        bench.progress.remove_task(task)


def write_chain(store: pk.PageStore, tokens: Tokens) -> None:
    """Write the pages of a prompt; their numbers are zeros."""
    keys = pk.page_keys(SPEC, tokens)
    entries = [
        pk.PageEntry(key=key, num_tokens=SPEC.page_tokens, parent=parent, tokens=ids)
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]
    store.write(0, entries, np.zeros((len(entries), *SPEC.page_shape), SPEC.np_dtype))


def _looked_up(ids: Tokens | list[int], keys_of: Callable[..., list[bytes]]) -> Timed:
    """Keys of the prompt, and a lookup of each."""
    rows: Mapping[bytes, int] = {key: row for row, key in enumerate(keys_of(ids))}

    def look_up() -> None:
        found = [rows.get(key, -1) for key in keys_of(ids)]
        assert min(found) == 0

    return lambda: seconds_of(look_up)


def _plain_keys(tokens: Tokens) -> list[bytes]:
    key, keys = bytes(32), []
    for page in tokens.astype("<i4").reshape(-1, SPEC.page_tokens):
        key = hashlib.sha256(key + page.tobytes()).digest()
        keys.append(key)
    return keys


def _pickled_keys(tokens: list[int]) -> list[bytes]:
    key, keys = bytes(32), []
    for at in range(0, len(tokens), SPEC.page_tokens):
        block = (key, tuple(tokens[at : at + SPEC.page_tokens]), None)
        key = hashlib.sha256(pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        keys.append(key)
    return keys
