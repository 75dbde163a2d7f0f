"""The fingerprint follows the weights and the config, and nothing else."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.fingerprint import fingerprint_files

OLD_NS = 1_600_000_000 * 10**9


@pytest.fixture(autouse=True)
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagedkv" / "fingerprints.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder, hidden_size=64, num_hidden_layers=2)
    write_weights(folder / "model.safetensors", b"weights")
    return folder


def write_config(folder: Path, **values: object) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def write_weights(path: Path, content: bytes, mtime_ns: int = OLD_NS) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_fingerprint_has_the_form_that_a_spec_takes(model: Path) -> None:
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", fingerprint_files(model))
    assert fingerprint_files(str(model)) == fingerprint_files(model)


def test_fingerprint_never_changes_between_releases(tmp_path: Path) -> None:
    # Stores are bound to this text: another value here would orphan every store there is.
    folder = tmp_path / "fixed"
    folder.mkdir()
    write_config(folder, hidden_size=64, text_config={"num_hidden_layers": 2})
    write_weights(folder / "a.safetensors", b"first")
    write_weights(folder / "b.bin", b"second")
    expected = "sha256:06c3d40d576db9ff87a883b4946ba490aeaee88e58e21ca5844e5eb38dcaced7"
    assert fingerprint_files(folder) == expected


def test_a_copy_elsewhere_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint_files(tmp_path / "copy") == fingerprint_files(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "model.safetensors.index.json"])
def test_other_files_do_not_count(model: Path, name: str) -> None:
    before = fingerprint_files(model)
    (model / name).write_text("anything")
    assert fingerprint_files(model) == before


def test_where_the_config_came_from_does_not_count(model: Path) -> None:
    write_config(model, hidden_size=64, text_config={"num_hidden_layers": 2})
    before = fingerprint_files(model)
    text = {"_name_or_path": "b", "transformers_version": "5.0", "num_hidden_layers": 2}
    write_config(
        model, _name_or_path="a", transformers_version="4.1", text_config=text, hidden_size=64
    )
    assert fingerprint_files(model) == before


def test_a_config_value_counts(model: Path) -> None:
    before = fingerprint_files(model)
    write_config(model, hidden_size=64, num_hidden_layers=2, rope_theta=1e6)
    assert fingerprint_files(model) != before


def test_a_changed_weight_of_the_same_size_counts(model: Path) -> None:
    before = fingerprint_files(model)
    write_weights(model / "model.safetensors", b"Weights", OLD_NS + 1)
    assert fingerprint_files(model) != before


def test_names_and_borders_of_weight_files_count(model: Path) -> None:
    write_weights(model / "more.bin", b"ab")
    seen = {fingerprint_files(model)}
    (model / "more.bin").rename(model / "another.bin")
    seen.add(fingerprint_files(model))
    write_weights(model / "another.bin", b"a")
    write_weights(model / "b.bin", b"b")
    seen.add(fingerprint_files(model))
    assert len(seen) == 3


def test_gguf_needs_no_config(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.gguf", b"GGUF")
    assert fingerprint_files(tmp_path).startswith("sha256:")


def test_known_files_are_not_read_again(
    model: Path, cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint_files(model)
    assert len(json.loads(cache_file.read_text())["files"]) == 1
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("weights were read again"))
    assert fingerprint_files(model) == first


def test_a_file_written_just_now_is_not_remembered(model: Path, cache_file: Path) -> None:
    (model / "model.safetensors").write_bytes(b"may change within the same tick")
    fingerprint_files(model)
    assert not cache_file.exists()


def test_files_that_are_gone_are_forgotten(model: Path, cache_file: Path) -> None:
    fingerprint_files(model)
    (model / "model.safetensors").rename(model / "renamed.safetensors")
    fingerprint_files(model)
    names = json.loads(cache_file.read_text())["files"]
    assert [Path(name).name for name in names] == ["renamed.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"version": 99, "files": {}}',
        b'{"version": 1, "files": {"x": {"nbytes": 1}}}',
        b'{"version": 1, "files": {"x": {"nbytes": 1, "mtime_ns": 1, "inode": 1, "sha256": "00"}}}',
        b'{"version": 1, "files": {"x": 3}}',
        b'{"version": 1, "files": 3}',
    ],
)
def test_a_damaged_cache_is_ignored_and_replaced(
    model: Path, cache_file: Path, content: bytes
) -> None:
    expected = fingerprint_files(model)
    cache_file.write_bytes(content)
    assert fingerprint_files(model) == expected
    assert len(json.loads(cache_file.read_text())["files"]) == 1


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fingerprint_files(model).startswith("sha256:")


def test_nothing_else_is_left_in_the_cache_folder(model: Path, cache_file: Path) -> None:
    fingerprint_files(model)
    assert [path.name for path in cache_file.parent.iterdir()] == ["fingerprints.json"]
    assert cache_file.stat().st_mode & 0o077 == 0


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Digest:
        def digest(self) -> bytes:
            write_weights(model / "model.safetensors", b"grown meanwhile")
            return bytes(32)

    monkeypatch.setattr("hashlib.file_digest", lambda *_: Digest())
    with pytest.raises(PagedKVError, match=r"model\.safetensors changed while it was read"):
        fingerprint_files(model)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"model has no config\.json"),
        ("model.safetensors", r"model has no weights"),
    ],
)
def test_an_incomplete_folder_is_refused_by_name(model: Path, missing: str, message: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ValueError, match=message):
        fingerprint_files(model)


def test_a_path_that_is_no_folder_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is no folder"):
        fingerprint_files(model / "config.json")
    with pytest.raises(ValueError, match=r"nowhere is no folder"):
        fingerprint_files(model / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_damaged_config_is_refused_by_name(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        fingerprint_files(model)
