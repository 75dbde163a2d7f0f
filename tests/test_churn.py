"""Four writers and four readers of one store at once: only what had to go is gone."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from churn_workers import NUM_PROMPTS, SPEC, page_of, pages_of, tokens_of
from store_samples import python

from pagedkv import PagedKVCache, PageStore, page_keys
from pagedkv.evictions import NUM_ENTRIES, EvictionRing
from pagedkv.format import EVICTED

MAX_NBYTES = 3_000_000


def sizes_below(root: Path) -> dict[tuple[int, int], int]:
    """Size of every file by device and inode."""
    sizes = {}
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = Path(folder, name).lstat()
            except FileNotFoundError:
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sizes


def churn(path: Path, max_nbytes: int, seconds: float) -> tuple[list[dict[str, Any]], list[int]]:
    """What the processes report, and how many bytes the store had at many moments.

    A walk takes its time; what two walks both saw was there all the while between them.
    """
    reports = path.with_name("reports.json")
    code = "import churn_workers; churn_workers.main()"
    process = python(code, path, max_nbytes, seconds, reports)
    samples = []
    try:
        while process.poll() is None:
            before, after = sizes_below(path), sizes_below(path)
            both = before.keys() & after.keys()
            samples.append(sum(min(before[inode], after[inode]) for inode in both))
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()
    return json.loads(reports.read_text()), samples


def evicted_from(path: Path) -> set[bytes]:
    """Keys that the rings of all lanes name; none of the rings may have overflowed."""
    rings = [EvictionRing(place).entries() for place in path.glob(f"lane-*/group-*/{EVICTED}")]
    assert all(len(ring) < NUM_ENTRIES for ring in rings), "the run is too long for the rings"
    return {page.key for ring in rings for page in ring}


@pytest.mark.parametrize("max_nbytes", [MAX_NBYTES, 0])
def test_nothing_flushed_is_lost_but_by_eviction_and_the_bound_holds(
    memory_folder: Path, max_nbytes: int, soak: bool
) -> None:
    path = memory_folder / "cache.zarr"
    PageStore.open(path, SPEC, max_nbytes=max_nbytes or None).close()
    reports, samples = churn(path, max_nbytes, 60 if soak else 4)
    if failed := [report["error"] for report in reports if report["kind"] == "failed"]:
        pytest.fail("\n\n".join(failed))
    writers = [report for report in reports if report["kind"] == "writer"]
    flushed = {bytes.fromhex(key) for report in writers for key in report["flushed"]}
    assert flushed
    with PageStore.open(path, SPEC, mode="r") as store:
        missing = {key for key in flushed if store.find(key) is None}
        for key in flushed - missing:
            out = np.empty((1, *SPEC.page_shape), np.float32)
            store.read([store.find(key)], list(out))
            assert np.array_equal(out[0], page_of(key))
    if not max_nbytes:
        assert not missing
        return
    assert max(samples) <= max_nbytes
    assert sum(sizes_below(path).values()) <= max_nbytes
    if missing and not soak:
        assert missing <= evicted_from(path)
    with PagedKVCache(SPEC, 8, PageStore.open(path, SPEC)) as cache:  # the bound outlives them
        for prompt in range(0, NUM_PROMPTS, 10):
            keys = page_keys(SPEC, tokens_of(prompt))
            cache.put(keys, pages_of(keys))
            assert sum(sizes_below(path).values()) <= max_nbytes
            assert cache.store is not None
            assert cache.store.nbytes <= max_nbytes
