"""``StoredPages``: what the catalogues of a store say of its pages, without opening the store.

Reads the catalogues and no page. Nothing is locked: the store may be in use.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import HAS_PARENT, unpack_catalog
from pagedkv.errors import StoreError
from pagedkv.format import (
    CATALOG,
    CATALOG_DIMENSIONS,
    KV,
    KV_DIMENSIONS,
    Geometry,
    chunk_name,
    group_name,
    lane_name,
)
from pagedkv.header import StoreHeader
from pagedkv.lane import chunk_sizes
from pagedkv.lane_access import lanes_of
from pagedkv.root import read_header
from pagedkv.segment_check import page_extents
from pagedkv.spec import KVSpec

FIRST_TOKENS = 8
"""Token ids that are kept of each page."""


class Start(StrEnum):
    """How a run of pages begins."""

    FIRST = "first"
    AFTER = "after"
    OPAQUE = "opaque"
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPages:
    """The good records of one group in all lanes, a row each, and sizes on the way.

    ``torn`` names the segments that count for nothing, as lane and number: the catalogue chunk is
    torn, or the segment's file gone.
    """

    spec: KVSpec
    group: int
    segment_rows: int
    records: npt.NDArray[Any]
    keys: list[bytes]
    parents: list[bytes | None]
    flags: npt.NDArray[np.uint32]
    num_tokens: npt.NDArray[np.uint32]
    created_ns: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    lanes: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    segments: tuple[int, ...]
    kv_nbytes: int
    dead_nbytes: int
    torn: tuple[tuple[int, int], ...]

    @property
    def num_torn_chunks(self) -> int:
        """How many of these there are."""
        return len(self.torn)


def read_store(path: str | os.PathLike[str]) -> tuple[Path, StoreHeader, list[StoredPages]]:
    """The folder of the store at ``path``, its header, and the pages of each of its specs.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
    """
    place = Path(path).absolute()
    header = read_header(place)
    if header is None:
        raise StoreError(f"there is no store at {place}")
    with files.translated(place, "read the store"):
        lanes = lanes_of(place)
        groups = [_read_group(place, header, group, lanes) for group in range(len(header.specs))]
    return place, header, groups


def _read_group(place: Path, header: StoreHeader, group: int, lanes: list[int]) -> StoredPages:
    spec, rows = header.specs[group], header.segment_rows[group]
    geometry = Geometry.of(spec, header.codec, rows)
    parts: list[npt.NDArray[Any]] = []
    part_lanes: list[int] = []
    torn: list[tuple[int, int]] = []
    kv_nbytes = dead_nbytes = 0
    for lane in lanes:
        folder = place / lane_name(lane) / group_name(spec)
        chunks = chunk_sizes(folder / CATALOG, len(CATALOG_DIMENSIONS))
        sizes = chunk_sizes(folder / KV, len(KV_DIMENSIONS))  # a writer makes a segment first
        kv_nbytes += sum(sizes.values())
        dead_nbytes += sum(sizes.values())
        for number in sorted(chunks):
            try:
                name = chunk_name(number, len(CATALOG_DIMENSIONS))
                chunk = files.read_bytes(folder / CATALOG / name)
                records, holds = unpack_catalog(geometry, number, chunk)
            except ValueError:
                torn.append((lane, number))
                continue
            except OSError as error:
                if files.is_vanished(error):  # its pages were evicted meanwhile
                    continue
                raise
            if number not in sizes:
                torn.append((lane, number))
                continue
            _, nbytes = page_extents(geometry, records, np.flatnonzero(holds))
            dead_nbytes -= min(sizes[number], int(nbytes.sum()) + geometry.index_nbytes)
            parts.append(records[holds])
            part_lanes.append(lane)
    records = np.concatenate(parts) if parts else np.zeros(0, geometry.record_dtype)
    raw_keys, raw_parents = records["key"].tobytes(), records["parent"].tobytes()
    has_parent = (records["flags"] & HAS_PARENT != 0).tolist()
    return StoredPages(
        spec=spec,
        group=group,
        segment_rows=rows,
        records=records,
        keys=[raw_keys[at : at + 32] for at in range(0, len(raw_keys), 32)],
        parents=[
            raw_parents[32 * at : 32 * at + 32] if held else None
            for at, held in enumerate(has_parent)
        ],
        flags=records["flags"],
        num_tokens=records["num_tokens"],
        created_ns=records["created_ns"],
        tokens=records["tokens"][:, :FIRST_TOKENS],
        lanes=np.repeat(np.array(part_lanes, np.int64), [len(part) for part in parts]),
        rows=records["row"].astype(np.int64),
        segments=tuple(part_lanes),
        kv_nbytes=kv_nbytes,
        dead_nbytes=dead_nbytes,
        torn=tuple(torn),
    )


class PrefixTree:
    """Which page comes after which, by position in ``StoredPages``.

    Args:
        pages: The pages.

    Attributes:
        first: Position of each key's first row.
        starts: Pages that come after no other.
        children: Pages that come after one.
    """

    def __init__(self, pages: StoredPages) -> None:
        self.pages = pages
        self.first: dict[bytes, int] = {}
        for position, key in enumerate(pages.keys):
            self.first.setdefault(key, position)
        root_key = pages.spec.root_key()
        self.children: dict[int, list[int]] = {}
        self.starts: dict[int, Start] = {}
        for position in self.first.values():
            parent = pages.parents[position]
            before = None if parent is None else self.first.get(parent)
            if parent is None:
                self.starts[position] = Start.OPAQUE
            elif before is not None:
                self.children.setdefault(before, []).append(position)
            else:
                is_first = parent == root_key
                self.starts[position] = Start.FIRST if is_first else Start.ORPHAN
        self._break_circles()

    def num_dead_pages(self) -> int:
        """Pages that are orphans, or come after one."""
        return sum(
            1 for at, start in self.starts.items() if start is Start.ORPHAN for _ in self._after(at)
        )

    def _after(self, position: int) -> Iterator[int]:
        """A page and all that come after it."""
        work = [position]
        while work:
            at = work.pop()
            yield at
            work += self.children.get(at, [])

    def _break_circles(self) -> None:
        """Let pages that come after themselves, which nothing forbids, begin somewhere."""
        reached = {page for at in self.starts for page in self._after(at)}
        for position in self.first.values():
            if position not in reached:
                parent = self.pages.parents[position]
                assert parent is not None
                self.children[self.first[parent]].remove(position)
                self.starts[position] = Start.ORPHAN
                reached.update(self._after(position))

    def age(self, position: int) -> tuple[int, int, int]:
        """What sorts pages by the time when they were stored."""
        pages = self.pages
        return (
            int(pages.created_ns[position]),
            int(pages.lanes[position]),
            int(pages.rows[position]),
        )
