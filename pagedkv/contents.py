"""``Contents``: which pages a store holds: segments, their maps, and the index by key."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import family_of
from pagedkv.child_rows import Child, ChildRows
from pagedkv.format import (
    CATALOG,
    ROW_BITS,
    Geometry,
    PackedRows,
    StoreRow,
    group_name,
    lane_name,
    pack_row,
    unpack_row,
)
from pagedkv.header import StoreHeader
from pagedkv.lane import Committed, LaneGroup, Segment, is_young
from pagedkv.lane_access import lanes_of
from pagedkv.prefix import chain_key
from pagedkv.row_index import RowIndex
from pagedkv.segment import SegmentFormat
from pagedkv.segment_map import SegmentMap
from pagedkv.spec import PageKey

logger = logging.getLogger("pagedkv")

MAX_MAPS_NBYTES = 64 * 2**20
"""Maps of segments that are kept; others are read from the catalogue again when they are needed."""

Place = tuple[int, int, int]
"""A segment: lane, index into the specs, number."""


class Contents:
    """The catalogued pages of a store, as far as this process knows them.

    Every change is made with ``lock`` held. Looking keys up may run beside a change.

    Args:
        root: The store's folder.
        header: Its header.

    Attributes:
        groups: The lane groups by lane and index into the specs.
        indexes: Rows by key, for each spec.
        children: Rows by what their pages follow, for each spec.
        formats: How the segment files of each spec are written and read.
        payload_formats: The same, for readers that want payloads as they are.
        lock: Guards all of it.
        num_dropped: Segments that were given up, by whomever, since the store was opened.
    """

    def __init__(self, root: Path, header: StoreHeader) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.groups: dict[tuple[int, int], LaneGroup] = {}
        self.indexes = [RowIndex() for _ in header.specs]
        self.children = [ChildRows(self) for _ in header.specs]
        self.formats = [
            SegmentFormat(spec, header.codec, Geometry.of(spec, header.codec, rows))
            for spec, rows in zip(header.specs, header.segment_rows, strict=True)
        ]
        self.payload_formats = [form.of_payloads() for form in self.formats]
        self.num_dropped = 0
        self._maps: OrderedDict[Place, SegmentMap] = OrderedDict()
        self._maps_nbytes = 0
        self._withdrawn: dict[Place, list[int]] = {}
        self._parents: dict[Place, tuple[bytes, npt.NDArray[np.bool_]]] = {}
        self._generations: dict[tuple[int, int], int] = {}
        self._root_changed_ns = -1
        self._clock = 0

    def load(self, lane: int) -> None:
        """Load all groups of a lane that is new."""
        for number, form in enumerate(self.formats):
            path = self.root / lane_name(lane) / group_name(form.spec)
            self.groups[lane, number] = LaneGroup(path, form)
            self._reload(lane, number)

    def load_all(self) -> None:
        """Load the lanes that are not known yet."""
        known = {lane for lane, _ in self.groups}
        for lane in lanes_of(self.root):
            if lane not in known:
                self.load(lane)
        for children in self.children:
            children.take_in()

    def refresh(self, own_lane: int | None) -> tuple[bool, list[Segment]]:
        """Notice what other processes have committed or removed.

        Returns:
            Whether anything changed, and the segments that are gone.
        """
        changed = False
        gone: list[Segment] = []
        root_changed = files.changed_ns(self.root)
        with self.lock:
            if root_changed != self._root_changed_ns or is_young(root_changed):
                num_lanes = len(self.groups)
                self.load_all()
                changed = len(self.groups) != num_lanes
                self._root_changed_ns = root_changed
            for (lane, number), group in self.groups.items():
                if not self._is_outdated(lane, number, own_lane):
                    continue
                for missing in group.missing():
                    gone.append(group.segments[missing])
                    self.drop((lane, number, missing))
                changed |= self._reload(lane, number)
        return changed or bool(gone), gone

    def tick(self) -> int:
        """The time of a use: later than all before."""
        self._clock += 1
        return self._clock

    def publish(self, lane: int, number: int, committed: Committed) -> None:
        """Make a committed segment's pages known, by lane and index into the specs."""
        segment, group = committed.segment, self.groups[lane, number]
        group.segments[segment.number] = segment
        first = StoreRow(lane, number, segment.number * group.geometry.rows)
        self.indexes[number].add_many(segment.keys, first)
        self.children[number].add_many(pack_row(first), committed.kinship)
        self._keep_map((lane, number, segment.number), committed.segment_map)

    def withdraw(self, place: Place) -> None:
        """Take a segment's pages out of the index; by their rows they can be read still."""
        lane, number, segment_number = place
        group = self.groups[lane, number]
        first = segment_number * group.geometry.rows
        self._withdrawn[place] = [
            row
            for row, key in enumerate(group.segments[segment_number].keys)
            if key is not None
            and self.indexes[number].remove(key, StoreRow(lane, number, first + row))
        ]

    def restore(self, place: Place) -> None:
        """Put what ``withdraw`` took out of the index back into it."""
        lane, number, segment_number = place
        group = self.groups[lane, number]
        first = segment_number * group.geometry.rows
        for row in self._withdrawn.pop(place, ()):  # none, if it was dropped meanwhile
            key = group.segments[segment_number].keys[row]
            assert key is not None
            self.indexes[number].add(key, StoreRow(lane, number, first + row))

    def find_withdrawn(self, key: PageKey, number: int) -> StoreRow | None:
        """The row of a page in a segment that is withdrawn, and not dropped yet."""
        with self.lock:
            for place, rows in self._withdrawn.items():
                if place[1] == number:
                    group = self.groups[place[0], number]
                    keys = group.segments[place[2]].keys
                    for row in rows:
                        if keys[row] == key:
                            return StoreRow(place[0], number, place[2] * group.geometry.rows + row)
        return None

    def drop(self, place: Place) -> None:
        """Forget a segment that is gone."""
        lane, number, segment_number = place
        self.withdraw(place)
        self.num_dropped += 1
        del self._withdrawn[place]
        segment = self.groups[lane, number].segments.pop(segment_number)
        self.children[number].note_dropped(len(segment.keys))
        self._parents.pop(place, None)
        dropped = self._maps.pop(place, None)
        if dropped is not None:
            self._maps_nbytes -= dropped.nbytes

    def map_of(self, place: Place, segment: Segment) -> SegmentMap:
        """Where the pages of a segment are in its file.

        Raises:
            ValueError: Its catalogue chunk had to be read again, and is damaged.
            OSError: It is gone (``files.is_vanished``), or the system could not read.
        """
        found = self._maps.get(place)
        if found is not None:
            return found
        lane, number, _ = place
        loaded = self.groups[lane, number].load_map(segment)
        with self.lock:
            if self.groups[lane, number].segments.get(segment.number) is segment:
                self._keep_map(place, loaded)
        return loaded

    def kept_map(self, place: Place) -> SegmentMap | None:
        """What ``map_of`` gives, if it is in memory."""
        return self._maps.get(place)

    def parents_of(self, place: Place, segment: Segment) -> list[PageKey | None]:
        """The parent of each row's page; None where there is none, or it cannot be read."""
        if place not in self._parents:
            group = self.groups[place[0], place[1]]
            try:
                self._parents[place] = group.parents_of(place[2])
            except (OSError, ValueError) as error:
                logger.warning("cannot read %s: %s", self.path_of(place), error)
                self._parents[place] = (b"", np.zeros(0, np.bool_))
        raw, has_parent = self._parents[place]
        parents: list[PageKey | None] = [None] * len(segment.keys)
        for row in np.flatnonzero(has_parent[: len(parents)]).tolist():
            parents[row] = PageKey(raw[32 * row : 32 * row + 32])
        return parents

    def find_child(
        self, number: int, parent: PageKey, ids: bytes, salt: bytes, extra: bytes
    ) -> Child | None:
        """The page, or saved tail, that ``PageStore.find_child`` promises.

        Called without ``lock``; records of the catalogue are read.
        """
        index = self.indexes[number]

        def key_of(found: bytes) -> PageKey | None:
            key = chain_key(parent, np.frombuffer(found, "<i4"), salt, extra)
            return key if key in index else None

        children = self.children[number]
        best = children.find(family_of(parent, salt), ids, key_of)
        if not children.has_nameless_tails:
            return best
        tail = self.find_tail(number, parent, ids, salt, extra)
        return tail if best is None or (tail and tail.num_tokens > best.num_tokens) else best

    def find_tail(
        self, number: int, parent: PageKey, ids: bytes, salt: bytes, extra: bytes
    ) -> Child | None:
        """The longest saved tail behind ``parent`` all of whose tokens ``ids`` begins with."""
        tokens = np.frombuffer(ids, "<i4")
        longest = self.formats[number].spec.page_tokens - 1
        for count in range(min(len(tokens), longest), 0, -1):
            key = chain_key(parent, tokens[:count], salt, extra)
            if key in self.indexes[number]:
                return Child(key, count)
        return None

    def ids_of_rows(self, rows: PackedRows) -> list[bytes | None]:
        """Token ids of the pages in packed rows, as int32 in bytes; None where there is no page.

        Also where the record is damaged, or does not tell them. Reads the catalogue.

        Raises:
            OSError: The system could not read.
        """
        ids: list[bytes | None] = [None] * len(rows)
        numbers = np.argsort(rows, kind="stable")
        places = [unpack_row(row) for row in rows[numbers].tolist()]
        found = zip(numbers.tolist(), places, strict=True)
        for (lane, number, segment), part in groupby(found, key=self._segment_of):
            group = self.groups.get((lane, number))
            if group is None or segment not in group.segments:
                continue
            wanted = [(at, row.row % group.geometry.rows) for at, row in part]
            for (at, _), one in zip(
                wanted, group.read_ids(segment, [place for _, place in wanted]), strict=True
            ):
                ids[at] = one
        return ids

    def is_known(self, rows: PackedRows) -> npt.NDArray[np.bool_]:
        """Whether the segments of packed rows are there, ``(row,)``."""
        if not len(rows):
            return np.zeros(0, np.bool_)
        number = unpack_row(int(rows[0])).group
        in_segment = self.rows_of(number)
        lanes, places = rows >> ROW_BITS, (rows & (1 << ROW_BITS) - 1) // in_segment
        segments, which = np.unique(lanes << ROW_BITS | places, return_inverse=True)
        known = [
            one.row in self.groups[one.lane, one.group].segments
            for one in map(unpack_row, segments.tolist())
        ]
        return np.array(known, np.bool_)[which]

    def rows_of(self, number: int) -> int:
        """Rows of a segment of this spec."""
        return self.formats[number].geometry.rows

    def segments(self) -> Iterator[tuple[Place, Segment]]:
        """All segments, in the order of lanes, specs and numbers."""
        for (lane, number), group in sorted(self.groups.items()):
            for segment_number in sorted(group.segments):
                yield (lane, number, segment_number), group.segments[segment_number]

    def check_invariants(self) -> None:
        """Assert that index, segments and maps agree."""
        for number, index in enumerate(self.indexes):
            index.check_invariants()
            for key, row in index:
                group = self.groups[row.lane, row.group]
                found = group.locate(row.row)
                assert found is not None
                segment, place = found
                assert row.group == number
                assert segment.keys[place] == key
        assert self._maps_nbytes == sum(one.nbytes for one in self._maps.values())
        for lane, number, segment_number in self._maps:
            assert segment_number in self.groups[lane, number].segments

    def path_of(self, place: Place, array: str = CATALOG) -> Path:
        """File of a segment in one of the arrays."""
        lane, number, segment_number = place
        return self.groups[lane, number].chunk_path(array, segment_number)

    def _segment_of(self, found: tuple[int, StoreRow]) -> Place:
        lane, number, row = found[1]
        return lane, number, row // self.rows_of(number)

    def _is_outdated(self, lane: int, number: int, own_lane: int | None) -> bool:
        """Whether another process may have changed a group since it was loaded."""
        group = self.groups[lane, number]
        if lane == own_lane or not group.is_complete:
            return not group.is_complete
        known = self._generations[lane, number]
        return known == 0 or group.generation() != known

    def _reload(self, lane: int, number: int) -> bool:
        group = self.groups[lane, number]
        self._generations[lane, number] = group.generation()  # first: what comes later shows
        loaded = group.load()
        for committed in loaded:
            self.publish(lane, number, committed)
        return bool(loaded)

    def _keep_map(self, place: Place, segment_map: SegmentMap) -> None:
        if place in self._maps:
            return
        self._maps[place] = segment_map
        self._maps_nbytes += segment_map.nbytes
        while self._maps_nbytes > MAX_MAPS_NBYTES and len(self._maps) > 1:
            self._maps_nbytes -= self._maps.popitem(last=False)[1].nbytes
