"""The peer that is as fast as a file can be: the same bytes in plain files, and nothing else."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def write_durably(path: Path, pages: Array, *, sync_folder: bool, checksum: bool) -> None:
    """Write contiguous pages into a new file and wait for the disk.

    Args:
        path: The file.
        pages: The bytes.
        sync_folder: Wait for the folder, too, so that the file's name survives a power cut.
        checksum: Compute the CRC32C of the bytes; it is not kept.
    """
    if checksum:
        google_crc32c.value(pages)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        rest = memoryview(pages.reshape(-1).view(np.uint8))
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    if sync_folder:
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class PlainFile:
    """Pages one after the other in one file, read by ``preadv``.

    Args:
        path: A new file.
        pages: ``(page, …)``, C-contiguous.
    """

    def __init__(self, path: Path, pages: Array) -> None:
        self.path = path
        write_durably(path, pages, sync_folder=True, checksum=False)
        self._page_nbytes = pages[0].nbytes
        self._fd = os.open(path, os.O_RDONLY)

    def read(self, page: int, buffers: "Sequence[memoryview]") -> None:
        """Scatter one page over buffers that are as long as it together."""
        num_read = os.preadv(self._fd, buffers, page * self._page_nbytes)
        assert num_read == self._page_nbytes

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def blocks_of(page: Array) -> list[memoryview]:
    """The contiguous blocks ``(token, head, channel)`` of a page, strided in layer and kind."""
    return [memoryview(kind.reshape(-1).view(np.uint8)) for layer in page for kind in layer]


def forget(paths: Sequence[Path]) -> None:
    """Take the files, which must be on the disk already, out of the system's cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
