"""Reads of pages that are in the system's cache, and of pages that are not."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

import pagedkv as pk
from measure.compare import Bench, Target, Timed, gigabytes_a_second
from measure.pages import (
    Reader,
    aligned_array,
    chunk_files,
    empty_pool,
    random_pages,
    seconds_of,
    spec_of,
    write_store,
)
from measure.plain_file import PlainFile, blocks_of, forget

Array = npt.NDArray[Any]

IN_FLIGHT = 4
"""Requests that one call of ``PageStore.read`` has in flight; a peer gets as many threads."""

_COUNTS = {"192 KB": (256, 64), "2 MB": (64, 16)}
"""Pages that a round reads, and pages of a batch: two threads have as many batches each."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The same pages in a store and in a plain file, and the order in which a round reads them."""

    spec: pk.KVSpec
    store: pk.PageStore
    rows: Any
    plain: PlainFile
    order: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return len(self.rows) * self.spec.page_nbytes

    def reader(self, pages: Array, places: Sequence[int], batch: int) -> Reader:
        """Reads the pages in their order, each into its place in an array."""
        return Reader(self.store, self.rows, self.order, pages, places, batch)


def warm_reads(bench: Bench) -> None:
    """Into the pool and into the caller's array; one thread and two; both sizes."""
    for size in _COUNTS:
        with _Stored(bench, size) as (stored, batch), ThreadPoolExecutor(2) as threads:
            for num_threads, name in ((1, "one thread"), (2, "two threads")):
                into = f"warm read into {{}}, {size} float16, {batch} a batch, {name}"
                _warm_into_pool(bench, into, stored, batch, threads, num_threads)
                _warm_into_array(bench, into, stored, batch, threads, num_threads)
            into = f"warm read into {{}}, {size} float16, {batch} a batch, one thread"
            _warm_into_array(bench, into, stored, batch, threads, 1, aligned=False)
            one = f"warm read into {{}}, {size} float16, one page at a time, one thread"
            _warm_into_pool(bench, one, stored, 1, threads, 1)
            _warm_into_array(bench, one, stored, 1, threads, 1)


def cold_reads(bench: Bench) -> None:
    """Random pages that only the disk has: one request after another, several threads, batches."""
    for size in _COUNTS:
        with _Stored(bench, size) as (stored, batch), ThreadPoolExecutor(4) as threads:
            case = f"cold random read, {size} float16, one page at a time, {{}}"
            _cold(bench, case.format("one thread"), stored, 1, threads, 1, 1)
            _cold(bench, case.format("four threads"), stored, 1, threads, 4, 4)
            case = f"cold random read, {size} float16, {batch} a batch"
            _cold(bench, case, stored, batch, threads, 1, IN_FLIGHT)


def cold(paths: Sequence[Any], work: Callable[[], Any]) -> Timed:
    """Times work that must read these files from the disk."""

    def timed() -> float:
        forget(paths)
        return seconds_of(work)

    return timed


class _Stored:
    """Makes what a group of cases reads, and takes it away afterwards."""

    def __init__(self, bench: Bench, size: str) -> None:
        self._folder = bench.folder / "reads"
        self._folder.mkdir()
        self._num_pages, self._batch = (bench.count(count, 4) for count in _COUNTS[size])
        self._spec = spec_of(size)

    def __enter__(self) -> tuple[Stored, int]:
        pages = random_pages(self._spec, self._num_pages)
        store, rows = write_store(self._folder / "ours.zarr", self._spec, pages, batch=self._batch)
        self._stored = Stored(
            spec=self._spec,
            store=store,
            rows=rows,
            plain=PlainFile(self._folder / "plain", pages),
            order=np.random.default_rng(1).permutation(len(pages)).tolist(),
        )
        os.sync()
        return self._stored, self._batch

    def __exit__(self, *exception: object) -> None:
        self._stored.plain.close()
        self._stored.store.close()
        shutil.rmtree(self._folder)


