"""CacheLock: who lets go of it has it again, also when interrupted."""

import threading
from typing import Any

import pytest

from pagedkv.lock import CacheLock

PATIENCE_S = 60


def is_free(lock: CacheLock) -> bool:
    """Whether another thread can take it."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=0.05))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(PATIENCE_S)
    return taken[0]


def test_unlocked_lets_others_in_and_is_counted() -> None:
    lock = CacheLock()
    with lock:
        before = lock.num_releases
        assert not is_free(lock)
        with lock.unlocked:
            assert is_free(lock)
        assert not is_free(lock)
        assert lock.num_releases == before + 1
    assert is_free(lock)


def test_an_error_inside_an_unlocked_block_leaves_the_lock_taken() -> None:
    lock = CacheLock()
    with lock:
        with pytest.raises(KeyError), lock.unlocked:
            raise KeyError
        assert not is_free(lock)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_lock_is_taken_again_does_not_lose_it(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = CacheLock()

    class Interrupted:
        """The mutex, whose first ``acquire`` is interrupted."""

        def __init__(self, real: Any) -> None:
            self.real = real
            self.num_calls = 0

        def release(self) -> None:
            self.real.release()

        def acquire(self) -> bool:
            self.num_calls += 1
            if self.num_calls == 1:
                if when == "after":
                    self.real.acquire()
                raise KeyboardInterrupt
            return bool(self.real.acquire())

    with lock:
        real = lock.mutex
        monkeypatch.setattr(lock, "mutex", Interrupted(real))
        with pytest.raises(KeyboardInterrupt), lock.unlocked:
            pass
        monkeypatch.setattr(lock, "mutex", real)
        assert not is_free(lock)
    assert is_free(lock)


def test_who_waits_is_woken_and_waiting_counts_as_a_release() -> None:
    lock = CacheLock()
    state = {"is_done": False}

    def wait() -> None:
        with lock:
            before = lock.num_releases
            assert lock.wait_for(lambda: state["is_done"], PATIENCE_S)
            assert lock.num_releases > before

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not lock._num_waiting:
        pass
    with lock:
        state["is_done"] = True
        lock.notify_all()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert lock._num_waiting == 0
