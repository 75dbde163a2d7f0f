"""``PagedCache`` with real models: SmolLM2-135M-Instruct, and Gemma 3 270M with its windows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import torch
from tiny_models import usual_cache
from transformers import DynamicCache

import pagedkv as pk
from pagedkv_adapters.demo.prompt import alice_prompt, encode
from pagedkv_adapters.demo.wheel_model import GEMMA3, SMOLLM2
from pagedkv_adapters.transformers import PagedCache, fingerprint, spec_for

pytestmark = pytest.mark.torch


class Case(NamedTuple):
    """A model, and a prompt whose KV takes more than three times the pool."""

    fixture: str
    num_prompt: int
    num_slots: int
    num_new: int
    num_new_over_pages: int


SMOLLM2_CASE = pytest.param(
    Case("smollm2", 450, 9, 16, 32), id="SmolLM2", marks=pytest.mark.model(SMOLLM2)
)
GEMMA3_CASE = pytest.param(  # longer than the 512 tokens that most of its layers see
    Case("gemma3", 700, 14, 8, 16), id="Gemma 3", marks=pytest.mark.model(GEMMA3)
)
only_smollm2 = pytest.mark.parametrize("case", [SMOLLM2_CASE], indirect=True)
only_gemma3 = pytest.mark.parametrize("case", [GEMMA3_CASE], indirect=True)


class FirstRun(NamedTuple):
    """What is left of a generation with a pool of a third."""

    store_path: Path
    output: Any
    stats: pk.CacheStats


@pytest.fixture(scope="module", params=[SMOLLM2_CASE, GEMMA3_CASE])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def loaded(case: Case, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return request.getfixturevalue(case.fixture)


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def prompt(case: Case, loaded: tuple[Any, Any]) -> torch.Tensor:
    return encode(loaded[1], alice_prompt())[:, : case.num_prompt]


@pytest.fixture(scope="module")
def expected(case: Case, model: Any, prompt: torch.Tensor) -> Any:
    assert model.config._attn_implementation == "sdpa"
    return generate(model, prompt, usual_cache(model), case.num_new_over_pages)


@pytest.fixture(scope="module")
def first_run(
    case: Case, model: Any, prompt: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> FirstRun:
    path = tmp_path_factory.mktemp("store") / "cache.zarr"
    with (
        open_cache(model, path, case.num_slots) as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
    ):
        output = generate(model, prompt, cache, case.num_new)
        stats = kv.stats()
        cache.commit(output.sequences)
        kv.check_invariants()
    return FirstRun(path, output, stats)


@pytest.fixture
def kv(case: Case, model: Any, first_run: FirstRun) -> Iterator[pk.PagedKVCache]:
    """A cache over the store that the first run left, as after a restart."""
    with open_cache(model, first_run.store_path, case.num_slots) as cache:
        yield cache


@pytest.fixture
def over_pages(model: Any) -> Iterator[Any]:
    """The model, which attends to pages."""
    before = model.config._attn_implementation
    model.set_attn_implementation("pagedkv")
    yield model
    model.set_attn_implementation(before)


def open_cache(model: Any, path: Path, num_slots: int) -> pk.PagedKVCache:
    spec = spec_for(model)
    return pk.PagedKVCache(spec, num_slots, store=pk.PageStore.open(path, spec))


def generate(model: Any, ids: torch.Tensor, cache: DynamicCache | PagedCache, num_new: int) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=num_new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def check_equal(output: Any, expected: Any, num_prompt: int, tolerance: float | None) -> None:
    """``output`` is the beginning of ``expected``, with logits within the tolerance if any."""
    num_new = len(output.logits)
    assert torch.equal(output.sequences, expected.sequences[:, : num_prompt + num_new])
    if tolerance is not None:
        for logits, others in zip(output.logits, expected.logits[:num_new], strict=True):
            assert float((logits - others).abs().max()) <= tolerance


@pytest.mark.model(SMOLLM2)
def test_the_fingerprint_is_that_of_the_files(
    smollm2: tuple[Any, Any], smollm2_folder: Path
) -> None:
    assert fingerprint(smollm2[0]) == pk.fingerprint_files(smollm2_folder)


def test_a_pool_for_a_third_of_the_kv_gives_the_logits_of_dynamic_cache(
    case: Case, first_run: FirstRun, expected: Any
) -> None:
    stats = first_run.stats
    check_equal(first_run.output, expected, case.num_prompt, tolerance=0)
    assert stats.num_pages_held == num_pages(case.num_prompt + case.num_new - 1)
    assert stats.num_pages_held > 3 * stats.num_slots
    assert stats.num_pages_evicted > 0
    assert stats.num_slices_loaded > 0


@only_gemma3
def test_the_tokens_are_those_of_a_cache_that_keeps_what_left_the_window(
    case: Case, model: Any, prompt: torch.Tensor, first_run: FirstRun
) -> None:
    whole = DynamicCache()
    others = generate(model, prompt, whole, case.num_new)
    check_equal(first_run.output, others, case.num_prompt, None)
    assert whole.layers[0].keys.shape[2] == case.num_prompt + case.num_new - 1


def test_a_prompt_is_reused_after_a_restart(
    case: Case, model: Any, prompt: torch.Tensor, expected: Any, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache, case.num_new)
    num_cached = (case.num_prompt + case.num_new - 1) // 16 * 16
    assert cache.num_reused_tokens == min(case.num_prompt - 1, num_cached)
    check_equal(output, expected, case.num_prompt, None)


@only_smollm2
def test_a_second_turn_reuses_the_first_answer_after_a_restart(
    case: Case, model: Any, first_run: FirstRun, kv: pk.PagedKVCache
) -> None:
    first = first_run.output.sequences
    second = torch.cat([first, first[:, 1:40]], dim=1)
    with PagedCache.from_prompt(model, second, kv) as cache:
        output = generate(model, second, cache, case.num_new)
    # The last token of the first turn has no KV yet.
    assert cache.num_reused_tokens == (case.num_prompt + case.num_new - 1) // 16 * 16
    others = generate(model, second, usual_cache(model), case.num_new)
    check_equal(output, others, second.shape[1], None)


def test_attention_over_pages_gives_the_tokens_of_dynamic_cache(
    case: Case,
    prompt: torch.Tensor,
    expected: Any,
    over_pages: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = attend_over_pages(
        case, prompt, expected, over_pages, case.num_slots, tmp_path, monkeypatch
    )
    assert stats.num_slices_loaded > 0


@only_smollm2
def test_attention_over_pages_that_all_have_slots_reads_nothing(
    case: Case,
    prompt: torch.Tensor,
    expected: Any,
    over_pages: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = attend_over_pages(case, prompt, expected, over_pages, 64, tmp_path, monkeypatch)
    assert stats.num_slices_loaded == 0


def attend_over_pages(
    case: Case,
    prompt: torch.Tensor,
    expected: Any,
    model: Any,
    num_slots: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> pk.CacheStats:
    """Figures of a generation that gathers nothing, and gives what is expected."""

    def refuse(*_: Any) -> None:
        raise AssertionError("keys and values were gathered")

    with (
        open_cache(model, folder / "cache.zarr", num_slots) as kv,
        PagedCache.from_prompt(model, prompt, kv) as cache,
    ):
        monkeypatch.setattr(pk.Sequence, "gather", refuse)
        output = generate(model, prompt, cache, case.num_new_over_pages)
        stats = kv.stats()
        kv.check_invariants()
    check_equal(output, expected, case.num_prompt, tolerance=1e-4)
    assert stats.num_pages_held == num_pages(case.num_prompt + case.num_new_over_pages - 1)
    return stats


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // 16)
