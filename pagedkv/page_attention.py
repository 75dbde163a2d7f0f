"""``PageAttention``: the queries of one layer on their way through a sequence's pages.

The context is cut into chunks of 512 tokens, from the first page on that a query sees; these are
attended apart and merged in their order. The result is the same to the bit, wherever pages lie and
however many threads there are.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import records, workers
from pagedkv.attention_rule import AttentionRule
from pagedkv.int8 import Int8Layout
from pagedkv.memory import Numbers
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_CHUNK_TOKENS = 512
_MANY_NBYTES = 4 * 2**20
"""Keys and values for which a second thread is worth its start."""
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
    kept: tuple[object, ...] = ()
    """What lies there, beside the pool: it stays alive as long as a thread attends to it."""


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
        self.rule = rule
        """What the queries see, and how scores become weights."""
        self._num_tokens = num_tokens
        self._dtype = queries.dtype
        num_queries, num_q_heads, num_channels = queries.shape
        group = num_q_heads // spec.held_heads
        self._together = 4 if group > 2 else group  # heads of a group that a kernel takes at once
        self._shape = (num_queries, spec.held_heads, group, num_channels)
        padded_group = -(-group // self._together) * self._together
        padded = (num_queries, spec.held_heads, padded_group, -(-num_channels // 8) * 8)
        scaled = queries.reshape(self._shape).astype(np.float32, order="C")
        scaled *= np.float32(rule.factor(num_channels))
        self._queries = scaled
        if padded != self._shape:
            self._queries = np.zeros(padded, np.float32)
            self._queries[:, :, :group, :num_channels] = scaled
        self._position = num_tokens - num_queries
        seen = rule.first_seen(self._position)
        self.chunk_pages = max(1, _CHUNK_TOKENS // spec.page_tokens)
        self.first_page = seen // spec.page_tokens
        """The first page that a query sees: it begins the first chunk."""
        self.num_full_pages = self._position // spec.page_tokens
        """Pages of the tokens before the queries that are full: nothing is written into them."""
        num_pages = -(-num_tokens // spec.page_tokens) - self.first_page
        self._num_chunks = -(-num_pages // self.chunk_pages)
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
        keys, values, records, _ = places
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
            self.rule.window or 0,
            np.float32(self.rule.soft_cap or 0),
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


def is_supported() -> bool:
    """Whether this processor has the instructions that the kernels need."""
    return records.compiled() is not None
