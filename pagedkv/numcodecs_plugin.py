"""The codec ``pagedkv.int8`` for numcodecs, and so for whatever stores chunks through numcodecs.

Importing this module registers it. Installed, the package announces it as an entry point, and
numcodecs finds it by itself.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numcodecs
import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray

from pagedkv.codec import Bytes, Int8, Scales
from pagedkv.spec import DTYPES


class Int8Numcodec(Codec):  # type: ignore[misc]  # numcodecs has no types for mypy
    """``pagedkv.codec.Int8`` of one layer of one page a buffer.

    numcodecs hands over plain bytes, so the configuration names what they mean.

    Args:
        shape: ``(kind, token, head, channel)``.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        key_scales: As in ``Int8``.
        value_scales: As in ``Int8``.
    """

    codec_id: ClassVar[str] = "pagedkv.int8"

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        key_scales: Scales = "channel",
        value_scales: Scales = "token",
    ) -> None:
        if len(shape) != 4:
            raise ValueError(f"shape is {shape!r}: it must be (kind, token, head, channel)")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
        self.shape = tuple(shape)
        self.dtype = dtype
        self.int8 = Int8(key_scales=key_scales, value_scales=value_scales)

    def encode(self, buf: Any) -> Bytes:
        """The payload of a buffer's numbers; ``ValueError`` if one is NaN or infinite."""
        layer = _bytes(buf).view(DTYPES[self.dtype])
        if layer.size != np.prod(self.shape):
            raise ValueError(
                f"a buffer of {layer.nbytes} bytes is not one layer {self.shape} of {self.dtype}"
            )
        payload = np.empty(self.int8.shape_nbytes(self.shape), np.uint8)
        self.int8.quantise(layer.reshape(self.shape), payload)
        return payload

    def decode(self, buf: Any, out: Any = None) -> Any:
        """The numbers of a payload, in ``out`` if that is given.

        Raises:
            ValueError: The payload has another size than one layer, or a buffer is not contiguous.
        """
        payload = _bytes(buf)
        if len(payload) != self.int8.shape_nbytes(self.shape):
            raise ValueError(
                f"a payload of {len(payload)} bytes is not one layer {self.shape}: "
                f"it has {self.int8.shape_nbytes(self.shape)}"
            )
        layer = np.empty(self.shape, DTYPES[self.dtype])
        self.int8.dequantise(payload, layer)
        if out is None:
            return layer
        _bytes(out)[...] = layer.reshape(-1).view(np.uint8)
        return out

    def get_config(self) -> dict[str, Any]:
        """JSON-serialisable description; ``from_config`` is the inverse."""
        return {
            "id": self.codec_id,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "key_scales": self.int8.key_scales,
            "value_scales": self.int8.value_scales,
        }


def _bytes(buf: Any) -> Bytes:
    """The memory of a buffer, not copied."""
    numbers = buf if isinstance(buf, np.ndarray) else ensure_contiguous_ndarray(buf)
    if not numbers.flags.c_contiguous:
        raise ValueError("the buffer is not C-contiguous")
    return numbers.reshape(-1).view(np.uint8)


numcodecs.registry.register_codec(Int8Numcodec)
