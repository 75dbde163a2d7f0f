"""Several writers and readers of one store: lanes, locks, kills and forks."""

import json
import os
import socket
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_samples import (
    empty_like,
    make_entries,
    make_key,
    make_pages,
    make_spec,
    python,
    run_python,
    same_bits,
)

from pagedkv.errors import CorruptPageError, StoreLockedError
from pagedkv.format import StoreRow
from pagedkv.store import PageStore

SPEC = make_spec()
PAGES = make_pages(SPEC, 10)
ENTRIES = make_entries(SPEC, 10)

# Opens the store, writes pages FIRST to LAST, prints their rows, and waits to be told to end.
WRITER = """
import json, sys
from store_samples import *
from pagedkv.store import PageStore
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = PageStore.open(path, make_spec())
pages = make_pages(make_spec(), 10)[first:last]
print(json.dumps(store.write(0, make_entries(make_spec(), last - first, start=first), pages)))
sys.stdout.flush()
if sys.stdin.readline():
    store.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


@pytest.fixture
def start_writer(path: Path) -> Iterator[Callable[[int, int], "subprocess.Popen[str]"]]:
    processes = []

    def start(first: int, last: int) -> "subprocess.Popen[str]":
        process = python(WRITER, path, first, last)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def rows_written(process: "subprocess.Popen[str]") -> list[StoreRow]:
    assert process.stdout is not None
    return [StoreRow(*row) for row in json.loads(process.stdout.readline())]


def end(process: "subprocess.Popen[str]") -> None:
    _, errors = process.communicate("end\n", timeout=60)
    assert process.returncode == 0, errors


def read_all(store: PageStore) -> None:
    rows = [store.find(entry.key) for entry in ENTRIES]
    out = empty_like(PAGES)
    store.read([row for row in rows if row is not None], out)
    assert same_bits(out, PAGES)


class TestLanes:
    def test_two_processes_write_into_lanes_of_their_own(self, path: Path, start_writer) -> None:
        with PageStore.open(path, SPEC) as store:
            store.write(0, ENTRIES[:5], PAGES[:5])
            other = start_writer(5, 10)
            assert {row.lane for row in rows_written(other)} == {1}
            store.write(0, ENTRIES[:1], PAGES[:1])
            end(other)
        with PageStore.open(path, mode="r") as store:
            assert store.num_pages == 10
            read_all(store)
        with PageStore.open(path, SPEC) as store:
            read_all(store)
            assert store.nbytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())

    def test_a_writer_takes_the_first_lane_that_is_free(self, path: Path, start_writer) -> None:
        first = start_writer(0, 3)
        assert rows_written(first)[0].lane == 0
        second = start_writer(3, 6)
        assert rows_written(second)[0].lane == 1
        end(first)
        third = start_writer(6, 10)
        assert rows_written(third)[0].lane == 0
        end(second)
        end(third)
        with PageStore.open(path, mode="r") as store:
            read_all(store)

    def test_a_reader_sees_what_a_living_writer_has_committed(
        self, path: Path, start_writer
    ) -> None:
        writer = start_writer(0, 10)
        rows_written(writer)
        with PageStore.open(path, mode="r") as store:
            read_all(store)
        end(writer)

    def test_a_page_of_two_lanes_is_served_from_the_other_when_one_is_lost(
        self, path: Path, start_writer
    ) -> None:
        writers = [start_writer(0, 0), start_writer(0, 0)]
        for writer in writers:
            assert rows_written(writer) == []
        for writer in writers:
            end(writer)
        for lane in (1, 0):  # each wrote before it could know of the other
            hidden = [path / f"lane-000{n}" for n in range(2) if n != lane]
            for folder in hidden:
                folder.rename(folder.with_suffix(".hidden"))
            (path / f"lane-000{lane}").rename(path / "lane-0000")
            with PageStore.open(path, SPEC) as store:
                store.write(0, ENTRIES, PAGES)
            (path / "lane-0000").rename(path / f"lane-000{lane}")
            for folder in hidden:
                folder.with_suffix(".hidden").rename(folder)
        with PageStore.open(path, mode="r") as store:
            store.check_invariants()
            assert store.find(ENTRIES[0].key) == StoreRow(0, 0, 0)
            (path / "lane-0000/group-0/kv/c.0.0.0.0.0.0").unlink()
            rows = [StoreRow(0, 0, number) for number in range(10)]
            with pytest.raises(CorruptPageError):
                store.read(rows, empty_like(PAGES))
            assert store.find(ENTRIES[0].key) == StoreRow(1, 0, 0)
            read_all(store)
            store.check_invariants()

    def test_a_linked_lane_is_neither_read_nor_written(self, path: Path, tmp_path: Path) -> None:
        with PageStore.open(path, SPEC) as store:
            store.write(0, ENTRIES, PAGES)
        (path / "lane-0000").rename(tmp_path / "elsewhere")
        (path / "lane-0000").symlink_to(tmp_path / "elsewhere")
        with PageStore.open(path, SPEC) as store:
            assert store.num_pages == 0
            (row,) = store.write(0, ENTRIES[:1], PAGES[:1])
            assert row.lane == 1


class TestLocks:
    def test_a_second_writer_in_this_process_is_refused_naming_the_holder(
        self, path: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(path)
        with PageStore.open(path, SPEC) as store:
            store.write(0, ENTRIES, PAGES)
            message = rf"in this process \(process {os.getpid()} on {socket.gethostname()} since"
            for name in (path, tmp_path / "link"):
                with pytest.raises(StoreLockedError, match=message):
                    PageStore.open(name, SPEC)
            with PageStore.open(path, SPEC, mode="r") as reader:
                read_all(reader)
        assert sorted(p.name for p in path.glob("lane-*")) == ["lane-0000"]
        PageStore.open(path, SPEC).close()

    def test_two_stores_can_be_written_at_once(self, tmp_path: Path) -> None:
        with PageStore.open(tmp_path / "a", SPEC) as a, PageStore.open(tmp_path / "b", SPEC) as b:
            for store in (a, b):
                store.write(0, ENTRIES, PAGES)
                read_all(store)

    def test_an_open_that_fails_gives_the_lane_back(self, path: Path) -> None:
        PageStore.open(path, SPEC).close()
        broken = path / "lane-0000/group-0/kv"
        broken.rename(path / "kv")
        broken.write_text("not a folder")
        with pytest.raises(Exception, match="Not a directory"):
            PageStore.open(path, SPEC)
        broken.unlink()
        (path / "kv").rename(broken)
        with PageStore.open(path, SPEC) as store:
            assert store.write(0, ENTRIES[:1], PAGES[:1])[0].lane == 0

    def test_a_killed_writer_leaves_its_pages_and_its_lane(self, path: Path, start_writer) -> None:
        writer = start_writer(0, 10)
        rows_written(writer)
        writer.kill()
        writer.communicate()
        with PageStore.open(path, SPEC) as store:
            read_all(store)
            assert store.write(0, make_entries(SPEC, 1, start=20), PAGES[:1])[0].lane == 0


class TestForks:
    CHILD = """
