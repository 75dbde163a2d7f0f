import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import make_spec

from pagedkv import files, lane_document, root
from pagedkv.codec import Int8
from pagedkv.errors import FormatVersionError, StoreError
from pagedkv.header import CHECKSUM, StoreHeader, checksum

HEADER = StoreHeader.new((make_spec(),), Int8(), 10**6, store_tokens=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store without lanes."""
    root.create(tmp_path / "x.zarr", HEADER)
    return tmp_path / "x.zarr"


def add_lane(path: Path, lane: int, header: object) -> None:
    files.make_dir(path / f"lane-{lane:04d}")
    lane_document.update(path, lane, {"header": header}, sync=True)


def damage_bits(document: Path) -> None:
    data = bytearray(document.read_bytes())
    data[data.index(b"format_version") + 5] ^= 1
    document.write_bytes(data)


def cut_short(document: Path) -> None:
    document.write_bytes(document.read_bytes()[:-20])


def empty(document: Path) -> None:
    document.write_bytes(b"")


def become_link(document: Path) -> None:
    document.rename(document.with_name("elsewhere"))
    document.symlink_to("elsewhere")


def become_folder(document: Path) -> None:
    document.unlink()
    document.mkdir()


def become_pipe(document: Path) -> None:
    document.unlink()
    os.mkfifo(document)


DAMAGES = [damage_bits, cut_short, empty, become_link, become_folder, become_pipe, Path.unlink]


def test_a_header_is_read_as_it_was_written(path: Path) -> None:
    assert root.read_header(path) == HEADER


def test_nothing_and_an_empty_folder_hold_no_store(tmp_path: Path) -> None:
    assert root.read_header(tmp_path / "missing") is None
    assert root.read_header(tmp_path) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_copies_damage_is_an_error_that_names_the_store(
    path: Path, damage: Callable[[Path], None]
) -> None:
    (path / "something").touch()
    damage(path / "zarr.json")
    with pytest.raises(StoreError, match=r"x\.zarr") as caught:
        root.read_header(path)
    assert not isinstance(caught.value, FormatVersionError)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_root_is_read_from_the_first_good_lane_and_mended(
    path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    files.make_dir(path / "lane-0000")
    add_lane(path, 1, {**HEADER.to_dict(), "max_nbytes": 5})
    add_lane(path, 2, HEADER.to_dict())
    before = (path / "zarr.json").read_bytes()
    damage(path / "zarr.json")
    with caplog.at_level(logging.WARNING, "pagedkv"):
        assert root.read_header(path) == HEADER
    assert "lane 2" in caplog.text
    assert str(path / "zarr.json") in caplog.text
    assert root.mend(path, HEADER)
    assert (path / "zarr.json").read_bytes() == before
    assert not (path / "zarr.json").is_symlink()


def test_a_whole_root_is_not_mended_and_wins_over_copies(path: Path) -> None:
    other = replace(HEADER, max_nbytes=5)
    add_lane(path, 0, other.to_dict())
    before = (path / "zarr.json").read_bytes()
    assert not root.mend(path, other)
    assert (path / "zarr.json").read_bytes() == before
    assert root.read_header(path) == HEADER


def test_a_root_that_only_zarr_cannot_read_is_mended(path: Path) -> None:
    before = (path / "zarr.json").read_bytes()
    (path / "zarr.json").write_bytes(before.replace(b'"zarr_format": 3', b'"zarr_format": 1'))
    assert root.read_header(path) == HEADER
    assert root.mend(path, HEADER)
    assert (path / "zarr.json").read_bytes() == before


def test_a_folder_with_files_in_the_document_s_place_is_left_as_it_is(path: Path) -> None:
    add_lane(path, 0, HEADER.to_dict())
    become_folder(path / "zarr.json")
    (path / "zarr.json" / "file").touch()
    with pytest.raises(StoreError, match=r"cannot mend the store .*zarr\.json"):
        root.mend(path, HEADER)
    assert (path / "zarr.json" / "file").exists()


def test_a_later_format_is_refused_though_a_lane_has_an_older_copy(path: Path) -> None:
    add_lane(path, 0, HEADER.to_dict())
    values = {**HEADER.to_dict(), "format_version": 7}
    node = json.loads((path / "zarr.json").read_bytes())
    node["attributes"]["pagedkv"] = {**values, CHECKSUM: checksum(values)}
    (path / "zarr.json").write_text(json.dumps(node))
    for read in (lambda: root.read_header(path), lambda: root.mend(path, HEADER)):
        with pytest.raises(FormatVersionError, match="format version 7"):
            read()
    (path / "zarr.json").unlink()
    add_lane(path, 0, {**values, CHECKSUM: checksum(values)})
    with pytest.raises(FormatVersionError, match="format version 7"):
        root.read_header(path)


def test_a_foreign_node_and_a_foreign_folder_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is no store, but holds 'file'"):
        root.read_header(tmp_path)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(StoreError, match="Zarr node of something else"):
        root.read_header(tmp_path)


def test_a_new_bound_stands_in_the_root_and_in_all_copies(path: Path) -> None:
    add_lane(path, 0, HEADER.to_dict())
    files.make_dir(path / "lane-0001")
    lane_document.update(path, 0, {"claimed_nbytes": 7}, sync=False)
    root.set_max_nbytes(path, 2 * 10**6)
    wanted = replace(HEADER, max_nbytes=2 * 10**6)
    assert root.read_header(path) == wanted
    assert lane_document.read(path, 0).attributes == {
        "header": wanted.to_dict(),
        "claimed_nbytes": 7,
    }
    assert os.listdir(path / "lane-0001") == []
    (path / "zarr.json").unlink()
    root.set_max_nbytes(path, 3 * 10**6)
    assert root.read_header(path) == replace(HEADER, max_nbytes=3 * 10**6)


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def test_no_flipped_bit_of_the_root_gives_a_wrong_header(path: Path) -> None:
    """Every bit of a real document."""
    data = (path / "zarr.json").read_bytes()
    num_errors = 0
    for bit in range(8 * len(data)):
        try:
            assert StoreHeader.from_document(flip(data, bit), "x.zarr") == HEADER
        except StoreError as error:
            assert type(error) is StoreError
            num_errors += 1
    assert num_errors > 4 * len(data)


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_flip_in_any_byte_and_a_cut_at_any_length_is_survived_or_an_error(
    path: Path, has_copy: bool
) -> None:
    if has_copy:
        add_lane(path, 0, HEADER.to_dict())
    document = path / "zarr.json"
    data = document.read_bytes()
    flips = [flip(data, 8 * at + at % 7) for at in range(len(data))]
    for content in flips + [data[:keep] for keep in range(len(data))]:
        document.write_bytes(content)
        if has_copy:
            assert root.read_header(path) == HEADER
        else:
            try:
                assert root.read_header(path) == HEADER
            except StoreError as error:
                assert type(error) is StoreError


def test_no_random_damage_of_the_root_gives_a_wrong_header(path: Path) -> None:
    random.seed(4)
    document = path / "zarr.json"
    data = document.read_bytes()
    for _ in range(500):
        content = bytearray(data)
        for _ in range(random.randrange(1, 4)):
            at, length = random.randrange(len(data)), random.randrange(1, 40)
            content[at : at + length] = random.choice(
                [bytes(length), random.randbytes(length), data[: random.randrange(60)], b""]
            )
        document.write_bytes(content)
        try:
            assert root.read_header(path) == HEADER
        except StoreError as error:
            assert type(error) is StoreError
