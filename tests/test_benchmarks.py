"""Each benchmark runs, at a size that shows nothing, and prints what it promises."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
STORE_PARTS = [
    "durable-writes",
    "warm-reads",
    "cold-reads",
    "int8",
    "tiny-pages",
    "million-pages",
]
needs_peers = pytest.mark.skipif(
    find_spec("lmdb") is None or find_spec("zarrs") is None, reason="needs the extra `dev`"
)
needs_fadvise = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="pages cannot be dropped from this system's cache"
)


def run(name: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What ``python benchmarks/<name> --tiny --json`` prints, warnings being errors."""
    options = ["--tiny", "--rounds", "1", "--folder", str(folder), *arguments]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / name), *options, "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "it leaves nothing behind"
    results = json.loads(done.stdout)
    assert isinstance(results, list)
    return results


@needs_fadvise
@pytest.mark.parametrize("part", ["raw", "int8", "mapped"])
def test_long_context(part: str, tmp_path: Path) -> None:
    results = run("long_context.py", tmp_path, "--part", part)
    check(results)
    hits = next(result for result in results if result["case"].endswith("hits in the pool"))
    assert hits["ours"] == pytest.approx(hits["peer"], abs=2)


def check(results: list[dict[str, Any]]) -> None:
    assert results
    for result in results:
        assert list(result) == ["case", "unit", "ours", "peer", "peer_name", "ratio"]
        assert result["case"]
        assert result["peer_name"]
        assert result["ours"] >= 0
        if result["peer"] is None:
            assert result["ratio"] is None
            assert "not run" in result["peer_name"]
        elif result["unit"].startswith(("GB/s", "%")):
            assert result["ratio"] == pytest.approx(result["ours"] / result["peer"])
        else:
            assert result["unit"] in {
                "µs a page",
                "µs a prompt",
                "s",
                "ms",
                "bytes a page",
                "MiB",
                "% of slices",
            }
            if result["ours"]:
                assert result["ratio"] == pytest.approx(result["peer"] / result["ours"])
    assert len({(result["case"], result["peer_name"]) for result in results}) == len(results)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=needs_fadvise) if part in {"cold-reads", "int8"} else part
        for part in STORE_PARTS
    ],
)
def test_store(part: str, tmp_path: Path) -> None:
    results = run("store.py", tmp_path, "--part", part)
    check(results)
    if part == "durable-writes":
        peers = {r["peer_name"] for r in results if r["case"].startswith("durable write, 192 KB")}
        assert {"plain file, fsync", "plain file, fsync, CRC32C"} <= peers


@pytest.mark.parametrize(
    "part", ["hit-rates", "ours", "halves", "workloads", "speed", "admission", "objects"]
)
def test_policies(part: str, tmp_path: Path) -> None:
    results = run("policies.py", tmp_path, "--part", part)
    assert results
    for result in results:
        if result["peer"] is None:
            assert result["ratio"] is None
            assert "not run" in result["peer_name"]
        elif result["unit"] == "MiB a hit":
            assert result["ratio"] == pytest.approx(result["peer"] / result["ours"])
        else:
            assert result["ratio"] == pytest.approx(result["ours"] / result["peer"])
    if part == "objects":
        equal = [r for r in results if not r["case"].endswith(": arc") and r["peer"] is not None]
        assert all(r["peer_name"] == "libCacheSim: equal" for r in equal)


def test_policies_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join("abcabdab" * 40))
    folder = tmp_path / "empty"
    folder.mkdir()
    results = run("policies.py", folder, "--part", "hit-rates", "--trace", str(trace))
    bound = [r for r in results if r["peer_name"] == "clairvoyant"]
    assert all(r["ours"] <= r["peer"] for r in bound)
    assert bound[-1]["peer"] == pytest.approx(100 * (1 - 4 / 320))


@pytest.mark.parametrize("part", ["long-prompt", "siblings", "branching"])
def test_match(part: str, tmp_path: Path) -> None:
    results = run("match.py", tmp_path, "--part", part)
    check(results)
    if part == "branching":
        assert all(result["ratio"] > 1 for result in results)


@needs_peers
@pytest.mark.parametrize("part", ["192-KB", "4-KB"])
def test_peers(part: str, tmp_path: Path) -> None:
    results = run("peers.py", tmp_path, "--part", part)
    check(results)
    assert all("fsync" in r["peer_name"] or "SQLite" in r["peer_name"] for r in results)


@pytest.mark.torch
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra `transformers`")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("attention.py", "decode"),
        ("attention.py", "int8"),
        ("attention.py", "prefill"),
        ("decode.py", "steps"),
        ("decode.py", "generate"),
    ],
)
def test_attention(name: str, part: str, tmp_path: Path) -> None:
    check(run(name, tmp_path, "--part", part))


def test_without_a_compiler_the_prototype_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    results = run("store.py", tmp_path, "--part", "tiny-pages")
    check(results)
    assert {r["peer"] for r in results} == {None}
    assert all("there is no C++ compiler" in r["peer_name"] for r in results)


def test_an_unknown_part_is_refused_naming_those_that_exist(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "store.py"), "--part", "no-such-part"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert all(part in done.stderr for part in STORE_PARTS)