import os, sys
from store_samples import *
from pagedkv.errors import ClosedError
from pagedkv.store import PageStore
spec = make_spec()
store = PageStore.open(sys.argv[1], spec, mode=sys.argv[2])
child = os.fork()
if child == 0:
    calls = [
        lambda: store.find(make_key(0)),
        lambda: store.write(0, make_entries(spec, 1), make_pages(spec, 1)),
        lambda: store.read([], []),
        lambda: list(store.entries()),
        lambda: store.scratch_dir,
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except ClosedError as error:
            refused += "process that forked" in str(error)
    store.close()
    os._exit(0 if refused == len(calls) else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
store.find(make_key(0))
if sys.argv[2] == "a":
    store.write(0, make_entries(spec, 1), make_pages(spec, 1))
store.close()
"""

    @pytest.mark.parametrize("mode", ["a", "r"])
    def test_in_a_forked_child_every_call_raises_and_the_parent_goes_on(
        self, path: Path, mode: str
    ) -> None:
        PageStore.open(path, SPEC).close()
        run_python(self.CHILD, path, mode)

    def test_a_living_child_does_not_keep_its_parent_s_lane(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
            store = PageStore.open(path, SPEC)
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:  # waits until the parent has closed its end
                os.close(write_end)
                os.read(read_end, 1)
                os._exit(0)
        os.close(read_end)
        try:
            store.close()
            with PageStore.open(path, SPEC) as again:
                assert again.write(0, ENTRIES[:1], PAGES[:1])[0].lane == 0
        finally:
            os.close(write_end)
            os.waitpid(child, 0)

    def test_a_child_may_open_the_store_for_itself(self, path: Path) -> None:
        output = run_python(
            """
import os, sys
from store_samples import *
from pagedkv.store import PageStore
spec = make_spec()
store = PageStore.open(sys.argv[1], spec)
child = os.fork()
if child == 0:
    own = PageStore.open(sys.argv[1], spec)
    lane = own.write(0, make_entries(spec, 1), make_pages(spec, 1))[0].lane
    own.close()
    os._exit(lane)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
store.close()
""",
            path,
        )
        assert output == "1\n"
        with PageStore.open(path, mode="r") as store:
            assert make_key(0) in store


def test_a_store_that_nobody_closed_gives_its_lane_back_when_it_is_collected(path: Path) -> None:
    store = PageStore.open(path, SPEC)
    store.write(0, ENTRIES, PAGES)
    del store
    with PageStore.open(path, SPEC) as store:
        assert store.write(0, make_entries(SPEC, 1, start=20), PAGES[:1])[0].lane == 0
