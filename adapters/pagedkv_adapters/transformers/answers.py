"""Which tokens of what ``generate`` returned may be named: those whose KV a row holds."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np
from transformers import PreTrainedModel

from pagedkv_adapters.transformers.row import Row
from pagedkv_adapters.transformers.token_ids import Ids, num_common, require_equal

Named = list[tuple[Row, Ids]]
"""Rows, and the ids of their first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What ``generate`` puts behind an answer that is shorter than others.

    Args:
        pad: The token; None if there is none, since nothing ends an answer early.
        is_end: Whether it ends an answer too, so that the first of them belongs to it.
    """

    pad: int | None
    is_end: bool

    @classmethod
    def of(cls, model: PreTrainedModel, pad_token_id: int | None) -> Self:
        """The padding of a model's ``generation_config``, or with that token."""
        config = getattr(model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        ends = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
        pad = getattr(config, "pad_token_id", None) if pad_token_id is None else pad_token_id
        if pad is None and ends:
            pad = ends[0]
        return cls(pad=pad, is_end=pad in ends)

    def num_without_pads(self, ids: Ids) -> int:
        """How many ids are left without the pads behind them."""
        others = np.flatnonzero(ids != self.pad)
        num_left = int(others[-1]) + 1 if len(others) else 0
        return min(len(ids), num_left + self.is_end)


def match_rows(rows: Seq[Row], outputs: Ids, padding: Padding) -> Named:
    """What of ``outputs``, ``(row, token)`` with pads as given, the rows hold.

    Raises:
        ValueError: There are other rows, too few tokens, or others than the model was given.
    """
    if len(outputs) != len(rows):
        raise ValueError(
            f"output_ids have {len(outputs)} rows, but the cache holds {len(rows)}: give all that "
            "generate returned"
        )
    named = []
    for row, output in zip(rows, outputs, strict=True):
        ids = output[row.num_pads :]
        if len(ids) < row.num_tokens:
            raise ValueError(
                f"output_ids hold {len(ids)} tokens, but the cache {row.num_tokens}: give all ids "
                "that generate returned, the prompt included"
            )
        row.require_known()
        require_equal(row.ids, ids, "output_ids", "the model was given")
        ids = ids[: row.num_tokens]
        named.append((row, ids if len(rows) == 1 else ids[: padding.num_without_pads(ids)]))
    return named


def match_beams(rows: Seq[Row], outputs: Ids) -> Named:
    """What the rows of a beam search still hold of what it returned, in whatever order.

    Raises:
        ValueError: An output begins otherwise than every row.
    """
    named = []
    for number, output in enumerate(outputs):
        counts = [num_common(row.ids, output[row.num_pads :]) for row in rows]
        best = int(np.argmax(counts))
        if not counts[best]:
            raise ValueError(
                f"row {number} of output_ids begins with other tokens than the model was given: "
                "give what generate returned, the prompts included"
            )
        row = rows[best]
        named.append((row, output[row.num_pads :][: counts[best]]))
    return named
