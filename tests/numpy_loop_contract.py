"""The loop in numpy as the contract suite uses it; faulty engines are made from it."""

import pagedkv as pk
from pagedkv_adapters import numpy_loop
from pagedkv_adapters.numpy_loop import Model, ModelConfig
from pagedkv_adapters.testing import AdapterContract, Generated
from pagedkv_adapters.testing.adapter import Ids


class NumpyLoopContract(AdapterContract[Model]):
    num_token_ids = ModelConfig().vocab_size

    def make_engine(self, seed: int) -> Model:
        return numpy_loop.random_model(ModelConfig(), seed)

    def spec_for(self, engine: Model, page_tokens: int) -> pk.KVSpec:
        return numpy_loop.spec_for(engine, page_tokens)

    def generate(
        self,
        engine: Model,
        prompt: Ids,
        cache: pk.PagedKVCache,
        max_new_tokens: int,
        salt: bytes,
    ) -> Generated:
        answer = numpy_loop.generate(engine, prompt, cache, max_new_tokens, salt)
        return Generated(tokens=answer.tokens, num_reused_tokens=answer.num_reused_tokens)

    def generate_alone(self, engine: Model, prompt: Ids, max_new_tokens: int) -> tuple[int, ...]:
        return numpy_loop.generate_without_pages(engine, prompt, max_new_tokens)
