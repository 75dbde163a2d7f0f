"""The contract: nothing is left behind, and after an error nothing wrong."""

from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv_adapters.testing.adapter import FEW_SLOTS, AdapterUnderTest, Engine
from pagedkv_adapters.testing.calls import Interruption

at_any_call = pytest.mark.parametrize(
    "share", [0, 0.05, 0.5, 1], ids="{:.0%} of the calls done".format
)
"""In place of the first call, within the prompt, within the answer, in place of the last call."""


class EngineError(Exception):
    """Something went wrong in the engine, of which PagedKV knows nothing."""


class Failures(AdapterUnderTest[Engine]):
    """Tests of what remains of a generation, whether it ended well or not."""

    def test_no_page_pin_or_slot_is_left_after_generate(self) -> None:
        """If it fails, close the sequence, and end each ``gather``."""
        engine = self.make_engine(seed=0)
        num_pages = 0
        with self.open_cache(engine) as cache:
            for seed in range(3):
                prompt = self.long_prompt(seed)
                answer = self.generate(engine, prompt, cache, self.num_new_tokens, b"").tokens
                self.check_nothing_is_held(cache)
                num_pages += self.num_found(np.concatenate([prompt, answer]), cache)
                stats = cache.stats()
                assert stats.num_slots - stats.num_free_slots == num_pages

    @at_any_call
    @pytest.mark.parametrize("kind", [EngineError, KeyboardInterrupt])
    def test_an_engine_that_fails_leaves_nothing_behind(
        self, kind: type[BaseException], share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If it fails, close the sequence on errors too; on KeyboardInterrupt as on others."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        interruption = Interruption(monkeypatch)
        with self.open_cache(engine) as cache:
            answer = self.generate(engine, prompt, cache, self.num_new_tokens, b"other").tokens
            before = cache.stats().num_free_slots
            interruption.plan(share, kind())
            with pytest.raises(kind):
                self.generate(engine, prompt, cache, self.num_new_tokens, b"")
            self.check_nothing_is_held(cache)
            num_found = self.num_found(np.concatenate([prompt, answer]), cache)
            assert before - cache.stats().num_free_slots == num_found

    @at_any_call
    def test_what_an_engine_that_failed_has_computed_is_right(
        self, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Committed is what was computed before the error, or nothing.

        Then the same prompt is answered as ever, in the same cache and after a restart.
        """
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        interruption = Interruption(monkeypatch)
        with self.open_cache(engine, tmp_path / "cache.zarr", num_slots=FEW_SLOTS) as cache:
            answer = self.generate(engine, prompt, cache, self.num_new_tokens, b"other").tokens
            so_far = np.concatenate([prompt, answer])
            interruption.plan(share, EngineError())
            with pytest.raises(EngineError):
                self.generate(engine, prompt, cache, self.num_new_tokens, b"")
            self.check_nothing_is_held(cache)
            self.check_pages(engine, so_far, cache)
            self.check_answer(engine, prompt, cache)
        with self.open_cache(engine, tmp_path / "cache.zarr") as cache:
            self.check_pages(engine, so_far, cache)
            self.check_answer(engine, prompt, cache)

    def test_a_pool_without_a_store_that_is_too_small(self) -> None:
        """The error is passed on; or the engine knows what to do, and its answer is right."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        short = prompt[: self.page_tokens - 1]
        with self.open_cache(engine, num_slots=3) as cache:
            try:
                self.check_answer(engine, prompt, cache)
            except pk.PoolExhaustedError:
                self.check_nothing_is_held(cache)
            self.check_answer(engine, short, cache)
            self.check_nothing_is_held(cache)

    def test_a_prompt_without_tokens_is_refused(self) -> None:
        """There is no last token to compute; and no page is held by then."""
        engine = self.make_engine(seed=0)
        with self.open_cache(engine) as cache:
            with pytest.raises(ValueError):
                self.generate(engine, self.prompt(0), cache, self.num_new_tokens, b"")
            self.check_nothing_is_held(cache)

    def test_a_closed_cache_is_refused(self) -> None:
        """The error is passed on."""
        engine = self.make_engine(seed=0)
        with self.open_cache(engine) as cache:
            pass
        with pytest.raises(pk.ClosedError):
            self.generate(engine, self.long_prompt(), cache, self.num_new_tokens, b"")
