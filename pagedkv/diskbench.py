"""``bench_disk``: what a disk gives a store, against a plain file with the same bytes on it.

Every figure is a median of rounds in which the store and the plain file take turns. The plain file
is what one would write without a store: the pages' bytes one after another and one ``fsync``, read
back into the same memory, nothing checked. As the store does, one thread reads what is in memory,
and several read from the disk.
"""

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.errors import StoreError
from pagedkv.format import PageEntry, StoreRow
from pagedkv.spec import KVSpec, PageKey, format_nbytes, parse_nbytes
from pagedkv.store import PageStore

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with the steps that are done, and those that there are."""

CODECS = ("raw", "int8")
CASES = ("durable write", "warm read", "cold read")
NUM_ROUNDS = 5
NUM_THREADS = 4
_POOL_NBYTES = 64 * 2**20
"""About how much memory the pages are written from and read into; the disk gets it many times."""
_TOKEN_NBYTES = 128
"""Of one head of 64 float16 channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One figure.

    Args:
        case: What was done, by which codec.
        unit: Of ``ours`` and ``peer``: more is better.
        ours: The store's figure.
        peer: The plain file's.
        peer_name: What the peer is.
        ratio: How many times better the store is.
    """

    case: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    ratio: float


def bench_disk(
    folder: str | os.PathLike[str],
    *,
    size: int | str = "512MiB",
    page: int | str = "192KiB",
    num_rounds: int = NUM_ROUNDS,
    progress: Progress | None = None,
) -> list[BenchResult]:
    """Measure durable writes, warm and cold reads in a scratch folder below ``folder``.

    Figures are pool bytes (float16) a second, for the store with each codec and for the plain file.
    A cold read is a random order of pages after ``posix_fadvise(DONTNEED)``, which file systems in
    memory ignore. The scratch folder is removed whatever happens; it takes about twice ``size``.

    Args:
        folder: Where to measure.
        size: Bytes of pages.
        page: About how many bytes a page has: from 4 KiB.
        num_rounds: Of how many rounds each figure is the median.
        progress: Told how far it is.

    Raises:
        StoreError: There is no such folder, or no room in it, or the disk failed.
        ValueError: A size makes no sense.
    """
    where = Path(folder).absolute()
    spec = spec_of(parse_nbytes(page))
    num_pages = parse_nbytes(size) // spec.page_nbytes
    if num_pages < 1:
        raise ValueError(f"{size} is less than one page of {format_nbytes(spec.page_nbytes)}")
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}: it must be at least 1")
    if not files.is_folder(where, follow=True):
        raise StoreError(f"{where} is no folder")
    with files.translated(where, "measure in"):
        needed, free = 2 * num_pages * spec.page_nbytes, shutil.disk_usage(where).free
        if needed * 1.1 > free:
            raise StoreError(
                f"{where} has {format_nbytes(free)} free, but the measurement needs"
                f" {format_nbytes(needed * 1.1)}: give a smaller size"
            )
        scratch = Path(tempfile.mkdtemp(prefix="pagedkv-bench-", dir=where))
        try:
            return _Bench(scratch, spec, num_pages, num_rounds, progress).run()
        finally:
            shutil.rmtree(scratch)


def spec_of(page_nbytes: int) -> KVSpec:
    """A spec like that of a model, with pages of about so many bytes.

    ``ValueError`` if that is less than one layer of one head.
    """
    for num_heads in (8, 3, 1):
        layer_nbytes = 2 * 16 * num_heads * _TOKEN_NBYTES
        if page_nbytes >= 16 * layer_nbytes or num_heads == 1:
            break
    if page_nbytes < layer_nbytes:
        raise ValueError(f"a page of {page_nbytes} bytes is too small: give at least 4KiB")
    return KVSpec(
        num_layers=round(page_nbytes / layer_nbytes),
        num_kv_heads=num_heads,
        head_dim=64,
        page_tokens=16,
        dtype="float16",
        model="sha256:bench",
    )


class _Bench:
    """The pages, and the rounds that write and read them."""

    def __init__(
        self,
        scratch: Path,
        spec: KVSpec,
        num_pages: int,
        num_rounds: int,
        progress: Progress | None,
    ) -> None:
        self.scratch = scratch
        self.spec = spec
        self.num_rounds = num_rounds
        self.nbytes = num_pages * spec.page_nbytes
        pool_pages = min(num_pages, max(1, _POOL_NBYTES // spec.page_nbytes))
        rng = np.random.default_rng(0)
        shape = (pool_pages, *spec.page_shape)
        self.pages = rng.standard_normal(shape, np.float32).astype(np.float16)
        self.out = np.zeros_like(self.pages)
        self.at = np.arange(num_pages) % pool_pages
        self.order = rng.permutation(num_pages)
        self.entries = [
            PageEntry(key=PageKey(number.to_bytes(32, "little")), num_tokens=spec.page_tokens)
            for number in range(num_pages)
        ]
        self._progress = progress
        self._done = 0
        self._total = num_rounds * (len(CODECS) + 1)
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS)

    def run(self) -> list[BenchResult]:
        """All rounds."""
        with self._threads:
            for _ in range(self.num_rounds):
                self._step(self._plain)
                for codec in CODECS:
                    self._step(functools.partial(self._store, codec))
        results = []
        for case in CASES:
            peer = self._rate("plain", case)
            for codec in CODECS:
                ours = self._rate(codec, case)
                results.append(
                    BenchResult(
                        case=f"{case}, {codec}",
                        unit="GB/s",
                        ours=ours,
                        peer=peer,
                        peer_name="plain file",
                        ratio=ours / peer,
                    )
                )
        return results

    def _step(self, work: Callable[[], None]) -> None:
        work()
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _rate(self, who: str, case: str) -> float:
        return self.nbytes / statistics.median(self._seconds[who, case]) / 1e9

    def _timed(self, who: str, case: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        self._seconds.setdefault((who, case), []).append(time.perf_counter() - start)

    def _batches(self, order: Numbers) -> Iterator[Numbers]:
        """As many pages at a time as the memory holds."""
        for start in range(0, len(order), len(self.out)):
            yield order[start : start + len(self.out)]

    def _store(self, codec: str) -> None:
        path = self.scratch / "store.zarr"
        with PageStore.open(path, self.spec, codec=codec, read_threads=NUM_THREADS) as store:
            rows: list[StoreRow] = []
            self._timed(
                codec,
                "durable write",
                lambda: rows.extend(store.write(0, self.entries, self.pages, at=self.at)),
            )

            def read(order: Numbers, _: int) -> None:
                for batch in self._batches(order):
                    store.read([rows[n] for n in batch.tolist()], self.out, at=_first(batch))

            self._reads(codec, read, [file for file in path.rglob("c.*") if file.is_file()])
        shutil.rmtree(path)

    def _plain(self) -> None:
        path = self.scratch / "plain.bin"
        size = self.spec.page_nbytes
        self._timed("plain", "durable write", lambda: self._write_plain(path))
        with ExitStack() as stack:
            fd = stack.enter_context(files.reading(path))
            memory = self.out.reshape(len(self.out), -1).view(np.uint8)

            def read_part(pages: Numbers, first: int) -> None:
                for place, page in enumerate(pages.tolist(), first):
                    files.pread_into(fd, memory[place], page * size)

            def read(order: Numbers, num_threads: int) -> None:
                for batch in self._batches(order):
                    share = -(-len(batch) // num_threads)
                    firsts = range(0, len(batch), share)
                    parts = [batch[first : first + share] for first in firsts]
                    list(self._threads.map(read_part, parts, firsts))

            self._reads("plain", read, [path])
        path.unlink()

    def _write_plain(self, path: Path) -> None:
        memory = self.pages.reshape(len(self.pages), -1).view(np.uint8)
        with files.new_file(path) as (fd, temp):
            for batch in self._batches(self.at):
                files.write_all(fd, memory[: len(batch)].reshape(-1))
            files.sync_file(fd)
            temp.replace(path)
        files.sync_dir(path.parent)

    def _reads(self, who: str, read: Callable[[Numbers, int], None], paths: list[Path]) -> None:
        in_order = np.arange(len(self.at))
        read(in_order, 1)  # so that all of it is in memory
        self._timed(who, "warm read", lambda: read(in_order, 1))
        for path in paths:
            _drop_cached(path)
        self._timed(who, "cold read", lambda: read(self.order, NUM_THREADS))


def _first(batch: Numbers) -> Numbers:
    return np.arange(len(batch))


def _drop_cached(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with files.reading(path) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
