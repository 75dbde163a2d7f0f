"""What is in a store: figures for ``pagedkv info``, the pages as a prefix tree for ``pagedkv ls``.

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
from pagedkv.catalog import HAS_PARENT, HAS_TOKENS, IS_TAIL, unpack_catalog
from pagedkv.errors import StoreError
from pagedkv.format import (
    CATALOG,
    FORMAT_VERSION,
    KV,
    Geometry,
    chunk_name,
    group_name,
    lane_name,
    segment_number,
)
from pagedkv.header import StoreHeader
from pagedkv.lane_access import is_in_use
from pagedkv.lane_lock import holder_of, lanes_of
from pagedkv.root import read_header
from pagedkv.segment_check import index_nbytes, page_extents
from pagedkv.spec import KVSpec, PageKey

_FIRST_TOKENS = 8


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

    @property
    def fill(self) -> float | None:
        """Share of the bound that is in use."""
        return None if self.max_nbytes is None else self.nbytes / self.max_nbytes


class Start(StrEnum):
    """How a run of pages begins."""

    FIRST = "first"
    BRANCH = "branch"
    OPAQUE = "opaque"
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """Pages that follow one another, up to where prefixes part.

    Args:
        group: Index into the store's specs.
        level: Runs before it.
        start: ``FIRST``: of a prompt; ``BRANCH``: after the run with the key ``parent``;
            ``OPAQUE``: a page that names no other; ``ORPHAN``: the page before it is gone.
        parent: Key of the page before it, if it names one.
        first_key: Key of its first page.
        last_key: Key of its last page.
        depth: Pages before it.
        num_pages: Its pages.
        start_token: Tokens before it.
        num_tokens: Its tokens.
        ends_in_tail: Whether its last page is a saved tail.
        first_tokens: Its first token ids, if they are kept.
        created_ns: When its first page was stored, nanoseconds since 1970.
        lane: The lane of its first page.
        row: The row of its first page.
    """

    group: int
    level: int
    start: Start
    parent: PageKey | None
    first_key: PageKey
    last_key: PageKey
    depth: int
    num_pages: int
    start_token: int
    num_tokens: int
    ends_in_tail: bool
    first_tokens: tuple[int, ...]
    created_ns: int
    lane: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The prefix tree of a store, depth first.

    Args:
        path: The store's folder.
        num_pages: Different pages of all groups.
        num_runs: Runs that there are.
        runs: Runs that are listed: all, or as many as were asked for.
    """

    path: str
    num_pages: int
    num_runs: int
    runs: tuple[PageRun, ...]


def store_info(path: str | os.PathLike[str]) -> StoreInfo:
    """Figures of the store at ``path``.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
    """
    place = Path(path).absolute()
    header = _header(place)
    with files.translated(place, "read the store"):
        numbers = lanes_of(place)
        groups = [_read_group(place, header, group, numbers) for group in range(len(header.specs))]
        lanes = tuple(_lane_info(place, lane, groups) for lane in numbers)
        nbytes = _tree_nbytes(place)
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
        groups=tuple(pages.info() for pages in groups),
        lanes=lanes,
    )


