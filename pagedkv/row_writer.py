"""``RowWriter``: pages on their way into a store, and room for them."""

import threading
from collections.abc import Collection

from pagedkv import files
from pagedkv.contents import Contents
from pagedkv.errors import StoreFullError
from pagedkv.evictions import EvictionReason
from pagedkv.lane import SegmentSource
from pagedkv.page_reader import PageReader
from pagedkv.reclaim import CollectReport, HeldPage, Keep, Reclaimer
from pagedkv.space import Space


class RowWriter:
    """Writes segments into the own lane, and gives up old ones if the bound says so. Thread-safe.

    Args:
        contents: What the store holds.
        space: What it takes.
        reader: Has the segments' files open.
        lane: The own lane.
    """

    def __init__(self, contents: Contents, space: Space, reader: PageReader, lane: int) -> None:
        self._contents = contents
        self._space = space
        self._lane = lane
        self._reclaimer = Reclaimer(contents, space, reader, lane, self._commit)
        self._reclaiming = threading.Lock()
        self._keep: Keep = tuple
        self._no_commits = threading.Condition()
        self._num_commits = 0

    def write(self, number: int, source: SegmentSource, own: Collection[HeldPage] = ()) -> None:
        """Write pages of a spec durably, and make them known.

        Args:
            number: Index of the spec.
            source: The pages.
            own: What the caller asked for, which must not leave to make room for the rest of it.

        Raises:
            StoreFullError: There is no room, and none can be made.
            OSError: The system could not write.
            ValueError: The codec cannot represent a number.
        """
        self.make_room(self._write_nbytes(number, source), own)
        try:
            self._commit(number, source)
        except StoreFullError:
            # Another write may have taken the room. What it writes can be given up once it is done.
            with self._no_commits:
                self._no_commits.wait_for(lambda: not self._num_commits)
            self._give_up_pages(self._write_nbytes(number, source), own)
            self._commit(number, source)

    def make_room(self, nbytes: int, own: Collection[HeldPage] = ()) -> None:
        """Give up old pages, if need be, so that ``nbytes`` have room and some is left.

        Some room is kept for pages that are moved when a segment is given up.

        Args:
            nbytes: How much room.
            own: As for ``write``.
        """
        if not self._has_room(nbytes):
            self._give_up_pages(nbytes, own)

    def collect(self, max_nbytes: int) -> CollectReport:
        """Give up old pages until the store takes no more than ``max_nbytes``."""
        with self._reclaiming:
            return self._reclaimer.collect(
                lambda: self._space.nbytes <= max_nbytes, EvictionReason.GC, self._keep
            )

    def protect(self, keep: Keep) -> None:
        """Never give up what ``keep`` names, whoever asks for room."""
        self._keep = keep

    def _give_up_pages(self, nbytes: int, own: Collection[HeldPage]) -> None:
        bound = self._space.max_nbytes
        with self._reclaiming:
            if bound is not None and nbytes <= bound and not self._has_room(nbytes):
                # More than is needed now: to choose what leaves is dear.
                ahead = bound // 32
                self._reclaimer.collect(
                    lambda: self._has_room(nbytes + ahead),
                    EvictionReason.CAPACITY,
                    lambda: {*own, *self._keep()},
                )

    def _write_nbytes(self, number: int, source: SegmentSource) -> int:
        """How much writing these pages puts on the disk at most, if nobody writes meanwhile."""
        group = self._contents.groups[self._lane, number]
        stop = group.next_segment + self._num_segments(number, source)
        return self._nbytes_up_to(number, source, stop)

    def _nbytes_up_to(self, number: int, source: SegmentSource, stop: int) -> int:
        """How much writing these pages as the last segments before ``stop`` takes at most."""
        group = self._contents.groups[self._lane, number]
        return group.geometry.write_nbytes(len(source.keys)) + group.arrays.growth_nbytes(stop)

    def _num_segments(self, number: int, source: SegmentSource) -> int:
        return -(-len(source.keys) // self._contents.rows_of(number))

    def _has_room(self, nbytes: int) -> bool:
        room, bound = self._space.room(), self._space.max_nbytes
        if room is None or bound is None:
            return True
        return room >= nbytes + max(0, bound - self._space.scratch_nbytes) // 16

    def _commit(self, number: int, source: SegmentSource) -> None:
        """Write pages into new segments of the own lane, and make them known."""
        group = self._contents.groups[self._lane, number]
        with self._contents.lock:
            first = group.next_segment
            stop = group.next_segment = first + self._num_segments(number, source)
            used_at = self._contents.tick()
        nbytes = self._nbytes_up_to(number, source, stop)
        self._space.reserve(nbytes)
        written, is_counted = 0, False
        try:
            with self._no_commits:
                self._num_commits += 1
                is_counted = True
            with files.translated(group.path, "write pages to"):
                written += group.arrays.grow(stop)
                made = group.commit(first, source)
            with self._contents.lock:
                for one in made:
                    one.segment.used_at[:] = used_at
                    self._contents.publish(self._lane, number, one)
                    written += group.nbytes_of(one.segment_map)
        finally:
            try:
                self._space.release(nbytes, written=written)
            finally:
                with self._no_commits:
                    self._num_commits -= is_counted
                    self._no_commits.notify_all()
