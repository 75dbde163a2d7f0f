"""Compiled loops over many pages: copies and INT8 between memory and records, with checksums.

Every function is serial, holds no lock and no GIL, and reads and writes pages by address: the
arrays behind the addresses must stay alive. A *record* is one page: for each layer a payload and
its CRC32C.
"""

from typing import Any

import numpy as np

from pagedkv.checksum import BLOCK_NBYTES, START, crc32c, crc_block_copy, crc_rest
from pagedkv.vectors import (
    LANES,
    copy,
    copy_line,
    fence,
    item_nbytes,
    kernel,
    larger,
    largest_bits,
    load,
    load_half_word,
    load_int8,
    load_int8_part,
    load_part,
    multiply,
    prefetch,
    reciprocals,
    scales,
    splat,
    store,
    store_half_word,
    store_int8,
    store_int8_part,
    store_part,
    stream,
    stream_line,
)

_STREAM_MIN_NBYTES = 1024
"""Shorter runs are written through the caches."""
_INFINITY = np.uint32(0x7F800000)
_BFLOAT16 = np.dtype(np.uint16)
_FLOAT32 = np.dtype(np.float32)


@kernel
def pack_raw(
    pages: Any,
    layer_stride: Any,
    num_kinds: Any,
    kind_stride: Any,
    kind_nbytes: Any,
    records: Any,
    crcs: Any,
) -> None:
    """Copy pages into consecutive records, with their checksums.

    Args:
        pages: Address of each page, int64.
        layer_stride: Bytes between layers in memory.
        num_kinds: Kinds of a layer.
        kind_stride: Bytes between kinds in memory.
        kind_nbytes: Bytes of one kind of one layer.
        records: uint8, as many as all records have.
        crcs: Checksums to fill, uint32 ``(page, layer)``.
    """
    target = np.int64(records.ctypes.data)
    for page in range(crcs.shape[0]):
        for layer in range(crcs.shape[1]):
            crc = START
            for kind in range(num_kinds):
                place = pages[page] + layer * layer_stride + kind * kind_stride
                ahead = _distance(
                    pages,
                    page,
                    crcs.shape[1],
                    layer,
                    layer_stride,
                    num_kinds,
                    kind,
                    kind_stride,
                )
                crc = _copy_checked(crc, target, place, kind_nbytes, False, ahead)
                target += kind_nbytes
            crcs[page, layer] = ~crc
            store_half_word(target, crcs[page, layer])
            target += 4


@kernel
def unpack_raw(
    records: Any,
    offsets: Any,
    pages: Any,
    layer_stride: Any,
    num_kinds: Any,
    kind_stride: Any,
    kind_nbytes: Any,
    crcs: Any,
    good: Any,
) -> None:
    """Copy records into pages; clear the flag of each whose checksums are not as expected.

    Args:
        records: uint8.
        offsets: Where each record is in it, int64.
        pages: As in ``pack_raw``.
        layer_stride: The same.
        num_kinds: The same.
        kind_stride: The same.
        kind_nbytes: The same.
        crcs: Expected checksums, uint32 ``(page, layer)``.
        good: Flag of each page, bool.
    """
    payload_nbytes = num_kinds * kind_nbytes
    long = kind_nbytes >= _STREAM_MIN_NBYTES
    last = len(records) - crcs.shape[1] * (payload_nbytes + 4)
    for page in range(crcs.shape[0]):
        if not 0 <= offsets[page] <= last:
            good[page] = False
            continue
        source = np.int64(records.ctypes.data) + offsets[page]
        streams = long and (pages[page] | layer_stride | kind_stride) % 32 == 0
        for layer in range(crcs.shape[1]):
            crc = START
            stored = load_half_word(source + payload_nbytes)
            if stored == crcs[page, layer]:
                for kind in range(num_kinds):
                    place = pages[page] + layer * layer_stride + kind * kind_stride
                    crc = _copy_checked(crc, place, source, kind_nbytes, streams, BLOCK_NBYTES)
                    source += kind_nbytes
            if stored != crcs[page, layer] or np.uint32(~crc) != stored:
                good[page] = False
                break
            source += 4
    fence()


