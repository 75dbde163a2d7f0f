"""The ``KVSpec`` of a transformers model, and its windows."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers.loaded_model import require_plain
from pagedkv_adapters.transformers.model_fingerprint import fingerprint
from pagedkv_adapters.transformers.supported import require_supported

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Geometry(NamedTuple):
    """The KV of one token.

    Args:
        num_layers: Layers that keep it.
        num_kv_heads: Heads of each.
        head_dim: Channels of a head, of keys as of values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int


_geometries: WeakKeyDictionary[PreTrainedModel, tuple[Any, Geometry]] = WeakKeyDictionary()
"""What was found for a model that is supported, and for which configuration."""


def spec_for(
    model: PreTrainedModel, page_tokens: int = 16, model_fingerprint: str | None = None
) -> pk.KVSpec:
    """The ``KVSpec`` of a transformers model.

    Args:
        model: A causal language model.
        page_tokens: Tokens of a page.
        model_fingerprint: Fingerprint of the weights; ``fingerprint(model)`` by default.

    Raises:
        ValueError: Pages cannot hold the model's KV, or not as it was loaded; the message says why
            and what to do.
    """
    require_plain(model, is_named=model_fingerprint is not None)
    known_config, geometry = _geometries.get(model, (None, None))
    if geometry is None or known_config is not model.config:
        geometry = _geometry_of(model)
        _geometries[model] = (model.config, geometry)
    name = type(model).__name__
    if getattr(getattr(model, "generation_config", None), "use_cache", None) is False:
        raise ValueError(
            f"{name} generates without a cache: set model.generation_config.use_cache = True"
        )
    if model.dtype not in _DTYPES:
        known = ", ".join(_DTYPES.values())
        raise ValueError(f"{name} computes in {model.dtype}: load it in one of {known}")
    return pk.KVSpec(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        page_tokens=page_tokens,
        dtype=_DTYPES[model.dtype],
        model=fingerprint(model) if model_fingerprint is None else model_fingerprint,
    )


def windows_of(model: PreTrainedModel, *, window_only: bool) -> list[int | None]:
    """The window of each layer, as ``DynamicCache`` knows it; None where there is none.

    Raises:
        ValueError: Some layer has none, and there are to be windows only.
    """
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    windows = windows or [None] * config.num_hidden_layers
    if window_only and None in windows:
        raise ValueError(
            f"window_only: layer {windows.index(None)} of {type(model).__name__} has no window, so "
            "that it looks at all pages: leave window_only out"
        )
    return windows


def _geometry_of(model: PreTrainedModel) -> Geometry:
    """The geometry of a model; ``ValueError`` if it is not supported, or has several."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    require_supported(model, config)
    try:
        found = {_heads_of(layer): None for layer in config.per_layer_config}
    except AttributeError as error:
        raise ValueError(f"{name} has a configuration that tells no KV heads ({error})") from error
    if len(found) > 1:
        pairs = ", ".join(f"{heads} of {channels} channels" for heads, channels in found)
        raise ValueError(
            f"{name} has layers that differ in their KV heads ({pairs}), which is not supported yet"
        )
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name} uses latent attention (kv_lora_rank), which is not supported yet")
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim and value_dim != (getattr(config, "head_dim", None) or value_dim):
        raise ValueError(
            f"{name} has values of {value_dim} channels and keys of {config.head_dim}, which is "
            "not supported yet"
        )
    return Geometry(config.num_hidden_layers, *next(iter(found)))


def _heads_of(config: Any) -> tuple[int, int]:
    """KV heads and channels of a head of a layer."""
    of_decoder = getattr(config, "decoder_attention_heads", None)  # beside those of an encoder
    num_heads = of_decoder or config.num_attention_heads
    num_kv_heads = of_decoder or getattr(config, "num_key_value_heads", None) or num_heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        num_kv_heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_kv_heads, head_dim
