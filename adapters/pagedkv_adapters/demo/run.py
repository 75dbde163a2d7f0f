"""One generation, measured: with the cache of transformers, with PagedKV, or in a new process."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import pagedkv as pk
from pagedkv_adapters.demo.new_process import ask
from pagedkv_adapters.transformers import PagedCache

_NUM_WARM_UP_TOKENS = 64

OnToken = Callable[[int], None]
"""Is told of each generated token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSetup:
    """The cache that a run uses.

    Args:
        store_path: Folder of the store.
        codec: How the store encodes pages.
        num_slots: Pages that the pool holds.
    """

    store_path: Path
    codec: str
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one generation did.

    Args:
        output_tokens: The generated ids.
        ttft_s: Seconds to the first of them: opening the cache, finding the prefix, computing the
            rest of the prompt. Loading the model does not count.
        total_s: Seconds to the last of them.
        num_reused_tokens: Tokens of the prompt that were not computed.
        pool_nbytes: Bytes of the pool; 0 without one.
        num_pages_evicted: Pages whose slot was taken from them.
        num_pages_loaded: Whole pages read from disk.
        num_slices_loaded: Single layers of pages read from disk for attention.
        num_slices_spilled: Single layers of pages written to disk, for want of a slot.
        store_nbytes: Bytes of the store on disk when it was closed; 0 without one.
    """

    output_tokens: tuple[int, ...]
    ttft_s: float
    total_s: float
    num_reused_tokens: int = 0
    pool_nbytes: int = 0
    num_pages_evicted: int = 0
    num_pages_loaded: int = 0
    num_slices_loaded: int = 0
    num_slices_spilled: int = 0
    store_nbytes: int = 0


def run_dynamic(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, on_token: OnToken
) -> Run:
    """Generate with transformers' own cache, which holds all KV in memory."""
    warm_up(model, ids)
    clock = TokenClock(on_token)
    tokens = generate(model, ids, DynamicCache(), max_new_tokens, clock)
    return Run(output_tokens=tokens[ids.shape[1] :], ttft_s=clock.first_s, total_s=clock.last_s)


def run_paged(
    model: PreTrainedModel,
    spec: pk.KVSpec,
    ids: torch.Tensor,
    max_new_tokens: int,
    setup: PagedSetup,
    on_token: OnToken,
) -> Run:
    """Generate with PagedKV, and leave the KV of prompt and answer in the store."""
    warm_up_pages(model, spec, ids, setup.codec)
    clock = TokenClock(on_token)
    store = pk.PageStore.open(setup.store_path, spec, codec=setup.codec)
    with pk.PagedKVCache(spec, num_slots=setup.num_slots, store=store) as kv:
        with PagedCache.from_prompt(model, ids, kv) as cache:
            tokens = generate(model, ids, cache, max_new_tokens, clock)
            cache.commit(torch.tensor(tokens))
        kv.flush()
        stats = kv.stats()
        return Run(
            output_tokens=tokens[ids.shape[1] :],
            ttft_s=clock.first_s,
            total_s=clock.last_s,
            num_reused_tokens=cache.num_reused_tokens,
            pool_nbytes=stats.pool_nbytes,
            num_pages_evicted=stats.num_pages_evicted,
            num_pages_loaded=stats.num_pages_loaded,
            num_slices_loaded=stats.num_slices_loaded,
            num_slices_spilled=stats.num_slices_spilled,
            store_nbytes=stats.store_nbytes,
        )


def run_in_new_process(
    folder: Path, ids: torch.Tensor, max_new_tokens: int, setup: PagedSetup, on_token: OnToken
) -> Run:
    """``run_paged`` in a process that starts from nothing but the model's folder and the store.

    Raises:
        PagedKVError: The process failed.
    """
    question = {
        "folder": str(folder),
        "ids": ids[0].tolist(),
        "max_new_tokens": max_new_tokens,
        "setup": {**asdict(setup), "store_path": str(setup.store_path)},
    }
    module = "pagedkv_adapters.demo.resume"
    values = ask(module, question, "resumes the prompt", on_token)
    return Run(**{**values, "output_tokens": tuple(values["output_tokens"])})


class TokenClock(BaseStreamer):
    """Takes the time of each token that ``generate`` hands out."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._start = time.perf_counter()
        self._times: list[float] = []
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first and does not count, or a token."""
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self._times.append(time.perf_counter() - self._start)
        for token in value.flatten().tolist():
            self._on_token(token)

    def end(self) -> None:
        """Do nothing: the last token has been taken."""

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self._times[0]

    @property
    def last_s(self) -> float:
        """Seconds to the last token."""
        return self._times[-1]


def generate(
    model: Any,
    ids: torch.Tensor,
    cache: DynamicCache | PagedCache,
    max_new_tokens: int,
    clock: TokenClock,
    prefill_chunk_tokens: int | None = None,
) -> tuple[int, ...]:
    """Greedy ids, those of the prompt included.

    Args:
        model: The model.
        ids: The prompt, ``(1, token)``.
        cache: Where its KV goes.
        max_new_tokens: So many at most.
        clock: Takes the time of each.
        prefill_chunk_tokens: So many tokens of the prompt go through the model at once; by default
            all of them.
    """
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
        prefill_chunk_size=prefill_chunk_tokens,
    )
    return tuple(output[0].tolist())


def warm_up(model: Any, ids: torch.Tensor) -> None:
    """Start what a first forward pass starts, so that all runs are timed alike."""
    with torch.inference_mode():
        model(ids[:, :16])


def warm_up_pages(model: Any, spec: pk.KVSpec, ids: torch.Tensor, codec: str = "raw") -> None:
    """The same with pages, which are written, read back and found again: kernels are compiled."""
    some = ids[:, :_NUM_WARM_UP_TOKENS]
    with tempfile.TemporaryDirectory(prefix="pagedkv-warm-up-") as folder:
        for _ in range(2):
            store = pk.PageStore.open(Path(folder) / "cache.zarr", spec, codec=codec)
            with (
                pk.PagedKVCache(spec, 2, store) as kv,
                PagedCache.from_prompt(model, some, kv) as cache,
            ):
                clock = TokenClock(lambda token: None)
                tokens = generate(model, some, cache, 3, clock, _NUM_WARM_UP_TOKENS // 2)
                cache.commit(torch.tensor(tokens))
