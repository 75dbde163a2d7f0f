"""``PageReader``: pages of segment files, verified, straight into the caller's memory.

What lies in the page cache is read and decoded by the caller's own thread. What does not goes to
disk threads: several requests in flight, decoding beside reading, and a deadline.
"""

import errno
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import files, records
from pagedkv.codec import Crcs, FiledRecords
from pagedkv.disk_threads import DiskThreads, Job
from pagedkv.file_ranges import read_ranges
from pagedkv.files import Bytes
from pagedkv.format import crc32c
from pagedkv.lane import Segment
from pagedkv.mapped_files import MappedFiles
from pagedkv.memory import Numbers, PageArrays, PageMemory
from pagedkv.segment import (
    EXTENT_NBYTES,
    PIECE_NBYTES,
    SMALL_NBYTES,
    Piece,
    SegmentFormat,
    transfer_buffer,
)
from pagedkv.segment_files import OpenFile, SegmentFiles
from pagedkv.segment_map import SegmentMap

Array = npt.NDArray[Any]

_MAX_TRIES = 4
_STARTED_TOGETHER = 32
_FIRST_SEGMENTS = 4
"""How many are tried in the page cache before the first disk thread may start …"""
_MORE_SEGMENTS = 16
"""… and how many at once afterwards: their files are open at the same time."""
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_BLOCK_NBYTES = 4096
"""Reads past the page cache begin and end at multiples of this."""


class SegmentRead(NamedTuple):
    """Pages, or one layer of each, that are wanted from one segment."""

    form: SegmentFormat
    """The format of the segment's file."""
    segment: Segment
    segment_map: SegmentMap
    """Where its pages are."""
    rows: Numbers
    """Which of them, ascending."""
    numbers: Numbers
    """For each its number among the caller's pages."""
    layer: int | None
    """Which layer; None for whole pages."""


class _Extent(NamedTuple):
    """Pieces of a segment that follow one another, and are read in one go."""

    read: SegmentRead
    pieces: list[Piece]

    @property
    def offset(self) -> int:
        """Where they begin in the file."""
        return self.pieces[0].offset

    @property
    def nbytes(self) -> int:
        """From the first one's begin to the last one's end."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes - self.offset


class PayloadViews(NamedTuple):
    """Payloads that lie in memory-mapped segments."""

    addresses: Numbers
    """Where each begins."""
    maps: list[Bytes]
    """The segments, which are mapped as long as anybody keeps this."""


class _One:
    """Arguments of a kernel that reads one page: to make them anew costs as much as half of it."""

    def __init__(self) -> None:
        self.fds, self.offsets, self.addresses = (np.zeros(1, np.int64) for _ in range(3))
        self.good, self.was_read = (np.zeros(1, np.bool_) for _ in range(2))


class _Spare(threading.local):
    """Each thread's, while they are not in use."""

    one: _One | None = None


_spare = _Spare()