def list_runs(
    path: str | os.PathLike[str], *, single: bool = False, limit: int | None = None
) -> Listing:
    """The pages of the store at ``path`` as a prefix tree.

    Args:
        path: The store's folder.
        single: Let every page be a run of its own.
        limit: How many runs to list.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
        ValueError: ``limit`` is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"the limit is {limit}: it must be 0 or more")
    place = Path(path).absolute()
    header = _header(place)
    with files.translated(place, "read the store"):
        lanes = lanes_of(place)
        groups = [_read_group(place, header, group, lanes) for group in range(len(header.specs))]
    runs: list[PageRun] = []
    num_runs = num_pages = 0
    for pages in groups:
        tree = _Tree(pages)
        num_pages += len(tree.first)
        for run in tree.runs(single=single):
            num_runs += 1
            if limit is None or num_runs <= limit:
                runs.append(run)
    return Listing(path=str(place), num_pages=num_pages, num_runs=num_runs, runs=tuple(runs))


def _header(place: Path) -> StoreHeader:
    header = read_header(place)
    if header is None:
        raise StoreError(f"there is no store at {place}")
    return header


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pages:
    """The good records of one group in all lanes, a row each, and sizes on the way."""

    spec: KVSpec
    group: int
    segment_rows: int
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
    num_torn_chunks: int

    def info(self) -> GroupInfo:
        tree = _Tree(self)
        first = np.fromiter(tree.first.values(), np.int64, len(tree.first))
        is_tail = self.flags[first] & IS_TAIL != 0
        return GroupInfo(
            spec=self.spec,
            segment_rows=self.segment_rows,
            num_segments=len(self.segments),
            num_rows=len(self.keys),
            num_pages=len(first),
            num_full_pages=int((~is_tail).sum()),
            num_tails=int(is_tail.sum()),
            num_opaque_pages=int((self.flags[first] & HAS_TOKENS == 0).sum()),
            num_dead_pages=tree.num_dead_pages(),
            pool_nbytes=len(self.keys) * self.spec.page_nbytes,
            kv_nbytes=self.kv_nbytes,
            dead_nbytes=self.dead_nbytes,
        )


def _read_group(place: Path, header: StoreHeader, group: int, lanes: list[int]) -> _Pages:
    spec, rows = header.specs[group], header.segment_rows[group]
    geometry = Geometry.of(spec, header.codec, rows)
    parts: list[npt.NDArray[Any]] = []
    part_lanes: list[int] = []
    kv_nbytes = dead_nbytes = num_torn_chunks = 0
    for lane in lanes:
        folder = place / lane_name(lane) / group_name(spec)
        sizes = _chunk_sizes(folder / KV, 6)
        kv_nbytes += sum(sizes.values())
        dead_nbytes += sum(sizes.values())
        for number in sorted(_chunk_sizes(folder / CATALOG, 2)):
            try:
                chunk = files.read_bytes(folder / CATALOG / chunk_name(number, 2))
                records, holds = unpack_catalog(geometry, number, chunk)
            except ValueError:
                num_torn_chunks += 1
                continue
            except OSError as error:
                if files.is_vanished(error):  # its pages were evicted meanwhile
                    continue
                raise
            if number not in sizes:
                num_torn_chunks += 1
                continue
            _, nbytes = page_extents(geometry, records, np.flatnonzero(holds))
            dead_nbytes -= min(sizes[number], int(nbytes.sum()) + index_nbytes(geometry))
            parts.append(records[holds])
            part_lanes.append(lane)
    records = np.concatenate(parts) if parts else np.zeros(0, geometry.record_dtype)
    raw_keys, raw_parents = records["key"].tobytes(), records["parent"].tobytes()
    has_parent = (records["flags"] & HAS_PARENT != 0).tolist()
    return _Pages(
        spec=spec,
        group=group,
        segment_rows=rows,
        keys=[raw_keys[at : at + 32] for at in range(0, len(raw_keys), 32)],
        parents=[
            raw_parents[32 * at : 32 * at + 32] if held else None
            for at, held in enumerate(has_parent)
        ],
        flags=records["flags"],
        num_tokens=records["num_tokens"],
        created_ns=records["created_ns"],
        tokens=records["tokens"][:, :_FIRST_TOKENS],
        lanes=np.repeat(np.array(part_lanes, np.int64), [len(part) for part in parts]),
        rows=records["row"].astype(np.int64),
        segments=tuple(part_lanes),
        kv_nbytes=kv_nbytes,
        dead_nbytes=dead_nbytes,
        num_torn_chunks=num_torn_chunks,
    )


class _Tree:
    """Which page comes after which, by position in ``_Pages``."""

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self.first: dict[bytes, int] = {}
        for position, key in enumerate(pages.keys):
            self.first.setdefault(key, position)
        root_key = pages.spec.root_key()
        self._children: dict[int, list[int]] = {}
        self._starts: dict[int, Start] = {}
        for position in self.first.values():
            parent = pages.parents[position]
            before = None if parent is None else self.first.get(parent)
            if parent is None:
                self._starts[position] = Start.OPAQUE
            elif before is not None:
                self._children.setdefault(before, []).append(position)
            else:
                is_first = parent == root_key
                self._starts[position] = Start.FIRST if is_first else Start.ORPHAN

    def num_dead_pages(self) -> int:
        """Pages that are orphans, or come after one."""
        dead = [at for at, start in self._starts.items() if start is Start.ORPHAN]
        count = 0
        while dead:
            count += 1
            dead += self._children.get(dead.pop(), [])
        return count

    def runs(self, *, single: bool) -> Iterator[PageRun]:
        """All runs, depth first; what is older comes first."""
        pages = self._pages
        work = [(at, start, 0, 0, 0) for at, start in self._starts.items()]
        work.sort(key=lambda item: self._age(item[0]), reverse=True)
        while work:
            at, start, level, depth, start_token = work.pop()
            run = [at]
            after = self._children.get(at, [])
            while len(after) == 1 and not single:
                run.append(after[0])
                after = self._children.get(run[-1], [])
            num_tokens = int(pages.num_tokens[run].sum())
            yield self._run(run, start, level, depth, start_token, num_tokens)
            inner = (level + 1, depth + len(run), start_token + num_tokens)
            after = sorted(after, key=self._age, reverse=True)
            work += [(child, Start.BRANCH, *inner) for child in after]

    def _run(
        self, run: list[int], start: Start, level: int, depth: int, token: int, num_tokens: int
    ) -> PageRun:
        pages, first, last = self._pages, run[0], run[-1]
        parent = pages.parents[first]
        has_tokens = bool(pages.flags[first] & HAS_TOKENS)
        count = int(pages.num_tokens[first]) if has_tokens else 0
        return PageRun(
            group=pages.group,
            level=level,
            start=start,
            parent=None if parent is None else PageKey(parent),
            first_key=PageKey(pages.keys[first]),
            last_key=PageKey(pages.keys[last]),
            depth=depth,
            num_pages=len(run),
            start_token=token,
            num_tokens=num_tokens,
            ends_in_tail=bool(pages.flags[last] & IS_TAIL),
            first_tokens=tuple(pages.tokens[first, :count].tolist()),
            created_ns=int(pages.created_ns[first]),
            lane=int(pages.lanes[first]),
            row=int(pages.rows[first]),
        )

    def _age(self, position: int) -> tuple[int, int, int]:
        pages = self._pages
        return (
            int(pages.created_ns[position]),
            int(pages.lanes[position]),
            int(pages.rows[position]),
        )


def _lane_info(place: Path, lane: int, groups: list[_Pages]) -> LaneInfo:
    path = place / lane_name(lane)
    return LaneInfo(
        lane=lane,
        is_held=is_in_use(path),
        last_writer=holder_of(path),
        num_segments=sum(pages.segments.count(lane) for pages in groups),
        num_pages=sum(int((pages.lanes == lane).sum()) for pages in groups),
        nbytes=_tree_nbytes(path),
    )


def _chunk_sizes(folder: Path, num_dimensions: int) -> dict[int, int]:
    sizes = files.file_sizes(folder).items()
    numbers = {segment_number(name, num_dimensions): nbytes for name, nbytes in sizes}
    return {number: nbytes for number, nbytes in numbers.items() if number is not None}


def _tree_nbytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(sum(files.file_sizes(Path(parent)).values()) for parent, _, _ in os.walk(folder))
