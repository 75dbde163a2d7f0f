"""The check of one segment: its catalogue chunk, every byte of its pages, and what repeats them."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import derived_chunks, unpack_catalog
from pagedkv.files import Bytes
from pagedkv.findings import Cost, Damage, Finding
from pagedkv.format import (
    CATALOG,
    CATALOG_DIMENSIONS,
    KV,
    KV_DIMENSIONS,
    NO_ENTRY,
    Geometry,
    chunk_name,
    crc32c,
    derived_columns,
)
from pagedkv.spec import PageKey

Mask = npt.NDArray[np.bool_]

_GONE = "is gone"
_NOT_YET = "is missing like the segment's other columns: its writer ended before it made them"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlace:
    """Where a segment is: what every finding about it says.

    Args:
        root: The store's folder.
        path: Folder of the lane's layer group.
        lane: Number of the lane.
        group: Index into the store's specs.
        number: Number of the segment.
        geometry: Sizes and places in its files.
    """

    root: Path
    path: Path
    lane: int
    group: int
    number: int
    geometry: Geometry

    def file(self, array: str, num_dimensions: int) -> Path:
        """Its file in one of the arrays."""
        return self.path / array / chunk_name(self.number, num_dimensions)

    @property
    def catalog(self) -> Path:
        """Its chunk of the catalogue."""
        return self.file(CATALOG, len(CATALOG_DIMENSIONS))

    @property
    def kv(self) -> Path:
        """Its pages."""
        return self.file(KV, len(KV_DIMENSIONS))

    def columns(self) -> dict[str, Path]:
        """Its chunks of the derived columns."""
        columns = derived_columns(self.geometry.page_tokens)
        return {c.name: self.file(c.name, len(c.dimensions)) for c in columns}

    def finding(self, path: Path, damage: Damage, cost: Cost, detail: str, **more: Any) -> Finding:
        """A finding about one of its files."""
        return Finding(
            path=str(path.relative_to(self.root)),
            damage=damage,
            cost=cost,
            detail=detail,
            lane=self.lane,
            group=self.group,
            segment=self.number,
            **more,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentCheck:
    """What was found out about a segment.

    Args:
        place: Where it is.
        records: Its records, one a row; of wrong rows undefined.
        held: Rows whose record is right.
        good: Rows of ``held`` of which every layer is right, too.
        num_pages: Pages that it has, good or lost.
        nbytes: Bytes that were read.
        findings: All damage.
    """

    place: SegmentPlace
    records: npt.NDArray[Any]
    held: Mask
    good: Mask
    num_pages: int
    nbytes: int
    findings: tuple[Finding, ...]

    def without_due(self) -> "SegmentCheck":
        """The same for a lane that is being written: its columns may follow later."""
        due = (_GONE, _NOT_YET)
        findings = tuple(
            f for f in self.findings if f.damage != Damage.COLUMN or f.detail not in due
        )
        return replace(self, findings=findings)

    def has(self, *damages: Damage) -> bool:
        """Whether something of this kind is damaged."""
        return any(finding.damage in damages for finding in self.findings)

    @property
    def is_unreadable(self) -> bool:
        """Whether the system could not read a file: that may pass, so nothing is dropped."""
        return self.has(Damage.UNREADABLE)


def check_segment(place: SegmentPlace) -> SegmentCheck:
    """Read and check every byte of a segment that has a catalogue chunk."""
    reading = _SegmentReading(place)
    reading.check_records()
    reading.check_pages()
    reading.check_index()
    reading.check_columns()
    return reading.result()


def check_records(place: SegmentPlace) -> SegmentCheck:
    """Read a segment's catalogue chunk alone: which of its records are right, each for itself.

    Nothing is known of the pages' bytes: none counts as good.
    """
    reading = _SegmentReading(place)
    reading.check_records()
    return reading.result()


def page_extents(
    geometry: Geometry, records: npt.NDArray[Any], rows: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the chunks of pages are in the segment file: offsets and sizes, ``(page, layer)``.

    A size counts the chunk's CRC.
    """
    if geometry.fixed_size:
        sizes = np.full((len(rows), geometry.num_layers), geometry.chunk_nbytes, np.int64)
        starts = rows.astype(np.int64) * geometry.page_nbytes
    else:
        sizes = records["layer_nbytes"][rows].astype(np.int64) + 4
        starts = records["offset"][rows].astype(np.int64)
    ends = np.cumsum(sizes, axis=1)
    return starts[:, None] + ends - sizes, sizes


