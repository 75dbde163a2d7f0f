"""The contract: what was computed is found again, is right, and is counted right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv_adapters.testing.adapter import AdapterUnderTest, Engine, Place

in_every_place = pytest.mark.parametrize("place", ["pool", "disk", "restart"])


class Reuse(AdapterUnderTest[Engine]):
    """Tests that need two prompts, the second of which shares something with the first."""

    def test_nothing_is_reused_from_an_empty_cache(self) -> None:
        """The number is that of the sequence when it was opened."""
        engine = self.make_engine(seed=0)
        with self.open_cache(engine) as cache:
            assert self.check_answer(engine, self.long_prompt(), cache) == 0

    @in_every_place
    def test_a_prompt_that_comes_again_is_reused(self, place: Place, tmp_path: Path) -> None:
        """If nothing is reused, commit it; if only after a restart, look at the fingerprint.

        If the tokens are wrong, the positions of what is computed do not go on from what is reused.
        """
        prompt = self.long_prompt()
        with self.answered(prompt, place, tmp_path) as (engine, cache, _):
            num_reused = self.check_answer(engine, prompt, cache)
            assert num_reused == self.reusable_again(prompt)

    @in_every_place
    def test_the_last_token_of_a_cached_prompt_is_computed_again(
        self, place: Place, tmp_path: Path
    ) -> None:
        """The answer begins with its logits, and the cache has none: truncate the sequence."""
        prompt = self.prompt(3 * self.page_tokens)  # all of it is in full pages
        with self.answered(prompt, place, tmp_path) as (engine, cache, so_far):
            num_reused = self.check_answer(engine, prompt, cache)
            assert num_reused == self.reusable_again(prompt) < len(prompt)
            self.check_pages(engine, so_far, cache)

    @in_every_place
    def test_prompts_that_share_a_part_share_its_tokens(self, place: Place, tmp_path: Path) -> None:
        """All is reused up to the first token that differs, inside a page; behind it, computed.

        If the tokens are wrong, the engine takes the number of reused tokens for full pages.
        """
        prompt = self.long_prompt()
        num_common = 2 * self.page_tokens + 3
        other = np.concatenate([prompt[:num_common], self.prompt(2 * self.page_tokens, seed=1)])
        other[num_common] = (prompt[num_common] + 1) % self.num_token_ids
        with self.answered(prompt, place, tmp_path) as (engine, cache, so_far):
            num_reused = self.check_answer(engine, other, cache)
            assert num_reused == self.reusable(num_common, len(other))
            self.check_pages(engine, other, cache)
            self.check_pages(engine, so_far, cache)

    def test_less_than_a_page_is_shared_too(self, tmp_path: Path) -> None:
        """The tokens before the first that differs are copied out of the page."""
        prompt = self.long_prompt()
        other = prompt.copy()
        other[self.page_tokens - 1] = (other[self.page_tokens - 1] + 1) % self.num_token_ids
        with self.answered(prompt, "pool", tmp_path) as (engine, cache, _):
            num_reused = self.check_answer(engine, other, cache)
            assert num_reused == self.reusable(self.page_tokens - 1, len(other))
            self.check_pages(engine, other, cache)

    @in_every_place
    def test_a_second_turn_reuses_the_pages_of_the_first_answer(
        self, place: Place, tmp_path: Path
    ) -> None:
        """If it reuses those of the prompt only, commit the answer too."""
        prompt = self.prompt(6 * self.page_tokens + 4 - self.num_new_tokens)
        with self.answered(prompt, place, tmp_path) as (engine, cache, so_far):
            assert len(so_far) // self.page_tokens > len(prompt) // self.page_tokens
            second = np.concatenate([so_far, self.prompt(self.page_tokens + 2, seed=1)])
            num_reused = self.check_answer(engine, second, cache)
            assert num_reused == self.reusable(self.in_full_pages(len(so_far)), len(second))
            self.check_pages(engine, second, cache)

    def test_a_last_token_that_was_not_computed_is_not_reused(self, tmp_path: Path) -> None:
        """The last token of an answer would fill a page, but most engines never compute its KV.

        Commit as many ids as the sequence has tokens. An engine that did compute it may reuse it.
        """
        prompt = self.prompt(6 * self.page_tokens - self.num_new_tokens)
        with self.answered(prompt, "pool", tmp_path) as (engine, cache, so_far):
            self.check_pages(engine, so_far, cache)
            second = np.concatenate([so_far, self.prompt(self.page_tokens + 2, seed=1)])
            num_reused = self.check_answer(engine, second, cache)
            counts = (self.in_full_pages(len(so_far) - 1), self.in_full_pages(len(so_far)))
            assert num_reused in [self.reusable(count, len(second)) for count in counts]

    def test_another_salt_shares_nothing(self, tmp_path: Path) -> None:
        """Give the salt to ``open_sequence``."""
        prompt = self.long_prompt()
        with self.answered(prompt, "pool", tmp_path, salt=b"one") as (engine, cache, so_far):
            assert self.num_found(so_far, cache) == 0  # under no salt
            assert self.check_answer(engine, prompt, cache, salt=b"two") == 0
            assert self.check_answer(engine, prompt, cache, salt=b"") == 0
            num_reused = self.check_answer(engine, prompt, cache, salt=b"one")
            assert num_reused == self.reusable_again(prompt)

    def test_an_int8_store_is_reused_after_a_restart(self, tmp_path: Path) -> None:
        """Rounded, so that nothing is promised about the tokens."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        for expected in (0, self.reusable_again(prompt)):
            with self.open_cache(engine, tmp_path / "cache.zarr", codec="int8") as cache:
                generated = self.generate(engine, prompt, cache, self.num_new_tokens, b"")
            assert generated.num_reused_tokens == expected
            assert len(generated.tokens) == self.num_new_tokens

    def test_tokens_that_are_reused_are_not_computed_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The number of reused tokens is what was saved."""
        appended = AppendedTokens(monkeypatch)
        prompt = self.long_prompt()
        with self.answered(prompt, "pool", tmp_path) as (engine, cache, _):
            num_cold = appended.count
            assert num_cold >= len(prompt) + self.num_new_tokens - 1
            num_reused = self.check_answer(engine, prompt, cache)
            assert appended.count - num_cold == num_cold - num_reused


class AppendedTokens:
    """Counts the tokens that are appended to sequences, by layer 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        append, append_layer = pk.Sequence.append, pk.Sequence.append_layer

        def counted(sequence: pk.Sequence, k: Any, v: Any = None, tokens: Any = None) -> None:
            self.count += np.shape(k)[1]
            append(sequence, k, v, tokens)

        def layer_counted(sequence: pk.Sequence, layer: int, k: Any, v: Any = None) -> None:
            self.count += len(k) if layer == 0 else 0
            append_layer(sequence, layer, k, v)

        monkeypatch.setattr(pk.Sequence, "append", counted)
        monkeypatch.setattr(pk.Sequence, "append_layer", layer_counted)
