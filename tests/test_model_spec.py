"""``spec_for``: the geometry of what a model caches, and the models that have no single one."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from tiny_models import generate, random_ids, usual_cache
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, model_spec, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]

Build = Callable[[], PreTrainedModel]

BUILD: dict[str, Build] = {
    **tiny.SUPPORTED,
    "Falcon 40B": lambda: tiny.falcon(new_decoder_architecture=True, num_kv_heads=2),
    "Falcon RW": lambda: tiny.falcon(multi_query=False, alibi=True),
    "Llama with heads of another size": lambda: tiny.llama(head_dim=24),
    "Llama without KV heads": lambda: tiny.llama(num_key_value_heads=None),
    "Bart's decoder": tiny.bart,
    "Whisper's decoder": tiny.whisper,
    "Llama 4": tiny.llama4,
    "JetMoE": tiny.jetmoe,
    "Bloom": tiny.bloom,
    "MPT": lambda: tiny.mpt(use_cache=True),
    "StableLM": tiny.stablelm,
}


@pytest.mark.parametrize("name", BUILD)
def test_the_spec_describes_the_kv_that_the_model_makes(name: str) -> None:
    model = BUILD[name]()
    spec = spec_for(model)
    cache = usual_cache(model)
    generate(model, random_ids(5, seed=9), cache, max_new_tokens=1)
    assert len(cache.layers) == spec.num_layers
    for layer in cache.layers:
        assert layer.keys.shape == (1, spec.num_kv_heads, 5, spec.head_dim)
        assert layer.values.shape == layer.keys.shape
        assert str(layer.keys.dtype) == f"torch.{spec.dtype}"


def test_a_model_without_a_head_for_words_has_a_spec_too() -> None:
    model = LlamaModel(LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2)).eval()
    ids = random_ids(40, seed=1)
    expected = model(ids).last_hidden_state
    with pk.PagedKVCache(spec_for(model), 16) as kv, PagedCache(model, kv) as cache:
        model(ids[:, :30], cache=cache)
        found = model(ids[:, 30:], cache=cache).last_hidden_state
    assert torch.allclose(found, expected[:, 30:], atol=1e-5)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (tiny.gemma4, "differ in their KV heads .2 of 16 channels, 2 of 32 channels."),
        (tiny.deepseek_v3, "latent attention .kv_lora_rank."),
        (tiny.mimo_v2, "values of 128 channels and keys of 16"),
        (lambda: tiny.llama().to(torch.float64), "computes in torch.float64: load it in one of"),
    ],
    ids=["Gemma 4", "DeepSeek V3", "MiMo V2", "float64"],
)
def test_kv_of_a_kind_that_a_spec_cannot_describe_is_refused(build: Build, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}"):
        spec_for(build())


def test_a_configuration_that_tells_no_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_spec, "require_supported", lambda *_: None)
    with pytest.raises(ValueError, match="tells no KV heads .*num_attention_heads"):
        spec_for(tiny.rwkv())


def test_a_model_that_generates_without_a_cache_is_refused() -> None:
    model = tiny.llama(use_cache=False)
    with pytest.raises(ValueError, match="set model.generation_config.use_cache = True"):
        spec_for(model)
    model.generation_config.use_cache = True
    spec_for(model)


def test_an_architecture_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That costs more than all the rest: many times a forward pass of a small model."""
    model, calls = tiny.llama(), []
    monkeypatch.setattr(model_spec, "require_supported", lambda *_: calls.append("looked"))
    assert spec_for(model) == spec_for(model)
    assert len(calls) == 1
    model.config = type(model.config)(**model.config.to_dict())
    spec_for(model)
    assert len(calls) == 2


def test_the_dtype_is_looked_at_in_every_call() -> None:
    model = tiny.llama()
    dtypes = [spec_for(model.to(dtype)).dtype for dtype in (torch.bfloat16, torch.float16)]
    assert dtypes == ["bfloat16", "float16"]
