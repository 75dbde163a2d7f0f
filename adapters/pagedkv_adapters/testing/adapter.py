"""``AdapterUnderTest``: what the contract suite has to know of an adapter."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Ids = npt.NDArray[np.int64]
"""Token ids, one dimension."""

Engine = TypeVar("Engine")

Place = Literal["pool", "disk", "restart"]
"""Where the pages of an earlier prompt are: all in the pool; most of them on disk only; all of them
on disk, in a store that another cache has written and closed."""

FEW_SLOTS = 2
"""A pool for a fraction of the pages of one sequence."""

_MANY_SLOTS = 64
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What an engine made of a prompt with a ``PagedKVCache``.

    Args:
        tokens: Ids of the new tokens; the prompt is not among them.
        num_reused_tokens: Tokens of the prompt whose KV was found in the cache, as the adapter
            tells it to its users.
    """

    tokens: tuple[int, ...]
    num_reused_tokens: int


class AdapterUnderTest(ABC, Generic[Engine]):
    """An engine and its adapter, as the tests of the contract use them.

    ``Engine`` is whatever holds the weights: a model, mostly. The suite never looks into it.

    Attributes:
        num_token_ids: Prompts are made of ids below this one.
        page_tokens: Tokens of a page.
        num_new_tokens: Length of an answer.
    """

    num_token_ids: ClassVar[int]
    page_tokens: ClassVar[int] = 8
    num_new_tokens: ClassVar[int] = 11

    # -- what a subclass says ----------------------------------------------------------------

    @abstractmethod
    def make_engine(self, seed: int) -> Engine:
        """An engine with random weights: equal ones for equal seeds, others for others.

        The weights must be such that an answer hangs on the whole prompt; a test checks it.
        """

    @abstractmethod
    def spec_for(self, engine: Engine, page_tokens: int) -> pk.KVSpec:
        """The engine's spec, with pages of so many tokens."""

    @abstractmethod
    def generate(
        self,
        engine: Engine,
        prompt: Ids,
        cache: pk.PagedKVCache,
        max_new_tokens: int,
        salt: bytes,
    ) -> Generated:
        """Generate greedily over ``cache``, and leave prompt and answer there to be reused.

        Args:
            engine: One that ``make_engine`` made.
            prompt: What to go on from.
            cache: A cache for ``spec_for(engine, …)``, or for another spec, which is refused.
            max_new_tokens: Tokens to generate; nothing ends an answer before.
            salt: The tenant's.
        """

    @abstractmethod
    def generate_alone(self, engine: Engine, prompt: Ids, max_new_tokens: int) -> tuple[int, ...]:
        """The new tokens that the engine generates greedily without PagedKV."""

    def reusable(self, num_common: int, num_prompt: int) -> int:
        """Tokens of a prompt that must be reused: all that are cached, but never its last token.

        Override it for an engine that cannot begin within a page.

        Args:
            num_common: Leading tokens that the prompt shares with full pages of the cache; they
                may end inside one.
            num_prompt: Tokens of the prompt.
        """
        return min(num_common, num_prompt - 1)

    def in_full_pages(self, num_tokens: int) -> int:
        """How many of so many tokens are in full pages: these are found by others."""
        return num_tokens // self.page_tokens * self.page_tokens

    def reusable_again(self, prompt: Ids) -> int:
        """Tokens that must be reused of a prompt that was answered before."""
        num_cached = self.in_full_pages(len(prompt) + self.num_new_tokens - 1)
        return self.reusable(min(len(prompt), num_cached), len(prompt))

    # -- what the tests are made of ----------------------------------------------------------

    def prompt(self, num_tokens: int, seed: int = 0) -> Ids:
        """Random ids; the same for the same seed."""
        return np.random.default_rng([seed, num_tokens]).integers(
            self.num_token_ids, size=num_tokens
        )

    def long_prompt(self, seed: int = 0) -> Ids:
        """Ids of five pages and a part of one."""
        return self.prompt(5 * self.page_tokens + 3, seed)

    @contextmanager
    def open_cache(
        self,
        engine: Engine,
        folder: Path | None = None,
        *,
        num_slots: int = _MANY_SLOTS,
        codec: str = "raw",
    ) -> Iterator[pk.PagedKVCache]:
        """A cache for the engine; with a folder over the store there, which is made if need be.

        In the end its bookkeeping must be right.
        """
        spec = self.spec_for(engine, self.page_tokens)
        store = None if folder is None else pk.PageStore.open(folder, spec, codec=codec)
        with pk.PagedKVCache(spec, num_slots, store) as cache:
            yield cache
            cache.check_invariants()

    @contextmanager
    def answered(
        self, prompt: Ids, place: Place, folder: Path, salt: bytes = b""
    ) -> Iterator[tuple[Engine, pk.PagedKVCache, Ids]]:
        """An engine, and a cache in which a prompt was answered.

        Args:
            prompt: The prompt.
            place: Where its pages are now.
            folder: An empty one, for the store.
            salt: Under which they are known.

        Yields:
            The engine, the cache, and the tokens of prompt and answer.
        """
        engine = self.make_engine(seed=0)
        path = None if place == "pool" else folder / "cache.zarr"
        num_slots = FEW_SLOTS if place == "disk" else _MANY_SLOTS
        with self.open_cache(engine, path, num_slots=num_slots) as cache:
            answer = self.generate(engine, prompt, cache, self.num_new_tokens, salt).tokens
            so_far = np.concatenate([prompt, answer])
            if place != "restart":
                yield engine, cache, so_far
        if place == "restart":
            engine = self.make_engine(seed=0)
            with self.open_cache(engine, path) as cache:
                yield engine, cache, so_far

    def check_answer(
        self, engine: Engine, prompt: Ids, cache: pk.PagedKVCache, salt: bytes = b""
    ) -> int:
        """Generate: the tokens must be the engine's own.

        Returns:
            How many tokens of the prompt were reused.
        """
        generated = self.generate(engine, prompt, cache, self.num_new_tokens, salt)
        assert generated.tokens == self.generate_alone(engine, prompt, self.num_new_tokens)
        return generated.num_reused_tokens

    def check_nothing_is_held(self, cache: pk.PagedKVCache) -> None:
        """No sequence is open, nothing is pinned, and the bookkeeping is right."""
        stats = cache.stats()
        assert stats.num_pages_held == 0, "a sequence was not closed"
        assert stats.num_pinned_slots == 0, "a gather has not ended"
        cache.check_invariants()

    def num_found(self, tokens: Ids, cache: pk.PagedKVCache) -> int:
        """Leading pages that the cache has of these tokens."""
        return cache.match(pk.page_keys(cache.specs[0], tokens))

    def check_pages(self, engine: Engine, tokens: Ids, cache: pk.PagedKVCache) -> None:
        """The pages that the cache has of these tokens hold what an engine computes for them.

        They may differ in the last bits, which depend on how many tokens were computed at once.
        """
        keys = pk.page_keys(cache.specs[0], tokens)
        keys = keys[: cache.match(keys)]
        found: npt.NDArray[Any] = cache.get(keys).astype(np.float32)
        with self.open_cache(engine) as fresh:
            self.generate(engine, tokens, fresh, 1, b"")
            expected = fresh.get(keys).astype(np.float32)
        largest = np.abs(expected).max(initial=0)
        tolerance = largest * _EPSILON[cache.specs[0].dtype] ** 0.5
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
