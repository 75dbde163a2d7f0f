"""Small specs, and numbers for them that depend on nothing but a name."""

import hashlib
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import Int8, KVSpec, PagedKVCache, Sequence

Array = npt.NDArray[Any]


def make_spec(**changes: Any) -> KVSpec:
    """A spec of a few bytes a page."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "page_tokens": 4,
        "dtype": "float32",
        "model": "sha256:test",
    }
    return KVSpec(**{**values, **changes})


def make_page(spec: KVSpec, number: int) -> Array:
    """A page, ``(layer, kind, token, head, channel)``, of numbers that no other ``number`` has."""
    rng = np.random.default_rng(number)
    return rng.standard_normal(spec.page_shape).astype(spec.np_dtype)


def make_pages(spec: KVSpec, numbers: Seq[int]) -> Array:
    """Pages, ``(page, layer, kind, token, head, channel)``."""
    shape = (len(numbers), *spec.page_shape)
    pages = np.empty(shape, dtype=spec.np_dtype)
    for place, number in enumerate(numbers):
        pages[place] = make_page(spec, number)
    return pages


def make_key(number: int) -> Any:
    """An opaque page key."""
    return hashlib.sha256(b"opaque %d" % number).digest()


def make_kv(spec: KVSpec, num_tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """Keys and values of all layers, each ``(layer, token, head, channel)``."""
    rng = np.random.default_rng(seed)
    shape = (2, spec.held_layers, num_tokens, spec.held_heads, spec.head_dim)
    k, v = rng.standard_normal(shape).astype(spec.np_dtype)
    return k, v


def bits(array: Array) -> bytes:
    """The numbers' bits, so that NaN equals itself and 0 differs from -0."""
    return np.ascontiguousarray(array).tobytes()


def through_int8(spec: KVSpec, page: Array) -> Array:
    """What is left of a page after it was stored as INT8."""
    codec = Int8()
    back = np.empty(spec.page_shape, dtype=spec.np_dtype)
    payload = np.empty(codec.layer_nbytes(spec), dtype=np.uint8)
    for layer in range(spec.held_layers):
        codec.encode(spec, page[layer], payload)
        codec.decode(spec, payload, back[layer])
    return back


def wait_for_writers(cache: PagedKVCache) -> None:
    """Wait until nothing is being written in the background."""
    with cache._lock:
        for group in cache._groups:
            assert cache._lock.wait_for(lambda g=group: g.room.writer.is_idle, 60)


def state_of(cache: PagedKVCache, *sequences: Sequence) -> dict[str, Any]:
    """All that must not change when a call is refused."""
    wait_for_writers(cache)
    cache.check_invariants()
    stats = cache.stats()
    state: dict[str, Any] = {
        name: getattr(stats, name)
        for name in (
            "num_free_slots",
            "num_pages_evicted",
            "num_pages_held",
            "num_pages_loaded",
            "num_pages_spilled",
            "num_pages_stored",
            "num_pinned_slots",
        )
    }
    for number, group in enumerate(cache._groups):
        places = group.places
        state[f"keys of group {number}"] = {
            key: (page.slot, page.row, page.ref_count) for key, page in places.index.items()
        }
        state[f"ranking of group {number}"] = list(places._policy.victims())
        state[f"pool of group {number}"] = bits(places.pool.array)
        state[f"spilled of group {number}"] = 0 if places.spill is None else places.spill.num_used
    if cache.store is not None:
        state["pages on disk"] = cache.store.num_pages
        state["bytes on disk"] = cache.store.nbytes - cache.store.scratch_nbytes
    for number, sequence in enumerate(sequences):
        state[f"sequence {number}"] = (
            sequence.num_tokens,
            sequence.tokens.tolist(),
            sequence.num_pages,
            sequence.num_dropped_tokens,
            list(sequence._filled),
        )
        for layer in range(cache.num_layers):
            with sequence.gather(layer, start=sequence.num_dropped_tokens) as kinds:
                state[f"sequence {number}, layer {layer}"] = [bits(kind) for kind in kinds]
    return state


@contextmanager
def unchanged(cache: PagedKVCache, *sequences: Sequence) -> Iterator[None]:
    """The block leaves the cache and the sequences as they are."""
    before = state_of(cache, *sequences)
    yield
    after = state_of(cache, *sequences)
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, changed


@contextmanager
def not_writable(folder: Path) -> Iterator[None]:
    """Take the permission to write from all that is in the folder, also where root runs the tests.

    The folders above it must be open to everyone (``tempfile.mkdtemp``, not ``tmp_path``).
    """
    places = [folder, *folder.rglob("*")]
    modes = {place: place.stat().st_mode for place in places}
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for place, mode in modes.items():
            if place.exists():
                place.chmod(mode)
