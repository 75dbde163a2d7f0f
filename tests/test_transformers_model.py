"""``PagedCache`` with a real model: SmolLM2-135M-Instruct."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import torch
from transformers import DynamicCache

import pagedkv as pk
from pagedkv_adapters.demo.prompt import alice_prompt, encode
from pagedkv_adapters.transformers import PagedCache, fingerprint, spec_for

pytestmark = [pytest.mark.model, pytest.mark.torch]

NUM_PROMPT = 450
NUM_NEW = 16
NUM_SLOTS = 9
"""For 30 pages: the KV of 465 tokens."""
NUM_NEW_OVER_PAGES = 32


class FirstRun(NamedTuple):
    """What is left of a generation with a pool of a third."""

    store_path: Path
    output: Any
    stats: pk.CacheStats


@pytest.fixture(scope="module")
def model(smollm2: tuple[Any, Any]) -> Any:
    return smollm2[0]


@pytest.fixture(scope="module")
def prompt(smollm2: tuple[Any, Any]) -> torch.Tensor:
    return encode(smollm2[1], alice_prompt())[:, :NUM_PROMPT]


@pytest.fixture(scope="module")
def expected(model: Any, prompt: torch.Tensor) -> Any:
    return generate(model, prompt, DynamicCache())


@pytest.fixture(scope="module")
def expected_over_pages(model: Any, prompt: torch.Tensor) -> Any:
    assert model.config._attn_implementation == "sdpa"
    return generate(model, prompt, DynamicCache(), NUM_NEW_OVER_PAGES)


@pytest.fixture(scope="module")
def first_run(
    model: Any, prompt: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> FirstRun:
    path = tmp_path_factory.mktemp("store") / "cache.zarr"
    with open_cache(model, path) as kv, PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache)
        stats = kv.stats()
        cache.commit(output.sequences)
        kv.check_invariants()
    return FirstRun(path, output, stats)


@pytest.fixture
def kv(model: Any, first_run: FirstRun) -> Iterator[pk.PagedKVCache]:
    """A cache over the store that the first run left, as after a restart."""
    with open_cache(model, first_run.store_path) as cache:
        yield cache


@pytest.fixture
def over_pages(model: Any) -> Iterator[Any]:
    """The model, which attends to pages."""
    before = model.config._attn_implementation
    model.set_attn_implementation("pagedkv")
    yield model
    model.set_attn_implementation(before)


def open_cache(model: Any, path: Path, num_slots: int = NUM_SLOTS) -> pk.PagedKVCache:
    spec = spec_for(model)
    return pk.PagedKVCache(spec, num_slots, store=pk.PageStore.open(path, spec))


def generate(
    model: Any, ids: torch.Tensor, cache: DynamicCache | PagedCache, num_new: int = NUM_NEW
) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=num_new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def test_the_fingerprint_is_that_of_the_files(model: Any, smollm2_folder: Path) -> None:
    assert fingerprint(model) == pk.fingerprint_files(smollm2_folder)


def test_a_pool_for_a_third_of_the_kv_gives_the_logits_of_dynamic_cache(
    first_run: FirstRun, expected: Any
) -> None:
    output, stats = first_run.output, first_run.stats
    assert torch.equal(output.sequences, expected.sequences)
    for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
        assert torch.equal(logits, expected_logits)
    assert stats.num_pages_held == 30
    assert stats.num_pages_held > 3 * stats.num_slots
    assert stats.num_pages_evicted > 0
    assert stats.num_slices_loaded > 0


def test_a_prompt_is_reused_after_a_restart(
    model: Any, prompt: torch.Tensor, expected: Any, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache)
    assert cache.num_reused_tokens == 448
    assert torch.equal(output.sequences, expected.sequences)


def test_a_second_turn_reuses_the_first_answer_after_a_restart(
    model: Any, expected: Any, kv: pk.PagedKVCache
) -> None:
    second = torch.cat([expected.sequences, expected.sequences[:, 1:40]], dim=1)
    with PagedCache.from_prompt(model, second, kv) as cache:
        output = generate(model, second, cache)
    assert cache.num_reused_tokens == 464  # of 465 whose KV the first turn had computed
    assert torch.equal(output.sequences, generate(model, second, DynamicCache()).sequences)


@pytest.mark.parametrize("num_slots", [NUM_SLOTS, 64], ids=["pages on disk", "all in the pool"])
def test_attention_over_pages_gives_the_tokens_of_dynamic_cache(
    num_slots: int,
    model: Any,
    prompt: torch.Tensor,
    expected_over_pages: Any,
    over_pages: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("keys and values were gathered")

    with (
        open_cache(over_pages, tmp_path / "cache.zarr", num_slots) as kv,
        PagedCache.from_prompt(over_pages, prompt, kv) as cache,
    ):
        monkeypatch.setattr(pk.Sequence, "gather", refuse)
        output = generate(over_pages, prompt, cache, NUM_NEW_OVER_PAGES)
        stats = kv.stats()
        kv.check_invariants()
    assert torch.equal(output.sequences, expected_over_pages.sequences)
    for logits, expected_logits in zip(output.logits, expected_over_pages.logits, strict=True):
        assert float((logits - expected_logits).abs().max()) <= 1e-4
    num_pages = -(-(NUM_PROMPT + NUM_NEW_OVER_PAGES - 1) // 16)
    assert stats.num_pages_held == num_pages
    assert (stats.num_slices_loaded > 0) == (num_slots < num_pages)
