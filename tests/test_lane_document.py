import json
import os
import stat
from pathlib import Path

import pytest

from pagedkv import files, lane_document

GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {%s}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A root with the folder of one lane."""
    (tmp_path / "lane-0000").mkdir()
    return tmp_path


def test_a_new_document_is_that_of_a_zarr_group(path: Path) -> None:
    made = lane_document.update(path, 0, {"claimed_nbytes": 5}, sync=True)
    raw = (path / "lane-0000" / "zarr.json").read_bytes()
    assert json.loads(raw) == {
        "attributes": {"pagedkv": {"claimed_nbytes": 5}},
        "zarr_format": 3,
        "node_type": "group",
    }
    assert (made.nbytes, made.claimed_nbytes) == (len(raw), 5)
    assert lane_document.read(path, 0) == made
    assert stat.S_IMODE((path / "lane-0000" / "zarr.json").stat().st_mode) == 0o600
    assert sorted(os.listdir(path)) == ["lane-0000"]


def test_a_change_keeps_all_other_attributes(path: Path) -> None:
    node = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"title": "mine", "pagedkv": {"last_writer": {"pid": 1}, "later": [2]}},
        "consolidated_metadata": None,
    }
    (path / "lane-0000" / "zarr.json").write_text(json.dumps(node))
    lane_document.update(path, 0, {"claimed_nbytes": 5}, sync=False)
    node["attributes"]["pagedkv"]["claimed_nbytes"] = 5
    assert json.loads((path / "lane-0000" / "zarr.json").read_bytes()) == node


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"3",
        b"\xff",
        b"[" * 100_000,
        b'{"zarr_format": 2, "node_type": "group", "attributes": {"pagedkv": {"a": 1}}}',
        b'{"zarr_format": 3, "node_type": "group", "attributes": 3}',
        b'{"zarr_format": 3, "node_type": "group", "attributes": {"pagedkv": null}}',
    ],
)
def test_a_damaged_document_reads_as_empty_and_is_replaced(path: Path, content: bytes) -> None:
    (path / "lane-0000" / "zarr.json").write_bytes(content)
    assert lane_document.read(path, 0).attributes == {}
    assert lane_document.read(path, 0).claimed_nbytes is None
    lane_document.update(path, 0, {"claimed_nbytes": 5}, sync=False)
    assert lane_document.read(path, 0).attributes == {"claimed_nbytes": 5}


def test_what_is_no_file_reads_as_empty_and_is_replaced(path: Path) -> None:
    document = path / "lane-0000" / "zarr.json"
    (path / "secret").write_bytes(b"secret")
    for make in (document.mkdir, lambda: os.mkfifo(document), lambda: document.symlink_to("x")):
        make()
        assert lane_document.read(path, 0).attributes == {}
        lane_document.update(path, 0, {"claimed_nbytes": 5}, sync=False)
        assert lane_document.read(path, 0).claimed_nbytes == 5
        document.unlink()


@pytest.mark.parametrize("claim", [-1, 1.5, True, "5", None])
def test_a_claim_that_is_no_size_is_none(path: Path, claim: object) -> None:
    lane_document.update(path, 0, {"claimed_nbytes": claim}, sync=False)
    assert lane_document.read(path, 0).claimed_nbytes is None


def test_a_change_that_fails_leaves_the_old_document_and_nothing_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lane_document.update(path, 0, {"claimed_nbytes": 5}, sync=False)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(OSError, match="No space"):
        lane_document.update(path, 0, {"claimed_nbytes": 6}, sync=False)
    assert lane_document.read(path, 0) == before
    assert sorted(os.listdir(path)) == ["lane-0000"]


def test_a_claim_is_overwritten_in_place_whatever_its_size(path: Path) -> None:
    document = path / "lane-0000" / "zarr.json"
    lane_document.update(path, 0, {"header": {"claimed_nbytes": 1}, "title": "ü"}, sync=False)
    lane_document.claim(path, 0, 5)
    inode, size = document.stat().st_ino, document.stat().st_size
    for claim in (0, 10**19, 7, 10**12):
        made = lane_document.claim(path, 0, claim)
        assert made == lane_document.read(path, 0)
        assert made.attributes == {
            "claimed_nbytes": claim,
            "header": {"claimed_nbytes": 1},
            "title": "ü",
        }
        assert (document.stat().st_ino, document.stat().st_size) == (inode, size)
    lane_document.update(path, 0, {"title": "x"}, sync=False)
    assert lane_document.read(path, 0).claimed_nbytes == 10**12


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"claimed_nbytes": 12345678901234567890',
        GROUP % b'"claimed_nbytes": 1                   , "pagedkv": {"claimed_nbytes": 1    }',
        GROUP % b'"pagedkv": {"claimed_nbytes": 1}',
        GROUP
        % (b'"title": "%s", "pagedkv": {"claimed_nbytes": 1                   }' % (500 * b"x")),
    ],
)
def test_a_claim_without_a_place_of_its_own_gets_one(path: Path, content: bytes) -> None:
    document = path / "lane-0000" / "zarr.json"
    document.write_bytes(content)
    lane_document.claim(path, 0, 77)
    assert lane_document.read(path, 0).claimed_nbytes == 77
    assert b'"claimed_nbytes": 77                  ' in document.read_bytes()[:100]
    inode = document.stat().st_ino
    lane_document.claim(path, 0, 78)
    assert lane_document.read(path, 0).claimed_nbytes == 78
    assert document.stat().st_ino == inode
