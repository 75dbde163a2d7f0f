"""The one place where the store touches the file system.

Small functions over file descriptors and paths. They raise ``OSError`` as the system gives it;
``translated`` turns it into ``StoreError`` at the edge of the store. New folders are 0700 and new
files 0600. No file inside a store is opened through a symbolic link.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.errors import StoreError

if sys.platform != "win32":
    import fcntl

Bytes = npt.NDArray[np.uint8]
"""Raw bytes: a uint8 array of one dimension."""

TEMP_PREFIX = ".tmp-"

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe in a file's place must not wait for a writer; a file does not mind."""
_NOWAIT = NOW_FLAGS = getattr(os, "RWF_NOWAIT", 0)
_NOT_NOW = (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_DIRECT = getattr(os, "O_DIRECT", 0)
_SYNC_FILE_RANGE_WRITE = 2
_CANNOT_BE_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
"""How file systems and systems say that they do not know ``O_TMPFILE``."""
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESPIPE)


class ShortReadError(OSError):
    """A file ended before all bytes were read that it should have."""


@contextlib.contextmanager
def translated(place: Path | str, action: str = "use") -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``StoreError`` saying ``cannot {action} {place}``.

    If the system names another file than ``place``, the message names it too.
    """
    try:
        yield
    except OSError as error:
        raise_translated(error, place, action)


def raise_translated(error: OSError, place: Path | str, action: str) -> NoReturn:
    """Raise the ``StoreError`` that stands for ``error``, as ``translated`` does."""
    reason = error.strerror or str(error)
    culprit = error.filename
    if isinstance(culprit, str | os.PathLike) and str(culprit) != str(place):
        reason = f"{reason} ({culprit})"
    raise StoreError(f"cannot {action} {place}: {reason}") from error


def make_dir(path: Path) -> None:
    """Create ``path`` as a private folder; it may exist."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def make_dirs(path: Path) -> None:
    """Create ``path`` and the folders above it, where they are missing."""
    os.makedirs(path, exist_ok=True)  # noqa: PTH103 - reads as the system call


def restrict(path: Path) -> None:
    """Take all rights on the folder from others than its owner."""
    os.chmod(path, 0o700)  # noqa: PTH101 - the same


def exists(path: Path) -> bool:
    """Whether there is anything at ``path``, or behind it if it is a symbolic link."""
    try:
        os.stat(path)  # noqa: PTH116 - the same
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_own(path: Path) -> bool:
    """Whether what is at ``path`` belongs to the user as whom this process runs."""
    return os.stat(path).st_uid == os.geteuid()  # noqa: PTH116 - the same


def is_folder(path: Path, *, follow: bool = False) -> bool:
    """Whether ``path`` is a folder; a symbolic link is none unless ``follow``."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode  # noqa: PTH116 - the same
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(mode)


def names(path: Path) -> list[str]:
    """Names of all that is in the folder, sorted."""
    return sorted(os.listdir(path))


def open_file(path: Path, *, direct: bool = False) -> int:
    """A descriptor that reads ``path``, which must not be a symbolic link.

    With ``direct`` it goes past the page cache where the system can; reads must then be aligned.
    """
    flags = os.O_RDONLY | _NOFOLLOW | _NONBLOCK
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system does not know it
                raise
    return os.open(path, flags)


def close_file(fd: int) -> None:
    """Close a descriptor."""
    os.close(fd)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """A descriptor of ``open_file``, closed after the block."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        close_file(fd)


def is_vanished(error: OSError) -> bool:
    """Whether reading a file failed because there is no such regular file (any more)."""
    return error.errno in _VANISHED


def read_bytes(path: Path) -> bytes:
    """All bytes of ``path``, which must not be a symbolic link."""
    parts = []
    with reading(path) as fd, contextlib.suppress(BlockingIOError):  # a pipe with a writer
        size = os.fstat(fd).st_size
        while part := os.read(fd, size + 1):
            parts.append(part)
    return b"".join(parts)


