"""Conversations that branch inside pages: tokens reused at token level, and by whole pages."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from measure.compare import Bench, Target, Unit
from measure.long_prompt import SPEC

_REUSED = Unit(name="% of prompt tokens reused", amount=1.0, is_rate=True)
_PEER = "whole pages only (token_match=False)"

Tokens = npt.NDArray[np.int32]


def branching(bench: Bench) -> None:
    """The same requests at page sizes 16, 64 and 256; nothing is evicted."""
    num_sessions = bench.count(40, 2)
    for page_tokens in (16, 64, 256):
        ours, peer = (
            _reused(page_tokens, num_sessions, token_match=token_match)
            for token_match in (True, False)
        )
        bench.add(
            f"conversations that branch, pages of {page_tokens} tokens",
            _REUSED,
            ours,
            peer,
            _PEER,
            target=Target(ratio=1.0),
        )


def requests(num_sessions: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Prompts and their answers, in the order in which they come.

    Each conversation begins with one of three system prompts that are alike for some way, and has
    a few turns. Half of the turns are edited: the user changes the message somewhere and asks
    again; a quarter of the answers are made anew from the same prompt.
    """
    rng = np.random.default_rng(3)
    base = _words(rng, 700)
    systems = [np.concatenate([base[:at], _words(rng, 150)]) for at in (700, 640, 333)]
    for _ in range(num_sessions):
        said = systems[rng.integers(3)]
        for _ in range(rng.integers(2, 6)):
            message = _words(rng, rng.integers(20, 400))
            tries = [message]
            if rng.random() < 0.5:
                at = rng.integers(1, len(message))
                tries.append(np.concatenate([message[:at], _words(rng, rng.integers(5, 60))]))
            if rng.random() < 0.25:
                tries.append(tries[-1])
            for one in tries:
                prompt, answer = np.concatenate([said, one]), _words(rng, rng.integers(20, 500))
                yield prompt, answer
            said = np.concatenate([prompt, answer])


def _words(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 150_000, count).astype(np.int32)


def _reused(page_tokens: int, num_sessions: int, *, token_match: bool) -> float:
    """Percent of the prompts' tokens whose KV was found."""
    spec = replace(SPEC, page_tokens=page_tokens)
    num_tokens = num_reused = 0
    with pk.PagedKVCache(spec, 4_000_000 // page_tokens, token_match=token_match) as cache:
        for prompt, answer in requests(num_sessions):
            with cache.open_sequence(prompt) as sequence:
                found = sequence.num_tokens
                num_tokens, num_reused = num_tokens + len(prompt), num_reused + found
                ids = np.concatenate([prompt, answer])[found:]
                sequence.append(np.zeros((1, len(ids), 1, 1), np.float16), tokens=ids)
    return 100 * num_reused / num_tokens
