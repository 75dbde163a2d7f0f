"""The ring of evicted keys of a lane's group: what left the store, when and why.

One chunk of a Zarr array: the newest eviction is its first record, and the oldest falls out at its
end. It is for explanations, so it is written unsynced, and a record that is damaged is no record.
"""

import enum
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from pagedkv import files
from pagedkv.format import chunk_name
from pagedkv.spec import PageKey

logger = logging.getLogger("pagedkv")

EVICTED_DIMENSIONS = ("entry", "field")
NUM_ENTRIES = 1024
RECORD_DTYPE = np.dtype([("key", "V32"), ("time_ns", "<u8"), ("reason", "<u4"), ("crc", "<u4")])
"""One record; ``crc`` is the CRC32C of the bytes before it. A place without one is zeros."""
EVICTED_SHAPE = (NUM_ENTRIES, RECORD_DTYPE.itemsize)
"""Of the array in each group of a lane: uint8, all in one chunk, no codec but ``bytes``."""
STORE_POLICY = "lru"
"""Name of the ranking by which segments leave: the one whose pages' last uses are longest ago."""
EVICTED_NBYTES = NUM_ENTRIES * RECORD_DTYPE.itemsize


class EvictionReason(enum.IntEnum):
    """Why a page left the store."""

    CAPACITY = 1
    """Its room was needed."""
    DEAD_PARENT = 2
    """The page before it had gone, so that no prefix led to it."""
    DAMAGED = 3
    """Its bytes were not those that had been written."""
    GC = 4
    """Somebody asked for a smaller store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictedPage:
    """What is remembered of a page that left the store.

    Args:
        key: The page's key.
        time_ns: When it left, in nanoseconds since 1970.
        reason: Why.
    """

    key: PageKey
    time_ns: int
    reason: EvictionReason


def encode(pages: Sequence[EvictedPage]) -> bytes:
    """The chunk that holds these pages, newest first; those beyond its length are left out."""
    records = np.zeros(NUM_ENTRIES, RECORD_DTYPE)
    for place, page in enumerate(pages[:NUM_ENTRIES]):
        records[place] = (page.key, page.time_ns, page.reason, 0)
        records["crc"][place] = google_crc32c.value(records[place].tobytes()[:-4])
    return records.tobytes()


def decode(chunk: bytes) -> list[EvictedPage]:
    """The pages in the order of the chunk; what is damaged, or of an unknown reason, is left out.

    ``chunk`` may be of any length and content.
    """
    size = RECORD_DTYPE.itemsize
    count = min(len(chunk) // size, NUM_ENTRIES)
    records = np.frombuffer(chunk, RECORD_DTYPE, count)
    known = {int(reason) for reason in EvictionReason}
    pages = []
    for place in np.flatnonzero(np.isin(records["reason"], list(known))):
        record, at = records[place], int(place) * size
        if google_crc32c.value(chunk[at : at + size - 4]) == int(record["crc"]):
            pages.append(
                EvictedPage(
                    key=PageKey(chunk[at : at + 32]),
                    time_ns=int(record["time_ns"]),
                    reason=EvictionReason(int(record["reason"])),
                )
            )
    return pages


class EvictionRing:
    """The ring in one array folder. Thread-safe; only the owner of the lane adds to it.

    Args:
        path: Folder of the array ``evicted`` in a group of the own lane.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / chunk_name(0, len(EVICTED_DIMENSIONS))
        self._lock = threading.Lock()

    def add(self, keys: Iterable[PageKey], reason: EvictionReason, time_ns: int) -> None:
        """Remember that pages left, the last of ``keys`` as the newest.

        Writes the chunk anew, in place where there is one: it takes ``EVICTED_NBYTES`` once.
        Failing is only logged: no page depends on it.
        """
        fresh = [EvictedPage(key=key, time_ns=time_ns, reason=reason) for key in keys]
        if not fresh:
            return
        with self._lock:
            try:
                chunk = encode([*reversed(fresh), *self.entries()])
                if files.file_sizes(self._path.parent).get(self._path.name) == EVICTED_NBYTES:
                    files.overwrite(self._path, chunk, 0)  # half of it is as good as records are
                else:
                    files.write_atomic(self._path, [chunk], sync=False)
            except OSError as error:
                logger.warning("could not write which pages left to %s: %s", self._path, error)

    def entries(self) -> list[EvictedPage]:
        """What left the store, newest first.

        Raises:
            OSError: The system could not read; a missing ring is empty.
        """
        try:
            return decode(files.read_bytes(self._path))
        except OSError as error:
            if files.is_vanished(error):
                return []
            raise
