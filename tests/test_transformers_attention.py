"""``attn_implementation="pagedkv"``: the tokens of DynamicCache, without gathering any page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from tiny_models import generate, largest_difference, open_cache, random_ids, whole_cache
from transformers import DynamicCache, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, paged_cache
from pagedkv_adapters.transformers.attention import Pages, mark, paged_attention

pytestmark = pytest.mark.torch

MODELS = [name for name in tiny.SUPPORTED if name != "Falcon"]
"""Falcon has an attention of its own."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of which keys and values were gathered."""
    layers: list[int] = []
    gather = pk.Sequence.gather

    def counted(sequence: pk.Sequence, layer: int, *arguments: Any) -> Any:
        layers.append(layer)
        return gather(sequence, layer, *arguments)

    monkeypatch.setattr(pk.Sequence, "gather", counted)
    return layers


def with_pages(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("pagedkv")
    return model


@pytest.mark.parametrize("num_slots", [4, 64])
@pytest.mark.parametrize("name", [*MODELS, "Gemma 2"])
def test_generate_gives_the_tokens_of_dynamic_cache(
    name: str, num_slots: int, tmp_path: Path, gathers: list[int]
) -> None:
    model = tiny.gemma2() if name == "Gemma 2" else tiny.SUPPORTED[name]()
    prompt = random_ids(300, seed=1)
    expected = generate(model, prompt, whole_cache())
    with_pages(model)
    with (
        open_cache(model, tmp_path / "cache.zarr", num_slots) as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
    ):
        found = generate(model, prompt, cache)
        assert gathers == []
        assert torch.equal(found.sequences, expected.sequences)
        assert largest_difference(found, expected) <= 1e-4
        assert (kv.stats().num_slices_loaded > 0) == (num_slots == 4)
        kv.check_invariants()


@pytest.mark.parametrize("name", MODELS)
def test_a_reused_prefix_is_attended_too(name: str, tmp_path: Path) -> None:
    model, prompt = with_pages(tiny.SUPPORTED[name]()), random_ids(300, seed=2)
    for num_reused in (0, 288):
        with (
            open_cache(model, tmp_path / "cache.zarr") as kv,
            PagedCache.from_prompt(model, prompt, kv) as cache,
        ):
            assert cache.num_reused_tokens == num_reused
            found = generate(model, prompt, cache)
            cache.commit(found.sequences)
            kv.flush()
    model.set_attn_implementation("sdpa")
    expected = generate(model, prompt, whole_cache())
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found, expected) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype, tmp_path: Path) -> None:
    model, prompt = tiny.llama().to(dtype), random_ids(100, seed=3)
    expected = generate(model, prompt, whole_cache(), max_new_tokens=2)
    with (
        open_cache(with_pages(model), tmp_path / "cache.zarr") as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
    ):
        found = generate(model, prompt, cache, max_new_tokens=2)
    scale = float(expected.logits[1].abs().max())
    assert largest_difference(found, expected) <= 0.03 * scale


def test_without_a_paged_cache_it_is_torch_s_own_attention() -> None:
    model, prompt = tiny.llama(), random_ids(60, seed=4)
    expected = generate(model, prompt, DynamicCache())
    found = generate(with_pages(model), prompt, DynamicCache())
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found, expected) == 0


def test_scores_are_capped_without_a_paged_cache_too() -> None:
    model, prompt = tiny.gemma2(), random_ids(60, seed=5)
    model.set_attn_implementation("eager")
    expected = generate(model, prompt, DynamicCache())
    found = generate(with_pages(model), prompt, DynamicCache())
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found, expected) <= 1e-4


def test_a_model_that_attends_to_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention would see the newest tokens only."""
    monkeypatch.setattr(paged_cache, "mark", lambda keys, pages: None)
    model, prompt = with_pages(tiny.llama()), random_ids(60, seed=6)
    with (
        open_cache(model, tmp_path / "cache.zarr") as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
        pytest.raises(ValueError, match="did not attend to layer 0 by 'pagedkv'"),
    ):
        generate(model, prompt, cache)


def test_a_model_with_an_attention_of_its_own_is_refused_at_construction(tmp_path: Path) -> None:
    model = tiny.falcon()
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        model.config._attn_implementation = "pagedkv"
        with pytest.raises(ValueError, match="FalconForCausalLM has an attention of its own"):
            PagedCache(model, kv)


@pytest.mark.parametrize("option", ["s_aux", "position_bias", "dropout"])
def test_what_pages_cannot_do_is_refused(option: str, tmp_path: Path) -> None:
    model = with_pages(tiny.llama())
    with (
        open_cache(model, tmp_path / "cache.zarr") as kv,
        PagedCache(model, kv) as cache,
    ):
        states = torch.ones(1, 2, 1, 16)
        mark(states, Pages(cache, 0))
        options: dict[str, Any] = {option: 0.1 if option == "dropout" else states}
        with pytest.raises(ValueError, match=f"attends with {option}, which 'pagedkv' does not"):
            paged_attention(model, torch.ones(1, 4, 1, 16), states, states, None, **options)
