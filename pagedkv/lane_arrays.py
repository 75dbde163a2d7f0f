"""``LaneArrays``: the documents of one layer group's arrays in one lane, and their lengths.

An array is longer than its segments need, so that its document changes rarely: rows without a chunk
read as the fill value.
"""

import json
import threading
from pathlib import Path

from pagedkv import files, metadata
from pagedkv.format import (
    CATALOG,
    CATALOG_DIMENSIONS,
    EVICTED,
    KV,
    KV_DIMENSIONS,
    METADATA,
    derived_columns,
)
from pagedkv.segment import SegmentFormat

_FIRST_SEGMENTS = 16
_MORE_SEGMENTS = 256
_GROWTH_NBYTES = 16 * 2**10


class LaneArrays:
    """The ``zarr.json`` of each array in a lane's group. ``grow`` and ``trim`` are thread-safe.

    Args:
        path: Folder of the group.
        segment_format: What its segments look like.

    Attributes:
        num_dimensions: By name, of the arrays that have a chunk for each segment.
    """

    def __init__(self, path: Path, segment_format: SegmentFormat) -> None:
        self._path = path
        self._format = segment_format
        columns = derived_columns(segment_format.geometry.page_tokens)
        self.num_dimensions = {
            KV: len(KV_DIMENSIONS),
            CATALOG: len(CATALOG_DIMENSIONS),
            **{column.name: len(column.dimensions) for column in columns},
        }
        self._growth = threading.Lock()
        self._capacity = 0  # in segments

    def num_rows(self, array: str) -> int | None:
        """Length of an array, or None if its document is missing or torn."""
        document = metadata.read_document(self._path / array)
        try:
            return None if document is None else int(document["shape"][0])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):
            return None

    def missing_nbytes(self) -> int:
        """About how much ``make_missing`` is going to write."""
        documents = self._documents() if self._missing() else {}
        return 2 * sum(len(document) for document in documents.values())

    def make_missing(self) -> None:
        """Write the documents that are missing or torn, the group's too; durable but for names."""
        missing = self._missing()
        if missing or metadata.read_document(self._path) is None:
            documents = self._documents()
            for array in missing:
                files.make_dir(self._path / array)
                files.write_atomic(self._path / array / METADATA, [documents[array]])
            files.write_atomic(self._path / METADATA, [metadata.group_document()])

    def growth_nbytes(self, num_segments: int) -> int:
        """About how much ``grow`` is going to write beside what is there."""
        return _GROWTH_NBYTES if num_segments > self._capacity else 0

    def grow(self, num_segments: int) -> int:
        """Make the arrays long enough for so many segments; in steps, so that it happens rarely.

        Returns:
            How many bytes longer their documents are.
        """
        with self._growth:
            if num_segments <= self._capacity:
                return 0
            ahead = min(max(num_segments, _FIRST_SEGMENTS), _MORE_SEGMENTS)
            return self._set_capacity(num_segments + ahead)

    def trim(self, num_segments: int) -> None:
        """Make the arrays as long as so many segments."""
        with self._growth:
            self._set_capacity(num_segments)

    def _documents(self) -> dict[str, bytes]:
        """The documents of all arrays, without rows."""
        form = self._format
        return metadata.array_documents(form.spec, form.codec, form.geometry)

    def _missing(self) -> list[str]:
        return [array for array in (*self.num_dimensions, EVICTED) if self.num_rows(array) is None]

    def _set_capacity(self, num_segments: int) -> int:
        num_rows = num_segments * self._format.geometry.rows
        lengths = {array: self.num_rows(array) for array in self.num_dimensions}
        made: dict[str, bytes] = {}
        if None in lengths.values():  # damaged meanwhile: they hold nothing that is not known
            made = self._documents()
        growth = 0
        for array, length in lengths.items():
            if length != num_rows:
                path = self._path / array / METADATA
                before = files.read_bytes(path) if length is not None else made[array]
                document = json.loads(before)
                document["shape"][0] = num_rows
                after = json.dumps(document, indent=2).encode()
                files.write_atomic(path, [after])
                growth += len(after) - len(before)
        self._capacity = num_segments
        return growth
