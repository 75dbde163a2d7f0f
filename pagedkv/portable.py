"""What the kernels do, in numpy, for processors that lack an instruction that those need."""

import ctypes
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from pagedkv.memory import PageMemory
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]


def pack(
    encode: Callable[[Array, Array], None],
    spec: KVSpec,
    pages: PageMemory,
    records: Array,
    crcs: npt.NDArray[np.uint32],
) -> None:
    """Fill ``records``, uint8 ``(page, layer, payload and CRC32C)``, and the same ``crcs``.

    ``encode(layer, payload)`` fills one payload.
    """
    for page, layer in np.ndindex(crcs.shape):
        chunk = records[page, layer]
        encode(layer_view(spec, pages, page, layer), chunk[:-4])
        crcs[page, layer] = google_crc32c.value(chunk[:-4])
        chunk[-4:] = crcs[page, layer : layer + 1].astype("<u4").view(np.uint8)


def unpack(
    decode: Callable[[Array, Array], None],
    spec: KVSpec,
    stored: Array,
    offsets: npt.NDArray[np.int64],
    chunk_nbytes: int,
    pages: PageMemory,
    crcs: npt.NDArray[np.uint32],
    good: npt.NDArray[np.bool_],
) -> None:
    """Decode the records at ``offsets`` of ``stored``; clear the flag of each damaged page.

    ``decode(payload, layer)`` fills one layer.
    """
    for page, offset in enumerate(offsets.tolist()):
        for layer, crc in enumerate(crcs[page].tolist()):
            start = offset + layer * chunk_nbytes
            chunk = stored[start : start + chunk_nbytes] if offset >= 0 else stored[:0]
            trailer = int.from_bytes(chunk[-4:].tobytes(), "little")
            whole = len(chunk) == chunk_nbytes
            if not whole or trailer != crc or google_crc32c.value(chunk[:-4]) != crc:
                good[page] = False
                break
            decode(chunk[:-4], layer_view(spec, pages, page, layer))


def layer_view(spec: KVSpec, pages: PageMemory, page: int, layer: int) -> Array:
    """One layer of one page in its place in memory, ``(kind, token, head, channel)``."""
    kinds, tokens, heads, channels = spec.layer_shape
    size = spec.np_dtype.itemsize
    start = int(pages.addresses[page]) + layer * pages.layer_stride
    last = start + (kinds - 1) * pages.kind_stride
    nbytes = abs(last - start) + tokens * heads * channels * size
    return np.ndarray(
        spec.layer_shape,
        spec.np_dtype,
        memoryview((ctypes.c_char * nbytes).from_address(min(start, last))),
        start - min(start, last),
        (pages.kind_stride, heads * channels * size, channels * size, size),
    )
