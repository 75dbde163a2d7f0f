"""Engines with one fault each, which the contract suite must find."""

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy_loop_contract import NumpyLoopContract

import pagedkv as pk
from pagedkv_adapters import numpy_loop
from pagedkv_adapters.numpy_loop import Model, ModelConfig
from pagedkv_adapters.testing import Generated
from pagedkv_adapters.testing.adapter import Ids


class LoopInSteps(NumpyLoopContract):
    """The loop in numpy once more, in steps, of which a faulty engine does one in another way."""

    def generate(
        self,
        engine: Model,
        prompt: Ids,
        cache: pk.PagedKVCache,
        max_new_tokens: int,
        salt: bytes,
    ) -> Generated:
        self.check(engine, prompt, cache)
        sequence = self.open(cache, prompt, salt)
        answer: list[int] = []
        try:
            num_reused = self.skip_reused(sequence, prompt)
            missing = prompt[num_reused:]
            while len(answer) < max_new_tokens:
                answer.append(int(self.forward(engine, missing, sequence).argmax()))
                missing = np.array(answer[-1:])
            self.commit(sequence, np.concatenate([prompt, np.array(answer)]))
        except BaseException:
            self.close_after_error(sequence, prompt)
            raise
        self.close(sequence)
        return Generated(tokens=tuple(answer), num_reused_tokens=num_reused)

    def check(self, engine: Model, prompt: Ids, cache: pk.PagedKVCache) -> None:
        if len(cache.specs) > 1:
            raise pk.SpecMismatchError("several specs")
        numpy_loop.spec_for(engine, cache.specs[0].page_tokens).require_equal(cache.specs[0], "it")
        if not len(prompt):
            raise ValueError("a prompt has at least one token")

    def open(self, cache: pk.PagedKVCache, prompt: Ids, salt: bytes) -> pk.Sequence:
        return cache.open_sequence(prompt, salt=salt)

    def skip_reused(self, sequence: pk.Sequence, prompt: Ids) -> int:
        sequence.truncate(min(sequence.num_tokens, len(prompt) - 1))
        return sequence.num_tokens

    def forward(self, engine: Model, tokens: Ids, sequence: pk.Sequence) -> Any:
        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            sequence.append_layer(layer, k, v)
            return self.attend(sequence, layer, q)

        start = self.position(sequence, tokens)
        return numpy_loop.forward(engine, tokens, start, attend)

    def position(self, sequence: pk.Sequence, tokens: Ids) -> int:
        return sequence.num_tokens

    def attend(self, sequence: pk.Sequence, layer: int, q: Any) -> Any:
        return sequence.attend(layer, q)

    def commit(self, sequence: pk.Sequence, tokens: Ids) -> None:
        sequence.commit(tokens[:-1])

    def close(self, sequence: pk.Sequence) -> None:
        sequence.close()

    def close_after_error(self, sequence: pk.Sequence, prompt: Ids) -> None:
        self.close(sequence)


# -- what is computed --------------------------------------------------------------------------


class AnswersFromTheLastPage(LoopInSteps):
    def generate_alone(self, engine: Model, prompt: Ids, max_new_tokens: int) -> tuple[int, ...]:
        return super().generate_alone(engine, prompt[-self.page_tokens :], max_new_tokens)


class AttendsToAWindow(LoopInSteps):
    def attend(self, sequence: pk.Sequence, layer: int, q: Any) -> Any:
        return sequence.attend(layer, q, window=self.page_tokens)


