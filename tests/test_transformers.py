"""``PagedCache`` under ``generate``: the tokens of ``DynamicCache``, in a pool far too small."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import numpy as np
import tiny_models as tiny
import torch
from tiny_models import generate, largest_difference, open_cache, random_ids, usual_cache
from transformers import LlamaForCausalLM, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, fingerprint, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]

NUM_PROMPT = 300
NUM_REUSABLE = 299
"""Tokens of the prompt that its pages have, but for the last: an answer of a few fills the last."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return random_ids(NUM_PROMPT, seed=1)


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel, prompt: torch.Tensor) -> Any:
    """What ``DynamicCache`` generates."""
    return generate(model, prompt, usual_cache(model))


@pytest.fixture
def kv(model: PreTrainedModel, tmp_path: Path) -> Iterator[pk.PagedKVCache]:
    """Four slots, for prompts that need nineteen."""
    with open_cache(model, tmp_path / "cache.zarr") as cache:
        yield cache
        if not cache.is_closed:
            cache.check_invariants()


def reopen(kv: pk.PagedKVCache, model: PreTrainedModel) -> pk.PagedKVCache:
    """Close the cache and make one over the same store, as another process would."""
    assert kv.store is not None
    kv.close()
    return open_cache(model, kv.store.path)


# -- in bounded memory -------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_generate_in_a_small_pool_gives_the_logits_of_dynamic_cache(
    name: str, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny.SUPPORTED[name]()
    expected = generate(model, prompt, usual_cache(model))
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        with PagedCache.from_prompt(model, prompt, kv) as cache:
            output = generate(model, prompt, cache)
            stats = kv.stats()
            assert stats.num_pages_held == 20
            assert stats.num_pages_held > 4 * kv.num_slots
            assert stats.num_pages_evicted > 0
            assert stats.num_slices_spilled > 0
            assert stats.num_slices_loaded > 0
        assert torch.equal(output.sequences, expected.sequences)
        assert largest_difference(output, expected) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_give_the_logits_of_dynamic_cache(
    dtype: torch.dtype, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny.llama().to(dtype)
    expected = generate(model, prompt, usual_cache(model))
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        assert kv.specs[0].dtype == str(dtype).removeprefix("torch.")
        cache = PagedCache.from_prompt(model, prompt, kv)
        output = generate(model, prompt, cache)
        cache.commit(output.sequences)
    with reopen(kv, model) as kv_again:
        resumed = PagedCache.from_prompt(model, prompt, kv_again)
        again = generate(model, prompt, resumed)
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) == 0
    assert resumed.num_reused_tokens == NUM_REUSABLE
    assert torch.equal(again.sequences, expected.sequences)


