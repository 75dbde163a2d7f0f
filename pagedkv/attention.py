"""Causal attention over gathered keys and values, in plain numpy."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TILE_TOKENS = 1024


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    scale: float | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Attention of the last tokens of a sequence to all of it, causal and grouped-query.

    This is what the kernels of ``pagedkv.attention_kernels`` compute, too. The keys are taken a
    tile at a time and merged by online softmax (Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018), so that no score matrix of the whole context exists. Computed
    in float32.

    Args:
        queries: ``(token, q_head, channel)``; the last of them is the sequence's last token.
        keys: ``(token, head, channel)``; ``q_head`` is a multiple of ``head``.
        values: Like ``keys``.
        scale: Factor on the scores; ``1 / sqrt(channels)`` by default.
        window: So many tokens does a query see, itself included; all before it by default.
        soft_cap: Scores are capped to ``soft_cap * tanh(score / soft_cap)``; not by default.

    Returns:
        ``(token, q_head, channel)`` in the type of ``queries``.
    """
    num_queries, num_q_heads, head_dim = queries.shape
    num_tokens, num_heads, _ = keys.shape
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    grouped = queries.astype(np.float32).reshape(num_queries, num_heads, -1, head_dim) * factor
    positions = np.arange(num_tokens - num_queries, num_tokens)
    best = np.full(grouped.shape[:3], -np.inf, dtype=np.float32)
    total = np.zeros_like(best)
    merged = np.zeros(grouped.shape, dtype=np.float32)
    for start in range(0, num_tokens, _TILE_TOKENS):
        tile = slice(start, min(start + _TILE_TOKENS, num_tokens))
        scores = np.einsum("qhgc,thc->qhgt", grouped, keys[tile].astype(np.float32))
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        distances = positions[:, None] - np.arange(tile.start, tile.stop)
        hidden = distances < 0
        if window is not None:
            hidden |= distances >= window
        scores[np.broadcast_to(hidden[:, None, None, :], scores.shape)] = -np.inf
        highest = np.maximum(best, scores.max(axis=-1))
        reference = np.where(np.isfinite(highest), highest, 0)
        weights = np.exp(scores - reference[..., None])
        fade = np.exp(best - reference)
        total = total * fade + weights.sum(axis=-1)
        merged *= fade[..., None]
        merged += np.einsum("qhgt,thc->qhgc", weights, values[tile].astype(np.float32))
        best = highest
    merged /= total[..., None]
    return merged.reshape(num_queries, num_q_heads, head_dim).astype(queries.dtype)
