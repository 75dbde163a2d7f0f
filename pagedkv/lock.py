"""``CacheLock``: the one lock of a cache, and the ways to let go of it."""

import threading
from contextlib import suppress


class CacheLock(threading.Condition):
    """A condition that costs little while nobody waits for it.

    It is never taken twice by one thread. All sections under it are short: no I/O, and no copying
    of more than a few kilobytes.

    Attributes:
        mutex: The lock inside; ``with lock.mutex`` is ``with lock``, but quicker.
        unlocked: ``with lock.unlocked`` lets go of the lock inside the block.
        num_releases: How often the lock was released in the midst of an operation: what was true
            before may not be true afterwards.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # not a Lock: an RLock knows who owns it
        super().__init__(self.mutex)
        self.unlocked = _Unlocked(self)
        self.num_releases = 0
        self._num_waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Let go of the lock until somebody notifies, or the time is over."""
        self.num_releases += 1
        self._num_waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self._num_waiting -= 1

    def notify_all(self) -> None:
        """Wake up all who wait."""
        if self._num_waiting:
            super().notify_all()


class _Unlocked:
    def __init__(self, lock: CacheLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.num_releases += 1
        try:
            self._lock.mutex.release()
        except BaseException:  # Ctrl-C in the midst of it: the block is not entered
            self._take()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._lock.mutex.acquire()
        except BaseException:  # the same: the code around the block needs the lock
            self._take()
            raise

    def _take(self) -> None:
        while not self._is_mine():
            with suppress(BaseException):
                self._lock.mutex.acquire()

    def _is_mine(self) -> bool:
        try:
            self._lock.notify(0)
        except RuntimeError:
            return False
        return True
