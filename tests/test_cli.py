"""The command line: fast to answer, documented, and clear about what went wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer.main
from store_samples import all_files, make_pages, make_spec

import pagedkv
from pagedkv import cli
from pagedkv.lane_access import lane_locked

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
        (["demo", "--long-tokens", "512"], "without --long does not take --long-tokens"),
        (["demo", "--long-steps", "2"], "without --long does not take --long-steps"),
        (["demo", "--long", "--codec", "int8"], "--long does not take --codec"),
        (["demo", "--long", "--store", "x", "--codec", "raw"], "take --codec and --store"),
        (["demo", "--long", "--long-tokens", "255"], "--long-tokens is 255: it must be at least"),
        (["demo", "--long", "--long-steps", "0"], "--long-steps is 0: it must be at least 1"),
        (["demo", "--long", "--max-new-tokens", "1"], "--max-new-tokens is 1: --long needs"),
        (["demo", "--long", "--pool", "101%"], "a pool of 101%"),
        (["demo", "--long", "--pool", "1MiB"], "a pool of 1MiB holds no page"),
        pytest.param(
            ["demo", "--prompt", "/no/where"],
            "/no/where: No such file or directory",
            marks=pytest.mark.torch,
        ),
        pytest.param(
            ["demo", "--model", "/no/where"], "/no/where is no folder", marks=pytest.mark.torch
        ),
        pytest.param(
            ["demo", "--long", "--prompt", "/no/where"],
            "/no/where: No such file or directory",
            marks=pytest.mark.torch,
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


STORE_COMMANDS = (["verify"], ["info"], ["ls"], ["gc", "--max-size", "1MiB"])


@pytest.fixture
def store(tmp_path: Path, no_fsync: None) -> Path:
    """Ten pages of one prompt."""
    path = tmp_path / "cache.zarr"
    spec = make_spec()
    keys = pagedkv.page_keys(spec, np.arange(40))
    entries = [
        pagedkv.PageEntry(key=key, parent=parent, tokens=ids, num_tokens=4)
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]
    with pagedkv.PageStore.open(path, spec) as opened:
        opened.write(0, entries, make_pages(spec, 10))
    return path


@pytest.mark.parametrize("command", STORE_COMMANDS, ids=" ".join)
def test_a_folder_that_is_no_store_is_one_line_and_status_2(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert run(*command, path, monkeypatch=monkeypatch) == 2
        output, errors = capsys.readouterr()
        assert not output
        (line,) = errors.splitlines()
        assert line.startswith("pagedkv: ")
        assert str(path) in line
    assert not list(tmp_path.iterdir())


def test_bench_of_no_folder_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", tmp_path / "nowhere", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == f"pagedkv: {tmp_path / 'nowhere'} is no folder\n"
    assert run("bench", tmp_path, "--size", "lots", monkeypatch=monkeypatch) == 2
    assert "'lots' is no byte size" in capsys.readouterr().err


@pytest.mark.parametrize("command", STORE_COMMANDS[:3], ids=" ".join)
def test_looking_at_a_good_store_is_status_0_and_changes_nothing(
    store: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = all_files(store)
    assert run(*command, store, monkeypatch=monkeypatch) == 0
    output, errors = capsys.readouterr()
    assert "10 pages" in " ".join(output.split()) or "10: 10 full" in output
    assert not errors
    assert run(*command, store, "--json", monkeypatch=monkeypatch) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert all_files(store) == before


def test_verify_tells_what_is_damaged_and_repairs_it(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = store / "lane-0000" / "group-0" / "kv" / "c.0.0.0.0.0.0"
    data = bytearray(segment.read_bytes())
    data[5] ^= 1
    segment.write_bytes(data)
    assert run("verify", store, monkeypatch=monkeypatch) == 1
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("lane-0000/group-0/kv/c.0.0.0.0.0.0, row 0, layer 0, page ")
    assert first.endswith("(page lost)")
    assert run("verify", store, "--json", monkeypatch=monkeypatch) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert (finding["row"], finding["damage"], len(finding["key"])) == (0, "layer", 64)
    assert (report["num_good_pages"], report["is_clean"]) == (9, False)
    assert run("verify", store, "--repair", monkeypatch=monkeypatch) == 0
    assert "all repaired" in capsys.readouterr().out
    assert run("verify", store, monkeypatch=monkeypatch) == 0


def test_info_prints_what_is_in_the_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run("info", store, monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    for text in ("sha256:test", "3 x 2 x 4 x 2 x 8 float32", "raw", "10: 10 full, 0 tails", "lane"):
        assert text in output
    assert run("info", store, "--json", monkeypatch=monkeypatch) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["groups"][0]["num_pages"] == 10
    assert values["groups"][0]["spec"]["dtype"] == "float32"
    assert values["lanes"][0]["is_held"] is False


def test_ls_lists_prefixes_or_pages(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", store, monkeypatch=monkeypatch) == 0
    line, total = capsys.readouterr().out.splitlines()
    assert "10 pages, 40 tokens from 0: 0 1 2 3 …" in line
    assert total == "10 pages"
    assert run("ls", store, "--long", "--limit", 3, monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "1 page, 4 tokens from 8: 8 9 10 11 …" in lines[2]
    assert lines[3] == "… and 7 more lines (--limit 0 prints all)"
    assert run("ls", store, "--long", "--limit", 0, monkeypatch=monkeypatch) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11


def test_gc_gives_up_pages_until_the_store_is_small_enough(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nbytes = sum(map(len, all_files(store).values()))
    assert run("gc", store, "--max-size", nbytes + 2**20, monkeypatch=monkeypatch) == 0
    assert "0 pages evicted" in capsys.readouterr().out
    assert run("gc", store, "--max-size", "100KiB", "--json", monkeypatch=monkeypatch) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_pages_evicted"], report["num_segments_removed"]) == (10, 1)
    assert report["nbytes_after"] <= 100 * 2**10 < report["nbytes_before"]
    assert sum(map(len, all_files(store).values())) <= 100 * 2**10
    assert run("gc", store, "--max-size", "lots", monkeypatch=monkeypatch) == 2
    assert "'lots' is no byte size" in capsys.readouterr().err
    assert run("verify", store, monkeypatch=monkeypatch) == 0
    capsys.readouterr()
    assert run("info", store, monkeypatch=monkeypatch) == 0
    assert "last evictions" in capsys.readouterr().out
    assert run("info", store, "--json", monkeypatch=monkeypatch) == 0
    assert len(json.loads(capsys.readouterr().out)["evictions"]) == 10


def test_gc_that_cannot_free_enough_is_status_1(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with lane_locked(store / "lane-0000") as held:
        assert held
        assert run("gc", store, "--max-size", "100KiB", monkeypatch=monkeypatch) == 1
    output, errors = capsys.readouterr()
    assert "0 pages evicted" in output
    assert "more than 100KiB is left" in errors


def test_bench_prints_figures(
    tmp_path: Path,
    no_fsync: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("bench", tmp_path, "--size", "256KiB", "--page", "16KiB")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    for text in ("durable write, raw", "cold read, int8", "plain file", "GB/s"):
        assert text in output
    assert run(*arguments, "--json", monkeypatch=monkeypatch) == 0
    results = json.loads(capsys.readouterr().out)
    assert {tuple(result) for result in results} == {
        ("case", "unit", "ours", "peer", "peer_name", "ratio")
    }
    assert not list(tmp_path.iterdir())
