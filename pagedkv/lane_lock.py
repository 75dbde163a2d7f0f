"""``LaneLock``: a writer process owns one lane of a store at a time.

The lock is on the lane's folder itself, and who holds it stands in the attributes of the lane's
group: a lock file would be foreign to the Zarr hierarchy, and readers would warn of it.
"""

import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagedkv import files, lane_document
from pagedkv.errors import StoreLockedError
from pagedkv.format import LANE_BITS, lane_name


class LaneLock:
    """The lock of a lane, held until ``release``, or until this object or its process is gone.

    Args:
        lane: Number of the lane.
        path: Folder of the lane.
        fd: Descriptor of the locked folder.
    """

    def __init__(self, lane: int, path: Path, fd: int) -> None:
        self.lane = lane
        self.path = path
        self._fd = fd
        self._close = weakref.finalize(self, files.close_file, fd)

    @classmethod
    def take(cls, root: Path) -> "LaneLock":
        """Lock the first lane of the store that nobody holds, made if there is none.

        Raises:
            OSError: The system could not make or lock it.
        """
        for lane in range(1 << LANE_BITS):
            path = root / lane_name(lane)
            files.make_dir(path)
            lock = cls.try_take(root, lane) if files.is_folder(path) else None
            if lock is not None:
                return lock
        raise StoreLockedError(f"{root} has {1 << LANE_BITS} writers: it cannot have more")

    @classmethod
    def try_take(cls, root: Path, lane: int) -> "LaneLock | None":
        """Lock a lane if nobody holds it.

        Raises:
            OSError: It is gone (``files.is_vanished``), or the system could not lock it.
        """
        path = root / lane_name(lane)
        fd = files.open_folder(path)
        try:
            is_taken = files.try_lock(fd)
        except BaseException:
            files.close_file(fd)
            raise
        if is_taken:
            return cls(lane, path, fd)
        files.close_file(fd)
        return None

    def clean(self) -> None:
        """Remove what an earlier writer left half done."""
        files.remove_temps(self.path)

    @staticmethod
    def holder() -> dict[str, Any]:
        """What the lane's document shall say of this process."""
        return {
            lane_document.LAST_WRITER: {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        }

    def release(self) -> None:
        """Give the lock back; also where forked children share its descriptor."""
        if self._close.alive:
            try:
                files.unlock(self._fd)
            finally:
                self._close()

    def drop(self) -> None:
        """Close this process's descriptor; a parent that shares the lock keeps it."""
        self._close()
