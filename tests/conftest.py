"""What all tests share: reproducible examples, and the real models."""

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
from pagedkv_adapters.demo.wheel_model import GEMMA3, SMOLLM2

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
    missing = [model for model in (SMOLLM2, GEMMA3) if not model.is_installed()]
    has_transformers = importlib.util.find_spec("transformers") is not None
    for item in items:
        if item.get_closest_marker("torch") and not has_transformers:
            item.add_marker(pytest.mark.skip(reason="needs: pip install '.[transformers]'"))
        markers = list(item.iter_markers("model"))
        for model in {model for marker in markers for model in marker.args or (SMOLLM2,)}:
            if model in missing:
                item.add_marker(pytest.mark.skip(reason=model.how_to_install()))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as transformers reads it, in the user's cache folder."""
    from pagedkv_adapters.demo.unpack import unpack

    return unpack(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> tuple[Any, Any]:
    """The model, float32, and its tokenizer."""
    from pagedkv_adapters.demo.model import load

    return load(smollm2_folder)


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma 3 270M, likewise; it continues text, and knows no turns."""
    from pagedkv_adapters.demo.unpack import unpack

    return unpack(GEMMA3)


@pytest.fixture(scope="session")
def gemma3(gemma3_folder: Path) -> tuple[Any, Any]:
    """The model, float32, and its tokenizer."""
    from pagedkv_adapters.demo.model import load

    return load(gemma3_folder)


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
