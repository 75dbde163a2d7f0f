"""Which tokens of what ``generate`` returned get a name."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import numpy as np
import tiny_models as tiny

from pagedkv_adapters.transformers.answers import Padding, match_beams, match_rows
from pagedkv_adapters.transformers.token_ids import UNKNOWN

pytestmark = pytest.mark.torch


def row(ids: list[int], num_pads: int = 0) -> Any:
    """What matching looks at of a ``Row``."""
    return SimpleNamespace(
        ids=np.array(ids),
        num_tokens=len(ids),
        num_pads=num_pads,
        require_known=lambda: None,
    )


def named(found: Any) -> list[list[int]]:
    return [ids.tolist() for _, ids in found]


@pytest.mark.parametrize(
    ("eos", "pad", "given", "expected"),
    [
        (None, None, None, Padding(pad=None, is_end=False)),
        (7, None, None, Padding(pad=7, is_end=True)),
        ([7, 8], None, None, Padding(pad=7, is_end=True)),
        ([7, 8], 8, None, Padding(pad=8, is_end=True)),
        (7, 0, None, Padding(pad=0, is_end=False)),
        (7, 0, 7, Padding(pad=7, is_end=True)),
    ],
)
def test_padding_is_what_generate_takes(
    eos: Any, pad: int | None, given: int | None, expected: Padding
) -> None:
    model = tiny.llama()
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = pad
    assert Padding.of(model, given) == expected


@pytest.mark.parametrize(
    ("ids", "is_end", "count"),
    [
        ([1, 2, 3], False, 3),
        ([1, 2, 0, 0], False, 2),
        ([1, 2, 0, 0], True, 3),
        ([1, 0, 2], True, 3),
        ([0, 0], True, 1),
        ([0, 0], False, 0),
        ([], True, 0),
    ],
)
def test_pads_behind_an_answer_are_left_out(ids: list[int], is_end: bool, count: int) -> None:
    assert Padding(pad=0, is_end=is_end).num_without_pads(np.array(ids, dtype=int)) == count


def test_rows_are_named_without_the_pads_on_either_side() -> None:
    rows = [row([1, 2, 9, 0, 0]), row([4, 5, 6], num_pads=2)]
    outputs = np.array([[1, 2, 9, 0, 0, 0], [8, 8, 4, 5, 6, 7]])
    found = match_rows(rows, outputs, Padding(pad=0, is_end=False))
    assert named(found) == [[1, 2, 9], [4, 5, 6]]


def test_beams_are_named_as_far_as_some_row_holds_them() -> None:
    rows = [row([1, 2, 3, 4]), row([1, 2, 5, UNKNOWN])]
    found = match_beams(rows, np.array([[1, 2, 5, 6, 7], [1, 2, 3, 9, 9]]))
    assert named(found) == [[1, 2, 5], [1, 2, 3]]
    assert [one for one, _ in found] == [rows[1], rows[0]]
    with pytest.raises(ValueError, match="row 1 of output_ids"):
        match_beams(rows, np.array([[1, 2], [2, 2]]))
