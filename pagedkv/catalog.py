"""The catalogue: one record a row, which says what the row's page is and how to verify it. No I/O.

A record binds its page: it names its own row, spec and codec, the page's key, and the CRC32C of
every layer. It is the authority; the derived columns repeat it for plain Zarr readers.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.codec import Bytes
from pagedkv.format import Geometry, PageEntry, crc32c, derived_columns
from pagedkv.segment_map import SegmentMap
from pagedkv.spec import PageKey

Families = npt.NDArray[np.uint64]
"""One number for each row, by ``family_of``."""

RECORD_MAGIC = b"PKV1"
HAS_PARENT, HAS_TOKENS, IS_TAIL = 1, 2, 4
"""Bits of a record's flags."""
NO_FAMILY = 0


def pack_catalog(
    geometry: Geometry,
    segment: int,
    entries: Sequence[PageEntry],
    segment_map: SegmentMap,
    *,
    store_tokens: bool,
) -> Bytes:
    """The catalogue's chunk of a segment: records of ``entries``, zeros, the chunk's CRC32C.

    Without ``store_tokens`` no token id goes into it.
    """
    count = len(entries)
    chunk = np.zeros(geometry.catalog_nbytes, np.uint8)
    records = chunk[:-4].view(geometry.record_dtype)[:count]
    records["magic"] = RECORD_MAGIC
    records["row"] = segment * geometry.rows + np.arange(count, dtype=np.uint64)
    records["created_ns"] = time.time_ns()
    records["tag"] = np.frombuffer(geometry.tag, np.uint8)
    num_tokens = np.array([entry.num_tokens for entry in entries], np.uint32)
    records["num_tokens"] = num_tokens
    records["key"] = _keys(entry.key for entry in entries)
    with_parent = [number for number, entry in enumerate(entries) if entry.parent is not None]
    records["parent"][with_parent] = _keys(entries[number].parent for number in with_parent)
    with_tokens = [
        n for n, entry in enumerate(entries) if store_tokens and entry.tokens is not None
    ]
    for number in with_tokens:
        records["tokens"][number, : num_tokens[number]] = entries[number].tokens
    flags = np.where(num_tokens < geometry.page_tokens, IS_TAIL, 0).astype(np.uint32)
    flags[with_parent] |= HAS_PARENT
    flags[with_tokens] |= HAS_TOKENS
    records["flags"] = flags
    salts = {salt: hashlib.sha256(salt).digest() for salt in {entry.salt for entry in entries}}
    records["salt_sha256"] = _keys(salts[entry.salt] for entry in entries)
    records["layer_crcs"] = segment_map.crcs
    if segment_map.bounds is not None:
        records["offset"] = segment_map.bounds[:, 0]
        records["layer_nbytes"] = np.diff(segment_map.bounds, axis=1) - 4
    return _sealed(geometry, chunk, count)


def repack_catalog(
    geometry: Geometry, segment: int, records: "npt.NDArray[Any]", segment_map: SegmentMap
) -> Bytes:
    """The catalogue's chunk of a segment to which pages were moved, with their old ``records``."""
    count = len(records)
    chunk = np.zeros(geometry.catalog_nbytes, np.uint8)
    moved = chunk[:-4].view(geometry.record_dtype)[:count]
    moved[...] = records
    moved["row"] = segment * geometry.rows + np.arange(count, dtype=np.uint64)
    if segment_map.bounds is not None:
        moved["offset"] = segment_map.bounds[:, 0]
    return _sealed(geometry, chunk, count)


def _sealed(geometry: Geometry, chunk: Bytes, count: int) -> Bytes:
    """The chunk with the checksums of its first ``count`` records, and its own."""
    records = chunk[:-4].view(geometry.record_dtype)[:count]
    rows = chunk[:-4].reshape(geometry.rows, -1)[:count, :-4]
    records["crc"] = [crc32c(row) for row in rows]
    chunk[-4:] = np.frombuffer(crc32c(chunk[:-4]).to_bytes(4, "little"), np.uint8)
    return chunk


def map_of(
    geometry: Geometry, records: "npt.NDArray[Any]", holds: "npt.NDArray[np.bool_]"
) -> SegmentMap:
    """What the records of a segment say of where its pages are, up to the last that there is.

    Raises:
        ValueError: A place cannot be.
    """
    used = int(np.flatnonzero(holds)[-1]) + 1
    bounds = None
    if not geometry.fixed_size:
        sizes = records["layer_nbytes"][:used].astype(np.int64) + 4
        if int(sizes.max()) > geometry.chunk_nbytes:
            raise ValueError(
                f"it has a layer of {sizes.max()} bytes, at most {geometry.chunk_nbytes}"
            )
        bounds = np.zeros((used, geometry.num_layers + 1), np.int64)
        np.cumsum(sizes, axis=1, out=bounds[:, 1:])
        bounds += records["offset"][:used].astype(np.int64)[:, None]
    return SegmentMap(
        holds=holds[:used].copy(), crcs=records["layer_crcs"][:used].copy(), bounds=bounds
    )


