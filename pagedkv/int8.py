"""``Int8``: the numbers of a layer as 8-bit integers and scales."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import portable, records
from pagedkv.memory import PageMemory
from pagedkv.records import INTEGERS, Bytes, Crcs, FiledRecords
from pagedkv.spec import KVSpec

Scales = Literal["channel", "token"]
"""What one scale covers: a head's channel over the page, or a token's head over its channels."""

_KERNEL_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # as the kernels call it
}
_INFINITIES = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of the exponent, which are all set in NaN and infinity."""
_SMALLEST_SCALE = np.float32(2.0**-126)
"""The smallest normal number: its reciprocal is finite."""
_OVERFLOWS = {"float16": (0x4401, 2), "bfloat16": (0x7C01, 5)}
"""From which scale on, and by how much, bits of scales are raised: 127 times the scale that is due
would round to infinity. The raised one times the largest integer it meets does not."""
_NEVER = (0xFFFF, 0)


class Int8Layout(NamedTuple):
    """Where things are in a payload of two kinds."""

    keys: int
    """From the payload to the integers of its keys."""
    values: int
    """From the payload to the integers of its values."""
    scales: tuple[int, int, int]
    """From these keys and values to their scales; and bit ``kind`` is set if a scale of it covers a
    channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """Symmetric 8-bit integers with bfloat16 scales: a value is its integer times its scale.

    The scale of a group of numbers is their largest magnitude divided by 127 in float32, at least
    2**-126, rounded to the nearest bfloat16, ties to even; 0 if they are all zero. An integer is
    the number times the scale's reciprocal, both in float32, rounded to nearest, ties to even: at
    most 127, for a rounded scale is off by less than 2**-8. The product of integer and scale is
    exact in float32, and rounded once, to the spec's dtype.

    A number comes back within half its scale, and that rounding. Half a scale is at most 0.396 % of
    the group's largest magnitude, or 2**-127. Where that magnitude is all but the largest number of
    float16 or bfloat16, the scale is raised by up to 4 %, lest an integer times it overflows. What
    came back as float32, or as normal numbers of float16, is encoded to the same payload again.

    The payload is all scales, kind by kind in C order, then the integers in C order. NaN and
    infinity are refused.

    Args:
        key_scales: What a scale of kind 0 covers: ``"channel"``, one for each (head, channel) over
            the page's tokens, or ``"token"``, one for each (token, head) over its channels.
        value_scales: The same for kind 1.
    """

    key_scales: Scales = "channel"
    value_scales: Scales = "token"

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("key_scales", "value_scales"):
            if getattr(self, field) not in ("channel", "token"):
                value = getattr(self, field)
                raise ValueError(f"{field} is {value!r}: it must be 'channel' or 'token'")

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of all scales and integers of a layer."""
        return self.shape_nbytes(spec.layer_shape)

    def encode(self, spec: KVSpec, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Quantise ``layer``; ``ValueError`` naming the position of a NaN or infinity."""
        self.quantise(layer, out)

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Multiply the integers by their scales into ``out``."""
        self.dequantise(payload, out)

    def pack(self, spec: KVSpec, pages: PageMemory, out: Bytes, crcs: Crcs) -> None:
        """Quantise whole pages."""
        parts = records.split(out, crcs, pages, self.layer_nbytes(spec))
        kernels = records.compiled()
        if kernels is None:
            for page, layer in np.ndindex(crcs.shape):
                _check_layer(spec, pages, page, layer)
            portable.pack(partial(self.encode, spec), spec, pages, parts, crcs)
            return
        _, num_tokens, num_heads, num_channels = spec.layer_shape
        bad = kernels.pack_int8(
            pages.addresses,
            pages.layer_stride,
            spec.num_kinds,
            pages.kind_stride,
            num_tokens,
            num_heads,
            num_channels,
            self._by_channel,
            *_OVERFLOWS.get(spec.dtype, _NEVER),
            _KERNEL_DTYPES[spec.dtype],
            out,
            crcs,
        )
        if bad >= 0:
            _check_layer(spec, pages, *divmod(bad, spec.held_layers))

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
        """Dequantise many pages."""
        crcs = records.checked(crcs, offsets, num_layers, pages, good)
        kernels = records.compiled()
        if kernels is None:
            decode, nbytes = partial(self.decode, spec), self.layer_nbytes(spec) + 4
            portable.unpack(decode, spec, stored, offsets, nbytes, pages, crcs, good)
            return
        _, num_tokens, num_heads, num_channels = spec.layer_shape
        kernels.unpack_int8(
            stored,
            offsets,
            pages.addresses,
            pages.layer_stride,
            spec.num_kinds,
            pages.kind_stride,
            num_tokens,
            num_heads,
            num_channels,
            self._by_channel,
            _KERNEL_DTYPES[spec.dtype],
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
        """Read records and dequantise them into the pages."""
        dtype = _KERNEL_DTYPES[spec.dtype]
        kernels = records.checked_reads(crcs, source, pages, good, was_read)
        misses: int = kernels.read_records(
            *source,
            pages.addresses,
            pages.layer_stride,
            (spec.num_kinds, pages.kind_stride, *spec.layer_shape[1:], self._by_channel, dtype),
            crcs,
            good,
            was_read,
        )
        return misses

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """``pagedkv.int8``, which ``pagedkv.zarr_plugin`` gives to zarr-python."""
        scales = {"key_scales": self.key_scales, "value_scales": self.value_scales}
        return {"name": "pagedkv.int8", "configuration": scales}

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """None."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Its name and what the scales cover."""
        return {
            "name": self.name,
            "key_scales": self.key_scales,
            "value_scales": self.value_scales,
        }

    def layout(self, spec: KVSpec) -> Int8Layout:
        """Where keys, values and their scales are in a payload; for specs with two kinds."""
        key_nbytes, value_nbytes = (2 * math.prod(s) for s in self._scale_shapes(spec.layer_shape))
        keys = key_nbytes + value_nbytes
        values = keys + math.prod(spec.layer_shape[1:])
        return Int8Layout(keys, values, (-keys, key_nbytes - values, self._by_channel))

    def shape_nbytes(self, shape: tuple[int, ...]) -> int:
        """Payload bytes of an array of shape ``(kind, token, head, channel)``."""
        return 2 * sum(math.prod(s) for s in self._scale_shapes(shape)) + math.prod(shape)

    def quantise(self, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Fill ``out`` with the payload of ``layer``, ``(kind, token, head, channel)``."""
        check_finite(layer, "the layer")
        split = len(out) - layer.size
        integers = out[split:].view(np.int8).reshape(layer.shape)
        start = 0
        for kind, shape in enumerate(self._scale_shapes(layer.shape)):
            numbers = layer[kind].astype(np.float32)
            axis = self._scale_axis(kind)
            bits = _scale_bits(np.abs(numbers).max(axis=axis), layer.dtype)
            stop = start + 2 * bits.size
            out[start:stop].view("<u2").reshape(shape)[...] = bits
            start = stop
            scales = _scales(bits)
            factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=bits > 0)
            np.multiply(numbers, np.expand_dims(factors, axis), out=numbers)
            integers[kind] = np.rint(numbers, out=numbers)

    def dequantise(self, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Fill ``out``, ``(kind, token, head, channel)``, from a payload of ``quantise``."""
        split = len(payload) - out.size
        integers = payload[split:].view(np.int8).reshape(out.shape)
        start = 0
        for kind, shape in enumerate(self._scale_shapes(out.shape)):
            stop = start + 2 * math.prod(shape)
            scales = _scales(payload[start:stop].view("<u2").reshape(shape))
            start = stop
            out[kind] = integers[kind] * np.expand_dims(scales, self._scale_axis(kind))

    @property
    def _by_channel(self) -> int:
        """Bit 0 says whether a key's scale covers a channel, bit 1 whether a value's does."""
        return (self.key_scales == "channel") + 2 * (self.value_scales == "channel")

    def _scale_axis(self, kind: int) -> int:
        return 0 if self._by_channel >> kind & 1 else 2

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        kinds, tokens, heads, channels = shape
        by = ((tokens, heads), (heads, channels))
        return [by[self._by_channel >> kind & 1] for kind in range(kinds)]


def check_finite(array: npt.NDArray[Any], what: str, place: tuple[int, ...] = ()) -> None:
    """Raise ``ValueError`` naming the first position of ``array`` that is NaN or infinite.

    Args:
        array: Of any shape, and a dtype that a spec can have.
        what: Its name for the message.
        place: Indices of ``array`` in something larger, before its own in the message.
    """
    # numpy looks at halves one by one if they are numbers, and in blocks if they are integers.
    infinity = _INFINITIES[array.dtype.name]
    if (array.view(INTEGERS[array.itemsize]) & infinity == infinity).any():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        position = (*place, *index)
        raise ValueError(f"{what} has {array[index]} at {position}: INT8 needs finite numbers")


def _scale_bits(largest: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> npt.NDArray[np.uint16]:
    """Scales, as the bits of bfloat16, of groups of numbers of a dtype."""
    quotients = np.maximum(largest / np.float32(127), _SMALLEST_SCALE)
    bits = quotients.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    bits = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
    top, step = _OVERFLOWS.get(dtype.name, _NEVER)
    bits[bits >= top] += np.uint32(step)
    bits[largest == 0] = 0
    narrow: npt.NDArray[np.uint16] = bits.astype(np.uint16)
    return narrow


def _scales(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _check_layer(spec: KVSpec, pages: PageMemory, page: int, layer: int) -> None:
    """Raise ``ValueError`` naming the first number of a layer that is not finite."""
    numbers = portable.layer_view(spec, pages, page, layer)
    check_finite(numbers, "a page", (page, layer))
