import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedkv import files
from pagedkv import segment_files as module
from pagedkv.memory import aligned
from pagedkv.segment_files import SegmentFiles

MOST = 4


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that hold their number each; more than are kept open."""
    monkeypatch.setattr(module, "MAX_OPEN", MOST)
    paths = [tmp_path / str(number) for number in range(MOST + 3)]
    for path in paths:
        path.write_text(path.name)
    return paths


@pytest.fixture
def opened(paths: list[Path]) -> Iterator[SegmentFiles]:
    before = num_open()
    opened = SegmentFiles()
    yield opened
    opened.close()
    assert num_open() == before


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def content(opened: SegmentFiles, path: Path) -> str:
    with opened.reading(path, path) as fd:
        return os.pread(fd, 10, 0).decode()


def test_a_file_stays_open(opened: SegmentFiles, paths: list[Path]) -> None:
    before = num_open()
    for _ in range(3):
        for path in paths[:MOST]:
            assert content(opened, path) == path.name
    assert num_open() == before + MOST


def test_no_more_than_so_many_stay_open(opened: SegmentFiles, paths: list[Path]) -> None:
    before = num_open()
    for _ in range(2):
        for path in paths:
            assert content(opened, path) == path.name
            assert num_open() <= before + MOST


def test_the_file_that_was_used_least_lately_is_closed(
    opened: SegmentFiles, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in paths[:MOST]:
        content(opened, path)
    content(opened, paths[0])
    content(opened, paths[MOST])  # in place of the second
    names: list[str] = []
    really_open = files.open_file

    def open_file(path: Path, *, direct: bool = False) -> int:
        names.append(path.name)
        return really_open(path, direct=direct)

    monkeypatch.setattr(files, "open_file", open_file)
    for path in (paths[0], paths[2], paths[3], paths[MOST]):
        content(opened, path)
    assert names == []
    content(opened, paths[1])
    assert names == ["1"]


def test_a_file_that_is_pushed_out_can_be_read_on(opened: SegmentFiles, paths: list[Path]) -> None:
    file = opened.take(paths[0], paths[0])
    again = opened.take(paths[0], paths[0])
    assert again is file
    for path in paths[1:]:
        content(opened, path)
    assert os.pread(file.fd, 10, 0) == b"0"
    other = opened.take(paths[0], paths[0])
    assert other.fd != file.fd
    opened.give_back(file)
    assert os.pread(file.fd, 10, 0) == b"0"
    fd = file.fd
    opened.give_back(again)
    assert not is_open(fd)
    assert os.pread(other.fd, 10, 0) == b"0"
    opened.give_back(other)


def test_more_files_than_are_kept_can_be_read_at_once(
    opened: SegmentFiles, paths: list[Path]
) -> None:
    before = num_open()
    taken = [opened.take(path, path) for path in paths]
    assert [os.pread(file.fd, 10, 0).decode() for file in taken] == [p.name for p in paths]
    for file in taken:
        opened.give_back(file)
    assert num_open() == before + MOST


def test_a_forgotten_file_is_closed_when_its_last_reader_is_done(
    opened: SegmentFiles, paths: list[Path]
) -> None:
    file = opened.take("name", paths[0])
    paths[0].unlink()
    opened.forget("name")
    assert os.pread(file.fd, 10, 0) == b"0"
    with pytest.raises(FileNotFoundError):
        opened.take("name", paths[0])
    opened.give_back(file)
    assert not is_open(file.fd)
    opened.forget("name")
    opened.forget("never known")


def test_a_forgotten_file_that_nobody_reads_is_closed_at_once(
    opened: SegmentFiles, paths: list[Path]
) -> None:
    before = num_open()
    content(opened, paths[0])
    opened.forget(paths[0])
    assert num_open() == before


def test_a_file_that_was_replaced_is_read_as_it_was_until_it_is_forgotten(
    opened: SegmentFiles, paths: list[Path]
) -> None:
    assert content(opened, paths[0]) == "0"
    other = paths[0].with_name("other")
    other.write_text("new")
    other.replace(paths[0])
    assert content(opened, paths[0]) == "0"
    opened.forget(paths[0])
    assert content(opened, paths[0]) == "new"


def test_a_file_that_cannot_be_opened_leaves_nothing(
    opened: SegmentFiles, paths: list[Path], tmp_path: Path
) -> None:
    before = num_open()
    (tmp_path / "link").symlink_to(paths[0])
    for path in (tmp_path / "none", tmp_path / "link"):
        for _ in range(3):
            with pytest.raises(OSError) as caught, opened.reading(path, path):
                pass
            assert files.is_vanished(caught.value)
    assert num_open() == before


def test_a_reader_that_raises_gives_the_file_back(opened: SegmentFiles, paths: list[Path]) -> None:
    before = num_open()
    with pytest.raises(KeyError), opened.reading(paths[0], paths[0]):
        raise KeyError
    opened.forget(paths[0])
    assert num_open() == before


def test_closing_leaves_a_reader_its_file(paths: list[Path]) -> None:
    before = num_open()
    opened = SegmentFiles()
    file = opened.take(paths[0], paths[0])
    content(opened, paths[1])
    opened.close()
    assert os.pread(file.fd, 10, 0) == b"0"
    opened.give_back(file)
    assert num_open() == before
    opened.close()


def test_a_file_that_is_opened_after_closing_is_closed_when_it_was_read(
    paths: list[Path],
) -> None:
    before = num_open()
    opened = SegmentFiles()
    opened.close()
    assert content(opened, paths[0]) == "0"
    after = num_open()
    opened.close()  # else this test leaves it, too
    assert after == before


def test_two_threads_that_open_one_file_share_it(
    opened: SegmentFiles, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, really_open = threading.Barrier(2), files.open_file

    def open_file(path: Path, *, direct: bool = False) -> int:
        fd = really_open(path, direct=direct)
        both.wait()
        return fd

    before = num_open()
    monkeypatch.setattr(files, "open_file", open_file)
    taken: list[module.OpenFile] = []
    threads = [
        threading.Thread(target=lambda: taken.append(opened.take(paths[0], paths[0])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken[0] is taken[1]
    assert taken[0].num_users == 2
    assert num_open() == before + 1
    for file in taken:
        opened.give_back(file)


def test_threads_that_read_and_forget_at_random_leave_no_file_open(
    opened: SegmentFiles, paths: list[Path]
) -> None:
    wrong: list[str] = []

    def read(seed: int) -> None:
        for step in range(300):
            path = paths[(seed * 31 + step * (seed + 1)) % len(paths)]
            if step % 17 == seed:
                opened.forget(path)
            found = content(opened, path)
            if found != path.name:
                wrong.append(found)

    before = num_open()
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert num_open() <= before + MOST


def test_a_file_can_be_read_past_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 40)
    opened = SegmentFiles(direct=True)
    memory = aligned(3 * 4096)
    with opened.reading(path, path) as fd:
        assert files.pread_into(fd, memory[:8192], 0) == 8192
        assert memory[:8192].tobytes() == path.read_bytes()[:8192]
        assert files.pread_into(fd, memory[:8192], 8192) == 40 * 256 - 8192
    opened.close()
