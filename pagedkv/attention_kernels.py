"""Attention of a few query tokens to pages, wherever these lie, without copying them.

Pages are named by address. Of each one layer is read: the blocks ``(token, head, channel)`` of keys
and of values. Softmax is online (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018): what was seen so far is a largest score, a sum of weights and a weighted sum of
values, so that parts of a context may be attended apart and merged. ``pagedkv.attention`` says the
same in numpy.

Kernels are serial and hold no GIL. Exponentials are powers of 2: scores are in units of log2(e).

Query heads that share a head of keys are taken ``together`` at a time, 1, 2 or 4. Registers have 8
lanes: with 4 heads together, those of 2 tokens. Lane ``i`` stands for head ``i % together``.
"""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import inlined, kernel
from pagedkv.lanes import (
    add,
    any_larger,
    capped,
    exp2,
    first_lane,
    first_lanes,
    has_scales,
    item_nbytes,
    larger,
    load,
    load_one,
    load_part,
    multiply,
    multiply_add,
    rotated,
    splat,
    store,
    store_part,
    subtract,
    sums,
)
from pagedkv.vectors import prefetch

FLOAT = np.dtype(np.float32)
BRAIN = np.dtype(np.uint16)
LOG2_E = np.float32(1.4426950408889634)
LANES = 8


@kernel
def attend_pages(
    queries: Any,
    position: Any,
    window: Any,
    cap: Any,
    keys: Any,
    values: Any,
    first: Any,
    stop: Any,
    chunk_pages: Any,
    layout: Any,
    together: Any,
    dtype: Any,
    scratch: Any,
    best: Any,
    total: Any,
    merged: Any,
) -> None:
    """Attend some queries to consecutive pages, each chunk of these apart.

    Args:
        queries: float32 ``(query, head of keys, query head, channel)``, scaled; query heads and
            channels are padded with zeros to multiples of ``together`` and 8.
        position: Of the first query token; the others follow it.
        window: So many tokens does a query see, itself included; 0 for all before it.
        cap: Scores are capped to ``cap * tanh(score / cap)``; 0 for no cap. Without a cap the
            queries' scale includes log2(e).
        keys: Address of each page's keys, ``(token, head, channel)``, int64; pages with 0 are
            left out.
        values: Address of each page's values, the same.
        first: Position of the first page's first token.
        stop: Position behind the last token that there is.
        chunk_pages: Pages of a chunk.
        layout: ``(page_tokens, num_channels, key scales, value scales, by_channel)``: bytes from
            keys and values to their scales, and bit ``kind`` set if a scale of it covers a channel,
            else a token. Only int8 has scales.
        together: Query heads that are taken together.
        dtype: Of the numbers in the pages.
        scratch: float32, as many as ``scratch_floats`` says.
        best: Largest score of each chunk, float32 ``(chunk, query, head of keys, query heads /
            together, 8)``; minus infinity before.
        total: Sums of weights, the same; the lanes of one head are parts of it; 0 before.
        merged: Weighted sums of values, ``(chunk, *queries.shape)``; 0 before.
    """
    page_tokens, num_channels, key_scales, value_scales, by_channel = layout
    num_queries, num_heads, num_q_heads, padded = queries.shape
    num_blocks = num_q_heads // together
    row_nbytes = num_channels * item_nbytes(dtype)
    for page in range(len(keys)):
        if keys[page] == 0:
            continue
        after = keys[min(page + 1, len(keys) - 1)]
        ahead = after - keys[page] if after else 0
        chunk = page // chunk_pages
        for query in range(num_queries):
            seen = position + query + 1 - (first + page * page_tokens)
            low = max(0, seen - window) if window else 0
            high = min(page_tokens, seen, stop - (first + page * page_tokens))
            for head in range(num_heads if low < high else 0):
                for block in range(num_blocks):
                    number = (query * num_heads + head) * num_blocks + block
                    state = (chunk * num_queries * num_heads * num_blocks + number) * LANES
                    numbers = number * together * padded
                    sums_at = chunk * num_queries * num_heads * num_q_heads * padded + numbers
                    arguments = (
                        np.int64(queries.ctypes.data) + 4 * numbers,
                        padded,
                        num_channels,
                        keys[page] + head * row_nbytes,
                        values[page] + head * row_nbytes,
                        keys[page] + key_scales,
                        values[page] + value_scales,
                        by_channel,
                        num_heads,
                        head,
                        low,
                        high,
                        ahead,
                        cap,
                        dtype,
                        np.int64(scratch.ctypes.data),
                        np.int64(best.ctypes.data) + 4 * state,
                        np.int64(total.ctypes.data) + 4 * state,
                        np.int64(merged.ctypes.data) + 4 * sums_at,
                    )
                    if together == 4:
                        _attend(4, *arguments)
                    elif together == 2:
                        _attend(2, *arguments)
                    else:
                        _attend(1, *arguments)


