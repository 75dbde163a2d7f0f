"""What queries see of the tokens, as a mask says it."""

from typing import NamedTuple

import torch


class Seen(NamedTuple):
    """What queries see of the tokens.

    Args:
        is_causal: Whether that is all tokens before, or a window of them.
        window: So many tokens, itself included; None for all.
    """

    is_causal: bool
    window: int | None


def seen_through(
    mask: torch.Tensor | None,
    row: int,
    num_queries: int,
    num_tokens: int,
    num_pads: int,
    window: int | None,
) -> Seen:
    """What the last ``num_queries`` of ``num_tokens`` tokens of a row see through a mask.

    Args:
        mask: ``(row, 1, query, token)``, or one row for all, of the last tokens; booleans or what
            is added to the scores. None is taken for one that shows one query all that the layer
            shows it.
        row: Which row.
        num_queries: How many tokens are attended.
        num_tokens: How many there are, pads included.
        num_pads: How many of the tokens are pads, which stand before the others.
        window: The layer's.
    """
    if mask is None:
        return Seen(is_causal=num_queries == 1 and not num_pads, window=window)
    first = num_tokens - mask.shape[3]
    if mask.shape[1:3] != (1, num_queries) or first < 0:
        return Seen(is_causal=False, window=None)
    num_past = num_tokens - num_queries
    numbers = mask[min(row, len(mask) - 1), 0, max(0, num_pads - num_past) :]
    visible = numbers if mask.dtype == torch.bool else numbers == 0
    if mask.dtype != torch.bool and (numbers[~visible] > torch.finfo(mask.dtype).min / 2).any():
        return Seen(is_causal=False, window=None)
    if not len(visible):
        return Seen(is_causal=True, window=None)
    num_seen = int(visible[-1].sum())
    last = mask.shape[3] - len(visible)
    expected = torch.ones_like(visible).tril(last).triu(last - num_seen + 1)
    expected[:, : max(0, num_pads - first)] = False
    is_within = first == 0 or num_seen <= last + 1  # what the mask leaves out is not seen
    is_causal = is_within and torch.equal(visible, expected)
    sees_all = num_seen == num_tokens - num_pads
    return Seen(is_causal=is_causal, window=None if sees_all else num_seen)
