"""The prototype's case: 20,000 pages of 15 numbers, and a pool for half of them."""

import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from measure.compare import Bench, Target, Timed, microseconds_a_page
from measure.pages import Keys, seconds_of

Array = npt.NDArray[Any]

_SOURCE = Path(__file__).parent.parent / "prototype.cpp"
_Program = Callable[[], tuple[float, ...]]
"""Runs the C++ program; the seconds of all its puts, and of all its reads."""

TINY = pk.KVSpec(
    num_layers=1,
    num_kinds=1,
    num_kv_heads=1,
    head_dim=15,
    page_tokens=1,
    dtype="float32",
    model="random numbers",
)
"""Pages of 60 bytes."""


def tiny_pages(bench: Bench) -> None:
    """Puts with eviction, and random reads from the store; one at a time and in batches."""
    folder = bench.folder / "tiny"
    folder.mkdir()
    num_pages = bench.count(20_000, 80)
    tiny = _Tiny(bench, folder, num_pages)
    name, program = _prototype(folder, num_pages)
    put_peer, read_peer = (
        {name: None if program is None else lambda figure=figure: program()[figure]}
        for figure in (0, 1)
    )
    unit = microseconds_a_page(num_pages)
    many = num_pages // 20
    for batch, calls in ((1, "one at a time"), (many, f"{many:,} at a time")):
        case = f"tiny pages: put with eviction, {calls}"
        put = tiny.put(batch, flush=False)
        bench.compare(case, unit, put, put_peer, targets={name: Target(at_most=10)})
        case = f"tiny pages: put with eviction, and flush, {calls}"
        bench.compare(case, unit, tiny.put(batch, flush=True), put_peer)
    unit = microseconds_a_page(num_pages // 2)
    one_at_a_time, in_a_batch = {name: Target(at_most=9)}, {name: Target(at_most=1)}
    with tiny.filled() as cache:
        assert cache.store is not None
        case = "tiny pages: random read from the store, {}"
        one, all_ = (tiny.read(cache.store, batch) for batch in (1, num_pages // 2))
        bench.compare(case.format("one at a time"), unit, one, read_peer, targets=one_at_a_time)
        bench.compare(case.format("in one batch"), unit, all_, read_peer, targets=in_a_batch)
        case = "tiny pages: random get of pages not in the pool, {}"
        path = cache.store.path
        one, some = (tiny.get(path, batch) for batch in (1, num_pages // 2))
        bench.compare(case.format("one at a time"), unit, one, read_peer, targets=one_at_a_time)
        bench.compare(case.format("in one batch"), unit, some, read_peer, targets=in_a_batch)
    shutil.rmtree(folder)


class _Tiny:
    """The pages, and our ways of putting and reading them."""

    def __init__(self, bench: Bench, folder: Path, num_pages: int) -> None:
        self._folder = folder
        self._bench = bench
        self._keys = Keys().take(num_pages)
        self._pages = np.random.default_rng(0).random((num_pages, *TINY.page_shape), np.float32)
        self._stores = itertools.count()

    @property
    def num_slots(self) -> int:
        """Slots for half of the pages."""
        return len(self._keys) // 2

    def put(self, batch: int, *, flush: bool) -> Timed:
        """Times putting all pages into an empty cache with an empty store."""
        starts = range(0, len(self._keys), batch)
        calls = [(self._keys[at : at + batch], self._pages[at : at + batch]) for at in starts]

        def timed() -> float:
            with self._new_cache() as cache:

                def work() -> None:
                    for keys, pages in calls:
                        cache.put(keys, pages)
                    if flush:
                        cache.flush()

                seconds = seconds_of(work)
            shutil.rmtree(cache.store.path if cache.store else "")
            return seconds

        return timed

    def filled(self) -> pk.PagedKVCache:
        """A cache whose store has all pages and whose pool has the second half of them."""
        cache = self._new_cache()
        cache.put(self._keys, self._pages)
        cache.flush()
        return cache

    def read(self, store: pk.PageStore, batch: int) -> Timed:
        """Times finding and reading half of the pages in the store, in random order."""
        order = self._order(0)
        calls = [
            [self._keys[number] for number in order[at : at + batch]]
            for at in range(0, len(order), batch)
        ]
        out = np.zeros((batch, *TINY.page_shape), np.float32)
        to = [out[: len(keys)] for keys in calls]

        def work() -> None:
            for keys, pages in zip(calls, to, strict=True):
                store.read(store.find_rows(keys), pages)

        def timed() -> float:
            seconds = seconds_of(work)
            expected = self._pages[order[len(order) - len(calls[-1]) :]]
            assert np.array_equal(out[: len(calls[-1])], expected), "the store read wrong bytes"
            return seconds

        return timed

    def get(self, path: Path, batch: int) -> Timed:
        """Times getting the half of the pages that is not in the pool, which has the other half.

        Each round opens a cache of its own: a page that is read a second time gets into the pool.
        """
        out = np.zeros((batch, *TINY.page_shape), np.float32)
        order, others = self._order(0), self._order(1)
        calls = [
            [self._keys[number] for number in order[at : at + batch]]
            for at in range(0, len(order), batch)
        ]

        def timed() -> float:
            store = pk.PageStore.open(path, TINY, mode="r")
            with pk.PagedKVCache(TINY, self.num_slots, store) as cache:
                cache.get([self._keys[number] for number in others])
                before = cache.stats().num_store_hits

                def work() -> None:
                    for keys in calls:
                        cache.get(keys, out=out[: len(keys)])

                seconds = seconds_of(work)
                num_hits = cache.stats().num_store_hits - before
            assert num_hits == len(order), f"{num_hits} of {len(order)} pages came from the store"
            return seconds

        return timed

    def _new_cache(self) -> pk.PagedKVCache:
        path = self._folder / f"{next(self._stores)}.zarr"
        return pk.PagedKVCache(TINY, self.num_slots, pk.PageStore.open(path, TINY))

    def _order(self, half: int) -> list[int]:
        order: Array = np.random.default_rng(1).permutation(self.num_slots) + half * self.num_slots
        return list(order.tolist())


def _prototype(folder: Path, num_pages: int) -> "tuple[str, _Program | None]":
    """The C++ program's name, and what runs it; the reason and None if it cannot be built."""
    name = "C++, one file a block, no fsync, no checksum"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return f"{name}: not run, there is no C++ compiler", None
    binary = folder / "prototype"
    built = subprocess.run(
        [compiler, "-O2", "-std=c++17", "-o", str(binary), str(_SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        return f"{name}: not run, {compiler} failed: {built.stderr[:200]}", None

    def program() -> tuple[float, ...]:
        blocks = folder / "blocks"
        blocks.mkdir()
        numbers = (num_pages, num_pages // 2, num_pages // 2, TINY.head_dim)
        printed = subprocess.run(
            [str(binary), str(blocks), *map(str, numbers)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        shutil.rmtree(blocks)
        return tuple(float(word) for word in printed.split()[:2])

    return name, program
