"""How a store is opened: options are checked, the header is found or made, a lane is taken."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pagedkv import files, open_stores, root
from pagedkv.arrays import as_int
from pagedkv.codec import Codec, get_codec
from pagedkv.errors import StoreError
from pagedkv.header import StoreHeader
from pagedkv.lane_lock import LaneLock
from pagedkv.spec import KVSpec


def check_options(mode: str, read_deadline: float | None, read_threads: int) -> None:
    """Refuse options that make no sense, and systems that lack what a store needs.

    Raises:
        StoreError: This is Windows.
        ValueError: An option is out of range.
        TypeError: ``read_threads`` is no integer.
    """
    if sys.platform == "win32":
        raise StoreError("PageStore needs POSIX file locks and pread, which Windows lacks")
    if mode not in ("a", "r"):
        raise ValueError(f"mode is {mode!r}: it must be 'a' or 'r'")
    if read_deadline is not None and not read_deadline > 0:
        raise ValueError(f"read_deadline is {read_deadline!r}: give seconds, or None for ever")
    if as_int("read_threads", read_threads) < 1:
        raise ValueError(f"read_threads is {read_threads}: at least one thread must read")


def find_header(
    path: Path,
    spec: KVSpec | Sequence[KVSpec] | None,
    codec: Codec | str | None,
    max_nbytes: int | None,
    *,
    store_tokens: bool,
    make: bool,
) -> StoreHeader:
    """The header of the store at ``path``, which is that of a new one if nothing is there.

    Args:
        path: The store's folder.
        spec: The specs that the caller expects; None for the store's own.
        codec: The codec that the caller expects; None for the store's own, or raw.
        max_nbytes: Of a new store.
        store_tokens: The same.
        make: Whether to make a store that is not there.

    Raises:
        SpecMismatchError: The store is of another spec or codec.
        FormatVersionError: The store has a later format.
        StoreError: There is no store, or no folder that can be one.
        ValueError: There is no such codec; or nothing is there, and no spec was given.
        TypeError: ``spec`` is none.
    """
    specs = _as_specs(spec)
    chosen = None if codec is None else get_codec(codec)
    header = root.read_header(path)
    if header is None:
        if not make:
            raise StoreError(f"there is no store at {path}")
        if not specs:
            raise ValueError(f"there is no store at {path}: give the spec of a new one")
        wanted = StoreHeader.new(specs, get_codec(codec), max_nbytes, store_tokens=store_tokens)
        header = root.create(path, wanted)
    header.require_match(specs, chosen, f"the store {path}")
    return header


@contextmanager
def lane_taken(
    path: Path, header: StoreHeader, max_nbytes: int | None
) -> Iterator[tuple[StoreHeader, LaneLock]]:
    """Take a lane of the store for this process, which keeps it unless the block raises.

    Args:
        path: The store's folder.
        header: What was found there.
        max_nbytes: The store's bound from now on; None leaves it as it is.

    Yields:
        The header with that bound, and the lane's lock.

    Raises:
        StoreLockedError: This process already has the store open for writing.
        StoreError: The system could not read or write.
    """
    with open_stores.lock, files.translated(path, "write to the store"):
        open_stores.require_no_writer(path)
        lane_lock: LaneLock | None = None
        try:
            with files.locked(path):  # nobody measures lanes without an owner meanwhile
                lane_lock = LaneLock.take(path)
            root.mend(path, header)
            lane_lock.clean()
            if max_nbytes is not None and max_nbytes != header.max_nbytes:
                root.set_max_nbytes(path, max_nbytes)
                header = replace(header, max_nbytes=max_nbytes)
            yield header, lane_lock
        except BaseException:
            if lane_lock is not None:
                lane_lock.release()
            raise


def _as_specs(spec: KVSpec | Sequence[KVSpec] | None) -> tuple[KVSpec, ...] | None:
    specs = None if spec is None else (spec,) if isinstance(spec, KVSpec) else tuple(spec)
    for one in specs or ():
        if not isinstance(one, KVSpec):
            raise TypeError(f"spec is {spec!r}: give a KVSpec, or several")
    return specs
