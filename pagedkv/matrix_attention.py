"""``MatrixAttention``: many queries of one layer on their way through its tokens."""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import workers
from pagedkv.attention_rule import AttentionRule

Array = npt.NDArray[Any]

_BLOCK_QUERIES = 128
_TILE_TOKENS = 512
"""Queries and tokens of a matrix product: its scores stay in the processor's cache."""


class MatrixAttention:
    """Attention of many queries, by matrix products; ``attend`` is called for all tokens in order.

    Args:
        queries: ``(token, q_head, channel)`` of the last tokens.
        num_heads: Heads of keys.
        num_tokens: Tokens that there are.
        rule: What the queries see.
    """

    def __init__(
        self, queries: Array, num_heads: int, num_tokens: int, rule: AttentionRule
    ) -> None:
        num_queries, num_q_heads, num_channels = queries.shape
        group = num_q_heads // num_heads
        self._rule = rule
        self._dtype = queries.dtype
        self._position = num_tokens - num_queries
        by_head = queries.reshape(num_queries, num_heads, group, num_channels).swapaxes(0, 1)
        self._queries = by_head.astype(np.float32, order="C")
        self._queries *= np.float32(rule.factor(num_channels))
        self._best = np.full(self._queries.shape[:3], -np.inf, np.float32)
        self._total = np.zeros_like(self._best)
        self._merged = np.zeros_like(self._queries)
        self.first_token = rule.first_seen(self._position)
        """The first token that any query sees."""

    def attend(self, first: int, keys: Array, values: Array) -> None:
        """Attend to consecutive tokens.

        Args:
            first: Position of the first of them.
            keys: ``(token, head, channel)``.
            values: The same.
        """
        num_heads, num_queries, _, _ = self._queries.shape
        for head in range(num_heads):
            k, v = (array[:, head].astype(np.float32, copy=False) for array in (keys, values))
            for begin in range(0, num_queries, _BLOCK_QUERIES):
                end = min(begin + _BLOCK_QUERIES, num_queries)
                for start in range(0, len(keys), _TILE_TOKENS):
                    tile = slice(start, start + _TILE_TOKENS)
                    if self._is_seen(begin, end, first + start):
                        self._attend_tile(head, begin, end, first + start, k[tile], v[tile])

    def _is_seen(self, begin: int, end: int, start: int) -> bool:
        """Whether one of some queries sees one of a tile's tokens."""
        window = self._rule.window or 0
        first = self._position + begin - window + 1 if window else 0
        return first < start + _TILE_TOKENS and start < self._position + end

    def _attend_tile(
        self, head: int, begin: int, end: int, start: int, keys: Array, values: Array
    ) -> None:
        """Some queries of one head, and some tokens from ``start`` on, ``(token, channel)``."""
        from pagedkv import attention_kernels

        rows = slice(begin, end)
        group, num_channels = self._queries.shape[2:]
        scores = self._queries[head, rows].reshape(-1, num_channels) @ keys.T
        best, total = (a[head, rows].reshape(-1) for a in (self._best, self._total))
        merged = self._merged[head, rows].reshape(-1, num_channels)
        fade = np.empty_like(best)
        halves = np.linspace(0, end - begin, workers.count() + 1).astype(int).tolist()

        def weigh(low: int, high: int) -> None:
            part = slice(low * group, high * group)
            attention_kernels.weigh_scores(
                scores[part],
                self._position + begin + low,
                group,
                start,
                self._rule.window or 0,
                np.float32(self._rule.soft_cap or 0),
                best[part],
                total[part],
                fade[part],
            )

        workers.run_all([partial(weigh, *ends) for ends in pairwise(halves)])
        merged *= fade[:, None]
        merged += scores @ values

    def result(self) -> Array:
        """``(token, q_head, channel)`` in the type of the queries."""
        out = (self._merged / self._total[..., None]).swapaxes(0, 1)
        num_queries, num_heads, group, num_channels = out.shape
        return out.reshape(num_queries, num_heads * group, num_channels).astype(
            self._dtype, copy=False
        )
