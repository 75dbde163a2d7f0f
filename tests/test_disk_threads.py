import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pagedkv import disk_threads as module
from pagedkv.disk_threads import DiskThreads, Job
from pagedkv.errors import ClosedError, StoreTimeoutError
from pagedkv.files import Bytes
from pagedkv.memory import aligned

SOON = 0.02


class Disk:
    """Jobs whose reads hang until they are let go."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.used: list[int] = []
        self.asked: list[int] = []
        self.seen = threading.Condition()

    def job(self, number: int = 0, *, hangs: bool = False, nbytes: int = 1) -> Job:
        def fetch(memory: Bytes) -> int:
            with self.seen:
                self.asked.append(number)
                self.seen.notify_all()
            if hangs:
                self.answers.wait()
            memory[:1] = number
            return number

        def use(memory: Bytes, num_read: int) -> None:
            assert memory[0] == num_read
            self.used.append(num_read)

        return Job(fetch, use, nbytes, "a file")

    def hung(self, count: int) -> list[Job]:
        return [self.job(number, hangs=True) for number in range(count)]

    def wait_until_asked(self, count: int) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: len(self.asked) >= count, 30)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()


@pytest.fixture
def threads() -> Iterator[DiskThreads]:
    threads = DiskThreads(2)
    yield threads
    threads.close()


def soon() -> float:
    return time.monotonic() + SOON


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def give_up(threads: DiskThreads, jobs: list[Job]) -> None:
    with pytest.raises(StoreTimeoutError, match="did not answer in time"):
        threads.wait(jobs, soon())


class NewThreads:
    """Counts the disk threads that were not there before."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def count(self) -> int:
        new = set(threading.enumerate()) - self._before
        return sum(thread.name == "pagedkv-disk" for thread in new)


def test_jobs_are_done_when_the_wait_ends(threads: DiskThreads, disk: Disk) -> None:
    jobs = [disk.job(number) for number in range(100)]
    threads.start(jobs[:50])
    threads.start(jobs[50:])
    threads.wait(jobs, None)
    assert sorted(disk.used) == list(range(100))
    assert all(job.is_done and job.error is None for job in jobs)
    assert threads.num_hung == 0


def test_one_thread_does_jobs_in_their_order(disk: Disk) -> None:
    threads = DiskThreads(1)
    jobs = [disk.job(number) for number in range(50)]
    threads.start(jobs)
    threads.wait(jobs, None)
    assert disk.asked == disk.used == list(range(50))
    threads.close()


def test_waiting_for_nothing_ends_at_once(threads: DiskThreads) -> None:
    threads.start([])
    threads.wait([], None)
    threads.wait([], time.monotonic() - 1)
    threads.call_off([])


def test_a_deadline_that_is_over_does_not_spoil_what_is_done(
    threads: DiskThreads, disk: Disk
) -> None:
    job = disk.job(3)
    threads.start([job])
    threads.wait([job], None)
    threads.wait([job], time.monotonic() - 1)


def test_no_more_threads_run_than_were_asked_for(disk: Disk) -> None:
    new = NewThreads()
    threads = DiskThreads(3)
    jobs = disk.hung(10)
    for job in jobs:
        threads.start([job])
    disk.wait_until_asked(3)
    assert new.count() == 3
    assert len(disk.asked) == 3
    disk.answers.set()
    threads.wait(jobs, None)
    threads.close()
    wait_until(lambda: new.count() == 0)


def test_memory_is_aligned_and_large_enough(threads: DiskThreads) -> None:
    sizes: list[tuple[int, int]] = []

    def fetch(memory: Bytes) -> int:
        sizes.append((len(memory), memory.__array_interface__["data"][0] % 4096))
        return 0

    for nbytes in (1, 5000, 2**20 + 1):
        job = Job(fetch, lambda memory, num_read: None, nbytes, "a file")
        threads.start([job])
        threads.wait([job], None)
        size, rest = sizes[-1]
        assert size >= nbytes
        assert size % 4096 == rest == 0
    assert len(aligned(4097)) == 8192


