"""Whether a lane is in use, and its lock for who mends it without writing pages."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pagedkv import files


@contextlib.contextmanager
def lane_locked(path: Path) -> Iterator[bool]:
    """Hold the lock of the lane's folder ``path`` if it is free; whether it is held."""
    fd = files.open_folder(path)
    try:
        yield files.try_lock(fd)
    finally:
        files.close_file(fd)


def is_in_use(path: Path) -> bool:
    """Whether a writer holds the lane with this folder, in this process or another."""
    with lane_locked(path) as free:
        return not free