@kernel
def merge_chunks(best: Any, total: Any, merged: Any, together: Any, out: Any) -> None:
    """Merge chunks in their order.

    Args:
        best: As ``attend_pages`` left it.
        total: The same.
        merged: The same; the first chunk's is overwritten.
        together: As for ``attend_pages``.
        out: float32 ``(query, head of keys, query head, channel)``, without padding.
    """
    num_queries, num_heads, num_q_heads, num_channels = out.shape
    for query in range(num_queries):
        for head in range(num_heads):
            for row in range(num_q_heads):
                block, lane = divmod(row, together)
                largest = best[:, query, head, block, lane].max()
                weight = np.float32(0)
                for chunk in range(len(best)):
                    factor = np.exp2(best[chunk, query, head, block, lane] - largest)
                    for part in range(lane, LANES, together):
                        weight += factor * total[chunk, query, head, block, part]
                    for channel in range(num_channels):
                        value = factor * merged[chunk, query, head, row, channel]
                        if chunk == 0:
                            out[query, head, row, channel] = value
                        else:
                            out[query, head, row, channel] += value
                for channel in range(num_channels):
                    out[query, head, row, channel] /= weight


@kernel
def weigh_scores(
    scores: Any,
    position: Any,
    group: Any,
    start: Any,
    window: Any,
    cap: Any,
    best: Any,
    total: Any,
    fade: Any,
) -> None:
    """Turn scores of many queries and a tile of tokens into weights, in their place.

    Args:
        scores: float32 ``(row, token)``, C-contiguous; ``group`` rows belong to one query token.
        position: Of the first row's query token.
        group: Rows of a query token.
        start: Position of the tile's first token.
        window: As for ``attend_pages``.
        cap: The same.
        best: Largest score so far of each row, float32; becomes that with this tile.
        total: Sum of weights so far; the same.
        fade: Becomes what each row's earlier weights must be multiplied by.
    """
    num_rows, num_tokens = scores.shape
    for row in range(num_rows):
        seen = position + row // group + 1 - start
        low = min(max(0, seen - window) if window else 0, num_tokens)
        high = max(low, min(num_tokens, seen))
        scores[row, :low] = 0
        scores[row, high:] = 0
        fade[row] = 1
        if low == high:
            continue
        place = np.int64(scores.ctypes.data) + 4 * row * num_tokens
        top = _top_score(place, low, high, cap, best[row])
        fade[row] = first_lane(exp2(splat(best[row] - top)))
        best[row] = top
        total[row] = total[row] * fade[row] + _weights(place, low, high, splat(top))


@inlined
def _top_score(place: Any, low: Any, high: Any, cap: Any, before: Any) -> Any:
    """The largest of ``before`` and some scores, which are capped."""
    largest = splat(before)
    for token in range(low, high, LANES):
        score = _load_up_to(place + 4 * token, high - token, FLOAT)
        if cap > 0:
            score = multiply(capped(score, splat(cap)), splat(LOG2_E))
            store_part(place + 4 * token, score, min(high - token, LANES))
        score = first_lanes(score, high - token, splat(np.float32(-np.inf)))
        largest = larger(largest, score)
    return first_lane(_largest_of_head(1, largest))


@inlined
def _weights(place: Any, low: Any, high: Any, top: Any) -> Any:
    """Turn scores into weights; the sum of these."""
    zero = splat(np.float32(0))
    total = zero
    for token in range(low, high, LANES):
        count = high - token
        weight = exp2(subtract(_load_up_to(place + 4 * token, count, FLOAT), top))
        if count < LANES:
            store_part(place + 4 * token, weight, count)
            weight = first_lanes(weight, count, zero)
        else:
            store(place + 4 * token, weight)
        total = add(total, weight)
    return first_lane(sums(total, zero, zero, zero, zero, zero, zero, zero))


def scratch_floats(page_tokens: int, num_channels: int) -> int:
    """Numbers that ``attend_pages`` needs beside its arguments."""
    return LANES + 4 * (num_channels + LANES) + 4 * (page_tokens + LANES)


