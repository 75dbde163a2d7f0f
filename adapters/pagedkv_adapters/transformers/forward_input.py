"""``ForwardInput``: what a forward pass is given, checked against what a cache holds."""

from dataclasses import dataclass

import numpy as np
import torch

from pagedkv_adapters.transformers.pass_arguments import Positions
from pagedkv_adapters.transformers.token_ids import Counts, Ids, as_rows, pads_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """The rows of a forward pass.

    Args:
        ids: ``(row, column)``, those that are to be computed; None where they do not name the KV.
        num_rows: How many rows.
        num_pads: Pads before the first token of each row, ``(row,)``.
        past: Columns before those that are to be computed.
        num_columns: Columns, the new ones included.
    """

    ids: Ids | None
    num_rows: int
    num_pads: Counts
    past: int
    num_columns: int


def read_input(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: object,
    position_ids: torch.Tensor | None,
    *,
    past: int,
    positions: Positions,
    is_random: bool,
) -> ForwardInput:
    """What a forward pass is given.

    Args:
        input_ids: Its argument of that name.
        inputs_embeds: The same.
        attention_mask: The same.
        position_ids: The same.
        past: Columns that the cache holds.
        positions: How the model knows where tokens stand.
        is_random: Whether the KV of the same tokens is another each time, as with dropout.

    Raises:
        ValueError: They hide tokens between others, or put them at positions that do not follow.
    """
    ids = None if input_ids is None else as_rows(input_ids, "input_ids")
    if ids is not None:
        num_rows, num_new = ids.shape
    elif inputs_embeds is not None:
        num_rows, num_new = inputs_embeds.shape[:2]
    else:
        raise ValueError("the forward pass was given neither input_ids nor inputs_embeds")
    if not num_new:
        raise ValueError(
            f"input_ids hold no token behind the {past} that the cache holds: give all tokens of "
            "the conversation each time, the new ones at its end"
        )
    num_columns = past + num_new
    # Embeddings cannot be named by ids, so that no key hangs on what a mask hides among them.
    num_pads = pads_of(attention_mask, (num_rows, num_columns), may_hide_others=input_ids is None)
    if position_ids is not None:
        _check_positions(position_ids, num_pads, past, num_columns)
    elif num_pads.any() and not (positions.are_taken or positions.are_distances):
        raise ValueError(
            f"attention_mask hides {int(num_pads.max())} tokens before the first of a row, and the "
            "model counts them as positions, so that tokens would not be where their page keys say:"
            " give prompts of one length, or one at a time"
        )
    elif num_pads.any() and positions.are_taken:
        raise ValueError(
            f"attention_mask hides {int(num_pads.max())} tokens before the first of a row, but "
            "position_ids are missing, so that tokens would not be where their page keys say: give "
            "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)"
        )
    return ForwardInput(
        ids=None if is_random else ids,
        num_rows=num_rows,
        num_pads=num_pads,
        past=past,
        num_columns=num_columns,
    )


def _check_positions(
    position_ids: torch.Tensor, num_pads: Counts, past: int, num_columns: int
) -> None:
    expected = np.arange(past, num_columns) - num_pads[:, None]
    given = position_ids.cpu().numpy()
    try:
        differ = (given != expected) & (expected >= 0)
    except ValueError as error:
        raise ValueError(
            f"position_ids have shape {given.shape}, but there are {len(num_pads)} rows of "
            f"{num_columns - past} new tokens"
        ) from error
    if differ.any():
        row = int(differ.any(axis=-1).reshape(-1, len(num_pads)).any(axis=0).argmax())
        first = int(num_pads[row])
        raise ValueError(
            f"position_ids are not {max(0, past - first)}..{num_columns - first - 1} in row {row}, "
            f"which follow on the {max(0, past - first)} tokens that the cache holds: another "
            "prompt takes another PagedCache"
        )
