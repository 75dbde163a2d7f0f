"""Decode steps under transformers: PagedCache with attention over pages, beside DynamicCache.

    python benchmarks/decode.py [--part steps|generate] [--rounds 7] [--json]

``steps``: what a step does to all 30 layers of SmolLM2-135M in cache and attention alone, with
random queries, keys and values; DynamicCache with torch's SDPA. ``generate``: ``model.generate`` of
32 tokens behind a random prompt of 512 or 4,096, the prompt's forward pass included, with random
weights of SmolLM2's shapes. Both use two threads and float32.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure.compare import Bench, Target, Unit, run
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, spec_for
from pagedkv_adapters.transformers.attention import paged_attention
from pagedkv_adapters.transformers.forward_input import ForwardInput

THREADS = 2
MILLISECONDS = Unit(name="ms", amount=1e3, is_rate=False)
STEPS = 8
"""Decode steps of a round."""
PEER = "DynamicCache, SDPA"


def model_of(num_layers: int, intermediate_size: int) -> LlamaForCausalLM:
    """SmolLM2-135M's shapes of attention; random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=576,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def begin_forward(cache: PagedCache, num_new: int) -> None:
    """What the hook on a model does before a forward pass."""
    cache.settle()
    past = cache.get_seq_length()
    none = np.zeros(1, dtype=np.int64)
    given = ForwardInput(ids=None, num_rows=1, num_pads=none, past=past, num_columns=past + num_new)
    cache.begin_forward(given, attends_to_pages=True)


class Steps:
    """Cache update and attention of every layer, for one token after the other."""

    def __init__(self, model: LlamaForCausalLM, num_tokens: int) -> None:
        self._attention = model.model.layers[0].self_attn
        self._num_layers = model.config.num_hidden_layers
        self._num_tokens = num_tokens
        self._prompt = torch.randn(2, 1, 3, num_tokens, 64)
        self._q = torch.randn(1, 9, 1, 64)
        self._kv = torch.randn(2, 1, 3, 1, 64)

    def fill(self, cache: Any) -> None:
        """Put a prompt's keys and values into the cache."""
        for layer in range(self._num_layers):
            cache.update(*self._prompt, layer)

    def seconds(self, cache: Any, attend: Callable[..., Any]) -> float:
        """Of one step; the cache is cut to the prompt's length again afterwards."""
        out = []
        began = time.perf_counter()
        for _ in range(STEPS):
            if isinstance(cache, PagedCache):
                begin_forward(cache, 1)
            for layer in range(self._num_layers):
                k, v = cache.update(*self._kv, layer)
                out.append(attend(self._attention, self._q, k, v, None, scaling=0.125)[0])
            if isinstance(cache, PagedCache):
                cache.end_forward()
        taken = (time.perf_counter() - began) / STEPS
        cache.crop(-STEPS)
        self.last = torch.cat(out[-self._num_layers :])
        return taken


def steps(bench: Bench) -> None:
    """At 1,024, 4,096 and 8,192 tokens."""
    num_layers = bench.count(30, 2)
    model = model_of(num_layers, 16)
    model.set_attn_implementation("pagedkv")
    for num_tokens, ratio in ((1024, 1.0), (4096, None), (8192, 2.0)):
        count = bench.count(num_tokens, num_tokens // 32)
        work = Steps(model, count)
        slots = -(-(count + STEPS) // 16)
        with (
            torch.no_grad(),
            pk.PagedKVCache(spec_for(model), slots) as kv,
            PagedCache(model, kv) as ours,
        ):
            begin_forward(ours, count)
            theirs = DynamicCache()
            work.fill(ours)
            ours.end_forward()
            work.fill(theirs)
            work.seconds(ours, paged_attention)
            mine = work.last
            work.seconds(theirs, sdpa_attention_forward)
            error = float((mine - work.last).abs().max())
            assert error < 1e-4, f"ours differs from torch's by {error}"
            bench.compare(
                f"decode step {count} float32, cache update and attention, {num_layers} layers",
                MILLISECONDS,
                lambda work=work, ours=ours: work.seconds(ours, paged_attention),
                {
                    PEER: lambda work=work, theirs=theirs: work.seconds(
                        theirs, sdpa_attention_forward
                    )
                },
                targets={} if ratio is None else {PEER: Target(ratio=ratio)},
            )


def generate(bench: Bench) -> None:
    """Prompts of 512 and 4,096 tokens, and 32 tokens more."""
    num_layers = bench.count(30, 2)
    model = model_of(num_layers, 1536)
    for num_tokens, attention, ratio in (
        (512, "pagedkv", 1 / 1.05),
        (512, "sdpa", 1 / 1.05),
        (4096, "pagedkv", 1.0),
    ):
        _generate(bench, model, bench.count(num_tokens, num_tokens // 16), attention, ratio)


def _generate(
    bench: Bench, model: LlamaForCausalLM, num_tokens: int, attention: str, ratio: float
) -> None:
    ids = torch.randint(1024, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 32,
        "min_new_tokens": 32,
        "do_sample": False,
    }
    found = {}

    def theirs() -> float:
        model.set_attn_implementation("sdpa")
        began = time.perf_counter()
        found[PEER] = model.generate(ids, cache=DynamicCache(), **options)
        return time.perf_counter() - began

    def ours() -> float:
        model.set_attn_implementation(attention)
        with pk.PagedKVCache(spec_for(model), -(-(num_tokens + 32) // 16)) as kv:
            began = time.perf_counter()
            with PagedCache.from_prompt(model, ids, kv) as cache:
                found["ours"] = model.generate(ids, cache=cache, **options)
            return time.perf_counter() - began

    num_layers = model.config.num_hidden_layers
    case = f"generate, {num_tokens} float32 and 32 more, {num_layers} layers, {attention}"
    bench.compare(case, MILLISECONDS, ours, {PEER: theirs}, targets={PEER: Target(ratio=ratio)})
    assert torch.equal(found["ours"], found[PEER]), "the tokens differ"


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    run("Decode steps under transformers", {"steps": steps, "generate": generate})