@kernel
def pack_int8(
    pages: Any,
    layer_stride: Any,
    num_kinds: Any,
    kind_stride: Any,
    num_tokens: Any,
    num_heads: Any,
    num_channels: Any,
    by_channel: Any,
    top: Any,
    step: Any,
    dtype: Any,
    records: Any,
    crcs: Any,
) -> Any:
    """Quantise pages into consecutive records, with their checksums.

    Args:
        pages: As in ``pack_raw``.
        layer_stride: The same.
        num_kinds: The same.
        kind_stride: The same.
        num_tokens: Tokens of a page.
        num_heads: Heads of a token.
        num_channels: Channels of a head.
        by_channel: Bit ``kind`` is set if a scale of it covers a channel, else a token's head.
        top: Bits of bfloat16 scales from here on are raised …
        step: … by this.
        dtype: Of the numbers; uint16 stands for bfloat16.
        records: As in ``pack_raw``.
        crcs: The same.

    Returns:
        -1, or ``page * num_layers + layer`` of the first layer with a number that is not finite.
    """
    row_numbers = num_heads * num_channels
    scratch = np.empty(_scratch_floats(num_tokens, num_heads, num_channels), np.float32)
    target = np.int64(records.ctypes.data)
    for page in range(crcs.shape[0]):
        for layer in range(crcs.shape[1]):
            start = scale = target
            for kind in range(num_kinds):
                target += 2 * _num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
            for kind in range(num_kinds):
                place = pages[page] + layer * layer_stride + kind * kind_stride
                groups = _num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
                if by_channel >> kind & 1:
                    _largest_by_channel(place, num_tokens, row_numbers, scratch, dtype)
                else:
                    _largest_by_token(place, groups, num_channels, scratch, dtype)
                if not _make_scales(scratch, groups, scale, top, step):
                    return page * crcs.shape[1] + layer
                ahead = _distance(
                    pages,
                    page,
                    crcs.shape[1],
                    layer,
                    layer_stride,
                    num_kinds,
                    kind,
                    kind_stride,
                )
                if by_channel >> kind & 1:
                    _quantise_by_channel(
                        place, target, num_tokens, row_numbers, scratch, ahead, dtype
                    )
                else:
                    _quantise_by_token(place, target, groups, num_channels, scratch, ahead, dtype)
                scale += 2 * groups
                target += num_tokens * row_numbers
            crcs[page, layer] = crc32c(start, target - start)
            store_half_word(target, crcs[page, layer])
            target += 4
    return -1


@kernel
def unpack_int8(
    records: Any,
    offsets: Any,
    pages: Any,
    layer_stride: Any,
    num_kinds: Any,
    kind_stride: Any,
    num_tokens: Any,
    num_heads: Any,
    num_channels: Any,
    by_channel: Any,
    dtype: Any,
    crcs: Any,
    good: Any,
) -> None:
    """Dequantise records into pages; clear the flag of each whose checksums are not as expected.

    The arguments are those of ``unpack_raw`` and ``pack_int8``.
    """
    row_numbers = num_heads * num_channels
    kind_numbers = num_tokens * row_numbers
    scratch = np.empty(_scratch_floats(num_tokens, num_heads, num_channels), np.float32)
    scales_nbytes = 0
    for kind in range(num_kinds):
        scales_nbytes += 2 * _num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
    payload_nbytes = scales_nbytes + num_kinds * kind_numbers
    long = kind_numbers * item_nbytes(dtype) >= _STREAM_MIN_NBYTES
    last = len(records) - crcs.shape[1] * (payload_nbytes + 4)
    for page in range(crcs.shape[0]):
        if not 0 <= offsets[page] <= last:
            good[page] = False
            continue
        source = np.int64(records.ctypes.data) + offsets[page]
        streams = long and (pages[page] | layer_stride | kind_stride) % 32 == 0
        for layer in range(crcs.shape[1]):
            stored = load_half_word(source + payload_nbytes)
            if stored != crcs[page, layer] or crc32c(source, payload_nbytes) != stored:
                good[page] = False
                break
            scale = source
            source += scales_nbytes
            for kind in range(num_kinds):
                place = pages[page] + layer * layer_stride + kind * kind_stride
                groups = _num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
                _read_scales(scratch, groups, scale)
                if by_channel >> kind & 1:
                    _dequantise_by_channel(
                        source, place, num_tokens, row_numbers, scratch, streams, dtype
                    )
                else:
                    _dequantise_by_token(
                        source, place, groups, num_channels, scratch, streams, dtype
                    )
                scale += 2 * groups
                source += kind_numbers
            source += 4
    fence()


