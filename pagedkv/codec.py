"""Codecs: how the numbers of one layer of a page become the bytes that are stored."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.int8 import Int8, Scales, check_finite
from pagedkv.lossless import Lossless
from pagedkv.memory import PageMemory
from pagedkv.payloads import Payloads
from pagedkv.raw import Raw
from pagedkv.records import Bytes, Crcs, FiledRecords
from pagedkv.spec import KVSpec

__all__ = [
    "Bytes",
    "Codec",
    "Crcs",
    "Decoder",
    "FiledRecords",
    "FixedCodec",
    "Int8",
    "Lossless",
    "Payloads",
    "Raw",
    "Scales",
    "check_finite",
    "codec_from_dict",
    "get_codec",
]


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


class Decoder(Protocol):
    """What is needed to read the records of a ``FixedCodec``.

    A *record* is one page: for each layer its payload and the payload's CRC32C, little-endian.
    """

    def decode(self, spec: KVSpec, payload: Bytes, out: npt.NDArray[Any]) -> None:
        """Decode ``payload`` into ``out``, ``(kind, token, head, channel)``, maybe strided."""

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

    def read(
        self,
        spec: KVSpec,
        source: FiledRecords,
        pages: PageMemory,
        crcs: Crcs,
        good: npt.NDArray[np.bool_],
        was_read: npt.NDArray[np.bool_],
    ) -> int:
        """Read consecutive layers of many pages from files, check and decode them, with kernels.

        Args:
            spec: Geometry of the pages.
            source: Where the first of these layers is, for each page.
            pages: Where it goes.
            crcs: As for ``unpack``; as many layers are read as it has.
            good: The same; undefined for pages that were not read.
            was_read: Set to True where all of a page was read.

        Returns:
            Reads that would have had to wait for a disk, or that the system refused.
        """


class FixedCodec(Codec, Decoder, Protocol):
    """A codec whose encoded layers all have ``layer_nbytes`` bytes.

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
