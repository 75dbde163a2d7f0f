"""The check of a store's documents, and of names that do not belong: everything but the pages."""

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import evictions, files, lane_document, metadata
from pagedkv.codec import Codec
from pagedkv.errors import FormatVersionError, StoreError
from pagedkv.findings import Cost, Damage, Finding
from pagedkv.format import (
    ATTRIBUTE,
    CATALOG,
    EVICTED,
    METADATA,
    ROW_BITS,
    Geometry,
    chunk_name,
    group_name,
    lane_name,
    segment_number,
)
from pagedkv.header import StoreHeader
from pagedkv.lane_access import is_in_use, lanes_of
from pagedkv.repair import write_document
from pagedkv.spec import KVSpec

_GROUP_FIELDS = ("attributes", "consolidated_metadata", "node_type", "zarr_format")
_ENTRY_NBYTES = evictions.RECORD_DTYPE.itemsize
_MAX_ROWS = 1 << ROW_BITS


def find_header(root: Path) -> tuple[StoreHeader | None, list[Finding]]:
    """The header of the store at ``root``, from a lane's copy if the root's own is damaged.

    Raises:
        StoreError: There is no store.
        FormatVersionError: The store has a later format.
    """
    if not files.is_folder(root, follow=True):
        raise StoreError(f"there is no store at {root}")
    document = _document(root)
    newer: FormatVersionError | None = None
    try:
        header = _header_in(document, str(root))
        return header, [] if _is_group(document) else [_root_finding("is no Zarr v3 group")]
    except FormatVersionError as error:  # a right one, unless a copy of ours says otherwise
        newer, reason = error, str(error)
    except StoreError as error:
        reason = str(error)
    lanes = lanes_of(root)
    for lane in lanes:
        path = root / lane_name(lane)
        with contextlib.suppress(StoreError):
            header = _header_in(_document(path), str(path), lane_document.HEADER)
            return header, [_root_finding(f"is damaged: {reason}")]
    if newer is not None:
        raise newer
    if not lanes:
        raise StoreError(f"{root} is no store: {reason}")
    detail = f"is damaged, and no lane has a copy of it: {reason}"
    return None, [replace(_root_finding(detail), cost=Cost.STORE)]


def root_leftovers(root: Path) -> list[Finding]:
    """Unfinished files in the root's folder, unless somebody is changing something there."""
    names = _temps(root)
    if not names or is_in_use(root):
        return []
    return [
        Finding(
            path=name,
            damage=Damage.LEFTOVER,
            cost=Cost.NOTHING,
            detail="of an interrupted writer",
        )
        for name in names
        if name in _temps(root)
    ]


