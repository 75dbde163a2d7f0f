"""``MappedFiles``: segment files that stay mapped into memory."""

import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

import numpy as np

from pagedkv import files
from pagedkv.files import Bytes

MAX_MAPPED = 128
"""Files that stay mapped, each with a descriptor; more only as long as somebody looks at them."""


class MappedFile:
    """One file in memory, read only; mapped as long as anybody has its ``data``.

    Attributes:
        data: All of its bytes.
        address: Where they begin.
    """

    def __init__(self, fd: int) -> None:
        self.data: Bytes = np.empty(0, np.uint8)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is no regular file")
        if status.st_size:  # an empty file cannot be mapped
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):  # else the system reads far more than is looked at
                memory.madvise(mmap.MADV_RANDOM)
            self.data = np.frombuffer(memory, np.uint8)
        self.address: int = self.data.__array_interface__["data"][0]


class MappedFiles:
    """Maps of the files that were looked at last. Thread-safe.

    A file that was removed, or replaced, after it was mapped is seen as it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._maps: OrderedDict[Hashable, MappedFile] = OrderedDict()

    def get(self, name: Hashable, path: Path) -> MappedFile:
        """The file that is known as ``name``, mapped from ``path`` if need be.

        Raises:
            OSError: The file cannot be opened (``files.is_vanished``) or mapped.
        """
        with self._lock:
            found = self._maps.get(name)
            if found is not None:
                self._maps.move_to_end(name)
                return found
        try:
            mapped = _map(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._maps.clear()
            mapped = _map(path)
        with self._lock:
            if not self._is_closed:
                self._maps[name] = mapped
                if len(self._maps) > MAX_MAPPED:
                    self._maps.popitem(last=False)
        return mapped

    def forget(self, name: Hashable) -> None:
        """Let go of a file that is gone, or will be."""
        with self._lock:
            self._maps.pop(name, None)

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._is_closed = True
            self._maps.clear()


def _map(path: Path) -> MappedFile:
    with files.reading(path) as fd:
        return MappedFile(fd)
