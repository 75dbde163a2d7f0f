"""Durable writes: ``PageStore.write`` and ``flush`` against a plain file with the same bytes."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

import pagedkv as pk
from measure.compare import Bench, Target, gigabytes_a_second
from measure.pages import Keys, entries_of, random_pages, seconds_of, spec_of
from measure.plain_file import write_durably

Array = npt.NDArray[Any]

PAGES = {"192 KB": 64, "2 MB": 16}
"""Pages of a batch."""


def durable_writes(bench: Bench) -> None:
    """Batches and single pages of both sizes."""
    for size, batch in PAGES.items():
        spec = spec_of(size)
        pages = random_pages(spec, bench.count(batch, 3))
        _compare_writes(
            bench, f"durable write, {size} float16, {len(pages)} a batch", spec, pages, 2
        )
        single = f"durable write, {size} float16, one page at a time"
        _compare_writes(bench, single, spec, pages[:1], bench.count(32, 2))
        together = f"durable put and flush, {size} float16, {len(pages)} pages"
        _compare_flush(bench, together, spec, pages)


def write_each(
    store: pk.PageStore, keys: Keys, pages: Array, num_batches: int
) -> Callable[[], float]:
    """Times writing the pages so many times over, each time under new keys."""

    def timed() -> float:
        spec = store.specs[0]
        batches = [entries_of(spec, keys.take(len(pages))) for _ in range(num_batches)]
        given = pages
        return seconds_of(lambda: [store.write(0, entries, given) for entries in batches])

    return timed


def _compare_writes(
    bench: Bench, case: str, spec: pk.KVSpec, pages: Array, num_batches: int
) -> None:
    folder = bench.folder / "durable"
    folder.mkdir()
    with pk.PageStore.open(folder / "ours.zarr", spec) as store:
        bench.compare(
            case,
            gigabytes_a_second(num_batches * pages.nbytes),
            write_each(store, Keys(), pages, num_batches),
            {
                f"plain file, fsync{' of file and folder' if sync_folder else ''}"
                f"{', CRC32C' if checksum else ''}": _write_files(
                    folder, pages, num_batches, sync_folder=sync_folder, checksum=checksum
                )
                for sync_folder, checksum in itertools.product((False, True), repeat=2)
            },
            targets={"plain file, fsync": Target(ratio=0.9)},
        )
    shutil.rmtree(folder)


def _compare_flush(bench: Bench, case: str, spec: pk.KVSpec, pages: Array) -> None:
    folder = bench.folder / "flush"
    folder.mkdir()
    keys = Keys()
    store = pk.PageStore.open(folder / "ours.zarr", spec)
    with pk.PagedKVCache(spec, 2 * len(pages), store) as cache:

        def put_and_flush() -> float:
            fresh = keys.take(len(pages))

            def work() -> None:
                cache.put(fresh, pages)
                cache.flush()

            return seconds_of(work)

        bench.compare(
            case,
            gigabytes_a_second(pages.nbytes),
            put_and_flush,
            {"plain file, fsync": _write_files(folder, pages, 1)},
            targets={"plain file, fsync": Target(ratio=0.9)},
        )
    shutil.rmtree(folder)


def _write_files(
    folder: Path,
    pages: Array,
    num_files: int,
    *,
    sync_folder: bool = False,
    checksum: bool = False,
) -> Callable[[], float]:
    """Times writing the pages into so many new files; these stay, as ours do."""
    place = folder / f"plain-{sync_folder:d}{checksum:d}"
    place.mkdir()
    numbers = itertools.count()

    def timed() -> float:
        paths = [place / str(next(numbers)) for _ in range(num_files)]

        def work() -> None:
            for path in paths:
                write_durably(path, pages, sync_folder=sync_folder, checksum=checksum)

        return seconds_of(work)

    return timed