class AnswersWithOneTokenMore(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        *others, max_new_tokens, salt = args
        return super().generate(*others, max_new_tokens + 1, salt)


class OpensASequenceForEachToken(LoopInSteps):
    """So that an INT8 store rounds what it needs itself."""

    def generate(self, *args: Any) -> Generated:
        engine, prompt, cache, max_new_tokens, salt = args
        first = super().generate(engine, prompt, cache, 1, salt)
        answer = list(first.tokens)
        while len(answer) < max_new_tokens:
            so_far = np.concatenate([prompt, answer])
            answer += super().generate(engine, so_far, cache, 1, salt).tokens
        return replace(first, tokens=tuple(answer))


class CountsPositionsFromWhatWasReused(LoopInSteps):
    def position(self, sequence: pk.Sequence, tokens: Ids) -> int:
        return 0 if len(tokens) > 1 else sequence.num_tokens


class LeavesTwoTokens(LoopInSteps):
    def skip_reused(self, sequence: pk.Sequence, prompt: Ids) -> int:
        sequence.truncate(min(sequence.num_tokens, len(prompt) - 2))
        return sequence.num_tokens


class ComputesWhatIsReused(LoopInSteps):
    def open(self, cache: pk.PagedKVCache, prompt: Ids, salt: bytes) -> pk.Sequence:
        return cache.open_sequence(salt=salt)

    def generate(self, *args: Any) -> Generated:
        _, prompt, cache, *_ = args
        num_common = self.page_tokens * self.num_found(prompt, cache)
        num_reused = self.reusable(num_common, len(prompt))
        return replace(super().generate(*args), num_reused_tokens=num_reused)


# -- what is counted ---------------------------------------------------------------------------


class CountsTheTokenThatIsComputedAgain(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        _, prompt, cache, *_ = args
        num_found = self.page_tokens * self.num_found(prompt, cache)
        return replace(super().generate(*args), num_reused_tokens=num_found)


class CountsTheWholePrompt(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        return replace(super().generate(*args), num_reused_tokens=len(args[1]) - 1)


# -- what is named -----------------------------------------------------------------------------


class NeverCommits(LoopInSteps):
    def commit(self, sequence: pk.Sequence, tokens: Ids) -> None:
        pass


class CommitsThePromptOnly(LoopInSteps):
    def commit(self, sequence: pk.Sequence, tokens: Ids) -> None:
        sequence.commit(tokens[: -self.num_new_tokens])


class CommitsOtherTokens(LoopInSteps):
    """The next one of each."""

    def commit(self, sequence: pk.Sequence, tokens: Ids) -> None:
        known = sequence.tokens
        sequence.commit(np.concatenate([known, tokens[len(known) + 1 :]]))


class CommitsATokenThatItDidNotCompute(LoopInSteps):
    def commit(self, sequence: pk.Sequence, tokens: Ids) -> None:
        config = ModelConfig()
        shape = (config.num_layers, 1, config.num_kv_heads, config.head_dim)
        sequence.append(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        sequence.commit(tokens)


class CommitsAfterAnError(LoopInSteps):
    """Having filled up the layers that were not reached."""

    def close_after_error(self, sequence: pk.Sequence, prompt: Ids) -> None:
        config = ModelConfig()
        for layer in range(config.num_layers):
            with sequence.gather(layer) as (keys, _):
                shape = (max(0, len(prompt) - len(keys)), *keys.shape[1:])
            sequence.append_layer(layer, np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        sequence.commit(prompt)
        sequence.close()


class IgnoresTheSalt(LoopInSteps):
    def open(self, cache: pk.PagedKVCache, prompt: Ids, salt: bytes) -> pk.Sequence:
        return cache.open_sequence(prompt)


# -- what is left behind -----------------------------------------------------------------------


class NeverCloses(LoopInSteps):
    def close(self, sequence: pk.Sequence) -> None:
        pass


class ClosesOnSuccessOnly(LoopInSteps):
    def close_after_error(self, sequence: pk.Sequence, prompt: Ids) -> None:
        pass


class NeverEndsAGather(LoopInSteps):
    def attend(self, sequence: pk.Sequence, layer: int, q: Any) -> Any:
        gathered = sequence.gather(layer)
        self.__dict__.setdefault("gathered", []).append(gathered)  # else Python ends it
        return numpy_loop.attention(q, *gathered.__enter__())


# -- what is refused ---------------------------------------------------------------------------


class HasOneFingerprintForAllWeights(LoopInSteps):
    def make_engine(self, seed: int) -> Model:
        return replace(super().make_engine(seed), fingerprint="tiny")


class HasAFingerprintForEachRun(LoopInSteps):
    numbers = itertools.count()

    def make_engine(self, seed: int) -> Model:
        return replace(super().make_engine(seed), fingerprint=f"run {next(self.numbers)}")


class TakesAnyCache(LoopInSteps):
    def check(self, engine: Model, prompt: Ids, cache: pk.PagedKVCache) -> None:
        pass


class TakesAnEmptyPrompt(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        engine, prompt, *others = args
        return super().generate(engine, prompt if len(prompt) else np.array([0]), *others)


class HidesWhatThePoolCannotHold(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        try:
            return super().generate(*args)
        except pk.PoolExhaustedError:
            return Generated(tokens=(0,) * args[3], num_reused_tokens=0)


class HidesThatTheCacheIsClosed(LoopInSteps):
    def generate(self, *args: Any) -> Generated:
        with suppress(pk.ClosedError):
            return super().generate(*args)
        engine, prompt, _, max_new_tokens, _ = args
        tokens = self.generate_alone(engine, prompt, max_new_tokens)
        return Generated(tokens=tokens, num_reused_tokens=0)


# -- what is shared ----------------------------------------------------------------------------


class SharesOneSequenceAmongThreads(LoopInSteps):
    current: pk.Sequence

    def open(self, cache: pk.PagedKVCache, prompt: Ids, salt: bytes) -> pk.Sequence:
        self.current = super().open(cache, prompt, salt)
        return self.current

    def attend(self, sequence: pk.Sequence, layer: int, q: Any) -> Any:
        return super().attend(self.current, layer, q)


class UsesTheWeightsThatWereLoadedLast(LoopInSteps):
    loaded: Model

    def make_engine(self, seed: int) -> Model:
        self.loaded = super().make_engine(seed)
        return self.loaded

    def forward(self, engine: Model, tokens: Ids, sequence: pk.Sequence) -> Any:
        return super().forward(self.loaded, tokens, sequence)
