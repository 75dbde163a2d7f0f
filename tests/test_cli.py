"""The command line: fast to answer, documented, and clear about what went wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import pagedkv
from pagedkv import cli

REPOSITORY = Path(__file__).parent.parent
COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "max_position_embeddings": 4096,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["pagedkv", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    code = exit_info.value.code
    return code if isinstance(code, int) else int(bool(code))


def test_the_installed_command_prints_its_version() -> None:
    command = [str(Path(sys.executable).with_name("pagedkv")), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"pagedkv {pagedkv.__version__}\n"


@pytest.mark.parametrize("heavy", ["zarr", "numba", "torch", "transformers", "matplotlib"])
def test_help_waits_for_nothing_heavy(heavy: str) -> None:
    # What makes `pagedkv --help` slow is what it imports; seconds would depend on the machine.
    code = (
        "import sys; from pagedkv.cli import app\n"
        "try: app(['--help'])\n"
        f"except SystemExit: assert {heavy!r} not in sys.modules, 'imported for nothing'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help", monkeypatch=monkeypatch) == 0
    assert f"pagedkv {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert re.search(rf"\bpagedkv {command}\b", (REPOSITORY / "README.md").read_text())


def test_size_prints_a_table(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("size", "--model", model, "--context", 5000, "--memory", "1MiB")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    # 2 layers x 2 kinds x 2 heads x 8 channels x 2 bytes = 128 bytes a token
    for text in ("128 B", "2.0 KiB, 313 pages", "8,192 tokens", "int8", "4,096 tokens at most"):
        assert text in output


def test_size_prints_json(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("size", "--model", model, "--context", 100, "--dtype", "float32", "--json")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["token_nbytes"] == 256
    assert values["pool_nbytes"] == 7 * 16 * 256
    assert set(values["disk_nbytes"]) == {"raw", "int8"}


def test_size_without_model_takes_that_of_the_demo(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model / "cache"))
    assert run("size", "--context", 100, monkeypatch=monkeypatch) == 1
    assert "run `pagedkv demo` once" in capsys.readouterr().err
    folder = model / "cache" / "pagedkv" / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (model / "config.json").rename(folder / "config.json")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    assert run("size", "--context", 100, "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["token_nbytes"] == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["size", "--context", "0"], "the context is 0 tokens"),
        (["size", "--context", "9", "--memory", "lots"], "'lots' is no byte size"),
        (["size", "--context", "9", "--page-tokens", "-1"], "page_tokens is -1"),
        (["size", "--context", "9", "--model", "/no/where"], "/no/where is no folder"),
        (["demo", "--codec", "zip"], "there is no codec 'zip'"),
        (["demo", "--pool", "lots"], "'lots' is no byte size"),
        (["demo", "--pool", "0%"], "a pool of 0%"),
        (["demo", "--pool", "101%"], "a pool of 101%"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        pytest.param(
            ["demo", "--prompt", "/no/where"],
            "/no/where: No such file or directory",
            marks=pytest.mark.torch,
        ),
        pytest.param(
            ["demo", "--model", "/no/where"], "/no/where is no folder", marks=pytest.mark.torch
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_status_1(
    model: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(model)]
    assert run(*arguments, monkeypatch=monkeypatch) == 1
    output, errors = capsys.readouterr()
    (line,) = [line for line in errors.splitlines() if line.startswith("pagedkv: ")]
    assert message in line
    assert "Traceback" not in errors
    assert not output


def test_a_missing_option_is_told_apart_from_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("size", monkeypatch=monkeypatch) == 2
    assert "--context" in capsys.readouterr().err
