"""Rows are brought to one column by as few computed tokens as it takes."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import numpy as np

import pagedkv as pk
from pagedkv_adapters.transformers.forward_input import ForwardInput
from pagedkv_adapters.transformers.row import Row
from pagedkv_adapters.transformers.rows import Rows
from pagedkv_adapters.transformers.shared_prefill import bring_level

pytestmark = pytest.mark.torch

SPEC = pk.KVSpec(
    num_layers=2, num_kv_heads=1, head_dim=4, page_tokens=4, dtype="float32", model="m"
)
MIN_SAVED = 6


@pytest.fixture
def kv() -> Iterator[pk.PagedKVCache]:
    with pk.PagedKVCache(SPEC, 256) as cache:
        yield cache
        cache.check_invariants()


class Batch:
    """Rows of a batch, whose KV says which token it is of; notes what is computed."""

    def __init__(self, kv: pk.PagedKVCache, prompts: list[str], known: list[int]) -> None:
        width = max(map(len, prompts))
        self.ids = np.array([[ord(c) for c in text.rjust(width)] for text in prompts])
        self.num_pads = np.array([width - len(text) for text in prompts])
        self.passes: list[tuple[list[int], int, int]] = []
        rows: dict[str, Row] = {}
        for at, (text, count) in enumerate(zip(prompts, known, strict=True)):
            if text not in rows:
                rows[text] = Row(kv.open_sequence(), self.tokens(at), int(self.num_pads[at]))
                self._append(rows[text], at, 0, count)
        self.rows = Rows([rows[text] for text in prompts])

    def tokens(self, at: int) -> np.ndarray:
        found: np.ndarray = self.ids[at, self.num_pads[at] :].astype(np.int64)
        return found

    def _append(self, row: Row, at: int, start: int, stop: int) -> None:
        assert row.num_tokens == start
        numbers = self.tokens(at)[start:stop].astype(np.float32)
        states = np.broadcast_to(numbers[None, :, None, None], (2, stop - start, 1, 4)).copy()
        if stop > start:
            row.sequence.append(states, states)
            row.note_ids(self.tokens(at)[start:stop], row.num_pads + start)

    def compute(self, numbers: list[int], start: int, stop: int) -> None:
        self.passes.append((list(numbers), start, stop))
        for at in numbers:
            row = self.rows.all[at]
            assert row.num_columns == start
            self._append(row, at, row.num_tokens, stop - row.num_pads)

    def bring_level(self, num_kept: int = 1) -> int:
        past, width = self.rows.num_columns, self.ids.shape[1]
        given = ForwardInput(
            ids=self.ids[:, past:],
            num_rows=len(self.ids),
            num_pads=self.num_pads,
            past=past,
            num_columns=width,
        )
        level = bring_level(self.rows, given, width - num_kept, self.compute, MIN_SAVED)
        for at, row in self.rows.numbered:
            assert row.num_columns == level or row.num_pads > level
            assert row.ids.tolist() == self.tokens(at)[: row.num_tokens].tolist()
            if row.num_tokens:
                with row.sequence.gather(1) as (k, v):
                    assert k[:, 0, 0].tolist() == v[:, 0, 3].tolist() == row.ids.tolist()
        return level


def test_what_all_rows_have_in_common_is_computed_by_one(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["document one", "document two", "document six"], [0, 0, 0])
    assert batch.bring_level() == 9
    assert batch.passes == [([0], 0, 9)]
    assert kv.stats().num_pages_held == 3


def test_the_row_that_knows_most_of_it_computes_the_rest(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["document one", "document two", "document six"], [0, 5, 0])
    assert batch.bring_level() == 9
    assert batch.passes == [([1], 5, 9)]


def test_pads_move_the_columns_at_which_rows_stand(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["document one", "document 2", "document eleven"], [0, 0, 0])
    assert batch.bring_level() == 12
    # What all share ends at columns 12, 14 and 9; the longest row catches up with the first.
    assert batch.passes == [([0], 3, 12), ([2], 9, 12)]
    assert [row.num_tokens for row in batch.rows.all] == [9, 7, 12]


def test_a_row_that_is_behind_catches_up(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["abcdefghijkl", "mnopqrstuvwx", "ABCDEFGHIJKL"], [8, 0, 9])
    assert batch.bring_level() == 8
    assert batch.passes == [([1], 0, 8)]


def test_rows_stand_where_the_last_does_if_it_is_not_worth_a_pass(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["abcdefghijkl", "mnopqrstuvwx"], [9, 4])
    assert batch.bring_level() == 4
    assert batch.passes == []
    assert [row.num_reused_tokens for row in batch.rows.all] == [0, 0]


def test_equal_rows_are_computed_as_one_up_to_what_is_wanted(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["abcdefgh", "abcdefgh", "12345678", "12345678"], [0, 0, 0, 0])
    assert batch.bring_level(num_kept=2) == 6
    assert batch.passes == [([0, 2], 0, 6)]


def test_nothing_is_computed_for_little(kv: pk.PagedKVCache) -> None:
    batch = Batch(kv, ["abcd", "abcd", "abxy"], [0, 0, 0])
    assert batch.bring_level() == 0
    assert batch.passes == []