@inlined
def _attend(
    together: Any,
    q: Any,
    padded: Any,
    num_channels: Any,
    keys: Any,
    values: Any,
    key_scales: Any,
    value_scales: Any,
    by_channel: Any,
    num_heads: Any,
    head: Any,
    low: Any,
    high: Any,
    ahead: Any,
    cap: Any,
    dtype: Any,
    scratch: Any,
    best: Any,
    total: Any,
    merged: Any,
) -> None:
    """Attend ``together`` query heads of one query to tokens ``low..high`` of one page.

    All is named by address; the names are those of ``attend_pages``.
    """
    row_nbytes = num_channels * item_nbytes(dtype)
    token_nbytes = num_heads * row_nbytes
    tiny = scratch
    scaled = tiny + 4 * LANES
    weights = scaled + 16 * (num_channels + LANES)
    if has_scales(dtype) and by_channel & 1:
        _scale(together, q, padded, key_scales + 2 * head * num_channels, num_channels, scaled)
        q = scaled
    before = load(best, FLOAT)
    largest = before
    for token in range(low, high, LANES // together):
        rest = high - token
        for row in range(min(rest, LANES // together)):
            for line in range(0, row_nbytes, 64):
                prefetch(values + (token + row) * token_nbytes + line)
        score = _scores(
            together,
            q,
            padded,
            keys + token * token_nbytes,
            token_nbytes,
            rest,
            num_channels,
            dtype,
        )
        if has_scales(dtype) and not by_channel & 1:
            scales = key_scales + 2 * (token * num_heads + head)
            score = multiply(score, _scales_of_tokens(together, scales, num_heads, rest))
        if cap > 0:
            score = multiply(capped(score, splat(cap)), splat(LOG2_E))
        score = first_lanes(score, rest * together, splat(np.float32(-np.inf)))
        store(weights + 4 * (token - low) * together, score)
        largest = larger(largest, score)
    largest = _largest_of_head(together, largest)
    if any_larger(largest, before):
        store(best, largest)
        _fade(together, exp2(subtract(before, largest)), total, merged, padded, tiny)

    weight_sum = load(total, FLOAT)
    for token in range(low, high, LANES // together):
        rest = high - token
        place = weights + 4 * (token - low) * together
        weight = exp2(subtract(load(place, FLOAT), largest))
        weight = first_lanes(weight, rest * together, splat(np.float32(0)))
        weight_sum = add(weight_sum, weight)
        if has_scales(dtype) and not by_channel & 2:
            scales = value_scales + 2 * (token * num_heads + head)
            weight = multiply(weight, _scales_of_tokens(together, scales, num_heads, rest))
        store(place, weight)
    store(total, weight_sum)

    to_next_keys = (
        keys - values + (row_nbytes if head + 1 < num_heads else ahead - head * row_nbytes)
    )
    for c in range(0, num_channels, LANES * (LANES // together)):
        _weigh(
            together,
            merged + 4 * c,
            padded,
            values + low * token_nbytes + c * item_nbytes(dtype),
            token_nbytes,
            weights,
            high - low,
            num_channels - c,
            by_channel & 2,
            value_scales + 2 * (head * num_channels + c),
            to_next_keys,
            dtype,
        )


@inlined
def _scale(together: Any, q: Any, padded: Any, scales: Any, num_channels: Any, target: Any) -> None:
    """Write queries times the scales of the keys' channels to ``target``."""
    for c in range(0, num_channels, LANES):
        scale = _load_up_to(scales + 2 * c, num_channels - c, BRAIN)
        for row in range(together):
            place = 4 * (row * padded + c)
            store(target + place, multiply(load(q + place, FLOAT), scale))


@inlined
def _largest_of_head(together: Any, value: Any) -> Any:
    """In each lane the largest one of all lanes that stand for its head."""
    value = larger(value, rotated(value, 4))
    if together < 4:
        value = larger(value, rotated(value, 2))
    if together < 2:
        value = larger(value, rotated(value, 1))
    return value


@inlined
def _fade(together: Any, fade: Any, total: Any, merged: Any, padded: Any, tiny: Any) -> None:
    """Multiply what was summed up so far, since a larger score has come."""
    store(total, multiply(load(total, FLOAT), fade))
    store(tiny, fade)
    for row in range(together):
        factor = load_one(tiny + 4 * row, FLOAT)
        for c in range(0, padded, LANES):
            place = merged + 4 * (row * padded + c)
            store(place, multiply(load(place, FLOAT), factor))


@inlined
def _load_up_to(address: Any, count: Any, dtype: Any) -> Any:
    """``load``, or ``load_part`` if there are fewer numbers."""
    if count >= LANES:
        return load(address, dtype)
    return load_part(address, max(count, 0), dtype)


@inlined
def _row(keys: Any, token: Any, token_nbytes: Any, last: Any) -> Any:
    """Where a token's keys are; for token 0 without doubt, so that it is loaded once for all."""
    if token == 0:
        return keys
    return keys + min(token * token_nbytes, last)


@inlined
def _scores(
    together: Any,
    q: Any,
    padded: Any,
    keys: Any,
    token_nbytes: Any,
    num_tokens: Any,
    num_channels: Any,
    dtype: Any,
) -> Any:
    """Dot products of query heads with the keys of ``8 / together`` tokens.

    Where there are fewer than so many tokens, the last one stands in for those that are missing.
    """
    size, last = item_nbytes(dtype), (num_tokens - 1) * token_nbytes
    k0 = keys
    k1 = _row(keys, 1 // together, token_nbytes, last)
    k2 = _row(keys, 2 // together, token_nbytes, last)
    k3 = _row(keys, 3 // together, token_nbytes, last)
    k4 = _row(keys, 4 // together, token_nbytes, last)
    k5 = _row(keys, 5 // together, token_nbytes, last)
    k6 = _row(keys, 6 // together, token_nbytes, last)
    k7 = _row(keys, 7 // together, token_nbytes, last)
    q0 = q
    q1 = q + 4 * (1 % together * padded)
    q2 = q + 4 * (2 % together * padded)
    q3 = q + 4 * (3 % together * padded)
    zero = splat(np.float32(0))
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    for at in range(0, num_channels - LANES + 1, LANES):
        x, y = size * at, 4 * at
        a = multiply_add(load(k0 + x, dtype), load(q0 + y, FLOAT), a)
        b = multiply_add(load(k1 + x, dtype), load(q1 + y, FLOAT), b)
        c = multiply_add(load(k2 + x, dtype), load(q2 + y, FLOAT), c)
        d = multiply_add(load(k3 + x, dtype), load(q3 + y, FLOAT), d)
        e = multiply_add(load(k4 + x, dtype), load(q0 + y, FLOAT), e)
        f = multiply_add(load(k5 + x, dtype), load(q1 + y, FLOAT), f)
        g = multiply_add(load(k6 + x, dtype), load(q2 + y, FLOAT), g)
        h = multiply_add(load(k7 + x, dtype), load(q3 + y, FLOAT), h)
    whole = num_channels // LANES * LANES
    if whole < num_channels:
        x, y, n = size * whole, 4 * whole, num_channels - whole
        a = multiply_add(load_part(k0 + x, n, dtype), load(q0 + y, FLOAT), a)
        b = multiply_add(load_part(k1 + x, n, dtype), load(q1 + y, FLOAT), b)
        c = multiply_add(load_part(k2 + x, n, dtype), load(q2 + y, FLOAT), c)
        d = multiply_add(load_part(k3 + x, n, dtype), load(q3 + y, FLOAT), d)
        e = multiply_add(load_part(k4 + x, n, dtype), load(q0 + y, FLOAT), e)
        f = multiply_add(load_part(k5 + x, n, dtype), load(q1 + y, FLOAT), f)
        g = multiply_add(load_part(k6 + x, n, dtype), load(q2 + y, FLOAT), g)
        h = multiply_add(load_part(k7 + x, n, dtype), load(q3 + y, FLOAT), h)
    return sums(a, b, c, d, e, f, g, h)


@inlined
def _scales_of_tokens(together: Any, scales: Any, num_heads: Any, num_tokens: Any) -> Any:
    """The scales of ``8 / together`` tokens, each in all lanes of its token."""
    last, step = num_tokens - 1, 2 * num_heads
    value = load_one(scales + min(LANES // together - 1, last) * step, BRAIN)
    if together == 1:
        value = first_lanes(load_one(scales + min(6, last) * step, BRAIN), 7, value)
        value = first_lanes(load_one(scales + min(5, last) * step, BRAIN), 6, value)
        value = first_lanes(load_one(scales + min(4, last) * step, BRAIN), 5, value)
        value = first_lanes(load_one(scales + min(3, last) * step, BRAIN), 4, value)
    if together < 4:
        value = first_lanes(load_one(scales + min(2, last) * step, BRAIN), 3 * together, value)
        value = first_lanes(load_one(scales + min(1, last) * step, BRAIN), 2 * together, value)
    return first_lanes(load_one(scales, BRAIN), together, value)


@inlined
def _weigh(
    together: Any,
    merged: Any,
    padded: Any,
    values: Any,
    token_nbytes: Any,
    weights: Any,
    num_tokens: Any,
    num_channels: Any,
    by_channel: Any,
    scales: Any,
    to_next_keys: Any,
    dtype: Any,
) -> None:
    """Add weighted values of up to ``64 / together`` channels to ``together`` query heads."""
    size, per = item_nbytes(dtype), LANES // together
    if num_channels < LANES * per:
        _weigh_rest(
            together, merged, padded, values, token_nbytes, weights, num_tokens, num_channels,
            by_channel, scales, dtype,
        )  # fmt: skip
        return
    x1, x2, x3 = 1 % per, 2 % per, 3 % per
    x4, x5, x6, x7 = 4 % per, 5 % per, 6 % per, 7 % per
    w1, w2, w3 = 1 // per, 2 // per, 3 // per
    w4, w5, w6, w7 = 4 // per, 5 // per, 6 // per, 7 // per
    line = LANES * size
    zero = splat(np.float32(0))
    a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(num_tokens):
        prefetch(values + to_next_keys)
        a = multiply_add(load(values, dtype), load_one(weights, FLOAT), a)
        b = multiply_add(load(values + x1 * line, dtype), load_one(weights + 4 * w1, FLOAT), b)
        c = multiply_add(load(values + x2 * line, dtype), load_one(weights + 4 * w2, FLOAT), c)
        d = multiply_add(load(values + x3 * line, dtype), load_one(weights + 4 * w3, FLOAT), d)
        e = multiply_add(load(values + x4 * line, dtype), load_one(weights + 4 * w4, FLOAT), e)
        f = multiply_add(load(values + x5 * line, dtype), load_one(weights + 4 * w5, FLOAT), f)
        g = multiply_add(load(values + x6 * line, dtype), load_one(weights + 4 * w6, FLOAT), g)
        h = multiply_add(load(values + x7 * line, dtype), load_one(weights + 4 * w7, FLOAT), h)
        values += token_nbytes
        weights += 4 * together
    _add(merged, a, 0, by_channel, scales, dtype)
    _add(merged + 4 * w1 * padded, b, x1, by_channel, scales, dtype)
    _add(merged + 4 * w2 * padded, c, x2, by_channel, scales, dtype)
    _add(merged + 4 * w3 * padded, d, x3, by_channel, scales, dtype)
    _add(merged + 4 * w4 * padded, e, x4, by_channel, scales, dtype)
    _add(merged + 4 * w5 * padded, f, x5, by_channel, scales, dtype)
    _add(merged + 4 * w6 * padded, g, x6, by_channel, scales, dtype)
    _add(merged + 4 * w7 * padded, h, x7, by_channel, scales, dtype)


@inlined
def _weigh_rest(
    together: Any,
    merged: Any,
    padded: Any,
    values: Any,
    token_nbytes: Any,
    weights: Any,
    num_tokens: Any,
    num_channels: Any,
    by_channel: Any,
    scales: Any,
    dtype: Any,
) -> None:
    """The same for fewer channels."""
    for _ in range(num_tokens):
        for part in range(0, num_channels, LANES):
            place = values + part * item_nbytes(dtype)
            value = _load_up_to(place, num_channels - part, dtype)
            if has_scales(dtype) and by_channel:
                scale = _load_up_to(scales + 2 * part, num_channels - part, BRAIN)
                value = multiply(value, scale)
            for row in range(together):
                out = merged + 4 * (row * padded + part)
                weight = load_one(weights + 4 * row, FLOAT)
                store(out, multiply_add(value, weight, load(out, FLOAT)))
        values += token_nbytes
        weights += 4 * together


@inlined
def _add(out: Any, value: Any, part: Any, by_channel: Any, scales: Any, dtype: Any) -> None:
    place = out + 4 * LANES * part
    if has_scales(dtype) and by_channel:
        value = multiply(value, load(scales + 2 * LANES * part, BRAIN))
    store(place, add(value, load(place, FLOAT)))
