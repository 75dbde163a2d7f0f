"""Where the demo works: a folder that no other demo uses meanwhile, with room for what it needs."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pagedkv as pk


def cache_folder() -> Path:
    """Where unpacked models and the demo are kept: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "pagedkv"


@contextmanager
def own_folder(otherwise: str = "") -> Iterator[Path]:
    """The demo's folder, which no other demo may use inside the block.

    Args:
        otherwise: What else one can do than wait, for the message.

    Raises:
        PagedKVError: Another demo uses it.
    """
    from filelock import FileLock, Timeout

    folder = cache_folder() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield folder
    except Timeout as error:
        advice = f"wait for it, or {otherwise}" if otherwise else "wait for it"
        raise pk.PagedKVError(f"another demo uses {folder}: {advice}") from error


def check_room(folder: Path, nbytes: int, what: str) -> None:
    """Raise ``PagedKVError`` unless the disk of ``folder`` has room for so many bytes, and a tenth.

    Args:
        folder: Where they are to be.
        nbytes: How many.
        what: What they are, for the message.
    """
    free = shutil.disk_usage(folder).free
    if free < 1.1 * nbytes:
        raise pk.PagedKVError(
            f"{folder} has {pk.format_nbytes(free)} free, but {what} takes "
            f"{pk.format_nbytes(round(1.1 * nbytes))}: make room, let XDG_CACHE_HOME name a folder "
            "on another disk, or give fewer --long-tokens"
        )
