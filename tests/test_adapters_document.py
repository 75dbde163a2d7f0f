"""docs/adapters.md: its example runs, and keeps the contract as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from store_samples import REPOSITORY

from pagedkv_adapters.testing import AdapterContract

DOCUMENT = (REPOSITORY / "docs/adapters.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT, re.DOTALL))


@pytest.fixture
def folder(memory_folder: Path) -> Path:
    """The document's files."""
    for name, text in FILES.items():
        (memory_folder / name).write_text(text, encoding="utf-8")
    return memory_folder


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_of_code_is_a_file() -> None:
    assert list(FILES) == ["toy.py", "toy_pages.py", "test_toy_pages.py", "chat.py"]
    assert DOCUMENT.count("```python") == len(FILES)


def test_the_toy_engine_keeps_the_contract(folder: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'temporary'}"]
    output = run(folder, "-m", "pytest", *options, "test_toy_pages.py")
    assert " passed" in output
    assert "skipped" not in output


def test_the_toy_engine_reuses_its_prompt_after_a_restart(folder: Path) -> None:
    first, again = run(folder, "chat.py").splitlines()
    assert first.startswith("first: 0 of 50 tokens reused")
    assert again.startswith("again: 49 of 50 tokens reused")
    assert first.partition("then")[2] == again.partition("then")[2]


def test_what_can_be_set_has_the_defaults_that_are_documented() -> None:
    for name in ("page_tokens", "num_new_tokens"):
        assert f"| `{name}` | {getattr(AdapterContract, name)} |" in DOCUMENT
