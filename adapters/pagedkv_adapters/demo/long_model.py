"""The long demo's model, in a process of its own: ``python -m pagedkv_adapters.demo.long_model``.

One generation at the longest context, so that the process's peak of memory is that of one cache.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import pagedkv as pk
from pagedkv_adapters.demo.folder import check_room
from pagedkv_adapters.demo.long_result import ModelRun
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.new_process import Tell, answer
from pagedkv_adapters.demo.pool_size import pool_slots
from pagedkv_adapters.demo.prompt import encode_long
from pagedkv_adapters.demo.run import TokenClock, generate, warm_up, warm_up_pages
from pagedkv_adapters.demo.usage import peak_nbytes, resident_nbytes
from pagedkv_adapters.transformers import PagedCache, spec_for

PREFILL_CHUNK_TOKENS = 2048
"""So many tokens of the prompt go through the model at once, so that what it computes stays small.
``DynamicCache`` copies all KV for each such part, and would take more memory with it."""
_MIN_PROMPT_TOKENS = 128


def generate_long(question: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Generate as asked; what the run did.

    Args:
        question: ``folder`` of the model; the ``text`` to repeat, or None; ``num_tokens`` of
            prompt and answer, or None for all that the model supports; ``max_new_tokens``;
            ``store_path`` and ``pool`` for PagedKV, both None for ``DynamicCache``.
        tell: Is told the share of the prompt that is computed, ``{"prefill": 0.5}``, then the
            answer as it grows, ``{"text": "Alice"}``.

    Raises:
        ValueError: The model, the context or the pool cannot be used.
        PagedKVError: There is no room on the disk, or it failed.
    """
    is_paged = question["store_path"] is not None
    model, tokenizer = load(Path(question["folder"]), "pagedkv" if is_paged else "sdpa")
    max_new_tokens = question["max_new_tokens"]
    num_tokens = _context(model, question["num_tokens"])
    if num_tokens - max_new_tokens < _MIN_PROMPT_TOKENS:
        raise ValueError(
            f"{max_new_tokens} of {num_tokens} tokens are to be generated, which leaves less than "
            f"{_MIN_PROMPT_TOKENS} for the prompt"
        )
    ids = encode_long(tokenizer, question["text"], num_tokens - max_new_tokens)
    tokens: list[int] = []

    def tell_token(token: int) -> None:
        tokens.append(token)
        tell({"text": tokenizer.decode(tokens, skip_special_tokens=True)})

    run = _run_paged if is_paged else _run_dynamic
    result = run(model, ids, question, tell, tell_token)
    return {**asdict(result), "text": tokenizer.decode(tokens, skip_special_tokens=True)}


def _context(model: Any, wanted: int | None) -> int:
    """Tokens of prompt and answer: so many as are wanted, at most what the model supports."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None and wanted is None:
        raise ValueError("the model does not say how long its context may be: give --long-tokens")
    return min(count for count in (limit, wanted) if count is not None)


def _run_dynamic(
    model: Any, ids: torch.Tensor, question: dict[str, Any], tell: Tell, tell_token: Tell
) -> ModelRun:
    warm_up(model, ids)
    resident = resident_nbytes()
    _tell_prefill(model, ids.shape[1], tell)
    clock = TokenClock(tell_token)
    output = generate(model, ids, DynamicCache(), question["max_new_tokens"], clock)
    return ModelRun(
        output_tokens=output[ids.shape[1] :],
        num_prompt_tokens=ids.shape[1],
        prefill_s=clock.first_s,
        total_s=clock.last_s,
        peak_nbytes=peak_nbytes(),
        resident_nbytes=resident,
    )


def _run_paged(
    model: Any, ids: torch.Tensor, question: dict[str, Any], tell: Tell, tell_token: Tell
) -> ModelRun:
    path = Path(question["store_path"])
    spec = spec_for(model)
    num_tokens = ids.shape[1] + question["max_new_tokens"]
    num_slots = pool_slots(question["pool"], spec, num_tokens)
    check_room(
        path.parent, num_tokens * spec.page_nbytes // spec.page_tokens, f"KV of {num_tokens} tokens"
    )
    warm_up_pages(model, spec, ids)
    resident = resident_nbytes()
    _tell_prefill(model, ids.shape[1], tell)
    at_first_token: list[pk.CacheStats] = []

    def on_token(token: int) -> None:
        if not at_first_token:
            at_first_token.append(kv.stats())
        tell_token(token)

    clock = TokenClock(on_token)
    with (
        pk.PagedKVCache(spec, num_slots, pk.PageStore.open(path, spec)) as kv,
        PagedCache.from_prompt(model, ids, kv) as cache,
    ):
        output = generate(
            model, ids, cache, question["max_new_tokens"], clock, PREFILL_CHUNK_TOKENS
        )
        (before,), after = at_first_token, kv.stats()
    num_held = ids.shape[1] + len(output[ids.shape[1] :]) - 1  # the last one's is never computed
    return ModelRun(
        output_tokens=output[ids.shape[1] :],
        num_prompt_tokens=ids.shape[1],
        prefill_s=clock.first_s,
        total_s=clock.last_s,
        peak_nbytes=peak_nbytes(),
        resident_nbytes=resident,
        kv_nbytes=num_held * spec.page_nbytes // spec.page_tokens,
        layer_nbytes=num_held * spec.layer_nbytes // spec.page_tokens,
        pool_nbytes=after.pool_nbytes,
        num_slots=after.num_slots,
        num_pages=after.num_pages_held,
        prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
        num_prefill_slices_loaded=before.num_slices_loaded,
        num_slices_attended=after.num_slices_attended - before.num_slices_attended,
        num_slices_loaded=after.num_slices_loaded - before.num_slices_loaded,
    )


def _tell_prefill(model: Any, num_tokens: int, tell: Tell) -> None:
    """Tell the share of the prompt that has gone through the model, after each of its layers."""
    layers = list(getattr(model.get_decoder(), "layers", ()))
    num_done, num_all = 0, num_tokens * len(layers)

    def after_layer(layer: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal num_done
        if num_done < num_all:
            states = output[0] if isinstance(output, tuple) else output
            num_done += states.shape[1]
            tell({"prefill": num_done / num_all})

    for layer in layers:
        layer.register_forward_hook(after_layer)


if __name__ == "__main__":
    answer(generate_long)
