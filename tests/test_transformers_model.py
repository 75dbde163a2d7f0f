"""``PagedCache`` with a real model: SmolLM2-135M-Instruct."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import torch
from transformers import DynamicCache

import pagedkv as pk
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.prompt import alice_prompt, encode
from pagedkv_adapters.demo.smollm2 import find_gguf, is_unpacked, unpack
from pagedkv_adapters.transformers import PagedCache, fingerprint, spec_for

pytestmark = [pytest.mark.model, pytest.mark.torch]

NUM_PROMPT = 450
NUM_NEW = 16
NUM_SLOTS = 9
"""For 30 pages: the KV of 465 tokens."""


class FirstRun(NamedTuple):
    """What is left of a generation with a pool of a third."""

    store_path: Path
    output: Any
    stats: pk.CacheStats


@pytest.fixture(scope="module")
def folder() -> Path:
    if not is_unpacked():
        try:
            find_gguf()
        except pk.PagedKVError as error:
            pytest.skip(str(error))
    return unpack()


@pytest.fixture(scope="module")
def model_and_tokenizer(folder: Path) -> tuple[Any, Any]:
    return load(folder)


@pytest.fixture(scope="module")
def model(model_and_tokenizer: tuple[Any, Any]) -> Any:
    return model_and_tokenizer[0]


@pytest.fixture(scope="module")
def prompt(model_and_tokenizer: tuple[Any, Any]) -> torch.Tensor:
    return encode(model_and_tokenizer[1], alice_prompt())[:, :NUM_PROMPT]


@pytest.fixture(scope="module")
def expected(model: Any, prompt: torch.Tensor) -> Any:
    return generate(model, prompt, DynamicCache())


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


def open_cache(model: Any, path: Path) -> pk.PagedKVCache:
    spec = spec_for(model)
    return pk.PagedKVCache(spec, NUM_SLOTS, store=pk.PageStore.open(path, spec))


def generate(model: Any, ids: torch.Tensor, cache: DynamicCache | PagedCache) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def test_the_fingerprint_is_that_of_the_files(model: Any, folder: Path) -> None:
    assert fingerprint(model) == pk.fingerprint_files(folder)


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
