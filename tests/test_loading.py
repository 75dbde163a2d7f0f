"""Loads in the background: delivered whole, or never."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import Array, bits, make_key, make_pages, make_spec

from pagedkv import (
    ClosedError,
    LoadHandle,
    PagedKVCache,
    PageNotFoundError,
    PageStore,
    StoreTimeoutError,
)
from pagedkv.loading import Loader

PATIENCE_S = 60


class SlowRead:
    """A read that begins, and ends when the test says so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error = error
        self.num_reads = 0

    def __call__(self) -> Array:
        self.num_reads += 1
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return np.ones(3)


@pytest.fixture
def loader() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    loader.close()


@pytest.fixture
def read() -> Iterator[SlowRead]:
    read = SlowRead()
    yield read
    read.may_end.set()  # lest the loader waits for ever after a failure


def outcome_of(handle: LoadHandle) -> "tuple[threading.Thread, list[Any]]":
    """Wait for the handle in another thread: what it returns, or raises."""
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(handle.result())
        except BaseException as error:  # noqa: BLE001  the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, outcome


def test_a_load_delivers_into_the_callers_array(loader: Loader, read: SlowRead) -> None:
    out = np.zeros(3)
    handle = loader.start(read, out, None)
    assert read.begun.wait(PATIENCE_S)
    assert not handle.done()
    assert not out.any()
    read.may_end.set()
    assert handle.result() is out
    assert handle.done()
    assert out.all()
    assert handle.result() is out


def test_cancel_after_delivery_is_refused(loader: Loader, read: SlowRead) -> None:
    handle = loader.start(read, np.zeros(3), None)
    read.may_end.set()
    handle.result()
    assert not handle.cancel()
    assert handle.result().all()


def test_a_cancelled_load_never_writes(loader: Loader, read: SlowRead) -> None:
    out = np.zeros(3)
    handle = loader.start(read, out, None)
    assert read.begun.wait(PATIENCE_S)
    assert handle.cancel()
    assert handle.done()
    with pytest.raises(CancelledError):
        handle.result()
    read.may_end.set()
    loader.close()
    assert not out.any()
    assert handle.cancel()


def test_a_load_that_is_cancelled_before_it_begins_is_not_read(
    loader: Loader, read: SlowRead
) -> None:
    loader.start(read, np.zeros(3), None)
    behind = SlowRead()
    handle = loader.start(behind, np.zeros(3), None)
    assert handle.cancel()
    read.may_end.set()
    loader.close()
    assert behind.num_reads == 0
    with pytest.raises(CancelledError):
        handle.result()


def test_who_waits_while_another_cancels_gets_no_unwritten_array(
    loader: Loader, read: SlowRead
) -> None:
    handle = loader.start(read, np.zeros(3), None)
    assert read.begun.wait(PATIENCE_S)
    thread, outcome = outcome_of(handle)
    time.sleep(0.05)  # let it wait
    assert handle.cancel()
    read.may_end.set()
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], CancelledError)


def test_a_deadline_that_passes_is_an_error_and_nothing_is_written_later(
    loader: Loader, read: SlowRead
) -> None:
    out = np.zeros(3)
    handle = loader.start(read, out, 0.01)
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s"):
        handle.result()
    read.may_end.set()
    loader.close()
    assert not out.any()
    with pytest.raises((StoreTimeoutError, CancelledError)):
        handle.result()


def test_a_deadline_counts_though_nobody_waits(loader: Loader, read: SlowRead) -> None:
    out = np.zeros(3)
    handle = loader.start(read, out, 1.0)
    assert read.begun.wait(PATIENCE_S)
    time.sleep(1.05)
    read.may_end.set()
    loader.close()
    assert not out.any()
    with pytest.raises(StoreTimeoutError):
        handle.result()


def test_a_load_that_ended_in_time_may_be_asked_for_later(loader: Loader, read: SlowRead) -> None:
    handle = loader.start(read, np.zeros(3), 30)
    read.may_end.set()
    loader.close()
    assert handle.result().all()


def test_the_readers_error_is_raised_each_time(loader: Loader, read: SlowRead) -> None:
    read.error = PageNotFoundError("gone")
    out = np.zeros(3)
    handle = loader.start(read, out, None)
    read.may_end.set()
    for _ in range(2):
        with pytest.raises(PageNotFoundError, match="gone"):
            handle.result()
    assert handle.done()
    assert not out.any()


def test_loads_are_served_in_turn(loader: Loader) -> None:
    order: list[int] = []

    def make(number: int) -> Callable[[], Array]:
        def read() -> Array:
            order.append(number)
            return np.full(3, float(number))

        return read

    handles = [loader.start(make(number), np.zeros(3), None) for number in range(5)]
    assert [handle.result()[0] for handle in handles] == [0, 1, 2, 3, 4]
    assert order == [0, 1, 2, 3, 4]


def test_close_waits_for_the_running_load_and_gives_the_others_up(
    loader: Loader, read: SlowRead
) -> None:
    running = loader.start(read, np.zeros(3), None)
    waiting = loader.start(lambda: np.ones(3), np.zeros(3), None)
    assert read.begun.wait(PATIENCE_S)
    closer = threading.Thread(target=loader.close, daemon=True)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    read.may_end.set()
    closer.join(PATIENCE_S)
    assert running.result().all()
    with pytest.raises(CancelledError):
        waiting.result()


def test_a_cache_loads_what_get_returns(tmp_path: Path) -> None:
    spec = make_spec()
    keys, pages = [make_key(n) for n in range(6)], make_pages(spec, range(6))
    with PagedKVCache(spec, 2, PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        cache.put(keys, pages)
        out = np.zeros_like(pages)
        assert cache.load(keys, out=out).result() is out
        assert bits(out) == bits(pages)
        assert bits(cache.load(keys[:0]).result()) == b""
        with pytest.raises(PageNotFoundError, match=make_key(9).hex()):
            cache.load([keys[0], make_key(9)]).result()
        with pytest.raises(ValueError, match="out has shape"):
            cache.load(keys, out=out[:1])
        cache.check_invariants()
    with pytest.raises(ClosedError):
        cache.load(keys)


@pytest.mark.parametrize("deadline", [-1.0, float("nan"), "soon"])
def test_a_deadline_that_is_none_is_refused(deadline: Any) -> None:
    with (
        PagedKVCache(make_spec(), 2) as cache,
        pytest.raises((ValueError, TypeError), match="deadline"),
    ):
        cache.load([], deadline=deadline)
