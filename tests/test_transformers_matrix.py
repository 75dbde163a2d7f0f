"""Ways to generate x kinds of models x types x attention: the tokens of ``DynamicCache``.

No combination is left out. Logits are compared to the bit where the forward passes have the same
shape and torch attends, which it does in bfloat16 for contexts of this size. Elsewhere they are
within 1e-4 in float32; in bfloat16 they are not compared, since a bit of the last place is more.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from tiny_models import largest_difference, open_cache, random_ids, usual_cache
from transformers import PreTrainedModel
from ways_to_generate import WAYS, Setting

from pagedkv_adapters.transformers import PagedCache

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder", "no_fsync"),
]

MODELS = {
    "Llama": tiny.llama,
    "Gemma 3": tiny.gemma3,
    "Qwen3": tiny.qwen3,
    "Mistral with a window": tiny.mistral,
    "GPT-2": tiny.gpt2,
}
NUM_SLOTS = 8
"""Every way needs more pages: what has no slot is on disk."""

kinds_of_models = pytest.mark.parametrize("name", MODELS)
types = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
attentions = pytest.mark.parametrize("attention", ["sdpa", "pagedkv"])


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = MODELS[name]().to(dtype)
    return model


@attentions
@types
@pytest.mark.parametrize("way", WAYS)
@kinds_of_models
def test_the_tokens_are_those_of_dynamic_cache(
    name: str, way: str, dtype: torch.dtype, attention: str, tmp_path: Path
) -> None:
    model = build(name, dtype)
    expected = WAYS[way](Setting(model, random_ids, lambda *_: usual_cache(model)))
    model.set_attn_implementation(attention)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=NUM_SLOTS) as kv:

        def new_cache(ids: torch.Tensor, mask: torch.Tensor) -> PagedCache:
            return PagedCache.from_prompt(model, ids, kv, attention_mask=mask)

        found = WAYS[way](Setting(model, random_ids, new_cache))
        assert kv.stats().num_pages_held > kv.num_slots
        found.cache.commit(found.outputs[-1].sequences)
        found.cache.close()
        kv.check_invariants()
        assert kv.stats().num_pinned_slots == 0
        assert kv.stats().num_pages_held == 0
    for output, wanted in zip(found.outputs, expected.outputs, strict=True):
        assert torch.equal(output.sequences, wanted.sequences)
        is_equal_to_the_bit = attention == "sdpa" or dtype == torch.bfloat16
        assert largest_difference(output, wanted) <= (0 if is_equal_to_the_bit else 1e-4)


@attentions
@types
@kinds_of_models
def test_a_prefix_is_reused_after_a_restart(
    name: str, dtype: torch.dtype, attention: str, tmp_path: Path
) -> None:
    model = build(name, dtype)
    prompt = random_ids(150, seed=20)
    longer = torch.cat([prompt, random_ids(30, seed=21)], dim=1)
    expected = generate(model, longer, usual_cache(model))
    model.set_attn_implementation(attention)
    with (
        open_cache(model, tmp_path / "cache.zarr", num_slots=NUM_SLOTS) as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
    ):
        cache.commit(generate(model, prompt, cache).sequences)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=NUM_SLOTS) as kv:
        with PagedCache.from_prompt(model, longer, kv) as cache:
            assert cache.num_reused_tokens == 150
            found = generate(model, longer, cache)
        kv.check_invariants()
    assert torch.equal(found.sequences, expected.sequences)
    if dtype == torch.float32:
        assert largest_difference(found, expected) <= 1e-4


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> Any:
    return Setting(model, random_ids, lambda *_: cache).generate(ids, cache)
