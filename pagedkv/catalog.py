"""The catalogue: one record a row, which says what the row's page is and how to verify it. No I/O.

A record binds its page: it names its own row, spec and codec, the page's key, and the CRC32C of
every layer. It is the authority; the derived columns repeat it for plain Zarr readers.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.codec import Bytes
from pagedkv.format import Geometry, LayerCrcs, PageEntry, crc32c, derived_columns
from pagedkv.spec import PageKey

RECORD_MAGIC = b"PKV1"
HAS_PARENT, HAS_TOKENS, IS_TAIL = 1, 2, 4
"""Bits of a record's flags."""


def pack_catalog(
    geometry: Geometry,
    segment: int,
    entries: Sequence[PageEntry],
    crcs: LayerCrcs,
    *,
    store_tokens: bool,
) -> Bytes:
    """The catalogue's chunk of a segment: records of ``entries``, zeros, the chunk's CRC32C.

    Without ``store_tokens`` no token id goes into it.
    """
    chunk = np.zeros(geometry.catalog_nbytes, np.uint8)
    records = chunk[:-4].view(geometry.record_dtype)
    for number, entry in enumerate(entries):
        record = records[number]
        flags = IS_TAIL if entry.num_tokens < geometry.page_tokens else 0
        if entry.parent is not None:
            flags |= HAS_PARENT
            record["parent"] = np.frombuffer(entry.parent, np.uint8)
        if entry.tokens is not None and store_tokens:
            flags |= HAS_TOKENS
            record["tokens"][: entry.num_tokens] = entry.tokens
        record["flags"] = flags
        record["key"] = np.frombuffer(entry.key, np.uint8)
        record["num_tokens"] = entry.num_tokens
        record["salt_sha256"] = np.frombuffer(hashlib.sha256(entry.salt).digest(), np.uint8)
    used = records[: len(entries)]
    used["magic"] = RECORD_MAGIC
    used["row"] = segment * geometry.rows + np.arange(len(entries), dtype=np.uint64)
    used["created_ns"] = time.time_ns()
    used["tag"] = np.frombuffer(geometry.tag, np.uint8)
    used["layer_crcs"] = crcs
    rows = chunk[:-4].reshape(geometry.rows, -1)
    for number in range(len(entries)):
        used["crc"][number] = crc32c(rows[number, :-4])
    chunk[-4:] = np.frombuffer(crc32c(chunk[:-4]).to_bytes(4, "little"), np.uint8)
    return chunk


def unpack_catalog(
    geometry: Geometry, segment: int, chunk: bytes
) -> "tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]":
    """The records of a catalogue chunk, one a row, and which of them hold a page.

    A record counts if its magic, row, tag, token count and CRC32C are right.

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
    lines = raw[:-4].reshape(geometry.rows, -1)
    crcs = records["crc"].tolist()
    for number in np.flatnonzero(holds).tolist():
        holds[number] = crc32c(lines[number, :-4]) == crcs[number]
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
