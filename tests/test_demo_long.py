"""The long demo: what it measures, what it refuses, and that it leaves nothing behind."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_demo import prompt, run_demo, tiny_model

import pagedkv as pk
from pagedkv import cli, layer_scan

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagedkv_adapters.demo import long, new_process
from pagedkv_adapters.demo.long_decode import SLICE_NBYTES, SPEC, decode, fill
from pagedkv_adapters.demo.long_model import generate_long
from pagedkv_adapters.demo.long_result import STAGING_NBYTES
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.prompt import QUESTION, encode, encode_long
from pagedkv_adapters.demo.usage import device_read_nbytes, peak_nbytes, resident_nbytes

__all__ = ["prompt", "tiny_model"]  # fixtures

pytestmark = pytest.mark.torch

DECODE = "pagedkv_adapters.demo.long_decode"


def arguments_for(model: Path, prompt: Path) -> list[object]:
    return ["--long", "--model", model, "--prompt", prompt, "--long-tokens", 256]


@pytest.fixture
def demo_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagedkv" / "demo"


def test_both_parts_run_and_the_json_says_how(
    tiny_model: Path,
    prompt: Path,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = run_demo(
        *arguments_for(tiny_model, prompt),
        *("--long-steps", 2, "--max-new-tokens", 8, "--json"),
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    values = json.loads(output)
    assert values["tokens_identical"] is True
    dynamic, paged, decoded = values["dynamic_cache"], values["paged"], values["decode"]
    assert dynamic["output_tokens"] == paged["output_tokens"]
    assert len(paged["output_tokens"]) == 8
    assert dynamic["num_prompt_tokens"] == paged["num_prompt_tokens"] == 256 - 8
    assert (paged["num_slots"], paged["num_pages"]) == (1, 16)
    assert paged["pool_nbytes"] == 4096
    assert paged["kv_nbytes"] == 255 * 4096 // 16
    assert paged["num_slices_attended"] == 7 * 2 * 16
    assert 0 < paged["num_slices_loaded"] <= paged["num_slices_attended"]
    for run in (dynamic, paged, decoded):
        assert run["peak_nbytes"] > run["resident_nbytes"] / 2 > 0
    assert (decoded["num_tokens"], decoded["num_pages"], decoded["num_slots"]) == (256, 16, 1)
    assert decoded["kv_nbytes"] == 16 * SPEC.page_nbytes
    assert 16 * 32 * SLICE_NBYTES <= decoded["store_nbytes"] < 0.6 * decoded["kv_nbytes"]
    assert [step["from_disk"] for step in decoded["steps"]] == [True, True, False]
    for step in decoded["steps"]:
        assert step["num_slices_attended"] == 17 * 32, "of all pages and of the new token's"
        assert step["slices_nbytes"] == step["num_slices_loaded"] * SLICE_NBYTES
        assert step["hit_rate"] == pytest.approx(1 / 17), "the pool's one slot"
        assert step["tokens_s"] == pytest.approx(1 / step["seconds"])
    assert {path.name for path in demo_folder.iterdir()} <= {".lock"}


def test_the_tables_say_what_is_compared(
    tiny_model: Path,
    prompt: Path,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(long, "ask", asked_of_nobody(tiny_model))
    output = run_demo(*arguments_for(tiny_model, prompt), monkeypatch=monkeypatch, capsys=capsys)
    for text in (
        "a prompt of 8,160 tokens",
        "512 tokens at a time",
        "The text was repeated up to that length",
        "A cache like an 8B model's, 32,768 tokens",
        "A step from the disk took 2.00 s",
        "1.00 GB/s",
        "2, page cache",
        "pagedkv demo --long --pool 25%",
    ):
        assert text in " ".join(output.split()), text


def asked_of_nobody(model: Path) -> Any:
    """In place of ``ask``: made up answers, of the kinds that the processes give."""
    run = {
        "output_tokens": [1, 2, 3],
        "text": "Alice",
        "num_prompt_tokens": 8160,
        "prefill_s": 1.0,
        "total_s": 2.0,
        "peak_nbytes": 2**30,
        "resident_nbytes": 2**29,
    }
    paged = {"kv_nbytes": 2**28, "pool_nbytes": 2**24, "prefill_chunk_tokens": 512}
    step = {
        "from_disk": True,
        "seconds": 2.0,
        "num_slices_attended": 10,
        "num_slices_loaded": 9,
        "slices_nbytes": 2 * 10**9,
        "device_nbytes": None,
    }
    decoded = {
        "num_tokens": 32768,
        "num_pages": 2048,
        "num_slots": 204,
        "kv_nbytes": 2**32,
        "store_nbytes": 2**31,
        "pool_nbytes": 2**28,
        "peak_nbytes": 2**30,
        "resident_nbytes": 2**27,
        "open_s": 3.0,
        "steps": [step, {**step, "from_disk": False}],
    }

    def ask(module: str, question: dict[str, Any], what: str, tell: new_process.Tell) -> Any:
        if module == DECODE:
            return {"fill": 2**31, "decode": decoded}[question["job"]]
        assert question["folder"] == str(model)
        return run if question["store_path"] is None else run | paged

    return ask


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_refused_before_anything_runs(
    tiny_model: Path,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**30))
    monkeypatch.setattr(long, "ask", lambda *args: pytest.fail("nothing may run"))
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", "--long", "--model", str(tiny_model)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    errors = " ".join(capsys.readouterr().err.split())
    assert f"{demo_folder / 'long'} has 1.0 GiB free, but a cache of 32,768 tokens" in errors
    assert "in INT8 takes 2.4 GiB" in errors
    assert "--long-tokens" in errors
    assert not (demo_folder / "long").exists()


def test_a_second_demo_is_told_of_the_first(
    tiny_model: Path,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from filelock import FileLock

    demo_folder.mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", "--long", "--model", str(tiny_model)])
    with FileLock(demo_folder / ".lock"), pytest.raises(SystemExit, match="1"):
        cli.main()
    assert f"another demo uses {demo_folder}: wait for it" in capsys.readouterr().err


def test_after_ctrl_c_nothing_is_left(
    tiny_model: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    def ask(module: str, question: dict[str, Any], what: str, tell: new_process.Tell) -> Any:
        def interrupt(message: object) -> None:
            store = Path(question["store_path"])
            assert store.is_dir()
            raise KeyboardInterrupt

        if question.get("job") == "fill":
            return real_ask(module, question, what, interrupt)
        run = asked_of_nobody(tiny_model)
        return run(module, question, what, tell)

    processes: list[subprocess.Popen[str]] = []
    real_ask = new_process.ask
    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(long, "ask", ask)
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", "--long", "--model", str(tiny_model)])
    with pytest.raises(SystemExit):
        cli.main()
    assert processes[-1].returncode == -9
    assert not (demo_folder / "long").exists()


def test_what_fails_in_the_new_process_is_said_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.zarr"
    question = {"store_path": str(path), "num_tokens": 256, "pool": "10%", "num_steps": 1}
    question["job"] = "decode"
    with pytest.raises(pk.PagedKVError, match="the process that decodes failed: .*nowhere.zarr"):
        new_process.ask(DECODE, question, "decodes", lambda message: None)
    with pytest.raises(pk.PagedKVError, match="the process that decodes failed: KeyError: 'nap'"):
        new_process.ask(DECODE, {"job": "nap"}, "decodes", lambda message: None)


def test_a_process_that_does_not_wait_for_its_question_says_why() -> None:
    question = ["a" * 2**20]  # more than a pipe holds
    with pytest.raises(pk.PagedKVError, match="the process that naps failed: .*No module named"):
        new_process.ask("pagedkv_adapters.demo.nap", question, "naps", lambda message: None)


def test_a_store_that_is_not_full_is_not_decoded_from(tmp_path: Path, no_fsync: None) -> None:
    question = {"store_path": str(tmp_path / "cache.zarr"), "num_tokens": 32}
    fill(question, lambda message: None)
    question |= {"num_tokens": 256, "pool": "10%", "num_steps": 1}
    with pytest.raises(pk.PagedKVError, match="32 of 256 tokens were found"):
        decode(question, lambda message: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 200}, "200 of 256 tokens are to be generated, which leaves less"),
        ({"text": " "}, "the prompt is empty"),
        ({"folder": "/no/where"}, "/no/where is no folder"),
    ],
)
def test_a_generation_that_cannot_be_is_refused(
    tiny_model: Path, changes: dict[str, Any], message: str
) -> None:
    question = {
        "folder": str(tiny_model),
        "text": "some text",
        "num_tokens": 256,
        "max_new_tokens": 8,
        "store_path": None,
        "pool": None,
    }
    with pytest.raises(ValueError, match=message):
        generate_long(question | changes, lambda message: None)


def test_a_long_prompt_has_the_length_asked_for_and_the_end_of_a_short_one(
    tiny_model: Path,
) -> None:
    _, tokenizer = load(tiny_model)
    short = encode(tokenizer, "0123456789" * 10)
    for num_tokens in (128, 300, 1000):
        ids = encode_long(tokenizer, "0123456789" * 10, num_tokens)
        assert ids.shape == (1, num_tokens)
        assert ids[0, -64:].tolist() == short[0, -64:].tolist()
        assert ids[0, :64].tolist() == short[0, :64].tolist()
    text = tokenizer.decode(encode_long(tokenizer, None, 30_000)[0]).replace(" ", "")
    assert text.count("byLewisCarroll(1865)") > 1, "30,000 letters are more than the chapter has"
    assert text.count("Answerbriefly.") == 1
    assert text.endswith(QUESTION[-20:].replace(" ", "") + "<end>Answerbriefly.")


def test_the_staging_buffers_are_as_large_as_the_result_says() -> None:
    assert STAGING_NBYTES == layer_scan.STAGED_NBYTES


def test_usage_is_that_of_this_process() -> None:
    assert 0 < resident_nbytes() <= peak_nbytes() * 1.01
    read = device_read_nbytes()
    assert read is None or read >= 0
