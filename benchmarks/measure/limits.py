"""A hard limit of this process's memory, page cache included: a memory cgroup."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """The cgroup that this process is in.

    Args:
        path: Its folder.
        peak: Name of the file that holds the most that was used.
    """

    def __init__(self, path: Path, peak: str) -> None:
        self._peak = path / peak

    def peak_nbytes(self) -> int:
        """The most memory that was used at once, page cache included."""
        return int(self._peak.read_text())


@contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryGroup | None]:
    """Limit what this process takes from now on, inside the block; what it has is not counted.

    Yields:
        The group; None where this process may not make one. It then has no limit.
    """
    found = _make(nbytes)
    if found is None:
        yield None
        return
    path, before, group = found
    try:
        yield group
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        path.rmdir()


def _make(nbytes: int) -> tuple[Path, Path, MemoryGroup] | None:
    """Make a group and move this process into it: its folder, and that of the group before."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    hierarchies = dict(line.split(":", 2)[1:] for line in lines)
    name = f"pagedkv-{uuid.uuid4().hex[:8]}"
    tries = [
        (_ROOT / "memory", "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        (_ROOT, "", "memory.max", "memory.peak"),
    ]
    for root, controller, limit, peak in tries:
        if controller not in hierarchies:
            continue
        path = root / name
        before = root / hierarchies[controller].lstrip("/")
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / limit).write_text(str(nbytes))
            (path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            path.rmdir()
            continue
        return path, before, MemoryGroup(path, peak)
    return None
