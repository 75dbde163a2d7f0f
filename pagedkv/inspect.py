"""``store_info``: what is in a store, for ``pagedkv info``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import files, lane_document
from pagedkv.catalog import HAS_TOKENS, IS_TAIL
from pagedkv.evictions import EvictedPage, EvictionRing
from pagedkv.format import EVICTED, FORMAT_VERSION, group_name, lane_name
from pagedkv.header import StoreHeader
from pagedkv.lane_access import is_in_use, lanes_of
from pagedkv.spec import KVSpec
from pagedkv.stored_pages import PrefixTree, StoredPages, read_store

_NUM_EVICTIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneInfo:
    """One lane of a store.

    Args:
        lane: Its number.
        is_held: Whether a writer holds it now.
        last_writer: Who holds it, or held it last.
        num_segments: Segments of all groups.
        num_pages: Pages of all groups.
        nbytes: Bytes of its files.
    """

    lane: int
    is_held: bool
    last_writer: str
    num_segments: int
    num_pages: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """The pages of one spec in all lanes.

    Args:
        spec: What the pages look like.
        segment_rows: Rows of a segment.
        num_segments: Segments.
        num_rows: Rows that hold a page; one that two lanes hold counts twice.
        num_pages: Different pages.
        num_full_pages: Pages with all their tokens.
        num_tails: Saved tails.
        num_opaque_pages: Pages whose token ids are not known.
        num_dead_pages: Pages before which a page is missing: no prompt finds them.
        pool_nbytes: Bytes that the rows' pages have in the pool.
        kv_nbytes: Bytes of the segment files.
        dead_nbytes: Bytes in segment files that belong to no page.
    """

    spec: KVSpec
    segment_rows: int
    num_segments: int
    num_rows: int
    num_pages: int
    num_full_pages: int
    num_tails: int
    num_opaque_pages: int
    num_dead_pages: int
    pool_nbytes: int
    kv_nbytes: int
    dead_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """A store.

    Args:
        path: Its folder.
        format_version: Version of its format.
        codec: How the pages' numbers became bytes, as in its header.
        store_tokens: Whether it keeps token ids.
        max_nbytes: Bound of its bytes, if there is one.
        nbytes: Bytes of all its files.
        oldest_ns: When its oldest page was stored, nanoseconds since 1970; None without pages.
        newest_ns: The same for its newest page.
        num_torn_chunks: Segments left out: their catalogue chunk is torn (``pagedkv verify``).
        groups: Its layer groups.
        lanes: Its lanes.
        evictions: The pages that left it last, newest first.
    """

    path: str
    format_version: int
    codec: dict[str, Any]
    store_tokens: bool
    max_nbytes: int | None
    nbytes: int
    oldest_ns: int | None
    newest_ns: int | None
    num_torn_chunks: int
    groups: tuple[GroupInfo, ...]
    lanes: tuple[LaneInfo, ...]
    evictions: tuple[EvictedPage, ...]

    @property
    def fill(self) -> float | None:
        """Share of the bound that is in use."""
        return None if self.max_nbytes is None else self.nbytes / self.max_nbytes


def store_info(path: str | os.PathLike[str]) -> StoreInfo:
    """Figures of the store at ``path``.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
    """
    place, header, groups = read_store(path)
    with files.translated(place, "read the store"):
        evictions = _last_evictions(place, header)
        lanes = tuple(_lane_info(place, lane, groups) for lane in lanes_of(place))
        nbytes = files.tree_nbytes(place)
    created = np.concatenate([pages.created_ns for pages in groups])
    return StoreInfo(
        path=str(place),
        format_version=FORMAT_VERSION,
        codec=header.codec.to_dict(),
        store_tokens=header.store_tokens,
        max_nbytes=header.max_nbytes,
        nbytes=nbytes,
        oldest_ns=int(created.min()) if len(created) else None,
        newest_ns=int(created.max()) if len(created) else None,
        num_torn_chunks=sum(pages.num_torn_chunks for pages in groups),
        groups=tuple(_group_info(pages) for pages in groups),
        lanes=lanes,
        evictions=evictions,
    )


def _group_info(pages: StoredPages) -> GroupInfo:
    tree = PrefixTree(pages)
    first = np.fromiter(tree.first.values(), np.int64, len(tree.first))
    is_tail = pages.flags[first] & IS_TAIL != 0
    return GroupInfo(
        spec=pages.spec,
        segment_rows=pages.segment_rows,
        num_segments=len(pages.segments),
        num_rows=len(pages.keys),
        num_pages=len(first),
        num_full_pages=int((~is_tail).sum()),
        num_tails=int(is_tail.sum()),
        num_opaque_pages=int((pages.flags[first] & HAS_TOKENS == 0).sum()),
        num_dead_pages=tree.num_dead_pages(),
        pool_nbytes=len(pages.keys) * pages.spec.page_nbytes,
        kv_nbytes=pages.kv_nbytes,
        dead_nbytes=pages.dead_nbytes,
    )


def _last_evictions(place: Path, header: StoreHeader) -> tuple[EvictedPage, ...]:
    found: list[EvictedPage] = []
    for lane in lanes_of(place):
        for spec in header.specs:
            path = place / lane_name(lane) / group_name(spec) / EVICTED
            found += EvictionRing(path).entries()
    found.sort(key=lambda page: page.time_ns, reverse=True)
    return tuple(found[:_NUM_EVICTIONS])


def _lane_info(place: Path, lane: int, groups: list[StoredPages]) -> LaneInfo:
    path = place / lane_name(lane)
    return LaneInfo(
        lane=lane,
        is_held=is_in_use(path),
        last_writer=lane_document.read(place, lane).last_writer,
        num_segments=sum(pages.segments.count(lane) for pages in groups),
        num_pages=sum(int((pages.lanes == lane).sum()) for pages in groups),
        nbytes=files.tree_nbytes(path),
    )
