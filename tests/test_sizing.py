"""Sizes are those of the real tensors and of the real store."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sizing import size_kv
from pagedkv.spec import KVSpec

LLAMA_31_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "layer_types": ["full_attention"] * 36,
    "dtype": "bfloat16",
}
QWEN25_05B = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "torch_dtype": "bfloat16",
}
MISTRAL_NEMO = {  # 32 heads of 128 in a hidden size of 5120: head_dim is not their quotient
    "model_type": "mistral",
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "torch_dtype": "bfloat16",
}
GEMMA_3_4B = {  # as published: what equals the type's default is left out
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152},
}
GPT_2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "hidden_size": 4544,
    "torch_dtype": "bfloat16",
}


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "token_nbytes"),
    [
        pytest.param(LLAMA_31_8B, 2 * 32 * 8 * 128 * 2, id="llama"),
        pytest.param(QWEN3_8B, 2 * 36 * 8 * 128 * 2, id="qwen3"),
        pytest.param(QWEN25_05B, 2 * 24 * 2 * 64 * 2, id="qwen2"),
        pytest.param(MISTRAL_NEMO, 2 * 40 * 8 * 128 * 2, id="mistral"),
        pytest.param(GEMMA_3_4B, 2 * 34 * 4 * 256 * 2, id="gemma3"),
        pytest.param(GPT_2, 2 * 12 * 12 * 64 * 4, id="gpt2"),
        pytest.param(FALCON_7B, 2 * 32 * 1 * 64 * 2, id="falcon"),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, config: dict[str, Any], token_nbytes: int) -> None:
    assert size_kv(folder_of(tmp_path, config), 1).token_nbytes == token_nbytes


def test_a_context_fills_whole_pages(tmp_path: Path) -> None:
    size = size_kv(folder_of(tmp_path, LLAMA_31_8B), 1000, page_tokens=16)
    assert size.num_pages == 63
    assert size.page_nbytes == 16 * size.token_nbytes
    assert size.pool_nbytes == 63 * 16 * 131072
    assert size.max_context_tokens == 131072
    assert size_kv(tmp_path, 1008, page_tokens=16).num_pages == 63
    assert size_kv(tmp_path, 1009, page_tokens=16).num_pages == 64


def test_memory_holds_whole_pages_only(tmp_path: Path) -> None:
    page_nbytes = 16 * 131072
    folder = folder_of(tmp_path, LLAMA_31_8B)
    assert size_kv(folder, 1, memory=3 * page_nbytes + page_nbytes - 1).memory_tokens == 48
    assert size_kv(folder, 1, memory="8GiB").memory_tokens == 65536
    assert size_kv(folder, 1, memory=1).memory_tokens == 0
    assert size_kv(folder, 1).memory_tokens is None


def test_dtype_may_be_chosen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_31_8B)
    assert size_kv(folder, 16).dtype == "bfloat16"
    wide = size_kv(folder, 16, dtype="float32")
    assert (wide.dtype, wide.token_nbytes) == ("float32", 262144)


def test_int8_needs_less_disk_than_raw_and_both_more_than_the_bare_numbers(tmp_path: Path) -> None:
    size = size_kv(folder_of(tmp_path, LLAMA_31_8B), 4096)
    assert size.pool_nbytes < size.disk_nbytes["raw"] < 1.01 * size.pool_nbytes
    assert size.pool_nbytes / 2 < size.disk_nbytes["int8"] < 0.6 * size.pool_nbytes


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_disk_is_what_a_store_takes(tmp_path: Path, codec: str) -> None:
    store_module = pytest.importorskip("pagedkv.store")
    import numpy as np

    from pagedkv.format import PageEntry
    from pagedkv.prefix import page_keys

    config = {"model_type": "llama", "n_layer": 3, "n_head": 2, "hidden_size": 16}
    size = size_kv(folder_of(tmp_path, config), 100)
    spec = KVSpec(
        num_layers=3, num_kv_heads=2, head_dim=8, page_tokens=16, dtype="float32", model="m"
    )
    keys = page_keys(spec, range(16 * size.num_pages))
    entries = [
        PageEntry(key=key, num_tokens=16, parent=parent, tokens=tokens)
        for key, parent, tokens in zip(keys, keys.parents, keys.tokens, strict=True)
    ]
    pages = np.random.default_rng(0).random((len(keys), *spec.page_shape), dtype=np.float32)
    with store_module.PageStore.open(tmp_path / "cache.zarr", spec, codec=codec) as store:
        store.write(0, entries, list(pages))
    files = [path for path in (tmp_path / "cache.zarr").rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files if path.suffix not in (".json", ".lock"))
    assert taken == size.disk_nbytes[codec]


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3Text", "GPT2"]
)
def test_sizes_are_those_of_the_tensors_of_transformers(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    names = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "GPT2":
        names = {"n_embd": 48, "n_layer": 2, "n_head": 4}
    else:
        names |= {"num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(vocab_size=32, pad_token_id=0, **names)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.arange(1, 17)[None], use_cache=True).past_key_values
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size_kv(tmp_path, 16).pool_nbytes == nbytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"\(linear_attention\)"),
        ({"state_size": 16}, "recurrent state"),
        ({"num_kv_shared_layers": 10}, "share the KV"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "differ in their heads"),
        ({"num_key_value_heads": [1, 2]}, "num_key_value_heads is"),
        ({"num_hidden_layers": None}, "num_hidden_layers, n_layer"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"hidden_size": 4097}, "4097 does not split into 32 heads"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        size_kv(folder_of(tmp_path, {**LLAMA_31_8B, **change}), 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_tokens": 0}, "the context is 0 tokens"),
        ({"context_tokens": -5}, "the context is -5 tokens"),
        ({"context_tokens": 1, "page_tokens": 0}, "page_tokens is 0"),
        ({"context_tokens": 1, "dtype": "int4"}, "'int4'"),
        ({"context_tokens": 1, "memory": "many"}, "'many' is no byte size"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_kv(folder_of(tmp_path, LLAMA_31_8B), **arguments)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        size_kv(tmp_path, 16)


def test_a_size_is_plain_data(tmp_path: Path) -> None:
    values = asdict(size_kv(folder_of(tmp_path, GEMMA_3_4B), 100, memory="1GB"))
    assert json.loads(json.dumps(values)) == values
