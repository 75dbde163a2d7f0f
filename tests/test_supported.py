"""Which architectures ``spec_for`` refuses, and that those it does not are right to the token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from tiny_models import generate, largest_difference, open_cache, random_ids
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]

Build = Callable[[], PreTrainedModel]

DEPENDS = "so that the KV of a prefix depends on what follows"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


class PreparesItsOwn(LlamaForCausalLM):
    """As Voxtral does for real-time speech."""

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it is not used here")


def with_a_cache_of_its_own() -> PreTrainedModel:
    return PreparesItsOwn(tiny.llama().config).eval()


REFUSED: dict[str, tuple[Build, str]] = {
    "T5": (tiny.t5, "is an encoder-decoder"),
    "GPT": (tiny.openai_gpt, "takes no cache in its forward pass"),
    "RWKV": (tiny.rwkv, "takes no cache in its forward pass"),
    "BLIP-2": (tiny.blip2, "takes no cache in its forward pass"),
    "Mamba": (tiny.mamba, "recurrent or convolutional state .LinearAttentionLayer"),
    "LFM2": (tiny.lfm2, "recurrent or convolutional state .LinearAttentionLayer"),
    "Falcon H1": (
        tiny.falcon_h1,
        "recurrent or convolutional state .LinearAttentionAndFullAttentionLayer",
    ),
    "MiniMax": (
        lambda: tiny.minimax("linear_attention"),
        "recurrent or convolutional state .LinearAttentionLayer",
    ),
    "MiniMax without a state": (lambda: tiny.minimax("full_attention"), "has a cache of its own"),
    "a model that prepares its own": (with_a_cache_of_its_own, "has a cache of its own"),
    "Qwen3-Next without a state": (tiny.qwen3_next, "keeps a state beside its KV"),
    "DeepSeek V3.2": (tiny.deepseek_v32, "an index beside the keys .DynamicIndexedLayer"),
    "Gemma 3n": (tiny.gemma3n, "no KV of their own, but that of another layer, or none .DummyLay"),
    "BLT": (tiny.blt, "configuration from which transformers makes no cache .*num_hidden_layers"),
    "Bart with more layers": (
        lambda: tiny.bart(decoder_layers=4),
        "has 4 layers, but its configuration says 3",
    ),
    "Bart with fewer layers": (
        lambda: tiny.bart(decoder_layers=2),
        "has 2 layers, but its configuration says 3",
    ),
    "Dory": (tiny.dory, "runs layers several times"),
    "CPM-Ant": (tiny.cpmant, "puts tokens of its own before the prompt"),
    "XLM": (tiny.xlm, "is given a mask in the place of the next token"),
    "Moshi": (tiny.moshi, "leaves its window to the cache"),
    "BERT": (tiny.bert, f"later tokens too .is_decoder=False., {DEPENDS}"),
    "Gemma as an encoder": (
        lambda: tiny.gemma(is_causal=False),
        f"later tokens too .is_causal=False., {DEPENDS}",
    ),
    "bidirectional Gemma": (
        lambda: tiny.gemma(use_bidirectional_attention=True),
        f"later tokens too .use_bidirectional_attention., {DEPENDS}",
    ),
    "Doge": (tiny.doge, f"hides tokens by their weight .keep_window_size., {DEPENDS}"),
    "GPT-2 with cross-attention": (tiny.gpt2_that_listens, "cross-attention .add_cross_attention"),
    "Mllama": (tiny.mllama, "cross-attention .cross_attention_layers"),
    "IDEFICS": (tiny.idefics, "cross-attention .cross_layer_interval"),
    "dynamic NTK": (tiny.dynamic_ntk, "dynamic rotary positions: its keys depend on the total"),
    "dynamic NTK of old": (
        lambda: tiny.rope("rope_scaling", type="dynamic", factor=2.0),
        "dynamic rotary positions: its keys depend on the total",
    ),
    "dynamic NTK by layer type": (
        lambda: tiny.rope("by layer type", **DYNAMIC),
        "dynamic rotary positions: its keys depend on the total",
    ),
    "longrope": (tiny.longrope, "longrope rotary positions: its keys depend on the total"),
}


@pytest.fixture(scope="module")
def kv() -> Iterator[pk.PagedKVCache]:
    with pk.PagedKVCache(spec_for(tiny.llama()), 16) as cache:
        yield cache


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_kv_pages_cannot_hold_is_refused_before_it_is_used(
    name: str, kv: pk.PagedKVCache
) -> None:
    build, reason = REFUSED[name]
    model = build()
    reason = f"{type(model).__name__} .*{reason}.*generate without it"
    uses: list[Callable[[], Any]] = [
        lambda: spec_for(model),
        lambda: PagedCache(model, kv),
        lambda: PagedCache.from_prompt(model, random_ids(30, seed=1), kv),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=reason):
            use()
    assert kv.stats().num_pages_held == kv.stats().num_pinned_slots == 0


STATIC = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (tiny.llama, DYNAMIC),
        (
            lambda: tiny.rope("by layer type", **STATIC),
            {"full_attention": DYNAMIC, "sliding_attention": STATIC},
        ),
        (tiny.dynamic_ntk, STATIC),
        (
            lambda: tiny.rope("by layer type", **DYNAMIC),
            {"full_attention": STATIC, "sliding_attention": STATIC},
        ),
    ],
    ids=["configuration", "configuration by layer type", "module", "module by layer type"],
)
def test_positions_count_as_the_configuration_says_and_as_the_model_does(
    build: Build, parameters: dict[str, Any]
) -> None:
    """Either may have been changed after the other."""
    model = build()
    model.config.rope_parameters = parameters
    with pytest.raises(ValueError, match="dynamic rotary positions"):
        spec_for(model)


ACCEPTED: dict[str, Build] = {
    "BERT as a decoder": lambda: tiny.bert(is_decoder=True),
    "GPT-NeoX": tiny.gpt_neox,
    "Bart's decoder": tiny.bart,
    "Llama 4": tiny.llama4,
    "Dory with one loop": lambda: tiny.dory(n_recurrent_loops=1),
    "linear positions": lambda: tiny.rope("rope_scaling", type="linear", factor=2.0),
    "YaRN": lambda: tiny.rope(
        "rope_parameters",
        rope_type="yarn",
        factor=4.0,
        rope_theta=10000.0,
        original_max_position_embeddings=64,
    ),
}
"""Near to what is refused."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_not_refused_gives_the_tokens_of_dynamic_cache(name: str, tmp_path: Path) -> None:
    model, prompt = ACCEPTED[name](), random_ids(70, seed=2)
    other = torch.cat([prompt[:, :50], random_ids(20, seed=3)], dim=1)
    expected = [generate(model, ids, DynamicCache(config=model.config)) for ids in (prompt, other)]
    num_reused = []
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        for ids, right in zip((prompt, other), expected, strict=True):
            with PagedCache.from_prompt(model, ids, kv) as cache:
                output = generate(model, ids, cache)
                cache.commit(output.sequences)
                num_reused.append(cache.num_reused_tokens)
            assert torch.equal(output.sequences, right.sequences)
            assert largest_difference(output, right) < 1e-4
    assert num_reused == [0, 50]
