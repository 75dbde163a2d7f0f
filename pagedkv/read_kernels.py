"""Compiled loops that read from files: records, which are decoded at once, blocks, and ranges.

But for ``read_ranges`` they serve what lies in the system's page cache: no read waits for a disk.
Like those of ``pagedkv.kernels``, whose arguments they take, they are serial and hold no GIL.
"""

from typing import Any

import numpy as np
from numba.extending import overload

from pagedkv.checksum import crc32c
from pagedkv.kernel_cache import kernel
from pagedkv.kernels import unpack_int8, unpack_raw
from pagedkv.system_calls import fadvise_will_need, madvise_will_need, preadv2

_GAP_NBYTES = 16 * 2**10
"""Unwanted bytes between two records that are read along rather than reading twice."""
_PAGE_NBYTES = 4096
"""Of the system's memory."""
_NUM_RAW_ARGUMENTS = 3
"""What ``unpack_raw`` takes between the strides and the checksums."""


@kernel
def _end_of_run(fds: Any, offsets: Any, nbytes: Any, capacity: Any, begin: Any) -> Any:
    """Where the pages end that are read together with the one at ``begin``."""
    end = begin + 1
    while end < len(fds) and fds[end] == fds[begin]:
        gap = offsets[end] - offsets[end - 1] - nbytes
        if not 0 <= gap <= _GAP_NBYTES or offsets[end] + nbytes - offsets[begin] > capacity:
            break
        end += 1
    return end


