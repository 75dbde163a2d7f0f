"""The public names, and what importing them costs."""

import inspect
import subprocess
import sys

import pytest

import pagedkv

DOCUMENTED = {
    # the cache and what it is made of
    "PagedKVCache", "Sequence", "CacheStats", "LoadHandle", "KVSpec", "Lossless",
    "Explanation", "StopReason",
    # which page leaves
    "EvictionPolicy", "FIFO", "LRU", "LFU", "CLOCK", "SIEVE", "S3FIFO", "ARC", "TwoQueue", "LRU2",
    "ReuseIndex",
    "AdmissionPolicy", "AdmitAll", "AdmitLikely", "AdmitSeenTwice", "Recording",
    # the store
    "PageStore", "StoreRow", "PageEntry", "Codec", "Raw", "Int8",
    # keys, fingerprints and sizes
    "PageKey", "PageKeys", "page_keys", "fingerprint_files", "parse_nbytes", "format_nbytes",
    # errors
    "PagedKVError", "PoolExhaustedError", "PageNotFoundError", "SpecMismatchError", "ClosedError",
    "StoreError", "CorruptPageError", "StoreFullError", "StoreLockedError", "StoreTimeoutError",
    "FormatVersionError", "TraceError",
}  # fmt: skip

ERRORS = {
    "PagedKVError": Exception,
    "PoolExhaustedError": pagedkv.PagedKVError,
    "PageNotFoundError": pagedkv.PagedKVError,
    "SpecMismatchError": pagedkv.PagedKVError,
    "ClosedError": pagedkv.PagedKVError,
    "StoreError": pagedkv.PagedKVError,
    "CorruptPageError": pagedkv.StoreError,
    "StoreFullError": pagedkv.StoreError,
    "StoreLockedError": pagedkv.StoreError,
    "StoreTimeoutError": pagedkv.StoreError,
    "FormatVersionError": pagedkv.StoreError,
}

HEAVY = ("matplotlib", "numba", "rich", "torch", "transformers", "typer", "vllm", "zarr")


def test_the_public_names_are_those_documented() -> None:
    assert set(pagedkv.__all__) == DOCUMENTED
    assert len(pagedkv.__all__) == len(DOCUMENTED)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_each_name_resolves_and_says_what_it_is(name: str) -> None:
    thing = getattr(pagedkv, name)
    assert name in dir(pagedkv)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__module__.startswith("pagedkv.")
        assert inspect.getdoc(thing)


def test_a_star_import_gives_exactly_these() -> None:
    names: dict[str, object] = {}
    exec("from pagedkv import *", names)
    assert set(names) - {"__builtins__"} == DOCUMENTED


@pytest.mark.parametrize("name", ERRORS)
def test_errors_form_the_documented_tree(name: str) -> None:
    assert getattr(pagedkv, name).__bases__[0] is ERRORS[name]


def test_errors_are_also_what_python_programmers_expect() -> None:
    assert issubclass(pagedkv.PageNotFoundError, LookupError)
    assert issubclass(pagedkv.SpecMismatchError, ValueError)


def test_a_corrupt_page_error_names_its_pages() -> None:
    assert pagedkv.CorruptPageError("lost", (b"k" * 32,)).keys == (b"k" * 32,)
    assert pagedkv.CorruptPageError("lost").keys == ()


def run_python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_imports_nothing_heavy() -> None:
    loaded = run_python("import pagedkv, sys; print(*sorted(sys.modules))").split()
    assert "pagedkv.cache" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_a_cache_in_memory_needs_nothing_heavy_either() -> None:
    code = """
import sys, numpy as np, pagedkv as pk
sizes = dict(num_layers=1, num_kv_heads=1, head_dim=2, page_tokens=2)
spec = pk.KVSpec(**sizes, dtype="float32", model="m")
with pk.PagedKVCache(spec, 2) as cache:
    sequence = cache.open_sequence()
    kv = np.ones((1, 3, 1, 2), np.float32)
    sequence.append(kv, kv, [1, 2, 3])
    with sequence.gather(0):  # only attend needs kernels
        pass
print(*sorted(sys.modules))
"""
    loaded = run_python(code).split()
    assert [name for name in HEAVY if name in loaded] == []


def test_importing_says_nothing() -> None:
    assert run_python("import pagedkv") == ""


def test_the_logger_has_a_handler_and_no_level() -> None:
    code = "import pagedkv, logging as l; p = l.getLogger('pagedkv'); print(p.handlers, p.level)"
    assert run_python(code).strip() == "[<NullHandler (NOTSET)>] 0"


def test_the_version_is_text() -> None:
    assert pagedkv.__version__[0].isdigit()


@pytest.mark.parametrize("name", ["PagedKVCache", "Sequence", "PageStore", "KVSpec", "LoadHandle"])
def test_every_public_method_has_a_docstring(name: str) -> None:
    for attribute, member in inspect.getmembers(getattr(pagedkv, name)):
        is_method = inspect.isfunction(member) or inspect.ismethod(member)
        if not attribute.startswith("_") and (is_method or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{attribute}"
