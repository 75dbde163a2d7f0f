"""The bytes of a store: names, versions, and where things lie. No I/O.

One *segment* is the pages that were written together: a Zarr shard of ``kv`` (page after page, in
each page layer after layer, each layer a payload and its CRC32C, then the shard's index) and one
chunk of ``catalog`` (a fixed-size record a row). All numbers are little-endian.
"""

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from pagedkv.codec import Codec
from pagedkv.prefix import Tokens
from pagedkv.spec import KVSpec, PageKey

FORMAT_VERSION = 1
ATTRIBUTE = "pagedkv"
METADATA = "zarr.json"
KV, CATALOG, EVICTED = "kv", "catalog", "evicted"

SEGMENT_NBYTES = 48 * 2**20
"""About how large a full segment is."""
MAX_SEGMENT_ROWS = 4096
MAX_OVERHEAD_NBYTES = 256 * 2**10
"""Bound of what a segment adds to its pages: index, catalogue and derived columns have room for
all rows, so that small pages need segments of fewer rows, lest a write of few pages costs much."""

NO_ENTRY = np.uint64(2**64 - 1)
"""Offset and length in a shard's index of a chunk that is not there."""

KV_DIMENSIONS = ("row", "layer", "kind", "token", "head", "channel")
CATALOG_DIMENSIONS = ("row", "record")

LayerSizes = npt.NDArray[np.uint32]
"""Bytes of each layer's payload, without its CRC, ``(page, layer)``."""


class StoreRow(NamedTuple):
    """Where a page is: the lane, the index into the store's specs, and the row of the arrays."""

    lane: int
    group: int
    row: int


PackedRows = npt.NDArray[np.int64]
"""Rows as integers, by ``pack_row``."""
ROW_BITS, GROUP_BITS, LANE_BITS = 40, 8, 15
"""A packed row is one integer, as an index of millions keeps it: lane, group, row from the top."""


def pack_row(row: StoreRow) -> int:
    """A row as one integer; packed rows of one segment are consecutive."""
    return (row.lane << GROUP_BITS | row.group) << ROW_BITS | row.row


