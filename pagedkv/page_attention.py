"""``PageAttention``: the queries of one layer on their way through a sequence's pages.

The context is cut into chunks of 512 tokens, which are attended apart and merged in their order:
the result is the same to the bit, wherever pages lie and however many threads there are.
"""

import functools
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import records, workers
from pagedkv.int8 import Int8Layout
from pagedkv.memory import Numbers
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_CHUNK_TOKENS = 512
_MANY_NBYTES = 4 * 2**20
"""Keys and values for which a second thread is worth its start."""
_BLOCK_QUERIES = 128
_TILE_TOKENS = 512
"""Queries and tokens of a matrix product: its scores stay in the processor's cache."""
_LOG2_E = 1.4426950408889634
_KERNEL_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # as the kernels call it
    "int8": np.dtype(np.int8),
}
_NO_SCALES = (0, 0, 0)


class Places(NamedTuple):
    """Where one layer of consecutive pages lies in memory."""

    keys: Numbers
    """Address of each page's keys ``(token, head, channel)``; 0 for pages that are records."""
    values: Numbers
    """Address of each page's values; the same."""
    records: Numbers | None = None
    """Address of each record of INT8; 0 for all other pages. None if no page is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """What a query sees, and how scores become weights.

    Args:
        scale: Factor on the scores; ``1 / sqrt(channels)`` if None.
        window: So many tokens does a query see, itself included; None for all before it.
        soft_cap: Scores are capped to ``soft_cap * tanh(score / soft_cap)``; None for no cap.

    Raises:
        ValueError: A value is out of range.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}: it must be a finite number")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: a query sees itself, so it must be >= 1")
        if self.soft_cap is not None and not (0 < self.soft_cap < math.inf):
            raise ValueError(f"soft_cap is {self.soft_cap}: it must be a positive number")

    def factor(self, num_channels: int) -> float:
        """The factor on the scores."""
        return 1 / math.sqrt(num_channels) if self.scale is None else self.scale


@functools.lru_cache(64)
def rule_of(scale: float | None, window: int | None, soft_cap: float | None) -> AttentionRule:
    """An ``AttentionRule``, which is checked once."""
    return AttentionRule(scale=scale, window=window, soft_cap=soft_cap)


