"""``attn_implementation="pagedkv"``: the tokens of DynamicCache, without gathering any page."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import numpy as np
import tiny_models as tiny
import torch
from tiny_models import generate, largest_difference, open_cache, random_ids, usual_cache
from transformers import DynamicCache, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, attention, paged_cache
from pagedkv_adapters.transformers.attention import (
    MAX_QUERIES,
    paged_attention,
)
from pagedkv_adapters.transformers.forward_input import ForwardInput
from pagedkv_adapters.transformers.seen import Seen, seen_through

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]

MODELS = [*(name for name in tiny.SUPPORTED if name != "Falcon"), "StableLM"]
"""Falcon has an attention of its own."""
BUILD = {**tiny.SUPPORTED, "StableLM": tiny.stablelm, "Gemma 2": tiny.gemma2}


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of which keys and values were gathered."""
    layers: list[int] = []
    gather = pk.Sequence.gather

    def counted(sequence: pk.Sequence, layer: int, *arguments: Any, **options: Any) -> Any:
        layers.append(layer)
        return gather(sequence, layer, *arguments, **options)

    monkeypatch.setattr(pk.Sequence, "gather", counted)
    return layers


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, as if it was for the first time."""
    monkeypatch.setattr(attention, "_warned", set())
    messages: list[str] = []

    class Keep(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            messages.append(record.getMessage())
            return True

    keep = Keep()
    logger = logging.getLogger("pagedkv")
    logger.addFilter(keep)
    monkeypatch.setattr(logger, "filters", [keep])
    return messages


def with_pages(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("pagedkv")
    return model


@pytest.mark.parametrize("num_slots", [4, 64])
@pytest.mark.parametrize("name", [*MODELS, "Gemma 2"])
def test_generate_gives_the_tokens_of_dynamic_cache(
    name: str, num_slots: int, tmp_path: Path, gathers: list[int]
) -> None:
    model = BUILD[name]()
    prompt = random_ids(300, seed=1)
    expected = generate(model, prompt, usual_cache(model))
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
    model, prompt = with_pages(BUILD[name]()), random_ids(300, seed=2)
    for num_reused in (0, 299):
        with (
            open_cache(model, tmp_path / "cache.zarr") as kv,
            PagedCache.from_prompt(model, prompt, kv) as cache,
        ):
            assert cache.num_reused_tokens == num_reused
            found = generate(model, prompt, cache)
            cache.commit(found.sequences)
            kv.flush()
    model.set_attn_implementation("sdpa")
    expected = generate(model, prompt, usual_cache(model))
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found, expected) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype, tmp_path: Path) -> None:
    model, prompt = tiny.llama().to(dtype), random_ids(100, seed=3)
    expected = generate(model, prompt, usual_cache(model), max_new_tokens=2)
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


# -- what cannot be done over pages ------------------------------------------------------------


OTHER_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "GPT-OSS": (tiny.gpt_oss, "GptOssAttention attends with s_aux"),
    "Granite SWA": (tiny.granite_swa, "GraniteSWAAttention attends with s_aux"),
    "DiffLlama": (tiny.diffllama, "DiffLlamaForCausalLM does not attend by 'pagedkv' to the keys"),
    "JetMoE": (tiny.jetmoe, "JetMoeForCausalLM does not attend by 'pagedkv' to the keys"),
    "Bloom": (tiny.bloom, "BloomForCausalLM does not attend by 'pagedkv' to the keys"),
    "Falcon": (tiny.falcon, "FalconForCausalLM does not attend by 'pagedkv' to the keys"),
}
"""Models that attend otherwise, and what the log says of them."""


def named_for_pages(model: PreTrainedModel) -> PreTrainedModel:
    """Even where ``set_attn_implementation`` would leave it as it is, as loading does not."""
    model.config._attn_implementation = "pagedkv"
    return model


@pytest.mark.parametrize("num_slots", [4, 64])
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_give_what_they_give_without_pages_and_the_log_says_it_once(
    name: str, num_slots: int, tmp_path: Path, warnings: list[str]
) -> None:
    build, warning = OTHER_MODELS[name]
    model, prompt = build(), random_ids(300, seed=7)
    expected = generate(model, prompt, usual_cache(model))
    more = torch.cat([expected.sequences, random_ids(5, seed=8)], dim=1)
    expected_more = generate(model, more, usual_cache(model))
    named_for_pages(model)
    with open_cache(model, tmp_path / "cache.zarr", num_slots) as kv:
        for turn in range(2):
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                found = generate(model, prompt, cache)
                assert cache.num_reused_tokens == 299 * turn
                cache.commit(found.sequences)
            assert torch.equal(found.sequences, expected.sequences)
            # One token alone is rounded otherwise, by transformers without pages too.
            assert largest_difference(found, expected) <= (1e-4 if turn else 1e-5)
        with PagedCache.from_prompt(model, more, kv) as cache:  # a few tokens behind its prefix
            found = generate(model, more, cache)
        assert torch.equal(found.sequences, expected_more.sequences)
        assert largest_difference(found, expected_more) <= 1e-4
        kv.check_invariants()
    assert len(warnings) == 1
    assert warnings[0].startswith(warning)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_give_the_same_with_another_cache(name: str) -> None:
    model, prompt = OTHER_MODELS[name][0](), random_ids(60, seed=9)
    expected = generate(model, prompt, DynamicCache())
    found = generate(named_for_pages(model), prompt, DynamicCache())
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("name", ["Bloom", "MPT"])
def test_models_with_an_attention_of_their_own_may_be_loaded_with_the_name(name: str) -> None:
    build = {"Bloom": tiny.bloom, "MPT": tiny.mpt}[name]
    model, ids = build(attn_implementation="pagedkv"), random_ids(60, seed=9)
    assert torch.equal(model(ids).logits, build()(ids).logits)


def test_a_model_that_is_new_attends_to_pages_after_its_first_forward_pass(
    tmp_path: Path, gathers: list[int]
) -> None:
    prompt = random_ids(300, seed=10)
    for is_in_pool in (True, False):  # the prefix, whose model has not shown yet how it attends
        model = with_pages(tiny.llama())
        with open_cache(model, tmp_path / "cache.zarr") as kv:
            if is_in_pool:
                cache_prompt(model, prompt, kv)
                model = with_pages(tiny.llama())
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                gathers.clear()
                generate(model, prompt, cache)
                assert cache.num_reused_tokens == 299
                assert len(gathers) == 3
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                gathers.clear()
                generate(model, prompt, cache)
                assert gathers == []


def cache_prompt(model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        cache.commit(generate(model, prompt, cache).sequences)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_that_was_changed_since_is_refused(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention would see the newest tokens only."""
    model, prompt = with_pages(tiny.llama(num_hidden_layers=num_layers)), random_ids(60, seed=6)
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        cache_prompt(model, prompt, kv)
        monkeypatch.setattr(paged_cache, "mark", lambda keys, pages: keys)
        with (
            PagedCache(model, kv) as cache,
            pytest.raises(ValueError, match="did not attend to layer 0 by 'pagedkv'"),
        ):
            generate(model, prompt, cache)