def _keys(keys: "Iterable[bytes | None]") -> "npt.NDArray[np.uint8]":
    joined = b"".join(key for key in keys if key is not None)
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def unpack_catalog(
    geometry: Geometry, segment: int, chunk: bytes
) -> "tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]":
    """The records of a catalogue chunk, one a row, and which of them hold a page.

    A record counts if its magic, row, tag and token count are right. The chunk's CRC32C vouches for
    its bytes, as the record's own does when it is read alone.

    Raises:
        ValueError: The chunk is torn (wrong length or CRC32C) or belongs to another place or store.
    """
    if len(chunk) != geometry.catalog_nbytes:
        raise ValueError(f"it has {len(chunk)} bytes instead of {geometry.catalog_nbytes}")
    raw = np.frombuffer(chunk, np.uint8)
    if crc32c(raw[:-4]) != int.from_bytes(chunk[-4:], "little"):
        raise ValueError("its CRC32C is wrong")
    records = raw[:-4].view(geometry.record_dtype)
    rows = segment * geometry.rows + np.arange(geometry.rows, dtype=np.uint64)
    holds = (records["magic"] == RECORD_MAGIC) & (records["row"] == rows)
    holds &= (records["tag"] == np.frombuffer(geometry.tag, np.uint8)).all(axis=1)
    holds &= (records["num_tokens"] >= 1) & (records["num_tokens"] <= geometry.page_tokens)
    if not holds.any():
        raise ValueError("its records are those of another place or store")
    return records, holds


def entry_of(record: "np.void") -> PageEntry:
    """The page entry that a record describes; its salt cannot be recovered."""
    flags, num_tokens = int(record["flags"]), int(record["num_tokens"])
    return PageEntry(
        key=PageKey(record["key"].tobytes()),
        num_tokens=num_tokens,
        parent=PageKey(record["parent"].tobytes()) if flags & HAS_PARENT else None,
        tokens=record["tokens"][:num_tokens].astype(np.int32) if flags & HAS_TOKENS else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinship:
    """What the pages of a segment follow, for those who look for a page's children.

    Args:
        families: ``family_of`` parent and salt of each row's page, ``(row,)`` uint64; ``NO_FAMILY``
            where there is no page, or its parent or tokens are not known.
        has_nameless_tails: Whether there are saved tails without tokens.
    """

    families: Families
    has_nameless_tails: bool


def kinship_of(records: "npt.NDArray[Any]", holds: "npt.NDArray[np.bool_]") -> Kinship:
    """The kinship of the pages that these records describe."""
    flags = records["flags"]
    is_known = holds & (flags & HAS_PARENT != 0) & (flags & HAS_TOKENS != 0)
    families = np.full(len(records), NO_FAMILY, np.uint64)
    if is_known.any():
        parents, salts = (_first_8(records[name]) for name in ("parent", "salt_sha256"))
        families[is_known] = (parents ^ salts)[is_known]
    is_nameless = holds & (flags & IS_TAIL != 0) & (flags & HAS_TOKENS == 0)
    return Kinship(families=families, has_nameless_tails=bool(is_nameless.any()))


def family_of(parent: PageKey, salt: bytes) -> int:
    """A number that pages with the same parent and salt have in common, and others hardly ever."""
    pair = np.frombuffer(parent[:8] + hashlib.sha256(salt).digest()[:8], "<u8")
    return int(pair[0] ^ pair[1])


def _first_8(hashes: "npt.NDArray[np.uint8]") -> Families:
    """The first eight bytes of each row, as a number."""
    return np.ascontiguousarray(hashes[:, :8]).view("<u8").reshape(-1)


def ids_of(record: "np.void") -> bytes | None:
    """The token ids of a record's page as int32, in bytes; None if it does not tell them."""
    if not int(record["flags"]) & HAS_TOKENS:
        return None
    return bytes(record["tokens"].tobytes()[: 4 * int(record["num_tokens"])])


def derived_chunks(
    geometry: Geometry, records: "npt.NDArray[Any]", holds: "npt.NDArray[np.bool_]"
) -> "dict[str, npt.NDArray[Any]]":
    """The chunk of each derived column, ``(row, …)``, that says what the records say."""
    chunks: dict[str, npt.NDArray[Any]] = {}
    for column in derived_columns(geometry.page_tokens):
        chunk = np.full((geometry.rows, *column.row_shape), column.fill_value, column.dtype)
        chunk[holds] = records[column.name][holds]
        chunks[column.name] = chunk
    counts = np.where(holds & (records["flags"] & HAS_TOKENS != 0), records["num_tokens"], 0)
    chunks["tokens"][np.arange(geometry.page_tokens) >= counts[:, None]] = -1
    return chunks
