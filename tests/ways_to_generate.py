"""Every way in which people call ``generate``, each with a cache that it is given."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

NewCache = Callable[[torch.Tensor, torch.Tensor], Any]
"""A cache for prompts, ``(row, token)``, and their mask."""
Prompts = Callable[[int, int], torch.Tensor]
"""A prompt, ``(1, token)``, of so many tokens and with that number."""


class Run(NamedTuple):
    """What ``generate`` returned, call by call, and the cache of the last call."""

    outputs: list[Any]
    cache: Any


class Setting(NamedTuple):
    """What a way is tried with."""

    model: PreTrainedModel
    prompts: Prompts
    new_cache: NewCache
    num_new: int = 20

    def cache_for(self, ids: torch.Tensor) -> Any:
        return self.new_cache(ids, torch.ones_like(ids))

    def generate(self, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
        defaults = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": self.num_new,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        return self.model.generate(ids, cache=cache, **{**defaults, **options})


def greedy(given: Setting) -> Run:
    ids = given.prompts(150, 1)
    cache = given.cache_for(ids)
    return Run([given.generate(ids, cache)], cache)


def sampling(given: Setting) -> Run:
    ids = given.prompts(150, 2)
    cache = given.cache_for(ids)
    torch.manual_seed(3)
    return Run([given.generate(ids, cache, do_sample=True, top_k=20)], cache)


def several_samples(given: Setting) -> Run:
    ids = given.prompts(100, 3)
    cache = given.cache_for(ids)
    torch.manual_seed(4)
    options = {"do_sample": True, "top_k": 20, "num_return_sequences": 3}
    return Run([given.generate(ids, cache, **options)], cache)


def beams(given: Setting) -> Run:
    """Prompts so short that no forward pass of its own is spent on what beams have in common."""
    ids = torch.cat([given.prompts(60, 5), given.prompts(60, 6)])
    cache = given.cache_for(ids)
    return Run([given.generate(ids, cache, num_beams=3)], cache)


def left_padded(given: Setting) -> Run:
    ids, mask = padded_batch(given.prompts)
    cache = given.new_cache(ids, mask)
    return Run([given.generate(ids, cache, attention_mask=mask)], cache)


def prompt_lookup(given: Setting) -> Run:
    ids = torch.cat([given.prompts(50, 7)] * 3, dim=1)
    cache = given.cache_for(ids)
    return Run([given.generate(ids, cache, prompt_lookup_num_tokens=5)], cache)


def two_turns(given: Setting) -> Run:
    ids = given.prompts(150, 8)
    cache = given.cache_for(ids)
    first = given.generate(ids, cache)
    second = torch.cat([first.sequences, given.prompts(23, 9)], dim=1)
    return Run([first, given.generate(second, cache)], cache)


def padded_batch(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 150, 131 and 77 tokens, pads on the left, and their mask."""
    ids, mask = torch.zeros(3, 150, dtype=torch.long), torch.zeros(3, 150, dtype=torch.long)
    for row, count in enumerate((150, 131, 77)):
        ids[row, -count:] = prompts(count, 10 + row)[0]
        mask[row, -count:] = 1
    return ids, mask


WAYS: dict[str, Callable[[Setting], Run]] = {
    "greedy": greedy,
    "sampling": sampling,
    "several samples": several_samples,
    "3 beams, batch of 2": beams,
    "left-padded batch": left_padded,
    "prompt lookup": prompt_lookup,
    "two turns": two_turns,
}

WITH_EQUAL_ROWS = ("several samples", "3 beams, batch of 2")
"""Ways whose batches begin with the same prompt in several rows."""
