"""Codecs: how the numbers of one layer of a page become the bytes that are stored."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv import portable
from pagedkv.memory import PageMemory
from pagedkv.spec import KVSpec

Bytes = npt.NDArray[np.uint8]
Crcs = npt.NDArray[np.uint32]
"""CRC32C of the payload of each layer, ``(page, layer)``."""
Scales = Literal["channel", "token"]
"""What one scale covers: a head's channel over the page, or a token's head over its channels."""


_INTEGERS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_KERNEL_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # as the kernels call it
}
_SMALLEST_SCALE = np.float32(2.0**-126)
"""The smallest normal number: its reciprocal is finite."""
_OVERFLOWS = {"float16": (0x4401, 2), "bfloat16": (0x7C01, 5)}
"""From which scale on, and by how much, bits of scales are raised: 127 times the scale that is due
would round to infinity. The raised one times the largest integer it meets does not."""
_NEVER = (0xFFFF, 0)

_BLOSC_CNAME, _BLOSC_CLEVEL, _BLOSC_HEADER_NBYTES = "zstd", 1, 16


class Codec(Protocol):
    """An encoding of the layers of pages. Values that compare equal encode alike."""

    @property
    def name(self) -> str:
        """Short name, as ``get_codec`` takes it."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very bits that were encoded."""

    @property
    def fixed_size(self) -> bool:
        """Whether all layers have as many bytes when encoded: then it is a ``FixedCodec``."""

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of an encoded layer, or the most that it can have."""

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Decode ``payload`` into ``out``, ``(kind, token, head, channel)``, maybe strided."""

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """The array-to-bytes codec of Zarr v3 for these bytes."""

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """The bytes-to-bytes codecs of Zarr v3 between ``zarr_codec`` and the checksum."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable description; ``codec_from_dict`` is the inverse."""


