"""The page store beside what others keep pages in: Zarr's writers, files, SQLite, LMDB.

    python benchmarks/peers.py [--part NAME] [--rounds 5] [--folder DIR] [--json]

``docs/benchmarks.md`` says what each case measures, and how.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from measure.compare import Bench, Target, Timed, microseconds_a_page, run
from measure.pages import Keys, aligned_array, random_pages, seconds_of, spec_of
from measure.systems import LMDB, Files, Ours, SQLite, System, Zarr

import pagedkv as pk

Array = npt.NDArray[Any]

ZARR_PYTHON = "zarr-python"
BATCH = 64
NUM_READ = 64
"""Pages that a round reads: single ones cost zarr-python milliseconds."""
NUM_SINGLE = 8
"""Pages that a round writes one at a time."""


def compare(bench: Bench, size: str) -> None:
    """Writes and warm reads of all systems, in batches and one page at a time."""
    folder = bench.folder / "peers"
    folder.mkdir()
    spec = spec_of(size)
    ours, *others = _systems(bench, folder, spec)
    pages = random_pages(spec, bench.count(BATCH, 4))
    targets = {s.name: Target(ratio=10) for s in others if s.name.startswith(f"{ZARR_PYTHON},")}

    def cases(
        case: str, timed: Callable[[System], Timed], num_pages: int, peers: Sequence[System]
    ) -> None:
        bench.compare(
            case,
            microseconds_a_page(num_pages),
            timed(ours),
            {system.name: timed(system) for system in peers},
            targets=targets,
        )

    keys = Keys()
    for batch, count, calls in (
        (len(pages), len(pages), f"{len(pages)} in a batch"),
        (1, min(NUM_SINGLE, len(pages)), "one at a time"),
    ):
        write = partial(_write, keys=keys, pages=pages[:count], batch=batch)
        cases(f"write {size} pages, {calls}", write, count, others)
    stored = keys.take(bench.count(NUM_READ, 4))
    for system in (ours, *others):
        system.write(stored, pages[: len(stored)])
    os.sync()
    # How they were written makes no difference to what is read.
    readers = [s for s in others if not (isinstance(s, Files | Zarr) and s.syncs)]
    for batch, calls in ((len(stored), f"{len(stored)} in a batch"), (1, "one at a time")):
        read = partial(_read, keys=stored, pages=pages, batch=batch)
        cases(f"warm read of {size} pages, {calls}", read, len(stored), readers)
    for system in (ours, *others):
        system.close()
    shutil.rmtree(folder)


def _systems(bench: Bench, folder: Any, spec: pk.KVSpec) -> list[System]:
    """All of them, empty, ours first."""
    ours = Ours(folder / "ours.zarr", spec)
    capacity = (bench.rounds + 2) * (NUM_SINGLE + 1)
    layout = ours.layout()
    pipelines = {
        ZARR_PYTHON: "zarr.core.codec_pipeline.BatchedCodecPipeline",
        "zarrs": "zarrs.ZarrsCodecPipeline",
    }
    return [
        ours,
        *(
            Zarr(folder / f"{name}-{sync}", spec, layout, capacity, pipeline, name, sync=sync)
            for name, pipeline in pipelines.items()
            for sync in (False, True)
        ),
        Files(folder / "files", sync=False),
        Files(folder / "files-synced", sync=True),
        SQLite(folder / "pages.sqlite"),
        LMDB(folder / "lmdb"),
    ]


def _write(system: System, keys: Keys, pages: Array, batch: int) -> Timed:
    """Times writing the pages under new keys."""

    def timed() -> float:
        starts = range(0, len(pages), batch)
        calls = [(keys.take(batch), pages[at : at + batch]) for at in starts]
        return seconds_of(lambda: [system.write(fresh, part) for fresh, part in calls])

    return timed


def _read(system: System, keys: list[pk.PageKey], pages: Array, batch: int) -> Timed:
    """Times reading the pages in random order; what comes back is compared."""
    order = np.random.default_rng(1).permutation(len(keys))
    wanted = [keys[number] for number in order]
    out = aligned_array((len(keys), *pages.shape[1:]), pages.dtype)

    def work() -> None:
        for at in range(0, len(wanted), batch):
            system.read(wanted[at : at + batch], out[at : at + batch])

    def timed() -> float:
        out.view(np.uint8)[...] = 0
        seconds = seconds_of(work)
        assert np.array_equal(out, pages[order]), f"{system.name} read wrong bytes"
        return seconds

    return timed


PARTS = {
    "192-KB": partial(compare, size="192 KB"),
    "4-KB": partial(compare, size="4 KB"),
}

if __name__ == "__main__":
    run("The page store beside other stores", PARTS)
