"""``PageAttention``: the queries of one layer on their way through a sequence's pages.

The context is cut into chunks of 512 tokens, which are attended apart and merged in their order:
the result is the same to the bit, wherever pages lie and however many threads there are.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import records, workers
from pagedkv.memory import Numbers
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_CHUNK_TOKENS = 512
_MANY_NBYTES = 256 * 2**10
"""Keys and values for which a second thread is worth its start."""
_LOG2_E = 1.4426950408889634
_KERNEL_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # as the kernels call it
}


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


class PageAttention:
    """Attention of a sequence's last tokens to its pages; ``attend`` is called for all of these.

    Args:
        spec: Geometry of the pages.
        queries: ``(token, q_head, channel)`` of the last tokens.
        num_tokens: Tokens of the sequence.
        rule: What they see.
    """

    def __init__(self, spec: KVSpec, queries: Array, num_tokens: int, rule: AttentionRule) -> None:
        self._spec = spec
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
        self._queries = np.zeros(padded, np.float32)
        self._queries[:, :, :group, :num_channels] = queries.reshape(self._shape)
        self._queries *= np.float32(factor)
        self._position = num_tokens - num_queries
        seen = 0 if rule.window is None else max(0, self._position - rule.window + 1)
        self.chunk_pages = max(1, _CHUNK_TOKENS // spec.page_tokens)
        chunk_tokens = self.chunk_pages * spec.page_tokens
        self.first_page = seen // chunk_tokens * self.chunk_pages
        """The first page that is wanted: it begins a chunk."""
        self._num_chunks = -(-num_tokens // chunk_tokens) - self.first_page // self.chunk_pages
        state = (padded[0], padded[1], padded_group // self._together, 8)
        self._best = np.full((self._num_chunks, *state), -np.inf, np.float32)
        self._total = np.zeros((self._num_chunks, *state), np.float32)
        self._merged = np.zeros((self._num_chunks, *padded), np.float32)

    def attend(self, first_page: int, keys: Numbers, values: Numbers) -> None:
        """Attend to consecutive pages.

        Args:
            first_page: Number of the first of them, which begins a chunk.
            keys: Address of each page's keys ``(token, head, channel)``.
            values: Address of each page's values.
        """
        num_chunks = -(-len(keys) // self.chunk_pages)
        nbytes = len(keys) * self._spec.layer_nbytes
        num_parts = min(num_chunks, workers.count()) if nbytes >= _MANY_NBYTES else 1
        cuts = [num_chunks * part // num_parts for part in range(num_parts + 1)]
        skipped = (first_page - self.first_page) // self.chunk_pages

        def task(begin: int, end: int) -> None:
            from pagedkv import attention_kernels

            spec = self._spec
            part = slice(begin * self.chunk_pages, end * self.chunk_pages)
            chunks = slice(skipped + begin, skipped + end)
            size = attention_kernels.scratch_floats(spec.page_tokens, spec.head_dim)
            attention_kernels.attend_pages(
                self._queries,
                self._position,
                self._rule.window or 0,
                np.float32(self._rule.soft_cap or 0),
                keys[part],
                values[part],
                (first_page + part.start) * spec.page_tokens,
                self._num_tokens,
                self.chunk_pages,
                (spec.page_tokens, spec.head_dim, 0, 0, 0),
                self._together,
                _KERNEL_DTYPES[spec.dtype],
                np.empty(size, np.float32),
                self._best[chunks],
                self._total[chunks],
                self._merged[chunks],
            )

        workers.run_all([partial(task, *ends) for ends in pairwise(cuts)])

    def result(self) -> Array:
        """``(token, q_head, channel)`` in the type of the queries."""
        from pagedkv import attention_kernels

        out = np.empty(self._shape, np.float32)
        attention_kernels.merge_chunks(self._best, self._total, self._merged, self._together, out)
        num_queries, num_heads, group, num_channels = self._shape
        return out.reshape(num_queries, num_heads * group, num_channels).astype(
            self._dtype, copy=False
        )


def is_supported() -> bool:
    """Whether this processor has the instructions that the kernels need."""
    return records.compiled() is not None
