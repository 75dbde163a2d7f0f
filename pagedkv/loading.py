"""Reading pages in the background."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ClosedError, StoreTimeoutError

Array = npt.NDArray[Any]


class LoadHandle:
    """Pages on their way into an array.

    The array is written in one go, when all pages have been read, and never after ``cancel``
    returned ``True`` or ``result`` raised ``StoreTimeoutError``.
    """

    def __init__(self, out: Array, deadline: float | None) -> None:
        if deadline is not None and not (isinstance(deadline, int | float) and deadline >= 0):
            raise ValueError(f"deadline is {deadline!r}: it must be seconds from now, 0 or more")
        self._out = out
        self._expires = None if deadline is None else time.monotonic() + deadline
        self._deadline = deadline
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_expired = False
        self._is_delivered = False
        self._future: Future[None] | None = None

    def done(self) -> bool:
        """Whether ``result`` would answer at once."""
        assert self._future is not None
        return self._future.done() or self._is_given_up()

    def cancel(self) -> bool:
        """Give the load up; ``False`` if the pages have been delivered already."""
        with self._lock:
            if self._is_delivered:
                return False
            self._is_cancelled = True
        assert self._future is not None
        self._future.cancel()
        return True

    def result(self) -> Array:
        """Wait for the pages and return the array.

        Raises:
            PageNotFoundError: A page is in no tier, or damaged.
            StoreError: The disk failed.
            StoreTimeoutError: The deadline has passed; the array will not be written any more.
            CancelledError: The load was cancelled, or had not begun when the cache was closed
                (``concurrent.futures``).
        """
        assert self._future is not None
        if self._is_cancelled:
            raise CancelledError
        left = None if self._expires is None else max(0.0, self._expires - time.monotonic())
        with contextlib.suppress(FutureTimeoutError, CancelledError):
            self._future.result(left)
        with self._lock:
            if self._is_delivered:
                return self._out
            if self._is_cancelled or self._future.cancelled():
                raise CancelledError
            self._is_expired = True
        raise StoreTimeoutError(f"the pages were not read within {self._deadline} s")

    def _run(self, read: Callable[[], Array]) -> None:
        if self._is_given_up():
            return
        pages = read()
        with self._lock:
            if not self._is_given_up():
                np.copyto(self._out, pages)
                self._is_delivered = True

    def _is_given_up(self) -> bool:
        is_late = self._expires is not None and time.monotonic() >= self._expires
        return self._is_cancelled or self._is_expired or is_late


class Loader:
    """A thread that serves loads, started by the first of them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedkv-load")

    def start(self, read: Callable[[], Array], out: Array, deadline: float | None) -> LoadHandle:
        """Begin to read; ``read`` returns fresh pages of the shape of ``out``.

        Raises:
            ValueError: ``deadline`` is no number of seconds from now.
            ClosedError: The cache was closed.
        """
        handle = LoadHandle(out, deadline)
        try:
            handle._future = self._threads.submit(handle._run, read)
        except RuntimeError as error:  # shut down by a close() that runs beside this
            raise ClosedError("the cache is closed: make another") from error
        return handle

    def close(self) -> None:
        """Wait for the load that runs; give up those that have not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)
