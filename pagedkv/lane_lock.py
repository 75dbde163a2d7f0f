"""``LaneLock``: a writer process owns one lane of a store at a time."""

import itertools
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from pagedkv import files, metadata
from pagedkv.format import LANE_LOCK, METADATA, SCRATCH, lane_name, lane_number


class LaneLock:
    """The lock of a lane, held until ``release`` or the end of the process.

    Args:
        lane: Number of the lane.
        path: Folder of the lane.
        fd: Descriptor of the locked file.
    """

    def __init__(self, lane: int, path: Path, fd: int) -> None:
        self.lane = lane
        self.path = path
        self._fd: int | None = fd

    @classmethod
    def take(cls, root: Path) -> "LaneLock":
        """Lock the first lane of the store that nobody holds, made if there is none."""
        for lane in itertools.count():
            path = root / lane_name(lane)
            files.make_dir(path)
            if path.is_symlink():
                continue
            fd = files.open_lock(path / LANE_LOCK)
            if files.try_lock(fd):
                holder = {
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "since": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                os.ftruncate(fd, 0)
                files.pwrite_all(fd, json.dumps(holder).encode(), 0)
                return cls(lane, path, fd)
            os.close(fd)
        raise AssertionError("unreachable")

    def prepare(self) -> None:
        """Make the lane's group document, and an empty folder for scratch files."""
        files.remove_temps(self.path)
        if metadata.read_document(self.path) is None:
            files.write_atomic(self.path / METADATA, [metadata.group_document()])
            files.sync_dir(self.path)
        scratch = self.path / SCRATCH
        files.make_dir(scratch)
        for name in files.file_sizes(scratch):
            files.remove(scratch / name)

    def release(self) -> None:
        """Give the lock back; also where forked children share its descriptor."""
        if self._fd is not None:
            files.unlock(self._fd)
            self.drop()

    def drop(self) -> None:
        """Close this process's descriptor; a parent that shares the lock keeps it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lanes_of(root: Path) -> list[int]:
    """Numbers of all lanes of the store at ``root``."""
    lanes = []
    with os.scandir(root) as entries:
        for entry in entries:
            lane = lane_number(entry.name)
            if lane is not None and entry.is_dir(follow_symlinks=False):
                lanes.append(lane)
    return sorted(lanes)


def holder_of(path: Path) -> str:
    """Who wrote itself into the lock file of the lane at ``path``."""
    try:
        holder = json.loads(files.read_bytes(path / LANE_LOCK))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"
