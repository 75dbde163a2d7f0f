"""Every way to generate with real models, float32: the tokens of ``DynamicCache``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import torch
from tiny_models import largest_difference, open_cache, usual_cache
from transformers import PreTrainedModel
from ways_to_generate import WAYS, WITH_EQUAL_ROWS, Prompts, Run, Setting

import pagedkv as pk
from pagedkv_adapters.demo.prompt import alice_text
from pagedkv_adapters.demo.wheel_model import GEMMA3, SMOLLM2
from pagedkv_adapters.transformers import PagedCache

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_fsync")]

NUM_SLOTS = 5
"""Every way needs more pages: what has no slot is on disk."""
NUM_NEW = 10


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("smollm2", id="SmolLM2", marks=pytest.mark.model(SMOLLM2)),
        pytest.param("gemma3", id="Gemma 3", marks=pytest.mark.model(GEMMA3)),
    ],
)
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    found: tuple[Any, Any] = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Iterator[PreTrainedModel]:
    before = loaded[0].config._attn_implementation
    yield loaded[0]
    loaded[0].set_attn_implementation(before)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Any, Any]) -> Prompts:
    """Parts of a book."""
    ids = loaded[1](alice_text(), return_tensors="pt").input_ids

    def prompt(num_tokens: int, number: int) -> torch.Tensor:
        part: torch.Tensor = ids[:, 97 * number :][:, :num_tokens]
        assert part.shape == (1, num_tokens)
        return part

    return prompt


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, Any], prompts: Prompts) -> dict[str, Run]:
    """Of each way, computed when it is first asked for."""

    class Expected(dict[str, Run]):
        def __missing__(self, way: str) -> Run:
            model = loaded[0]
            assert model.config._attn_implementation == "sdpa"
            self[way] = WAYS[way](Setting(model, prompts, lambda *_: usual_cache(model), NUM_NEW))
            return self[way]

    return Expected()


@pytest.mark.parametrize("attention", ["sdpa", "pagedkv"])
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_dynamic_cache(
    way: str,
    attention: str,
    model: PreTrainedModel,
    prompts: Prompts,
    expected: dict[str, Run],
    tmp_path: Path,
) -> None:
    wanted = expected[way]
    model.set_attn_implementation(attention)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=NUM_SLOTS) as kv:
        found = WAYS[way](Setting(model, prompts, new_cache(model, kv), NUM_NEW))
        assert kv.stats().num_pages_held > kv.num_slots
        found.cache.commit(found.outputs[-1].sequences)
        found.cache.close()
        kv.check_invariants()
        assert kv.stats().num_pages_held == kv.stats().num_pinned_slots == 0
    for output, right in zip(found.outputs, wanted.outputs, strict=True):
        assert torch.equal(output.sequences, right.sequences)
        # DynamicCache computes rows that are alike one by one, in places of a matrix in which
        # the last bit may differ; ours are one sequence.
        is_equal_to_the_bit = attention == "sdpa" and way not in WITH_EQUAL_ROWS
        assert largest_difference(output, right) <= (0 if is_equal_to_the_bit else 1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "pagedkv"])
def test_a_prefix_is_reused_after_a_restart(
    attention: str, model: PreTrainedModel, prompts: Prompts, tmp_path: Path
) -> None:
    ids = prompts(180, 3)
    longer = Setting(model, prompts, lambda *_: usual_cache(model), NUM_NEW)
    wanted = longer.generate(ids, longer.cache_for(ids))
    model.set_attn_implementation(attention)
    for num_tokens, num_reused in ((150, 0), (180, 144)):
        with open_cache(model, tmp_path / "cache.zarr", num_slots=NUM_SLOTS) as kv:
            given = Setting(model, prompts, new_cache(model, kv), NUM_NEW)
            with given.cache_for(ids[:, :num_tokens]) as cache:
                assert cache.num_reused_tokens == num_reused
                found = given.generate(ids[:, :num_tokens], cache)
                cache.commit(found.sequences)
    assert torch.equal(found.sequences, wanted.sequences)
    assert largest_difference(found, wanted) <= 1e-4


def new_cache(model: PreTrainedModel, kv: pk.PagedKVCache) -> Any:
    return lambda ids, mask: PagedCache.from_prompt(model, ids, kv, attention_mask=mask)
