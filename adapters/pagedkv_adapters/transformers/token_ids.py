"""The ids of tokens as callers give them, and the pads before them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]

Counts = npt.NDArray[np.int64]
"""A number for each row."""

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


def num_common(one: Ids, other: Ids) -> int:
    """How many leading ids are the same, and known."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]) | (one[:count] == UNKNOWN)
    return int(differ.argmax()) if differ.any() else count


def with_unknown(ids: npt.NDArray[Any], num_tokens: int) -> Ids:
    """The first ids, filled up to ``num_tokens`` with ``UNKNOWN``."""
    known: Ids = ids[:num_tokens].astype(np.int64)
    return np.pad(known, (0, num_tokens - len(known)), constant_values=UNKNOWN)


def as_array(numbers: torch.Tensor | npt.ArrayLike) -> npt.NDArray[Any]:
    """Numbers of any kind as an array of numpy."""
    return np.asarray(numbers.cpu() if isinstance(numbers, torch.Tensor) else numbers)


def as_rows(ids: torch.Tensor | npt.ArrayLike, name: str) -> Ids:
    """Ids ``(row, token)`` or ``(token,)`` as ``(row, token)``; ``ValueError`` if they are neither.

    Args:
        ids: What was given.
        name: What it was given as, for the message.
    """
    array = as_array(ids)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or not array.shape[0]:
        raise ValueError(f"{name} have shape {array.shape}: give ids (row, token), or (token,)")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} are of type {array.dtype}: give token ids, which are integers")
    rows: Ids = array.astype(np.int64, copy=False)
    return rows


def pads_of(mask: object, shape: tuple[int, int], *, may_hide_others: bool = False) -> Counts:
    """How many pads stand before the tokens of each row, ``(row,)``.

    Args:
        mask: 0 for what is hidden, 1 for the others; None hides nothing.
        shape: What it must have, ``(row, token)``.
        may_hide_others: Whether it may hide tokens behind those that it shows.

    Raises:
        ValueError: It has another shape, or hides something behind a token that it shows.
    """
    if mask is None:
        return np.zeros(shape[0], dtype=np.int64)
    is_two_dimensional = isinstance(mask, torch.Tensor | np.ndarray | list) and (
        (visible := as_array(mask).astype(bool)).ndim == 2
    )
    if not is_two_dimensional:
        raise ValueError(
            "attention_mask must be (row, token), or left out: PagedCache cannot tell what another "
            "mask hides"
        )
    if visible.shape != shape:
        raise ValueError(
            f"attention_mask has shape {visible.shape}, but there are {shape[0]} rows of {shape[1]}"
            " tokens, those that the cache holds included: give one number for each"
        )
    num_visible = visible.sum(axis=1)
    num_pads: Counts = np.where(num_visible, visible.argmax(axis=1), shape[1]).astype(np.int64)
    if (num_visible + num_pads != shape[1]).any() and not may_hide_others:
        row = int((num_visible + num_pads != shape[1]).argmax())
        hidden = shape[1] - int(num_pads[row]) - int(num_visible[row])
        raise ValueError(
            f"attention_mask hides {hidden} tokens behind the first that it shows, in row {row}: "
            "PagedCache takes pads on the left only; if none is padding, give "
            "attention_mask=torch.ones_like(input_ids)"
        )
    return num_pads
