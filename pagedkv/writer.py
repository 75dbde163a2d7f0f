"""``Writer``: a thread that writes a batch whenever somebody asks for one."""

import threading
from collections.abc import Callable

from pagedkv.errors import ClosedError, StoreFullError
from pagedkv.lock import CacheLock

_LINGER_S = 1.0
"""How long the thread waits for more to do. Then it ends, so that a cache that was dropped without
being closed is not kept in memory by its own thread."""


class Writer:
    """Runs ``work`` in the background, one batch after the other.

    There is no queue: whoever asks sees later whether a batch that began after asking has failed.
    After a failure nothing is tried until somebody asks again. All methods but ``join`` are
    called with the lock held.

    Args:
        lock: The cache's lock. Everybody who waits for it is notified when a batch has ended.
        work: Writes one batch, and says whether there is more to do at once. Called with the lock
            held; it may let go of it meanwhile.
        name: Of the thread.
    """

    def __init__(self, lock: CacheLock, work: Callable[[], bool], name: str) -> None:
        self._lock = lock
        self._work = work
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_asked = False
        self._is_working = False
        self._is_paused = False
        self._is_closed = False
        self._num_begun = 0
        self._failure: tuple[int, BaseException] | None = None
        self._untold: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written, nor about to be."""
        return not self._is_asked and not self._is_working

    def ask(self) -> int:
        """Have a batch written soon; the result is for ``error_since``.

        Raises:
            ClosedError: ``close`` was called.
        """
        if self._is_closed:
            raise ClosedError("the cache was closed meanwhile: make another")
        self._is_asked = True
        self._is_paused = False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._lock.notify_all()
        return self._num_begun

    def ask_again(self) -> None:
        """``ask``, unless a batch is on its way."""
        if self._is_closed or self.is_idle:
            self.ask()

    def hint(self) -> None:
        """Have a batch written unless one is on its way, or the last one failed."""
        if self.is_idle and not self._is_paused and not self._is_closed:
            self.ask()

    def error_since(self, ticket: int) -> BaseException | None:
        """Why the last batch failed, if it began after ``ask`` gave this ticket."""
        if self._failure is None or self._failure[0] <= ticket:
            return None
        error = self._failure[1]
        if self._untold is error:
            self._untold = None
        return error

    def take_untold_error(self) -> BaseException | None:
        """The first failure that nobody has been told of, once."""
        error, self._untold = self._untold, None
        return error

    def resume(self) -> None:
        """Writing works again: heed hints."""
        self._is_paused = False

    def close(self) -> None:
        """Refuse further requests; the batch that runs goes on to its end."""
        self._is_closed = True
        self._is_asked = False
        self._lock.notify_all()

    def join(self) -> None:
        """Wait for the thread's end, after ``close``; called without the lock."""
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join()

    def _run(self) -> None:
        with self._lock:
            while self._is_asked or self._lock.wait_for(self._has_to_act, _LINGER_S):
                if not self._is_asked:
                    break
                self._write_one()
            if self._thread is threading.current_thread():
                self._thread = None

    def _has_to_act(self) -> bool:
        return self._is_asked or self._is_closed

    def _write_one(self) -> None:
        self._is_asked, self._is_working = False, True
        self._num_begun += 1
        number = self._num_begun
        try:
            has_more = self._work()
        except BaseException as error:  # noqa: BLE001 - told to who asked, or to flush
            self._failure = number, error
            self._is_paused = not self._is_asked
            if self._untold is None and not isinstance(error, StoreFullError):
                self._untold = error
        else:
            self._failure = None
            self._is_asked |= has_more and not self._is_closed
        finally:
            self._is_working = False
            self._lock.notify_all()
