"""Where the pages of new segments come from: a caller's memory, or segments that are given up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.catalog import pack_catalog, repack_catalog
from pagedkv.codec import Bytes
from pagedkv.format import PageEntry
from pagedkv.memory import PageArrays
from pagedkv.segment import SegmentFormat
from pagedkv.segment_map import SegmentMap, bounds_of
from pagedkv.spec import KVSpec, PageKey


class NewPages:
    """Pages in memory.

    Args:
        form: The format of their segments.
        entries: What the catalogue shall say of each page.
        pages: Their numbers.
        store_tokens: Whether token ids go into the catalogue.
    """

    def __init__(
        self,
        form: SegmentFormat,
        entries: Sequence[PageEntry],
        pages: PageArrays,
        *,
        store_tokens: bool,
    ) -> None:
        self.keys: Sequence[PageKey] = [entry.key for entry in entries]
        self._form = form
        self._entries = entries
        self._pages = pages
        self._store_tokens = store_tokens

    def write(self, fd: int, start: int, count: int) -> SegmentMap:
        """Write the segment file of the pages from number ``start`` on."""
        return self._form.write(fd, self._pages, start, count)

    def catalog(self, segment: int, start: int, segment_map: SegmentMap) -> Bytes:
        """The catalogue chunk of segment number ``segment``, with the pages from ``start`` on."""
        entries = self._entries[start : start + len(segment_map.holds)]
        return pack_catalog(
            self._form.geometry, segment, entries, segment_map, store_tokens=self._store_tokens
        )


def new_pages(
    form: SegmentFormat,
    entries: Sequence[PageEntry],
    pages: PageArrays,
    numbers: Sequence[int],
    *,
    store_tokens: bool,
) -> NewPages:
    """Some of a caller's pages; in tails the places beyond ``num_tokens`` are zeros.

    Args:
        form: The format of their segments.
        entries: What the catalogue shall say of each of the caller's pages.
        pages: Their numbers, filled.
        numbers: Which of the pages are to be written, ascending.
        store_tokens: Whether token ids go into the catalogue.
    """
    spec, chosen = form.spec, [entries[number] for number in numbers]
    if any(entry.num_tokens < spec.page_tokens for entry in chosen):
        parts = [
            _without_rest(spec, entry, pages.page(number))
            for entry, number in zip(chosen, numbers, strict=True)
        ]
        pages = PageArrays(parts, None, spec.page_shape, spec.np_dtype, "a page")
        pages.fill()
    elif len(numbers) < len(entries):
        pages = pages.part(np.array(numbers))
    return NewPages(form, chosen, pages, store_tokens=store_tokens)


class MovedPages:
    """Pages of other segments, as they are stored.

    Args:
        form: The format of their segments.
        records: The catalogue's record of each page.
        stored: The stored bytes of each page.
    """

    def __init__(
        self, form: SegmentFormat, records: "npt.NDArray[Any]", stored: Sequence[Bytes]
    ) -> None:
        self.keys: Sequence[PageKey] = [PageKey(key.tobytes()) for key in records["key"]]
        self._form = form
        self._records = records
        self._stored = stored

    def write(self, fd: int, start: int, count: int) -> SegmentMap:
        """Write the segment file of the pages from number ``start`` on."""
        records = self._records[start : start + count]
        geometry = self._form.geometry
        crcs = records["layer_crcs"].copy()
        if geometry.fixed_size:
            sizes, bounds = np.full(crcs.shape, geometry.payload_nbytes, np.uint32), None
        else:
            sizes = records["layer_nbytes"].copy()
            bounds = bounds_of(sizes)
        self._form.write_stored(fd, self._stored[start : start + count], sizes)
        return SegmentMap(holds=np.ones(count, np.bool_), crcs=crcs, bounds=bounds)

    def catalog(self, segment: int, start: int, segment_map: SegmentMap) -> Bytes:
        """The catalogue chunk of segment number ``segment``, with the pages from ``start`` on."""
        records = self._records[start : start + len(segment_map.holds)]
        return repack_catalog(self._form.geometry, segment, records, segment_map)


def _without_rest(spec: KVSpec, entry: PageEntry, page: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
    """The page, with zeros behind its tokens."""
    if entry.num_tokens == spec.page_tokens:
        return page
    tail = np.zeros(spec.page_shape, spec.np_dtype)
    tail[:, :, : entry.num_tokens] = page[:, :, : entry.num_tokens]
    return tail
