"""Writers and readers of one store, for ``test_churn.py``.

What a page holds follows from its key, so that every process can tell whether it got the right
bytes. What each process did, and what it found wrong, goes into a file of JSON.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import KVSpec, PagedKVCache, PageStore, Sequence, page_keys
from pagedkv.errors import PageNotFoundError, PoolExhaustedError, StoreFullError
from pagedkv.prefix import PageKeys

SPEC = KVSpec(
    num_layers=2,
    num_kv_heads=1,
    head_dim=16,
    page_tokens=4,
    dtype="float32",
    model="sha256:churn",
)
NUM_SLOTS = 12
NUM_PROMPTS = 400
PROMPT_PAGES = 6

Array = np.ndarray[Any, Any]


def tokens_of(prompt: int) -> Array:
    """Every four prompts begin with the same two pages."""
    shared = np.arange(2 * SPEC.page_tokens) + 10_000 * (prompt // 4)
    own = np.arange((PROMPT_PAGES - 2) * SPEC.page_tokens) + 10_000_000 + 10_000 * prompt
    return np.concatenate([shared, own]).astype(np.int32)


def page_of(key: bytes) -> Array:
    size = int(np.prod(SPEC.page_shape))
    raw = hashlib.shake_128(key).digest(size)
    return (np.frombuffer(raw, np.int8) / np.float32(16)).reshape(SPEC.page_shape)


def pages_of(keys: PageKeys) -> Array:
    """The pages of a chain, ``(page, layer, kind, token, head, channel)``."""
    pages = np.empty((len(keys), *SPEC.page_shape), np.float32)
    for place, key in enumerate(keys):
        pages[place] = page_of(key)
    return pages


def kv_of(keys: PageKeys) -> tuple[Array, Array]:
    """Keys and values of whole pages, each ``(layer, token, head, channel)``."""
    pages = pages_of(keys).transpose(2, 1, 0, 3, 4, 5)  # kind, layer, page, token, head, channel
    k, v = pages.reshape(2, SPEC.num_layers, -1, SPEC.num_kv_heads, SPEC.head_dim)
    return k, v


def check_sequence(sequence: Sequence, keys: PageKeys) -> None:
    expected = kv_of(keys[: sequence.num_tokens // SPEC.page_tokens])
    for layer in range(SPEC.num_layers):
        with sequence.gather(layer) as kinds:
            for kind, kv in zip(kinds, expected, strict=True):
                assert np.array_equal(kind, kv[layer]), "a live sequence has wrong bytes"


def check_pages(cache: PagedKVCache, keys: PageKeys) -> int:
    try:
        pages = cache.get(keys)
    except PageNotFoundError:
        return 0
    assert np.array_equal(pages, pages_of(keys)), "wrong bytes"
    return len(keys)


class Writer:
    def __init__(self, path: Path, max_nbytes: int | None, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = PageStore.open(path, SPEC, max_nbytes=max_nbytes)
        self.cache = PagedKVCache(SPEC, NUM_SLOTS, self.store)
        self.live: list[tuple[Sequence, PageKeys]] = []
        self.flushed: set[bytes] = set()
        self.counts = {"flushes": 0, "full": 0, "reused": 0, "found": 0, "exhausted": 0}

    def run(self, until: float) -> dict[str, Any]:
        while time.monotonic() < until:
            try:
                self.step()
            except StoreFullError:
                self.counts["full"] += 1
                self.drop()
            except PoolExhaustedError:
                self.counts["exhausted"] += 1
                self.drop()
        while self.live:
            check_sequence(*self.live[0])
            self.drop()
        self.cache.close()
        return {**self.counts, "flushed": sorted(key.hex() for key in self.flushed)}

    def drop(self) -> None:
        """Close the oldest live sequence."""
        if self.live:
            self.live.pop(0)[0].close()

    def step(self) -> None:
        keys = page_keys(SPEC, tokens_of(self.rng.randrange(NUM_PROMPTS)))
        if self.rng.random() < 0.4:
            self.cache.put(keys, pages_of(keys))
        else:
            self.generate(keys)
        if self.live:
            check_sequence(*self.rng.choice(self.live))
        if self.rng.random() < 0.5:
            self.cache.flush()
            self.counts["flushes"] += 1
            self.flushed |= set(keys[: self.cache.match(keys)])
        self.counts["found"] += check_pages(self.cache, keys[: self.cache.match(keys)])

    def generate(self, keys: PageKeys) -> None:
        if len(self.live) == 3:
            self.drop()
        tokens = keys.tokens.reshape(-1)
        sequence = self.cache.open_sequence(tokens)
        self.live.append((sequence, keys))
        self.counts["reused"] += sequence.num_tokens
        check_sequence(sequence, keys)
        k, v = kv_of(keys)
        start = sequence.num_tokens
        if start < len(tokens):
            sequence.append(k[:, start:], v[:, start:], tokens[start:])


def read(path: Path, until: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    counts = {"found": 0, "missed": 0}
    store = PageStore.open(path, SPEC, mode="r")
    with PagedKVCache(SPEC, NUM_SLOTS, store) as cache:
        while time.monotonic() < until:
            store.refresh()
            keys = page_keys(SPEC, tokens_of(rng.randrange(NUM_PROMPTS)))
            found = check_pages(cache, keys[: cache.match(keys)])
            counts["found"] += found
            counts["missed"] += not found
    return counts


def work(number: int, path: Path, max_nbytes: int | None, until: float) -> dict[str, Any]:
    if number % 2:
        return {"kind": "reader", **read(path, until, number)}
    return {"kind": "writer", **Writer(path, max_nbytes, number).run(until)}


def warm_up() -> None:
    """Import and compile what all need, before they fork."""
    with tempfile.TemporaryDirectory() as folder:
        with PagedKVCache(SPEC, NUM_SLOTS, PageStore.open(folder, SPEC)) as cache:
            keys = page_keys(SPEC, tokens_of(0))
            cache.put(keys, pages_of(keys))
        with PagedKVCache(SPEC, NUM_SLOTS, PageStore.open(folder, SPEC)) as cache:
            check_pages(cache, keys)


def main() -> None:
    path, max_nbytes, seconds = Path(sys.argv[1]), int(sys.argv[2]) or None, float(sys.argv[3])
    warm_up()
    until = time.monotonic() + seconds
    children = []
    for number in range(8):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                report = work(number, path, max_nbytes, until)
            except BaseException:  # noqa: BLE001 - the test shows it
                report = {"kind": "failed", "error": traceback.format_exc()}
            with os.fdopen(write_end, "w") as stream:
                json.dump(report, stream)
            os._exit(0)
        os.close(write_end)
        children.append((child, read_end))
    reports = []
    for child, read_end in children:
        with os.fdopen(read_end) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        reports.append(json.loads(text) if text else {"kind": "failed", "error": "it died"})
    Path(sys.argv[4]).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
