"""Compiled loops over many pages: copies and INT8 between memory and records, with checksums.

Every function is serial, holds no lock and no GIL, and reads and writes pages by address: the
arrays behind the addresses must stay alive. A *record* is one page: for each layer a payload and
its CRC32C.
"""

from typing import Any

import numpy as np

from pagedkv.checksum import BLOCK_NBYTES, START, crc32c, crc_block_copy, crc_rest
from pagedkv.kernel_cache import kernel
from pagedkv.quantise import (
    dequantise_by_channel,
    dequantise_by_token,
    largest_by_channel,
    largest_by_token,
    make_scales,
    num_groups,
    quantise_by_channel,
    quantise_by_token,
    read_scales,
    scratch_floats,
)
from pagedkv.vectors import (
    copy,
    copy_line,
    fence,
    item_nbytes,
    load_half_word,
    prefetch,
    store_half_word,
    stream_line,
)

_STREAM_MIN_NBYTES = 256
"""Shorter runs are written through the caches: too many of their lines would be parts."""


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
        streams = long and (pages[page] | layer_stride | kind_stride) % 16 == 0
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
def check_payloads(payloads: Any, nbytes: Any, crcs: Any, good: Any) -> None:
    """Clear the flag of each payload whose checksums are not as expected.

    Args:
        payloads: Address of each, int64; its checksum is behind it.
        nbytes: Bytes of each.
        crcs: Expected checksums, uint32.
        good: Flag of each, bool; those that are cleared already are not looked at.
    """
    for number in range(len(payloads)):
        if good[number]:
            stored = load_half_word(payloads[number] + nbytes)
            good[number] = stored == crcs[number] and crc32c(payloads[number], nbytes) == stored


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
    scratch = np.empty(scratch_floats(num_tokens, num_heads, num_channels), np.float32)
    target = np.int64(records.ctypes.data)
    for page in range(crcs.shape[0]):
        for layer in range(crcs.shape[1]):
            start = scale = target
            for kind in range(num_kinds):
                target += 2 * num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
            for kind in range(num_kinds):
                place = pages[page] + layer * layer_stride + kind * kind_stride
                groups = num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
                if by_channel >> kind & 1:
                    largest_by_channel(place, num_tokens, row_numbers, scratch, dtype)
                else:
                    largest_by_token(place, groups, num_channels, scratch, dtype)
                if not make_scales(scratch, groups, scale, top, step):
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
                    quantise_by_channel(
                        place, target, num_tokens, row_numbers, scratch, ahead, dtype
                    )
                else:
                    quantise_by_token(place, target, groups, num_channels, scratch, ahead, dtype)
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
    scratch = np.empty(scratch_floats(num_tokens, num_heads, num_channels), np.float32)
    scales_nbytes = 0
    for kind in range(num_kinds):
        scales_nbytes += 2 * num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
    payload_nbytes = scales_nbytes + num_kinds * kind_numbers
    long = kind_numbers * item_nbytes(dtype) >= _STREAM_MIN_NBYTES
    last = len(records) - crcs.shape[1] * (payload_nbytes + 4)
    for page in range(crcs.shape[0]):
        if not 0 <= offsets[page] <= last:
            good[page] = False
            continue
        source = np.int64(records.ctypes.data) + offsets[page]
        streams = long and (pages[page] | layer_stride | kind_stride) % 16 == 0
        for layer in range(crcs.shape[1]):
            stored = load_half_word(source + payload_nbytes)
            if stored != crcs[page, layer] or crc32c(source, payload_nbytes) != stored:
                good[page] = False
                break
            scale = source
            source += scales_nbytes
            for kind in range(num_kinds):
                place = pages[page] + layer * layer_stride + kind * kind_stride
                groups = num_groups(by_channel, kind, num_tokens, num_heads, num_channels)
                read_scales(scratch, groups, scale)
                if by_channel >> kind & 1:
                    dequantise_by_channel(
                        source, place, num_tokens, row_numbers, scratch, streams, dtype
                    )
                else:
                    dequantise_by_token(
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