class PageAttention:
    """Attention of a sequence's last tokens to its pages; ``attend`` is called for all of these.

    Args:
        spec: Geometry of the pages.
        queries: ``(token, q_head, channel)`` of the last tokens.
        num_tokens: Tokens of the sequence.
        rule: What they see.
        records: What records of INT8 look like, if some pages may be such.
    """

    def __init__(
        self,
        spec: KVSpec,
        queries: Array,
        num_tokens: int,
        rule: AttentionRule,
        records: Int8Layout | None = None,
    ) -> None:
        self._spec = spec
        self._records = records
        self._rule = rule
        self._num_tokens = num_tokens
        self._dtype = queries.dtype
        num_queries, num_q_heads, num_channels = queries.shape
        group = num_q_heads // spec.held_heads
        self._together = 4 if group > 2 else group
        self._shape = (num_queries, spec.held_heads, group, num_channels)
        factor = rule.factor(num_channels) * (1.0 if rule.soft_cap else _LOG2_E)
        padded_group = -(-group // self._together) * self._together
        padded = (num_queries, spec.held_heads, padded_group, -(-num_channels // 8) * 8)
        scaled = queries.reshape(self._shape).astype(np.float32, order="C")
        scaled *= np.float32(factor)
        self._queries = scaled
        if padded != self._shape:
            self._queries = np.zeros(padded, np.float32)
            self._queries[:, :, :group, :num_channels] = scaled
        self._position = num_tokens - num_queries
        seen = 0 if rule.window is None else max(0, self._position - rule.window + 1)
        self.chunk_pages = max(1, _CHUNK_TOKENS // spec.page_tokens)
        chunk_tokens = self.chunk_pages * spec.page_tokens
        self.first_page = seen // chunk_tokens * self.chunk_pages
        """The first page that is wanted: it begins a chunk."""
        self.num_full_pages = self._position // spec.page_tokens
        """Pages of the tokens before the queries that are full: nothing is written into them."""
        self._num_chunks = -(-num_tokens // chunk_tokens) - self.first_page // self.chunk_pages
        state = (padded[0], padded[1], padded_group // self._together, 8)
        self._best = np.full((self._num_chunks, *state), -np.inf, np.float32)
        self._total = np.zeros((self._num_chunks, *state), np.float32)
        self._merged = np.zeros((self._num_chunks, *padded), np.float32)

    def attend(self, first_page: int, places: Places) -> None:
        """Attend to consecutive pages.

        Args:
            first_page: Number of the first of them, which begins a chunk.
            places: Where they are.
        """
        num_pages = len(places.keys)
        num_chunks = -(-num_pages // self.chunk_pages)
        nbytes = num_pages * self._spec.layer_nbytes
        if nbytes < _MANY_NBYTES:
            self._attend(first_page, places, 0, num_chunks)
            return
        num_parts = min(num_chunks, workers.count())
        cuts = [num_chunks * part // num_parts for part in range(num_parts + 1)]
        parts = [partial(self._attend, first_page, places, *ends) for ends in pairwise(cuts)]
        workers.run_all(parts)

    def _attend(self, first_page: int, places: Places, begin: int, end: int) -> None:
        """Attend to the chunks ``begin..end`` of some pages."""
        spec = self._spec
        skipped = (first_page - self.first_page) // self.chunk_pages
        part = slice(begin * self.chunk_pages, end * self.chunk_pages)
        chunks = slice(skipped + begin, skipped + end)
        first_token = (first_page + part.start) * spec.page_tokens
        keys, values, records = places
        self._call(keys[part], values[part], first_token, chunks, _NO_SCALES, spec.dtype)
        if self._records is not None and records is not None:
            layout = self._records
            keys, values = records[part] + layout.keys, records[part] + layout.values
            keys[records[part] == 0] = 0
            self._call(keys, values, first_token, chunks, layout.scales, "int8")

    def _call(
        self,
        keys: Numbers,
        values: Numbers,
        first_token: int,
        chunks: slice,
        scales: tuple[int, int, int],
        dtype: str,
    ) -> None:
        """Let the kernel attend to pages of one kind; an address of 0 stands for another kind."""
        from pagedkv import attention_kernels

        spec = self._spec
        size = attention_kernels.scratch_floats(spec.page_tokens, spec.head_dim)
        attention_kernels.attend_pages(
            self._queries,
            self._position,
            self._rule.window or 0,
            np.float32(self._rule.soft_cap or 0),
            keys,
            values,
            first_token,
            self._num_tokens,
            self.chunk_pages,
            (spec.page_tokens, spec.head_dim, *scales),
            self._together,
            _KERNEL_DTYPES[dtype],
            np.empty(size, np.float32),
            self._best[chunks],
            self._total[chunks],
            self._merged[chunks],
        )

    def result(self) -> Array:
        """``(token, q_head, channel)`` in the type of the queries."""
        from pagedkv import attention_kernels

        out = np.empty(self._shape, np.float32)
        attention_kernels.merge_chunks(self._best, self._total, self._merged, self._together, out)
        num_queries, num_heads, group, num_channels = self._shape
        return out.reshape(num_queries, num_heads * group, num_channels).astype(
            self._dtype, copy=False
        )


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
        factor = rule.factor(num_channels) * (1.0 if rule.soft_cap else _LOG2_E)
        by_head = queries.reshape(num_queries, num_heads, group, num_channels).swapaxes(0, 1)
        self._queries = by_head.astype(np.float32, order="C")
        self._queries *= np.float32(factor)
        self._best = np.full(self._queries.shape[:3], -np.inf, np.float32)
        self._total = np.zeros_like(self._best)
        self._merged = np.zeros_like(self._queries)
        self.first_token = 0 if rule.window is None else max(0, self._position - rule.window + 1)
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


def is_supported() -> bool:
    """Whether this processor has the instructions that the kernels need."""
    return records.compiled() is not None
