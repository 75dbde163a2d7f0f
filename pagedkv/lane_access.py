"""Which lanes a store has, which are in use, and the lock for who mends one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pagedkv import files
from pagedkv.format import lane_number


def lanes_of(root: Path) -> list[int]:
    """Numbers of all lanes of the store at ``root``, ascending."""
    numbers = [lane_number(name) for name in files.subfolders(root)]
    return sorted(lane for lane in numbers if lane is not None)


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
