"""Segment files: the pages that were written together, as one Zarr shard."""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.codec import (
    Bytes,
    Codec,
    Crcs,
    Decoder,
    FiledRecords,
    FixedCodec,
    Lossless,
    Payloads,
    Raw,
    check_finite,
)
from pagedkv.format import Geometry, LayerSizes, crc32c, segment_index
from pagedkv.memory import Numbers, PageArrays, PageMemory, aligned
from pagedkv.segment_map import SegmentMap, bounds_of
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

PIECE_NBYTES = 256 * 2**10
"""About how much is read at once from the page cache: what was read is decoded while it is still
in the processor's cache."""
EXTENT_NBYTES = 1024 * 2**10
"""About how much is read at once from the disk."""
_GAP_NBYTES = 16 * 2**10
"""Unwanted bytes between two pages that are read along rather than leaving two reads."""
_WRITE_NBYTES = 2**20
SMALL_NBYTES = 4096
"""Chunks up to this size are decoded by numpy sooner than a kernel is called."""

_ONLY = slice(0, 1)
_AT_START = np.zeros(1, np.int64)
_buffers = threading.local()


class Piece(NamedTuple):
    """Bytes of a segment file that are read and decoded at once."""

    offset: int
    nbytes: int
    pages: slice
    """Which of the wanted pages, in the order of their rows."""
    starts: Numbers
    """Where the first wanted chunk of each of them lies in the piece."""
    first_layer: int
    num_layers: int


