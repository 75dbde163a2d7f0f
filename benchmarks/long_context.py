"""Decode steps over a context that does not fit into memory, beside plain reads of the same bytes.

    python benchmarks/long_context.py [--part raw|int8|mapped] [--rounds 5] [--json]

A sequence of an 8B-class model (32 layers, 8 KV heads of 128 channels, 32 query heads) lies in a
store; its KV is four times the pool. The process is in a memory cgroup that holds pool, staging
buffers and 64 MiB: the page cache is part of that, so that what is read comes from the disk. A
round is one decode step: attention of one query in every layer. The peer reads the same slices with
``pread`` from as many threads, under the same limit, and does nothing with them.

``docs/benchmarks.md`` says more.
"""

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from measure.compare import Bench, Target, Unit, gigabytes_a_second, run
from measure.limits import memory_limit
from measure.plain_file import forget

import pagedkv as pk
from pagedkv.codec import get_codec
from pagedkv.layer_scan import STAGED_NBYTES
from pagedkv_adapters.demo.usage import device_read_nbytes

Array = npt.NDArray[Any]

HEADS, QUERY_HEADS, CHANNELS, PAGE_TOKENS = 8, 32, 128, 16
IN_FLIGHT = 4
"""Requests that the store has in flight; the peer gets as many threads."""
POOL_SHARE = 1 / 4
MARGIN_NBYTES = 64 * 2**20
TOLERANCE = 1e-4
TARGET = Target(ratio=0.8)
PEER = "plain pread of the same slices, same limit"
PERCENT = Unit(name="% of slices", amount=100.0, is_rate=True)
MEBIBYTES = Unit(name="MiB", amount=1.0, is_rate=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A context of float32, and how it is stored."""

    num_tokens: int
    codec: str
    memory_map: bool

    def __str__(self) -> str:
        how = f"{self.codec}, mapped" if self.memory_map else self.codec
        return f"decode {self.num_tokens} float32 from disk ({how})"


class Slices:
    """Where the layers of pages lie in the segment files, as FORMAT.md says.

    Args:
        path: The store.
        spec: Of the pages.
        chunk_nbytes: Stored bytes of one layer of a page, its checksum included.
        pages: Which pages, in the order in which they were written.
    """

    def __init__(self, path: Path, spec: pk.KVSpec, chunk_nbytes: int, pages: range) -> None:
        files = sorted(path.glob("lane-*/group-*/kv/c.*"), key=lambda f: int(f.name.split(".")[1]))
        self.paths = files
        self._nbytes = chunk_nbytes
        self._fds = [os.open(file, os.O_RDONLY) for file in files]
        page_nbytes = chunk_nbytes * spec.num_layers
        counts = [file.stat().st_size // page_nbytes for file in files]
        places = [
            (fd, row) for fd, count in zip(self._fds, counts, strict=True) for row in range(count)
        ]
        self._places = [(fd, row * page_nbytes) for fd, row in places[pages.start : pages.stop]]
        self._threads = ThreadPoolExecutor(IN_FLIGHT)
        self._buffers = [bytearray(chunk_nbytes) for _ in range(IN_FLIGHT)]

    def read(self, layer: int) -> None:
        """Read one layer of all pages."""
        list(self._threads.map(self._read_share, range(IN_FLIGHT), [layer] * IN_FLIGHT))

    def _read_share(self, number: int, layer: int) -> None:
        buffer = [self._buffers[number]]
        for fd, start in self._places[number::IN_FLIGHT]:
            assert os.preadv(fd, buffer, start + layer * self._nbytes) == self._nbytes

    def close(self) -> None:
        """Close the files."""
        self._threads.shutdown()
        for fd in self._fds:
            os.close(fd)


class Taken(NamedTuple):
    """What the rounds of one side took."""

    seconds: list[float]
    device_nbytes: list[int]
    """Bytes that came from a device meanwhile."""

    def device_gb_s(self) -> float:
        """Median rate of bytes from a device; 0 if there were none."""
        rates = [n / s / 1e9 for s, n in zip(self.seconds, self.device_nbytes, strict=True)]
        return statistics.median(rates)


def beyond_memory(bench: Bench, codec: str, *, memory_map: bool = False) -> None:
    """Steps under a limit; equal to those with all pages in the pool."""
    case = Case(num_tokens=bench.count(8192, 256), codec=codec, memory_map=memory_map)
    spec = pk.KVSpec(
        num_layers=bench.count(32, 2),
        num_kv_heads=HEADS,
        head_dim=CHANNELS,
        page_tokens=PAGE_TOKENS,
        dtype="float32",
        model="random numbers",
    )
    path = bench.folder / f"{case.codec}-{case.memory_map}.zarr"
    num_pages = case.num_tokens // PAGE_TOKENS
    tokens = np.arange(case.num_tokens)
    _fill(path, spec, case, tokens, bench)
    queries = np.random.default_rng(1).standard_normal(
        (spec.num_layers, 1, QUERY_HEADS, CHANNELS), dtype=np.float32
    )
    with _opened(path, spec, num_pages, tokens, memory_map=False) as sequence:
        expected = _step(sequence, queries)
    _return_memory()
    num_slots = int(num_pages * POOL_SHARE)
    limit = num_slots * spec.page_nbytes + STAGED_NBYTES + MARGIN_NBYTES
    chunk_nbytes = get_codec(case.codec).layer_nbytes(spec) + 4
    slices = Slices(path, spec, chunk_nbytes, range(num_slots, num_pages))
    forget(slices.paths)
    with (
        memory_limit(limit) as group,
        _opened(path, spec, num_slots, tokens, memory_map=case.memory_map) as sequence,
    ):
        where = "" if group else ", no cgroup to be had: page cache dropped instead"
        before = sequence.stats()
        error = float(np.abs(_step(sequence, queries) - expected).max() / np.abs(expected).max())
        assert error <= TOLERANCE, f"{case}: differs from all in the pool by {error}"
        ours, peer = _rounds(
            bench,
            str(case),
            slices.paths,
            lambda: _step(sequence, queries),
            lambda: [slices.read(layer) for layer in range(spec.num_layers)],
        )
        after = sequence.stats()
        peak = group.peak_nbytes() if group else 0
    slices.close()
    unit = gigabytes_a_second((num_pages - num_slots) * spec.num_layers * chunk_nbytes)
    bench.add(
        f"{case}, bytes of slices",
        unit,
        unit.value(statistics.median(ours.seconds)),
        unit.value(statistics.median(peer.seconds)),
        PEER + where,
        target=TARGET,
    )
    bench.add(
        f"{case}, bytes from the device",
        gigabytes_a_second(10**9),
        ours.device_gb_s(),
        peer.device_gb_s() or None,
        "the same" if peer.device_gb_s() else "not run: nothing came from a device",
        target=TARGET,
    )
    attended = after.num_slices_attended - before.num_slices_attended
    loaded = after.num_slices_loaded - before.num_slices_loaded
    hit_rate, share = 100 * (1 - loaded / attended), 100 * num_slots / num_pages
    assert abs(hit_rate - share) <= 2, f"{case}: hit rate {hit_rate}, share of the pool {share}"
    bench.add(
        f"{case}, hits in the pool", PERCENT, hit_rate, share, "the pool's share of the pages"
    )
    bench.add(
        f"{case}, most memory of the cgroup", MEBIBYTES, peak / 2**20, limit / 2**20, "its limit"
    )


def _rounds(
    bench: Bench,
    name: str,
    paths: list[Path],
    ours: Callable[[], object],
    peer: Callable[[], object],
) -> tuple[Taken, Taken]:
    """Let both sides run in turn, the page cache of these files dropped before each."""
    sides = (ours, Taken([], [])), (peer, Taken([], []))
    task = bench.progress.add_task(name, total=2 * bench.rounds)
    for _ in range(bench.rounds):
        for work, taken in sides:
            forget(paths)
            before, began = _device_nbytes(), time.perf_counter()
            work()
            taken.seconds.append(time.perf_counter() - began)
            taken.device_nbytes.append(_device_nbytes() - before)
            bench.progress.advance(task)
    bench.progress.remove_task(task)
    return sides[0][1], sides[1][1]


class _Sequence:
    """A sequence and its cache."""

    def __init__(self, cache: pk.PagedKVCache, sequence: pk.Sequence) -> None:
        self.attend = sequence.attend
        self.stats = cache.stats


@contextmanager
def _opened(
    path: Path, spec: pk.KVSpec, num_slots: int, tokens: Array, *, memory_map: bool
) -> Iterator[_Sequence]:
    store = pk.PageStore.open(path, spec, memory_map=memory_map, read_threads=IN_FLIGHT)
    with (
        pk.PagedKVCache(spec, num_slots, store) as cache,
        cache.open_sequence(tokens) as sequence,
    ):
        assert sequence.num_tokens == len(tokens)
        yield _Sequence(cache, sequence)


def _fill(path: Path, spec: pk.KVSpec, case: Case, tokens: Array, bench: Bench) -> None:
    """Store a sequence of random numbers."""
    rng = np.random.default_rng(0)
    step = bench.count(256, 64)
    store = pk.PageStore.open(path, spec, codec=case.codec)
    task = bench.progress.add_task(f"{case}: filling the store", total=len(tokens))
    with (
        pk.PagedKVCache(spec, 4 * step // PAGE_TOKENS, store) as cache,
        cache.open_sequence() as sequence,
    ):
        for start in range(0, len(tokens), step):
            shape = (2, spec.num_layers, step, HEADS, CHANNELS)
            kv = rng.standard_normal(shape, dtype=np.float32).astype(spec.np_dtype)
            sequence.append(*kv, tokens[start : start + step])
            bench.progress.advance(task, step)
        cache.flush()
    bench.progress.remove_task(task)


def _step(sequence: _Sequence, queries: Array) -> Array:
    return np.stack([sequence.attend(layer, q) for layer, q in enumerate(queries)])


def _device_nbytes() -> int:
    """Bytes that came from devices for this process so far; 0 where nobody counts them."""
    return device_read_nbytes() or 0


def _return_memory() -> None:
    """Give what was freed back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def raw(bench: Bench) -> None:
    """Numbers as they are: 2 GiB of float32."""
    beyond_memory(bench, "raw")


def int8(bench: Bench) -> None:
    """INT8 records of as many numbers, read into staging buffers."""
    beyond_memory(bench, "int8")


def mapped(bench: Bench) -> None:
    """The same, memory-mapped."""
    beyond_memory(bench, "int8", memory_map=True)


if __name__ == "__main__":
    run("A context larger than memory", {"raw": raw, "int8": int8, "mapped": mapped})
