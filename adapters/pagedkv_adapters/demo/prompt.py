"""The demo's prompt: a chapter of a book, and a question about it."""

from importlib.resources import files
from typing import Any

import torch

QUESTION = "What did Alice find in the little glass box under the table?"


def alice_prompt() -> str:
    """Chapter I of *Alice's Adventures in Wonderland*, then ``QUESTION``."""
    text = files(__package__).joinpath("alice.txt").read_text(encoding="utf-8")
    return f"{text.strip()}\n\nQuestion: {QUESTION}\nAnswer briefly."


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
