"""Threads that share work among them: for kernels, which hold no GIL."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")

_pool: ThreadPoolExecutor | None = None


def count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(function: Callable[..., _T], *arguments: Any) -> "Future[_T]":
    """Call a function in one of the threads."""
    global _pool  # noqa: PLW0603 - made once in each process
    if _pool is None:
        _pool = ThreadPoolExecutor(count(), thread_name_prefix="pagedkv-worker")
    return _pool.submit(function, *arguments)


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks at once, the first one in the calling thread; raises what one of them raised."""
    others = [start(task) for task in tasks[1:]]
    try:
        for task in tasks[:1]:
            task()
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


def _forget() -> None:
    """In a forked child the threads are gone."""
    global _pool  # noqa: PLW0603 - the same
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
