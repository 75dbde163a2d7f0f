"""``RowReader``: pages of a store by their rows."""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.contents import Contents, Place
from pagedkv.errors import CorruptPageError, PageNotFoundError
from pagedkv.format import (
    GROUP_BITS,
    LANE_BITS,
    ROW_BITS,
    PackedRows,
    StoreRow,
    pack_row,
    unpack_row,
)
from pagedkv.lane import Segment
from pagedkv.memory import Numbers, PageArrays
from pagedkv.page_reader import PageReader, PayloadViews, SegmentRead
from pagedkv.segment import SegmentFormat

logger = logging.getLogger("pagedkv")

Array = npt.NDArray[Any]
Formats = Sequence[SegmentFormat]
"""How the segment files of each spec are read."""


class RowReader:
    """Finds the segments of rows and reads them. Thread-safe.

    Args:
        contents: What the store holds.
        reader: Reads from segment files.

    Attributes:
        num_damaged_pages: Pages that were found damaged or gone.
    """

    def __init__(self, contents: Contents, reader: PageReader) -> None:
        self._contents = contents
        self._reader = reader
        self.num_damaged_pages = 0

    def read(
        self,
        rows: Sequence[StoreRow] | PackedRows,
        layer: int | None,
        out: Sequence[Array] | Array,
        at: Numbers | None,
        deadline: float | None,
        formats: Formats | None = None,
    ) -> None:
        """Read pages, or one layer of each, as ``PageStore.read`` says; by the store's formats."""
        formats = formats or self._contents.formats
        if len(rows) == 1 and self._read_one(rows, layer, out, at, formats):
            return
        packed = self._all_packed(rows)
        if not len(packed):
            return
        groups = packed >> ROW_BITS & (1 << GROUP_BITS) - 1
        number = int(groups[0])
        if (groups != number).any():
            if isinstance(out, np.ndarray):
                raise ValueError("the rows are of several specs: give one array for each page")
            self._read_groups(packed, groups, layer, out, deadline, formats)
            return
        if number >= len(formats):
            raise self._not_found(unpack_row(int(packed[0])))
        pages = _checked_arrays(formats[number], len(packed), layer, out, at)
        lost: list[int] = []
        wanted = self._wanted(formats[number], number, packed, layer, lost)
        lost += self._reader.read(wanted, pages, deadline)
        pages.deliver()
        if lost:
            self._lose(packed, sorted(lost))

    def view(self, rows: Sequence[StoreRow] | PackedRows, layer: int) -> PayloadViews:
        """Where payloads lie in mapped segments, as ``PageStore.view_payloads`` says."""
        packed = self._all_packed(rows)
        if not len(packed):
            return PayloadViews(np.zeros(0, np.int64), [])
        number = int(packed[0]) >> ROW_BITS & (1 << GROUP_BITS) - 1
        if (packed >> ROW_BITS & (1 << GROUP_BITS) - 1 != number).any():
            raise ValueError("the rows are of several specs: view those of one")
        if number >= len(self._contents.formats):
            raise self._not_found(unpack_row(int(packed[0])))
        form = self._contents.formats[number]
        if not 0 <= layer < form.num_layers:
            raise ValueError(f"layer is {layer}: the spec holds {form.num_layers} layers")
        lost: list[int] = []
        wanted = self._wanted(form, number, packed, layer, lost)
        views, damaged = self._reader.view(wanted, len(packed))
        if lost or damaged:
            self._lose(packed, sorted({*lost, *damaged}))
        return views

    def _all_packed(self, rows: Sequence[StoreRow] | PackedRows) -> PackedRows:
        if isinstance(rows, np.ndarray):
            return rows
        return np.array([self._packed(row) for row in rows], dtype=np.int64)

    def _read_one(
        self,
        rows: Sequence[StoreRow] | PackedRows,
        layer: int | None,
        out: Sequence[Array] | Array,
        at: Numbers | None,
        formats: Formats,
    ) -> bool:
        """Read one page from the page cache with little ado; False if that is for ``read`` to do.

        What ``read`` does for many pages at once in numpy costs more here than the reading.
        """
        if not _is_one(out, at):
            return False
        packed = int(rows[0]) if isinstance(rows, np.ndarray) else self._packed(rows[0])
        is_good = self._read_cached(packed, layer, out[0 if at is None else int(at[0])], formats)
        if is_good is False:
            self._lose(np.array([packed]), [0])
        return is_good is not None

    def read_quickly(self, packed: int, out: Array) -> bool:
        """Read a page that lies in the page cache; False if it does not, or is damaged or gone."""
        return self._read_cached(packed, None, out, self._contents.formats) is True

    def _read_cached(
        self, packed: int, layer: int | None, array: Array, formats: Formats
    ) -> bool | None:
        """Read one page, or layer, that lies in the page cache.

        Returns:
            Whether it is good; None if it is not to be had so.
        """
        lane, number = packed >> ROW_BITS + GROUP_BITS, packed >> ROW_BITS & (1 << GROUP_BITS) - 1
        if number >= len(formats):
            return None
        form = formats[number]
        shape = form.page_shape if layer is None else form.layer_shape
        if array.shape != shape or array.dtype != form.dtype:
            return None
        flags = array.flags
        if not flags.carray and not (
            flags.writeable and flags.aligned and array.strides[-3:] == form.block_strides
        ):
            return None
        if not form.has_fixed_size or not 0 <= (layer or 0) < form.num_layers:
            return None
        group = self._contents.groups.get((lane, number))
        found = None if group is None else group.locate(packed & (1 << ROW_BITS) - 1)
        if found is None:
            return None
        segment, row = found
        segment_map = self._contents.kept_map((lane, number, segment.number))
        if segment_map is None:
            return None
        is_good = self._reader.read_one(form, segment, segment_map.crcs, row, layer, array)
        if is_good is not None:
            segment.used_at[row] = self._contents.tick()
        return is_good

    def _read_groups(
        self,
        packed: PackedRows,
        groups: Numbers,
        layer: int | None,
        out: Sequence[Array],
        deadline: float | None,
        formats: Formats,
    ) -> None:
        """Read pages of several specs, one spec after the other."""
        if len(packed) != len(out):
            raise ValueError(f"{len(packed)} rows for {len(out)} arrays")
        errors: list[CorruptPageError] = []
        positions: list[int] = []
        for number in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == number)
            try:
                arrays = [out[n] for n in chosen.tolist()]
                self.read(packed[chosen], layer, arrays, None, deadline, formats)
            except CorruptPageError as error:
                errors.append(error)
                positions += chosen[list(error.positions)].tolist()
        if errors:
            keys = tuple(key for error in errors for key in error.keys)
            raise CorruptPageError(str(errors[0]), keys, tuple(positions)) from errors[0]

    def _wanted(
        self,
        form: SegmentFormat,
        number: int,
        packed: PackedRows,
        layer: int | None,
        lost: list[int],
    ) -> Iterator[SegmentRead]:
        """What to read from each segment; positions of pages that cannot be go to ``lost``."""
        order = np.argsort(packed, kind="stable")
        lanes = packed[order] >> ROW_BITS + GROUP_BITS
        rows = packed[order] & (1 << ROW_BITS) - 1
        segment_rows = self._contents.rows_of(number)
        segments = rows // segment_rows
        is_new = (segments[1:] != segments[:-1]) | (lanes[1:] != lanes[:-1])
        cuts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(order)]
        used_at = self._contents.tick()
        for begin, end in pairwise(cuts):
            place = (int(lanes[begin]), number, int(segments[begin]))
            local, numbers = rows[begin:end] - place[2] * segment_rows, order[begin:end]
            segment = self._segment(place, local)
            try:
                if segment is None:
                    raise ValueError("it is gone")
                segment_map = self._contents.map_of(place, segment)
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and not files.is_vanished(error):
                    files.raise_translated(error, self._contents.path_of(place), "read")
                lost += numbers.tolist()
                continue
            segment.used_at[local] = used_at
            yield SegmentRead(
                form=form,
                segment=segment,
                segment_map=segment_map,
                rows=local,
                numbers=numbers,
                layer=layer,
            )

    def _segment(self, place: Place, rows: Numbers) -> Segment | None:
        """The segment, which holds these rows; None if it was given up.

        Raises:
            PageNotFoundError: One of the rows never held a page.
        """
        lane, number, segment_number = place
        group = self._contents.groups.get((lane, number))
        segment = None if group is None else group.segments.get(segment_number)
        if segment is not None:
            highest = int(rows[-1])
            if highest < len(segment.keys) and segment.keys[highest] is not None:
                return segment
        elif group is not None and segment_number < group.next_segment:
            return None
        first = segment_number * self._contents.rows_of(number)
        raise self._not_found(StoreRow(lane, number, first + int(rows[-1])))

    def _packed(self, row: StoreRow) -> int:
        lane, group, number = row
        if lane >> LANE_BITS or group >> GROUP_BITS or number >> ROW_BITS:
            raise self._not_found(row)
        return pack_row(row)

    def _not_found(self, row: StoreRow) -> PageNotFoundError:
        return PageNotFoundError(f"the store {self._contents.root} has no page in {row}")

    def _lose(self, packed: PackedRows, positions: Sequence[int]) -> NoReturn:
        """Forget damaged pages, each in favour of its next copy if there is one, and raise."""
        keys = []
        rows = [unpack_row(int(packed[position])) for position in positions]
        with self._contents.lock:
            for row in rows:
                found = self._contents.groups[row.lane, row.group].locate(row.row)
                key = None if found is None else found[0].keys[found[1]]
                if key is not None:  # else its segment was given up
                    keys.append(key)
                    lost = self._contents.indexes[row.group].remove(key, row)
                    self.num_damaged_pages += lost
        first = keys[0].hex() if keys else "(its segment was given up)"
        message = (
            f"{len(rows)} pages of {self._contents.root} are damaged or gone, the first {first} in"
            f" {rows[0]}: compute them again"
        )
        logger.warning("%s", message)
        raise CorruptPageError(message, tuple(keys), tuple(positions))


def _checked_arrays(
    form: SegmentFormat,
    count: int,
    layer: int | None,
    out: Sequence[Array] | Array,
    at: Numbers | None,
) -> PageArrays:
    """``out`` as arrays for ``count`` pages; ``ValueError`` if it does not fit."""
    if layer is not None and not 0 <= layer < form.num_layers:
        raise ValueError(f"layer is {layer}: the spec holds {form.num_layers} layers")
    shape: tuple[int, ...] = form.page_shape if layer is None else form.layer_shape
    if isinstance(out, np.ndarray) and at is None and len(out) > count:
        out = out[:count]
    pages = PageArrays(out, at, shape, form.dtype, "an out array")
    if pages.count != count:
        raise ValueError(f"{count} rows for {pages.count} arrays")
    if not pages.is_writable:
        raise ValueError("an out array is read-only")
    return pages


def _is_one(out: Sequence[Array] | Array, at: Numbers | None) -> bool:
    """Whether ``out`` and ``at`` name one array, beyond doubt."""
    if isinstance(out, np.ndarray) and isinstance(at, np.ndarray):
        return at.shape == (1,) and at.dtype.kind in "iu" and 0 <= int(at[0]) < len(out)
    return at is None and len(out) == 1
