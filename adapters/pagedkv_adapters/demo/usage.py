"""What this process takes of memory, and reads from disks, as Linux counts it."""

import resource
import sys
from pathlib import Path

_PROC = Path("/proc/self")


def peak_nbytes() -> int:
    """The most memory that this process had at once, the page cache not included."""
    counted = _read("status", "VmHWM")
    if counted is not None:
        return counted * 1024
    # Elsewhere the next best; a process may inherit it from the one that started it.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident_nbytes() -> int:
    """The memory that this process has now; where nobody tells, the most it has had."""
    counted = _read("status", "VmRSS")
    return peak_nbytes() if counted is None else counted * 1024


def device_read_nbytes() -> int | None:
    """Bytes that came from devices for this process so far; None where nobody counts them."""
    return _read("io", "read_bytes")


def _read(file: str, name: str) -> int | None:
    """The number behind ``name`` in one of the process's files."""
    try:
        lines = (_PROC / file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
