"""``DiskThreads``: threads that wait for the disk, so that nobody else has to wait for ever.

A system call that hangs cannot be called off. What reads from the disk therefore runs in a thread
of its own, into memory of its own; who waits for it gives up at the deadline, and the thread, with
its memory, is left alone until the system lets it go.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pagedkv.errors import ClosedError, StoreTimeoutError
from pagedkv.files import Bytes
from pagedkv.memory import aligned

_LOOK_AGAIN_S = 1.0
"""Ctrl-C can swallow a wake-up: threads look for work after so long all the same."""
MAX_HUNG = 16
"""Threads that may hang at once; with more, a wait fails at once."""


class Job:
    """Something to read: ``fetch`` waits for the disk, ``use`` takes what came.

    Args:
        fetch: Called in a disk thread with the thread's own memory; its result goes to ``use``.
        use: Called afterwards, in the same thread, unless the job has been given up.
        nbytes: Memory that ``fetch`` needs.
        what: What is read, for messages.
    """

    __slots__ = (
        "_lock",
        "error",
        "fetch",
        "is_abandoned",
        "is_awaited",
        "is_done",
        "is_used",
        "nbytes",
        "use",
        "what",
    )

    def __init__(
        self,
        fetch: Callable[[Bytes], int],
        use: Callable[[Bytes, int], None],
        nbytes: int,
        what: object,
    ) -> None:
        self.fetch = fetch
        self.use = use
        self.nbytes = nbytes
        self.what = what
        self.error: BaseException | None = None
        self.is_done = False
        self.is_awaited = False
        self.is_used = False
        self.is_abandoned = False
        self._lock = threading.Lock()

    def run(self, memory: Bytes) -> None:
        """Do the job in the calling thread."""
        try:
            if self.is_abandoned:
                return
            num_read = self.fetch(memory)
            if self._begin_use():
                self.use(memory, num_read)
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            self.error = error

    def _begin_use(self) -> bool:
        with self._lock:
            self.is_used = not self.is_abandoned
            return self.is_used

    def abandon(self) -> bool:
        """Give the job up, unless it is past the disk; whether it was given up."""
        with self._lock:
            self.is_abandoned = not self.is_used
            return self.is_abandoned


class DiskThreads:
    """A few threads that run jobs in the order in which they come. Started when first needed.

    Args:
        num_threads: Jobs in flight at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: deque[Job] = deque()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._is_done = threading.Condition(self._lock)
        self._num_idle = 0
        self._threads: set[threading.Thread] = set()
        self._running: set[Job] = set()
        self._is_closed = False

    @property
    def num_hung(self) -> int:
        """Threads whose job was given up, and that the system has not let go yet."""
        with self._lock:
            return self._count_hung()

    def start(self, jobs: Sequence[Job]) -> None:
        """Queue jobs.

        Raises:
            StoreTimeoutError: Too many threads hang already.
            ClosedError: The store was closed.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store is closed")
            if self._count_hung() >= MAX_HUNG:
                raise StoreTimeoutError(
                    f"{MAX_HUNG} reads hang in the system already: look at the disk"
                )
            self._queue.extend(jobs)
            try:
                self._start_threads()
            except BaseException:
                for job in jobs:
                    job.abandon()
                raise
            self._has_work.notify(len(jobs))

    def wait(self, jobs: Sequence[Job], expires: float | None) -> None:
        """Wait until all of these are done.

        Args:
            jobs: Jobs that were started.
            expires: When to give up, in ``time.monotonic``'s seconds.

        Raises:
            StoreTimeoutError: The deadline came first. Jobs that were not past the disk are given
                up: their ``use`` is never called. All others are done.
            BaseException: What a job raised, the first one; all are done.
        """
        late: Job | None = None
        with self._lock:
            for job in reversed(jobs):  # the last ones come last: few are waited for
                while not job.is_done:
                    left = None if expires is None else expires - time.monotonic()
                    if left is not None and left <= 0 and job.abandon():
                        late = job
                        self._start_threads()
                        break
                    job.is_awaited = True
                    self._is_done.wait(None if left is None else max(left, 0.001))
        if late is not None:
            raise StoreTimeoutError(f"the disk did not answer in time: reading {late.what}")
        for job in jobs:
            if job.error is not None:
                raise job.error

    def call_off(self, jobs: Sequence[Job]) -> None:
        """Give jobs up; those that are past the disk are done when this returns."""
        with self._lock:
            for job in jobs:
                while not job.is_done and not job.abandon():
                    job.is_awaited = True
                    self._is_done.wait()
            self._start_threads()

    def close(self) -> None:
        """Let the threads end when they have done their jobs; does not wait for them."""
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()

    def _start_threads(self) -> None:
        """Start what is missing for the queue, in the stead of hung ones too."""
        missing = min(
            len(self._queue) - self._num_idle,
            self._num_threads + self._count_hung() - len(self._threads),
        )
        for _ in range(missing):
            thread = threading.Thread(target=self._work, name="pagedkv-disk", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _count_hung(self) -> int:
        return sum(job.is_abandoned for job in self._running)

    def _work(self) -> None:
        memory = aligned(1)
        while True:
            with self._lock:
                while True:
                    if len(self._threads) > self._num_threads + self._count_hung():
                        self._has_work.notify()  # it may be this thread that was woken for a job
                        self._threads.discard(threading.current_thread())
                        return
                    if self._queue:
                        break
                    if self._is_closed:
                        self._threads.discard(threading.current_thread())
                        return
                    self._num_idle += 1
                    self._has_work.wait(_LOOK_AGAIN_S)
                    self._num_idle -= 1
                job = self._queue.popleft()
                self._running.add(job)
            if len(memory) < job.nbytes:
                memory = aligned(job.nbytes)
            job.run(memory)
            with self._lock:
                self._running.remove(job)
                job.is_done = True
                if job.is_awaited:
                    self._is_done.notify_all()
            del job  # and with it the caller's memory, while this thread is idle
