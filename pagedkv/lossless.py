"""``Lossless``: the numbers of a layer, compressed."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pagedkv.raw import Raw
from pagedkv.records import INTEGERS, Bytes
from pagedkv.spec import KVSpec

_CNAME, _CLEVEL, _HEADER_NBYTES = "lz4", 9, 16
"""Of Blosc. On the KV of two models this is two to three times as fast as zstd with byte shuffle,
and as small within 2 % for bfloat16, smaller for float32 (``benchmarks/lossless_kv.py``)."""


@dataclass(frozen=True, slots=True)
class Lossless:
    """The numbers as they are, compressed: Zarr's own ``blosc`` codec with lz4 and bitshuffle.

    The payloads differ in size; none is larger than ``layer_nbytes``.
    """

    name: ClassVar[str] = "lossless"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of a layer in the pool, and of Blosc's header."""
        return spec.layer_nbytes + _HEADER_NBYTES

    def encode_layer(self, spec: KVSpec, layer: npt.NDArray[Any]) -> Bytes:
        """Compress ``layer``, ``(kind, token, head, channel)``, maybe strided."""
        numbers = np.ascontiguousarray(layer.view(INTEGERS[layer.itemsize]))
        return np.frombuffer(_blosc().encode(numbers), np.uint8)

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Decompress into ``out``, maybe strided; ``ValueError`` if the payload is no layer."""
        # Blosc believes its header: read past neither the payload nor what it decompresses to.
        header = payload[:_HEADER_NBYTES].tobytes()
        nbytes, stored = (int.from_bytes(header[i : i + 4], "little") for i in (4, 12))
        if (nbytes, stored) != (out.nbytes, len(payload)):
            raise ValueError(
                f"a payload of {len(payload)} bytes says that it has {stored} bytes and holds "
                f"{nbytes}: a layer has {out.nbytes}"
            )
        kind = INTEGERS[out.itemsize]
        try:
            numbers = np.frombuffer(_blosc().decode(np.ascontiguousarray(payload)), kind)
        except RuntimeError as error:
            raise ValueError(f"Blosc cannot read a payload: {error}") from error
        out.view(kind)[...] = numbers.reshape(out.shape)

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """Zarr's own ``bytes`` codec."""
        return Raw().zarr_codec(spec)

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """Zarr's own ``blosc`` codec."""
        configuration = {
            "typesize": spec.np_dtype.itemsize,
            "cname": _CNAME,
            "clevel": _CLEVEL,
            "shuffle": "bitshuffle",
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": configuration}]

    def to_dict(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}


@functools.cache
def _blosc() -> Any:
    from numcodecs import Blosc

    return Blosc(cname=_CNAME, clevel=_CLEVEL, shuffle=Blosc.BITSHUFFLE)
