"""INT8 of one kind of one layer of a page: the loops of ``pagedkv.int8.Int8`` for kernels.

A *group* is the numbers that have a scale in common. ``scratch`` holds a float32 a group: first the
largest magnitude, then what the numbers are multiplied by. ``dtype`` is that of the numbers; uint16
stands for bfloat16. Blocks in memory are contiguous, and named by address.
"""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel
from pagedkv.vectors import (
    LANES,
    item_nbytes,
    larger,
    largest_bits,
    load,
    load_int8,
    load_int8_part,
    load_part,
    multiply,
    prefetch,
    reciprocals,
    scales,
    splat,
    store,
    store_int8,
    store_int8_part,
    store_part,
    stream,
)

_INFINITY = np.uint32(0x7F800000)
_BFLOAT16 = np.dtype(np.uint16)
_FLOAT32 = np.dtype(np.float32)


@kernel
def num_groups(
    by_channel: Any, kind: Any, num_tokens: Any, num_heads: Any, num_channels: Any
) -> Any:
    """Scales of one kind of one layer."""
    return num_heads * (num_channels if by_channel >> kind & 1 else num_tokens)


@kernel
def scratch_floats(num_tokens: Any, num_heads: Any, num_channels: Any) -> Any:
    """Floats of a scratch buffer for the groups of any kind, in whole vectors."""
    return num_heads * max(num_tokens, num_channels) + LANES


@kernel
def largest_by_channel(
    source: Any, num_tokens: Any, row_numbers: Any, scratch: Any, dtype: Any
) -> None:
    """Largest magnitude of each column of ``(token, head and channel)``."""
    largest = np.int64(scratch.ctypes.data)
    size = item_nbytes(dtype)
    whole = row_numbers - row_numbers % LANES
    for start in range(0, whole, LANES):
        best = splat(np.float32(0))
        for token in range(num_tokens):
            best = larger(best, load(source + (token * row_numbers + start) * size, dtype))
        store(largest + 4 * start, best, _FLOAT32)
    if whole < row_numbers:
        best = splat(np.float32(0))
        for token in range(num_tokens):
            place = source + (token * row_numbers + whole) * size
            best = larger(best, load_part(place, row_numbers - whole, dtype))
        store(largest + 4 * whole, best, _FLOAT32)


@kernel
def largest_by_token(source: Any, groups: Any, num_channels: Any, scratch: Any, dtype: Any) -> None:
    """Largest magnitude of each row of ``(token and head, channel)``."""
    bits = scratch.view(np.uint32)
    size = item_nbytes(dtype)
    whole = num_channels - num_channels % LANES
    for group in range(groups):
        place = source + group * num_channels * size
        best = splat(np.float32(0))
        for start in range(0, whole, LANES):
            best = larger(best, load(place + start * size, dtype))
        if whole < num_channels:
            best = larger(best, load_part(place + whole * size, num_channels - whole, dtype))
        bits[group] = largest_bits(best)


@kernel
def make_scales(scratch: Any, groups: Any, target: Any, top: Any, step: Any) -> Any:
    """Write scales as bfloat16, replace the magnitudes by reciprocals; False if not finite."""
    place = np.int64(scratch.ctypes.data)
    whole = groups - groups % LANES
    worst = splat(np.float32(0))
    for start in range(0, whole, LANES):
        largest = load(place + 4 * start, _FLOAT32)
        worst = larger(worst, largest)
        values = scales(largest, top, step)
        store(target + 2 * start, values, _BFLOAT16)
        store(place + 4 * start, reciprocals(values), _FLOAT32)
    if whole < groups:
        largest = load_part(place + 4 * whole, groups - whole, _FLOAT32)
        worst = larger(worst, largest)
        values = scales(largest, top, step)
        store_part(target + 2 * whole, values, groups - whole, _BFLOAT16)
        store(place + 4 * whole, reciprocals(values), _FLOAT32)
    return largest_bits(worst) < _INFINITY


