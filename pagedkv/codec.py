"""Codecs: how the numbers of one layer of a page become the bytes that are stored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.spec import KVSpec

Bytes = npt.NDArray[np.uint8]
Scales = Literal["channel", "token"]
"""What one scale covers: a head's channel over the page, or a token's head over its channels."""


_INTEGERS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Codec(Protocol):
    """A fixed-size encoding of one layer of a page. Values that compare equal encode alike."""

    @property
    def name(self) -> str:
        """Short name, as ``get_codec`` takes it."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very bits that were encoded."""

    def layer_nbytes(self, spec: KVSpec) -> int:
        """Bytes of an encoded layer, the same for every layer of every page."""

    def encode(self, spec: KVSpec, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Encode ``layer``, ``(kind, token, head, channel)``, maybe strided, into ``out``.

        ``ValueError`` if the codec cannot represent a number, its position named.
        """

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Decode ``payload`` into ``out``, ``(kind, token, head, channel)``, maybe strided."""

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """The array-to-bytes codec of Zarr v3 that reads and writes these bytes."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable description; ``codec_from_dict`` is the inverse."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The numbers as they are, little-endian."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True

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

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """Zarr's own ``bytes`` codec."""
        return {"name": "bytes", "configuration": {"endian": "little"}}

    def to_dict(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """Symmetric 8-bit integers with float32 scales: a value is its integer times its scale.

    A scale is the largest magnitude that it covers, divided by 127, so that a value comes back
    within half a scale (and the rounding of the spec's dtype). The payload is all scales, kind by
    kind in C order, then the integers in C order. NaN and infinity are refused.

    Args:
        key_scales: What a scale of kind 0 covers: ``"channel"``, one for each (head, channel) over
            the page's tokens, or ``"token"``, one for each (token, head) over its channels.
        value_scales: The same for kind 1.
    """

    key_scales: Scales = "channel"
    value_scales: Scales = "token"

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False

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

    def zarr_codec(self, spec: KVSpec) -> dict[str, Any]:
        """``pagedkv.int8``, which ``pagedkv.zarr_plugin`` gives to zarr-python."""
        scales = {"key_scales": self.key_scales, "value_scales": self.value_scales}
        return {"name": "pagedkv.int8", "configuration": scales}

    def to_dict(self) -> dict[str, Any]:
        """Its name and what the scales cover."""
        return {
            "name": self.name,
            "key_scales": self.key_scales,
            "value_scales": self.value_scales,
        }

    def shape_nbytes(self, shape: tuple[int, ...]) -> int:
        """Payload bytes of an array of shape ``(kind, token, head, channel)``."""
        return 4 * sum(math.prod(s) for s in self._scale_shapes(shape)) + math.prod(shape)

    def quantise(self, layer: npt.NDArray[Any], out: Bytes) -> None:
        """Fill ``out`` with the payload of ``layer``, ``(kind, token, head, channel)``."""
        check_finite(layer, "the layer")
        split = len(out) - layer.size
        integers = out[split:].view(np.int8).reshape(layer.shape)
        start = 0
        for kind, shape in enumerate(self._scale_shapes(layer.shape)):
            numbers = layer[kind].astype(np.float32)
            axis = self._scale_axis(kind)
            scales = _scales(np.abs(numbers).max(axis=axis))
            stop = start + 4 * scales.size
            out[start:stop].view("<f4").reshape(shape)[...] = scales
            start = stop
            divisors = np.expand_dims(np.where(scales > 0, scales, np.float32(np.inf)), axis)
            # Among subnormal numbers a scale is coarse, and the quotient can pass 127.
            np.divide(numbers, divisors, out=numbers)
            integers[kind] = np.clip(np.rint(numbers, out=numbers), -127, 127, out=numbers)

    def dequantise(self, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Fill ``out``, ``(kind, token, head, channel)``, from a payload of ``quantise``."""
        split = len(payload) - out.size
        integers = payload[split:].view(np.int8).reshape(out.shape)
        start = 0
        for kind, shape in enumerate(self._scale_shapes(out.shape)):
            stop = start + 4 * math.prod(shape)
            scales = payload[start:stop].view("<f4").reshape(shape)
            start = stop
            out[kind] = integers[kind] * np.expand_dims(scales, self._scale_axis(kind))

    def _covers(self, kind: int) -> Scales:
        return self.key_scales if kind == 0 else self.value_scales

    def _scale_axis(self, kind: int) -> int:
        return 0 if self._covers(kind) == "channel" else 2

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        kinds, tokens, heads, channels = shape
        by = {"channel": (heads, channels), "token": (tokens, heads)}
        return [by[self._covers(kind)] for kind in range(kinds)]


def get_codec(codec: "Codec | str | None") -> Codec:
    """The codec that is meant: itself, one by name (``"raw"``, ``"int8"``), or ``Raw`` for None."""
    if codec is None:
        return Raw()
    return codec_from_dict({"name": codec}) if isinstance(codec, str) else codec


def codec_from_dict(values: Mapping[str, Any]) -> Codec:
    """The codec that ``to_dict`` described; ``ValueError`` or ``TypeError`` if it is none."""
    codecs: dict[str, type[Raw] | type[Int8]] = {"raw": Raw, "int8": Int8}
    options = dict(values)
    name = options.pop("name", None)
    if name not in codecs:
        raise ValueError(f"there is no codec {name!r}: use one of {', '.join(codecs)}")
    return codecs[name](**options)


def check_finite(array: npt.NDArray[Any], what: str) -> None:
    """Raise ``ValueError`` naming the first position of ``array`` that is NaN or infinite."""
    finite = np.isfinite(array)
    if not finite.all():
        position = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"{what} has {array[position]} at {position}: INT8 needs finite numbers")


def _scales(largest: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``largest / 127``, rounded so that 127 times it is still finite."""
    scales = largest / np.float32(127)
    with np.errstate(over="ignore"):
        overflows = np.isinf(scales * np.float32(127))
    return np.where(overflows, np.nextafter(scales, np.float32(0)), scales)
