"""Mapped files: what stays mapped, and for how long."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagedkv import mapped_files
from pagedkv.files import is_vanished
from pagedkv.mapped_files import MappedFiles


@pytest.fixture
def files() -> Iterator[MappedFiles]:
    files = MappedFiles()
    yield files
    files.close()


def write(path: Path, number: int) -> Path:
    path.write_bytes(bytes([number]) * 5000)
    return path


def num_mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_file_is_mapped_once_and_its_bytes_are_where_it_says(
    files: MappedFiles, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", 7)
    mapped = files.get("a", path)
    assert files.get("a", tmp_path / "not there") is mapped
    assert mapped.data.tobytes() == path.read_bytes()
    assert mapped.address == mapped.data.__array_interface__["data"][0]
    assert not mapped.data.flags.writeable


def test_a_file_that_is_gone_is_seen_as_it_was(files: MappedFiles, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 7)
    data = files.get("a", path).data
    path.unlink()
    files.forget("a")
    assert (data == 7).all()
    assert num_mapped(path) == 1
    del data
    assert num_mapped(path) == 0
    with pytest.raises(FileNotFoundError):
        files.get("a", path)


def test_only_so_many_stay_mapped(
    files: MappedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "MAX_MAPPED", 3)
    paths = [write(tmp_path / str(number), number) for number in range(5)]
    for number, path in enumerate(paths):
        assert np.unique(files.get(number, path).data).tolist() == [number]
    assert [num_mapped(path) for path in paths] == [0, 0, 1, 1, 1]


def test_after_close_a_file_is_mapped_for_its_user_only(files: MappedFiles, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 7)
    files.close()
    mapped = files.get("a", path)
    assert (mapped.data == 7).all()
    del mapped
    assert num_mapped(path) == 0


def test_an_empty_file_has_no_bytes(files: MappedFiles, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert len(files.get("a", tmp_path / "a").data) == 0


def test_what_is_no_file_is_gone(files: MappedFiles, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write(tmp_path / "a", 7))
    for name in ("folder", "pipe", "link"):
        with pytest.raises(OSError) as caught:
            files.get(name, tmp_path / name)
        assert is_vanished(caught.value), name


def test_maps_are_given_up_for_want_of_descriptors(files: MappedFiles, tmp_path: Path) -> None:
    paths = [write(tmp_path / str(number), number) for number in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        for number, path in enumerate(paths):
            assert np.unique(files.get(number, path).data).tolist() == [number]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
