"""Writers that are killed at any moment: what they flushed is there, and the store opens."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kill_writer import MAX_SEGMENT_ROWS, key_of, pages_of, spec_of
from kv_samples import Array, bits
from store_samples import python

from pagedkv import KVSpec, PageStore
from pagedkv import format as fmt

Nursery = subprocess.Popen[str]

KINDS = {
    "raw float32": ("raw", "float32", 0),
    "raw bfloat16": ("raw", "bfloat16", 0),
    "int8": ("int8", "float16", 0),
    "lossless": ("lossless", "float32", 0),
    "bounded": ("raw", "float32", 300_000),
}
KILLS_EACH, SOAK_KILLS_EACH = 5, 100


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    process = python("import kill_writer; kill_writer.main()")
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", MAX_SEGMENT_ROWS)


class Victim:
    """A writer that is killed."""

    def __init__(self, nursery: Nursery, *words: object) -> None:
        self._nursery = nursery
        self.flushed: list[range] = []
        self.is_alive = True
        assert nursery.stdin is not None
        nursery.stdin.write(" ".join(map(str, words)) + "\n")
        nursery.stdin.flush()
        self.pid = int(self._line()[1])

    def wait_for(self, num_flushes: int) -> None:
        """Wait until it has flushed so often."""
        while len(self.flushed) < num_flushes and self.is_alive:
            self._next()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.is_alive:
            self._next()

    def _next(self) -> None:
        word, *rest = self._line()
        if word == "flushed":
            self.flushed.append(range(int(rest[0]), int(rest[1])))
        elif word == "ended":
            self.is_alive = False
            assert rest == [str(-signal.SIGKILL)]
        else:
            pytest.fail(" ".join([word, *rest]))

    def _line(self) -> list[str]:
        assert self._nursery.stdout is not None
        line = self._nursery.stdout.readline()
        if not line:
            assert self._nursery.stderr is not None
            pytest.fail(self._nursery.stderr.read())
        return line.split()


class Expected:
    """What each page comes back as, learned from a store that nobody disturbs."""

    def __init__(self, folder: Path, spec: KVSpec, codec: str) -> None:
        self.spec = spec
        self._store = PageStore.open(folder, spec, codec=codec)
        self._pages: list[Array] = []

    def pages(self, numbers: list[int]) -> Array:
        while numbers and numbers[-1] >= len(self._pages):
            self._learn(len(self._pages), len(self._pages) + 300)
        return np.stack([self._pages[number] for number in numbers])

    def close(self) -> None:
        self._store.close()

    def _learn(self, start: int, stop: int) -> None:
        keys = range(start, stop)
        entries = [fmt.PageEntry(key=key_of(n), num_tokens=self.spec.page_tokens) for n in keys]
        pages = list(pages_of(self.spec, start, stop))
        rows = self._store.write(0, entries, pages)
        self._store.read(rows, pages)
        self._pages += pages


def pages_found(store: PageStore, numbers: range, expected: Expected) -> list[int]:
    """Numbers of the pages that the store has, each of which is as expected."""
    rows = {n: row for n in numbers if (row := store.find(key_of(n))) is not None}
    out = np.empty((len(rows), *expected.spec.page_shape), expected.spec.np_dtype)
    store.read(list(rows.values()), list(out))
    assert not rows or bits(out) == bits(expected.pages(list(rows)))
    return list(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_every_flushed_page_is_there_and_the_next_writer_goes_on(
    memory_folder: Path, nursery: Nursery, kind: str, soak: bool
) -> None:
    codec, dtype, max_nbytes = KINDS[kind]
    spec = spec_of(dtype)
    try:
        expected = Expected(memory_folder / "expected", spec, codec)
    except ValueError:
        pytest.skip(f"there is no codec {codec} yet")
    rng = random.Random(kind)
    flushed: set[int] = set()
    path, first = Path(), 0
    for kill in range(SOAK_KILLS_EACH if soak else KILLS_EACH):
        if kill % 25 == 0:
            path, first = memory_folder / f"{kill}.zarr", 0
            flushed.clear()
        victim = Victim(nursery, path, codec, dtype, max_nbytes, first, rng.randrange(10**6))
        victim.wait_for(rng.choice([0, 0, 1, 5, 20]))
        time.sleep(rng.random() * 0.03)
        victim.kill()
        for numbers in victim.flushed:
            flushed |= set(numbers)
            first = numbers.stop
        first += 8  # what it was about to write when it was killed may be there too
        for mode in ("r", "a") if path.exists() and flushed else ("a",):
            with PageStore.open(path, spec, mode=mode, codec=codec) as store:
                found = pages_found(store, range(first), expected)
                assert max_nbytes or flushed <= set(found)
                store.check_invariants()
        assert not [p for p in path.rglob("*") if p.name.startswith(".tmp-")]
        if max_nbytes:
            assert sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) <= max_nbytes
    assert flushed
    expected.close()
