"""Pages to measure with, and the few calls of the store that the benchmarks make."""

import hashlib
import math
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Array = npt.NDArray[Any]


def spec_of(name: str) -> pk.KVSpec:
    """A float16 spec with pages of that size, ``"4 KB"``, ``"192 KB"`` or ``"2 MB"``."""
    layers, heads, channels = {"4 KB": (2, 1, 32), "192 KB": (12, 4, 64), "2 MB": (32, 8, 128)}[
        name
    ]
    return pk.KVSpec(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=channels,
        page_tokens=16,
        dtype="float16",
        model="random numbers",
    )


def random_pages(spec: pk.KVSpec, count: int, seed: int = 0) -> Array:
    """``(page, layer, kind, token, head, channel)``, normally distributed, C-contiguous."""
    rng = np.random.default_rng(seed)
    shape = (count, *spec.page_shape)
    return rng.standard_normal(shape, dtype=np.float32).astype(spec.np_dtype)


def aligned_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array that begins at a page of memory, all of which the system has given.

    numpy's own begin 16 bytes behind one, and on some machines the system's copies into such
    memory are several times slower.
    """
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    array: Array = np.frombuffer(memory, dtype=dtype).reshape(shape)
    array.view(np.uint8)[...] = 1
    return array


def empty_pool(spec: pk.KVSpec, num_slots: int) -> Array:
    """``(layer, kind, slot, token, head, channel)`` in memory that is aligned to its pages."""
    shape = (*spec.page_shape[:2], num_slots, *spec.page_shape[2:])
    return aligned_array(shape, spec.np_dtype)


class Keys:
    """Page keys that were never given before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[pk.PageKey]:
        """The next ``count`` keys."""
        self._next += count
        numbers = range(self._next - count, self._next)
        return [pk.PageKey(hashlib.sha256(b"page %d" % number).digest()) for number in numbers]


def entries_of(spec: pk.KVSpec, keys: Sequence[pk.PageKey]) -> list[pk.PageEntry]:
    """Catalogue entries of full pages without tokens."""
    return [pk.PageEntry(key=key, num_tokens=spec.page_tokens) for key in keys]


def write_store(
    path: Path, spec: pk.KVSpec, pages: Array, *, codec: pk.Codec | None = None, batch: int = 64
) -> tuple[pk.PageStore, Any]:
    """A new store that holds the pages, written in batches, and where they are (``find_rows``)."""
    store = pk.PageStore.open(path, spec, codec=codec)
    keys = Keys().take(len(pages))
    entries = entries_of(spec, keys)
    for at in range(0, len(pages), batch):
        store.write(0, entries[at : at + batch], pages[at : at + batch])
    return store, store.find_rows(keys)


class Reader:
    """Reads rows into places of one array whose first axis is the page; prepared beforehand.

    Args:
        store: Where from.
        rows: Where the pages are, as ``find_rows`` gives it.
        order: Which of the rows, in which order.
        pages: Where to: ``(page, layer, kind, token, head, channel)``, maybe strided.
        places: For each of these an index into ``pages``.
        batch: Rows of one call.
    """

    def __init__(
        self,
        store: pk.PageStore,
        rows: Any,
        order: Sequence[int],
        pages: Array,
        places: Sequence[int],
        batch: int,
    ) -> None:
        self._store = store
        self._pages = pages
        self._calls: list[tuple[Any, Any]] = []
        for start in range(0, len(order), batch):
            which, at = order[start : start + batch], places[start : start + batch]
            self._calls.append((rows[which], np.array(at, np.int64)))

    def read(self, part: int = 0, num_parts: int = 1) -> None:
        """Make the calls, or every ``num_parts``-th from number ``part`` on."""
        for rows, to in self._calls[part::num_parts]:
            self._store.read(rows, self._pages, at=to)


def chunk_files(store: pk.PageStore) -> list[Path]:
    """The segment files."""
    return sorted(path for path in store.path.glob("lane-*/group-*/kv/c.*") if path.is_file())


def seconds_of(work: Any) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
