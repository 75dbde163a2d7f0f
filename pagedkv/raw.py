"""``Raw``: the numbers of a layer as they are."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pagedkv import portable, records
from pagedkv.memory import PageMemory
from pagedkv.records import INTEGERS, Bytes, Crcs, FiledRecords
from pagedkv.spec import KVSpec


@dataclass(frozen=True, slots=True)
class Raw:
    """The numbers as they are, little-endian."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of a layer in the pool."""
        return spec.layer_nbytes

    def encode(self, spec: KVSpec, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Copy the layer's numbers to ``out``."""
        kind = INTEGERS[layer.itemsize]
        out.view(kind).reshape(layer.shape)[...] = layer.view(kind)

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Copy the payload's numbers to ``out``."""
        kind = INTEGERS[out.itemsize]
        out.view(kind)[...] = payload.view(kind).reshape(out.shape)

    def pack(self, spec: KVSpec, pages: PageMemory, out: Bytes, crcs: Crcs) -> None:
        """Copy the pages' numbers to ``out``."""
        parts = records.split(out, crcs, pages, self.layer_nbytes(spec))
        kernels = records.compiled()
        if kernels is None:
            portable.pack(partial(self.encode, spec), spec, pages, parts, crcs)
            return
        kernels.pack_raw(
            pages.addresses,
            pages.layer_stride,
            spec.num_kinds,
            pages.kind_stride,
            spec.layer_nbytes // spec.num_kinds,
            out,
            crcs,
        )

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
        """Copy the records' numbers to the pages."""
        crcs = records.checked(crcs, offsets, num_layers, pages, good)
        kernels = records.compiled()
        if kernels is None:
            decode, nbytes = partial(self.decode, spec), self.layer_nbytes(spec) + 4
            portable.unpack(decode, spec, stored, offsets, nbytes, pages, crcs, good)
            return
        kernels.unpack_raw(
            stored,
            offsets,
            pages.addresses,
            pages.layer_stride,
            spec.num_kinds,
            pages.kind_stride,
            spec.layer_nbytes // spec.num_kinds,
            crcs,
            good,
        )

    def read(
        self,
        spec: KVSpec,
        source: FiledRecords,
        pages: PageMemory,
        crcs: Crcs,
        good: npt.NDArray[np.bool_],
        was_read: npt.NDArray[np.bool_],
    ) -> int:
        """Read the records' numbers into the pages."""
        kernels = records.checked_reads(crcs, source, pages, good, was_read)
        misses: int = kernels.read_records(
            *source,
            pages.addresses,
            pages.layer_stride,
            (spec.num_kinds, pages.kind_stride, (source.chunk_nbytes - 4) // spec.num_kinds),
            crcs,
            good,
            was_read,
        )
        return misses

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """Zarr's own ``bytes`` codec."""
        return {"name": "bytes", "configuration": {"endian": "little"}}

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """None."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}