def pread_into(fd: int, out: Bytes, offset: int) -> int:
    """Fill ``out`` from ``offset`` of the file; the bytes read, fewer only at the file's end."""
    done = os.preadv(fd, [out.data], offset)
    while 0 < done < len(out):
        count = os.preadv(fd, [out.data[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def pread_now(fd: int, out: Bytes, offset: int) -> int:
    """Fill ``out`` as far as that needs no wait for a disk; the bytes read, maybe 0.

    Where the system cannot tell (no Linux, tmpfs), nothing is read.
    """
    if not _NOWAIT:
        return 0
    try:
        return os.preadv(fd, [out.data], offset, _NOWAIT)
    except OSError as error:
        if error.errno in _NOT_NOW:
            return 0
        raise


def pread_parts_now(fd: int, parts: Sequence[Any], offset: int) -> int:
    """``pread_now`` into several contiguous arrays, one after the other."""
    if not _NOWAIT:
        return 0
    try:
        return os.preadv(fd, parts, offset, _NOWAIT)
    except OSError as error:
        if error.errno in _NOT_NOW:
            return 0
        raise


@functools.cache
def preadv2_address() -> int:
    """Address of C's ``preadv2``, with 64-bit numbers, by which kernels read; 0 if it has none.

    With ``NOW_FLAGS`` it reads as ``pread_now`` does; with 0 it waits for the disk.
    """
    return _address_of("preadv2") if _NOWAIT else 0


@functools.cache
def fadvise_address() -> int:
    """Address of C's ``posix_fadvise`` with 64-bit numbers; 0 if the system has none."""
    return _address_of("posix_fadvise") if hasattr(os, "posix_fadvise") else 0


@functools.cache
def madvise_address() -> int:
    """Address of C's ``madvise``; 0 if the system has none, or pages of another size than 4096."""
    has_it = hasattr(mmap, "MADV_WILLNEED") and mmap.PAGESIZE == 4096
    return _address_of("madvise") if has_it else 0


def _address_of(name: str) -> int:
    """Address of one of C's functions; 0 if there is none, or its numbers are not of 64 bits."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None or ctypes.sizeof(ctypes.c_long) < 8:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def pread_exact(fd: int, nbytes: int, offset: int) -> Bytes:
    """The ``nbytes`` bytes from ``offset`` of the file; ``ShortReadError`` if it ends before."""
    out = np.empty(nbytes, np.uint8)
    done = pread_into(fd, out, offset)
    if done < nbytes:
        raise ShortReadError(errno.EIO, f"the file ends {nbytes - done} bytes too early")
    return out


def pwrite_all(fd: int, data: "Bytes | bytes", offset: int) -> None:
    """Write all of ``data`` at ``offset``, whatever the system takes at once."""
    rest = _memory(data)
    while rest:
        done = os.pwrite(fd, rest, offset)
        rest, offset = rest[done:], offset + done


def write_all(fd: int, data: "Bytes | bytes") -> None:
    """Append all of ``data`` at the descriptor's position, whatever the system takes at once."""
    rest = _memory(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def start_sync(fd: int) -> None:
    """Let the system begin to write what was appended, if it can; nothing waits, nothing is synced.

    The disk is at work then while the rest is made.
    """
    function = _sync_file_range()
    if function is not None:
        function(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> "Callable[[int, int, int, int], int] | None":
    """C's function of that name, where there is one that takes 64-bit numbers."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) < 8:
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint]
    return function


@contextlib.contextmanager
def new_file(path: Path, folder: Path | None = None) -> Iterator[tuple[int, Path]]:
    """A new private file for ``path``: yields its descriptor and its temporary path.

    It lies beside ``path``, or in another ``folder`` of the same file system. The caller publishes
    it with ``os.replace``. If the block raises, the file is removed.
    """
    name = f"{TEMP_PREFIX}{path.name}-{secrets.token_hex(4)}"
    temp = path.with_name(name) if folder is None else folder / name
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
    try:
        yield fd, temp
    except BaseException:
        remove(temp)
        raise
    finally:
        os.close(fd)


def scratch_file(folder: Path) -> int:
    """A descriptor of a new private file in ``folder`` that has no name: it is gone when closed."""
    nameless = getattr(os, "O_TMPFILE", None)
    if nameless is not None:
        try:
            return os.open(folder, os.O_RDWR | os.O_EXCL | nameless, 0o600)
        except OSError as error:
            if error.errno not in _CANNOT_BE_NAMELESS:
                raise
    name = folder / f"{TEMP_PREFIX}scratch-{secrets.token_hex(4)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
    try:
        os.unlink(name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_atomic(
    path: Path,
    parts: "Iterable[Bytes | bytes]",
    *,
    sync: bool = True,
    folder: Path | None = None,
) -> None:
    """Replace ``path`` by the concatenated ``parts``: readers see the old bytes or all of the new.

    With ``sync`` the bytes are on the disk before the name changes; the new *name* is durable after
    ``sync_dir`` of the folder. Until then they lie beside ``path``, or in ``folder``.
    """
    with new_file(path, folder) as (fd, temp):
        for part in parts:
            write_all(fd, part)
        if sync:
            sync_file(fd)
        replace(temp, path)


def overwrite(path: Path, data: "Bytes | bytes", offset: int) -> None:
    """Replace bytes in the middle of the file ``path``, unsynced; its other bytes stay."""
    fd = os.open(path, os.O_WRONLY | _NOFOLLOW | _NONBLOCK)
    try:
        pwrite_all(fd, data, offset)
    finally:
        os.close(fd)


def sync_file(fd: int) -> None:
    """Make the file's bytes and size durable."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def sync_dir(path: Path) -> None:
    """Make the names in the folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def replace(path: Path, by_name: Path) -> None:
    """Give the file at ``path`` another name, in place of what has that name."""
    os.replace(path, by_name)


def changed_ns(path: Path) -> int:
    """When the folder's names last changed, in nanoseconds since 1970."""
    return os.stat(path).st_mtime_ns  # noqa: PTH116 - reads as the system call


def remove(path: Path) -> int:
    """Remove the file, if it is there; its size, 0 if it is not."""
    try:
        nbytes = os.lstat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return nbytes


def remove_empty_folder(path: Path) -> None:
    """Remove the folder, if there is one; ``OSError`` if something is in it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.rmdir(path)  # noqa: PTH106 - reads as the system call, like os.unlink


def remove_temps(path: Path) -> None:
    """Remove what interrupted writers left in the folder. Only for its one writer."""
    for name in file_sizes(path):
        if name.startswith(TEMP_PREFIX):
            remove(path / name)


def file_sizes(path: Path) -> dict[str, int]:
    """Size of each regular file of the folder by name; empty if there is no such folder."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def subfolders(path: Path) -> list[str]:
    """Names of the folders in a folder, without symbolic links; empty if it is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def tree_nbytes(path: Path) -> int:
    """Size of all regular files below the folder ``path``; what vanishes meanwhile counts as 0."""
    below = sum(tree_nbytes(path / name) for name in subfolders(path))
    return below + sum(file_sizes(path).values())


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes, but for rare coincidences, when ``path`` is replaced; None if it is not there."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def open_folder(path: Path) -> int:
    """A descriptor of the folder ``path``, by which it can be locked."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of a descriptor if nobody holds it; whether it was taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give the file's lock back, also where forked children share the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of the folder ``path`` during the block, waiting for it."""
    fd = open_folder(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            unlock(fd)  # a child forked meanwhile shares the descriptor, and would keep the lock
    finally:
        os.close(fd)


def _memory(data: "Bytes | bytes") -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)
