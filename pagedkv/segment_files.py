"""``SegmentFiles``: segment files that stay open, so that a read need not open one."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedkv import files

MAX_OPEN = 128
"""Descriptors that are kept; more are opened only while that many are read from at once."""


@dataclass(slots=True)
class OpenFile:
    """A file, how many read from it, and whether it stays open when nobody does."""

    fd: int
    num_users: int = 0
    is_kept: bool = True


class SegmentFiles:
    """Descriptors of the files that were read last. Thread-safe.

    A file that was removed, or replaced, after it was opened is read as it was: its pages are
    verified like any others.

    Args:
        direct: Read past the page cache where the file system can.
    """

    def __init__(self, *, direct: bool = False) -> None:
        self._direct = direct
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: OrderedDict[Hashable, OpenFile] = OrderedDict()

    def take(self, name: Hashable, path: Path) -> OpenFile:
        """The file that is known as ``name``, opened at ``path`` if need be.

        It stays open until ``give_back``.

        Raises:
            OSError: The file cannot be opened (``files.is_vanished``).
        """
        with self._lock:
            file = self._open.get(name)
            if file is not None:
                file.num_users += 1
                self._open.move_to_end(name)
                return file
        try:
            fd = files.open_file(path, direct=self._direct)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._drop_all()
            fd = files.open_file(path, direct=self._direct)
        with self._lock:
            file = self._open.get(name)
            if self._is_closed:
                file = OpenFile(fd, is_kept=False)
            elif file is None:
                file = self._open[name] = OpenFile(fd)
                if len(self._open) > MAX_OPEN:
                    self._drop(self._open.popitem(last=False)[1])
            else:  # another thread was faster
                files.close_file(fd)
            file.num_users += 1
            return file

    def give_back(self, file: OpenFile) -> None:
        """Tell that a file of ``take`` is not read from any more."""
        with self._lock:
            file.num_users -= 1
            if not file.is_kept and not file.num_users:
                files.close_file(file.fd)

    @contextmanager
    def reading(self, name: Hashable, path: Path) -> Iterator[int]:
        """The descriptor of ``take``'s file, given back after the block."""
        file = self.take(name, path)
        try:
            yield file.fd
        finally:
            self.give_back(file)

    def forget(self, name: Hashable) -> None:
        """Close the file, when the last reader is done, since it is gone or will be."""
        with self._lock:
            file = self._open.pop(name, None)
            if file is not None:
                self._drop(file)

    def close(self) -> None:
        """Close all files, each when its last reader is done."""
        with self._lock:
            self._is_closed = True
            self._drop_all()

    def _drop_all(self) -> None:
        while self._open:
            self._drop(self._open.popitem()[1])

    def _drop(self, file: OpenFile) -> None:
        file.is_kept = False
        if not file.num_users:
            files.close_file(file.fd)
