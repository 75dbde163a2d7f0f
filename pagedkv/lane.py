"""``LaneGroup``: the files of one layer group in one lane of a store.

A lane has one writer process at a time. What it commits, every process can read.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import (
    HAS_PARENT,
    Kinship,
    derived_chunks,
    ids_of,
    kinship_of,
    map_of,
    unpack_catalog,
)
from pagedkv.codec import Bytes
from pagedkv.format import (
    CATALOG,
    EVICTED,
    KV,
    Geometry,
    chunk_name,
    crc32c,
    derived_columns,
    segment_number,
)
from pagedkv.lane_arrays import LaneArrays
from pagedkv.segment import SegmentFormat
from pagedkv.segment_map import SegmentMap
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]

logger = logging.getLogger("pagedkv")

_SYNCED_TOGETHER = 4
"""Segments that are written before the first of them is synced."""
_COLUMNS_TOGETHER = 32
"""So many segments may lack their derived columns: files that the next commit must not wait for."""
_COLUMNS_NBYTES = 4 * 2**20
"""Of catalogue chunks that are kept in memory to make the columns from."""
_READ_TOGETHER = 4
"""From so many records on, all of a segment's are read."""
_YOUNG_NS = 50 * 10**6
"""A folder changed so lately may change again without showing it."""


class Segment:
    """What is always kept in memory of a committed segment.

    Args:
        number: Its place: it has the rows from ``number * rows`` on.
        path: Its file.
        keys: Key of each row in use; None where a row holds no page.
    """

    __slots__ = ("keys", "number", "path", "used_at")

    def __init__(self, number: int, path: Path, keys: tuple[PageKey | None, ...]) -> None:
        self.number = number
        self.path = path
        self.keys = keys
        self.used_at = np.zeros(len(keys), np.uint64)
        """The store's clock when each row was last used, ``(row,)``."""


class Committed(NamedTuple):
    """A segment that is in the lane, and what was read, or written, beside its keys."""

    segment: Segment
    segment_map: SegmentMap
    kinship: Kinship


class SegmentSource(Protocol):
    """Pages on their way into segments, in the order of their rows."""

    @property
    def keys(self) -> Sequence[PageKey]:
        """Key of each page."""

    def write(self, fd: int, start: int, count: int) -> SegmentMap:
        """Write the segment file of the pages from number ``start`` on."""

    def catalog(self, segment: int, start: int, segment_map: SegmentMap) -> Bytes:
        """The catalogue chunk of segment number ``segment``, with the pages from ``start`` on."""


