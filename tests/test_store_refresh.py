"""A store that notices what other processes commit and remove."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    empty_like,
    make_entries,
    make_eviction_rings,
    make_key,
    make_pages,
    make_spec,
    python,
    same_bits,
)

from pagedkv import files, lane
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError
from pagedkv.format import StoreRow
from pagedkv.store import PageStore

SPEC = make_spec()
PAGES = make_pages(SPEC, 40)
ENTRIES = make_entries(SPEC, 40, parent=None)

WRITER = """
import sys
from store_samples import *
from pagedkv import format as fmt
from pagedkv.store import PageStore
fmt.MAX_SEGMENT_ROWS = 4
pages, entries = make_pages(make_spec(), 40), make_entries(make_spec(), 40, parent=None)
with PageStore.open(sys.argv[1], make_spec()) as store:
    print("lane", store.own_lane, flush=True)
    for line in sys.stdin:
        command, first, last = line.split()
        if command == "write":
            part = slice(int(first), int(last))
            store.write(0, entries[part], pages[part])
        else:
            nbytes = chunk_nbytes(store.path) * int(first) // 100
            store.collect(max(1, store.nbytes - nbytes))
        print("done", store.num_pages, flush=True)
"""


class Writer:
    """Another process that has the store open for writing."""

    def __init__(self, path: Path) -> None:
        self.process = python(WRITER, path)
        self.lane = int(self.answer()[1])

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            raise AssertionError(errors)
        return line.split()

    def ask(self, command: str, first: int, last: int = 0) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {first} {last}\n")
        self.process.stdin.flush()
        return int(self.answer()[1])

    def close(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.zarr"
    PageStore.open(path, SPEC).close()
    make_eviction_rings(path)
    return path


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    if writer.process.poll() is None:
        writer.kill()


@pytest.fixture(params=["a", "r"])
def store(request: pytest.FixtureRequest, path: Path, writer: Writer) -> Iterator[PageStore]:
    """Opened after the writer."""
    with PageStore.open(path, mode=request.param) as store:
        yield store
        store.check_invariants()


def found(store: PageStore) -> list[int]:
    """Numbers of the pages that the store finds, each read and compared."""
    rows = store.find_rows([entry.key for entry in ENTRIES])
    numbers = np.flatnonzero(rows >= 0)
    out = empty_like([PAGES[number] for number in numbers])
    store.read(rows[numbers], out)
    assert same_bits(out, [PAGES[number] for number in numbers])
    return numbers.tolist()


def test_what_another_process_commits_is_found_after_a_refresh(
    store: PageStore, writer: Writer
) -> None:
    assert found(store) == []
    assert not store.refresh()
    for first in range(0, 40, 10):
        writer.ask("write", first, first + 10)
        assert found(store) == list(range(first))
        assert store.refresh()
        assert found(store) == list(range(first + 10))
        assert store.num_pages == first + 10
    assert not store.refresh()


def test_commits_that_follow_one_another_at_once_are_all_found(
    store: PageStore, writer: Writer
) -> None:
    for number in range(20):
        writer.ask("write", number, number + 1)
        assert store.refresh()
        assert found(store) == list(range(number + 1))


def test_a_lane_that_is_new_is_found(path: Path) -> None:
    with PageStore.open(path, mode="r") as reader:
        writer = Writer(path)
        other = Writer(path)
        assert (writer.lane, other.lane) == (0, 1)
        other.ask("write", 0, 5)
        assert reader.refresh()
        assert found(reader) == list(range(5))
        writer.ask("write", 5, 9)
        assert reader.refresh()
        assert found(reader) == list(range(9))
        writer.close()
        other.close()
        reader.check_invariants()


def test_what_another_process_removes_is_gone_after_a_refresh(
    store: PageStore, writer: Writer
) -> None:
    writer.ask("write", 0, 20)
    assert store.refresh()
    rows = store.find_rows([entry.key for entry in ENTRIES[:20]])
    before = found(store)
    left = writer.ask("collect", 50)
    assert 0 < left < 20
    assert store.refresh()
    after = found(store)
    assert len(after) == left
    assert set(after) < set(before)
    gone = [number for number in before if number not in after]
    out = empty_like([PAGES[number] for number in gone])
    with pytest.raises(CorruptPageError) as caught:
        store.read(rows[gone], out)
    assert caught.value.positions == tuple(range(len(gone)))
    assert not store.refresh()


def test_what_was_removed_reads_as_lost_without_a_refresh(path: Path, writer: Writer) -> None:
    writer.ask("write", 0, 20)
    with PageStore.open(path, mode="r") as store:
        writer.ask("collect", 100)
        out = empty_like(PAGES[:1])
        with pytest.raises(CorruptPageError) as caught:
            store.read([store.find(make_key(0)) or StoreRow(9, 9, 9)], out)
        assert caught.value.keys == (make_key(0),)
        assert store.find(make_key(0)) is None
        assert store.refresh()
        assert found(store) == []
        store.check_invariants()


def test_a_file_that_is_open_is_read_until_the_refresh(path: Path, writer: Writer) -> None:
    writer.ask("write", 0, 4)
    with PageStore.open(path, mode="r") as store:
        rows = store.find_rows([entry.key for entry in ENTRIES[:4]])
        out = empty_like(PAGES[:4])
        store.read(rows, out)
        writer.ask("collect", 100)
        store.read(rows, out)  # as it was: the descriptor keeps it
        assert same_bits(out, PAGES[:4])
        assert store.refresh()
        with pytest.raises(CorruptPageError):
            store.read(rows, out)


def test_pages_that_were_removed_and_written_again_are_found_in_new_rows(
    path: Path, writer: Writer
) -> None:
    writer.ask("write", 0, 4)
    with PageStore.open(path, mode="r") as store:
        before = store.find(make_key(0))
        writer.ask("collect", 100)
        writer.ask("write", 0, 4)
        assert store.refresh()
        after = store.find(make_key(0))
        assert before is not None
        assert after is not None
        assert after.row > before.row
        assert found(store) == list(range(4))


def test_what_a_killed_process_committed_is_found_and_its_lane_taken_over(
    store: PageStore, writer: Writer, path: Path
) -> None:
    writer.ask("write", 0, 8)
    writer.kill()
    assert store.refresh()
    assert found(store) == list(range(8))
    again = Writer(path)
    assert again.lane == writer.lane
    assert again.ask("write", 8, 12) == 12
    assert store.refresh()
    assert found(store) == list(range(12))
    again.close()


def test_a_page_that_two_processes_wrote_outlives_the_removal_of_one(
    path: Path, writer: Writer
) -> None:
    with PageStore.open(path) as store:
        (own,) = store.write(0, ENTRIES[:1], PAGES[:1])
        writer.ask("write", 0, 4)  # it has not refreshed
        assert store.refresh()
        assert store.find(make_key(0)) == own
        assert found(store) == [0, 1, 2, 3]
        store.collect(store.nbytes - 1)
        other = store.find(make_key(0))
        assert other is not None
        assert other.lane == writer.lane
        assert found(store) == [0, 1, 2, 3]
        writer.ask("collect", 100)
        assert store.refresh()
        assert found(store) == []


def test_the_own_commits_are_no_change(path: Path) -> None:
    with PageStore.open(path) as store:
        store.write(0, ENTRIES[:4], PAGES[:4])
        assert not store.refresh()
        assert found(store) == [0, 1, 2, 3]


def test_an_idle_refresh_lists_no_folder(
    path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_YOUNG_NS", 0)
    writer.ask("write", 0, 8)
    with PageStore.open(path, mode="r") as store:
        store.refresh()
        calls: list[str] = []
        for name in ("file_sizes", "read_bytes", "subfolders"):
            monkeypatch.setattr(files, name, lambda *args, name=name: calls.append(name))
        for _ in range(3):
            assert not store.refresh()
        assert calls == []


def test_a_lane_that_was_removed_is_gone(path: Path, writer: Writer) -> None:
    writer.ask("write", 0, 8)
    with PageStore.open(path, mode="r") as store:
        assert store.num_pages == 8
        writer.close()
        shutil.rmtree(path / fmt.lane_name(writer.lane))
        assert store.refresh()
        assert found(store) == []
        assert not store.refresh()
        store.check_invariants()


def test_refreshes_beside_reads_and_a_writer_lose_nothing(path: Path, writer: Writer) -> None:
    with PageStore.open(path) as store:
        store.write(0, ENTRIES[:8], PAGES[:8])
        stop, errors = threading.Event(), []

        def read() -> None:
            try:
                while not stop.is_set():
                    assert set(found(store)) >= set(range(8))
                    store.refresh()
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(8, 40, 2):
            writer.ask("write", number, number + 2)
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        store.refresh()
        assert found(store) == list(range(40))
        store.check_invariants()