class SegmentFormat:
    """Writes the segment files of one spec, and decodes what is read from them.

    Args:
        spec: Geometry of a page.
        codec: How a layer's numbers become bytes.
        geometry: Sizes and places in the files.
    """

    def __init__(self, spec: KVSpec, codec: Codec, geometry: Geometry) -> None:
        self.spec = spec
        self.codec = codec
        self.geometry = geometry
        self._fixed = cast("FixedCodec", codec)  # used only if its sizes are fixed
        self._decoder: Decoder = self._fixed
        self._variable = cast("Lossless", codec)  # used only if they are not
        # What a read of one small page would else compute anew.
        self.num_layers = geometry.num_layers
        self.chunk_nbytes = geometry.chunk_nbytes
        self.page_nbytes = geometry.page_nbytes
        self.has_fixed_size = geometry.fixed_size
        self.is_plain = isinstance(codec, Raw) and spec.np_dtype.kind == "f"
        self.page_shape = spec.page_shape
        self.layer_shape = spec.layer_shape
        self.dtype = spec.np_dtype
        self.block_strides = np.empty(spec.layer_shape[1:], spec.np_dtype).strides

    def of_payloads(self) -> "SegmentFormat":
        """The same files, read without decoding: a layer is its payload, ``(1, 1, 1, byte)``.

        It reads what a codec of fixed size wrote; other codecs it cannot read.
        """
        nbytes = self.geometry.payload_nbytes
        form = copy.copy(self)
        form._decoder = Payloads(nbytes)
        form.is_plain = False
        form.dtype = np.dtype(np.uint8)
        form.layer_shape = (1, 1, 1, nbytes)
        form.page_shape = (self.num_layers, *form.layer_shape)
        form.block_strides = (nbytes, nbytes, 1)
        return form

    def write(self, fd: int, pages: PageArrays, first: int, count: int) -> SegmentMap:
        """Write a whole segment to an empty file; not yet durable.

        Args:
            fd: Descriptor of the file.
            pages: Pages, whole.
            first: The first of them that belongs to the segment.
            count: How many do, at most ``geometry.rows``.

        Raises:
            OSError: The system could not write.
            ValueError: The codec cannot represent a number.
        """
        crcs = np.zeros((count, self.num_layers), np.uint32)
        sizes = np.full(crcs.shape, self.geometry.payload_nbytes, np.uint32)
        if self.has_fixed_size:
            self._write_fixed(fd, pages, first, crcs)
        else:
            self._write_variable(fd, pages, first, crcs, sizes)
        files.write_all(fd, segment_index(self.geometry, sizes))
        bounds = None if self.has_fixed_size else bounds_of(sizes)
        return SegmentMap(holds=np.ones(count, np.bool_), crcs=crcs, bounds=bounds)

    def write_stored(self, fd: int, stored: Sequence[Bytes], sizes: LayerSizes) -> None:
        """Write a whole segment of pages as they were read from others; not yet durable.

        Args:
            fd: Descriptor of an empty file.
            stored: The stored bytes of each page.
            sizes: Payload bytes of each layer, ``(page, layer)``.
        """
        for page in stored:
            files.write_all(fd, page)
        files.write_all(fd, segment_index(self.geometry, sizes))

    def extents(self, segment_map: SegmentMap) -> tuple[Numbers, Numbers]:
        """Where the stored bytes of each row's page begin and end in the file."""
        if segment_map.bounds is not None:
            return segment_map.bounds[:, 0], segment_map.bounds[:, -1]
        starts = np.arange(len(segment_map.holds), dtype=np.int64) * self.page_nbytes
        return starts, starts + self.page_nbytes

    def plan(
        self, segment_map: SegmentMap, rows: Numbers, layer: int | None
    ) -> Iterator[list[Piece]]:
        """What to read for some pages, or one layer of each: pieces that follow one another.

        Args:
            segment_map: Where the segment's pages are.
            rows: Rows within the segment, ascending.
            layer: Which layer; all of them if None.

        Yields:
            Pieces of about ``PIECE_NBYTES`` that may be read in one go: together they have about
            ``EXTENT_NBYTES``, and little between them that is not wanted.
        """
        num_layers = self.num_layers
        first, stop = (0, num_layers) if layer is None else (layer, layer + 1)
        if len(rows) == 1 and segment_map.bounds is None:
            offset = int(rows[0]) * self.page_nbytes + first * self.chunk_nbytes
            nbytes = (stop - first) * self.chunk_nbytes
            if nbytes <= PIECE_NBYTES:
                yield [Piece(offset, nbytes, _ONLY, _AT_START, first, stop - first)]
                return
        if segment_map.bounds is None:
            starts = rows * self.page_nbytes + first * self.chunk_nbytes
            ends = starts + (stop - first) * self.chunk_nbytes
        else:
            starts, ends = segment_map.bounds[rows, first], segment_map.bounds[rows, stop]
        if stop - first > 1 and int((ends - starts).max()) > PIECE_NBYTES:
            pieces = self._pieces_of_pages(segment_map, rows, starts, ends)
        else:
            pieces = _pieces(starts, ends, first, stop - first)
        extent: list[Piece] = []
        for piece in pieces:
            if extent:
                end = extent[-1].offset + extent[-1].nbytes
                total = piece.offset + piece.nbytes - extent[0].offset
                is_behind = 0 <= piece.offset - end <= _GAP_NBYTES
                if not is_behind or total > EXTENT_NBYTES:
                    yield extent
                    extent = []
            extent.append(piece)
        if extent:
            yield extent

    def decode(
        self,
        stored: Bytes,
        piece: Piece,
        segment_map: SegmentMap,
        rows: Numbers,
        pages: PageArrays,
        numbers: Numbers,
        layer: int | None,
    ) -> Bools:
        """Verify and decode a piece.

        Args:
            stored: The bytes of the piece.
            piece: What they are.
            segment_map: How to verify them.
            rows: Rows within the segment, as for ``plan``.
            pages: Where the numbers go.
            numbers: Which page of ``pages`` each row is.
            layer: Which layer ``pages`` are for; None if they are whole pages.

        Returns:
            For each page of the piece, whether it is good; if not, its numbers are undefined.
        """
        first, stop = piece.first_layer, piece.first_layer + piece.num_layers
        places: Any = rows[piece.pages]
        targets: Any = numbers[piece.pages]
        if len(places) == 1:  # slices cost less than numpy's choosing by numbers
            places = slice(int(places[0]), int(places[0]) + 1)
            targets = slice(int(targets[0]), int(targets[0]) + 1)
        crcs = segment_map.crcs[places, first:stop]
        good: Bools = segment_map.holds[places].copy()
        if segment_map.bounds is not None:
            bounds = segment_map.bounds[places, first : stop + 1] - piece.offset
            for number, target in enumerate(numbers[piece.pages].tolist()):
                page = pages.page(target)
                layers = page[first:stop] if layer is None else page[None]
                good[number] &= self._decode_variable(stored, bounds[number], crcs[number], layers)
            return good
        memory = pages.memory.part(targets)
        if layer is None and first:
            memory = memory._replace(addresses=memory.addresses + first * memory.layer_stride)
        self._decoder.unpack(self.spec, stored, piece.starts, piece.num_layers, memory, crcs, good)
        return good

    def read_now(
        self,
        source: FiledRecords,
        layer: int | None,
        pages: PageMemory,
        crcs: Crcs,
        good: Bools,
        was_read: Bools,
    ) -> int:
        """Read, verify and decode pages, or one layer of each, that lie in the page cache.

        Args:
            source: Where the pages begin.
            layer: Which layer; None for whole pages.
            pages: Where it goes.
            crcs: What the checksums must be, ``(page, layer)``, of all layers.
            good: Cleared for damaged pages.
            was_read: Set for pages that were read.

        Returns:
            Reads that failed: ``source.max_misses`` if not all were tried.
        """
        if layer is not None:
            crcs = np.ascontiguousarray(crcs[:, layer : layer + 1])
            source = source._replace(offsets=source.offsets + layer * self.chunk_nbytes)
        return self._decoder.read(self.spec, source, pages, crcs, good, was_read)

    def decode_small(self, stored: Bytes, crc: int, out: Array) -> bool:
        """Verify and decode one small chunk; for one that is not, ``decode_layers`` costs less.

        Args:
            stored: Payload and checksum.
            crc: What the checksum must be.
            out: Where to: one layer, or a page of one layer.
        """
        payload = stored[:-4]
        if crc32c(payload) != crc or stored[-4:].tobytes() != crc.to_bytes(4, "little"):
            return False
        self._decoder.decode(self.spec, payload, out if out.ndim == 4 else out[0])
        return True

    def decode_layers(self, stored: Bytes, crcs: Crcs, memory: PageMemory) -> bool:
        """Verify and decode consecutive layers of one page, of which all chunks have one size.

        Args:
            stored: Payload and checksum of each.
            crcs: What the checksums must be, ``(1, layer)``.
            memory: Where the first of them goes.
        """
        good = np.ones(1, np.bool_)
        self._decoder.unpack(self.spec, stored, _AT_START, crcs.shape[1], memory, crcs, good)
        return bool(good[0])

    def _write_fixed(self, fd: int, pages: PageArrays, first: int, crcs: Crcs) -> None:
        size = self.page_nbytes
        at_once = min(max(1, _WRITE_NBYTES // size), len(crcs))
        with transfer_buffer(at_once * size) as buffer:
            for start in range(0, len(crcs), at_once):
                part = crcs[start : start + at_once]
                records = buffer[: len(part) * size]
                self._pack(pages, first + start, records, part)
                files.write_all(fd, records)
                files.start_sync(fd)

    def _pack(self, pages: PageArrays, first: int, records: Bytes, crcs: Crcs) -> None:
        memory = pages.memory.part(slice(first, first + len(crcs)))
        try:
            self._fixed.pack(self.spec, memory, records, crcs)
        except ValueError:
            for number in range(first, first + len(crcs)):
                place = (pages.number_of(number),)  # as the caller counts
                check_finite(pages.page(number), "a page", place)
            raise

    def _write_variable(
        self, fd: int, pages: PageArrays, first: int, crcs: Crcs, sizes: LayerSizes
    ) -> None:
        for row in range(len(crcs)):
            page, parts = pages.page(first + row), []
            for layer in range(len(page)):
                payload = self._variable.encode_layer(self.spec, page[layer])
                crcs[row, layer], sizes[row, layer] = crc32c(payload), len(payload)
                parts += [payload, crcs[row, layer].astype("<u4").reshape(1).view(np.uint8)]
            files.write_all(fd, np.concatenate(parts))
            files.start_sync(fd)

    def _decode_variable(
        self, stored: Bytes, bounds: Numbers, crcs: "npt.NDArray[np.uint32]", layers: Array
    ) -> bool:
        for layer, (start, end) in enumerate(pairwise(bounds.tolist())):
            chunk = stored[start:end]
            trailer = int.from_bytes(chunk[-4:].tobytes(), "little")
            if len(chunk) < 4 or not trailer == crcs[layer] == crc32c(chunk[:-4]):
                return False
            try:
                self.codec.decode(self.spec, chunk[:-4], layers[layer])
            except ValueError:
                return False
        return True

    def _pieces_of_pages(
        self, segment_map: SegmentMap, rows: Numbers, starts: Numbers, ends: Numbers
    ) -> Iterator[Piece]:
        """Pieces of pages that are too large to be read at once: some layers of one page."""
        num_layers = self.num_layers
        for number in range(len(rows)):
            start, end = int(starts[number]), int(ends[number])
            if segment_map.bounds is None:
                bounds: Any = range(start, end + 1, self.chunk_nbytes)
            else:
                bounds = segment_map.bounds[rows[number]].tolist()
            at_once = max(1, num_layers * PIECE_NBYTES // (end - start))
            for first in range(0, num_layers, at_once):
                stop = min(first + at_once, num_layers)
                size = bounds[stop] - bounds[first]
                page = slice(number, number + 1)
                yield Piece(bounds[first], size, page, _AT_START, first, stop - first)


@contextmanager
def transfer_buffer(nbytes: int) -> Iterator[Bytes]:
    """The calling thread's transfer buffer, inside the block.

    Whoever interrupts the block, such as a signal handler, gets another one.
    """
    buffer: Bytes | None = getattr(_buffers, "buffer", None)
    _buffers.buffer = None
    if buffer is None or len(buffer) < nbytes:
        buffer = aligned(max(nbytes, _WRITE_NBYTES))
    try:
        yield buffer[:nbytes]
    finally:
        _buffers.buffer = buffer


def _pieces(starts: Numbers, ends: Numbers, first_layer: int, num_layers: int) -> Iterator[Piece]:
    """Pieces of whole pages that are small, or of single layers."""
    windows = starts // PIECE_NBYTES
    is_new = (windows[1:] != windows[:-1]) | (starts[1:] - ends[:-1] > _GAP_NBYTES)
    cuts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(starts)]
    for begin, end in pairwise(cuts):
        offset = int(starts[begin])
        nbytes = int(ends[end - 1]) - offset
        pages = slice(begin, end)
        yield Piece(offset, nbytes, pages, starts[pages] - offset, first_layer, num_layers)
