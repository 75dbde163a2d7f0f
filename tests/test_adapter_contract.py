"""The contract suite finds what is wrong with an engine, and each of its tests finds something."""

import inspect
from pathlib import Path
from typing import Any

import faulty_engines as faulty
import pytest
from faulty_engines import LoopInSteps

import pagedkv as pk
from pagedkv_adapters.testing import AdapterContract

pytestmark = pytest.mark.usefixtures("no_fsync")

FOUND = (AssertionError, pytest.fail.Exception, ValueError, pk.PagedKVError)
"""How a test fails: by what it asserts, by an error that does not come, or by one that does."""

FAULTS: list[tuple[type[LoopInSteps], str, dict[str, Any]]] = [
    # identical tokens
    (faulty.AnswersFromTheLastPage, "answers_depend_on_every_page_of_the_prompt", {}),
    (faulty.AttendsToAWindow, "tokens_with_all_pages_in_the_pool", {}),
    (
        faulty.AttendsToAWindow,
        "tokens_with_a_pool_much_smaller_than_the_sequence",
        {"codec": "raw"},
    ),
    (
        faulty.OpensASequenceForEachToken,
        "tokens_with_a_pool_much_smaller_than_the_sequence",
        {"codec": "int8"},
    ),
    (faulty.LeavesTwoTokens, "tokens_behind_prompts_of_any_length", {}),
    (faulty.AnswersWithOneTokenMore, "one_token_is_generated_if_one_is_asked_for", {}),
    (
        faulty.CommitsThePromptOnly,
        "pages_hold_the_keys_and_values_of_the_tokens_that_name_them",
        {},
    ),
    # reuse
    (faulty.CountsTheWholePrompt, "nothing_is_reused_from_an_empty_cache", {}),
    (faulty.NeverCommits, "a_prompt_that_comes_again_is_reused", {"place": "pool"}),
    (
        faulty.CommitsOtherTokens,
        "a_prompt_that_comes_again_is_reused",
        {"place": "disk"},
    ),
    (
        faulty.HasAFingerprintForEachRun,
        "a_prompt_that_comes_again_is_reused",
        {"place": "restart"},
    ),
    (
        faulty.CountsTheTokenThatIsComputedAgain,
        "the_last_token_of_a_cached_prompt_is_computed_again",
        {"place": "pool"},
    ),
    (
        faulty.CountsPositionsFromWhatWasReused,
        "prompts_that_share_a_part_share_its_tokens",
        {"place": "restart"},
    ),
    (faulty.CountsTheWholePrompt, "less_than_a_page_is_shared_too", {}),
    (
        faulty.CommitsThePromptOnly,
        "a_second_turn_reuses_the_pages_of_the_first_answer",
        {"place": "pool"},
    ),
    (
        faulty.CommitsATokenThatItDidNotCompute,
        "a_last_token_that_was_not_computed_is_not_reused",
        {},
    ),
    (faulty.IgnoresTheSalt, "another_salt_shares_nothing", {}),
    (faulty.NeverCommits, "an_int8_store_is_reused_after_a_restart", {}),
    (faulty.ComputesWhatIsReused, "tokens_that_are_reused_are_not_computed_again", {}),
    # what is left behind
    (faulty.NeverEndsAGather, "no_page_pin_or_slot_is_left_after_generate", {}),
    (faulty.NeverCloses, "no_page_pin_or_slot_is_left_after_generate", {}),
    (
        faulty.ClosesOnSuccessOnly,
        "an_engine_that_fails_leaves_nothing_behind",
        {"kind": KeyboardInterrupt, "share": 0.5},
    ),
    (
        faulty.CommitsAfterAnError,
        "what_an_engine_that_failed_has_computed_is_right",
        {"share": 0.05},
    ),
    (faulty.HidesWhatThePoolCannotHold, "a_pool_without_a_store_that_is_too_small", {}),
    (faulty.TakesAnEmptyPrompt, "a_prompt_without_tokens_is_refused", {}),
    (faulty.HidesThatTheCacheIsClosed, "a_closed_cache_is_refused", {}),
    # refusals
    (faulty.HasAFingerprintForEachRun, "equal_weights_have_one_spec", {}),
    (faulty.HasOneFingerprintForAllWeights, "the_pages_of_other_weights_are_refused", {}),
    (
        faulty.TakesAnyCache,
        "a_cache_of_another_spec_is_refused_and_left_as_it_is",
        {"field": "model"},
    ),
    (
        faulty.TakesAnyCache,
        "a_cache_of_another_spec_is_refused_and_left_as_it_is",
        {"field": "dtype"},
    ),
    (faulty.TakesAnyCache, "a_cache_of_several_specs_is_refused", {}),
    # concurrency
    (faulty.SharesOneSequenceAmongThreads, "two_threads_generate_over_one_cache", {}),
    (faulty.UsesTheWeightsThatWereLoadedLast, "two_engines_with_a_cache_each", {}),
]


def run(
    contract: type[AdapterContract[Any]],
    name: str,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One test of the contract, as pytest would run it."""
    test = getattr(contract(), f"test_{name}")
    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = inspect.signature(test).parameters
    test(**values, **{name: value for name, value in fixtures.items() if name in wanted})


@pytest.mark.parametrize(
    ("engine", "name", "values"),
    FAULTS,
    ids=[f"{fault.__name__}-{name}" for fault, name, _ in FAULTS],
)
def test_a_fault_is_found_and_without_it_there_is_none(
    engine: type[LoopInSteps],
    name: str,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, contract in enumerate((LoopInSteps, engine)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patches:
            if contract is LoopInSteps:
                run(contract, name, values, folder, patches)
            else:
                with pytest.raises(FOUND):
                    run(contract, name, values, folder, patches)


def test_every_test_of_the_contract_finds_a_fault() -> None:
    tests = {name for name in dir(AdapterContract) if name.startswith("test_")}
    assert tests == {f"test_{name}" for _, name, _ in FAULTS}


def test_every_fault_is_looked_for() -> None:
    faults = {
        thing
        for thing in vars(faulty).values()
        if inspect.isclass(thing) and issubclass(thing, LoopInSteps) and thing is not LoopInSteps
    }
    assert faults == {fault for fault, _, _ in FAULTS}