def unpack_row(packed: int) -> StoreRow:
    """The row that ``pack_row`` packed."""
    return StoreRow(
        packed >> ROW_BITS + GROUP_BITS,
        packed >> ROW_BITS & (1 << GROUP_BITS) - 1,
        packed & (1 << ROW_BITS) - 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageEntry:
    """What the catalogue says of a page.

    Args:
        key: The page's 32-byte key.
        num_tokens: Tokens in the page: fewer than the spec's ``page_tokens`` in a saved tail.
        parent: Key of the page before it; None for an opaque key.
        tokens: The page's token ids, ``(num_tokens,)`` int32; None if unknown or not kept.
        salt: The tenant's salt. Only its SHA-256 is stored, so it is empty in what is read back.
    """

    key: PageKey
    num_tokens: int
    parent: PageKey | None = None
    tokens: Tokens | None = None
    salt: bytes = b""

    def check(self, spec: KVSpec) -> None:
        """Raise ``ValueError`` if this cannot describe a page of ``spec``."""
        for name, key in (("key", self.key), ("parent", self.parent)):
            if key is not None and (not isinstance(key, bytes) or len(key) != 32):
                raise ValueError(f"{name} is {key!r}: a page key has 32 bytes")
        if not 1 <= self.num_tokens <= spec.page_tokens:
            raise ValueError(
                f"num_tokens is {self.num_tokens}: a page of this spec has 1 to {spec.page_tokens}"
            )
        ids = self.tokens
        if ids is not None and ids.shape != (self.num_tokens,):
            raise ValueError(f"tokens have shape {ids.shape}, but num_tokens is {self.num_tokens}")
        if ids is not None and ids.dtype != np.int32:
            raise ValueError(f"tokens are {ids.dtype}: they must be int32")
        if not isinstance(self.salt, bytes):
            raise ValueError(f"salt is {self.salt!r}: it must be bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes and places in the segments of one spec; all in bytes unless said otherwise.

    Args:
        num_layers: Layers of a page.
        fixed_size: Whether every layer has the same number of stored bytes, so that its place can
            be computed. If not, the catalogue says where it is.
        payload_nbytes: Stored bytes of one layer without its CRC; the most they can be if their
            number is not fixed.
        page_tokens: Tokens of a page.
        rows: Rows of a segment, used or not.
        tag: Names spec and codec; every record carries it. The first 8 bytes of SHA-256 over the
            spec's root key and the codec's description as canonical JSON.
    """

    num_layers: int
    fixed_size: bool
    payload_nbytes: int
    page_tokens: int
    rows: int
    tag: bytes

    @classmethod
    def of(
        cls,
        spec: KVSpec,
        codec: Codec,
        rows: int | None = None,
        max_nbytes: int | None = None,
    ) -> "Geometry":
        """The geometry of ``spec`` under ``codec``.

        Args:
            spec: Geometry of a page.
            codec: How a layer becomes bytes.
            rows: Rows of a segment; chosen by size if not given.
            max_nbytes: The store's bound, so that a segment is not more than a 16th of it: space
                comes back a segment at a time.
        """
        text = json.dumps(codec.to_dict(), sort_keys=True, separators=(",", ":"))
        one = cls(
            num_layers=spec.held_layers,
            fixed_size=codec.fixed_size,
            payload_nbytes=codec.layer_nbytes(spec),
            page_tokens=spec.page_tokens,
            rows=1,
            tag=hashlib.sha256(spec.root_key() + text.encode()).digest()[:8],
        )
        if rows is None:
            overhead_nbytes = one.write_nbytes(1) - one.page_nbytes
            rows = min(SEGMENT_NBYTES // one.page_nbytes, MAX_OVERHEAD_NBYTES // overhead_nbytes)
            if max_nbytes is not None:
                rows = min(rows, max_nbytes // 16 // one.write_nbytes(1))
            rows = min(max(rows, 1), MAX_SEGMENT_ROWS)
        return replace(one, rows=rows)

    @property
    def chunk_nbytes(self) -> int:
        """One layer of one page: payload and CRC32C."""
        return self.payload_nbytes + 4

    @property
    def page_nbytes(self) -> int:
        """One page: its layers one after the other; the most it can be if that is not fixed."""
        return self.num_layers * self.chunk_nbytes

    @property
    def index_nbytes(self) -> int:
        """The index that ends a segment file: two numbers for each layer, and their CRC32C."""
        return self.rows * self.num_layers * 16 + 4

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """One record of the catalogue."""
        return _record_dtype(self.num_layers, self.page_tokens, self.fixed_size)

    @property
    def catalog_nbytes(self) -> int:
        """One chunk of the catalogue: a record for each row, and the CRC32C of them all."""
        return self.rows * self.record_dtype.itemsize + 4

    @property
    def derived_nbytes(self) -> int:
        """The chunks of all derived columns of one segment."""
        return self.rows * sum(column.row_nbytes for column in derived_columns(self.page_tokens))

    def write_nbytes(self, num_pages: int) -> int:
        """All that storing ``num_pages`` pages puts on the disk, split into full segments."""
        num_segments = -(-num_pages // self.rows)
        overhead_nbytes = self.index_nbytes + self.catalog_nbytes + self.derived_nbytes
        return num_pages * self.page_nbytes + num_segments * overhead_nbytes


@functools.cache
def _record_dtype(num_layers: int, page_tokens: int, fixed_size: bool) -> np.dtype[Any]:
    places = [] if fixed_size else [("offset", "<u8"), ("layer_nbytes", "<u4", (num_layers,))]
    return np.dtype(
        [
            ("magic", "S4"),
            ("flags", "<u4"),
            ("row", "<u8"),
            ("created_ns", "<u8"),
            ("tag", "u1", (8,)),
            ("num_tokens", "<u4"),
            ("reserved", "<u4"),
            ("key", "u1", (32,)),
            ("parent", "u1", (32,)),
            ("salt_sha256", "u1", (32,)),
            ("layer_crcs", "<u4", (num_layers,)),
            *places,
            ("tokens", "<i4", (page_tokens,)),
            ("crc", "<u4"),
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A derived array: the same facts as the catalogue's, by name, for plain Zarr readers."""

    name: str
    dtype: str
    dimensions: tuple[str, ...]
    row_shape: tuple[int, ...]
    fill_value: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def derived_columns(page_tokens: int) -> tuple[Column, ...]:
    """The derived arrays; ``num_tokens`` is 0 in rows without a page, unknown tokens are -1."""
    columns = (
        ("key", "uint8", ("row", "byte"), (32,), 0),
        ("parent", "uint8", ("row", "byte"), (32,), 0),
        ("tokens", "int32", ("row", "token"), (page_tokens,), -1),
        ("num_tokens", "int32", ("row",), (), 0),
    )
    return tuple(
        Column(name=name, dtype=dtype, dimensions=dimensions, row_shape=shape, fill_value=fill)
        for name, dtype, dimensions, shape, fill in columns
    )


def lane_name(lane: int) -> str:
    """Folder of a lane within the store."""
    return f"lane-{lane:04d}"


def lane_number(name: str) -> int | None:
    """The lane that a folder's name names, if it names one."""
    digits = name.removeprefix("lane-")
    return int(digits) if digits.isdigit() and lane_name(int(digits)) == name else None


def group_name(spec: KVSpec) -> str:
    """Folder of a layer group within a lane."""
    return f"group-{spec.group}"


def chunk_name(segment: int, num_dimensions: int) -> str:
    """File of a segment within an array of so many dimensions."""
    return ".".join(["c", str(segment)] + ["0"] * (num_dimensions - 1))


def segment_number(name: str, num_dimensions: int) -> int | None:
    """The segment that a file's name names, if it names one."""
    parts = name.split(".")
    if len(parts) < 2 or not parts[1].isdecimal() or len(parts[1]) > 12:
        return None
    return int(parts[1]) if chunk_name(int(parts[1]), num_dimensions) == name else None


def segment_index(geometry: Geometry, layer_nbytes: LayerSizes) -> bytes:
    """The index that ends a segment file, with its CRC32C.

    Args:
        geometry: Sizes in the file.
        layer_nbytes: Payload bytes of each layer of the pages in the file, ``(page, layer)``.
    """
    index = np.full((geometry.rows * geometry.num_layers, 2), NO_ENTRY, "<u8")
    used = layer_nbytes.size
    index[:used, 1] = layer_nbytes.reshape(-1) + np.uint64(4)
    index[:used, 0] = np.cumsum(index[:used, 1]) - index[:used, 1]
    return index.tobytes() + crc32c(index).to_bytes(4, "little")


def crc32c(data: "npt.NDArray[Any]") -> int:
    """CRC32C of a C-contiguous array's bytes, without a copy."""
    return int(google_crc32c.value(data))
