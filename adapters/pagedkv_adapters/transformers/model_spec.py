"""The ``KVSpec`` of a transformers model, or why there is none."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

import pagedkv as pk
from pagedkv_adapters.transformers.model_fingerprint import fingerprint

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_ATTENTION_TYPES = ("full_attention", "sliding_attention")


def spec_for(
    model: PreTrainedModel, page_tokens: int = 16, model_fingerprint: str | None = None
) -> pk.KVSpec:
    """The ``KVSpec`` of a transformers model.

    Args:
        model: A causal language model.
        page_tokens: Tokens of a page.
        model_fingerprint: Fingerprint of the weights; ``fingerprint(model)`` by default.

    Raises:
        ValueError: The model's cache is of a kind that pages cannot hold; the message says why.
    """
    config = model.config.get_text_config(decoder=True)
    _refuse_unsupported(model, config)
    try:
        num_kv_heads, head_dim = _heads_of(config)
    except AmbiguousGlobalPerLayerAttributeError as error:
        raise ValueError(
            f"{type(model).__name__} has layers that differ in their KV heads, which is not "
            f"supported yet ({error})"
        ) from error
    return pk.KVSpec(
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=_DTYPES[model.dtype],
        model=fingerprint(model) if model_fingerprint is None else model_fingerprint,
    )


def _heads_of(config: Any) -> tuple[int, int]:
    """KV heads and channels of a head, the same in every layer."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        num_kv_heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_kv_heads, head_dim


def _refuse_unsupported(model: PreTrainedModel, config: Any) -> None:
    """``ValueError`` with the reason if pages cannot hold the KV of this model."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder: only causal models are supported")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            f"{name} attends to later tokens too (use_bidirectional_attention), so that the KV of "
            "a prefix depends on what follows"
        )
    if getattr(config, "keep_window_size", None):
        raise ValueError(
            f"{name} hides tokens by their weight (keep_window_size), so that the KV of a prefix "
            "depends on what follows"
        )
    if model.dtype not in _DTYPES:
        known = ", ".join(_DTYPES.values())
        raise ValueError(f"{name} computes in {model.dtype}: load it in one of {known}")
    others = set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_TYPES)
    if others:
        raise ValueError(f"{name} has layers that keep no plain KV: {', '.join(sorted(others))}")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name} uses latent attention (kv_lora_rank), which is not supported yet")
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim and value_dim != (getattr(config, "head_dim", None) or value_dim):
        raise ValueError(
            f"{name} has values of {value_dim} channels and keys of {config.head_dim}, which is "
            "not supported yet"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name} shares KV between layers, which is not supported yet")
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _LENGTH_DEPENDENT:
            raise ValueError(
                f"{name} uses {kind} rotary positions: its keys depend on the total length, so "
                "that a stored prefix would be wrong in a longer prompt"
            )


def _rope_types(parameters: Any) -> set[str]:
    """All ``rope_type`` values of a configuration, nested by layer type or not."""
    if not isinstance(parameters, dict):
        return set()
    found = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return found.union(*(_rope_types(value) for value in parameters.values()))