class LaneGroup:
    """The segments, the catalogue and the derived columns of one layer group in one lane.

    ``commit`` and ``load_map`` are thread-safe; ``Contents`` guards the attributes.

    Args:
        path: Folder of the group.
        segment_format: Writes and reads its segment files.

    Attributes:
        arrays: The arrays' documents and lengths.
        segments: The committed segments that are known, by number.
        next_segment: Number of the next segment to be written.
        is_complete: Whether ``load`` could read all that it tried to; else it is worth another try.
    """

    def __init__(self, path: Path, segment_format: SegmentFormat) -> None:
        self.path = path
        self.segment_format = segment_format
        self.arrays = LaneArrays(path, segment_format)
        self.segments: dict[int, Segment] = {}
        self.next_segment = 0
        self.is_complete = True
        self._num_rows = segment_format.geometry.rows
        self._torn: set[int] = set()
        self._columns = derived_columns(self.geometry.page_tokens)
        self._columns_lock = threading.Lock()  # while they are written, and segments removed
        self._lacking: dict[int, tuple[Bytes, int]] = {}  # catalogue chunk, and rows in use

    @property
    def geometry(self) -> Geometry:
        """Sizes and places in the files."""
        return self.segment_format.geometry

    def chunk_path(self, array: str, number: int) -> Path:
        """File of a segment in one of the group's arrays (``kv``, ``catalog``, …)."""
        return self.path / array / chunk_name(number, self.arrays.num_dimensions[array])

    def load(self) -> list[Committed]:
        """Read what the catalogue has beyond ``segments``: committed segments, in order.

        A torn or foreign chunk is logged, counted in ``num_torn_chunks`` and left out, and so is a
        segment whose file is gone.
        """
        chunks = self._chunk_sizes(CATALOG)  # first: a writer makes a segment before its record
        data = self._chunk_sizes(KV)
        self.next_segment = max([self.next_segment - 1, *data, *chunks]) + 1
        loaded = []
        self.is_complete = True
        for number in sorted(chunks.keys() - self.segments.keys() - self._torn):
            try:
                if number not in data:
                    raise ValueError("its segment is gone")
                loaded.append(self._load_segment(number))
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or files.is_vanished(error):
                    self._torn.add(number)
                else:
                    self.is_complete = False
                logger.warning("skipped %s: %s", self.chunk_path(CATALOG, number), error)
        return loaded

    def missing(self) -> list[int]:
        """Numbers of those of ``segments`` whose catalogue chunk is gone by now."""
        return sorted(self.segments.keys() - self._chunk_sizes(CATALOG).keys())

    def generation(self) -> int:
        """A number that changes when another process commits or removes a segment.

        It is the time of the catalogue folder's last change. The clock of a file system ticks, so
        that a second change within one tick does not show: what is younger than a few ticks is
        not to be relied on, and 0 is returned.
        """
        try:
            changed = files.changed_ns(self.path / CATALOG)
        except OSError as error:
            if files.is_vanished(error):
                return -1
            raise
        return 0 if is_young(changed) else changed

    def nbytes_of(self, segment_map: SegmentMap) -> int:
        """Bytes of all files of a segment."""
        pages = self.segment_format.extents(segment_map)[1]
        overhead = self.geometry.write_nbytes(1) - self.geometry.page_nbytes
        return int(pages[-1]) + overhead

    def load_map(self, segment: Segment) -> SegmentMap:
        """Read a segment's map from its catalogue chunk again.

        Raises:
            ValueError: The chunk is damaged.
            OSError: It is gone (``files.is_vanished``), or the system could not read.
        """
        again, segment_map, _ = self._load_segment(segment.number)
        for row, key in enumerate(segment.keys):
            if row >= len(again.keys) or again.keys[row] != key:
                raise ValueError("it has other pages than when it was opened")
        return segment_map

    def remove(self, number: int) -> int:
        """Remove a segment's files, the catalogue chunk first; the bytes that were freed.

        Columns that were not written yet count as if they had been.

        Raises:
            OSError: The system could not remove them.
        """
        paths = [self.chunk_path(array, number) for array in (CATALOG, KV)]
        paths += [self.chunk_path(column.name, number) for column in self._columns]
        with self._columns_lock:
            lacks_columns = self._lacking.pop(number, None) is not None
            freed = self.geometry.derived_nbytes if lacks_columns else 0
            for path in paths:
                freed += files.remove(path)
        return freed

    def write_columns(self) -> None:
        """Write the derived columns of the segments that lack them so far."""
        with self._columns_lock:
            self._complete_lacking()

    def parents_of(self, number: int) -> tuple[bytes, npt.NDArray[np.bool_]]:
        """The parents' keys of a segment's rows, 32 bytes each, and which rows have one.

        Raises:
            ValueError: Its catalogue chunk is damaged.
            OSError: It is gone, or the system could not read.
        """
        chunk = files.read_bytes(self.chunk_path(CATALOG, number))
        records, holds = unpack_catalog(self.geometry, number, chunk)
        return records["parent"].tobytes(), holds & (records["flags"] & HAS_PARENT != 0)

    def missing_nbytes(self) -> int:
        """About how much ``prepare`` is going to write."""
        columns_nbytes = len(self._incomplete()) * self.geometry.derived_nbytes
        return self.arrays.missing_nbytes() + columns_nbytes

    def clean(self) -> None:
        """Remove what interrupted writers left: bytes without a record do not exist."""
        files.remove_temps(self.path)
        committed = self._chunk_sizes(CATALOG)
        for array in (*self.arrays.num_dimensions, EVICTED):
            files.remove_temps(self.path / array)
        for array in self.arrays.num_dimensions:
            for number in self._chunk_sizes(array).keys() - committed:
                files.remove(self.chunk_path(array, number))

    def prepare(self) -> None:
        """Make the group ready for its lane's writer, after ``load`` and ``clean``.

        Makes missing folders, documents and chunks of derived columns.
        """
        files.make_dir(self.path)
        self.arrays.make_missing()
        num_rows = self.arrays.num_rows(CATALOG) or 0
        self.next_segment = max(self.next_segment, -(-num_rows // self.geometry.rows))
        self._complete_columns()
        self.arrays.trim(self.next_segment)
        files.sync_dir(self.path)

    def commit(self, first: int, source: SegmentSource) -> list[Committed]:
        """Write segments ``first``, ``first + 1``, … durably: all of them or none.

        Raises:
            OSError: The system could not write; nothing is left of the segments.
            ValueError: The codec cannot represent a number; the same.
        """
        rows = self.geometry.rows
        numbers = range(first, first + -(-len(source.keys) // rows))
        temps: list[tuple[Path, Path]] = []
        made: list[tuple[Committed, Bytes]] = []
        try:
            for start in range(0, len(numbers), _SYNCED_TOGETHER):
                part = numbers[start : start + _SYNCED_TOGETHER]
                made += self._write_segments(part, start * rows, source, temps)
            for temp, path in temps:
                files.replace(temp, path)
            files.sync_dir(self.path / KV)
            files.sync_dir(self.path / CATALOG)
        except BaseException:
            for paths in reversed(temps):
                for path in paths:
                    with contextlib.suppress(OSError):
                        files.remove(path)
            raise
        with self._columns_lock:
            self._lacking.update(
                (one.segment.number, (chunk, len(one.segment.keys))) for one, chunk in made
            )
            nbytes = sum(len(chunk) for chunk, _ in self._lacking.values())
            if len(self._lacking) >= _COLUMNS_TOGETHER or nbytes >= _COLUMNS_NBYTES:
                self._complete_lacking()
        return [one for one, _ in made]

    @property
    def num_torn_chunks(self) -> int:
        """Segments that ``load`` had to leave out."""
        return len(self._torn)

    def locate(self, row: int) -> tuple[Segment, int] | None:
        """The segment of a row and its place in it; None if the row never held a page."""
        number, place = divmod(row, self._num_rows)
        segment = self.segments.get(number)
        if segment is None or place >= len(segment.keys) or segment.keys[place] is None:
            return None
        return segment, place

    def read_record(self, number: int, place: int) -> Array:
        """One record of the catalogue, by segment and place in it, as an array of one.

        Raises:
            ValueError: The record is damaged.
            OSError: Its file is gone (``files.is_vanished``), or the system could not read.
        """
        dtype = self.geometry.record_dtype
        try:
            with files.reading(self.chunk_path(CATALOG, number)) as fd:
                raw = files.pread_exact(fd, dtype.itemsize, place * dtype.itemsize)
        except files.ShortReadError as error:
            raise ValueError(error.strerror) from error
        record = raw.view(dtype)
        if crc32c(raw[:-4]) != int(record["crc"][0]):
            raise ValueError("its CRC32C is wrong")
        if int(record["row"][0]) != number * self.geometry.rows + place:
            raise ValueError(f"it is the record of row {record['row'][0]}")
        return record

    def read_ids(self, number: int, places: Sequence[int]) -> list[bytes | None]:
        """Token ids of pages of a segment, as int32 in bytes, by their places in it.

        None where they are not known, or the record is damaged or gone.

        Raises:
            OSError: The system could not read.
        """
        try:
            if len(places) < _READ_TOGETHER:
                return [ids_of(self.read_record(number, place)[0]) for place in places]
            chunk = files.read_bytes(self.chunk_path(CATALOG, number))
            records, holds = unpack_catalog(self.geometry, number, chunk)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not files.is_vanished(error):
                raise
            if isinstance(error, ValueError):
                logger.warning("cannot read %s: %s", self.chunk_path(CATALOG, number), error)
            return [None] * len(places)
        return [ids_of(records[place]) if holds[place] else None for place in places]

    def _write_segments(
        self, numbers: range, start: int, source: SegmentSource, temps: list[tuple[Path, Path]]
    ) -> list[tuple[Committed, Bytes]]:
        """Make the bytes of a few segments durable, under temporary names; adds these to ``temps``.

        Neither a segment nor its catalogue chunk is visible yet, so that they may get to the disk
        in any order.
        """
        made: list[tuple[Committed, Bytes]] = []
        with contextlib.ExitStack() as stack:
            unsynced: list[int] = []
            for number in numbers:
                keys = tuple(source.keys[start : start + self.geometry.rows])
                path = self.chunk_path(KV, number)
                fd, temp = stack.enter_context(files.new_file(path))
                temps.append((temp, path))
                segment_map = source.write(fd, start, len(keys))
                unsynced.append(fd)
                chunk = source.catalog(number, start, segment_map)
                catalog_path = self.chunk_path(CATALOG, number)
                fd, temp = stack.enter_context(files.new_file(catalog_path))
                temps.append((temp, catalog_path))
                files.write_all(fd, chunk)
                unsynced.append(fd)
                records = chunk[:-4].view(self.geometry.record_dtype)[: len(keys)]
                kinship = kinship_of(records, np.ones(len(keys), np.bool_))
                made.append((Committed(Segment(number, path, keys), segment_map, kinship), chunk))
                start += len(keys)
            for fd in unsynced:
                files.sync_file(fd)
        return made

    def _load_segment(self, number: int) -> Committed:
        chunk = files.read_bytes(self.chunk_path(CATALOG, number))
        records, holds = unpack_catalog(self.geometry, number, chunk)
        segment_map = map_of(self.geometry, records, holds)
        raw = records["key"][: len(segment_map.holds)].tobytes()
        keys = tuple(
            PageKey(raw[32 * row : 32 * row + 32]) if held else None
            for row, held in enumerate(segment_map.holds.tolist())
        )
        kinship = kinship_of(records[: len(keys)], segment_map.holds)
        return Committed(Segment(number, self.chunk_path(KV, number), keys), segment_map, kinship)

    def _complete_lacking(self) -> None:
        for number, (chunk, num_keys) in self._lacking.items():
            self._write_columns(number, chunk, np.arange(self.geometry.rows) < num_keys)
        self._lacking.clear()

    def _write_columns(self, number: int, chunk: Bytes, holds: npt.NDArray[np.bool_]) -> None:
        """Write the derived columns of a segment: a convenience, so failing is only logged."""
        records = chunk[:-4].view(self.geometry.record_dtype)
        try:
            for name, values in derived_chunks(self.geometry, records, holds).items():
                data = values.reshape(-1).view(np.uint8)
                files.write_atomic(self.chunk_path(name, number), [data], sync=False)
        except OSError as error:
            logger.warning("could not write the derived columns of %s: %s", self.path, error)

    def _complete_columns(self) -> None:
        for number in sorted(self._incomplete()):
            with contextlib.suppress(OSError, ValueError):
                chunk = files.read_bytes(self.chunk_path(CATALOG, number))
                _, holds = unpack_catalog(self.geometry, number, chunk)
                self._write_columns(number, np.frombuffer(chunk, np.uint8), holds)

    def _incomplete(self) -> set[int]:
        """Segments that lack a chunk of a derived column."""
        incomplete: set[int] = set()
        for column in self._columns:
            sizes = self._chunk_sizes(column.name)
            nbytes = self.geometry.rows * column.row_nbytes
            incomplete |= {n for n in self.segments if sizes.get(n) != nbytes}
        return incomplete

    def _chunk_sizes(self, array: str) -> dict[int, int]:
        """Size of each chunk file of an array by its segment."""
        return chunk_sizes(self.path / array, self.arrays.num_dimensions[array])


def chunk_sizes(folder: Path, num_dimensions: int) -> dict[int, int]:
    """Size of each chunk file of the array in ``folder`` by its segment."""
    sizes: dict[int, int] = {}
    for name, size in files.file_sizes(folder).items():
        number = segment_number(name, num_dimensions)
        if number is not None:
            sizes[number] = size
    return sizes


def is_young(changed_ns: int) -> bool:
    """Whether a folder changed so lately that a second change may have the same time."""
    return time.time_ns() - changed_ns < _YOUNG_NS
