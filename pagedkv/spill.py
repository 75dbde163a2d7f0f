"""``SpillFile``: scratch space on disk for pages of live sequences that must come back exactly.

A private page has no identity that anybody could look up later, and a prompt longer than the pool
reaches the cache one layer at a time. So these pages do not go into the store's segments, but into
a file without a name, as raw numbers, which is gone when its process is.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.errors import ClosedError, CorruptPageError
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_UNWRITTEN = -1


class SpillFile:
    """Fixed-size records of one spec in a nameless file; each layer carries a checksum.

    Thread-safe. Records are reused when they are freed; the file keeps the size it once had.

    Args:
        spec: Geometry of a page; a record has ``spec.page_nbytes`` bytes.
        folder: Where the file lives: the folder of the store's own lane.
        reserve: Called with the bytes by which the file is about to grow; raises
            ``StoreFullError`` when the store's bound leaves no room.

    Raises:
        StoreError: The file cannot be made; the message names the folder.
    """

    def __init__(self, spec: KVSpec, folder: Path, reserve: Callable[[int], None]) -> None:
        self.spec = spec
        self._layer_nbytes = spec.layer_nbytes
        self._reserve = reserve
        self._lock = threading.Condition()  # notified when a read or write ends
        self._free: list[int] = []
        self._num_records = 0
        self._crcs: dict[int, npt.NDArray[np.int64]] = {}
        self._unwritten: dict[tuple[int, int], Array] = {}  # (record, layer) that a write harmed
        self._num_users = 0
        self._is_closed = False
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

    def free(self, record: int) -> None:
        """Give a record back."""
        with self._lock:
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
        """Read one layer into ``out``, ``(kind, token, head, channel)``.

        Raises:
            CorruptPageError: The bytes are not those that were written.
            StoreError: The disk failed.
        """
        kept = self._unwritten.get((record, layer))
        if kept is not None:
            out[...] = kept
            return
        crc = int(self._crcs[record][layer])
        if crc == _UNWRITTEN:
            out[...] = np.zeros((), dtype=out.dtype)
            return
        data = np.empty(self._layer_nbytes, dtype=np.uint8)
        with self._open_file() as descriptor, files.translated(self._where):
            done = files.pread_into(descriptor, data, self._offset(record, layer))
        if done < len(data) or google_crc32c.value(data) != crc:
            raise CorruptPageError(
                f"layer {layer} of a page of a live sequence came back damaged from {self._where}"
            )
        out[...] = data.view(self.spec.np_dtype).reshape(self.spec.layer_shape)

    def read_page(self, record: int, out: Array) -> None:
        """Read a whole page into ``out``, ``(layer, kind, token, head, channel)``."""
        for layer in range(self.spec.held_layers):
            self.read_layer(record, layer, out[layer])

    def close(self) -> None:
        """Wait for reads and writes in progress, then drop the file and all that is in it."""
        with self._lock:
            self._is_closed = True
            while self._num_users:
                self._lock.wait()
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
