import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from pagedkv import files
from pagedkv.errors import StoreError


def test_write_atomic_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "document"
    files.write_atomic(path, [b"old"])
    files.write_atomic(path, [b"ne", np.frombuffer(b"w", np.uint8)])
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["document"]


def test_write_atomic_that_fails_keeps_the_old_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "document"
    files.write_atomic(path, [b"old"])

    def parts():
        yield b"half of the new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        files.write_atomic(path, parts())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["document"]


def test_new_files_and_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_dir(tmp_path / "folder")
        files.write_atomic(tmp_path / "file", [b""])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_writes_and_reads_go_on_after_the_system_took_only_some_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pwrite, preadv = os.write, os.pwrite, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:7]], at))
    data = np.arange(100, dtype=np.uint8)
    with files.new_file(tmp_path / "file") as (fd, _):
        files.write_all(fd, data)
        files.pwrite_all(fd, data[:50], 100)
        out = np.zeros(150, np.uint8)
        assert files.pread_into(fd, out, 0) == 150
        assert np.array_equal(out, np.concatenate([data, data[:50]]))
        assert np.array_equal(files.pread_exact(fd, 20, 10), data[10:30])


def test_pread_tells_how_much_there_was_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    out = np.zeros(8, np.uint8)
    with files.reading(path) as fd:
        assert files.pread_into(fd, out, 4) == 6
        assert files.pread_into(fd, out, 10) == 0
        with pytest.raises(files.ShortReadError, match="ends 2 bytes too early"):
            files.pread_exact(fd, 8, 4)


def test_a_symbolic_link_is_not_read_and_counts_as_vanished(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError) as caught:
        files.read_bytes(tmp_path / "link")
    assert files.is_vanished(caught.value)
    assert files.file_sizes(tmp_path) == {"elsewhere": 6}


@pytest.mark.parametrize("name", ["missing", "folder", "file/below"])
def test_what_is_no_file_counts_as_vanished(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        files.read_bytes(tmp_path / name)
    assert files.is_vanished(caught.value)


def test_a_disk_error_does_not_count_as_vanished() -> None:
    assert not files.is_vanished(OSError(errno.EIO, "Input/output error"))


def test_translated_names_the_place_the_action_and_the_culprit(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the store: No such file.*missing") as caught:
        with files.translated("the store", "read"):
            files.read_bytes(tmp_path / "missing")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_translated_lets_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), files.translated("the store"):
        raise ZeroDivisionError


def test_file_sizes_of_a_missing_folder_are_empty(tmp_path: Path) -> None:
    assert files.file_sizes(tmp_path / "missing") == {}


def test_remove_temps_removes_only_what_interrupted_writers_left(tmp_path: Path) -> None:
    (tmp_path / f"{files.TEMP_PREFIX}c.0-1234").touch()
    (tmp_path / "c.0").touch()
    files.remove_temps(tmp_path)
    assert os.listdir(tmp_path) == ["c.0"]


def test_a_lock_has_one_holder_until_it_is_given_back(tmp_path: Path) -> None:
    first, second = files.open_folder(tmp_path), files.open_folder(tmp_path)
    try:
        assert files.try_lock(first)
        assert not files.try_lock(second)
        files.unlock(first)
        assert files.try_lock(second)
    finally:
        os.close(first)
        os.close(second)


def test_locked_gives_the_lock_back_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.locked(tmp_path):
        raise ZeroDivisionError
    fd = files.open_folder(tmp_path)
    try:
        assert files.try_lock(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("knows_nameless", [True, False])
def test_a_scratch_file_is_private_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_nameless: bool
) -> None:
    if not knows_nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    fd = files.scratch_file(tmp_path)
    try:
        assert os.listdir(tmp_path) == []
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        files.pwrite_all(fd, b"scratch", 3)
        assert files.pread_exact(fd, 7, 3).tobytes() == b"scratch"
    finally:
        os.close(fd)


def test_a_scratch_file_works_where_the_file_system_has_no_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest)

    if hasattr(os, "O_TMPFILE"):
        monkeypatch.setattr(os, "open", refuse)
    os.close(files.scratch_file(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        files.scratch_file(tmp_path / "missing")


def test_write_atomic_may_prepare_the_bytes_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def parts():
        assert os.listdir(tmp_path / "a") == []
        assert len(os.listdir(tmp_path / "b")) == 1
        yield b"new"

    files.write_atomic(tmp_path / "a" / "file", parts(), sync=False, folder=tmp_path / "b")
    assert (tmp_path / "a" / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path / "b") == []


def test_the_size_of_a_tree_is_that_of_its_regular_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "a" / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert files.tree_nbytes(tmp_path) == 8
    assert files.subfolders(tmp_path) == ["a"]
    assert files.tree_nbytes(tmp_path / "missing") == 0


def test_an_empty_folder_is_removed_a_file_and_a_full_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for path in (tmp_path / "empty", tmp_path / "full" / "file", tmp_path / "missing"):
        files.remove_empty_folder(path)
    with pytest.raises(OSError, match="not empty"):
        files.remove_empty_folder(tmp_path / "full")
    assert os.listdir(tmp_path) == ["full"]


def test_the_stamp_of_a_file_changes_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "document"
    assert files.stamp(path) is None
    files.write_atomic(path, [b"old"])
    before = files.stamp(path)
    assert files.stamp(path) == before
    files.write_atomic(path, [b"newer"])
    assert files.stamp(path) != before


def test_overwrite_replaces_bytes_in_the_middle_and_follows_no_link(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    files.overwrite(path, b"ab", 4)
    assert path.read_bytes() == b"0123ab6789"
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "missing"):
        with pytest.raises(OSError):
            files.overwrite(tmp_path / name, b"ab", 0)
    assert path.read_bytes() == b"0123ab6789"
