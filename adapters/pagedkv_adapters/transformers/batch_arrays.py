"""Keys, values and attention of a batch: arrays over the pages of its rows."""

import numpy as np
import torch

from pagedkv_adapters.transformers.rows import Rows
from pagedkv_adapters.transformers.seen import Seen
from pagedkv_adapters.transformers.tensors import to_numpy, to_torch

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, ``(row, head, column, channel)``."""


def append(rows: Rows, layer: int, past: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append the columns of a forward pass to one layer of each sequence, without their pads.

    Args:
        rows: The batch.
        layer: Which layer.
        past: Columns before the new ones.
        keys: ``(row, head, column, channel)``, of the new columns.
        values: The same.
    """
    new = to_numpy(keys), to_numpy(values)
    for at, row in rows.numbered:
        num_pads = max(0, row.num_pads - past)
        if num_pads < keys.shape[2]:
            k, v = (states[at, num_pads:] for states in new)
            row.sequence.append_layer(layer, k, v)


def gather(
    rows: Rows, layer: int, past: int, first: int, keys: torch.Tensor, values: torch.Tensor
) -> States:
    """Keys and values of one layer from a column on: tensors of their own.

    Args:
        rows: The batch.
        layer: Which layer.
        past: Columns before the new ones.
        first: The first column that is wanted. Pads between it and the new columns are zeros.
        keys: ``(row, head, column, channel)``, of the new columns.
        values: The same.
    """
    num_rows, num_heads, num_new, _ = keys.shape
    num_past = past - first
    whole = []
    for states in (keys, values):
        shape = (num_rows, num_past + num_new, num_heads, states.shape[3])
        whole.append(torch.empty(shape, dtype=states.dtype).transpose(1, 2))
        whole[-1][:, :, num_past:] = states
    arrays = [to_numpy(states) for states in whole]
    for at, (row, source) in enumerate(zip(rows.all, rows.firsts, strict=True)):
        if source != at:
            for array in arrays:
                array[at, :num_past] = array[source, :num_past]
            continue
        num_pads = min(max(0, row.num_pads - first), num_past)
        start = max(0, first - row.num_pads)
        with row.sequence.gather(layer, start + num_past - num_pads, start) as held:
            for array, before in zip(arrays, held, strict=True):
                array[at, :num_pads] = 0
                array[at, num_pads:num_past] = before
    return whole[0].to(keys.device), whole[1].to(keys.device)


def attend(
    rows: Rows,
    layer: int,
    past: int,
    query: torch.Tensor,
    seen: list[Seen],
    scale: float | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of a pass's columns to the pages, ``(row, column, head, channel)``.

    Args:
        rows: The batch.
        layer: Which layer.
        past: Columns before the new ones.
        query: ``(row, head, column, channel)``.
        seen: What the tokens of each row see.
        scale: Factor on the scores.
        soft_cap: Scores are capped to it.

    Returns:
        Zeros for pads.
    """
    queries = to_numpy(query)
    if rows.is_plain:
        out = rows.all[0].sequence.attend(
            layer, queries[0], scale, window=seen[0].window, soft_cap=soft_cap
        )[None]
    else:
        out = np.zeros_like(queries)
        for at, (row, source) in enumerate(zip(rows.all, rows.firsts, strict=True)):
            num_pads = max(0, row.num_pads - past)
            if source != at:
                out[at] = out[source]
            elif num_pads < query.shape[2]:
                out[at, num_pads:] = row.sequence.attend(
                    layer,
                    queries[at, num_pads:],
                    scale,
                    window=seen[at].window,
                    soft_cap=soft_cap,
                )
    return to_torch(out).to(query.device)
