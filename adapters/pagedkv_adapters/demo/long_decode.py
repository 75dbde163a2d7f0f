"""The long demo's decode steps, in new processes: ``python -m pagedkv_adapters.demo.long_decode``.

A cache like that of an 8B-class model, with random numbers in it: one process stores it, another
opens it again and attends to it as a model would that generates. There is no model.
"""

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv_adapters.demo.long_result import DecodeRun, DecodeStep
from pagedkv_adapters.demo.new_process import Tell, answer
from pagedkv_adapters.demo.pool_size import pool_slots
from pagedkv_adapters.demo.usage import device_read_nbytes, peak_nbytes, resident_nbytes

SPEC = pk.KVSpec(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    page_tokens=16,
    dtype="bfloat16",
    model="random numbers",
)
NUM_QUERY_HEADS = 32
CODEC = pk.Int8()
SLICE_NBYTES = CODEC.layer_nbytes(SPEC) + 4
"""One layer of a page on disk, its checksum included."""
_SCALES = (0.5, 1.0, 2.0, 4.0)
"""The same random pages come again and again, each time larger or smaller."""
_NUM_RANDOM_PAGES = 8


def run_job(question: dict[str, Any], tell: Tell) -> Any:
    """``fill`` or ``decode``, as ``question["job"]`` says."""
    return {"fill": fill, "decode": decode}[question["job"]](question, tell)


def fill(question: dict[str, Any], tell: Tell) -> int:
    """Store pages of random numbers; the bytes of the store.

    Args:
        question: ``store_path``; ``num_tokens``, of full pages.
        tell: Is told how many pages are written.
    """
    keys = pk.page_keys(SPEC, np.arange(question["num_tokens"]))
    some = np.random.default_rng(0).standard_normal(
        (_NUM_RANDOM_PAGES, *SPEC.page_shape), dtype=np.float32
    )
    blocks = [(scale * some).astype(SPEC.np_dtype) for scale in _SCALES]
    store = pk.PageStore.open(question["store_path"], SPEC, codec=CODEC)
    with pk.PagedKVCache(SPEC, 4 * _NUM_RANDOM_PAGES, store) as cache:
        for number, start in enumerate(range(0, len(keys), _NUM_RANDOM_PAGES)):
            part = keys[start : start + _NUM_RANDOM_PAGES]
            cache.put(part, blocks[number % len(blocks)][: len(part)])
            tell(start + len(part))
        cache.flush()
        return cache.stats().store_nbytes


def decode(question: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Decode steps behind what ``fill`` has stored; what they took.

    Args:
        question: As for ``fill``, and ``pool``, ``num_steps``: so many read what is not in the
            pool from the disk, one more reads it from the system's page cache.
        tell: Is told ``step``, ``layers`` done of it, ``nbytes`` of slices read and ``seconds``,
            after each layer.
    """
    path = Path(question["store_path"])
    _warm_up(path.with_name("warm-up.zarr"))
    resident = resident_nbytes()
    tokens = np.arange(question["num_tokens"])
    num_slots = pool_slots(question["pool"], SPEC, len(tokens))
    rng = np.random.default_rng(1)
    began = time.perf_counter()
    with (
        pk.PagedKVCache(SPEC, num_slots, pk.PageStore.open(path)) as cache,
        cache.open_sequence(tokens) as sequence,
    ):
        open_s = time.perf_counter() - began
        if sequence.num_tokens != len(tokens):
            raise pk.PagedKVError(f"{sequence.num_tokens} of {len(tokens)} tokens were found")
        steps = []
        for number in range(question["num_steps"] + 1):
            from_disk = number < question["num_steps"]
            if from_disk:
                _forget(path)
            steps.append(_step(cache, sequence, rng, number, tell, from_disk=from_disk))
        stats = cache.stats()
        run = DecodeRun(
            num_tokens=len(tokens),
            num_pages=len(tokens) // SPEC.page_tokens,
            num_slots=num_slots,
            kv_nbytes=len(tokens) // SPEC.page_tokens * SPEC.page_nbytes,
            store_nbytes=stats.store_nbytes,
            pool_nbytes=stats.pool_nbytes,
            peak_nbytes=peak_nbytes(),
            resident_nbytes=resident,
            open_s=open_s,
            steps=tuple(steps),
        )
    return asdict(run)


def _step(
    cache: pk.PagedKVCache,
    sequence: pk.Sequence,
    rng: np.random.Generator,
    number: int,
    tell: Tell,
    *,
    from_disk: bool,
) -> DecodeStep:
    """One token goes through the attention of all layers."""
    kv_shape = (2, SPEC.num_layers, 1, SPEC.num_kv_heads, SPEC.head_dim)
    new = rng.standard_normal(kv_shape, dtype=np.float32).astype(SPEC.np_dtype)
    queries = rng.standard_normal(
        (SPEC.num_layers, 1, NUM_QUERY_HEADS, SPEC.head_dim), dtype=np.float32
    )
    before, device_before, began = cache.stats(), device_read_nbytes(), time.perf_counter()
    for layer, (k, v, q) in enumerate(zip(*new, queries, strict=True)):
        sequence.append_layer(layer, k, v)
        sequence.attend(layer, q)
        now = cache.stats()
        nbytes = (now.num_slices_loaded - before.num_slices_loaded) * SLICE_NBYTES
        seconds = time.perf_counter() - began
        tell({"step": number, "layers": layer + 1, "nbytes": nbytes, "seconds": seconds})
    device_after = device_read_nbytes()
    device_nbytes = None
    if device_before is not None and device_after is not None:
        device_nbytes = device_after - device_before
    return DecodeStep(
        from_disk=from_disk,
        seconds=seconds,
        num_slices_attended=now.num_slices_attended - before.num_slices_attended,
        num_slices_loaded=now.num_slices_loaded - before.num_slices_loaded,
        slices_nbytes=nbytes,
        device_nbytes=device_nbytes,
    )


def _warm_up(path: Path) -> None:
    """Start what a first decode step starts, on one layer: kernels are loaded, or compiled."""
    spec = replace(SPEC, num_layers=1, layer_range=(0, 1))
    tokens = np.arange(4 * spec.page_tokens)
    shape = (1, len(tokens), spec.num_kv_heads, spec.head_dim)
    kv = np.ones(shape, dtype=spec.np_dtype)
    with (
        pk.PagedKVCache(spec, 1, pk.PageStore.open(path, spec, codec=CODEC)) as cache,
        cache.open_sequence() as sequence,
    ):
        sequence.append(kv, kv, tokens)
        cache.flush()
    with (
        pk.PagedKVCache(spec, 1, pk.PageStore.open(path)) as cache,
        cache.open_sequence(tokens) as sequence,
    ):
        sequence.append_layer(0, kv[0, :1], kv[0, :1])
        sequence.attend(0, np.ones((1, NUM_QUERY_HEADS, spec.head_dim), dtype=np.float32))


def _forget(store_path: Path) -> None:
    """Take the store's segments, which are on the disk, out of the system's page cache."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in store_path.glob("lane-*/group-*/kv/c.*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


if __name__ == "__main__":
    answer(run_job)
