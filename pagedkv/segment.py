"""Segment files: the pages that were written together, as one Zarr shard."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.codec import Bytes, Codec
from pagedkv.format import Geometry, LayerCrcs, crc32c, segment_index
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_TRANSFER_NBYTES = 2**20
"""About how much is encoded before it is written, and read at once: it stays in the CPU's cache."""

_buffers = threading.local()


class SegmentFormat:
    """Writes and reads the segment files of one spec.

    Args:
        spec: Geometry of a page.
        codec: How a layer's numbers become bytes.
        geometry: Sizes and places in the files.
    """

    def __init__(self, spec: KVSpec, codec: Codec, geometry: Geometry) -> None:
        self.spec = spec
        self.codec = codec
        self.geometry = geometry
        self._pages_at_once = max(1, _TRANSFER_NBYTES // geometry.page_nbytes)

    def write(self, fd: int, pages: Sequence[Array]) -> LayerCrcs:
        """Write a whole segment to an empty file; not yet durable.

        Args:
            fd: Descriptor of the file.
            pages: At most ``geometry.rows`` arrays of ``spec.page_shape``, maybe strided.

        Returns:
            CRC32C of each layer, ``(page, layer)``.

        Raises:
            OSError: The system could not write.
            ValueError: The codec cannot represent a number.
        """
        size = self.geometry.page_nbytes
        buffer = _buffer(size * min(self._pages_at_once, len(pages)))
        crcs = np.empty((len(pages), self.geometry.num_layers), np.uint32)
        for start in range(0, len(pages), self._pages_at_once):
            batch = pages[start : start + self._pages_at_once]
            for number, page in enumerate(batch):
                stored = buffer[number * size : (number + 1) * size]
                self._encode(page, stored, crcs[start + number])
            files.write_all(fd, buffer[: len(batch) * size])
        files.write_all(fd, segment_index(self.geometry, len(pages)))
        return crcs

    def read_pages(
        self, fd: int, rows: Sequence[int], crcs: LayerCrcs, out: Sequence[Array]
    ) -> list[int]:
        """Read and verify whole pages; rows that follow one another are read in one call.

        Args:
            fd: Descriptor of the segment file.
            rows: Rows within the segment, in any order.
            crcs: What the catalogue says of all rows of the segment, ``(row, layer)``.
            out: For each row an array of ``spec.page_shape``, maybe strided.

        Returns:
            Positions in ``rows`` of the pages that are damaged; their ``out`` is undefined.
        """
        size = self.geometry.page_nbytes
        damaged: list[int] = []
        for run in self._runs(rows):
            buffer = _buffer(len(run) * size)
            num_read = files.pread_into(fd, buffer, rows[run[0]] * size)
            for number, position in enumerate(run):
                stop = (number + 1) * size
                page = buffer[stop - size : stop]
                if stop > num_read or not self._decode(page, crcs[rows[position]], out[position]):
                    damaged.append(position)
        return damaged

    def read_layers(
        self, fd: int, rows: Sequence[int], layer: int, crcs: LayerCrcs, out: Sequence[Array]
    ) -> list[int]:
        """The same for one layer of each page; ``out`` are arrays of ``spec.layer_shape``."""
        buffer = _buffer(self.geometry.chunk_nbytes)
        place = layer * self.geometry.chunk_nbytes
        damaged: list[int] = []
        for position, row in enumerate(rows):
            num_read = files.pread_into(fd, buffer, row * self.geometry.page_nbytes + place)
            good = num_read == len(buffer) and self._payload_is_good(buffer, int(crcs[row, layer]))
            if good:
                self.codec.decode(self.spec, buffer[:-4], out[position])
            else:
                damaged.append(position)
        return damaged

    def _encode(self, page: Array, stored: Bytes, crcs: "npt.NDArray[np.uint32]") -> None:
        chunks = stored.reshape(self.geometry.num_layers, -1)
        for layer, chunk in enumerate(chunks):
            try:
                self.codec.encode(self.spec, page[layer], chunk[:-4])
            except ValueError as error:
                raise ValueError(f"layer {layer} of a page: {error}") from error
            crcs[layer] = crc32c(chunk[:-4])
        chunks[:, -4:] = crcs.astype("<u4").view(np.uint8).reshape(-1, 4)

    def _decode(self, stored: Bytes, crcs: "npt.NDArray[np.uint32]", out: Array) -> bool:
        chunks = stored.reshape(self.geometry.num_layers, -1)
        trailers = np.ascontiguousarray(chunks[:, -4:]).view("<u4")[:, 0]
        if not np.array_equal(trailers, crcs):
            return False
        for payload, crc, layer in zip(chunks[:, :-4], crcs.tolist(), out, strict=True):
            if crc32c(payload) != crc:
                return False
            self.codec.decode(self.spec, payload, layer)
        return True

    @staticmethod
    def _payload_is_good(chunk: Bytes, crc: int) -> bool:
        trailer = int.from_bytes(chunk[-4:].tobytes(), "little")
        return trailer == crc == crc32c(chunk[:-4])

    def _runs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        run: list[int] = []
        for position in sorted(range(len(rows)), key=rows.__getitem__):
            follows = run and rows[position] == rows[run[-1]] + 1
            if run and (not follows or len(run) == self._pages_at_once):
                yield run
                run = []
            run.append(position)
        if run:
            yield run


def _buffer(nbytes: int) -> Bytes:
    """The calling thread's transfer buffer, valid until its next call."""
    buffer: Bytes | None = getattr(_buffers, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(max(nbytes, _TRANSFER_NBYTES), np.uint8)
        _buffers.buffer = buffer
    return buffer[:nbytes]