def test_a_model_that_changes_the_values_since_is_refused(tmp_path: Path) -> None:
    model = with_pages(tiny.llama())
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        module, states = model.model.layers[0].self_attn, torch.ones(1, 2, 1, 16)
        none = np.zeros(1, dtype=np.int64)
        for past in (0, 1):
            cache.settle()
            given = ForwardInput(
                ids=None, num_rows=1, num_pads=none, past=past, num_columns=past + 1
            )
            cache.begin_forward(given, attends_to_pages=True)
            for layer in range(3 if past == 0 else 1):
                keys, values = cache.update(states, states, layer)
            if past == 0:
                cache.end_forward()
        with pytest.raises(ValueError, match="changed the values of layer 0"):
            paged_attention(module, torch.ones(1, 4, 1, 16), keys, values * 2, None)


@pytest.mark.parametrize("option", ["s_aux", "head_mask", "softcap", "indices"])
def test_what_neither_pages_nor_torch_can_do_is_refused_with_any_cache(option: str) -> None:
    module, states = tiny.llama().model.layers[0].self_attn, torch.ones(1, 2, 1, 16)
    with pytest.raises(ValueError, match=f"Attention (attends with|chooses tokens by) {option}"):
        paged_attention(module, torch.ones(1, 4, 1, 16), states, states, None, **{option: states})


# -- other ways to use a model -----------------------------------------------------------------


@pytest.mark.parametrize("count", [MAX_QUERIES - 1, MAX_QUERIES, MAX_QUERIES + 1, 40])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_several_tokens_at_once_give_the_same_logits(
    name: str, count: int, tmp_path: Path, gathers: list[int]
) -> None:
    model, ids = tiny.SUPPORTED[name](), random_ids(60 + count, seed=11)
    expected = model(ids).logits[:, 60:]
    with_pages(model)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        model(ids[:, :60], cache=cache)
        found = model(ids[:, 60:], cache=cache).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert (gathers == []) == (count <= MAX_QUERIES)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3"])
def test_weights_of_attention_are_returned_where_they_are_asked_for(
    name: str, tmp_path: Path, warnings: list[str]
) -> None:
    model, ids = tiny.SUPPORTED[name](), random_ids(60, seed=12)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True)
    with_pages(model)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        first = model(ids[:, :59], cache=cache, output_attentions=True)
        last = model(ids[:, 59:], cache=cache, output_attentions=True)
    assert len(expected.attentions) == len(first.attentions) == len(last.attentions) > 0
    for all_weights, before, now in zip(
        expected.attentions, first.attentions, last.attentions, strict=True
    ):
        assert torch.allclose(before, all_weights[:, :, :59, :59], atol=1e-5)
        assert torch.allclose(now, all_weights[:, :, 59:, -now.shape[3] :], atol=1e-5)
    assert torch.allclose(last.logits, expected.logits[:, 59:], rtol=0, atol=1e-4)
    assert len(warnings) == 1
    assert "attends with output_attentions" in warnings[0]


