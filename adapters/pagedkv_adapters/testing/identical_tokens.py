"""The contract: the tokens are those of the engine's own loop, wherever pages are."""

from pathlib import Path

import numpy as np
import pytest

from pagedkv_adapters.testing.adapter import FEW_SLOTS, AdapterUnderTest, Engine


class IdenticalTokens(AdapterUnderTest[Engine]):
    """Tests that need one prompt, which nobody has seen before."""

    def test_answers_depend_on_every_page_of_the_prompt(self) -> None:
        """Else tokens would not show what is wrong with keys and values: take other weights."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        answer = self.generate_alone(engine, prompt, self.num_new_tokens)
        for page in range(len(prompt) // self.page_tokens):
            at = slice(page * self.page_tokens, (page + 1) * self.page_tokens)
            other = prompt.copy()
            other[at] = (other[at] + 1) % self.num_token_ids
            others = self.generate_alone(engine, other, self.num_new_tokens)
            assert others != answer, f"the answer is the same whatever page {page} is"

    def test_tokens_with_all_pages_in_the_pool(self) -> None:
        """The simplest case: if it fails, look at what is appended, and in which order."""
        engine = self.make_engine(seed=0)
        with self.open_cache(engine) as cache:
            self.check_answer(engine, self.long_prompt(), cache)

    @pytest.mark.parametrize("codec", ["raw", "int8"])
    def test_tokens_with_a_pool_much_smaller_than_the_sequence(
        self, codec: str, tmp_path: Path
    ) -> None:
        """With INT8 too: what a live sequence needs itself is not rounded.

        If only this fails, the engine uses gathered arrays after their ``with`` block, or gives a
        sequence up and opens it again within an answer.
        """
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        num_new = 5 * self.page_tokens  # so many, for small errors to show
        path = tmp_path / "cache.zarr"
        with self.open_cache(engine, path, num_slots=FEW_SLOTS, codec=codec) as cache:
            tokens = self.generate(engine, prompt, cache, num_new, b"").tokens
        assert tokens == self.generate_alone(engine, prompt, num_new)

    def test_tokens_behind_prompts_of_any_length(self) -> None:
        """One token, two, and about a page."""
        engine = self.make_engine(seed=0)
        for num_tokens in (1, 2, self.page_tokens - 1, self.page_tokens, self.page_tokens + 1):
            with self.open_cache(engine) as cache:
                self.check_answer(engine, self.prompt(num_tokens), cache)

    def test_one_token_is_generated_if_one_is_asked_for(self) -> None:
        """An answer has as many tokens as were asked for, the last of which is not computed."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        with self.open_cache(engine) as cache:
            tokens = self.generate(engine, prompt, cache, 1, b"").tokens
        assert tokens == self.generate_alone(engine, prompt, 1)

    def test_pages_hold_the_keys_and_values_of_the_tokens_that_name_them(self) -> None:
        """Pages that were computed token by token, in an answer, are those of a prompt.

        If it fails, commit the prompt and the answer, and check their order and positions.
        """
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        with self.open_cache(engine) as cache:
            answer = self.generate(engine, prompt, cache, 3 * self.page_tokens, b"").tokens
            tokens = np.concatenate([prompt, answer])
            assert self.num_found(tokens, cache) == (len(tokens) - 1) // self.page_tokens
            self.check_pages(engine, tokens, cache)