def _warm_into_pool(
    bench: Bench,
    case: str,
    stored: Stored,
    batch: int,
    threads: ThreadPoolExecutor,
    num_threads: int,
) -> None:
    count = len(stored.rows)
    pool = empty_pool(stored.spec, count)
    slots = np.random.default_rng(2).permutation(count).tolist()
    reader = stored.reader(np.moveaxis(pool, 2, 0), slots, batch)
    buffers = [blocks_of(pool[:, :, slot]) for slot in slots]
    requests = list(zip(stored.order, buffers, strict=True))

    def scatter(part: int, num_parts: int) -> None:
        for page, blocks in requests[part::num_parts]:
            stored.plain.read(page, blocks)

    peer = "plain file, preadv scattered into the pool, no CRC"
    bench.compare(
        case.format("the pool"),
        gigabytes_a_second(stored.nbytes),
        _in_threads(threads, num_threads, reader.read),
        {peer: _in_threads(threads, num_threads, scatter)},
        targets={peer: Target(ratio=0.9)},
    )


def _warm_into_array(
    bench: Bench,
    case: str,
    stored: Stored,
    batch: int,
    threads: ThreadPoolExecutor,
    num_threads: int,
    *,
    aligned: bool = True,
) -> None:
    count = len(stored.rows)
    shape, dtype = (count, *stored.spec.page_shape), stored.spec.np_dtype
    out = aligned_array(shape, dtype) if aligned else np.ones(shape, dtype)
    reader, requests = _into(out, stored, batch)

    def read(part: int, num_parts: int) -> None:
        for page, buffers, _ in requests[part::num_parts]:
            stored.plain.read(page, buffers)

    def read_and_check(part: int, num_parts: int) -> None:
        for page, buffers, place in requests[part::num_parts]:
            stored.plain.read(page, buffers)
            google_crc32c.value(out[place])

    checked = "plain file, preadv and CRC32C"
    bench.compare(
        case.format("an array" if aligned else "an array as numpy allocates it"),
        gigabytes_a_second(stored.nbytes),
        _in_threads(threads, num_threads, reader.read),
        {
            checked: _in_threads(threads, num_threads, read_and_check),
            "plain file, preadv, no CRC": _in_threads(threads, num_threads, read),
        },
        targets={checked: Target(ratio=0.9)},
    )


def _cold(
    bench: Bench,
    case: str,
    stored: Stored,
    batch: int,
    threads: ThreadPoolExecutor,
    num_threads: int,
    num_peer_threads: int,
) -> None:
    out = aligned_array((len(stored.rows), *stored.spec.page_shape), stored.spec.np_dtype)
    reader, requests = _into(out, stored, batch)

    def read(part: int, num_parts: int) -> None:
        for page, buffers, _ in requests[part::num_parts]:
            stored.plain.read(page, buffers)

    peer = f"plain file, preadv, no CRC, {num_peer_threads} in flight"
    plain = [stored.plain.path]
    bench.compare(
        case,
        gigabytes_a_second(stored.nbytes),
        cold(chunk_files(stored.store), lambda: _run_threads(threads, num_threads, reader.read)),
        {peer: cold(plain, lambda: _run_threads(threads, num_peer_threads, read))},
        targets={peer: Target(ratio=0.9)},
    )


def _into(
    out: Array, stored: Stored, batch: int
) -> tuple[Reader, list[tuple[int, list[memoryview], int]]]:
    """What reads the store's pages into a contiguous array; the plain file's pages and memory."""
    places = list(range(len(out)))
    lines = out.reshape(len(out), -1).view(np.uint8)
    requests = [
        (page, [memoryview(lines[place])], place)
        for page, place in zip(stored.order, places, strict=True)
    ]
    return stored.reader(out, places, batch), requests


def _in_threads(
    threads: ThreadPoolExecutor, num_threads: int, work: Callable[[int, int], Any]
) -> Timed:
    return lambda: seconds_of(lambda: _run_threads(threads, num_threads, work))


def _run_threads(
    threads: ThreadPoolExecutor, num_threads: int, work: Callable[[int, int], Any]
) -> None:
    """Do all parts of the work, each in its thread; the only one in the caller's."""
    if num_threads == 1:
        work(0, 1)
    else:
        list(threads.map(lambda part: work(part, num_threads), range(num_threads)))