def test_dropout_is_that_of_torch_s_attention(tmp_path: Path, warnings: list[str]) -> None:
    model, ids = tiny.llama(attention_dropout=0.5).train(), random_ids(60, seed=13)

    def last_logits(cache: Any) -> torch.Tensor:
        model(ids[:, :59], cache=cache)
        torch.manual_seed(0)
        logits: torch.Tensor = model(ids[:, 59:], cache=cache).logits
        return logits

    torch.manual_seed(0)
    expected = last_logits(DynamicCache())
    with_pages(model)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        torch.manual_seed(0)
        found = last_logits(cache)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(warnings) == 1
    assert "attends with dropout" in warnings[0]


@pytest.mark.parametrize("implementation", ["pagedkv", "sdpa"])
@pytest.mark.parametrize("count", [1, 4])
def test_gradients_of_one_forward_pass_are_right_and_those_through_pages_are_refused(
    implementation: str, count: int, tmp_path: Path
) -> None:
    model, ids = tiny.llama(), random_ids(60, seed=14)

    def gradient(logits: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        logits.square().sum().backward()  # type: ignore[no-untyped-call]  # torch
        found: torch.Tensor = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
        return found

    expected = gradient(model(ids).logits)
    model.set_attn_implementation(implementation)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        logits = model(ids, cache=cache).logits
        later = model(ids[:, :count], cache=cache).logits
        assert torch.allclose(gradient(logits), expected)
        with pytest.raises(RuntimeError, match="no gradient through the pages of a PagedCache"):
            gradient(later)


def test_tokens_that_a_mask_hides_from_embeddings_stay_hidden(
    tmp_path: Path, warnings: list[str]
) -> None:
    """Their ids are unknown, so that ``commit`` refuses them; what is computed is right."""
    model, ids = tiny.llama(), random_ids(60, seed=15)
    embedded = model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)
    mask[:, 20:27] = 0

    def last_logits(cache: Any) -> torch.Tensor:
        model(inputs_embeds=embedded[:, :59], attention_mask=mask[:, :59], cache=cache)
        out = model(inputs_embeds=embedded[:, 59:], attention_mask=mask, cache=cache)
        logits: torch.Tensor = out.logits
        return logits

    expected = last_logits(DynamicCache())
    with_pages(model)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        found = last_logits(cache)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(warnings) == 1
    assert "attends with a mask of its own" in warnings[0]


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_a_window_is_read_from_the_mask(window: int | None, count: int) -> None:
    at = torch.arange(30)
    past = at[-count:, None]
    visible = (at <= past) & (at > past - (window or 30))
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    for mask in (visible, added):
        seen = seen_through(mask[None, None], 0, count, 30, 0, None)
        assert seen == Seen(is_causal=True, window=None if window == 30 else window)


@pytest.mark.parametrize("count", [1, 5])
def test_other_masks_are_not_taken_for_windows(count: int) -> None:
    visible = torch.ones(1, 1, count, 30, dtype=torch.bool).tril(30 - count)
    hole, distance, per_head = visible.clone(), torch.zeros(1, 1, count, 30), visible
    hole[..., 20] = False
    distance[..., :20] = -1.5
    longer = torch.ones(1, 1, count, 31, dtype=torch.bool).tril(31 - count)
    for mask in (hole, distance, per_head.expand(1, 2, count, 30), longer):
        assert not seen_through(mask, 0, count, 30, 0, None).is_causal


@pytest.mark.parametrize("count", [1, 5])
def test_a_mask_may_leave_out_what_a_window_hides(count: int) -> None:
    visible = torch.ones(count, 6 + count, dtype=torch.bool).tril(6).triu()
    seen = seen_through(visible[None, None], 0, count, 30, 0, 7)
    assert seen == Seen(is_causal=True, window=7)


def test_a_mask_may_not_leave_out_what_some_query_sees() -> None:
    visible = torch.ones(1, 1, 5, 30, dtype=torch.bool).tril(25)[..., 1:]
    assert not seen_through(visible, 0, 5, 30, 0, None).is_causal


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_pads", [4, 20, 27])
def test_pads_are_not_tokens_that_a_window_hides(window: int | None, num_pads: int) -> None:
    at = torch.arange(30)
    visible = (at <= at[:, None]) & (at > at[:, None] - (window or 30)) & (at >= num_pads)
    seen = seen_through(visible[None, None, -5:], 0, 5, 30, num_pads, None)
    assert seen == Seen(is_causal=True, window=7 if window and num_pads < 23 else None)
    shown = visible.clone()
    shown[:, num_pads - 1] = True
    assert not seen_through(shown[None, None, -5:], 0, 5, 30, num_pads, None).is_causal


def test_no_mask_is_a_causal_one_for_a_single_query_only() -> None:
    assert seen_through(None, 0, 1, 30, 0, None) == Seen(is_causal=True, window=None)
    assert not seen_through(None, 0, 2, 30, 0, None).is_causal
