"""The demo's prompt: a chapter of a book, as often as is wanted, and a question about it."""

from importlib.resources import files
from typing import Any

import torch

QUESTION = "What did Alice find in the little glass box under the table?"
_NUM_KEPT = 64
"""So many tokens at the end of a long prompt are never cut off: the question is among them."""


def alice_text() -> str:
    """Chapter I of *Alice's Adventures in Wonderland*."""
    return files(__package__).joinpath("alice.txt").read_text(encoding="utf-8").strip()


def alice_prompt(num_copies: int = 1) -> str:
    """The chapter, so many times, then ``QUESTION``."""
    text = "\n\n".join([alice_text()] * num_copies)
    return f"{text}\n\nQuestion: {QUESTION}\nAnswer briefly."


def encode_long(tokenizer: Any, text: str | None, num_tokens: int) -> torch.Tensor:
    """Token ids ``(1, num_tokens)`` of a text that is repeated until it is as long.

    What is too much is cut out of the last copy, before its end.

    Args:
        tokenizer: The model's.
        text: By default the chapter, with ``QUESTION`` behind the last copy.
        num_tokens: How many; at least twice the 64 tokens that are kept at the end.

    Raises:
        ValueError: The text is empty.
    """
    num_copies, ids = 1, torch.empty(1, 0)
    while ids.shape[1] < num_tokens:
        prompt = alice_prompt(num_copies) if text is None else "\n\n".join([text] * num_copies)
        ids = encode(tokenizer, prompt)
        num_copies *= 2
    return torch.cat([ids[:, : num_tokens - _NUM_KEPT], ids[:, -_NUM_KEPT:]], dim=1)


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids ``(1, token)`` of ``prompt``: as a user's turn, if the model knows turns.

    Raises:
        ValueError: The prompt is empty.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    return ids
