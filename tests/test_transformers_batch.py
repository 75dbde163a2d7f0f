"""``PagedCache`` with several rows: what they share, what is computed once, what is refused."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import threading

import tiny_models as tiny
import torch
from tiny_models import generate, largest_difference, open_cache, random_ids, usual_cache
from transformers import PreTrainedModel
from ways_to_generate import padded_batch

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder", "no_fsync"),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(params=["sdpa", "pagedkv"])
def attention(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def kv(model: PreTrainedModel, tmp_path: Path) -> Iterator[pk.PagedKVCache]:
    with open_cache(model, tmp_path / "cache.zarr", num_slots=16) as cache:
        yield cache
        if not cache.is_closed:
            cache.check_invariants()
            assert cache.stats().num_pinned_slots == 0


@pytest.fixture
def large_kv(model: PreTrainedModel) -> Iterator[pk.PagedKVCache]:
    """A pool that holds everything, and no store."""
    with pk.PagedKVCache(spec_for(model), 1024) as cache:
        yield cache
        cache.check_invariants()
        assert cache.stats().num_pinned_slots == 0


@pytest.fixture
def computed(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens of each forward pass, pads included."""
    counts: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, __: counts.append(args[0].numel()))
    yield counts
    hook.remove()


def stored_pages(kv: pk.PagedKVCache) -> int:
    kv.flush()
    assert kv.store is not None
    return kv.store.num_pages


# -- beams ---------------------------------------------------------------------------------------


def test_four_beams_hold_the_pages_of_the_prompt_once(
    model: PreTrainedModel, large_kv: pk.PagedKVCache
) -> None:
    prompt, num_new = random_ids(2000, seed=1), 40
    expected = generate(model, prompt, usual_cache(model), num_beams=4, max_new_tokens=num_new)
    held: list[int] = []
    hook = model.register_forward_hook(lambda *_: held.append(large_kv.stats().num_pages_held))
    with PagedCache.from_prompt(model, prompt, large_kv) as cache:
        output = generate(model, prompt, cache, num_beams=4, max_new_tokens=num_new)
        hook.remove()
        tables = [set(sequence.table(0)) for sequence in cache.sequences]
        assert large_kv.stats().num_pages_held == len(set.union(*tables))
        assert len(set.intersection(*tables)) >= 2000 // 16
    own_pages = -(-(2000 % 16 + num_new) // 16)
    assert max(held) <= 2000 // 16 + 4 * own_pages
    assert torch.equal(output.sequences, expected.sequences)


def test_beams_part_at_the_page_in_which_they_differ(
    model: PreTrainedModel, large_kv: pk.PagedKVCache
) -> None:
    prompt = random_ids(100, seed=2)
    with PagedCache.from_prompt(model, prompt, large_kv) as cache:
        generate(model, prompt, cache, num_beams=3, max_new_tokens=8)
        tables = [sequence.table(0) for sequence in cache.sequences]
    assert all(table[:6] == tables[0][:6] for table in tables)  # 96 tokens
    assert len({id(table[6]) for table in tables}) == len({id(s) for s in cache.sequences}) > 1


def test_the_prompt_of_beams_is_computed_once(
    model: PreTrainedModel, large_kv: pk.PagedKVCache, computed: list[int]
) -> None:
    prompt = random_ids(600, seed=3)
    expected = generate(model, prompt, usual_cache(model), num_beams=4)
    assert computed[0] == 4 * 600
    computed.clear()
    with PagedCache.from_prompt(model, prompt, large_kv) as cache:
        output = generate(model, prompt, cache, num_beams=4)
    assert computed[:2] == [599, 4]
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) <= 1e-4


def test_what_beams_returned_is_reusable_as_far_as_it_is_still_held(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt = random_ids(90, seed=4)
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 40}
        output = generate(model, prompt, cache, **options).sequences
        cache.commit(output)
        cache.save()
    for row in output:
        longer = torch.cat([row[None], random_ids(10, seed=5)], dim=1)
        expected = generate(model, longer, usual_cache(model))
        with PagedCache.from_prompt(model, longer, kv) as again:
            assert again.num_reused_tokens >= 80
            assert torch.equal(generate(model, longer, again).sequences, expected.sequences)


def test_what_beams_did_not_return_is_refused(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    prompt = random_ids(90, seed=4)
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache, num_beams=2).sequences
        with pytest.raises(ValueError, match="row 0 of output_ids begins with other tokens"):
            cache.commit((output + 1) % tiny.VOCABULARY)
    assert PagedCache.from_prompt(model, prompt, kv).num_reused_tokens == 0


# -- batches with pads ---------------------------------------------------------------------------


