"""The demo: what it asks, what it measures, and that its three runs agree."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv as pk
from pagedkv import cli

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagedkv_adapters.demo import unpack
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.pool_size import pool_slots
from pagedkv_adapters.demo.prompt import QUESTION, alice_prompt, encode
from pagedkv_adapters.demo.wheel_model import WheelModel

pytestmark = pytest.mark.torch

SPEC = pk.KVSpec(
    num_layers=2, num_kv_heads=2, head_dim=8, page_tokens=16, dtype="float32", model="m"
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama and a tokenizer of one token a character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    letters = {chr(code): code - 31 for code in range(32, 127)} | {"<end>": 0}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<end>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("".join(chr(33 + number * number % 90) for number in range(300)))
    return path


def run_demo(
    *arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    output, errors = capsys.readouterr()
    assert not exit_info.value.code, errors
    return output


def test_three_runs_agree_and_the_json_says_how(
    tiny_model: Path,
    prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "cache.zarr"
    output = run_demo(
        *("--model", tiny_model, "--prompt", prompt, "--store", store),
        *("--pool", "25%", "--max-new-tokens", 8, "--json"),
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    values = json.loads(output)
    page_nbytes = SPEC.page_nbytes
    assert values["tokens_identical"] is True
    assert values["num_prompt_tokens"] == 300
    assert values["kv_nbytes"] == 307 * page_nbytes // 16
    assert values["pool_nbytes"] == 4 * page_nbytes
    assert values["num_reused_tokens"] == 299, "all of the prompt but its last token"
    assert values["pages_evicted"] >= 14
    assert values["pages_loaded"] > 0
    assert values["store_path"] == str(store)
    assert values["runs"]["paged"]["num_reused_tokens"] == 0
    assert values["ttft_full_s"] > 0
    assert values["ttft_resumed_s"] > 0
    tokens = values["output_tokens"]
    assert set(tokens) == {"dynamic_cache", "paged", "resumed"}
    assert tokens["dynamic_cache"] == tokens["paged"] == tokens["resumed"]
    assert len(tokens["paged"]) == 8
    with pk.PageStore.open(store, mode="r") as opened:
        assert opened.num_pages == 307 // 16


def test_a_store_from_before_is_used_and_another_codec_refused(
    tiny_model: Path,
    prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", tiny_model, "--prompt", prompt, "--store", tmp_path / "cache.zarr"]
    arguments += ["--max-new-tokens", 2, "--codec", "int8"]
    first = run_demo(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert "codec int8" in first
    assert "pagedkv demo --codec raw --pool 25%\n" in first
    look = re.search(r'-c "(import zarr; .*)"\n', first)
    assert look
    info = subprocess.run(
        [sys.executable, "-W", "error", "-c", look[1]], capture_output=True, text=True, check=True
    )
    assert "Float32" in info.stdout
    again = run_demo(*arguments, "--json", monkeypatch=monkeypatch, capsys=capsys)
    assert json.loads(again)["runs"]["paged"]["num_reused_tokens"] == 288
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", *map(str, arguments[:-1]), "raw"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "Int8(" in capsys.readouterr().err


def test_the_model_is_unpacked_with_a_bar_when_it_is_not_there(
    tiny_model: Path,
    prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def convert(gguf: Path, folder: Path, report: unpack.Report) -> None:
        shutil.copytree(tiny_model, folder)
        report("Unpacking [the] weights", 0.5)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(WheelModel, "find_gguf", lambda model: (tmp_path / "model.gguf",))
    monkeypatch.setattr(unpack, "_convert", convert)
    monkeypatch.setattr("sys.argv", ["pagedkv", "demo", "--prompt", str(prompt)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    output, errors = capsys.readouterr()
    assert not exit_info.value.code, errors
    assert "✓ Unpacked SmolLM2-135M-Instruct" in errors
    assert str(tmp_path / "pagedkv" / "demo" / "cache.zarr") in "".join(output.split("\n"))


def test_a_prompt_too_long_for_the_model_is_refused(
    tiny_model: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt.write_text("long " * 300)
    arguments = ["demo", "--model", tiny_model, "--prompt", prompt]
    monkeypatch.setattr("sys.argv", ["pagedkv", *map(str, arguments)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "has 1500 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "slots"), [("50%", 9), ("12.5 %", 2), ("100%", 18), ("12KiB", 3), ("8 KB", 1)]
)
def test_pool_is_a_size_or_a_share_rounded_down(pool: str, slots: int) -> None:
    assert SPEC.page_nbytes == 4096
    assert pool_slots(pool, SPEC, 300) == slots


@pytest.mark.parametrize("pool", ["1KiB", "1%"])
def test_a_pool_without_a_page_is_refused(pool: str) -> None:
    with pytest.raises(ValueError, match=r"holds no page: a page of 16 tokens takes 4\.0 KiB"):
        pool_slots(pool, SPEC, 300)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model that can be loaded: .*config\.json"):
        load(tmp_path)


def test_the_chapter_is_carrolls_and_nothing_else() -> None:
    text = alice_prompt()
    assert text.startswith("Alice's Adventures in Wonderland\n\nby Lewis Carroll (1865)")
    assert text.index("So she set to work") < text.index(QUESTION)
    assert "Gutenberg" not in text
    assert 2_100 < len(text.split()) < 2_300


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(None, " \n")


@pytest.mark.model
def test_demo_with_smollm2(
    smollm2_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = run_demo(
        *("--store", tmp_path / "cache.zarr", "--json"),
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    values = json.loads(output)
    assert values["tokens_identical"] is True
    assert 2_300 <= values["num_prompt_tokens"] <= 3_200
    assert "a very small cake" in values["output_text"]["paged"]
    assert 20 <= len(values["output_tokens"]["paged"]) <= 40
    assert values["pool_nbytes"] <= values["kv_nbytes"] / 2
    assert values["pages_evicted"] > 0
    assert values["num_reused_tokens"] > values["num_prompt_tokens"] - 16