class PageReader:
    """Reads pages from the segment files of a store. Thread-safe.

    Args:
        num_threads: Requests to the disk that are in flight at once.
        direct: Read past the page cache where the file system can: for stores much larger than
            memory, read once in a while.
    """

    def __init__(self, *, num_threads: int, direct: bool) -> None:
        self._files = SegmentFiles(direct=direct)
        self._maps = MappedFiles()
        self._threads = DiskThreads(num_threads)
        self._num_threads = num_threads
        self._direct = direct

    @property
    def num_hung(self) -> int:
        """Disk threads whose read did not end in time and has not ended yet."""
        return self._threads.num_hung

    def read(
        self, wanted: Iterable[SegmentRead], pages: PageArrays, deadline: float | None
    ) -> list[int]:
        """Read and verify.

        Args:
            wanted: What to read.
            pages: Where to. Never written to after this has returned or raised.
            deadline: Seconds from now after which to give up.

        Returns:
            Numbers of the pages that are damaged or gone; what their memory holds is undefined.

        Raises:
            StoreError: The system could not read; the file is named.
            StoreTimeoutError: The disk did not answer in time.
        """
        expires: float | None = None
        damaged: set[int] = set()
        jobs: list[Job] = []
        waiting: list[_Extent] = []

        def start() -> None:
            """Start reading those that wait, in as few jobs as keep all threads busy."""
            nonlocal expires
            if not jobs and deadline is not None:  # nothing had to wait before
                expires = time.monotonic() + deadline
            started = [self._job(part, pages, damaged) for part in self._grouped(waiting)]
            waiting.clear()
            jobs.extend(started)  # first: whatever comes now, they are called off
            self._threads.start(started)

        try:
            for one in self._left_by_kernels(wanted, pages, damaged):
                for extent in one.form.plan(one.segment_map, one.rows, one.layer):
                    rest = extent
                    # Where so many were not in the page cache, the next one hardly is.
                    if self._reads_pieces(one.form) and len(jobs) < _MAX_TRIES:
                        rest = self._read_pieces(one, extent, pages, damaged)
                    if rest:
                        waiting.append(_Extent(one, rest))
                        if len(jobs) < _MAX_TRIES or len(waiting) >= _STARTED_TOGETHER:
                            start()
            if waiting:
                start()
            self._threads.wait(jobs, expires)
        except BaseException:
            self._threads.call_off(jobs)
            raise
        return sorted(damaged)

    def _grouped(self, extents: Sequence[_Extent]) -> Iterator[Sequence[_Extent]]:
        """Cut extents into groups that are read by one thread, one after the other."""
        at_once = -(-len(extents) // self._num_threads)
        group: list[_Extent] = []
        nbytes = 0
        for extent in extents:
            is_other = bool(group) and extent.read.segment is not group[0].read.segment
            if is_other or len(group) >= at_once or nbytes + extent.nbytes > EXTENT_NBYTES:
                if group:
                    yield group
                group, nbytes = [], 0
            group.append(extent)
            nbytes += extent.nbytes
        if group:
            yield group

    def view(self, wanted: Iterable[SegmentRead], count: int) -> tuple[PayloadViews, list[int]]:
        """Find and verify payloads in mapped segments.

        Args:
            wanted: Which; one layer of each.
            count: How many are wanted.

        Returns:
            Where they are, and the numbers of those that are damaged or gone.

        Raises:
            StoreError: A file could not be mapped.
        """
        addresses = np.zeros(count, np.int64)
        crcs, good = np.zeros(count, np.uint32), np.zeros(count, np.bool_)
        maps = []
        payload_nbytes = 0
        for one in wanted:
            payload_nbytes = one.form.geometry.payload_nbytes
            layer = one.layer
            assert layer is not None
            starts = one.rows * one.form.page_nbytes + layer * one.form.chunk_nbytes
            with files.translated(one.segment.path, "map"):
                try:
                    mapped = self._maps.get(one.segment, one.segment.path)
                except OSError as error:
                    if not files.is_vanished(error):
                        raise
                    continue
            is_here = starts + one.form.chunk_nbytes <= len(mapped.data)
            numbers, starts = one.numbers[is_here], starts[is_here]
            addresses[numbers] = starts + mapped.address
            crcs[numbers] = one.segment_map.crcs[one.rows[is_here], layer]
            good[numbers] = one.segment_map.holds[one.rows[is_here]]
            maps.append(mapped.data)
        kernels, readers = records.compiled(), records.compiled_reads()
        assert kernels is not None
        assert readers is not None
        if files.madvise_address():  # many at once; what is there already costs little
            readers.look_ahead(files.madvise_address(), addresses[good], payload_nbytes + 4)
        kernels.check_payloads(addresses, payload_nbytes, crcs, good)
        return PayloadViews(addresses, maps), np.flatnonzero(~good).tolist()

    def read_one(
        self,
        form: SegmentFormat,
        segment: Segment,
        crcs: Crcs,
        row: int,
        layer: int | None,
        out: Array,
    ) -> bool | None:
        """Read one page, or one layer of it, that lies in the page cache.

        Args:
            form: The format of the segment's file, in which all chunks have one size.
            segment: The segment.
            crcs: CRC32C of each layer of its pages, ``(row, layer)``.
            row: Which page.
            layer: Which layer; None for all.
            out: Where to; its blocks are contiguous.

        Returns:
            Whether it is good; None if it is not in the page cache, or not to be had so.
        """
        if self._direct:
            return None
        try:
            file = self._files.take(segment, segment.path)
            try:
                return self._read_layers(file.fd, form, crcs, row, layer, out)
            finally:
                self._files.give_back(file)
        except OSError:  # ``read`` says what it is
            return None

    def _read_layers(
        self,
        fd: int,
        form: SegmentFormat,
        crcs: Crcs,
        row: int,
        layer: int | None,
        out: Array,
    ) -> bool | None:
        chunk_nbytes = form.chunk_nbytes
        first, stop = (0, form.num_layers) if layer is None else (layer, layer + 1)
        start = row * form.page_nbytes
        if stop - first == 1 and chunk_nbytes <= SMALL_NBYTES:
            if form.is_plain and out.flags.c_contiguous:
                # No kernel, no buffer: for a few bytes they cost more than the reading.
                trailer = bytearray(4)
                at = start + first * chunk_nbytes
                if files.pread_parts_now(fd, [out, trailer], at) < chunk_nbytes:
                    return None
                crc = crcs.item(row, first)
                return bool(int.from_bytes(trailer, "little") == crc == crc32c(out))
            with transfer_buffer(chunk_nbytes) as stored:
                if files.pread_now(fd, stored, start + first * chunk_nbytes) < chunk_nbytes:
                    return None
                return form.decode_small(stored, int(crcs[row, first]), out)
        address = out.__array_interface__["data"][0]
        if self._reads_by_kernels(form):
            strides = out.strides[0], out.strides[-4]
            return self._read_one_now(fd, start, form, crcs[row : row + 1], layer, address, strides)
        at_once = max(1, PIECE_NBYTES // chunk_nbytes)
        for begin in range(first, stop, at_once):
            end = min(begin + at_once, stop)
            place = np.array([address + (begin - first) * out.strides[0]])
            memory = PageMemory(place, out.strides[0], out.strides[-4])
            with transfer_buffer((end - begin) * chunk_nbytes) as stored:
                if files.pread_now(fd, stored, start + begin * chunk_nbytes) < len(stored):
                    return None
                if not form.decode_layers(stored, crcs[row : row + 1, begin:end], memory):
                    return False
        return True

    def _read_one_now(
        self,
        fd: int,
        start: int,
        form: SegmentFormat,
        crcs: Crcs,
        layer: int | None,
        address: int,
        strides: tuple[int, int],
    ) -> bool | None:
        """Let a kernel read one page, or one layer of it; as ``read_one``.

        Args:
            fd: The segment's file.
            start: Where the page begins in it.
            form: The format of the file.
            crcs: CRC32C of each layer of the page, ``(1, layer)``.
            layer: Which layer; None for all.
            address: Where it goes.
            strides: Of layers and kinds there.
        """
        one = _spare.one or _One()
        _spare.one = None  # whoever interrupts this, such as a signal handler, makes its own
        try:
            one.fds[0], one.offsets[0], one.addresses[0] = fd, start, address
            one.good[0], one.was_read[0] = True, False
            memory = PageMemory(one.addresses, *strides)
            with transfer_buffer(_buffer_nbytes(form)) as buffer:
                source = _records(form, one.fds, one.offsets, 1, buffer)
                form.read_now(source, layer, memory, crcs, one.good, one.was_read)
            return bool(one.good[0]) if one.was_read[0] else None
        finally:
            _spare.one = one

    def forget(self, segment: Segment) -> None:
        """Close the file of a segment that is gone."""
        self._files.forget(segment)
        self._maps.forget(segment)

    def close(self) -> None:
        """Close all files and let the threads end."""
        self._maps.close()
        self._files.close()
        self._threads.close()

    def _reads_by_kernels(self, form: SegmentFormat) -> bool:
        """Whether kernels read what is in the page cache."""
        has_kernels = form.has_fixed_size and records.compiled_reads() is not None
        return has_kernels and not self._direct and bool(files.preadv2_address())

    def _reads_pieces(self, form: SegmentFormat) -> bool:
        """Whether what is in the page cache is read piece by piece."""
        return not self._direct and not self._reads_by_kernels(form)

    def _left_by_kernels(
        self, wanted: Iterable[SegmentRead], pages: PageArrays, damaged: set[int]
    ) -> Iterator[SegmentRead]:
        """Read what is in the page cache, as far as kernels can; what is left to be read."""
        rest = iter(wanted)
        batch = list(islice(rest, 1))
        misses = 0
        if batch and self._reads_by_kernels(batch[0].form):
            batch += islice(rest, _FIRST_SEGMENTS - 1)
            while batch and misses < _MAX_TRIES:
                batch, missed = self._read_now(batch, pages, damaged, _MAX_TRIES - misses)
                yield from batch
                misses += missed
                batch = list(islice(rest, _MORE_SEGMENTS))
        yield from batch
        yield from rest  # where so many were not in the page cache, the next one hardly is

    def _read_now(
        self, batch: list[SegmentRead], pages: PageArrays, damaged: set[int], max_misses: int
    ) -> tuple[list[SegmentRead], int]:
        """Let a kernel read from some segments; what is left, and how many reads failed."""
        taken: list[OpenFile] = []
        later: list[SegmentRead] = []
        try:
            batch = [one for one in batch if self._take(one, taken, later, damaged)]
            if not batch:
                return later, 0
            form = batch[0].form
            rows = np.concatenate([one.rows for one in batch])
            numbers = np.concatenate([one.numbers for one in batch])
            counts = [len(one.rows) for one in batch]
            fds = np.repeat(np.array([file.fd for file in taken], np.int64), counts)
            crcs = np.concatenate([one.segment_map.crcs.take(one.rows, 0) for one in batch])
            good = np.concatenate([one.segment_map.holds.take(one.rows) for one in batch])
            was_read = np.zeros(len(rows), np.bool_)
            memory = pages.memory.part(numbers)
            with transfer_buffer(_buffer_nbytes(form)) as buffer:
                source = _records(form, fds, rows * form.page_nbytes, max_misses, buffer)
                missed = form.read_now(source, batch[0].layer, memory, crcs, good, was_read)
        finally:
            for file in taken:
                self._files.give_back(file)
        damaged.update(numbers[was_read & ~good].tolist())
        if was_read.all():
            return later, missed
        parts = np.split(~was_read, np.cumsum(counts)[:-1])
        left = [
            one._replace(rows=one.rows[part], numbers=one.numbers[part])
            for one, part in zip(batch, parts, strict=True)
            if part.any()
        ]
        return left + later, missed

    def _take(
        self,
        one: SegmentRead,
        taken: list[OpenFile],
        later: list[SegmentRead],
        damaged: set[int],
    ) -> bool:
        """Take the segment's file; whether it could be taken.

        If it is gone its pages are lost. If too many are open it is left for later.
        """
        try:
            taken.append(self._files.take(one.segment, one.segment.path))
        except OSError as error:
            if files.is_vanished(error):
                damaged.update(one.numbers.tolist())
            elif error.errno in _TOO_MANY and taken:
                later.append(one)
            else:
                files.raise_translated(error, one.segment.path, "read")
            return False
        return True

    def _read_pieces(
        self, one: SegmentRead, extent: list[Piece], pages: PageArrays, damaged: set[int]
    ) -> list[Piece]:
        """Read what is in the page cache, a piece at a time; the pieces that are not."""
        with files.translated(one.segment.path, "read"):
            try:
                with self._files.reading(one.segment, one.segment.path) as fd:
                    for number, piece in enumerate(extent):
                        with transfer_buffer(piece.nbytes) as stored:
                            if files.pread_now(fd, stored, piece.offset) < piece.nbytes:
                                return extent[number:]
                            _decode(one, piece, stored, pages, damaged)
            except OSError as error:
                if not files.is_vanished(error):
                    raise
                damaged.update(one.numbers.tolist())
        return []

    def _job(self, extents: Sequence[_Extent], pages: PageArrays, damaged: set[int]) -> Job:
        """A job for a disk thread that reads and decodes pieces of one segment."""
        one = extents[0].read
        offsets = np.array([extent.offset for extent in extents], np.int64)
        sizes = np.array([extent.nbytes for extent in extents], np.int64)
        starts, lengths = offsets, sizes
        if self._direct:
            starts = offsets - offsets % _BLOCK_NBYTES
            lengths = -(-(offsets + sizes - starts) // _BLOCK_NBYTES) * _BLOCK_NBYTES
        # Where they go: at the same place within a page of memory as in the file.
        rooms = -(-(lengths + starts % _BLOCK_NBYTES) // _BLOCK_NBYTES) * _BLOCK_NBYTES
        targets = np.cumsum(rooms) - rooms + starts % _BLOCK_NBYTES
        num_read = np.zeros(len(extents), np.int64)

        def fetch(memory: Bytes) -> int:
            with files.translated(one.segment.path, "read"):
                try:
                    with self._files.reading(one.segment, one.segment.path) as fd:
                        read_ranges(
                            fd, starts, lengths, memory, targets, num_read, hint=not self._direct
                        )
                except OSError as error:
                    if not files.is_vanished(error):
                        raise
            return int(num_read.sum())

        def use(memory: Bytes, _: int) -> None:
            for number, extent in enumerate(extents):
                shift = int(targets[number] - starts[number])
                stop = int(targets[number] + num_read[number])
                for piece in extent.pieces:
                    at = piece.offset + shift
                    stored = memory[at : min(at + piece.nbytes, stop)]
                    _decode(extent.read, piece, stored, pages, damaged)

        return Job(fetch, use, int(rooms.sum()), one.segment.path)


def _buffer_nbytes(form: SegmentFormat) -> int:
    """What a kernel needs to read pages of this format."""
    return max(PIECE_NBYTES, form.chunk_nbytes) + _BLOCK_NBYTES


def _records(
    form: SegmentFormat, fds: Numbers, offsets: Numbers, max_misses: int, buffer: Bytes
) -> FiledRecords:
    function, flags = files.preadv2_address(), files.NOW_FLAGS
    return FiledRecords(function, flags, fds, offsets, max_misses, buffer, form.chunk_nbytes)


def _decode(
    one: SegmentRead, piece: Piece, stored: Bytes, pages: PageArrays, damaged: set[int]
) -> None:
    """Decode a piece, of which perhaps only the beginning was read; note the damaged pages."""
    if len(stored) < piece.nbytes:  # the file ends too early
        padded = np.zeros(piece.nbytes, np.uint8)
        padded[: len(stored)] = stored
        stored = padded
    good = one.form.decode(stored, piece, one.segment_map, one.rows, pages, one.numbers, one.layer)
    if not good.all():
        damaged.update(one.numbers[piece.pages][~good].tolist())