def test_pads_are_in_no_page_and_in_no_key(
    model: PreTrainedModel, attention: str, tmp_path: Path
) -> None:
    """What a padded row stored is what the same prompt alone finds, and the other way round."""
    model = tiny.llama()
    ids, mask = padded_batch(random_ids)
    model.set_attn_implementation(attention)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=16) as kv:
        with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
            output = generate(model, ids, cache, attention_mask=mask, max_new_tokens=30).sequences
            cache.commit(output)
            assert [s.num_tokens for s in cache.sequences] == [179, 160, 106]
        alone = output[2, 150 - 77 :][None]
        expected = generate(model, alone, usual_cache(model))
        with PagedCache.from_prompt(model, alone, kv) as cache:
            assert cache.num_reused_tokens == 96  # of 106 whose KV was computed
            assert torch.equal(generate(model, alone, cache).sequences, expected.sequences)
        kv.flush()
        assert kv.store is not None
        stored = {tuple(entry.tokens.tolist()) for _, entry in kv.store.entries()}
        alone = [
            row[150 - count :].tolist() for row, count in zip(output, (150, 131, 77), strict=True)
        ]
        pages = {tuple(row[at : at + 16]) for row in alone for at in range(0, len(row) - 16, 16)}
        assert stored == pages


def test_a_padded_batch_reuses_what_prompts_alone_have_stored(
    model: PreTrainedModel, attention: str, tmp_path: Path, computed: list[int]
) -> None:
    ids, mask = padded_batch(random_ids)
    expected = generate(model, ids, usual_cache(model), attention_mask=mask)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=16) as kv:
        for row, row_mask in zip(ids, mask, strict=True):
            prompt = row[row_mask == 1][None]
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                cache.commit(generate(model, prompt, cache, max_new_tokens=1).sequences)
        computed.clear()
        with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
            assert cache.num_reused_tokens == 144 + 128 + 64
            output = generate(model, ids, cache, attention_mask=mask)
            assert cache.num_reused_tokens == 3 * 137 - 19 - 73  # up to one column, 150 - 13
    assert computed[0] == 3 * 13
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) <= 1e-4


