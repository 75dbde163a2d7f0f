"""What INT8 saves at the disk: float16 bytes a second, against the same store without it."""

import os
import shutil

import numpy as np

import pagedkv as pk
from measure.compare import Bench, Target, Timed, gigabytes_a_second
from measure.pages import (
    Keys,
    Reader,
    aligned_array,
    chunk_files,
    random_pages,
    spec_of,
    write_store,
)
from measure.reads import cold
from measure.writes import write_each

_PEER = "our store, raw"
_TARGETS = {_PEER: Target(ratio=1.7)}


def int8_store(bench: Bench) -> None:
    """Storing pages durably, and loading them from the disk."""
    size = "192 KB"
    spec = spec_of(size)
    pages = random_pages(spec, bench.count(256, 4))
    batch = bench.count(64, 2)
    folder = bench.folder / "int8"
    codecs = {"int8": pk.Int8(), "raw": pk.Raw()}
    writers: dict[str, Timed] = {}
    readers: dict[str, Timed] = {}
    stores = []
    out = aligned_array(pages.shape, pages.dtype)
    order = np.random.default_rng(1).permutation(len(pages)).tolist()
    for name, codec in codecs.items():
        store, rows = write_store(folder / f"{name}-read", spec, pages, codec=codec, batch=batch)
        reader = Reader(store, rows, order, out, range(len(out)), batch)
        readers[name] = cold(chunk_files(store), reader.read)
        target = pk.PageStore.open(folder / f"{name}-write", spec, codec=codec)
        writers[name] = write_each(target, Keys(), pages[:batch], 4)
        stores += [store, target]
    os.sync()
    bench.compare(
        f"durable write as INT8, {size} float16, {batch} a batch",
        gigabytes_a_second(4 * pages[:batch].nbytes, "of float16"),
        writers["int8"],
        {_PEER: writers["raw"]},
        targets=_TARGETS,
    )
    bench.compare(
        f"cold random read from INT8, {size} float16, {batch} a batch",
        gigabytes_a_second(pages.nbytes, "of float16"),
        readers["int8"],
        {_PEER: readers["raw"]},
        targets=_TARGETS,
    )
    for store in stores:
        store.close()
    shutil.rmtree(folder)
