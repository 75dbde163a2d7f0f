"""Compiled kernels that are kept on disk, and thrown away when any source of them has changed.

numba looks only at the date of the file in which a kernel stands. But a kernel is made of parts
from other files too: with an old part in it, it would do the wrong thing.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

SOURCES = (
    "attention_kernels.py",
    "checksum.py",
    "clairvoyant.py",
    "kernel_cache.py",
    "kernels.py",
    "lanes.py",
    "policies/reuse_kernels.py",
    "policies/reuse_model.py",
    "policies/reuse_nodes.py",
    "quantise.py",
    "read_kernels.py",
    "stack_distances.py",
    "system_calls.py",
    "vectors.py",
)
"""What kernels are made of."""
_STAMP = "kernels.sha256"

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile ``function`` at its first call; without the GIL, kept on disk where that can be."""
    compiled: Any
    try:
        compiled = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        compiled = None
    if compiled is None or not is_fresh(Path(compiled.stats.cache_path)):
        compiled = njit(nogil=True, error_model="numpy")(function)
    result: _F = compiled
    return result


def inlined(function: _F) -> _F:
    """A part of kernels: each call is compiled anew, for the constants that it is made with."""
    result: _F = njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return result


@functools.cache
def is_fresh(folder: Path) -> bool:
    """Whether what numba keeps in this folder was made of these sources; older kernels are removed.

    False if they could not be: then they must not be used.
    """
    stamp = folder / _STAMP
    digest = _digest()
    with contextlib.suppress(OSError):
        if stamp.read_text() == digest:
            return True
    try:
        for index in folder.glob("*.nbi"):  # what is behind it is not found without
            index.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        _write(stamp, digest)
    except OSError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    """Replace a file: other processes, which do the same, see all of it or nothing."""
    descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=_STAMP)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(temp).replace(path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