class FixedCodec(Codec, Protocol):
    """A codec whose encoded layers all have ``layer_nbytes`` bytes.

    A *record* is one page: for each layer its payload and the payload's CRC32C, little-endian.
    ``pack`` and ``unpack`` hold no GIL, and agree with ``encode`` and ``decode`` to the bit.
    """

    def encode(self, spec: KVSpec, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Encode ``layer``, ``(kind, token, head, channel)``, maybe strided, into ``out``.

        ``ValueError`` if the codec cannot represent a number, its position named.
        """

    def pack(self, spec: KVSpec, pages: PageMemory, out: Bytes, crcs: Crcs) -> None:
        """Encode whole pages into consecutive records.

        Args:
            spec: Geometry of the pages.
            pages: The pages in memory.
            out: As many bytes as the records have, C-contiguous.
            crcs: Filled with the CRC of each payload, ``(page, layer)``.

        Raises:
            ValueError: The codec cannot represent a number; its position ``(page, layer, kind,
                token, head, channel)`` is named, and ``out`` and ``crcs`` are undefined.
        """

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
        """Check and decode ``num_layers`` consecutive layers of many pages.

        Args:
            spec: Geometry of the pages.
            stored: Memory that holds the records, or parts of them; C-contiguous.
            offsets: Where in ``stored`` the first layer of each page is.
            num_layers: How many layers of each page are decoded.
            pages: Where the first of these layers goes, for each page.
            crcs: What the CRC of each payload must be, ``(page, layer)``.
            good: Set to False where a payload's CRC is not both what ``crcs`` and what the record
                says, or where the record is not all in ``stored``. The page in memory is then
                undefined.
        """


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
        # As integers: numpy copies them in blocks, but bfloat16 one by one.
        kind = _INTEGERS[layer.itemsize]
        out.view(kind).reshape(layer.shape)[...] = layer.view(kind)

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Copy the payload's numbers to ``out``."""
        kind = _INTEGERS[out.itemsize]
        out.view(kind)[...] = payload.view(kind).reshape(out.shape)

    def pack(self, spec: KVSpec, pages: PageMemory, out: Bytes, crcs: Crcs) -> None:
        """Copy the pages' numbers to ``out``."""
        records = _records(self, spec, pages, out, crcs)
        kernels = _kernels()
        if kernels is None:
            portable.pack(partial(self.encode, spec), spec, pages, records, crcs)
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
        crcs = _expected(crcs, offsets, num_layers, pages, good)
        kernels = _kernels()
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

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """Zarr's own ``bytes`` codec."""
        return {"name": "bytes", "configuration": {"endian": "little"}}

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """None."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """Symmetric 8-bit integers with bfloat16 scales: a value is its integer times its scale.

    The scale of a group of numbers is their largest magnitude divided by 127 in float32, at least
    2**-126, rounded to the nearest bfloat16, ties to even; 0 if they are all zero. An integer is
    the number times the scale's reciprocal, both in float32, rounded to nearest, ties to even: at
    most 127, for a rounded scale is off by less than 2**-8. The product of integer and scale is
    exact in float32, and rounded once, to the spec's dtype.

    A number comes back within half its scale, and that rounding; what came back is encoded to the
    same scales and integers again. Half a scale is at most 0.396 % of the group's largest
    magnitude. Where that is all but the largest number of float16 or bfloat16, the scale is raised
    by up to 4 %, lest an integer times the scale overflows.

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
        records = _records(self, spec, pages, out, crcs)
        kernels = _kernels()
        if kernels is None:
            for page, layer in np.ndindex(crcs.shape):
                _check_layer(spec, pages, page, layer)
            portable.pack(partial(self.encode, spec), spec, pages, records, crcs)
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
        crcs = _expected(crcs, offsets, num_layers, pages, good)
        kernels = _kernels()
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


@dataclass(frozen=True, slots=True)
class Lossless:
    """The numbers as they are, compressed: Zarr's own ``blosc`` codec with zstd and byte shuffle.

    The payloads differ in size; none is larger than ``layer_nbytes``.
    """

    name: ClassVar[str] = "lossless"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of a layer in the pool, and of Blosc's header."""
        return spec.layer_nbytes + _BLOSC_HEADER_NBYTES

    def encode_layer(self, spec: KVSpec, layer: npt.NDArray[Any]) -> Bytes:
        """Compress ``layer``, ``(kind, token, head, channel)``, maybe strided."""
        numbers = np.ascontiguousarray(layer.view(_INTEGERS[layer.itemsize]))
        return np.frombuffer(_blosc().encode(numbers), np.uint8)

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Decompress into ``out``, maybe strided; ``ValueError`` if the payload is no layer."""
        kind = _INTEGERS[out.itemsize]
        try:
            numbers = np.frombuffer(_blosc().decode(np.ascontiguousarray(payload)), kind)
        except RuntimeError as error:
            raise ValueError(
                f"a payload of {len(payload)} bytes is not Blosc's: {error}"
            ) from error
        out.view(kind)[...] = numbers.reshape(out.shape)

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """Zarr's own ``bytes`` codec."""
        return Raw().zarr_codec(spec)

    def zarr_compressors(self, spec: KVSpec) -> list[dict[str, Any]]:
        """Zarr's own ``blosc`` codec."""
        configuration = {
            "typesize": spec.np_dtype.itemsize,
            "cname": _BLOSC_CNAME,
            "clevel": _BLOSC_CLEVEL,
            "shuffle": "shuffle",
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": configuration}]

    def to_dict(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}


def get_codec(codec: "Codec | str | None") -> Codec:
    """The codec that is meant: itself, one by name, or ``Raw`` for None."""
    if codec is None:
        return Raw()
    return codec_from_dict({"name": codec}) if isinstance(codec, str) else codec


def codec_from_dict(values: Mapping[str, Any]) -> Codec:
    """The codec that ``to_dict`` described; ``ValueError`` or ``TypeError`` if it is none."""
    codecs: dict[str, type[Raw] | type[Int8] | type[Lossless]] = {
        codec.name: codec for codec in (Raw, Int8, Lossless)
    }
    options = dict(values)
    name = options.pop("name", None)
    if name not in codecs:
        raise ValueError(f"there is no codec {name!r}: use one of {', '.join(codecs)}")
    return codecs[name](**options)


def check_finite(array: npt.NDArray[Any], what: str, place: tuple[int, ...] = ()) -> None:
    """Raise ``ValueError`` naming the first position of ``array`` that is NaN or infinite.

    Args:
        array: Of any shape.
        what: Its name for the message.
        place: Indices of ``array`` in something larger, before its own in the message.
    """
    finite = np.isfinite(array)
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
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


def _records(codec: Codec, spec: KVSpec, pages: PageMemory, out: Bytes, crcs: Crcs) -> Bytes:
    """``out`` as ``(page, layer, byte)``; the kernels write where they are told, so be sure."""
    assert crcs.shape == (len(pages.addresses), spec.held_layers)
    assert all(array.flags.carray for array in (out, crcs, pages.addresses))
    return out.reshape(*crcs.shape, codec.layer_nbytes(spec) + 4)


def _expected(
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


def _check_layer(spec: KVSpec, pages: PageMemory, page: int, layer: int) -> None:
    """Raise ``ValueError`` naming the first number of a layer that is not finite."""
    numbers = portable.layer_view(spec, pages, page, layer)
    check_finite(numbers, "a page", (page, layer))


@functools.cache
def _kernels() -> ModuleType | None:
    """The compiled kernels, imported when first needed; None if this processor lacks something."""
    from pagedkv import vectors

    if not vectors.is_supported():
        return None
    from pagedkv import kernels

    return kernels


@functools.cache
def _blosc() -> Any:
    from numcodecs import Blosc

    return Blosc(cname=_BLOSC_CNAME, clevel=_BLOSC_CLEVEL, shuffle=Blosc.SHUFFLE)
