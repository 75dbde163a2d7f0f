"""The background writer: batches when asked, failures told, no thread left behind."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pagedkv import ClosedError, StoreError, StoreFullError
from pagedkv import writer as writer_module
from pagedkv.lock import CacheLock
from pagedkv.writer import Writer

PATIENCE_S = 60


class Work:
    """Counts its batches, and does what it is told."""

    def __init__(self) -> None:
        self.lock = CacheLock()
        self.num_more = 0
        self.error: BaseException | None = None
        self.num_batches = 0
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.writer = Writer(self.lock, self, "test-writer")

    def __call__(self) -> bool:
        self.num_batches += 1
        self.begun.set()
        self.lock.release()
        try:
            assert self.gate.wait(PATIENCE_S)
        finally:
            self.lock.acquire()
        if self.error is not None:
            raise self.error
        self.num_more -= 1
        return self.num_more >= 0

    def settle(self) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.writer.is_idle, PATIENCE_S)

    def ask(self) -> int:
        with self.lock:
            return self.writer.ask()

    def error_since(self, ticket: int) -> BaseException | None:
        with self.lock:
            return self.writer.error_since(ticket)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.gate.set()
    with work.lock:
        work.writer.close()
    work.writer.join()
    assert not any(thread.name == "test-writer" for thread in threading.enumerate())


def test_nothing_runs_before_somebody_asks(work: Work) -> None:
    assert not any(thread.name == "test-writer" for thread in threading.enumerate())
    assert work.writer.is_idle


def test_who_asks_gets_a_batch_and_those_that_follow_from_it(work: Work) -> None:
    work.num_more = 2
    ticket = work.ask()
    work.settle()
    assert work.num_batches == 3
    assert work.error_since(ticket) is None


def test_a_request_during_a_batch_is_served_by_another_one(work: Work) -> None:
    work.gate.clear()
    work.ask()
    assert work.begun.wait(PATIENCE_S)
    work.ask()
    work.gate.set()
    work.settle()
    assert work.num_batches == 2


def test_hints_add_nothing_to_a_batch_that_is_on_its_way(work: Work) -> None:
    work.gate.clear()
    work.ask()
    assert work.begun.wait(PATIENCE_S)
    with work.lock:
        work.writer.hint()
    work.gate.set()
    work.settle()
    assert work.num_batches == 1


def test_a_failure_is_told_to_who_asked_before_the_batch(work: Work) -> None:
    work.error = StoreError("no")
    ticket = work.ask()
    work.settle()
    assert work.error_since(ticket) is work.error
    assert work.error_since(ticket + 1) is None
    work.error = None
    assert work.error_since(work.ask()) is None
    work.settle()
    assert work.error_since(ticket) is None, "it works again"


def test_after_a_failure_hints_are_ignored_until_somebody_asks(work: Work) -> None:
    work.error = StoreError("no")
    work.ask()
    work.settle()
    work.error = None
    with work.lock:
        work.writer.hint()
    work.settle()
    assert work.num_batches == 1
    with work.lock:
        work.writer.resume()
        work.writer.hint()
    work.settle()
    assert work.num_batches == 2


def test_the_first_failure_that_nobody_saw_is_told_once(work: Work) -> None:
    first = work.error = StoreError("first")
    work.ask()
    work.settle()
    work.error = StoreError("second")
    work.ask()
    work.settle()
    with work.lock:
        assert work.writer.take_untold_error() is first
        assert work.writer.take_untold_error() is None


@pytest.mark.parametrize("how", ["told", "full"])
def test_a_failure_that_was_told_or_has_been_dealt_with_is_not_kept(work: Work, how: str) -> None:
    work.error = StoreFullError("full") if how == "full" else StoreError("no")
    ticket = work.ask()
    work.settle()
    if how == "told":
        assert work.error_since(ticket) is work.error
    with work.lock:
        assert work.writer.take_untold_error() is None


def test_close_lets_the_batch_end_and_refuses_more(work: Work) -> None:
    work.gate.clear()
    work.num_more = 5
    work.ask()
    assert work.begun.wait(PATIENCE_S)
    with work.lock:
        work.writer.close()
        work.writer.hint()
        with pytest.raises(ClosedError):
            work.writer.ask()
    joiner = threading.Thread(target=work.writer.join, daemon=True)
    joiner.start()
    joiner.join(0.05)
    assert joiner.is_alive()
    work.gate.set()
    joiner.join(PATIENCE_S)
    assert not joiner.is_alive()
    assert work.num_batches == 1


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_the_thread_ends_when_it_has_nothing_to_do_and_comes_back(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_LINGER_S", 0.01)
    for number in (1, 2):
        work.ask()
        work.settle()
        assert work.num_batches == number
        wait_until(lambda: all(t.name != "test-writer" for t in threading.enumerate()))
