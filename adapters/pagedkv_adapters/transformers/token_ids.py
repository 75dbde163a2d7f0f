"""The ids of one sequence's tokens, as callers give them, some of them perhaps unknown."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]

UNKNOWN = -1
"""In place of a token id that was not seen."""


def require_equal(known: Ids, given: Ids, name: str, source: str, at: int = 0) -> None:
    """``ValueError`` if ``given`` contradicts the ids that are known.

    Args:
        known: Ids, some of them perhaps ``UNKNOWN``.
        given: Ids of the same tokens; there may be more, or fewer.
        name: What ``given`` was given as, for the message.
        source: Who said what is known, for the message.
        at: Which token of the sequence is the first of them, for the message.
    """
    count = min(len(known), len(given))
    differ = np.flatnonzero((known[:count] != given[:count]) & (known[:count] != UNKNOWN))
    if len(differ):
        first = int(differ[0])
        raise ValueError(
            f"token {at + first} of {name} is {given[first]}, but {known[first]} is what {source}"
        )


def with_unknown(ids: npt.NDArray[Any], num_tokens: int) -> Ids:
    """The first ids, filled up to ``num_tokens`` with ``UNKNOWN``."""
    known: Ids = ids[:num_tokens].astype(np.int64)
    return np.pad(known, (0, num_tokens - len(known)), constant_values=UNKNOWN)


def one_row(ids: torch.Tensor | npt.ArrayLike, name: str) -> Ids:
    """Ids ``(1, token)`` or ``(token,)`` as ``(token,)``; ``ValueError`` if they are several rows.

    Args:
        ids: What was given.
        name: What it was given as, for the message.
    """
    array = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(
            f"{name} have shape {array.shape}: PagedCache holds one sequence, so the batch (beams, "
            "returned sequences) must be 1"
        )
    return array
