"""``LaneGroup``: the files of one layer group in one lane of a store.

A lane has one writer process at a time. What it commits, every process can read.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import files, metadata
from pagedkv.catalog import derived_chunks, pack_catalog, unpack_catalog
from pagedkv.format import (
    CATALOG,
    CATALOG_DIMENSIONS,
    KV,
    KV_DIMENSIONS,
    METADATA,
    Geometry,
    LayerCrcs,
    PageEntry,
    chunk_name,
    crc32c,
    derived_columns,
    segment_number,
)
from pagedkv.segment import SegmentFormat
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]

logger = logging.getLogger("pagedkv")

_FIRST_SEGMENTS = 16
_MORE_SEGMENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """What is kept in memory of a committed segment.

    Args:
        number: Its place: it has the rows from ``number * rows`` on.
        keys: Key of each row in use; None where a row holds no page.
        crcs: CRC32C of each layer, ``(row, layer)``.
    """

    number: int
    keys: tuple[PageKey | None, ...]
    crcs: LayerCrcs


class LaneGroup:
    """The segments, the catalogue and the derived columns of one layer group in one lane.

    Reading, ``commit`` and ``grow`` are thread-safe; the store guards the attributes.

    Args:
        path: Folder of the group.
        segment_format: Writes and reads its segment files.

    Attributes:
        segments: The committed segments that the store knows, by number.
        next_segment: Number of the next segment to be written.
        num_torn_chunks: Segments that ``load`` had to leave out.
    """

    def __init__(self, path: Path, segment_format: SegmentFormat) -> None:
        self.path = path
        self.segment_format = segment_format
        self.segments: dict[int, Segment] = {}
        self.next_segment = 0
        self.num_torn_chunks = 0
        self._columns = derived_columns(self.geometry.page_tokens)
        self._arrays = {KV: len(KV_DIMENSIONS), CATALOG: len(CATALOG_DIMENSIONS)}
        self._arrays |= {column.name: len(column.dimensions) for column in self._columns}
        self._growth = threading.Lock()
        self._capacity = 0

    @property
    def geometry(self) -> Geometry:
        """Sizes and places in the files."""
        return self.segment_format.geometry

    def chunk_path(self, array: str, number: int) -> Path:
        """File of a segment in one of the group's arrays (``kv``, ``catalog``, …)."""
        return self.path / array / chunk_name(number, self._arrays[array])

    def measure(self) -> int:
        """Bytes of all chunks on disk."""
        return sum(sum(self._chunk_sizes(array).values()) for array in self._arrays)

    def load(self) -> list[Segment]:
        """Read the catalogue: all committed segments, in order.

        A torn or foreign chunk is logged, counted in ``num_torn_chunks`` and left out, and so is a
        segment whose file is gone.
        """
        chunks = self._chunk_sizes(CATALOG)  # first: a writer makes a segment before its record
        data = self._chunk_sizes(KV)
        self.next_segment = max([-1, *data, *chunks]) + 1
        loaded = []
        for number in sorted(chunks):
            try:
                chunk = files.read_bytes(self.chunk_path(CATALOG, number))
                records, holds = unpack_catalog(self.geometry, number, chunk)
                if number not in data:
                    raise FileNotFoundError("its segment is gone")
            except (OSError, ValueError) as error:
                self.num_torn_chunks += 1
                logger.warning("skipped %s: %s", self.chunk_path(CATALOG, number), error)
                continue
            used = int(np.flatnonzero(holds)[-1]) + 1
            raw = records["key"][:used].tobytes()
            keys = tuple(
                PageKey(raw[32 * row : 32 * row + 32]) if held else None
                for row, held in enumerate(holds[:used].tolist())
            )
            crcs = records["layer_crcs"][:used].copy()
            loaded.append(Segment(number=number, keys=keys, crcs=crcs))
        return loaded

    def prepare(self) -> None:
        """Make the group ready for its lane's writer, after ``load``.

        Makes missing folders and documents, removes what interrupted writers left (bytes without
        a record do not exist) and rewrites missing chunks of derived columns.
        """
        files.make_dir(self.path)
        missing = [array for array in self._arrays if self._num_rows(array) is None]
        if missing or metadata.read_document(self.path) is None:
            spec, codec = self.segment_format.spec, self.segment_format.codec
            documents = metadata.array_documents(spec, codec, self.geometry)
            for array in missing:
                files.make_dir(self.path / array)
                files.write_atomic(self.path / array / METADATA, [documents[array]])
                files.sync_dir(self.path / array)
            files.write_atomic(self.path / METADATA, [metadata.group_document()])
            files.sync_dir(self.path)
        files.remove_temps(self.path)
        committed = self._chunk_sizes(CATALOG)
        for array in self._arrays:
            files.remove_temps(self.path / array)
            for number in self._chunk_sizes(array).keys() - committed:
                files.remove(self.chunk_path(array, number))
        self._complete_columns()
        self._set_capacity(self.next_segment)

    def commit(
        self,
        first: int,
        batches: Sequence[Sequence[tuple[PageEntry, Array]]],
        *,
        store_tokens: bool,
    ) -> list[Segment]:
        """Write segments ``first``, ``first + 1``, … durably: all of them or none.

        Raises:
            OSError: The system could not write; nothing is left of the segments.
            ValueError: The codec cannot represent a number; the same.
        """
        numbers = range(first, first + len(batches))
        try:
            segments, chunks = self._write_segments(numbers, batches, store_tokens=store_tokens)
            for number, chunk in zip(numbers, chunks, strict=True):
                files.write_atomic(self.chunk_path(CATALOG, number), [chunk])
            files.sync_dir(self.path / CATALOG)
        except BaseException:
            for number in numbers:
                for array in (CATALOG, KV):
                    with contextlib.suppress(OSError):
                        files.remove(self.chunk_path(array, number))
            raise
        for number, chunk in zip(numbers, chunks, strict=True):
            self._write_columns(number, chunk.tobytes())
        return segments

    def grow(self, num_segments: int) -> None:
        """Make the arrays long enough for so many segments; in steps, so that it happens rarely."""
        with self._growth:
            if num_segments > self._capacity:
                ahead = min(max(num_segments, _FIRST_SEGMENTS), _MORE_SEGMENTS)
                self._set_capacity(num_segments + ahead)

    def trim(self) -> None:
        """Make the arrays end where the last segment does."""
        with self._growth:
            self._set_capacity(self.next_segment)

    def locate(self, row: int) -> tuple[Segment, int] | None:
        """The segment of a row and its place in it; None if the row never held a page."""
        number, place = divmod(row, self.geometry.rows)
        segment = self.segments.get(number)
        if segment is None or place >= len(segment.keys) or segment.keys[place] is None:
            return None
        return segment, place

    def read(
        self, segment: Segment, places: Sequence[int], layer: int | None, out: Sequence[Array]
    ) -> Sequence[int]:
        """Read pages of one segment, or one layer of each, into ``out``.

        Returns:
            Positions in ``places`` of the pages that are damaged or gone.

        Raises:
            OSError: The system could not read.
        """
        try:
            with files.reading(self.chunk_path(KV, segment.number)) as fd:
                if layer is None:
                    return self.segment_format.read_pages(fd, places, segment.crcs, out)
                return self.segment_format.read_layers(fd, places, layer, segment.crcs, out)
        except OSError as error:
            if files.is_vanished(error):
                return range(len(places))
            raise

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

    def _write_segments(
        self,
        numbers: range,
        batches: Sequence[Sequence[tuple[PageEntry, Array]]],
        *,
        store_tokens: bool,
    ) -> tuple[list[Segment], list[Array]]:
        """Make the segment files durable; also the catalogue chunks that will commit them."""
        segments, chunks, temps = [], [], []
        with contextlib.ExitStack() as stack:
            for number, batch in zip(numbers, batches, strict=True):
                fd, temp = stack.enter_context(files.new_file(self.chunk_path(KV, number)))
                crcs = self.segment_format.write(fd, [page for _, page in batch])
                files.sync_file(fd)
                temps.append(temp)
                entries = [entry for entry, _ in batch]
                keys = tuple(entry.key for entry in entries)
                segments.append(Segment(number=number, keys=keys, crcs=crcs))
                chunks.append(
                    pack_catalog(self.geometry, number, entries, crcs, store_tokens=store_tokens)
                )
            for number, temp in zip(numbers, temps, strict=True):
                temp.replace(self.chunk_path(KV, number))
        files.sync_dir(self.path / KV)
        return segments, chunks

    def _write_columns(self, number: int, chunk: bytes) -> None:
        """Write the derived columns of a segment: a convenience, so failing is only logged."""
        try:
            records, holds = unpack_catalog(self.geometry, number, chunk)
            for name, values in derived_chunks(self.geometry, records, holds).items():
                data = values.reshape(-1).view(np.uint8)
                files.write_atomic(self.chunk_path(name, number), [data], sync=False)
        except (OSError, ValueError) as error:
            logger.warning("could not write the derived columns of %s: %s", self.path, error)

    def _complete_columns(self) -> None:
        incomplete: set[int] = set()
        for column in self._columns:
            sizes = self._chunk_sizes(column.name)
            nbytes = self.geometry.rows * column.row_nbytes
            incomplete |= {n for n in self.segments if sizes.get(n) != nbytes}
        for number in sorted(incomplete):
            with contextlib.suppress(OSError):
                chunk = files.read_bytes(self.chunk_path(CATALOG, number))
                self._write_columns(number, chunk)

    def _chunk_sizes(self, array: str) -> dict[int, int]:
        """Size of each chunk file of an array by its segment."""
        sizes: dict[int, int] = {}
        for name, size in files.file_sizes(self.path / array).items():
            number = segment_number(name, self._arrays[array])
            if number is not None:
                sizes[number] = size
        return sizes

    def _num_rows(self, array: str) -> int | None:
        """Length of an array, or None if its document is missing or torn."""
        document = metadata.read_document(self.path / array)
        try:
            return None if document is None else int(document["shape"][0])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):
            return None

    def _set_capacity(self, num_segments: int) -> None:
        num_rows = num_segments * self.geometry.rows
        lengths = {array: self._num_rows(array) for array in self._arrays}
        made: dict[str, bytes] = {}
        if None in lengths.values():  # damaged meanwhile: they hold nothing that is not known
            made = metadata.array_documents(
                self.segment_format.spec, self.segment_format.codec, self.geometry
            )
        for array, length in lengths.items():
            if length != num_rows:
                path = self.path / array / METADATA
                document = json.loads(files.read_bytes(path) if length is not None else made[array])
                document["shape"][0] = num_rows
                files.write_atomic(path, [json.dumps(document, indent=2).encode()])
        self._capacity = num_segments
