"""What happens at an engine's calls to a ``Sequence``: an error, or another thread's turn."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import pagedkv as pk

_NAMES = ("append", "append_layer", "attend", "gather", "commit")

_PATIENCE = 5.0
"""Seconds after which a thread no longer waits for one that never comes."""


def before_each_call(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen before each call that appends, attends, gathers or commits."""

    def preceded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            happens()
            return method(*args, **kwargs)

        return call

    for name in _NAMES:
        monkeypatch.setattr(pk.Sequence, name, preceded(getattr(pk.Sequence, name)))


class Interruption:
    """Counts calls, and raises in place of one of them where that is planned.

    Args:
        monkeypatch: Undoes it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self._at: int | None = None
        self._error: BaseException | None = None
        before_each_call(monkeypatch, self._count)

    def plan(self, share: float, error: BaseException) -> None:
        """Raise an error in place of a call of the next run, which has as many as this one had.

        Args:
            share: Which one: 0 is the first call, 1 the last.
            error: What is raised.
        """
        self._at = round(share * (self.num_calls - 1))
        self._error = error
        self.num_calls = 0

    def _count(self) -> None:
        at, self.num_calls = self.num_calls, self.num_calls + 1
        if at == self._at and self._error is not None:
            error, self._error = self._error, None
            raise error


class TakingTurns:
    """Makes two threads do their calls side by side: the first of each, then the second, ...

    Args:
        monkeypatch: Undoes it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(2)
        before_each_call(monkeypatch, self._wait)

    def end(self) -> None:
        """One of the two is done: the other need not wait any more."""
        self._barrier.abort()

    def _wait(self) -> None:
        # Broken if the other is done, or waits until this one is: an engine may have a lock.
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(_PATIENCE)
