"""Many questions about one long document: it is prefilled once, and stored once.

    python examples/batch_rag.py                    chapter I of Alice, SmolLM2 out of a PyPI wheel
    python examples/batch_rag.py --document FILE    another text; --questions FILE, one a line
    python examples/batch_rag.py --tiny             a random model without a download: nonsense

The questions are a batch: rows that begin with the same document, padded on the left. Tokens that
rows share are computed in one row and held in pages that all of them use. With ``--store`` the
document is found again by the next run, whatever is asked then.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"{error}. Install it with: pip install '.[transformers]' in the clone")

import pagedkv as pk
from pagedkv_adapters.demo import model as local_model
from pagedkv_adapters.demo.prompt import alice_text
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import SMOLLM2
from pagedkv_adapters.transformers import PagedCache, spec_for

NUM_NEW = 24
QUESTIONS = (
    "What did the White Rabbit take out of its pocket?",
    "What was written on the jar?",
    "What was on the three-legged glass table?",
    "Who is Dinah?",
    "What did the bottle say?",
    "What did Alice find in the little glass box under the table?",
)


class Assistant(NamedTuple):
    """A model, and how text becomes its tokens and the other way round."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[torch.Tensor], str]


class Batch(NamedTuple):
    """Prompts as ``generate`` takes them, ``(row, token)``, and 0 for pads on the left."""

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, prompts: list[list[int]]) -> "Batch":
        """Prompts of different lengths, which end in one column."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return cls(ids, mask)


def smollm2_assistant() -> Assistant:
    try:
        folder = unpack(SMOLLM2, lambda stage, share: print(f"{stage} ({share:.0%})"))
    except pk.PagedKVError as error:
        sys.exit(f"{error}\nOr take a random model: python examples/batch_rag.py --tiny")
    model, tokenizer = local_model.load(folder, attention="pagedkv")
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return Assistant(
        model,
        lambda text: tokenizer(turn.format(text)).input_ids,
        lambda ids: repr(tokenizer.decode(ids, skip_special_tokens=True)),
    )


def tiny_assistant() -> Assistant:
    """A token a byte."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**16,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("pagedkv")
    return Assistant(model, lambda text: [*text.encode()], lambda ids: f"{ids[:8].tolist()} ...")


def ask(assistant: Assistant, batch: Batch, kv: pk.PagedKVCache) -> torch.Tensor:
    """Answer all questions, ``(row, token)``, and leave the document in ``kv``."""
    computed: list[int] = []
    embedding = assistant.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, __: computed.append(args[0].numel()))
    first = time.perf_counter()
    with PagedCache.from_prompt(assistant.model, batch.ids, kv, attention_mask=batch.mask) as cache:
        num_reused = cache.num_reused_tokens
        output = assistant.model.generate(
            batch.ids,
            attention_mask=batch.mask,
            cache=cache,
            max_new_tokens=NUM_NEW,
            do_sample=False,
        )
        seconds = time.perf_counter() - first
        num_held = kv.stats().num_pages_held
        num_apart = sum(sequence.num_pages for sequence in cache.sequences)
        cache.commit(output)
    hook.remove()

    num_new = len(batch.ids) * (output.shape[1] - batch.ids.shape[1] - 1)
    print(f"  {int(batch.mask.sum()):,} tokens of prompts, {num_reused:,} of them reused")
    print(f"  {sum(computed) - num_new:,} tokens of prompts and pads computed")
    print(f"  {num_held} pages held; {num_apart} if each row had its own")
    print(f"  {len(batch.ids)} answers in {seconds:.1f} s")
    return output[:, batch.ids.shape[1] :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--document", type=Path, help="a text file")
    parser.add_argument("--questions", type=Path, help="a text file with one question a line")
    parser.add_argument("--store", type=Path, help="keep the pages there, for the next run")
    parser.add_argument("--tiny", action="store_true", help="a random model of no size")
    options = parser.parse_args()
    document, questions = alice_text(), list(QUESTIONS)
    try:
        if options.document:
            document = options.document.read_text(encoding="utf-8").strip()
        if options.questions:
            lines = options.questions.read_text(encoding="utf-8").splitlines()
            questions = [line.strip() for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"cannot read what was given: {error}")
    if not document or not questions:
        sys.exit("give a document that is not empty, and at least one question")

    assistant = tiny_assistant() if options.tiny else smollm2_assistant()
    texts = [f"{document}\n\nQuestion: {question}\nAnswer briefly." for question in questions]
    batch = Batch.of([assistant.encode(text) for text in texts])
    longest = assistant.model.config.max_position_embeddings
    if batch.ids.shape[1] + NUM_NEW > longest:
        sys.exit(
            f"the longest prompt has {batch.ids.shape[1]:,} tokens, {longest - NUM_NEW:,} is the "
            "most for this model: give a shorter document"
        )
    spec = spec_for(assistant.model)
    num_slots = batch.ids.shape[1] // spec.page_tokens + 8 * len(questions)

    with tempfile.TemporaryDirectory() as temporary:
        path = options.store or Path(temporary) / "cache.zarr"
        for turn in ("first run", "the same questions after a restart"):
            print(turn)
            with pk.PagedKVCache(spec, num_slots, store=pk.PageStore.open(path, spec)) as kv:
                answers = ask(assistant, batch, kv)
    for question, answer in zip(questions, answers, strict=True):
        print(f"{question} {assistant.decode(answer)}")


if __name__ == "__main__":
    main()
