"""What the rows of a batch have in common is computed once, before they part.

transformers computes all columns of a batch for all of its rows: the same prompt for each beam, the
same document for each question about it, and from the column on at which the row with the shortest
known prefix has to begin. Here the rows are brought to one column first, by forward passes of
those rows only that need them, and the batch computes what is left.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from pagedkv_adapters.transformers.forward_input import ForwardInput
from pagedkv_adapters.transformers.row import Row
from pagedkv_adapters.transformers.rows import Rows
from pagedkv_adapters.transformers.token_ids import Ids, num_common

MIN_SAVED_TOKENS = {"float32": 256, "float16": 2048, "bfloat16": 2048}
"""A pass of its own is worth while if it spares the computation of so many tokens.

Matrix products of another shape may differ in the last bit, which counts more in half types.
"""

Compute = Callable[[Seq[int], int, int], None]
"""Compute columns for rows of a batch, from one to another; the rows hold those before."""


def bring_level(
    rows: Rows, given: ForwardInput, stop: int, compute: Compute, min_saved: int
) -> int:
    """Bring all rows to one column, sharing what they have in common.

    Args:
        rows: Of the batch; one that occurs more than once is the same sequence.
        given: What the batch is given to compute.
        stop: The column up to which that may be done here.
        compute: Does it.
        min_saved: How many tokens a pass of its own has to spare.

    Returns:
        The column from which on the batch is to compute.
    """
    distinct = [at for at, _ in rows.numbered]
    if given.ids is not None and stop > given.past:
        if len(distinct) > 1:
            _compute_common(rows.distinct, distinct, given, stop, compute, min_saved)
        _catch_up(rows.distinct, distinct, stop, compute, min_saved)
    level = max(given.past, min(rows.num_columns, stop))  # pads may reach behind what is given
    for row in rows.distinct:
        if row.num_columns > level:
            row.truncate(max(0, level - row.num_pads))
    num_repeated = len(rows) - len(distinct)
    if given.ids is not None and num_repeated * (stop - level) >= min_saved:
        compute(distinct, level, stop)
        level = stop
    return level


def _compute_common(
    rows: Seq[Row],
    numbers: Seq[int],
    given: ForwardInput,
    stop: int,
    compute: Compute,
    min_saved: int,
) -> None:
    """Let one row compute what all have in common, and the others take it over."""
    tokens = [_tokens_up_to(stop, row, given, at) for row, at in zip(rows, numbers, strict=True)]
    count = min(num_common(tokens[0], other) for other in tokens[1:])
    missing = [max(0, count - row.num_tokens) for row in rows]
    leader = int(np.argmin(missing))
    if sum(missing) - missing[leader] < min_saved:
        return
    first = rows[leader]
    if missing[leader]:
        compute([numbers[leader]], first.num_columns, first.num_pads + count)
    for row in rows:
        if row.num_tokens < count:
            row.take_over(first, count)


def _catch_up(
    rows: Seq[Row], numbers: Seq[int], stop: int, compute: Compute, min_saved: int
) -> None:
    """Let the rows that are behind compute what others hold already."""
    while len(levels := sorted({min(row.num_columns, stop) for row in rows})) > 1:
        low, high = levels[:2]
        num_ahead = sum(row.num_columns > low for row in rows)
        if num_ahead * (high - low) < min_saved:
            return
        behind = [at for row, at in zip(rows, numbers, strict=True) if row.num_columns == low]
        compute(behind, low, high)


def _tokens_up_to(stop: int, row: Row, given: ForwardInput, number: int) -> Ids:
    """Ids of a row's tokens before a column: those that it holds, and those that are given."""
    assert given.ids is not None
    new = given.ids[number, max(0, row.num_columns - given.past) : stop - given.past]
    return np.concatenate([row.ids, new])