@kernel
def read_records(
    function: Any,
    flags: Any,
    fds: Any,
    offsets: Any,
    max_misses: Any,
    buffer: Any,
    chunk_nbytes: Any,
    pages: Any,
    layer_stride: Any,
    others: Any,
    crcs: Any,
    good: Any,
    was_read: Any,
) -> Any:
    """Read records into pages, as ``unpack_raw`` or ``unpack_int8`` does from memory.

    Args:
        function: Address of C's ``preadv2``.
        flags: How to call it.
        fds: Descriptor of each page's file, int64.
        offsets: Where in the file the first wanted layer of each page is, int64. Pages of one file
            stand together; those that are neighbours in it are read at once if they are here.
        max_misses: After so many reads that the system could not serve, no more are tried.
        buffer: Memory for at least one layer with its checksum, and 4096 bytes more, uint8.
        chunk_nbytes: Bytes of a layer with its checksum.
        pages: As in ``unpack_raw``.
        layer_stride: The same.
        others: What ``unpack_raw`` or ``unpack_int8`` takes between ``layer_stride`` and ``crcs``;
            their number says which of the two is meant.
        crcs: As in ``unpack_raw``.
        good: The same; says nothing of pages that were not read.
        was_read: Flag of each page, bool, set if all of it was.

    Returns:
        Reads that the system could not serve.
    """
    num_layers = crcs.shape[1]
    capacity = len(buffer) - _PAGE_NBYTES
    at_once = max(1, min(num_layers, capacity // chunk_nbytes))
    begin, misses = 0, 0
    while begin < len(fds) and misses < max_misses:
        end = _end_of_run(fds, offsets, num_layers * chunk_nbytes, capacity, begin)
        is_whole = True
        for first in range(0, num_layers, at_once):
            stop = min(first + at_once, num_layers)
            start = offsets[begin] + first * chunk_nbytes
            nbytes = offsets[end - 1] - offsets[begin] + (stop - first) * chunk_nbytes
            # The system and what comes after copy faster between places that are alike in this.
            shift = start % _PAGE_NBYTES
            target = np.int64(buffer.ctypes.data) + shift
            if preadv2(function, fds[begin], target, nbytes, start, flags) != nbytes:
                is_whole = False
                break
            _unpack(
                buffer[: shift + nbytes],
                offsets[begin:end] - offsets[begin] + shift,
                pages[begin:end] + first * layer_stride,
                layer_stride,
                others,
                crcs[begin:end, first:stop],
                good[begin:end],
            )
        was_read[begin:end] = is_whole
        misses += not is_whole
        begin = end
    return misses


@kernel
def read_blocks(
    function: Any,
    flags: Any,
    fd: Any,
    offsets: Any,
    nbytes: Any,
    targets: Any,
    max_misses: Any,
    crcs: Any,
    good: Any,
    was_read: Any,
) -> Any:
    """Read blocks of one size straight to where they go, and verify them there.

    Args:
        function: Address of C's ``preadv2``.
        flags: How to call it.
        fd: Descriptor of the file.
        offsets: Where each block begins in it, int64.
        nbytes: Bytes of a block.
        targets: Address that each goes to, int64.
        max_misses: After so many reads that the system could not serve, no more are tried.
        crcs: Expected checksums, uint32.
        good: Flag of each, bool, cleared if it is damaged.
        was_read: Flag of each, bool, set if it was read.

    Returns:
        Reads that the system could not serve.
    """
    misses = 0
    for number in range(len(offsets)):
        if misses == max_misses:
            break
        target = targets[number]
        was_read[number] = preadv2(function, fd, target, nbytes, offsets[number], flags) == nbytes
        misses += not was_read[number]
        if was_read[number]:
            good[number] = crc32c(target, nbytes) == crcs[number]
    return misses


@kernel
def look_ahead(function: Any, addresses: Any, nbytes: Any) -> None:
    """Let the system begin to read parts of mapped files.

    Args:
        function: Address of C's ``madvise``.
        addresses: Where they begin in memory, int64.
        nbytes: Bytes of each part.
    """
    for number in range(len(addresses)):
        before = addresses[number] % _PAGE_NBYTES
        madvise_will_need(function, addresses[number] - before, nbytes + before)


@kernel
def read_ranges(
    function: Any,
    advise: Any,
    fd: Any,
    starts: Any,
    lengths: Any,
    memory: Any,
    targets: Any,
    num_read: Any,
) -> Any:
    """Read parts of a file, waiting for the disk.

    Args:
        function: Address of C's ``preadv2``.
        advise: Address of C's ``posix_fadvise``, by which the system learns of all parts before it
            is waited for the first one; 0 to leave that out.
        fd: Descriptor of the file.
        starts: Where each part begins, int64.
        lengths: Bytes of each, int64.
        memory: Where they go, uint8.
        targets: Where each goes in it, int64.
        num_read: Filled with the bytes of each, int64.

    Returns:
        How many were read whole, before one that was not.
    """
    address = np.int64(memory.ctypes.data)
    for number in range(len(starts) if advise else 0):
        fadvise_will_need(advise, fd, starts[number], lengths[number])
    for number in range(len(starts)):
        if not 0 <= targets[number] <= len(memory) - lengths[number]:
            return number
        target = address + targets[number]
        nbytes = preadv2(function, fd, target, lengths[number], starts[number], 0)
        if nbytes != lengths[number]:
            return number
        num_read[number] = nbytes
    return len(starts)


def _unpack(
    records: Any,
    offsets: Any,
    pages: Any,
    layer_stride: Any,
    others: Any,
    crcs: Any,
    good: Any,
) -> None:
    """``unpack_raw`` or ``unpack_int8``: kernels call one of them."""
    raise NotImplementedError


@overload(_unpack)  # type: ignore[untyped-decorator]  # numba has no types for mypy
def _choose_unpack(
    records: Any,
    offsets: Any,
    pages: Any,
    layer_stride: Any,
    others: Any,
    crcs: Any,
    good: Any,
) -> Any:
    unpack: Any = unpack_raw if len(others) == _NUM_RAW_ARGUMENTS else unpack_int8

    def call(
        records: Any,
        offsets: Any,
        pages: Any,
        layer_stride: Any,
        others: Any,
        crcs: Any,
        good: Any,
    ) -> None:
        unpack(records, offsets, pages, layer_stride, *others, crcs, good)

    return call
