"""Repair: writes what a check has found right, without what it has found wrong.

Only for who holds the lane's lock. Every step leaves a store that opens: a power cut in between
leaves findings for the next ``verify``, never a wrong page.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import files
from pagedkv.catalog import derived_chunks
from pagedkv.evictions import EVICTED_DIMENSIONS, EVICTED_NBYTES, EvictionReason, EvictionRing
from pagedkv.findings import Damage
from pagedkv.format import EVICTED, METADATA, chunk_name
from pagedkv.segment_check import (
    SegmentCheck,
    SegmentPlace,
    expected_index,
    page_extents,
    seal_catalog,
)
from pagedkv.spec import PageKey

_COPY_NBYTES = 8 * 2**20


def mend_segment(check: SegmentCheck) -> None:
    """Drop exactly the lost pages of a segment, and rebuild what is derived from the others.

    A segment without a good page is removed.

    Raises:
        OSError: The system could not write.
    """
    place = check.place
    if not check.good.any():
        _remove_segment(place)
        _remember(check)
        return
    loses = check.num_pages > int(check.good.sum())
    if loses or check.has(Damage.CATALOG):
        _write_catalog(check)
    if loses or check.has(Damage.INDEX):
        _write_pages(check)
    _write_columns(check)
    _remember(check)


def write_document(folder: Path, document: dict[str, Any]) -> None:
    """Write the ``zarr.json`` of a node durably; the folder is made if it is missing."""
    files.make_dir(folder)
    files.write_atomic(folder / METADATA, [json.dumps(document, indent=2).encode()])
    files.sync_dir(folder)


def _remove_segment(place: SegmentPlace) -> None:
    files.remove(place.catalog)  # first: bytes without a record do not exist
    files.sync_dir(place.catalog.parent)
    for path in (place.kv, *place.columns().values()):
        with contextlib.suppress(IsADirectoryError):  # of somebody else: left alone
            files.remove(path)


def _remember(check: SegmentCheck) -> None:
    """Note in the eviction ring which pages were dropped, unless the store would grow by that."""
    place, lost = check.place, np.flatnonzero(check.held & ~check.good)
    path = place.path / EVICTED
    if not len(lost) or not files.is_folder(path):
        return
    _, sizes = page_extents(place.geometry, check.records, lost)
    has_chunk = chunk_name(0, len(EVICTED_DIMENSIONS)) in files.file_sizes(path)
    if has_chunk or int(sizes.sum()) >= EVICTED_NBYTES:
        keys = [PageKey(key.tobytes()) for key in check.records["key"][lost]]
        EvictionRing(path).add(keys, EvictionReason.DAMAGED, time.time_ns())


def _write_catalog(check: SegmentCheck) -> None:
    geometry, path = check.place.geometry, check.place.catalog
    body = np.zeros(geometry.catalog_nbytes - 4, np.uint8)
    body.view(geometry.record_dtype)[check.good] = check.records[check.good]
    files.write_atomic(path, [seal_catalog(body)])
    files.sync_dir(path.parent)


def _write_pages(check: SegmentCheck) -> None:
    """A new segment file: the bytes up to the last good page, and an index of the good pages."""
    geometry, path = check.place.geometry, check.place.kv
    offsets, sizes = page_extents(geometry, check.records, np.flatnonzero(check.good))
    end = int((offsets + sizes).max())
    buffer = np.empty(min(end, _COPY_NBYTES), np.uint8)
    with files.reading(path) as source, files.new_file(path) as (fd, temp):
        for start in range(0, end, _COPY_NBYTES):
            part = buffer[: end - start]
            files.write_all(fd, part[: files.pread_into(source, part, start)])
        files.write_all(fd, expected_index(geometry, check.records, check.good))
        files.sync_file(fd)
        files.replace(temp, path)
    files.sync_dir(path.parent)


def _write_columns(check: SegmentCheck) -> None:
    chunks = derived_chunks(check.place.geometry, check.records, check.good)
    for name, path in check.place.columns().items():
        data = np.ascontiguousarray(chunks[name]).reshape(-1).view(np.uint8)
        files.write_atomic(path, [data], sync=False)
