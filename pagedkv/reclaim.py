"""``Reclaimer``: room in a store that is full, a segment at a time.

Segments leave in the order in which their pages were last used. What is still hot in them, and
what live sequences hold, is written again before they go.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import unpack_catalog
from pagedkv.contents import Contents, Place
from pagedkv.errors import StoreFullError
from pagedkv.evictions import EVICTED_NBYTES, EvictionReason, EvictionRing
from pagedkv.format import CATALOG, EVICTED, KV
from pagedkv.lane import Segment, SegmentSource
from pagedkv.lane_lock import LaneLock
from pagedkv.page_reader import PageReader
from pagedkv.segment_sources import MovedPages
from pagedkv.space import Space
from pagedkv.spec import PageKey

logger = logging.getLogger("pagedkv")

Bools = npt.NDArray[np.bool_]
HeldPage = tuple[int, PageKey]
"""A page that must not be given up: index of its spec, and key."""
Keep = Callable[[], Collection[HeldPage]]
"""Tells which pages those are; called without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What was done to make room.

    Args:
        nbytes_before: Bytes of the store before.
        nbytes_after: And after.
        num_pages_evicted: Pages that were given up.
        num_pages_dead: Those of them that no prefix led to any more.
        num_pages_moved: Pages that were written again.
        num_segments_removed: Segments that were given up.
    """

    nbytes_before: int
    nbytes_after: int
    num_pages_evicted: int = 0
    num_pages_dead: int = 0
    num_pages_moved: int = 0
    num_segments_removed: int = 0


class _Candidate(NamedTuple):
    """A segment that may be given up."""

    place: Place
    segment: Segment
    hot: Bools
    """Rows worth keeping."""
    dead: Bools
    """Rows to which no prefix leads, or that another row stands for, or that are lost."""
    lost: Bools
    """Rows that a read found damaged, and that no other row stands for."""


@dataclass(slots=True)
class _Tally:
    evicted: int = 0
    dead: int = 0
    moved: int = 0
    removed: int = 0
    hopeless: set[Place] = field(default_factory=set)
    left: dict[tuple[int, EvictionReason], list[PageKey]] = field(default_factory=dict)


class Reclaimer:
    """Gives up segments of the own lane, and of lanes that no process owns.

    One thread at a time may use it.

    Args:
        contents: What the store holds.
        space: What it takes.
        reader: Has the segments' files open.
        lane: The own lane.
        commit: Writes pages into new segments of the own lane, for one of the specs;
            ``StoreFullError`` if there is no room for them.
    """

    def __init__(
        self,
        contents: Contents,
        space: Space,
        reader: PageReader,
        lane: int,
        commit: Callable[[int, SegmentSource], None],
    ) -> None:
        self._contents = contents
        self._space = space
        self._reader = reader
        self._lane = lane
        self._commit = commit

    def collect(
        self, is_enough: Callable[[], bool], reason: EvictionReason, keep: Keep
    ) -> CollectReport:
        """Give up segments until there is room enough, or none is left that may go.

        Args:
            is_enough: Whether there is.
            reason: What the eviction ring shall say.
            keep: Tells which pages must not be given up; asked anew for each segment.

        Raises:
            OSError: The disk failed.
        """
        before = self._space.nbytes
        tally = _Tally()
        with ExitStack() as stack:
            lanes = self._lanes(stack)
            while not is_enough():
                candidates = [
                    one for one in self._candidates(lanes) if one.place not in tally.hopeless
                ]
                if not candidates:
                    break
                # Ranking all segments is dear, so that some leave together.
                for candidate in candidates[: max(1, len(candidates) // 32)]:
                    self._give_up(candidate, reason, keep, tally)
                    if is_enough():
                        break
        self._remember(tally.left)
        return CollectReport(
            nbytes_before=before,
            nbytes_after=self._space.nbytes,
            num_pages_evicted=tally.evicted,
            num_pages_dead=tally.dead,
            num_pages_moved=tally.moved,
            num_segments_removed=tally.removed,
        )

    def _lanes(self, stack: ExitStack) -> set[int]:
        """The own lane, and those that can be locked until the stack is closed."""
        lanes = {self._lane}
        for lane in {lane for lane, _ in self._contents.groups} - lanes:
            lock = LaneLock.try_take(self._contents.root, lane)
            if lock is not None:
                stack.callback(lock.release)
                lanes.add(lane)
        with self._contents.lock:
            for segment in self._contents.refresh(self._lane)[1]:
                self._reader.forget(segment)
        return lanes

    def _candidates(self, lanes: set[int]) -> list[_Candidate]:
        """All segments of these lanes, the first to go first."""
        orphans: list[tuple[int, PageKey]] = []
        with self._contents.lock:
            found = [
                (place, segment, self._dead_rows(place, segment, orphans))
                for place, segment in self._contents.segments()
                if place[0] in lanes
            ]
            self._mark_descendants(found, orphans)
            all_lost = [self._lost_rows(place, segment) for place, segment, _ in found]
        living = [segment.used_at[~dead] for _, segment, dead in found]
        used_at = np.concatenate([np.zeros(0, np.uint64), *living])
        middle = np.median(used_at) if used_at.any() else np.inf
        candidates = [
            _Candidate(place, segment, ~dead & (segment.used_at > middle), dead, lost)
            for (place, segment, dead), lost in zip(found, all_lost, strict=True)
        ]

        def rank(one: _Candidate) -> tuple[float, float, Place]:
            last = one.segment.used_at[~one.dead]
            return float(one.hot.mean()), float(last.mean()) if len(last) else -1.0, one.place

        return sorted(candidates, key=rank)

    def _dead_rows(
        self, place: Place, segment: Segment, orphans: list[tuple[int, PageKey]]
    ) -> Bools:
        """Rows whose page another row stands for, or whose parent is gone: an orphan."""
        lane, number, segment_number = place
        group, index = self._contents.groups[lane, number], self._contents.indexes[number]
        first = segment_number * group.geometry.rows
        dead = np.zeros(len(segment.keys), np.bool_)
        parents = self._contents.parents_of(place, segment)
        root_key = self._contents.formats[number].spec.root_key()
        for row, (key, parent) in enumerate(zip(segment.keys, parents, strict=True)):
            is_orphan = parent is not None and parent != root_key and parent not in index
            dead[row] = key is None or is_orphan or index.get(key) != (lane, number, first + row)
            if is_orphan and key is not None:
                orphans.append((number, key))
        return dead

    def _lost_rows(self, place: Place, segment: Segment) -> Bools:
        """Rows whose page was forgotten, since it is damaged."""
        index = self._contents.indexes[place[1]]
        return np.array([key is not None and key not in index for key in segment.keys], np.bool_)

    def _mark_descendants(
        self,
        found: Sequence[tuple[Place, Segment, Bools]],
        orphans: list[tuple[int, PageKey]],
    ) -> None:
        """Count all that follow an orphan as dead too: no prefix leads to it either."""
        if not orphans:
            return
        children: dict[tuple[int, PageKey], list[tuple[Bools, int, PageKey]]] = {}
        for place, segment, dead in found:
            parents = self._contents.parents_of(place, segment)
            for row, (key, parent) in enumerate(zip(segment.keys, parents, strict=True)):
                if key is not None and parent is not None:
                    children.setdefault((place[1], parent), []).append((dead, row, key))
        while orphans:
            number, key = orphans.pop()
            for dead, row, child in children.pop((number, key), ()):
                dead[row] = True
                orphans.append((number, child))

    def _give_up(self, one: _Candidate, reason: EvictionReason, keep: Keep, tally: _Tally) -> None:
        lane, number, segment_number = one.place
        group = self._contents.groups[lane, number]
        with self._contents.lock:
            if group.segments.get(segment_number) is not one.segment:  # its owner gave it up
                tally.hopeless.add(one.place)
                return
            self._contents.withdraw(one.place)
        try:
            # Who holds a page from now on has found it elsewhere: what is to keep is complete.
            keys = {key for held, key in keep() if held == number}
            kept = np.array(
                [key in keys and self._is_last(number, key) for key in one.segment.keys]
            )
            wishes = (wanted for wanted in (kept | one.hot, kept) if self._is_worth(one, wanted))
            moved = next((wanted for wanted in wishes if self._move(one, wanted)), None)
        except BaseException:
            with self._contents.lock:
                self._contents.restore(one.place)
            raise
        if moved is None:
            tally.hopeless.add(one.place)
            with self._contents.lock:
                self._contents.restore(one.place)
            return
        freed = group.remove(segment_number)
        with self._contents.lock:
            if group.segments.get(segment_number) is one.segment:  # else it was noticed already
                self._contents.drop(one.place)
        self._reader.forget(one.segment)
        self._space.free(freed, lane)
        index = self._contents.indexes[number]
        for row, key in enumerate(one.segment.keys):
            if key is not None and not moved[row]:
                tally.evicted += 1
                tally.dead += int(one.dead[row])
                if key not in index:
                    why = EvictionReason.DEAD_PARENT if one.dead[row] else reason
                    why = EvictionReason.DAMAGED if one.lost[row] else why
                    tally.left.setdefault((number, why), []).append(key)
        tally.moved += int(moved.sum())
        tally.removed += 1

    def _remember(self, left: dict[tuple[int, EvictionReason], list[PageKey]]) -> None:
        """Note in the own lane's eviction rings which pages left, if there is room for it."""
        for (number, reason), keys in left.items():
            path = self._contents.groups[self._lane, number].path / EVICTED
            before = sum(files.file_sizes(path).values())
            try:
                self._space.reserve(EVICTED_NBYTES)
            except StoreFullError:
                continue
            growth = 0
            try:
                EvictionRing(path).add(keys, reason, time.time_ns())
                growth = sum(files.file_sizes(path).values()) - before
            finally:
                self._space.release(EVICTED_NBYTES, written=growth)

    def _is_last(self, number: int, key: PageKey | None) -> bool:
        """Whether the own lane has no other copy of the page; those elsewhere may vanish."""
        other = None if key is None else self._contents.indexes[number].get(key)
        return other is None or other.lane != self._lane

    def _is_worth(self, one: _Candidate, wanted: Bools) -> bool:
        """Whether giving the segment up frees more than writing these of its pages again takes."""
        geometry = self._contents.formats[one.place[1]].geometry
        count = int(wanted.sum())
        return count == 0 or (count < len(wanted) and count <= geometry.rows // 2)

    def _move(self, one: _Candidate, wanted: Bools) -> bool:
        """Write these pages of a segment into another; whether there was room for them."""
        if not wanted.any():
            return True
        _, number, segment_number = one.place
        form = self._contents.formats[number]
        room = self._space.room()
        if room is not None and form.geometry.write_nbytes(int(wanted.sum())) > room:
            return False
        try:
            rows = np.flatnonzero(wanted)
            stored, records = self._read_stored(one, rows)
            if len(records):
                self._commit(number, MovedPages(form, records, stored))
        except StoreFullError:
            return False
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not files.is_vanished(error):
                raise
            # Damaged, or gone: nothing of it can be kept.
            logger.warning("segment %s cannot be moved: %s", segment_number, error)
        return True

    def _read_stored(
        self, one: _Candidate, rows: "npt.NDArray[np.int64]"
    ) -> "tuple[list[npt.NDArray[np.uint8]], npt.NDArray[Any]]":
        """The stored bytes and the records of those rows that are not damaged.

        The bytes are not verified: their checksums go with them.
        """
        _, number, segment_number = one.place
        form = self._contents.formats[number]
        chunk = files.read_bytes(self._contents.path_of(one.place, CATALOG))
        records, holds = unpack_catalog(form.geometry, segment_number, chunk)
        rows = rows[holds[rows]]
        segment_map = self._contents.map_of(one.place, one.segment)
        starts, ends = form.extents(segment_map)
        stored: list[npt.NDArray[np.uint8]] = []
        whole: list[int] = []
        with files.reading(self._contents.path_of(one.place, KV)) as fd:
            for row in rows.tolist():
                page = np.empty(int(ends[row] - starts[row]), np.uint8)
                if files.pread_into(fd, page, int(starts[row])) == len(page):
                    stored.append(page)
                    whole.append(row)
        return stored, records[whole]
