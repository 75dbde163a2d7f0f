"""Whether pages can hold the KV of an architecture, and if not, why."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

_INSTEAD = "PagedCache cannot hold its KV: generate without it"
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that keep keys and values by token, and nothing else."""
_WHAT_IT_KEEPS = {
    LinearAttentionCacheLayerMixin: "a recurrent or convolutional state",
    DynamicIndexedLayer: "an index beside the keys",
    DummyLayer: "no KV of their own, but that of another layer, or none",
}
_USUAL_PREPARATION = (None, GenerationMixin._prepare_cache_for_generation)
"""How a model that has no cache of its own gets one for ``generate``."""
_MASKED = "is given a mask in the place of the next token, whose KV is not that of the token"
_WINDOW = "leaves its window to the cache, and its masks do not have it (sliding_window)"
_BY_NAME = {
    "cpmant": "puts tokens of its own before the prompt (prompt_length)",
    "flaubert": _MASKED,
    "kyutai_speech_to_text": _WINDOW,
    "moshi": _WINDOW,
    "moshi_depth": _WINDOW,
    "xlm": _MASKED,
}
"""By ``model_type``, what nothing else tells."""


def require_supported(model: PreTrainedModel, config: Any) -> None:
    """``ValueError`` if pages cannot hold the KV of a model, or would give back wrong KV.

    Where transformers itself says what is needed, that is what counts: the layers that it puts into
    a ``DynamicCache``, and the parameters of ``forward``.

    Args:
        model: The model.
        config: Its decoder's configuration.
    """
    for why_not in _CHECKS:
        reason = why_not(model, config)
        if reason is not None:
            raise ValueError(f"{type(model).__name__} {reason}. {_INSTEAD}")


def _takes_no_cache(model: PreTrainedModel, config: Any) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "is an encoder-decoder, and only causal models are supported"
    if "cache" not in inspect.signature(model.forward).parameters:
        return "takes no cache in its forward pass"
    return None


def _layers_are_not_plain(model: PreTrainedModel, config: Any) -> str | None:
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"has a configuration from which transformers makes no cache ({error})"
    for kind in {type(layer): None for layer in layers}:
        if kind not in _PLAIN:
            keeps = next((w for base, w in _WHAT_IT_KEEPS.items() if issubclass(kind, base)), None)
            return f"has layers that keep {keeps or 'more than plain KV'} ({kind.__name__})"
    numbers = [m.__dict__.get("layer_idx") for m in model.modules()]
    num_layers = 1 + max((n for n in numbers if isinstance(n, int)), default=-1)
    if num_layers > len(layers) or getattr(config, "decoder_layers", len(layers)) < len(layers):
        return f"has {num_layers} layers, but its configuration says {len(layers)}"
    return None


def _cache_is_its_own(model: PreTrainedModel, config: Any) -> str | None:
    if getattr(model, "_is_stateful", False):
        return "keeps a state beside its KV"
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    prepares = getattr(type(model), "_prepare_cache_for_generation", None)
    if (supports is not None and not supports()) or prepares not in _USUAL_PREPARATION:
        return "has a cache of its own"
    if getattr(config, "n_recurrent_loops", 1) > 1:
        return "runs layers several times and adds to the cache what they need (n_recurrent_loops)"
    return _BY_NAME.get(getattr(config, "model_type", ""))


def _attends_to_later_tokens(model: PreTrainedModel, config: Any) -> str | None:
    because = None
    if hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", None) is False:
        because = "attends to later tokens too (is_decoder=False)"  # BERT and its like
    elif not getattr(config, "is_causal", True):
        because = "attends to later tokens too (is_causal=False)"
    elif getattr(config, "use_bidirectional_attention", False):
        because = "attends to later tokens too (use_bidirectional_attention)"
    elif getattr(config, "keep_window_size", None):
        because = "hides tokens by their weight (keep_window_size)"
    return because and f"{because}, so that the KV of a prefix depends on what follows"


def _attends_to_other_inputs(model: PreTrainedModel, config: Any) -> str | None:
    for name in ("add_cross_attention", "cross_attention_layers", "cross_layer_interval"):
        if getattr(config, name, None):
            return (
                f"has cross-attention ({name}), so that its KV depends on more than the token ids"
            )
    return None


def _positions_depend_on_the_length(model: PreTrainedModel, config: Any) -> str | None:
    found = [getattr(config, "rope_parameters", None)]
    found += [{"rope_type": module.__dict__.get("rope_type")} for module in model.modules()]
    for kind in sorted(set().union(*map(_rope_types, found))):
        if "dynamic" in kind or kind == "longrope":
            return (
                f"uses {kind} rotary positions: its keys depend on the total length, so that a "
                "stored prefix would be wrong in a longer prompt"
            )
    return None


def _rope_types(found: Any) -> set[str]:
    """All strings under ``rope_type`` or ``type``, nested by layer type or not."""
    if not isinstance(found, dict):
        return set()
    kinds: set[str] = set()
    for key, value in found.items():
        if key not in ("rope_type", "type"):
            kinds |= _rope_types(value)
        elif isinstance(value, dict):
            kinds |= {kind for kind in value.values() if isinstance(kind, str)}
        elif isinstance(value, str):
            kinds.add(value)
    return kinds


_CHECKS: tuple[Callable[[PreTrainedModel, Any], str | None], ...] = (
    _takes_no_cache,
    _layers_are_not_plain,
    _cache_is_its_own,
    _attends_to_later_tokens,
    _attends_to_other_inputs,
    _positions_depend_on_the_length,
)
