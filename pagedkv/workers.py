"""Threads that share work among them: for kernels, which hold no GIL."""

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Worker:
    """One thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pagedkv-worker")
        self._kept_from: int | None = None
        self._thread_id = self._executor.submit(threading.get_native_id).result()

    def start(self, function: Callable[..., _T], *arguments: Any) -> "Future[_T]":
        """Call a function in the thread, but not on the processor that the caller runs on.

        Linux wakes a thread where its waker runs, and lets it wait there for milliseconds though
        another processor is idle.
        """
        here = _this_processor()
        if here is not None and here != self._kept_from:
            others = os.sched_getaffinity(0) - {here}
            with suppress(OSError):  # where it is forbidden the thread waits
                if others:
                    os.sched_setaffinity(self._thread_id, others)
                    self._kept_from = here
        return self._executor.submit(function, *arguments)


_NUM_READERS = 8
"""More sequences than this that read at once wait for each other's waves."""

_IDLE_S = 10.0
"""Seconds after which a reader that has nothing to do ends."""

_workers: list[_Worker] = []
_idle_readers: "deque[SimpleQueue[Any]]" = deque()
"""What readers wait for that have nothing to do."""
_lock = threading.Lock()


def count() -> int:
    """Processors that this thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(function: Callable[..., _T], *arguments: Any, number: int = 0) -> "Future[_T]":
    """Call a function in one of the threads.

    Args:
        function: What to call.
        *arguments: With what.
        number: Which thread; it is made if need be.
    """
    while len(_workers) <= number:
        with _lock:
            if len(_workers) <= number:
                _workers.append(_Worker())
    return _workers[number].start(function, *arguments)


def start_reading(future: "Future[_T]", function: Callable[[], _T]) -> None:
    """Call a function that mostly waits for a disk, in a thread that nobody else uses meanwhile.

    Neither another reader, nor the end of the program, waits for it.

    Args:
        future: Gets what the function returns or raises.
        function: What to call.
    """
    try:
        tasks = _idle_readers.pop()
    except IndexError:
        tasks = SimpleQueue()
        threading.Thread(target=_read, args=(tasks,), name="pagedkv-reader", daemon=True).start()
    tasks.put((future, function))


def _read(tasks: "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
    """Do one task after the other, until none has come for a while."""
    while True:
        try:
            future, function = tasks.get(timeout=_IDLE_S)
        except Empty:
            try:
                _idle_readers.remove(tasks)
            except ValueError:  # a task is on its way
                continue
            return
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            future.set_exception(error)
        del future, function
        _idle_readers.append(tasks)


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks at once, the first one in the calling thread; raises what one of them raised."""
    others = []
    try:
        for number, task in enumerate(tasks[1:]):
            others.append(start(task, number=number))
    except RuntimeError:  # the program is about to end: nobody starts anything any more
        pass
    try:
        for task in (*tasks[:1], *tasks[1 + len(others) :]):
            task()
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


@functools.cache
def _sched_getcpu() -> "Callable[[], int] | None":
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)


def _this_processor() -> int | None:
    """The processor that this thread runs on; None if the system does not tell."""
    function = _sched_getcpu()
    return None if function is None else function()


def _forget() -> None:
    """In a forked child the threads are gone."""
    global _lock  # noqa: PLW0603 - another thread may have held it
    _workers.clear()
    _idle_readers.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
