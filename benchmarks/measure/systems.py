"""What else keeps pages on a disk, by key: our store, Zarr's writers, files, SQLite, LMDB.

Each takes and gives 32-byte keys and arrays ``(page, layer, kind, token, head, channel)`` in the
calling thread. ``write`` returns when the pages are as durable as ``name`` says.
"""

import itertools
import os
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

import pagedkv as pk
from measure.pages import entries_of

Array = npt.NDArray[Any]


class System(Protocol):
    """A place for pages.

    Attributes:
        syncs: Whether a write waits for the disk.
    """

    syncs: bool

    @property
    def name(self) -> str:
        """What it is, and what a write survives."""

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """Keep pages under new keys, in one batch."""

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """Read pages into a contiguous array."""

    def close(self) -> None:
        """Give back what is open."""


class Ours:
    """``PageStore``."""

    name = "PagedKV, fsync, CRC32C"
    syncs = True

    def __init__(self, path: Path, spec: pk.KVSpec) -> None:
        self._spec = spec
        self.store = pk.PageStore.open(path, spec)

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """One segment."""
        self.store.write(0, entries_of(self._spec, keys), pages)

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """Find the rows and read them."""
        self.store.read(self.store.find_rows(keys), out)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a shard and of an inner chunk."""
        (kv,) = self.store.path.glob("lane-*/group-*/kv")
        array = zarr.open_array(kv, mode="r")
        assert array.shards is not None
        return array.shards, array.chunks


class Zarr:
    """zarr-python on arrays like ours: same shards, chunks and codecs; every batch a new shard.

    Args:
        path: A new folder.
        spec: Geometry of a page.
        layout: Shapes of a shard and of an inner chunk.
        capacity: Most batches that will be written.
        pipeline: Class that encodes and decodes, as Zarr's configuration names it.
        name: Of the pipeline.
        sync: Wait for the disk after every batch, which Zarr itself never does.
    """

    def __init__(
        self,
        path: Path,
        spec: pk.KVSpec,
        layout: tuple[tuple[int, ...], tuple[int, ...]],
        capacity: int,
        pipeline: str,
        name: str,
        *,
        sync: bool,
    ) -> None:
        self.name = f"{name}, {'fsync after' if sync else 'no fsync'}, CRC32C"
        self.syncs = sync
        self._path = path
        shards, chunks = layout
        self._shard_rows = shards[0]
        self._rows: dict[pk.PageKey, int] = {}
        self._batches = itertools.count()
        self._config: dict[str, Any] = {
            "codec_pipeline.path": pipeline,
            "codec_pipeline.chunk_concurrent_maximum": 1,
            "threading.max_workers": 1,
            "async.concurrency": 1,
        }
        with self._configured():
            self._array: Any = zarr.create_array(
                path,
                shape=(capacity * self._shard_rows, *spec.page_shape),
                shards=shards,
                chunks=chunks,
                dtype=spec.np_dtype,
                filters=None,
                serializer=BytesCodec(endian="little"),
                compressors=[Crc32cCodec()],
                fill_value=0,
            )

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """The next shard."""
        number = next(self._batches)
        first = number * self._shard_rows
        with self._configured():
            self._array[first : first + len(keys)] = pages
        if self.syncs:
            with (self._path / self._array.metadata.encode_chunk_key((number, 0, 0, 0, 0, 0))).open(
                "rb"
            ) as shard:
                os.fsync(shard.fileno())
        self._rows.update(zip(keys, range(first, first + len(keys)), strict=True))

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """Page by page: selecting many rows at once is far slower."""
        with self._configured():
            for key, page in zip(keys, out, strict=True):
                page[...] = self._array[self._rows[key]]

    def close(self) -> None:
        """Nothing is open."""

    def _configured(self) -> AbstractContextManager[object]:
        return zarr.config.set(self._config)


class Files:
    """One file a page, as other systems' file backends do."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.name = f"one file a page, {'fsync' if sync else 'no fsync'}, no checksum"
        self._path = path
        self.syncs = sync
        path.mkdir()

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """``ndarray.tofile``."""
        for key, page in zip(keys, pages, strict=True):
            with (self._path / key.hex()).open("wb") as file:
                page.tofile(file)
                if self.syncs:
                    file.flush()
                    os.fsync(file.fileno())

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """``numpy.fromfile``, and a copy into ``out``."""
        for key, page in zip(keys, out, strict=True):
            page[...] = np.fromfile(self._path / key.hex(), page.dtype).reshape(page.shape)

    def close(self) -> None:
        """Nothing is open."""


class SQLite:
    """Blobs in a table by key."""

    name = "SQLite blobs, WAL, synchronous FULL, no checksum"
    syncs = True

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in (
            "page_size = 16384",
            "journal_mode = WAL",
            "synchronous = FULL",
            "mmap_size = 4294967296",
            "cache_size = -65536",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE pages (key BLOB PRIMARY KEY, page BLOB NOT NULL)")

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """One transaction."""
        blobs = (memoryview(page.reshape(-1).view(np.uint8)) for page in pages)
        self._connection.execute("BEGIN")
        self._connection.executemany(
            "INSERT INTO pages VALUES (?, ?)", zip(keys, blobs, strict=True)
        )
        self._connection.execute("COMMIT")

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """A query a page."""
        for key, page in zip(keys, out, strict=True):
            ((blob,),) = self._connection.execute("SELECT page FROM pages WHERE key = ?", (key,))
            page[...] = np.frombuffer(blob, page.dtype).reshape(page.shape)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


class LMDB:
    """A memory-mapped B+ tree."""

    name = "LMDB, fsync, no checksum"
    syncs = True

    def __init__(self, path: Path) -> None:
        self._environment = lmdb.open(str(path), map_size=2**36)

    def write(self, keys: Sequence[pk.PageKey], pages: Array) -> None:
        """One transaction."""
        with self._environment.begin(write=True) as transaction:
            for key, page in zip(keys, pages, strict=True):
                transaction.put(key, memoryview(page.reshape(-1).view(np.uint8)))

    def read(self, keys: Sequence[pk.PageKey], out: Array) -> None:
        """Copy from the map, one transaction."""
        with self._environment.begin(buffers=True) as transaction:
            for key, page in zip(keys, out, strict=True):
                page[...] = np.frombuffer(transaction.get(key), page.dtype).reshape(page.shape)

    def close(self) -> None:
        """Unmap it."""
        self._environment.close()
