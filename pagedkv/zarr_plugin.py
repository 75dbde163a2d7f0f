"""What zarr-python needs to read a store: data type ``bfloat16`` and codec ``pagedkv.int8``.

Importing this module registers both. Installed, the package also announces them as entry points;
zarr-python loads codecs that way, but releases up to 3.1.6 never look at entry points for data
types, so a bfloat16 store needs ``import pagedkv.zarr_plugin`` before it is opened there.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, overload

import ml_dtypes
import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON, ZarrFormat
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, DTypeJSON, HasEndianness, HasItemSize
from zarr.core.dtype.npy.float import Float32
from zarr.core.dtype.wrapper import TBaseDType, ZDType
from zarr.registry import register_codec

from pagedkv.codec import Int8

_NATIVE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """Zarr's registered extension data type ``bfloat16``, as ``ml_dtypes.bfloat16``.

    The native type has the machine's byte order; only little-endian machines are supported.
    """

    dtype_cls: ClassVar[type[TBaseDType]] = type(_NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of a number."""
        return 2

    @classmethod
    def _check_native_dtype(cls, dtype: TBaseDType) -> bool:  # type: ignore[override]  # plain bool
        return bool(dtype == _NATIVE)

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """This type, if ``dtype`` is ``ml_dtypes.bfloat16``."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        """``ml_dtypes.bfloat16``."""
        return _NATIVE

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError("bfloat16 is a data type of Zarr v3 only")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    @overload
    def to_json(self, zarr_format: Literal[2]) -> Any: ...
    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...
    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """The type's name; ``ValueError`` for Zarr v2."""
        if zarr_format != 3:
            raise ValueError("bfloat16 is a data type of Zarr v3 only")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | ml_dtypes.bfloat16)

    def cast_scalar(self, data: object) -> Any:
        """``data`` as a bfloat16 scalar; ``TypeError`` if it is no number."""
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} cannot be a bfloat16")
        return _NATIVE.type(data)

    def default_scalar(self) -> Any:
        """Zero."""
        return _NATIVE.type(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> Any:
        """A fill value out of a metadata document, written as for float32."""
        return _NATIVE.type(Float32().from_json_scalar(data, zarr_format=zarr_format))

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        """A fill value for a metadata document, written as for float32."""
        scalar = np.float32(self.cast_scalar(data))
        return Float32().to_json_scalar(scalar, zarr_format=zarr_format)


@dataclass(frozen=True)
class Int8ZarrCodec(ArrayBytesCodec):
    """``pagedkv.codec.Int8`` as an array-to-bytes codec of Zarr v3.

    Takes chunks of one layer of one page: the last four axes are (kind, token, head, channel), all
    before them have length 1.
    """

    int8: Int8

    name: ClassVar[str] = "pagedkv.int8"
    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """The codec that a metadata document describes."""
        configuration: Any = data.get("configuration", {})
        return cls(Int8(**configuration))

    def to_dict(self) -> dict[str, JSON]:
        """The codec for a metadata document."""
        return {
            "name": self.name,
            "configuration": {
                "key_scales": self.int8.key_scales,
                "value_scales": self.int8.value_scales,
            },
        }

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Bytes of an encoded chunk."""
        return self.int8.shape_nbytes(_layer_shape(chunk_spec))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        out = np.empty(_layer_shape(chunk_spec), chunk_spec.dtype.to_native_dtype())
        self.int8.dequantise(np.asarray(chunk_data.as_numpy_array()).view(np.uint8), out)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out.reshape(chunk_spec.shape))

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        layer = chunk_data.as_numpy_array().reshape(_layer_shape(chunk_spec))
        out = np.empty(self.int8.shape_nbytes(layer.shape), np.uint8)
        self.int8.quantise(layer, out)
        return chunk_spec.prototype.buffer.from_array_like(out)


def register() -> None:
    """Make zarr-python know both; calling it again changes nothing."""
    data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
    register_codec(Int8ZarrCodec.name, Int8ZarrCodec)


def _layer_shape(chunk_spec: ArraySpec) -> tuple[int, int, int, int]:
    *leading, kinds, tokens, heads, channels = chunk_spec.shape
    if len(chunk_spec.shape) < 4 or any(length != 1 for length in leading):
        raise ValueError(
            f"a chunk of shape {chunk_spec.shape} is not one layer of one page:"
            " pagedkv.int8 takes chunks (1, 1, kind, token, head, channel)"
        )
    return kinds, tokens, heads, channels


register()
