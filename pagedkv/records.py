"""What the codecs of fixed size share: records of pages, and the kernels that move them.

A *record* is one page: for each layer a payload and the payload's CRC32C, little-endian.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.memory import PageMemory

Bytes = npt.NDArray[np.uint8]
Crcs = npt.NDArray[np.uint32]
"""CRC32C of the payload of each layer, ``(page, layer)``."""

INTEGERS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Integers by size: numpy copies them in blocks, but bfloat16 one by one."""


class FiledRecords(NamedTuple):
    """Records in files, or some layers of each, that a kernel is to read without waiting."""

    function: int
    """Address of C's ``preadv2``."""
    flags: int
    """How to call it."""
    fds: npt.NDArray[np.int64]
    """Descriptor of each record's file."""
    offsets: npt.NDArray[np.int64]
    """Where in the file the first wanted layer is. Those of one file stand together."""
    max_misses: int
    """After so many reads that would have to wait, no more are tried."""
    buffer: Bytes
    """Memory for at least one layer with its checksum, and 4096 bytes more."""
    chunk_nbytes: int
    """Bytes of a layer with its checksum."""


@functools.cache
def compiled() -> ModuleType | None:
    """The compiled kernels, imported when first needed; None if this processor lacks something."""
    from pagedkv import vectors

    if not vectors.is_supported():
        return None
    from pagedkv import kernels

    return kernels


@functools.cache
def compiled_reads() -> ModuleType | None:
    """The compiled loops that read from files; None where there are no kernels."""
    if compiled() is None:
        return None
    from pagedkv import read_kernels

    return read_kernels


def split(out: Bytes, crcs: Crcs, pages: PageMemory, layer_nbytes: int) -> Bytes:
    """``out`` as ``(page, layer, byte)``: the kernels write where they are told, so be sure."""
    assert len(crcs) == len(pages.addresses)
    assert all(array.flags.carray for array in (out, crcs, pages.addresses))
    return out.reshape(*crcs.shape, layer_nbytes + 4)


def checked(
    crcs: Crcs,
    offsets: npt.NDArray[np.int64],
    num_layers: int,
    pages: PageMemory,
    good: npt.NDArray[np.bool_],
) -> Crcs:
    """``crcs`` as the kernels take them: read-only arrays are another type, compiled anew."""
    assert crcs.shape == (len(pages.addresses), num_layers)
    assert len(offsets) == len(good) == len(crcs)
    return crcs if crcs.flags.carray else crcs.copy()


def checked_reads(
    crcs: Crcs,
    source: FiledRecords,
    pages: PageMemory,
    good: npt.NDArray[np.bool_],
    was_read: npt.NDArray[np.bool_],
) -> ModuleType:
    """The compiled loops, after a look at what they are told."""
    kernels = compiled_reads()
    assert kernels is not None
    assert len(crcs) == len(pages.addresses) == len(good) == len(was_read)
    assert len(crcs) == len(source.fds) == len(source.offsets)
    assert crcs.flags.carray
    return kernels