@pytest.mark.parametrize("where", ["fetch", "use"])
def test_the_first_error_is_raised_when_all_jobs_are_done(
    threads: DiskThreads, disk: Disk, where: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "broken")

    fetch = fail if where == "fetch" else lambda memory: 0
    use = fail if where == "use" else lambda memory, num_read: None
    jobs = [disk.job(1), Job(fetch, use, 1, "a file"), disk.job(2), disk.job(3)]
    threads.start(jobs)
    with pytest.raises(OSError, match="broken"):
        threads.wait(jobs, None)
    assert all(job.is_done for job in jobs)
    assert sorted(disk.used) == [1, 2, 3]
    more = [disk.job(4)]
    threads.start(more)
    threads.wait(more, None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_no_error_ends_a_thread(threads: DiskThreads, error: type[BaseException]) -> None:
    def fail(memory: Bytes) -> int:
        raise error

    for _ in range(5):
        job = Job(fail, lambda memory, num_read: None, 1, "a file")
        threads.start([job])
        with pytest.raises(error):
            threads.wait([job], None)


def test_a_read_that_hangs_is_given_up_at_the_deadline_and_never_used(
    threads: DiskThreads, disk: Disk
) -> None:
    jobs = disk.hung(1)
    threads.start(jobs)
    give_up(threads, jobs)
    disk.wait_until_asked(1)
    wait_until(lambda: threads.num_hung == 1)
    disk.answers.set()
    wait_until(lambda: threads.num_hung == 0)
    assert jobs[0].is_done
    assert disk.used == []


def test_jobs_that_wait_behind_a_read_that_hangs_are_given_up_too(disk: Disk) -> None:
    threads = DiskThreads(1)
    jobs = [disk.job(0, hangs=True), disk.job(1), disk.job(2)]
    threads.start(jobs)
    give_up(threads, jobs)
    disk.answers.set()
    wait_until(lambda: all(job.is_done for job in jobs))
    assert disk.asked == [0]
    assert disk.used == []
    threads.close()


def test_what_was_done_before_the_deadline_is_used(disk: Disk) -> None:
    threads = DiskThreads(1)
    jobs = [disk.job(1), disk.job(0, hangs=True)]
    threads.start(jobs)
    disk.wait_until_asked(2)
    give_up(threads, jobs)
    assert disk.used == [1]
    threads.close()


def test_a_job_that_is_past_the_disk_at_the_deadline_is_waited_for(threads: DiskThreads) -> None:
    decoding, go_on, used = threading.Event(), threading.Event(), []

    def use(memory: Bytes, num_read: int) -> None:
        decoding.set()
        go_on.wait()
        used.append(num_read)

    job = Job(lambda memory: 7, use, 1, "a file")
    threads.start([job])
    decoding.wait()
    waiter = threading.Thread(target=threads.wait, args=([job], time.monotonic() - 1))
    waiter.start()
    waiter.join(5 * SOON)
    assert waiter.is_alive()
    go_on.set()
    waiter.join()
    assert used == [7]
    assert job.is_done
    assert not job.is_abandoned


def test_threads_are_replaced_while_others_hang(threads: DiskThreads, disk: Disk) -> None:
    jobs = disk.hung(2)
    threads.start(jobs)
    disk.wait_until_asked(2)
    give_up(threads, jobs)
    assert threads.num_hung == 2
    more = [disk.job(number) for number in range(10, 20)]
    threads.start(more)
    threads.wait(more, time.monotonic() + 30)
    assert sorted(disk.used) == list(range(10, 20))


def test_what_is_queued_when_others_are_found_to_hang_is_read(disk: Disk) -> None:
    threads = DiskThreads(1)
    hung, other = disk.hung(1), disk.job(9)
    threads.start(hung)
    disk.wait_until_asked(1)
    threads.start([other])
    give_up(threads, hung)
    threads.wait([other], time.monotonic() + 0.5)
    assert disk.used == [9]
    threads.close()


def test_surplus_threads_end_when_those_that_hung_are_let_go(disk: Disk) -> None:
    new = NewThreads()
    threads = DiskThreads(1)
    jobs = disk.hung(1)
    threads.start(jobs)
    disk.wait_until_asked(1)
    give_up(threads, jobs)
    more = [disk.job(1)]
    threads.start(more)
    threads.wait(more, None)
    assert new.count() == 2
    disk.answers.set()
    wait_until(lambda: threads.num_hung == 0)
    for number in range(20):
        more = [disk.job(number)]
        threads.start(more)
        threads.wait(more, None)
    wait_until(lambda: new.count() == 1)
    threads.close()


def test_no_more_threads_hang_than_so_many(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HUNG", 3)
    new = NewThreads()
    threads = DiskThreads(2)
    for number in range(1, 4):
        jobs = disk.hung(1)
        threads.start(jobs)
        disk.wait_until_asked(number)
        give_up(threads, jobs)
    assert threads.num_hung == 3
    late = disk.job(5)
    with pytest.raises(StoreTimeoutError, match="3 reads hang in the system already"):
        threads.start([late])
    assert new.count() <= 3 + 2
    disk.answers.set()
    wait_until(lambda: threads.num_hung == 0)
    threads.start([late])
    threads.wait([late], None)
    assert disk.used == [5]
    threads.close()


@pytest.mark.parametrize("state", ["queued", "hung", "done"])
def test_a_job_that_is_called_off_is_never_used(disk: Disk, state: str) -> None:
    threads = DiskThreads(1)
    first, second = disk.job(0, hangs=True), disk.job(1)
    threads.start([first, second])
    disk.wait_until_asked(1)
    if state == "done":
        disk.answers.set()
        threads.wait([first, second], None)
        threads.call_off([first, second])
        assert disk.used == [0, 1]
    else:
        threads.call_off([second] if state == "queued" else [first, second])
        disk.answers.set()
        wait_until(lambda: first.is_done and second.is_done)
        assert disk.used == ([0] if state == "queued" else [])
    threads.close()


def test_calling_off_waits_for_a_job_that_is_past_the_disk(threads: DiskThreads) -> None:
    decoding, go_on, used = threading.Event(), threading.Event(), []

    def use(memory: Bytes, num_read: int) -> None:
        decoding.set()
        go_on.wait()
        used.append(num_read)

    job = Job(lambda memory: 7, use, 1, "a file")
    threads.start([job])
    decoding.wait()
    caller = threading.Thread(target=threads.call_off, args=([job],))
    caller.start()
    caller.join(5 * SOON)
    assert caller.is_alive()
    go_on.set()
    caller.join()
    assert used == [7]


def test_jobs_that_are_queued_when_it_is_closed_are_done(disk: Disk) -> None:
    new = NewThreads()
    threads = DiskThreads(1)
    jobs = [disk.job(0, hangs=True), *(disk.job(number) for number in range(1, 5))]
    threads.start(jobs)
    disk.wait_until_asked(1)
    threads.close()
    with pytest.raises(ClosedError):
        threads.start([disk.job(9)])
    disk.answers.set()
    threads.wait(jobs, None)
    assert disk.used == list(range(5))
    wait_until(lambda: new.count() == 0)
    threads.close()


def test_closing_does_not_wait_for_a_read_that_hangs(disk: Disk) -> None:
    threads = DiskThreads(1)
    jobs = disk.hung(1)
    threads.start(jobs)
    disk.wait_until_asked(1)
    threads.close()
    give_up(threads, jobs)


def test_a_thread_that_cannot_be_started_leaves_no_trace(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = DiskThreads(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            threads.start([disk.job(1)])
    later = disk.job(2)
    threads.start([later])
    threads.wait([later], time.monotonic() + 0.5)
    assert disk.used == [2]  # who started the first has given up: its memory must not change


def test_an_idle_thread_keeps_no_memory_of_a_caller_alive(threads: DiskThreads) -> None:
    def start() -> "weakref.ref[np.ndarray]":
        pages = np.zeros(1000)
        job = Job(lambda memory: 0, lambda memory, num_read: pages.fill(1), 1, "a file")
        threads.start([job])
        threads.wait([job], None)
        return weakref.ref(pages)

    pages = start()
    end = time.monotonic() + 0.5
    while pages() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert pages() is None


def test_many_callers_with_deadlines_get_their_own_answers(disk: Disk) -> None:
    threads = DiskThreads(4)
    wrong: list[str] = []

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            out = np.zeros(8, np.int64)
            jobs = []
            for place in range(8):
                pause = float(rng.choice([0, 0, 0, 0.003]))

                def fetch(memory: Bytes, pause: float = pause) -> int:
                    time.sleep(pause)
                    return 1

                def use(memory: Bytes, num: int, place: int = place, out: object = out) -> None:
                    out[place] += num

                jobs.append(Job(fetch, use, 1, "a file"))
            threads.start(jobs)
            try:
                threads.wait(jobs, time.monotonic() + float(rng.choice([0.001, 0.01, 10])))
                if not (out == 1).all():
                    wrong.append(f"done without {out}")
            except StoreTimeoutError:
                seen = out.copy()
                time.sleep(0.004)
                if not (out == seen).all():
                    wrong.append("written to after the call")

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
    threads.close()
