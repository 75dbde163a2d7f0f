"""Which stores this process has open: one writer a store, and none that a fork would share."""

import atexit
import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

from pagedkv import lane_document
from pagedkv.errors import StoreLockedError
from pagedkv.lane_lock import LaneLock


class OpenStore(Protocol):
    """What is known of an open store here."""

    path: Path

    @property
    def lane_lock(self) -> LaneLock | None:
        """The lane that it writes; None if it only reads."""

    def abandon(self) -> None:
        """In a forked child: leave everything to the parent."""

    def write_columns(self) -> None:
        """Write what a writer still owes; at the latest when its process ends."""


_open_stores: "weakref.WeakSet[OpenStore]" = weakref.WeakSet()
lock = threading.RLock()
"""Held while a store is opened for writing, and across a fork."""


def add(store: OpenStore) -> None:
    """Note that a store is open."""
    _open_stores.add(store)


def discard(store: OpenStore) -> None:
    """Note that a store is closed."""
    _open_stores.discard(store)


def require_no_writer(path: Path) -> None:
    """Raise ``StoreLockedError``, naming the holder, if this process writes the store already."""
    for store in list(_open_stores):
        lane_lock = store.lane_lock
        if lane_lock is not None and _is_same(store.path, path):
            holder = lane_document.read(store.path, lane_lock.lane).last_writer
            raise StoreLockedError(
                f"{path} is already open for writing in this process"
                f" ({holder}, lane {lane_lock.lane}): share that PageStore, or close it"
                " first"
            )


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except FileNotFoundError:  # the folder of an open store was removed
        return False


@atexit.register
def _before_exit() -> None:
    for store in list(_open_stores):
        store.write_columns()


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store.abandon()
    _open_stores.clear()
    lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lock.acquire,
        after_in_parent=lock.release,
        after_in_child=_after_fork_in_child,
    )