@kernel
def _copy_checked(crc: Any, target: Any, source: Any, nbytes: Any, streams: Any, ahead: Any) -> Any:
    """Copy bytes; return the checksum's state after them. Asks for what is ``ahead`` bytes on."""
    while nbytes >= BLOCK_NBYTES:
        distance = BLOCK_NBYTES if nbytes >= 2 * BLOCK_NBYTES else ahead
        crc = crc_block_copy(crc, source, target, streams, distance)
        target += BLOCK_NBYTES
        source += BLOCK_NBYTES
        nbytes -= BLOCK_NBYTES
    crc = crc_rest(crc, source, nbytes)
    while nbytes >= 64:
        prefetch(source + ahead)
        if streams:
            stream_line(target, source)
        else:
            copy_line(target, source)
        target += 64
        source += 64
        nbytes -= 64
    if nbytes:
        copy(target, source, nbytes)
    return crc


@kernel
def _distance(
    pages: Any,
    page: Any,
    num_layers: Any,
    layer: Any,
    layer_stride: Any,
    num_kinds: Any,
    kind: Any,
    kind_stride: Any,
) -> Any:
    """Bytes from one kind of one layer of one page to the one that is packed next."""
    if kind + 1 < num_kinds:
        return kind_stride
    if layer + 1 < num_layers:
        return layer_stride - kind * kind_stride
    if page + 1 < len(pages):
        return pages[page + 1] - pages[page] - layer * layer_stride - kind * kind_stride
    return 0


@kernel
def _num_groups(
    by_channel: Any, kind: Any, num_tokens: Any, num_heads: Any, num_channels: Any
) -> Any:
    """Scales of one kind of one layer."""
    return num_heads * (num_channels if by_channel >> kind & 1 else num_tokens)


@kernel
def _scratch_floats(num_tokens: Any, num_heads: Any, num_channels: Any) -> Any:
    """Floats of a scratch buffer for the groups of any kind, in whole vectors."""
    return num_heads * max(num_tokens, num_channels) + LANES


@kernel
def _largest_by_channel(
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
def _largest_by_token(
    source: Any, groups: Any, num_channels: Any, scratch: Any, dtype: Any
) -> None:
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
def _make_scales(scratch: Any, groups: Any, target: Any, top: Any, step: Any) -> Any:
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
def _read_scales(scratch: Any, groups: Any, source: Any) -> None:
    """Scales as float32 from bfloat16."""
    place = np.int64(scratch.ctypes.data)
    whole = groups - groups % LANES
    for start in range(0, whole, LANES):
        store(place + 4 * start, load(source + 2 * start, _BFLOAT16), _FLOAT32)
    if whole < groups:
        last = load_part(source + 2 * whole, groups - whole, _BFLOAT16)
        store(place + 4 * whole, last, _FLOAT32)


@kernel
def _quantise_by_channel(
    source: Any,
    target: Any,
    num_tokens: Any,
    row_numbers: Any,
    scratch: Any,
    ahead: Any,
    dtype: Any,
) -> None:
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
def _quantise_by_token(
    source: Any,
    target: Any,
    groups: Any,
    num_channels: Any,
    scratch: Any,
    ahead: Any,
    dtype: Any,
) -> None:
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
def _dequantise_by_channel(
    source: Any,
    target: Any,
    num_tokens: Any,
    row_numbers: Any,
    scratch: Any,
    streams: Any,
    dtype: Any,
) -> None:
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
def _dequantise_by_token(
    source: Any,
    target: Any,
    groups: Any,
    num_channels: Any,
    scratch: Any,
    streams: Any,
    dtype: Any,
) -> None:
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
