"""The hooks on a model: they show a ``PagedCache`` every forward pass that is given it."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from pagedkv_adapters.transformers.attention import ATTENTION_NAME, warn_once
from pagedkv_adapters.transformers.forward_input import read_input
from pagedkv_adapters.transformers.pass_arguments import (
    BY_COLUMN,
    Positions,
    is_random,
    num_kept,
    positions_of,
    require_named_by_keys,
)

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache

_attends: WeakKeyDictionary[PreTrainedModel, bool | None] = WeakKeyDictionary()
"""Whether a model attends to what its cache returns; None until a forward pass has shown it."""
_positions: WeakKeyDictionary[PreTrainedModel, Positions] = WeakKeyDictionary()
"""How a model knows where tokens stand."""


def watch(model: PreTrainedModel, cache_type: "type[PagedCache]") -> None:
    """Show each cache of that type every forward pass of ``model`` that is given it."""
    if model in _attends:
        return
    _attends[model] = None
    _positions[model] = positions_of(model)
    model.register_forward_pre_hook(partial(_before_forward, cache_type), with_kwargs=True)
    model.register_forward_hook(
        partial(_after_forward, cache_type), with_kwargs=True, always_call=True
    )


def _before_forward(
    cache_type: "type[PagedCache]",
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    cache = _cache_among(cache_type, args, kwargs)
    if cache is None:
        return None
    cache.require_model(model)
    cache.settle()
    if args:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        others = bound.pop("kwargs", {})
        kwargs = {**bound, **others}
    given = _without_held(cache, kwargs)
    require_named_by_keys(model, given, _positions[model])
    config = model.config.get_text_config(decoder=True)
    is_ours = getattr(config, "_attn_implementation", None) == ATTENTION_NAME
    rows = read_input(
        given.get("input_ids"),
        given.get("inputs_embeds"),
        given.get("attention_mask"),
        given.get("position_ids"),
        past=cache.get_seq_length(),
        positions=_positions[model],
        is_random=is_random(model),
    )
    count = num_kept(model, given)
    num_computed = cache.begin_forward(
        rows,
        partial(_compute, model, cache, given, rows.past) if count else None,
        num_kept=count,
        attends_to_pages=_attends.get(model) if is_ours else False,
        wants_weights=bool(given.get("output_attentions")),
    )
    return (), _without_columns(given, num_computed)


def _after_forward(
    cache_type: "type[PagedCache]",
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    cache = _cache_among(cache_type, args, kwargs)
    if cache is None:
        return
    if output is None:  # an exception was raised
        cache.abort_forward()
        return
    attends = cache.end_forward()
    if attends is None:
        return
    _attends[model] = attends
    if not attends:
        warn_once(
            type(model),
            f"does not attend by {ATTENTION_NAME!r} to the keys and values that its cache returns: "
            "its pages are gathered in every step, as without 'pagedkv'",
        )


def _cache_among(
    cache_type: "type[PagedCache]", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "PagedCache | None":
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, cache_type)), None)


def _without_held(cache: "PagedCache", kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the columns that the cache holds, if they begin with all of these.

    Assisted decoding gives the whole prompt to a cache that may know its beginning.
    """
    ids, past = kwargs.get("input_ids"), cache.get_seq_length()
    if not past or ids is None or ids.shape[-1] <= past:
        return kwargs
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        is_whole = mask.shape == ids.shape
    elif positions is not None:
        is_whole = not positions[..., 0].any()
    else:
        is_whole = cache.is_prompt(ids)  # of a model that knows no positions
    if not is_whole:
        return kwargs
    cache.require_held(ids)
    return _without_columns(kwargs, past)


def _without_columns(kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments of a forward pass without its first columns."""
    if not count:
        return kwargs
    shorter = {n: kwargs[n][..., count:] for n in BY_COLUMN if kwargs.get(n) is not None}
    return kwargs | shorter


def _compute(
    model: PreTrainedModel,
    cache: "PagedCache",
    kwargs: dict[str, Any],
    past: int,
    numbers: Sequence[int],
    start: int,
    stop: int,
) -> None:
    """Compute some columns of some rows of a forward pass with these arguments."""
    index = torch.as_tensor(numbers, device=kwargs["input_ids"].device)
    part = {n: kwargs[n] for n in BY_COLUMN if kwargs.get(n) is not None}
    part = {n: v[..., start - past : stop - past] for n, v in part.items()}
    if kwargs.get("attention_mask") is not None:
        part["attention_mask"] = kwargs["attention_mask"][:, :stop]
    part = {n: v if len(v) == 1 else v[index] for n, v in part.items()}
    name = next(n for n, v in kwargs.items() if v is cache)
    model(**part, **{name: cache.of_rows(numbers)}, use_cache=True, logits_to_keep=1)
