"""``Payloads``: what a codec made of a layer, read without decoding it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import records
from pagedkv.memory import PageMemory
from pagedkv.records import Bytes, Crcs, FiledRecords
from pagedkv.spec import KVSpec


@dataclass(frozen=True, slots=True)
class Payloads:
    """A ``Decoder`` that leaves payloads of fixed size, of any codec, as they are.

    ``unpack`` and ``read`` need the kernels.

    Args:
        nbytes: Bytes of a layer's payload.
    """

    nbytes: int

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Copy the payload to ``out``, uint8 ``(1, 1, 1, byte)``."""
        out[...] = payload

    def unpack(
        self,
        spec: KVSpec,
        stored: Bytes,
        offsets: npt.NDArray[np.int64],
        num_layers: int,
        pages: PageMemory,
        crcs: Crcs,
        good: npt.NDArray[np.bool_],
    ) -> None:
        """Copy the records' payloads to the pages."""
        crcs = records.checked(crcs, offsets, num_layers, pages, good)
        kernels = records.compiled()
        assert kernels is not None
        strides = pages.layer_stride, 1, 0
        kernels.unpack_raw(stored, offsets, pages.addresses, *strides, self.nbytes, crcs, good)

    def read(
        self,
        spec: KVSpec,
        source: FiledRecords,
        pages: PageMemory,
        crcs: Crcs,
        good: npt.NDArray[np.bool_],
        was_read: npt.NDArray[np.bool_],
    ) -> int:
        """Read the records' payloads into the pages."""
        kernels = records.checked_reads(crcs, source, pages, good, was_read)
        misses: int = kernels.read_records(
            *source,
            pages.addresses,
            pages.layer_stride,
            (1, 0, self.nbytes),
            crcs,
            good,
            was_read,
        )
        return misses
