"""The hooks on a model: they show a ``PagedCache`` every forward pass that is given it."""

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from pagedkv_adapters.transformers.attention import ATTENTION_NAME, warn_once

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache

_MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features")
"""How the arguments begin by which models take what is no text."""

_attends: WeakKeyDictionary[PreTrainedModel, bool | None] = WeakKeyDictionary()
"""Whether a model attends to what its cache returns; None until a forward pass has shown it."""


def watch(model: PreTrainedModel, cache_type: "type[PagedCache]") -> None:
    """Show each cache of that type every forward pass of ``model`` that is given it."""
    if model in _attends:
        return
    _attends[model] = None
    model.register_forward_pre_hook(partial(_before_forward, cache_type), with_kwargs=True)
    model.register_forward_hook(partial(_after_forward, cache_type), with_kwargs=True)


def _before_forward(
    cache_type: "type[PagedCache]",
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    cache = _cache_among(cache_type, args, kwargs)
    if cache is None:
        return
    given = kwargs
    if args:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
    media = [n for n, v in given.items() if n.startswith(_MEDIA) and v is not None]
    if media:
        raise ValueError(
            f"{', '.join(media)} given: PagedCache takes text only, since page keys name nothing "
            "but token ids"
        )
    config = model.config.get_text_config(decoder=True)
    is_ours = getattr(config, "_attn_implementation", None) == ATTENTION_NAME
    cache.begin_forward(
        given.get("input_ids"),
        given.get("attention_mask"),
        given.get("position_ids"),
        attends_to_pages=_attends.get(model) if is_ours else False,
        wants_weights=bool(given.get("output_attentions")),
    )


def _after_forward(
    cache_type: "type[PagedCache]",
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    cache = _cache_among(cache_type, args, kwargs)
    attends = None if cache is None else cache.end_forward()
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