@kernel
def read_scales(scratch: Any, groups: Any, source: Any) -> None:
    """Scales as float32 from bfloat16."""
    place = np.int64(scratch.ctypes.data)
    whole = groups - groups % LANES
    for start in range(0, whole, LANES):
        store(place + 4 * start, load(source + 2 * start, _BFLOAT16), _FLOAT32)
    if whole < groups:
        last = load_part(source + 2 * whole, groups - whole, _BFLOAT16)
        store(place + 4 * whole, last, _FLOAT32)


@kernel
def quantise_by_channel(
    source: Any,
    target: Any,
    num_tokens: Any,
    row_numbers: Any,
    scratch: Any,
    ahead: Any,
    dtype: Any,
) -> None:
    """Integers of ``(token, head and channel)``; asks for what is ``ahead`` bytes on."""
    factors = np.int64(scratch.ctypes.data)
    size = item_nbytes(dtype)
    whole = row_numbers - row_numbers % LANES
    for _ in range(num_tokens):
        for start in range(0, whole, LANES):
            factor = load(factors + 4 * start, _FLOAT32)
            prefetch(source + start * size + ahead)
            store_int8(target + start, multiply(load(source + start * size, dtype), factor))
        if whole < row_numbers:
            count = row_numbers - whole
            factor = load(factors + 4 * whole, _FLOAT32)
            numbers = load_part(source + whole * size, count, dtype)
            store_int8_part(target + whole, multiply(numbers, factor), count)
        source += row_numbers * size
        target += row_numbers


@kernel
def quantise_by_token(
    source: Any,
    target: Any,
    groups: Any,
    num_channels: Any,
    scratch: Any,
    ahead: Any,
    dtype: Any,
) -> None:
    """Integers of ``(token and head, channel)``; asks for what is ``ahead`` bytes on."""
    size = item_nbytes(dtype)
    whole = num_channels - num_channels % LANES
    for group in range(groups):
        factor = splat(scratch[group])
        for start in range(0, whole, LANES):
            prefetch(source + start * size + ahead)
            store_int8(target + start, multiply(load(source + start * size, dtype), factor))
        if whole < num_channels:
            count = num_channels - whole
            numbers = load_part(source + whole * size, count, dtype)
            store_int8_part(target + whole, multiply(numbers, factor), count)
        source += num_channels * size
        target += num_channels


@kernel
def dequantise_by_channel(
    source: Any,
    target: Any,
    num_tokens: Any,
    row_numbers: Any,
    scratch: Any,
    streams: Any,
    dtype: Any,
) -> None:
    """Numbers of ``(token, head and channel)``, past the caches if ``streams``."""
    factors = np.int64(scratch.ctypes.data)
    size = item_nbytes(dtype)
    whole = row_numbers - row_numbers % LANES
    streams = streams and whole == row_numbers
    for _ in range(num_tokens):
        for start in range(0, whole, LANES):
            factor = load(factors + 4 * start, _FLOAT32)
            numbers = multiply(load_int8(source + start), factor)
            if streams:
                stream(target + start * size, numbers, dtype)
            else:
                store(target + start * size, numbers, dtype)
        if whole < row_numbers:
            count = row_numbers - whole
            factor = load(factors + 4 * whole, _FLOAT32)
            numbers = multiply(load_int8_part(source + whole, count), factor)
            store_part(target + whole * size, numbers, count, dtype)
        source += row_numbers
        target += row_numbers * size


@kernel
def dequantise_by_token(
    source: Any,
    target: Any,
    groups: Any,
    num_channels: Any,
    scratch: Any,
    streams: Any,
    dtype: Any,
) -> None:
    """Numbers of ``(token and head, channel)``, past the caches if ``streams``."""
    size = item_nbytes(dtype)
    whole = num_channels - num_channels % LANES
    streams = streams and whole == num_channels
    for group in range(groups):
        factor = splat(scratch[group])
        for start in range(0, whole, LANES):
            numbers = multiply(load_int8(source + start), factor)
            if streams:
                stream(target + start * size, numbers, dtype)
            else:
                store(target + start * size, numbers, dtype)
        if whole < num_channels:
            count = num_channels - whole
            numbers = multiply(load_int8_part(source + whole, count), factor)
            store_part(target + whole * size, numbers, count, dtype)
        source += num_channels
        target += num_channels * size