def test_eager_attention_gives_the_logits_of_dynamic_cache(
    prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny.llama(attn_implementation="eager")
    expected = generate(model, prompt, usual_cache(model))
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        output = generate(model, prompt, PagedCache(model, kv))
    assert largest_difference(output, expected) == 0


def test_prefill_in_chunks_gives_the_same_tokens(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, kv: pk.PagedKVCache
) -> None:
    output = generate(model, prompt, PagedCache(model, kv), prefill_chunk_size=48)
    assert torch.equal(output.sequences, reference.sequences)


def test_sampling_with_a_seed_gives_the_tokens_of_dynamic_cache(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    torch.manual_seed(3)
    expected = generate(model, prompt, usual_cache(model), do_sample=True)
    torch.manual_seed(3)
    output = generate(model, prompt, PagedCache(model, kv), do_sample=True)
    assert torch.equal(output.sequences, expected.sequences)


def test_an_int8_store_gives_pages_of_a_live_sequence_back_exactly(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, tmp_path: Path
) -> None:
    with open_cache(model, tmp_path / "cache.zarr", codec="int8") as kv:
        cache = PagedCache.from_prompt(model, prompt, kv)
        output = generate(model, prompt, cache)
        assert kv.stats().num_slices_loaded > 0
        cache.commit(output.sequences)
        cache.close()
        resumed = PagedCache.from_prompt(model, prompt, kv)
        generate(model, prompt, resumed)
    assert largest_difference(output, reference) == 0
    assert resumed.num_reused_tokens == NUM_REUSABLE


def test_a_pool_on_a_file_gives_the_same_tokens(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, tmp_path: Path
) -> None:
    spec = spec_for(model)
    with pk.PagedKVCache(spec, 32, pool_path=tmp_path / "pool") as kv:
        output = generate(model, prompt, PagedCache(model, kv))
    assert largest_difference(output, reference) == 0


def test_prompt_lookup_decoding_drops_the_tokens_that_were_rejected(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    repeated = torch.cat([random_ids(90, seed=2)] * 3, dim=1)
    expected = generate(model, repeated, usual_cache(model))
    cache = PagedCache.from_prompt(model, repeated, kv)
    output = generate(model, repeated, cache, prompt_lookup_num_tokens=5)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache.sequence.num_tokens == output.sequences.shape[1] - 1
    cache.commit(output.sequences)
    cache.close()
    again = PagedCache.from_prompt(model, output.sequences, kv)
    assert again.num_reused_tokens == 288
    output = generate(model, repeated, PagedCache.from_prompt(model, repeated, kv))
    assert torch.equal(output.sequences, expected.sequences)


def test_crop_refuses_a_positive_number(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    cache = PagedCache(model, kv)
    with pytest.raises(ValueError, match="crop by 3"):
        cache.crop(3)


def test_reset_drops_all_tokens(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache(model, kv)
    generate(model, prompt, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert kv.stats().num_pages_held == 0
    assert torch.equal(generate(model, prompt, cache).sequences, reference.sequences)


def test_no_pins_are_left_after_generate(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    output = generate(model, prompt, cache)
    assert kv.stats().num_pinned_slots == 0
    cache.commit(output.sequences)
    assert kv.stats().num_pinned_slots == 0
    cache.close()
    cache.close()
    assert kv.stats().num_pinned_slots == 0
    assert kv.stats().num_pages_held == 0


@pytest.mark.parametrize("step", [1, 2, 5], ids="step {}".format)
def test_a_step_that_failed_half_way_can_be_repeated(
    step: int, model: PreTrainedModel, prompt: torch.Tensor, reference: Any, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    num_calls = 0

    def fail_at_step(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == step:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail_at_step)
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt, cache)
    hook.remove()
    num_known = 0 if step == 1 else NUM_PROMPT + step - 2
    assert cache.get_seq_length() == num_known
    so_far = prompt if step == 1 else reference.sequences[:, : num_known + 1]
    missing = reference.sequences.shape[1] - so_far.shape[1]
    output = generate(model, so_far, cache, max_new_tokens=missing)
    assert torch.equal(output.sequences, reference.sequences)
    cache.commit(output.sequences)
    cache.save()
    cache.close()
    assert kv.stats().num_pinned_slots == 0


def test_threads_share_a_small_pool(model: PreTrainedModel, tmp_path: Path) -> None:
    prompts = [random_ids(150 + 33 * number, seed=number) for number in range(4)]
    expected = [generate(model, ids, usual_cache(model)).sequences for ids in prompts]
    errors: list[BaseException] = []
    outputs: dict[tuple[int, int], torch.Tensor] = {}

    def work(number: int) -> None:
        try:
            for turn in range(3):
                with PagedCache.from_prompt(model, prompts[number], kv) as cache:
                    output = generate(model, prompts[number], cache)
                    cache.commit(output.sequences)
                    outputs[number, turn] = output.sequences
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    with open_cache(model, tmp_path / "cache.zarr", num_slots=4) as kv:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        kv.check_invariants()
        assert kv.stats().num_pages_evicted > 0
        assert kv.stats().num_pinned_slots == 0
        assert kv.stats().num_pages_held == 0
    assert len(outputs) == 12
    for (number, _), tokens in outputs.items():
        assert torch.equal(tokens, expected[number])


# -- reuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True], ids=["in memory", "after a restart"])
@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_a_prompt_reuses_its_prefix_to_the_token(
    name: str, restart: bool, prompt: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny.SUPPORTED[name]()
    kv = open_cache(model, tmp_path / "cache.zarr")
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        assert cache.num_reused_tokens == 0
        cache.commit(generate(model, prompt, cache).sequences)
    if restart:
        kv = reopen(kv, model)
    other = torch.cat([prompt[:, :200], random_ids(60, seed=5)], dim=1)
    expected = generate(model, other, usual_cache(model))
    cache = PagedCache.from_prompt(model, other, kv)
    output = generate(model, other, cache)
    stats = kv.stats()
    kv.check_invariants()
    kv.close()
    assert cache.num_reused_tokens == 200
    assert stats.num_store_hits > 0
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) < 1e-5


def test_the_last_token_of_a_cached_prompt_is_computed_again(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt = random_ids(64, seed=6)
    expected = generate(model, prompt, usual_cache(model))
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        cache.commit(generate(model, prompt, cache).sequences)
    cache = PagedCache.from_prompt(model, prompt, kv)
    output = generate(model, prompt, cache)
    cache.commit(output.sequences)
    assert cache.num_reused_tokens == 63
    assert torch.equal(output.sequences, expected.sequences)


def test_a_second_turn_goes_on_with_the_same_cache(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, kv: pk.PagedKVCache
) -> None:
    second = torch.cat([reference.sequences, random_ids(30, seed=7)], dim=1)
    expected = generate(model, second, usual_cache(model))
    cache = PagedCache.from_prompt(model, prompt, kv)
    cache.commit(generate(model, prompt, cache).sequences)
    output = generate(model, second, cache)
    cache.commit(output.sequences)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache.sequence.num_tokens == output.sequences.shape[1] - 1


@pytest.mark.parametrize("restart", [False, True], ids=["in memory", "after a restart"])
def test_a_second_turn_reuses_the_pages_of_the_first_answer(
    restart: bool, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        first = generate(model, prompt, cache, max_new_tokens=60)
        cache.commit(first.sequences)
    if restart:
        kv = reopen(kv, model)
    second = torch.cat([first.sequences, random_ids(30, seed=8)], dim=1)
    expected = generate(model, second, usual_cache(model))
    cache = PagedCache.from_prompt(model, second, kv)
    output = generate(model, second, cache)
    kv.close()
    assert cache.num_reused_tokens == 352  # the full pages of 359 tokens: prompt and answer
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("restart", [False, True], ids=["in memory", "after a restart"])
def test_a_saved_sequence_resumes_to_the_token(
    restart: bool, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache, max_new_tokens=9)
        cache.commit(output.sequences)
        cache.save()
    if restart:
        kv = reopen(kv, model)
    so_far = output.sequences
    assert so_far.shape[1] == 309
    expected = generate(model, so_far, usual_cache(model))
    cache = PagedCache.from_prompt(model, so_far, kv)
    resumed = generate(model, so_far, cache)
    cache.commit(resumed.sequences)
    kv.close()
    assert cache.num_reused_tokens == 308  # 19 pages and 4 tokens; the last one was never computed
    assert torch.equal(resumed.sequences, expected.sequences)


def test_of_a_saved_tail_only_what_agrees_is_reused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache, max_new_tokens=9).sequences
        cache.commit(output)
        cache.save()
    other = output.clone()
    other[0, 306] = (other[0, 306] + 1) % tiny.VOCABULARY  # the tail is 304..307
    expected = generate(model, other, usual_cache(model))
    cache = PagedCache.from_prompt(model, other, kv)
    assert cache.num_reused_tokens == 306
    assert torch.equal(generate(model, other, cache).sequences, expected.sequences)


def test_a_sequence_may_be_saved_again_and_again(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = prompt
        for _ in range(4):
            output = generate(model, output, cache, max_new_tokens=5).sequences
            cache.commit(output)
            cache.save()
            cache.save()
    assert torch.equal(output, reference.sequences)
    with reopen(kv, model) as again:
        for num_tokens in (305, 310, 315, 320):  # the last token of each was never computed
            with PagedCache.from_prompt(model, output[:, :num_tokens], again) as cache:
                assert cache.num_reused_tokens == num_tokens - 1


def test_uncommitted_tokens_are_not_reused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        generate(model, prompt, cache)
    assert PagedCache.from_prompt(model, prompt, kv).num_reused_tokens == 0


def test_another_salt_shares_nothing(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv, salt=b"one") as cache:
        cache.commit(generate(model, prompt, cache).sequences)
    for salt, num_tokens in ((b"", 0), (b"two", 0), (b"one", NUM_REUSABLE)):
        with PagedCache.from_prompt(model, prompt, kv, salt=salt) as cache:
            assert cache.num_reused_tokens == num_tokens


@pytest.mark.parametrize(
    "as_type", [torch.Tensor.tolist, torch.Tensor.numpy, torch.flatten], ids=["list", "numpy", "1d"]
)
def test_a_prompt_may_be_any_row_of_ids(
    as_type: Any, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, as_type(prompt), kv) as cache:
        cache.commit(as_type(generate(model, prompt, cache).sequences))
    assert PagedCache.from_prompt(model, as_type(prompt), kv).num_reused_tokens == NUM_REUSABLE


# -- refusals ----------------------------------------------------------------------------------


def test_other_weights_are_refused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    other = tiny.llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    with pytest.raises(pk.SpecMismatchError, match="model is"):
        PagedCache(other, kv)
    with pytest.raises(pk.SpecMismatchError, match="model is"):
        PagedCache.from_prompt(other, prompt, kv)
    assert kv.store is not None
    kv.close()
    with pytest.raises(pk.SpecMismatchError, match="model is"):
        open_cache(other, kv.store.path)


def test_another_dtype_is_refused(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    half = tiny.llama().to(torch.bfloat16)
    own = fingerprint(model)
    with pytest.raises(pk.SpecMismatchError, match="dtype is 'float32' there and 'bfloat16' here"):
        PagedCache(half, kv, model_fingerprint=own)


def test_a_refused_model_leaves_no_sequence_behind(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        cache.commit(generate(model, prompt, cache).sequences)
    with pytest.raises(pk.SpecMismatchError):
        PagedCache.from_prompt(tiny.llama(seed=1), prompt, kv)
    assert kv.stats().num_pages_held == 0


def test_a_cache_of_several_specs_is_refused(model: PreTrainedModel) -> None:
    spec = spec_for(model)
    specs = [spec, dataclasses.replace(spec, group="1")]
    with pk.PagedKVCache(specs, 32) as kv, pytest.raises(ValueError, match="spec"):
        PagedCache(model, kv)


def test_an_empty_prompt_is_refused(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagedCache.from_prompt(model, [], kv)


def test_a_mask_that_generate_infers_from_pad_tokens_is_refused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    pad = int(prompt[0, 7])
    with pytest.raises(ValueError, match="attention_mask=torch.ones_like"):
        model.generate(prompt, cache=PagedCache(model, kv), pad_token_id=pad, max_new_tokens=2)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_positions_that_do_not_follow_are_refused(
    name: str, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache(model, kv)
    positions = torch.arange(1, NUM_PROMPT + 1)[None]
    with torch.no_grad(), pytest.raises(ValueError, match="position_ids are not 0..299"):
        model(prompt, position_ids=positions, **{name: cache})
    assert cache.get_seq_length() == 0


def test_another_prompt_than_the_one_announced_is_refused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    other = prompt.clone()
    other[0, 250] = (other[0, 250] + 1) % tiny.VOCABULARY
    with pytest.raises(ValueError, match="token 250 of input_ids"):
        generate(model, other, cache)
    assert cache.get_seq_length() == 0
    cache.commit(generate(model, prompt, cache).sequences)


@pytest.mark.parametrize("reused", [False, True], ids=["new prompt", "reused prompt"])
@pytest.mark.parametrize("position", [3, 295], ids="token {}".format)
def test_commit_refuses_ids_that_contradict_the_prompt_and_changes_nothing(
    position: int, reused: bool, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    if reused:
        with PagedCache.from_prompt(model, prompt, kv) as first:
            first.commit(generate(model, prompt, first).sequences)
    cache = PagedCache.from_prompt(model, prompt, kv)
    output = generate(model, prompt, cache).sequences
    wrong = output.clone()
    wrong[0, position] = (wrong[0, position] + 1) % tiny.VOCABULARY
    with pytest.raises(ValueError, match=f"token {position}"):
        cache.commit(wrong)
    kv.check_invariants()
    cache.commit(output)
    cache.close()
    assert PagedCache.from_prompt(model, wrong, kv).num_reused_tokens <= position
    again = PagedCache.from_prompt(model, prompt, kv)
    assert again.num_reused_tokens == NUM_REUSABLE
    assert torch.equal(generate(model, prompt, again).sequences, output)


def test_commit_refuses_ids_that_are_too_few(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    output = generate(model, prompt, cache).sequences
    with pytest.raises(ValueError, match="hold 318 tokens, but the cache 319"):
        cache.commit(output[:, :318])
    with pytest.raises(ValueError, match="2 rows, but the cache holds 1"):
        cache.commit(torch.cat([output, output]))
    cache.close()
    assert PagedCache.from_prompt(model, prompt, kv).num_reused_tokens == 0


def test_save_refuses_what_was_not_committed(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    generate(model, prompt, cache)
    with pytest.raises(ValueError, match="commit"):
        cache.save()


def test_a_closed_cache_is_refused(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    cache = PagedCache.from_prompt(model, prompt, kv)
    output = generate(model, prompt, cache)
    cache.close()
    for use in (
        lambda: generate(model, prompt, cache),
        lambda: cache.commit(output.sequences),
        cache.save,
    ):
        with pytest.raises(pk.ClosedError, match="closed"):
            use()
    kv.close()
    cache.close()
    with pytest.raises(pk.ClosedError, match="cache is closed"):
        PagedCache.from_prompt(model, prompt, kv)


def test_a_pool_without_a_store_must_hold_the_prompt(
    model: PreTrainedModel, prompt: torch.Tensor, reference: Any
) -> None:
    with pk.PagedKVCache(spec_for(model), 4) as kv:
        cache = PagedCache(model, kv)
        with pytest.raises(pk.PoolExhaustedError, match="store"):
            generate(model, prompt, cache)
        cache.close()
        assert kv.stats().num_pinned_slots == 0
        kv.check_invariants()
    with pk.PagedKVCache(spec_for(model), 20) as kv:
        output = generate(model, prompt, PagedCache(model, kv))
    assert largest_difference(output, reference) == 0


def test_a_store_that_is_full_stops_generate_and_leaves_the_cache_usable(
    model: PreTrainedModel, prompt: torch.Tensor, tmp_path: Path
) -> None:
    short = prompt[:, :40]
    expected = generate(model, short, usual_cache(model))
    with open_cache(model, tmp_path / "cache.zarr", max_nbytes="64KiB") as kv:
        cache = PagedCache(model, kv)
        with pytest.raises(pk.StoreFullError):
            generate(model, prompt, cache)
        cache.close()
        kv.check_invariants()
        assert kv.stats().num_pinned_slots == 0
        output = generate(model, short, PagedCache(model, kv))
    assert torch.equal(output.sequences, expected.sequences)


# -- the weights' fingerprint ------------------------------------------------------------------


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_loaded_model_has_the_fingerprint_of_its_files(folder: Path) -> None:
    models = [LlamaForCausalLM.from_pretrained(folder) for _ in range(2)]
    assert {fingerprint(loaded) for loaded in models} == {pk.fingerprint_files(folder)}


def test_the_fingerprint_of_a_model_in_memory_follows_each_weight(model: PreTrainedModel) -> None:
    assert fingerprint(tiny.llama()) == fingerprint(model)
    changed = tiny.llama()
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1e-4
    assert fingerprint(changed) != fingerprint(model)


def test_the_fingerprint_of_a_model_in_memory_follows_its_config(model: PreTrainedModel) -> None:
    other = tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    assert fingerprint(other) != fingerprint(model)


def test_the_fingerprint_of_a_model_in_memory_is_not_that_of_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert fingerprint(tiny.llama(seed=1)) != pk.fingerprint_files(folder)


def test_a_config_that_was_changed_while_loading_has_another_fingerprint(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    changed = LlamaForCausalLM.from_pretrained(folder, rope_parameters=rope)
    assert fingerprint(changed) != pk.fingerprint_files(folder)


def test_a_fingerprint_of_ones_own_is_used(model: PreTrainedModel, prompt: torch.Tensor) -> None:
    spec = spec_for(model, page_tokens=8, model_fingerprint="mine")
    assert (spec.model, spec.page_tokens) == ("mine", 8)
    with pk.PagedKVCache(spec, 64) as kv:
        with pytest.raises(pk.SpecMismatchError, match="'mine'"):
            PagedCache(model, kv)
        cache = PagedCache.from_prompt(model, prompt, kv, model_fingerprint="mine")
        output = generate(model, prompt, cache)
    assert torch.equal(output.sequences, generate(model, prompt, usual_cache(model)).sequences)


def test_the_pages_hold_what_dynamic_cache_holds(
    model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    expected = usual_cache(model)
    generate(model, prompt, expected)
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        generate(model, prompt, cache)
        for number, layer in enumerate(expected.layers):
            with cache.sequence.gather(number) as (keys, values):
                np.testing.assert_array_equal(keys, layer.keys[0].transpose(0, 1).numpy())
                np.testing.assert_array_equal(values, layer.values[0].transpose(0, 1).numpy())


@pytest.mark.parametrize("form", ["four axes", "positional", "positional position_ids"])
def test_masks_and_positions_are_seen_in_every_form(
    form: str, model: PreTrainedModel, prompt: torch.Tensor, kv: pk.PagedKVCache
) -> None:
    count = prompt.shape[1]
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    shifted = torch.arange(1, count + 1)[None]
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "four axes": ((prompt,), {"attention_mask": torch.ones(1, 1, count, count).tril().bool()}),
        "positional": ((prompt, mask), {}),
        "positional position_ids": ((prompt, None, shifted), {}),
    }
    args, kwargs = arguments[form]
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        with torch.no_grad(), pytest.raises(ValueError, match="attention_mask|position_ids"):
            model(*args, cache=cache, **kwargs)
        assert cache.get_seq_length() == 0


def test_a_weight_changed_in_place_changes_the_fingerprint(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    weight = next(model.parameters())
    with torch.no_grad():
        weight.add_(1.0)
        assert fingerprint(model) != before
        weight.sub_(1.0)
