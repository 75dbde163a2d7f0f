"""``SpillFile``: scratch space on disk for pages of live sequences that must come back exactly.

A private page has no identity that anybody could look up later, and a prompt longer than the pool
reaches the cache one layer at a time. So these pages do not go into the store's segments, but into
a file without a name, as raw numbers, which is gone when its process is.
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.disk_threads import DiskThreads, Job
from pagedkv.errors import ClosedError, CorruptPageError
from pagedkv.file_ranges import read_ranges
from pagedkv.files import Bytes
from pagedkv.memory import Numbers
from pagedkv.records import Crcs, compiled_reads
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_UNWRITTEN = -1
_NUM_THREADS = 4
"""Requests to the disk that are in flight at once …"""
_JOB_NBYTES = 2**20
"""… and about how much each of them reads."""
_MAX_TRIES = 4
"""After so many reads that the page cache could not serve, the next one hardly can."""


class _Blocks(NamedTuple):
    """Layers that are wanted."""

    offsets: Numbers
    """Where each begins in the file."""
    at: Numbers
    """Rows that they go to."""
    crcs: Crcs
    numbers: Numbers
    """Which flag says whether one is good."""

    def part(self, chosen: Numbers) -> "_Blocks":
        """Those of them."""
        offsets, at, crcs, numbers = self
        return _Blocks(offsets[chosen], at[chosen], crcs[chosen], numbers[chosen])


class SpillFile:
    """Fixed-size records of one spec in a nameless file; each layer carries a checksum.

    Thread-safe. Records are reused when they are freed; the file keeps the size it once had.

    Args:
        spec: Geometry of a page; a record has ``spec.page_nbytes`` bytes.
        folder: Where the file lives: the folder of the store's own lane.
        reserve: Called with the bytes by which the file is about to grow; raises
            ``StoreFullError`` when the store's bound leaves no room.
        deadline: Seconds after which a read that hangs in the system is given up; None waits for
            ever.

    Raises:
        StoreError: The file cannot be made; the message names the folder.
    """

    def __init__(
        self,
        spec: KVSpec,
        folder: Path,
        reserve: Callable[[int], None],
        deadline: float | None = None,
    ) -> None:
        self.spec = spec
        self._layer_nbytes = spec.layer_nbytes
        self._reserve = reserve
        self._lock = threading.Condition()  # notified when a read or write ends
        self._free: list[int] = []
        self._num_records = 0
        self._crcs: dict[int, npt.NDArray[np.int64]] = {}
        self._unwritten: dict[tuple[int, int], Array] = {}  # (record, layer) that a write harmed
        self._held: Counter[int] = Counter()
        self._leaving: set[int] = set()  # freed, but held
        self._num_users = 0
        self._is_closed = False
        self._deadline = deadline
        self._threads = DiskThreads(_NUM_THREADS)
        weakref.finalize(self, self._threads.close).atexit = False
        self._where = f"the spill file in {folder}"
        with files.translated(folder):
            self._fd = files.scratch_file(folder)
        self._close_file = weakref.finalize(self, files.close_file, self._fd)

    @property
    def num_used(self) -> int:
        """Records that hold a page."""
        return len(self._crcs)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._num_records * self.spec.page_nbytes

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` records; their layers read as zeros until written.

        Raises:
            StoreFullError: The file would have to grow beyond the bound; nothing has changed.
        """
        with self._lock:
            growth = max(0, count - len(self._free))
            if growth:
                self._reserve(growth * self.spec.page_nbytes)
            self._free.extend(reversed(range(self._num_records, self._num_records + growth)))
            self._num_records += growth
            records = [self._free.pop() for _ in range(count)]
            for record in records:
                self._crcs[record] = np.full(self.spec.held_layers, _UNWRITTEN, dtype=np.int64)
            return records

    def hold(self, records: Sequence[int]) -> None:
        """Keep records as they are until ``let_go``, though they are freed: they are being read."""
        with self._lock:
            self._held.update(records)

    def let_go(self, records: Sequence[int]) -> None:
        """Take one ``hold`` back; what was freed meanwhile is free now."""
        with self._lock:
            self._held.subtract(records)
            for record in records:
                if not self._held[record]:
                    del self._held[record]
                    if record in self._leaving:
                        self._leaving.remove(record)
                        self.free(record)

    def free(self, record: int) -> None:
        """Give a record back."""
        with self._lock:
            if self._held[record]:
                self._leaving.add(record)
                return
            del self._crcs[record]
            for layer in range(self.spec.held_layers) if self._unwritten else ():
                self._unwritten.pop((record, layer), None)
            self._free.append(record)

    def write_layer(
        self, record: int, layer: int, values: Array, before: Array | None = None
    ) -> None:
        """Write one layer, ``(kind, token, head, channel)``.

        Args:
            record: Of which page.
            layer: Which layer of it.
            values: What to write.
            before: What the layer holds now; kept in memory if the write fails half-way, so that
                nothing is lost.

        Raises:
            StoreError: The disk failed.
            ClosedError: The file is closed.
        """
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        try:
            with self._open_file() as descriptor, files.translated(self._where):
                files.pwrite_all(descriptor, data, self._offset(record, layer))
        except BaseException:
            if before is not None:
                self._unwritten[record, layer] = before
            raise
        self._crcs[record][layer] = google_crc32c.value(data)
        self._unwritten.pop((record, layer), None)

    def write_page(self, record: int, page: Array) -> None:
        """Write a whole page, ``(layer, kind, token, head, channel)``."""
        for layer in range(self.spec.held_layers):
            self.write_layer(record, layer, page[layer])

    def read_layer(self, record: int, layer: int, out: Array) -> None:
        """``read_layers`` of one record, into ``(kind, token, head, channel)``."""
        self.read_layers([record], layer, out[None])

    def read_layers(
        self, records: Sequence[int], layer: int, out: Array, at: Numbers | None = None
    ) -> None:
        """Read one layer of many records.

        Args:
            records: Which.
            layer: Which layer of them.
            out: ``(page, kind, token, head, channel)``.
            at: For each record its place in ``out``; 0, 1, … by default.

        Raises:
            CorruptPageError: The bytes are not those that were written.
            StoreTimeoutError: The disk did not answer in time; ``out`` is not touched any more.
            StoreError: The disk failed.
        """
        places = np.arange(len(records)) if at is None else at
        wanted = []
        for number, (record, place) in enumerate(zip(records, places.tolist(), strict=True)):
            kept = self._unwritten.get((record, layer))
            if kept is not None:
                out[place] = kept
            elif self._crcs[record][layer] == _UNWRITTEN:
                out[place] = np.zeros((), dtype=out.dtype)
            else:
                wanted.append(number)
        if not wanted:
            return
        crcs = [self._crcs[records[number]][layer] for number in wanted]
        offsets = [self._offset(records[number], layer) for number in wanted]
        blocks = _Blocks(
            np.array(offsets, np.int64),
            places[wanted],
            np.array(crcs, np.int64).astype(np.uint32),
            np.arange(len(wanted)),
        )
        rows = _as_rows(out)
        if rows is None:
            rows = np.empty((len(wanted), self._layer_nbytes), np.uint8)
            good = self._read(blocks._replace(at=blocks.numbers), rows)
            numbers = rows.view(self.spec.np_dtype).reshape(-1, *self.spec.layer_shape)
            out[places[wanted]] = numbers
        else:
            good = self._read(blocks, rows)
        if not good.all():
            raise CorruptPageError(
                f"layer {layer} of a page of a live sequence came back damaged from {self._where}"
            )

    def read_page(self, record: int, out: Array) -> None:
        """Read a whole page into ``out``, ``(layer, kind, token, head, channel)``."""
        for layer in range(self.spec.held_layers):
            self.read_layer(record, layer, out[layer])

    def _read(self, blocks: "_Blocks", out: Array) -> npt.NDArray[np.bool_]:
        """Read blocks into rows of ``out``, uint8; which of them are good."""
        good, was_read = np.zeros((2, len(blocks.numbers)), np.bool_)
        with self._open_file() as fd, files.translated(self._where):
            kernels, function = compiled_reads(), files.preadv2_address()
            if kernels is not None and function:
                kernels.read_blocks(
                    function,
                    files.NOW_FLAGS,
                    fd,
                    blocks.offsets,
                    self._layer_nbytes,
                    out.__array_interface__["data"][0] + blocks.at * out.strides[0],
                    _MAX_TRIES,
                    blocks.crcs,
                    good,
                    was_read,
                )
            if not was_read.all():
                self._read_cold(fd, blocks.part(np.flatnonzero(~was_read)), out, good)
        return good

    def _read_cold(
        self, fd: int, blocks: "_Blocks", out: Array, good: npt.NDArray[np.bool_]
    ) -> None:
        """The same by disk threads, which wait for the disk."""
        order = np.argsort(blocks.offsets, kind="stable")
        most = max(1, min(_JOB_NBYTES // self._layer_nbytes, -(-len(order) // _NUM_THREADS)))
        jobs = [
            self._job(fd, blocks.part(order[begin : begin + most]), out, good)
            for begin in range(0, len(order), most)
        ]
        expires = None if self._deadline is None else time.monotonic() + self._deadline
        try:
            self._threads.start(jobs)
            self._threads.wait(jobs, expires)
        except BaseException:
            self._threads.call_off(jobs)
            raise

    def _job(self, fd: int, blocks: "_Blocks", out: Array, good: npt.NDArray[np.bool_]) -> Job:
        """A job for a disk thread that reads some blocks, verifies them and copies them."""
        size, count = self._layer_nbytes, len(blocks.numbers)
        targets = np.arange(count, dtype=np.int64) * size
        num_read = np.zeros(count, np.int64)

        def fetch(memory: Bytes) -> int:
            with files.translated(self._where):
                lengths = np.full(count, size, np.int64)
                read_ranges(fd, blocks.offsets, lengths, memory, targets, num_read)
            return int(num_read.sum())

        def use(memory: Bytes, _: int) -> None:
            for number, target in enumerate(targets.tolist()):
                data = memory[target : target + int(num_read[number])]
                is_good = len(data) == size and google_crc32c.value(data) == blocks.crcs[number]
                good[blocks.numbers[number]] = is_good
                if is_good:
                    out[blocks.at[number]] = data

        return Job(fetch, use, count * size, self._where)

    def close(self) -> None:
        """Wait for reads and writes in progress, then drop the file and all that is in it."""
        with self._lock:
            self._is_closed = True
            while self._num_users:
                self._lock.wait()
            self._threads.close()
            self._close_file()

    @contextmanager
    def _open_file(self) -> Iterator[int]:
        """The descriptor, which stays open inside the block; ``ClosedError`` if it is closed."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the cache was closed meanwhile: make another")
            self._num_users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._num_users -= 1
                self._lock.notify_all()

    def _offset(self, record: int, layer: int) -> int:
        return (record * self.spec.held_layers + layer) * self._layer_nbytes


def _as_rows(out: Array) -> Array | None:
    """``(page, byte)`` of contiguous layers ``(page, kind, token, head, channel)``, if they are."""
    if not len(out) or not out[0].flags.c_contiguous:
        return None
    rows: Array = np.lib.stride_tricks.as_strided(
        out.view(np.uint8), (len(out), out[0].nbytes), (out.strides[0], 1)
    )
    return rows