def expected_index(geometry: Geometry, records: npt.NDArray[Any], held: Mask) -> bytes:
    """The shard index that names exactly the pages of ``held``, with its CRC32C."""
    index = np.full((geometry.rows, geometry.num_layers, 2), NO_ENTRY, "<u8")
    rows = np.flatnonzero(held)
    offsets, sizes = page_extents(geometry, records, rows)
    index[rows, :, 0] = offsets
    index[rows, :, 1] = sizes
    return index.tobytes() + crc32c(index).to_bytes(4, "little")


class _SegmentReading:
    """The steps of a check, each of which needs what the ones before it found."""

    def __init__(self, place: SegmentPlace) -> None:
        self.place = place
        self.geometry = place.geometry
        self.findings: list[Finding] = []
        self.nbytes = 0
        self.num_lost = 0
        rows = self.geometry.rows
        self.records = np.zeros(rows, self.geometry.record_dtype)
        self.held = np.zeros(rows, np.bool_)
        self.good = np.zeros(rows, np.bool_)
        self.index: Bytes | str | None = None

    def result(self) -> SegmentCheck:
        return SegmentCheck(
            place=self.place,
            records=self.records,
            held=self.held,
            good=self.good,
            num_pages=int(self.good.sum()) + self.num_lost,
            nbytes=self.nbytes,
            findings=tuple(self.findings),
        )

    def check_records(self) -> None:
        """Read the catalogue chunk; each record counts for itself."""
        path, geometry = self.place.catalog, self.geometry
        chunk = self._read(path, geometry.catalog_nbytes + 1)
        if isinstance(chunk, str):
            self._add(path, Damage.UNREADABLE, Cost.HIDDEN, chunk)
            return
        body = np.zeros(geometry.catalog_nbytes - 4, np.uint8)
        part = chunk[: len(body)]
        body[: len(part)] = part
        reason = ""
        try:
            unpack_catalog(geometry, self.place.number, chunk.tobytes())
        except ValueError as error:
            reason = str(error)
        lines = body.reshape(geometry.rows, -1)
        with contextlib.suppress(ValueError):  # no record is right: `held` says so
            sealed = seal_catalog(body)
            self.records, self.held = unpack_catalog(geometry, self.place.number, sealed)
        self.held &= _has_possible_places(geometry, self.records)
        for row in np.flatnonzero(self.held).tolist():
            self.held[row] = crc32c(lines[row, :-4]) == int(self.records["crc"][row])
        used = lines.any(axis=1)
        if reason:
            used |= self._rows_in_index()
        lost = np.flatnonzero(used & ~self.held).tolist()
        for number in lost:
            self._lose(path, Damage.RECORD, number, "is not that of a page of this row")
        if reason and (self.held.any() or not lost):
            cost = Cost.HIDDEN if self.held.any() else Cost.NOTHING
            self._add(path, Damage.CATALOG, cost, f"is torn: {reason}")

    def check_pages(self) -> None:
        """Read every layer of every page that has a right record."""
        rows = np.flatnonzero(self.held)
        if not len(rows):
            return
        offsets, sizes = page_extents(self.geometry, self.records, rows)
        data = self._read(self.place.kv, int((offsets + sizes).max()))
        if isinstance(data, str):
            damage = Damage.SEGMENT if data == _GONE else Damage.UNREADABLE
            for row in rows.tolist():
                self._lose(self.place.kv, damage, row, data)
            return
        crcs = self.records["layer_crcs"]
        for row, starts, nbytes in zip(
            rows.tolist(), offsets.tolist(), sizes.tolist(), strict=True
        ):
            reasons = {}
            for layer, (start, size) in enumerate(zip(starts, nbytes, strict=True)):
                reason = chunk_damage(data[start : start + size], size, int(crcs[row, layer]))
                if reason:
                    reasons[layer] = reason
            if reasons:
                layer, reason = next(iter(reasons.items()))
                if len(reasons) > 1:
                    reason += f"; {len(reasons)} layers of the page are damaged"
                self._lose(self.place.kv, Damage.LAYER, row, reason, layer=layer)
            else:
                self.good[row] = True

    def check_index(self) -> None:
        """Compare the index that ends the segment file with the records."""
        index = self._index()
        if not self.held.any() or isinstance(index, str):
            return
        expected = expected_index(self.geometry, self.records, self.held)
        if index.tobytes() == expected:
            return
        reason = "names other places than the records"
        if len(index) != len(expected):
            reason = f"has {len(index)} bytes instead of {len(expected)}"
        elif not _is_sealed(index, len(expected)):
            reason = "has a wrong CRC32C"
        elif self.num_lost and self._agrees(index, expected):
            return  # it still names a page whose record is lost, which has been reported
        self._add(self.place.kv, Damage.INDEX, Cost.DERIVED, reason)

    def check_columns(self) -> None:
        """Compare the derived columns with the records."""
        if not self.held.any():
            return
        expected = derived_chunks(self.geometry, self.records, self.held)
        columns = self.place.columns()
        if all(map(_is_missing, columns.values())):
            path = next(iter(columns.values()))
            self._add(path, Damage.COLUMN, Cost.NOTHING, _NOT_YET)
            return
        for name, path in columns.items():
            wanted = expected[name].tobytes()
            chunk = self._read(path, len(wanted) + 1)
            if isinstance(chunk, str):
                self._add(path, Damage.COLUMN, Cost.DERIVED, chunk)
            elif chunk.tobytes() != wanted and not self.num_lost:
                self._add(path, Damage.COLUMN, Cost.DERIVED, "says other things than the records")

    def _index(self) -> "Bytes | str":
        if self.index is None:
            nbytes = self.geometry.index_nbytes
            self.index = self._read(self.place.kv, nbytes, from_end=True)
        return self.index

    def _rows_in_index(self) -> Mask:
        """Rows that the segment's index names, if it is right: the catalogue may have lost them."""
        rows = np.zeros(self.geometry.rows, np.bool_)
        index = self._index()
        if not isinstance(index, str) and _is_sealed(index, self.geometry.index_nbytes):
            entries = index[:-4].view("<u8").reshape(self.geometry.rows, -1)
            rows |= (entries != NO_ENTRY).any(axis=1)
        return rows

    def _agrees(self, index: Bytes, expected: bytes) -> bool:
        """Whether two indexes agree in the rows that have a right record."""
        shape = (self.geometry.rows, -1)
        wanted = np.frombuffer(expected, np.uint8)[:-4].reshape(shape)
        return bool((index[:-4].reshape(shape) == wanted).all(axis=1)[self.held].all())

    def _read(self, path: Path, nbytes: int, *, from_end: bool = False) -> "Bytes | str":
        """The file's first (or last) bytes, or why there are none."""
        try:
            with files.reading(path) as fd:
                stamp = files.stamp(path)
                if stamp is None:
                    return _GONE
                size = stamp[2]
                data = np.empty(min(nbytes, size), np.uint8)
                start = size - len(data) if from_end else 0
                done = files.pread_into(fd, data, start) if len(data) else 0
        except OSError as error:
            if files.is_vanished(error):
                return _GONE
            return f"cannot be read: {error.strerror or error}"
        self.nbytes += done
        return data[:done]

    def _add(self, path: Path, damage: Damage, cost: Cost, detail: str, **more: Any) -> None:
        self.findings.append(self.place.finding(path, damage, cost, detail, **more))

    def _lose(
        self, path: Path, damage: Damage, number: int, detail: str, *, layer: int | None = None
    ) -> None:
        key = PageKey(self.records["key"][number].tobytes()) if self.held[number] else None
        row = self.place.number * self.geometry.rows + number
        self.num_lost += 1
        self._add(path, damage, Cost.PAGE, detail, row=row, key=key, layer=layer)


