"""``PagedCache`` keeps the contract of adapters, whether the model attends to pages or not."""

from typing import ClassVar

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from transformers import DynamicCache, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.testing import AdapterContract, Generated
from pagedkv_adapters.testing.adapter import Ids
from pagedkv_adapters.transformers import PagedCache, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder", "no_fsync"),
]


class LlamaContract(AdapterContract[PreTrainedModel]):
    num_token_ids = tiny.VOCABULARY
    attention: ClassVar[str]

    def make_engine(self, seed: int) -> PreTrainedModel:
        return tiny.llama(seed, attn_implementation=self.attention)

    def spec_for(self, engine: PreTrainedModel, page_tokens: int) -> pk.KVSpec:
        return spec_for(engine, page_tokens)

    def generate(
        self,
        engine: PreTrainedModel,
        prompt: Ids,
        cache: pk.PagedKVCache,
        max_new_tokens: int,
        salt: bytes,
    ) -> Generated:
        input_ids = torch.from_numpy(prompt)[None]
        with PagedCache.from_prompt(engine, input_ids, cache, salt=salt) as paged:
            output = run(engine, input_ids, paged, max_new_tokens)
            paged.commit(output)
            tokens = new_tokens(output, prompt)
            return Generated(tokens=tokens, num_reused_tokens=paged.num_reused_tokens)

    def generate_alone(
        self, engine: PreTrainedModel, prompt: Ids, max_new_tokens: int
    ) -> tuple[int, ...]:
        input_ids = torch.from_numpy(prompt)[None]
        return new_tokens(run(engine, input_ids, DynamicCache(), max_new_tokens), prompt)


class TestAttentionOfTorch(LlamaContract):
    attention = "sdpa"


class TestAttentionToPages(LlamaContract):
    attention = "pagedkv"


def run(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: PagedCache | DynamicCache,
    max_new_tokens: int,
) -> torch.Tensor:
    """Prompt and answer, ``(1, token)``."""
    output: torch.Tensor = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return output


def new_tokens(output: torch.Tensor, prompt: Ids) -> tuple[int, ...]:
    return tuple(output[0, len(prompt) :].tolist())
