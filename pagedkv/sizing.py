"""What the KV of a model needs at a context: in the pool, and on disk by codec."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.codec import Codec, Int8, Raw
from pagedkv.format import Geometry
from pagedkv.model_config import read_config
from pagedkv.spec import DTYPES, KVSpec, parse_nbytes

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LIMIT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

_PUBLISHED_WITHOUT: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
"""Values of model types whose published ``config.json`` leaves out what equals the type's default.

Their head_dim is not ``hidden_size / num_attention_heads``, so that deriving it would be wrong.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """What the KV of one sequence needs.

    Args:
        model_type: The model's architecture, as its config names it.
        num_layers: Layers that hold KV.
        num_kv_heads: KV heads of a layer.
        head_dim: Channels of a head.
        dtype: Type of one number.
        page_tokens: Tokens of a page.
        context_tokens: Tokens of the sequence.
        max_context_tokens: The longest context that the model was made for; None if it says none.
        token_nbytes: Bytes of one token's KV.
        page_nbytes: Bytes of a page in the pool.
        num_pages: Pages of the sequence, the last one perhaps not full.
        pool_nbytes: Bytes of the pool that holds all of them.
        disk_nbytes: For each codec's name, bytes of a store that holds all of them: the pages with
            their checksums and indexes, and the catalogue.
        memory_nbytes: The memory that was asked about, if any.
        memory_tokens: Tokens that a pool of ``memory_nbytes`` holds, in whole pages.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    context_tokens: int
    max_context_tokens: int | None
    token_nbytes: int
    page_nbytes: int
    num_pages: int
    pool_nbytes: int
    disk_nbytes: Mapping[str, int]
    memory_nbytes: int | None
    memory_tokens: int | None


def size_kv(
    model: str | os.PathLike[str],
    context_tokens: int,
    *,
    page_tokens: int = 16,
    dtype: str | None = None,
    memory: int | str | None = None,
) -> KVSize:
    """What the KV of the model in folder ``model`` needs for ``context_tokens`` tokens.

    Reads ``config.json`` alone. Layers with an attention window count in full: the cache keeps all
    of their KV, so that prefixes can be reused.

    Args:
        model: Folder of a decoder model, in the layout of transformers.
        context_tokens: Tokens of the sequence.
        page_tokens: Tokens of a page.
        dtype: Type of the KV; the config's by default.
        memory: Bytes, or a text such as ``"8GiB"``; how many tokens do they hold?

    Raises:
        ValueError: The folder holds no readable config; or it describes a model whose KV is not one
            key and one value a head in equal layers, with the reason; or a number is not positive.
    """
    if context_tokens <= 0:
        raise ValueError(f"the context is {context_tokens} tokens: it must be at least 1")
    config = _text_config(read_config(Path(model)))
    spec = _spec(config, page_tokens, dtype, Path(model))
    num_pages = -(-context_tokens // page_tokens)
    memory_nbytes = None if memory is None else parse_nbytes(memory)
    codecs: tuple[Codec, ...] = (Raw(), Int8())
    return KVSize(
        model_type=str(config.get("model_type", "unknown")),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        page_tokens=page_tokens,
        context_tokens=context_tokens,
        max_context_tokens=_first(config, _LIMIT),
        token_nbytes=spec.page_nbytes // page_tokens,
        page_nbytes=spec.page_nbytes,
        num_pages=num_pages,
        pool_nbytes=num_pages * spec.page_nbytes,
        disk_nbytes={c.name: Geometry.of(spec, c).write_nbytes(num_pages) for c in codecs},
        memory_nbytes=memory_nbytes,
        memory_tokens=(
            None if memory_nbytes is None else memory_nbytes // spec.page_nbytes * page_tokens
        ),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model; it stands apart in models that also see or hear.

    What only the whole says, such as the dtype, is carried over.
    """
    for name in ("text_config", "language_config", "llm_config"):
        nested = config.get(name)
        if isinstance(nested, dict):
            shared = {
                key: value for key, value in config.items() if key in ("dtype", "torch_dtype")
            }
            return shared | nested
    return config


def _spec(config: dict[str, Any], page_tokens: int, dtype: str | None, model: Path) -> KVSpec:
    _refuse_other_kinds(config)
    config = {**_PUBLISHED_WITHOUT.get(str(config.get("model_type")), {}), **config}
    num_layers = _required(config, _LAYERS, model)
    num_heads = _required(config, _HEADS, model)
    head_dim = _first(config, _HEAD_DIM)
    if head_dim is None:
        hidden = _required(config, _HIDDEN, model)
        if num_heads <= 0 or hidden % num_heads:
            raise ValueError(
                f"{model}: hidden size {hidden} does not split into {num_heads} heads, and "
                "config.json gives no head_dim"
            )
        head_dim = hidden // num_heads
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype or _dtype(config),
        model="sizing only",
    )


def _refuse_other_kinds(config: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a model whose KV one spec of keys and values cannot describe."""
    kind = config.get("model_type", "this model")
    other_layers = {str(name) for name in config.get("layer_types") or ()} - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    reasons = {
        "it has multi-head latent attention, which caches one latent vector a token instead of a "
        "key and a value a head": config.get("kv_lora_rank"),
        "it is an encoder-decoder model": config.get("is_encoder_decoder"),
        f"it has layers without keys and values ({', '.join(sorted(other_layers))})": other_layers,
        "it has a recurrent state instead of keys and values": (
            config.get("state_size") or config.get("ssm_state_size") or config.get("mamba_d_state")
        ),
        "some of its layers share the KV of others": config.get("num_kv_shared_layers"),
        "its layers differ in their heads": (
            config.get("per_layer_config") or config.get("global_head_dim")
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"the KV of {kind} cannot be sized: {reason}")


def _num_kv_heads(config: dict[str, Any], num_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _first(config, _KV_HEADS) or num_heads


def _dtype(config: dict[str, Any]) -> str:
    """The dtype that transformers loads the model in when it is told none."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(
            f"config.json says dtype {dtype!r}: name that of the KV, one of {', '.join(DTYPES)}"
        )
    return dtype


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The number that the config gives under one of its usual names, or None."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"config.json says {name} is {value!r}: a single integer is needed")
        return value
    return None


def _required(config: dict[str, Any], names: tuple[str, ...], model: Path) -> int:
    value = _first(config, names)
    if value is None:
        raise ValueError(
            f"{model / 'config.json'} gives none of {', '.join(names)}: its KV cannot be sized"
        )
    return value
