"""A million catalogued pages: how long a store takes to open, and how much memory it needs."""

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import pagedkv as pk
from measure.compare import SECONDS, Bench, Target, Unit
from measure.pages import Keys, entries_of
from measure.tiny import TINY

_BYTES_A_PAGE = Unit(name="bytes a page", amount=1.0, is_rate=False)
_KEYS_PER_WRITE = 20_000

_CHILD = """
import os, resource, sys, time

def resident():
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return peak if sys.platform == "darwin" else peak * 1024

small, large = sys.argv[1:]
{prepare}
load(small)  # so that nothing is imported, compiled or allocated for the first time
before = resident()
began = time.perf_counter()
held = load(large)
seconds = time.perf_counter() - began
print(seconds, max(resident() - before, 1), count(held))
"""

_OURS = _CHILD.format(
    prepare="""
import pagedkv

def load(path):
    return pagedkv.PageStore.open(path, mode="r")

def count(store):
    return store.num_pages
"""
)
_PEER = _CHILD.format(
    prepare="""
def load(path):
    with open(path, "rb") as file:
        data = file.read()
    return {data[at : at + 32]: row for row, at in enumerate(range(0, len(data), 32))}

def count(rows):
    return len(rows)
"""
)


def million_pages(bench: Bench) -> None:
    """Open time and memory, each in a process of its own."""
    folder = bench.folder / "million"
    folder.mkdir()
    num_pages = bench.count(1_000_000, 500)
    stores = [
        _make(bench, folder / name, count) for name, count in (("small", 10), ("large", num_pages))
    ]
    ours: list[tuple[float, float]] = []
    peer: list[tuple[float, float]] = []
    case = f"{num_pages:,} catalogued pages"
    task = bench.progress.add_task(f"open {case}", total=bench.rounds)
    for number in range(bench.rounds):
        pairs = [(ours, _OURS, ".zarr"), (peer, _PEER, ".keys")]
        for figures, code, suffix in pairs[:: -1 if number % 2 else 1]:
            figures.append(_run(code, [path.with_suffix(suffix) for path in stores], num_pages))
        bench.progress.advance(task)
    bench.progress.remove_task(task)
    (seconds, nbytes), (peer_seconds, peer_nbytes) = (
        [statistics.median(values) for values in zip(*figures, strict=True)]
        for figures in (ours, peer)
    )
    name = "dict of the keys, read from one flat file of them"
    targets = Target(at_most=5), Target(at_most=250)
    bench.add(f"{case}: open", SECONDS, seconds, peer_seconds, name, target=targets[0])
    per_page = _BYTES_A_PAGE
    bench.add(
        f"{case}: memory",
        per_page,
        nbytes / num_pages,
        peer_nbytes / num_pages,
        name,
        target=targets[1],
    )
    shutil.rmtree(folder)


def _make(bench: Bench, path: Path, num_pages: int) -> Path:
    """A store of tiny pages, and a flat file of their keys; the paths without their suffixes."""
    keys = Keys()
    pages = np.zeros((_KEYS_PER_WRITE, *TINY.page_shape), np.float32)
    starts = range(0, num_pages, _KEYS_PER_WRITE)
    task = bench.progress.add_task(f"write {num_pages:,} pages", total=len(starts))
    with (
        pk.PageStore.open(path.with_suffix(".zarr"), TINY) as store,
        path.with_suffix(".keys").open("wb") as file,
    ):
        for start in starts:
            fresh = keys.take(min(_KEYS_PER_WRITE, num_pages - start))
            store.write(0, entries_of(TINY, fresh), pages[: len(fresh)])
            file.write(b"".join(fresh))
            bench.progress.advance(task)
    bench.progress.remove_task(task)
    return path


def _run(code: str, paths: list[Path], num_pages: int) -> tuple[float, float]:
    """Seconds and bytes of memory that a fresh process takes to open the last of the paths."""
    printed = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seconds, nbytes, count = (float(word) for word in printed.split())
    assert count == num_pages, f"{count:g} pages of {num_pages:,} were found"
    return seconds, nbytes