def remove_root_leftovers(root: Path) -> None:
    """Remove them."""
    with files.locked(root):
        files.remove_temps(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneNode:
    """The document of a lane: a Zarr group with a copy of the header.

    Args:
        root: The store's folder.
        lane: Number of the lane.
        header: What the copy must say; only the bound may be an older one.
    """

    root: Path
    lane: int
    header: StoreHeader

    @property
    def path(self) -> Path:
        """Folder of the lane."""
        return self.root / lane_name(self.lane)

    def check(self) -> list[Finding]:
        """What is damaged."""
        document = _document(self.path)
        detail = "" if _is_group(document) else "is missing or damaged"
        if not detail:
            try:
                copy = _header_in(document, str(self.path), lane_document.HEADER)
                if replace(copy, max_nbytes=self.header.max_nbytes) != self.header:
                    detail = "has a copy of another store's header"
            except StoreError:
                detail = "has no copy of the header, or a damaged one"
        if not detail:
            return []
        return [
            Finding(
                path=f"{lane_name(self.lane)}/{METADATA}",
                damage=Damage.DOCUMENT,
                cost=Cost.DERIVED,
                detail=detail,
                lane=self.lane,
            )
        ]

    def mend(self) -> None:
        """Write the document anew; who wrote last stays in it if that can be read."""
        changes = {lane_document.HEADER: self.header.to_dict()}
        with files.locked(self.root):
            lane_document.update(self.root, self.lane, changes, sync=True)


@dataclass(frozen=True, kw_only=True)
class GroupNodes:
    """The documents and names of one layer group in one lane.

    Args:
        root: The store's folder.
        lane: Number of the lane.
        group: Index into the store's specs.
        spec: The group's spec.
        codec: The store's codec.
        geometry: Sizes and places in the group's segments.
    """

    root: Path
    lane: int
    group: int
    spec: KVSpec
    codec: Codec
    geometry: Geometry

    @property
    def path(self) -> Path:
        """Folder of the group in the lane."""
        return self.root / lane_name(self.lane) / group_name(self.spec)

    @cached_property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """What the document of each array must say, but for its number of rows."""
        documents = metadata.array_documents(self.spec, self.codec, self.geometry)
        return {name: json.loads(document) for name, document in documents.items()}

    def chunks(self, array: str) -> dict[int, str]:
        """Names of an array's chunk files by their number."""
        numbers = {
            name: self._chunk_number(array, name) for name in files.file_sizes(self.path / array)
        }
        return {number: name for name, number in numbers.items() if number is not None}

    def is_chunk(self, array: str, name: str) -> bool:
        """Whether a name is that of a chunk of an array."""
        return self._chunk_number(array, name) is not None

    def check(self) -> list[Finding]:
        """What is damaged."""
        findings = []
        if not _is_group(_document(self.path)):
            findings.append(self._finding("", Damage.DOCUMENT, "is missing or damaged"))
        needed = self._num_rows_needed()
        for array, expected in self.arrays.items():
            detail = _array_damage(expected, _document(self.path / array), needed)
            if detail:
                findings.append(self._finding(array, Damage.DOCUMENT, detail))
        return findings

    def mend(self) -> None:
        """Write damaged documents anew. The arrays do not become shorter: no row is used again."""
        needed = self._num_rows_needed()
        num_rows = needed
        wrong = []
        for array, expected in self.arrays.items():
            document = _document(self.path / array)
            if _array_damage(expected, document, needed):
                wrong.append(array)
            elif document is not None and expected["shape"][0] == 0:
                num_rows = max(num_rows, document["shape"][0])
        for array in wrong:
            document = json.loads(json.dumps(self.arrays[array]))
            if document["shape"][0] == 0:
                document["shape"][0] = num_rows
            write_document(self.path / array, document)
        if not _is_group(_document(self.path)):
            write_document(self.path, json.loads(metadata.group_document()))

    def leftovers(self) -> list[Finding]:
        """What interrupted writers left, or what lost its catalogue chunk."""
        return [
            self._finding(array, Damage.LEFTOVER, detail, name=name)
            for array, name, detail in self._leftovers()
        ]

    def remove_leftovers(self) -> None:
        """Remove them all, as the lane's next writer would."""
        for array, name, _ in list(self._leftovers()):
            files.remove(self.path / array / name)

    def check_ring(self) -> list[Finding]:
        """What is damaged in the eviction ring: no page depends on it."""
        path = self._ring
        try:
            chunk = files.read_bytes(path)
        except OSError as error:
            if files.is_vanished(error):
                return []  # nothing has been evicted yet
            raise
        entries = np.frombuffer(chunk[: len(chunk) // _ENTRY_NBYTES * _ENTRY_NBYTES], np.uint8)
        num_used = int(entries.reshape(-1, _ENTRY_NBYTES).any(axis=1).sum())
        num_right = len(evictions.decode(chunk))
        if len(chunk) == evictions.EVICTED_NBYTES and num_right == num_used:
            return []
        detail = f"has {num_used - num_right} damaged entries"
        if len(chunk) != evictions.EVICTED_NBYTES:
            detail = f"has {len(chunk)} bytes instead of {evictions.EVICTED_NBYTES}"
        finding = self._finding(EVICTED, Damage.RING, detail, name=path.name)
        return [replace(finding, cost=Cost.NOTHING)]

    def mend_ring(self) -> None:
        """Keep the entries that are right."""
        chunk = evictions.encode(evictions.decode(files.read_bytes(self._ring)))
        files.write_atomic(self._ring, [chunk], sync=False)

    @property
    def _ring(self) -> Path:
        return self.path / EVICTED / chunk_name(0, len(evictions.EVICTED_DIMENSIONS))

    def _leftovers(self) -> Iterator[tuple[str, str, str]]:
        committed = self.chunks(CATALOG).keys()
        for folder in ("", *self.arrays):
            for name in _temps(self.path / folder):
                yield folder, name, "of an interrupted writer"
        for array, document in self.arrays.items():
            if document["shape"][0] == 0:
                for number, name in self.chunks(array).items():
                    if number not in committed:
                        yield array, name, f"of segment {number}, which has no catalogue chunk"

    def _chunk_number(self, array: str, name: str) -> int | None:
        return segment_number(name, len(self.arrays[array]["shape"]))

    def _num_rows_needed(self) -> int:
        return (max(self.chunks(CATALOG), default=-1) + 1) * self.geometry.rows

    def _finding(self, array: str, damage: Damage, detail: str, *, name: str = METADATA) -> Finding:
        return Finding(
            path=str((self.path / array / name).relative_to(self.root)),
            damage=damage,
            cost=Cost.NOTHING if damage is Damage.LEFTOVER else Cost.DERIVED,
            detail=detail,
            lane=self.lane,
            group=self.group,
        )


def _temps(folder: Path) -> list[str]:
    """Names of unfinished files."""
    names = files.file_sizes(folder)
    return [name for name in names if name.startswith(files.TEMP_PREFIX)]


def _root_finding(detail: str) -> Finding:
    return Finding(path=METADATA, damage=Damage.HEADER, cost=Cost.DERIVED, detail=detail)


def _document(folder: Path) -> dict[str, Any] | None:
    """The document in ``folder``; None if there is none, a torn one, or no folder."""
    try:
        return metadata.read_document(folder)
    except OSError as error:
        if files.is_vanished(error):
            return None
        raise


def _is_group(document: dict[str, Any] | None) -> bool:
    """Whether Zarr takes the document for that of a group."""
    return (
        document is not None
        and document.get("node_type") == "group"
        and document.get("zarr_format") == 3
        and not _unknown_fields(document, _GROUP_FIELDS)
        and isinstance(document.get("attributes", {}), dict)
    )


def _unknown_fields(document: dict[str, Any], known: Collection[str]) -> list[str]:
    """Fields for which Zarr readers refuse a document."""
    return [
        name
        for name, value in document.items()
        if name not in known
        and not (isinstance(value, dict) and value.get("must_understand") is False)
    ]


def _attributes(document: dict[str, Any] | None) -> dict[str, Any]:
    attributes = None if document is None else document.get("attributes")
    return attributes if isinstance(attributes, dict) else {}


def _header_in(document: dict[str, Any] | None, where: str, *names: str) -> StoreHeader:
    """The header in the attributes of a node; ``StoreError`` if there is no right one."""
    values: Any = _attributes(document).get(ATTRIBUTE)
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise StoreError(f"{where} has no header")
    return StoreHeader.from_dict(values, where)


def _array_damage(expected: dict[str, Any], document: dict[str, Any] | None, num_rows: int) -> str:
    """What is wrong with an array's document that must have so many rows; empty if nothing is."""
    if document is None:
        return "is missing or damaged"
    free = ("attributes", "shape")  # people may leave notes
    fields = [
        name for name in expected if name not in free and document.get(name) != expected[name]
    ]
    if fields:
        return f"has another {fields[0]} than the header asks for"
    unknown = _unknown_fields(document, expected)
    if unknown or not isinstance(document.get("attributes", {}), dict):
        return f"has an unknown field {unknown[0]}" if unknown else "has damaged attributes"
    shape = document.get("shape")
    if not isinstance(shape, list) or not shape or shape[1:] != expected["shape"][1:]:
        return f"has shape {shape}"
    rows = shape[0]
    if not isinstance(rows, int) or isinstance(rows, bool):
        return f"has shape {shape}"
    if expected["shape"][0] and rows != expected["shape"][0]:
        return f"has {rows} rows instead of {expected['shape'][0]}"
    if not expected["shape"][0] and not num_rows <= rows <= _MAX_ROWS:
        return f"has {rows} rows, but the segments have {num_rows}"
    return ""
