"""Small specs, pages and entries that the tests of the store share."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import files
from pagedkv.evictions import EVICTED_NBYTES
from pagedkv.format import EVICTED, PageEntry
from pagedkv.memory import PageArrays
from pagedkv.spec import KVSpec, PageKey

Array = npt.NDArray[Any]

REPOSITORY = Path(__file__).parent.parent


def make_spec(**changes: Any) -> KVSpec:
    fields = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_tokens": 4,
        "dtype": "float32",
        "model": "sha256:test",
    }
    return KVSpec(**{**fields, **changes})


def make_pages(spec: KVSpec, count: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    shape = (count, *spec.page_shape)
    return list(rng.standard_normal(shape, dtype=np.float32).astype(spec.np_dtype))


def make_smooth_pages(spec: KVSpec, count: int, seed: int = 0) -> list[Array]:
    """Pages that compress: few different numbers, more of them from layer to layer."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(-3, 3, (count, *spec.page_shape)).astype(np.float32)
    pages *= np.arange(spec.held_layers)[:, None, None, None, None]
    return list(pages.astype(spec.np_dtype))


def as_arrays(spec: KVSpec, pages: Sequence[Array] | Array) -> PageArrays:
    """Whole pages as the store takes them."""
    return PageArrays(pages, None, spec.page_shape, spec.np_dtype, "a page")


def make_key(number: int) -> PageKey:
    return PageKey(hashlib.sha256(b"page %d" % number).digest())


def make_entries(spec: KVSpec, count: int, start: int = 0, **changes: Any) -> list[PageEntry]:
    """Entries of full pages in a chain; page ``n`` has the tokens from ``1000 * n`` on."""
    return [
        PageEntry(
            **{
                "key": make_key(number),
                "num_tokens": spec.page_tokens,
                "parent": make_key(number - 1),
                "tokens": np.arange(spec.page_tokens, dtype=np.int32) + 1000 * number,
                **changes,
            }
        )
        for number in range(start, start + count)
    ]


def empty_like(pages: Iterable[Array]) -> list[Array]:
    return [np.full(page.shape, 7, page.dtype) for page in pages]


def chunk_nbytes(path: Path) -> int:
    """Bytes of all chunks and segments of the store's pages on disk."""
    chunks = path.glob("lane-*/group-*/*/c.*")
    return sum(p.stat().st_size for p in chunks if p.parent.name != EVICTED)


def make_eviction_rings(path: Path) -> None:
    """Make the rings of a closed store, so that the first eviction takes no more room."""
    for folder in path.glob(f"lane-*/group-*/{EVICTED}"):
        (folder / "c.0.0").write_bytes(bytes(EVICTED_NBYTES))


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def same_bits(left: Iterable[Array], right: Iterable[Array]) -> bool:
    return [bits(a) for a in left] == [bits(b) for b in right]


def all_files(path: Path) -> dict[str, bytes]:
    """Content of every file under ``path``."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def python(code: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """A new Python process with the repository on its path; warnings are errors."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"},
        **options,
    )


def run_python(code: str, *arguments: object) -> str:
    """Output of a Python process that must succeed."""
    process = python(code, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def serve_nothing_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read wait for a disk, as if nothing were in the page cache."""
    monkeypatch.setattr(files, "pread_now", lambda fd, out, offset: 0)
    monkeypatch.setattr(files, "preadv2_address", lambda: 0)
