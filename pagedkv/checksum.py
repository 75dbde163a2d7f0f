"""CRC32C by the processor's own instruction, in three interleaved streams.

The instruction takes one word a cycle, but its result comes three cycles later: three parts of a
block are checksummed at once, and their states combined. CRC is linear, so the state after a part
followed by as many bytes as the next one is a table lookup for each byte of the state.
"""

from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from pagedkv.kernel_cache import kernel
from pagedkv.vectors import (
    copy_line,
    crc_byte,
    crc_word,
    load_byte,
    load_word,
    prefetch,
    stream_line,
)

STREAM_NBYTES = 1344
BLOCK_NBYTES = 3 * STREAM_NBYTES
"""What is checksummed at once: a multiple of 64 bytes, and a little less than 4 KiB."""
_SHORT_NBYTES = 128
START = np.uint64(0xFFFFFFFF)
"""State before the first byte; the CRC is the state with all bits inverted."""


def _shift(state: int, nbytes: int) -> int:
    """The state after ``nbytes`` zero bytes."""
    inverted = google_crc32c.extend(state ^ 0xFFFFFFFF, bytes(nbytes))
    return int(inverted) ^ 0xFFFFFFFF


def _shift_table(nbytes: int) -> npt.NDArray[np.uint64]:
    """``(byte of the state, its value)``: what it adds to the state ``nbytes`` zero bytes later."""
    table = np.zeros((4, 256), np.uint64)
    for bit in range(32):
        position, mask = divmod(bit, 8)[0], 1 << bit % 8
        table[position, np.arange(256) & mask != 0] ^= np.uint64(_shift(1 << bit, nbytes))
    return table


_LONG_SHIFT = _shift_table(STREAM_NBYTES)
_SHORT_SHIFT = _shift_table(_SHORT_NBYTES)


@kernel
def crc_block(crc: Any, address: Any) -> Any:
    """State after ``BLOCK_NBYTES`` bytes; asks for as many behind them."""
    second, third = np.uint64(0), np.uint64(0)
    for line in range(address, address + STREAM_NBYTES, 64):
        prefetch(line + BLOCK_NBYTES)
        prefetch(line + BLOCK_NBYTES + STREAM_NBYTES)
        prefetch(line + BLOCK_NBYTES + 2 * STREAM_NBYTES)
        for place in range(line, line + 64, 8):
            crc = crc_word(crc, load_word(place))
            second = crc_word(second, load_word(place + STREAM_NBYTES))
            third = crc_word(third, load_word(place + 2 * STREAM_NBYTES))
    return _shifted(_shifted(crc, _LONG_SHIFT) ^ second, _LONG_SHIFT) ^ third


@kernel
def crc_block_copy(crc: Any, source: Any, target: Any, streams: Any, ahead: Any) -> Any:
    """The same, and copies the bytes to ``target``: in one loop, for each waits for other things.

    Args:
        crc: State before.
        source: Address of the bytes.
        target: Where they go; a multiple of 16 if ``streams``.
        streams: Write past the caches.
        ahead: Bytes from ``source`` to the next block, which is asked for.
    """
    second, third = np.uint64(0), np.uint64(0)
    for line in range(0, STREAM_NBYTES, 64):
        place, out = source + line, target + line
        for stream in range(0, BLOCK_NBYTES, STREAM_NBYTES):
            prefetch(place + stream + ahead)
            if streams:
                stream_line(out + stream, place + stream)
            else:
                copy_line(out + stream, place + stream)
        for word in range(place, place + 64, 8):
            crc = crc_word(crc, load_word(word))
            second = crc_word(second, load_word(word + STREAM_NBYTES))
            third = crc_word(third, load_word(word + 2 * STREAM_NBYTES))
    return _shifted(_shifted(crc, _LONG_SHIFT) ^ second, _LONG_SHIFT) ^ third


@kernel
def crc_rest(crc: Any, address: Any, nbytes: Any) -> Any:
    """State after any number of bytes, best below ``BLOCK_NBYTES``."""
    while nbytes >= 3 * _SHORT_NBYTES:
        second, third = np.uint64(0), np.uint64(0)
        for place in range(address, address + _SHORT_NBYTES, 8):
            crc = crc_word(crc, load_word(place))
            second = crc_word(second, load_word(place + _SHORT_NBYTES))
            third = crc_word(third, load_word(place + 2 * _SHORT_NBYTES))
        crc = _shifted(_shifted(crc, _SHORT_SHIFT) ^ second, _SHORT_SHIFT) ^ third
        address += 3 * _SHORT_NBYTES
        nbytes -= 3 * _SHORT_NBYTES
    while nbytes >= 8:
        crc = crc_word(crc, load_word(address))
        address += 8
        nbytes -= 8
    while nbytes > 0:
        crc = crc_byte(crc, load_byte(address))
        address += 1
        nbytes -= 1
    return crc


@kernel
def crc32c(address: Any, nbytes: Any) -> Any:
    """CRC32C of the bytes at ``address``."""
    crc = START
    while nbytes >= BLOCK_NBYTES:
        crc = crc_block(crc, address)
        address += BLOCK_NBYTES
        nbytes -= BLOCK_NBYTES
    return np.uint32(~crc_rest(crc, address, nbytes))


@kernel
def _shifted(crc: Any, table: Any) -> Any:
    low = table[0, crc & 0xFF] ^ table[1, crc >> np.uint64(8) & 0xFF]
    return low ^ table[2, crc >> np.uint64(16) & 0xFF] ^ table[3, crc >> np.uint64(24) & 0xFF]