def _has_possible_places(geometry: Geometry, records: npt.NDArray[Any]) -> Mask:
    """Rows whose records name places that a segment can have, ``(row,)``."""
    if geometry.fixed_size:
        return np.ones(geometry.rows, np.bool_)
    fits = (records["layer_nbytes"] <= geometry.payload_nbytes).all(axis=1)
    possible: Mask = fits & (records["offset"] <= geometry.rows * geometry.page_nbytes)
    return possible


def _is_sealed(data: Bytes, nbytes: int) -> bool:
    """Whether these are so many bytes of which the last four are the CRC32C of the others."""
    return len(data) == nbytes and crc32c(data[:-4]) == int.from_bytes(data[-4:], "little")


def seal_catalog(body: Bytes) -> bytes:
    """A catalogue chunk of these records: they and their CRC32C."""
    return body.tobytes() + crc32c(body).to_bytes(4, "little")


def chunk_damage(chunk: Bytes, nbytes: int, crc: int) -> str:
    """What is wrong with the stored chunk of a layer; empty if nothing is.

    Args:
        chunk: Payload and trailer, shorter if the file ended.
        nbytes: Bytes that it should have.
        crc: CRC32C of the payload as the record has it.
    """
    if len(chunk) < nbytes:
        return "lies beyond the end of the file"
    actual = crc32c(chunk[:-4])
    trailer = int.from_bytes(chunk[-4:].tobytes(), "little")
    if actual == trailer == crc:
        return ""
    if actual == trailer:
        return "has right bytes of another page: the record has another CRC32C"
    if actual == crc:
        return "has a wrong CRC32C behind it"
    return "has other bytes than were written: their CRC32C is wrong"


def _is_missing(path: Path) -> bool:
    """Whether there is nothing at all at ``path``."""
    try:
        return files.stamp(path) is None
    except OSError:  # whatever it is, it is there
        return False