@pytest.mark.parametrize("chunk", [32, 70])
def test_a_padded_batch_may_be_prefilled_in_chunks(
    chunk: int, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    """The first chunks of a row may be pads altogether."""
    ids, mask = padded_batch(random_ids)
    options = {"attention_mask": mask, "prefill_chunk_size": chunk}
    expected = generate(model, ids, usual_cache(model), **options)
    with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
        output = generate(model, ids, cache, **options)
        cache.commit(output.sequences)
    with PagedCache(model, kv) as unannounced:
        again = generate(model, ids, unannounced, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(again.sequences, expected.sequences)


@pytest.mark.parametrize("chunk", [7, 16])
def test_whole_chunks_may_be_pads_in_every_row(
    chunk: int, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, mask = padded_batch(random_ids)
    ids, mask = (torch.nn.functional.pad(one, (61, 0)) for one in (ids, mask))
    options = {"attention_mask": mask, "prefill_chunk_size": chunk}
    expected = generate(model, ids, usual_cache(model), **options)
    for cache in (
        PagedCache(model, kv),
        PagedCache.from_prompt(model, ids, kv, attention_mask=mask),
    ):
        with cache:
            output = generate(model, ids, cache, **options)
            cache.commit(output.sequences)
        assert torch.equal(output.sequences, expected.sequences)
    with PagedCache(model, kv) as cache, torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
        assert found.shape[1] == ids.shape[1]  # of all columns, since all were asked for


def test_a_single_padded_prompt_is_the_prompt(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    prompt = random_ids(70, seed=6)
    ids = torch.cat([torch.zeros(1, 9, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(79) >= 9).long()[None]
    expected = generate(model, prompt, usual_cache(model)).sequences
    with PagedCache(model, kv) as cache:
        output = generate(model, ids, cache, attention_mask=mask).sequences
        assert torch.equal(output[:, 9:], expected)
        cache.commit(output)
    assert PagedCache.from_prompt(model, prompt, kv).num_reused_tokens == 69


def test_pads_behind_a_finished_answer_get_no_key(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = torch.cat([random_ids(30, seed=7), random_ids(30, seed=8)])
    plain = generate(model, ids, usual_cache(model), max_new_tokens=60).sequences
    at, eos = next((at, int(t)) for at, t in enumerate(plain[0, 30:], 30) if t not in plain[1])
    num_first = plain[0].tolist().index(eos, 30) + 1
    assert at < 80
    options = {"max_new_tokens": 60, "eos_token_id": eos, "pad_token_id": 0}
    expected = generate(model, ids, usual_cache(model), **options).sequences
    with PagedCache.from_prompt(model, ids, kv) as cache:
        output = generate(model, ids, cache, **options).sequences
        assert torch.equal(output, expected)
        assert (output[0, num_first:] == 0).all()
        cache.commit(output, pad_token_id=0)
        assert [len(s.tokens) for s in cache.sequences] == [num_first, 89]
        cache.save()
    with PagedCache.from_prompt(model, output[:1], kv) as cache:
        assert cache.num_reused_tokens == num_first


# -- rows that share a prefix --------------------------------------------------------------------


def questions(num_rows: int, num_shared: int, num_own: int) -> torch.Tensor:
    shared = random_ids(num_shared, seed=30).repeat(num_rows, 1)
    own = torch.cat([random_ids(num_own, seed=31 + row) for row in range(num_rows)])
    return torch.cat([shared, own], dim=1)


def test_eight_rows_that_share_a_document_compute_and_store_it_once(
    model: PreTrainedModel, attention: str, tmp_path: Path, computed: list[int]
) -> None:
    ids = questions(8, 1500, 20)
    expected = generate(model, ids, usual_cache(model))
    computed.clear()
    model.set_attn_implementation(attention)
    try:
        with open_cache(model, tmp_path / "cache.zarr", num_slots=16) as kv:
            with PagedCache.from_prompt(model, ids, kv) as cache:
                output = generate(model, ids, cache)
                # 93 pages of the document; of each row the rest of it, question and answer
                assert kv.stats().num_pages_held == 93 + 8 * 4
                cache.commit(output.sequences)
            assert stored_pages(kv) == 93 + 8 * 3
            kv.check_invariants()
    finally:
        model.set_attn_implementation("sdpa")
    assert computed[:2] == [1500, 8 * 20]
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) <= 1e-4


def test_padded_rows_that_share_a_document_compute_it_once(
    model: PreTrainedModel, kv: pk.PagedKVCache, computed: list[int]
) -> None:
    ids = questions(4, 400, 30)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 11, 25, 3)):
        ids[row] = torch.cat([torch.zeros(pads, dtype=torch.long), ids[row, : 430 - pads]])
        mask[row, :pads] = 0
    expected = generate(model, ids, usual_cache(model), attention_mask=mask)
    computed.clear()
    with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
        output = generate(model, ids, cache, attention_mask=mask)
    assert computed[:2] == [400, 4 * 30]
    assert torch.equal(output.sequences, expected.sequences)


def test_a_row_that_is_new_catches_up_with_those_that_are_known(
    model: PreTrainedModel, kv: pk.PagedKVCache, computed: list[int]
) -> None:
    ids = torch.cat([questions(3, 400, 30), random_ids(430, seed=40)])
    expected = generate(model, ids, usual_cache(model))
    with PagedCache.from_prompt(model, ids[:1, :400], kv) as cache:
        cache.commit(generate(model, ids[:1, :400], cache, max_new_tokens=1).sequences)
    computed.clear()
    with PagedCache.from_prompt(model, ids, kv) as cache:
        assert cache.num_reused_tokens == 3 * 400
        output = generate(model, ids, cache)
        assert cache.num_reused_tokens == 3 * 400
    assert computed[:2] == [400, 4 * 30]
    assert torch.equal(output.sequences, expected.sequences)


def test_a_batch_whose_rows_are_equal_is_one_sequence_until_they_part(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = random_ids(40, seed=41).repeat(3, 1)
    torch.manual_seed(5)
    expected = generate(model, ids, usual_cache(model), do_sample=True)
    with PagedCache(model, kv) as cache:
        model(ids, cache=cache)
        assert len(set(cache.sequences)) == 1
        assert kv.stats().num_pages_held == 3
        cache.crop(-1)
        torch.manual_seed(5)
        output = generate(model, ids, cache, do_sample=True)
        assert len(set(cache.sequences)) == 3
    assert torch.equal(output.sequences, expected.sequences)


def test_all_logits_are_returned_where_all_are_asked_for(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    """Only a caller that wants the last ones can be spared those before."""
    ids = questions(4, 300, 10)
    with PagedCache.from_prompt(model, ids, kv) as cache, torch.no_grad():
        found = model(ids, cache=cache)
        expected = model(ids)
    assert torch.equal(found.logits, expected.logits)
    with PagedCache.from_prompt(model, ids, kv) as cache, torch.no_grad():
        found = model(ids, cache=cache, logits_to_keep=5)
    assert found.logits.shape == (4, 5, tiny.VOCABULARY)
    assert (found.logits - expected.logits[:, -5:]).abs().max() <= 1e-4


def test_hidden_states_are_returned_of_all_tokens(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = questions(4, 300, 10)
    options = {"output_hidden_states": True, "max_new_tokens": 2}
    expected = generate(model, ids, usual_cache(model), **options)
    with PagedCache.from_prompt(model, ids, kv) as cache:
        output = generate(model, ids, cache, **options)
    assert output.hidden_states[0][0].shape == expected.hidden_states[0][0].shape
    assert torch.equal(output.hidden_states[0][-1], expected.hidden_states[0][-1])


# -- a cache that goes on ------------------------------------------------------------------------


def test_one_of_several_answers_is_continued(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    prompt = random_ids(50, seed=42)
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        torch.manual_seed(6)
        answers = generate(model, prompt, cache, do_sample=True, num_return_sequences=3).sequences
        cache.commit(answers)
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.batch_size == 1
        second = torch.cat([answers[1:2], random_ids(20, seed=43)], dim=1)
        expected = generate(model, second, usual_cache(model))
        assert torch.equal(generate(model, second, cache).sequences, expected.sequences)
    assert kv.stats().num_pages_held == 0


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_cache_is_repeated_for_a_batch(
    is_asked_for: bool, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    """Rows that continue one prompt in different ways need no call: the batch says it."""
    ids = questions(3, 100, 7)
    expected = generate(model, ids, usual_cache(model))
    with PagedCache(model, kv) as cache:
        model(ids[:1, :100], cache=cache)
        if is_asked_for:
            cache.batch_repeat_interleave(3)
            assert cache.batch_size == 3
            assert len(set(cache.sequences)) == 1
        output = generate(model, ids, cache)
        assert cache.batch_size == 3
    assert torch.equal(output.sequences, expected.sequences)


def test_a_prompt_of_which_a_part_was_computed_goes_on(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt = questions(1, 100, 1)
    expected = generate(model, prompt, usual_cache(model))
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        model(prompt[:, :100], cache=cache, logits_to_keep=1)
        output = generate(model, prompt, cache)
    assert torch.equal(output.sequences, expected.sequences)


def test_reset_leaves_one_empty_row(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    ids, mask = padded_batch(random_ids)
    expected = generate(model, ids, usual_cache(model), attention_mask=mask, num_beams=2)
    with PagedCache(model, kv) as cache:
        for _ in range(2):
            output = generate(model, ids, cache, attention_mask=mask, num_beams=2)
            assert torch.equal(output.sequences, expected.sequences)
            cache.reset()
            assert kv.stats().num_pages_held == 0
            assert (cache.get_seq_length(), cache.batch_size) == (0, 1)


def test_crop_drops_the_last_columns_of_every_row(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, mask = padded_batch(random_ids)
    with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache, torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
        cache.crop(-30)
        assert [s.num_tokens for s in cache.sequences] == [120, 101, 47]
        found = model(
            ids[:, 120:], attention_mask=mask, position_ids=positions[:, 120:], cache=cache
        ).logits
        assert torch.allclose(found, expected[:, 120:], rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match="crop by -151: the cache holds 150"):
            cache.crop(-151)


@pytest.mark.parametrize("attention_of_model", ["sdpa", "pagedkv"])
def test_assisted_decoding_gives_the_tokens_of_dynamic_cache(
    attention_of_model: str, tmp_path: Path
) -> None:
    model, assistant = tiny.llama(), tiny.llama(num_hidden_layers=1)
    prompt = random_ids(90, seed=44)
    expected = generate(model, prompt, usual_cache(model), max_new_tokens=40)
    model.set_attn_implementation(attention_of_model)
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        for num_reused in (0, 89):
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                assert cache.num_reused_tokens == num_reused
                output = generate(
                    model, prompt, cache, max_new_tokens=40, assistant_model=assistant
                )
                cache.commit(output.sequences)
                assert torch.equal(output.sequences, expected.sequences)
        kv.check_invariants()


def test_prompt_lookup_begins_with_a_prefix_that_is_known(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    """transformers gives the whole prompt to the first forward pass then."""
    prompt = torch.cat([random_ids(45, seed=45)] * 2, dim=1)
    expected = generate(model, prompt, usual_cache(model))
    for num_reused in (0, 89):
        with PagedCache.from_prompt(model, prompt, kv) as cache:
            assert cache.num_reused_tokens == num_reused
            output = generate(model, prompt, cache, prompt_lookup_num_tokens=4)
            assert torch.equal(output.sequences, expected.sequences)
            cache.commit(output.sequences)


def test_a_whole_prompt_that_does_not_begin_with_what_is_held_is_refused(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt = random_ids(60, seed=46)
    other = prompt.clone()
    other[0, 3] = (other[0, 3] + 1) % tiny.VOCABULARY
    with PagedCache(model, kv) as cache, torch.no_grad():
        model(prompt[:, :50], cache=cache)
        with pytest.raises(ValueError, match="token 3 of input_ids .* is what the cache holds"):
            model(other, attention_mask=torch.ones_like(other), cache=cache)
        assert cache.get_seq_length() == 50


# -- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_pages_before_all_windows_are_given_up(
    dtype: torch.dtype, attention: str, tmp_path: Path
) -> None:
    """Without a store, in a pool for a third of the sequences."""
    model = tiny.mistral().to(dtype)
    ids, mask = padded_batch(random_ids)
    options = {"attention_mask": mask, "max_new_tokens": 90}
    expected = generate(model, ids, usual_cache(model), **options)
    model.set_attn_implementation(attention)
    held: list[int] = []
    with (
        pk.PagedKVCache(spec_for(model), 30) as kv,
        PagedCache.from_prompt(model, ids, kv, attention_mask=mask, window_only=True) as cache,
    ):
        hook = model.register_forward_hook(lambda *_: held.append(kv.stats().num_pages_held))
        output = generate(model, ids, cache, **options)
        hook.remove()
        kv.check_invariants()
        assert kv.stats().num_pages_evicted > 0
        assert [s.num_tokens for s in cache.sequences] == [239, 220, 166]
        cache.reset()
        assert kv.stats().num_pages_held == 0
    assert max(held[1:]) <= 3 * 3  # a window of 24 tokens lies in three pages at most
    assert torch.equal(output.sequences, expected.sequences)
    assert largest_difference(output, expected) <= (1e-4 if attention == "pagedkv" else 0)


def test_what_a_window_has_left_is_reused(tmp_path: Path) -> None:
    model, prompt = tiny.mistral(), random_ids(150, seed=50)
    with open_cache(model, tmp_path / "cache.zarr", num_slots=4) as kv:
        with PagedCache.from_prompt(model, prompt, kv, window_only=True) as cache:
            output = generate(model, prompt, cache, max_new_tokens=50).sequences
            with pytest.raises(ValueError, match="tokens were dropped"):
                cache.crop(-100)
            cache.commit(output)
            with pytest.raises(ValueError, match="tokens were dropped"):
                cache.save()
        longer = torch.cat([output, random_ids(10, seed=51)], dim=1)
        expected = generate(model, longer, usual_cache(model))
        for window_only in (True, False):
            with PagedCache.from_prompt(model, longer, kv, window_only=window_only) as cache:
                assert cache.num_reused_tokens == 192
                found = generate(model, longer, cache)
            assert torch.equal(found.sequences, expected.sequences)
        kv.check_invariants()


def test_pads_behind_an_answer_get_no_key_before_the_window_either(tmp_path: Path) -> None:
    model = tiny.mistral()
    ids = torch.cat([random_ids(30, seed=7), random_ids(30, seed=8)])
    plain = generate(model, ids, usual_cache(model), max_new_tokens=120).sequences
    at, eos = next((at, int(t)) for at, t in enumerate(plain[0, 30:], 30) if t not in plain[1])
    assert at < 60
    pad = next(token for token in range(tiny.VOCABULARY) if token not in plain)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = eos, pad
    with open_cache(model, tmp_path / "cache.zarr", num_slots=8) as kv:
        with PagedCache.from_prompt(model, ids, kv, window_only=True) as cache:
            output = generate(model, ids, cache, max_new_tokens=120).sequences
            assert (output[0] == pad).sum() > 60
        kv.flush()
        assert kv.store is not None
        assert not any((entry.tokens == pad).any() for _, entry in kv.store.entries())
        with PagedCache.from_prompt(model, output[1:], kv) as cache:
            assert cache.num_reused_tokens > 96


def test_window_only_is_refused_where_a_layer_sees_everything(tmp_path: Path) -> None:
    model, prompt = tiny.gemma3(), random_ids(50, seed=52)
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        with pytest.raises(ValueError, match="layer 1 of Gemma3ForCausalLM has no window"):
            PagedCache(model, kv, window_only=True)
        with pytest.raises(ValueError, match="layer 1 of Gemma3ForCausalLM has no window"):
            PagedCache.from_prompt(model, prompt, kv, window_only=True)
        assert kv.stats().num_pages_held == 0


# -- several users -------------------------------------------------------------------------------


def test_threads_generate_in_different_ways_over_one_pool(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    ids, mask = padded_batch(random_ids)
    calls: list[dict[str, Any]] = [
        {},
        {"num_beams": 3},
        {"attention_mask": mask},
        {"prompt_lookup_num_tokens": 4},
    ]
    prompts = [ids[:1], ids[:1], ids, ids[:1]]
    expected = [
        generate(model, prompt, usual_cache(model), **options).sequences
        for prompt, options in zip(prompts, calls, strict=True)
    ]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(4):
                prompt, options = prompts[number], calls[number]
                masked = options.get("attention_mask")
                with PagedCache.from_prompt(model, prompt, kv, attention_mask=masked) as cache:
                    output = generate(model, prompt, cache, **options).sequences
                    cache.commit(output)
                    assert torch.equal(output, expected[number])
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    with open_cache(model, tmp_path / "cache.zarr", num_slots=6) as kv:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        kv.check_invariants()
        assert kv.stats().num_pages_held == 0
        assert kv.stats().num_pinned_slots == 0


def test_models_in_one_process_have_caches_of_their_own(tmp_path: Path) -> None:
    models = [tiny.llama(), tiny.llama(seed=1), tiny.gemma3(), tiny.gpt2()]
    models[1].set_attn_implementation("pagedkv")
    prompt = random_ids(60, seed=47)
    caches = [open_cache(one, tmp_path / f"{at}.zarr") for at, one in enumerate(models)]
    for _ in range(2):
        for one, kv in zip(models, caches, strict=True):
            expected = generate(one, prompt, usual_cache(one), num_beams=2).sequences
            with PagedCache.from_prompt(one, prompt, kv) as cache:
                output = generate(one, prompt, cache, num_beams=2).sequences
                cache.commit(output)
            assert torch.equal(output, expected)
    for at, kv in enumerate(caches):
        assert kv.stats().num_store_hits + kv.stats().num_pool_hits == 3
        with pytest.raises(pk.SpecMismatchError):
            PagedCache(models[at - 1], kv)
        kv.close()


# -- failures and refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_step_of_a_batch_that_failed_half_way_can_be_repeated(
    step: int, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, mask = padded_batch(random_ids)
    expected = generate(model, ids, usual_cache(model), attention_mask=mask).sequences
    num_calls = 0

    def fail_at_step(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == step:
            raise KeyboardInterrupt

    with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
        hook = model.model.layers[1].register_forward_pre_hook(fail_at_step)
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, cache, attention_mask=mask)
        hook.remove()
        num_known = 150 + step - 1 if step > 1 else 150
        so_far = expected[:, :num_known]
        longer = torch.nn.functional.pad(mask, (0, num_known - 150), value=1)
        output = generate(
            model, so_far, cache, attention_mask=longer, max_new_tokens=170 - num_known
        )
        assert torch.equal(output.sequences, expected)
        cache.commit(output.sequences)
    assert kv.stats().num_pages_held == 0


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_among_passes_that_are_shared_leaves_nothing_wrong(
    failing: int, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = torch.cat([questions(3, 400, 30), random_ids(430, seed=40)])
    ids = torch.cat([ids, ids])
    expected = generate(model, ids, usual_cache(model)).sequences
    num_calls = 0

    def fail(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise KeyboardInterrupt

    with PagedCache.from_prompt(model, ids[:1], kv) as cache:
        cache.commit(generate(model, ids[:1], cache, max_new_tokens=1).sequences)
    with PagedCache.from_prompt(model, ids, kv) as cache:
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, cache)
        hook.remove()
        kv.check_invariants()
        output = generate(model, ids, cache).sequences
        cache.commit(output)
    assert torch.equal(output, expected)
    assert kv.stats().num_pages_held == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0, 1], [1, 1, 1, 1]], "hides 1 tokens behind the first that it shows, in row 0"),
        ([[1, 1, 1, 1], [1, 1, 0, 0]], "hides 2 tokens behind the first that it shows, in row 1"),
        ([[1, 1, 1], [1, 1, 1]], r"shape \(2, 3\), but there are 2 rows of 4 tokens"),
        ([[1, 1, 1, 1]], r"shape \(1, 4\), but there are 2 rows"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "a row without a token"),
    ],
    ids=["a hole", "right padding", "too narrow", "one row for two", "only pads"],
)
def test_masks_that_pages_cannot_follow_are_refused(
    mask: list[list[int]], message: str, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = torch.cat([random_ids(4, seed=48), random_ids(4, seed=49)])
    with pytest.raises(ValueError, match=message):
        PagedCache.from_prompt(model, ids, kv, attention_mask=torch.tensor(mask))
    if "row without" not in message:
        with PagedCache(model, kv) as cache, pytest.raises(ValueError, match=message):
            model(ids, attention_mask=torch.tensor(mask), cache=cache)
    assert kv.stats().num_pages_held == 0


def test_pads_that_were_not_announced_are_refused(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, mask = padded_batch(random_ids)
    with PagedCache.from_prompt(model, ids, kv) as cache:
        with pytest.raises(ValueError, match="give from_prompt the attention_mask"):
            generate(model, ids, cache, attention_mask=mask)
        assert cache.get_seq_length() == 0


def test_positions_that_ignore_the_pads_are_refused(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, mask = padded_batch(random_ids)
    with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
        with pytest.raises(ValueError, match="position_ids are missing"):
            model(ids, attention_mask=mask, cache=cache)
        with pytest.raises(ValueError, match=r"position_ids are not 0..130 in row 1"):
            model(ids, attention_mask=mask, position_ids=torch.arange(150)[None], cache=cache)
        with pytest.raises(ValueError, match=r"position_ids have shape \(1, 149\)"):
            model(ids, attention_mask=mask, position_ids=torch.arange(149)[None], cache=cache)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_another_number_of_rows_is_refused(
    num_rows: int, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids = questions(2, 20, 5)
    with PagedCache.from_prompt(model, ids, kv) as cache:
        with pytest.raises(ValueError, match=f"{num_rows} rows, but the cache holds 2"):
            model(random_ids(25, seed=1).repeat(num_rows, 1), cache=cache)
        with pytest.raises(ValueError, match="2 sequences: take sequences"):
            _ = cache.sequence


def test_a_turn_without_the_turns_before_is_refused(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt = random_ids(40, seed=53)
    with PagedCache.from_prompt(model, prompt, kv) as cache:
        output = generate(model, prompt, cache).sequences
        with pytest.raises(ValueError, match="give all tokens of the conversation each time"):
            generate(model, random_ids(5, seed=54), cache)
        cache.commit(output)


def test_another_model_is_refused(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    ids, copied, watched = random_ids(20, seed=60), copy.deepcopy(model), tiny.llama(seed=2)
    with pk.PagedKVCache(spec_for(watched), 8) as its_own:
        PagedCache(watched, its_own).close()
    with PagedCache(model, kv) as cache, torch.no_grad():
        for wrong in (watched, copied):
            with pytest.raises(ValueError, match="was made for another LlamaForCausalLM"):
                wrong(ids, cache=cache)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("which", ["another model", "a part of the model"])
def test_what_no_hook_has_seen_gets_no_key(
    which: str, model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    ids, more = random_ids(40, seed=60), random_ids(20, seed=61)
    unseen = model.model if which == "a part of the model" else tiny.llama(seed=1)
    with PagedCache(model, kv) as cache, torch.no_grad():
        model(ids, cache=cache)
        cache.crop(-20)
        unseen(more, cache=cache)
        assert cache.get_seq_length() == 40
        for named in (ids, torch.cat([ids[:, :20], more], dim=1)):
            with pytest.raises(ValueError, match="20 of 40 tokens were not given as input_ids"):
                cache.commit(named)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_type_ids", torch.full((1, 20), 7)),
        ("pixel_values", torch.ones(1, 3)),
        ("mm_encoder_outputs", {"image": 1}),
        ("per_layer_inputs", torch.ones(1, 20, 2)),
        ("is_causal", False),
    ],
)
def test_what_page_keys_do_not_name_is_refused(name: str, value: Any, kv: pk.PagedKVCache) -> None:
    model = tiny.llama()
    with PagedCache(model, kv) as cache, pytest.raises(ValueError, match=f"{name} given"):
        model(random_ids(20, seed=61), cache=cache, **{name: value})


def test_a_cache_that_is_not_to_be_used_is_refused(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    with PagedCache(model, kv) as cache:
        with pytest.raises(ValueError, match="use_cache=False given with a cache"):
            generate(model, random_ids(20, seed=68), cache, use_cache=False)
        assert cache.get_seq_length() == 0


def test_kv_that_was_computed_with_dropout_gets_no_key(tmp_path: Path) -> None:
    model = tiny.gpt2().train()  # its embeddings have dropout by default
    ids = random_ids(40, seed=62)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="computed with dropout"):
            cache.commit(ids)
    model = tiny.llama().train()  # has none
    with open_cache(model, tmp_path / "other.zarr") as kv, PagedCache(model, kv) as cache:
        model(ids, cache=cache)
        cache.commit(ids)


def test_weights_that_were_changed_meanwhile_are_refused(tmp_path: Path) -> None:
    model, ids = tiny.llama(), random_ids(40, seed=63)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        output = generate(model, ids, cache).sequences
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        with pytest.raises(pk.SpecMismatchError, match="model is"):
            cache.commit(output)


def test_pads_of_models_that_count_them_as_positions_are_refused(tmp_path: Path) -> None:
    model = tiny.bart()
    ids, mask = padded_batch(random_ids)
    with open_cache(model, tmp_path / "cache.zarr") as kv, PagedCache(model, kv) as cache:
        with pytest.raises(ValueError, match="the model counts them as positions"):
            generate(model, ids, cache, attention_mask=mask)
        assert cache.get_seq_length() == 0


def test_pads_of_a_model_that_knows_distances_only_are_taken(tmp_path: Path) -> None:
    model = tiny.bloom()
    ids, mask = padded_batch(random_ids)
    expected = generate(model, ids, usual_cache(model), attention_mask=mask)
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        with PagedCache.from_prompt(model, ids, kv, attention_mask=mask) as cache:
            output = generate(model, ids, cache, attention_mask=mask)
            cache.commit(output.sequences)
        assert torch.equal(output.sequences, expected.sequences)
        alone = ids[2:, -77:]
        expected = generate(model, alone, usual_cache(model))
        with PagedCache.from_prompt(model, alone, kv) as cache:
            assert cache.num_reused_tokens == 76
            found = generate(model, alone, cache)
        assert torch.equal(found.sequences, expected.sequences)
        assert largest_difference(found, expected) <= 1e-4


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_prompt_lookup_begins_with_a_known_prefix_where_there_are_no_positions(
    name: str, tmp_path: Path
) -> None:
    model = getattr(tiny, name)()
    model.generation_config.use_cache = True
    prompt = torch.cat([random_ids(40, seed=67)] * 2, dim=1)
    expected = generate(model, prompt, usual_cache(model))
    with open_cache(model, tmp_path / "cache.zarr") as kv:
        for num_reused in (0, 79):
            with PagedCache.from_prompt(model, prompt, kv) as cache:
                assert cache.num_reused_tokens == num_reused
                found = generate(model, prompt, cache, prompt_lookup_num_tokens=3)
                cache.commit(found.sequences)
            assert torch.equal(found.sequences, expected.sequences)


def test_another_end_may_follow_on_a_prompt_that_was_cropped(
    model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    prompt, other = random_ids(60, seed=64), random_ids(20, seed=65)
    with PagedCache.from_prompt(model, prompt, kv) as cache, torch.no_grad():
        model(prompt, cache=cache)
        cache.crop(-20)
        found = model(other, cache=cache).logits
        expected = model(torch.cat([prompt[:, :40], other], dim=1)).logits[:, 40:]
        assert torch.allclose(found, expected, rtol=0, atol=1e-4)
        cache.commit(torch.cat([prompt[:, :40], other], dim=1))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_call_that_failed_may_be_repeated_as_it_was(
    failing: int, error: type[BaseException], model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    """Equal rows, of which the prompt is computed ahead; then beams, then something else."""
    ids, num_calls = random_ids(300, seed=66).repeat(3, 1), 0
    options = {"logits_to_keep": 1, "position_ids": torch.arange(300)[None]}

    def fail(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise error

    with torch.no_grad():
        expected = model(ids[:1]).logits[:, -1:]
    with PagedCache(model, kv) as cache, torch.no_grad():
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        for _ in range(5):
            try:
                found = model(ids, cache=cache, **options).logits
            except error:
                continue
            break
        hook.remove()
        assert cache.get_seq_length() == 300
        assert torch.allclose(found, expected.expand(3, 1, -1), rtol=0, atol=1e-4)
    prompt = ids[:1]
    expected = generate(model, prompt, usual_cache(model)).sequences
    with PagedCache(model, kv) as cache:
        num_calls = 0
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(error):
            generate(model, prompt, cache, num_beams=3)
        hook.remove()
        if cache.get_seq_length() < 300:
            assert torch.equal(generate(model, prompt, cache).sequences, expected)


def test_rows_in_another_order_are_refused(model: PreTrainedModel, kv: pk.PagedKVCache) -> None:
    ids = questions(2, 20, 5)
    with PagedCache.from_prompt(model, ids, kv) as cache:
        with pytest.raises(ValueError, match="token 20 of input_ids"):
            generate(model, ids.flip(0), cache)
        output = generate(model, ids, cache).sequences
        for wrong in (output.flip(0), output[:1], output[:, :40]):
            with pytest.raises(ValueError, match="output_ids"):
                cache.commit(wrong)
        cache.commit(output)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda cache: cache.batch_repeat_interleave(0),
    ],
    ids=["no row", "no repeats"],
)
def test_wrong_calls_are_refused(
    use: Callable[[PagedCache], Any], model: PreTrainedModel, kv: pk.PagedKVCache
) -> None:
    with PagedCache(model, kv) as cache, pytest.raises(ValueError, match="row|repeats"):
        use(cache)
