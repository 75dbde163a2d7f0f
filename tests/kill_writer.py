"""A nursery of processes that write until they are killed, for ``test_kill.py``.

Each line on the standard input, ``PATH CODEC DTYPE MAX_NBYTES FIRST SEED``, starts a writer of the
pages from number FIRST on. It answers with lines: ``pid N`` when it starts, ``flushed FIRST STOP``
after each flush, ``error TEXT`` if it could not go on, and ``ended STATUS`` when it is gone.
"""

import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np

from pagedkv import KVSpec, PagedKVCache, PageStore
from pagedkv import format as fmt
from pagedkv.errors import StoreFullError
from pagedkv.spec import PageKey

NUM_SLOTS = 4
MAX_SEGMENT_ROWS = 3


def spec_of(dtype: str) -> KVSpec:
    return KVSpec(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        page_tokens=4,
        dtype=dtype,
        model="sha256:kill",
    )


def key_of(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


def pages_of(spec: KVSpec, start: int, stop: int) -> np.ndarray:
    """Pages whose numbers follow from their keys: ``(page, layer, kind, token, head, channel)``."""
    size = int(np.prod(spec.page_shape))
    numbers = np.arange(start, stop, dtype=np.uint64)[:, None] * np.uint64(2654435761)
    mixed = (numbers + np.arange(size, dtype=np.uint64) * np.uint64(40503)) >> np.uint64(7)
    values = (mixed % np.uint64(4001)).astype(np.float32) / 1000 - 2
    return values.astype(spec.np_dtype).reshape(stop - start, *spec.page_shape)


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def write_for_ever(
    path: Path, codec: str, dtype: str, max_nbytes: int | None, first: int, seed: int
) -> None:
    rng = random.Random(seed)
    spec = spec_of(dtype)
    while True:
        store = PageStore.open(path, spec, codec=codec, max_nbytes=max_nbytes)
        with PagedKVCache(spec, NUM_SLOTS, store) as cache:
            sequence = cache.open_sequence()
            for _ in range(rng.randrange(1, 12)):
                stop = first + rng.randrange(1, 8)
                try:
                    cache.put([key_of(n) for n in range(first, stop)], pages_of(spec, first, stop))
                    cache.flush()
                    say("flushed", first, stop)
                except StoreFullError:
                    if max_nbytes is None:
                        raise
                first = stop
                if sequence.num_pages < 2 * NUM_SLOTS and max_nbytes is None:
                    kv = pages_of(spec, first, first + 1)[0]
                    sequence.append(kv[:, 0], kv[:, 1])


def warm_up() -> None:
    """Import and compile what the writers need, before they fork."""
    for dtype, codec in (("float32", "raw"), ("bfloat16", "raw"), ("float16", "int8")):
        spec = spec_of(dtype)
        with tempfile.TemporaryDirectory() as folder:
            store = PageStore.open(folder, spec, codec=codec)
            with PagedKVCache(spec, NUM_SLOTS, store) as cache:
                cache.put([key_of(0)], pages_of(spec, 0, 1))


def main() -> None:
    warm_up()
    fmt.MAX_SEGMENT_ROWS = MAX_SEGMENT_ROWS
    for line in sys.stdin:
        path, codec, dtype, max_nbytes, first, seed = line.split()
        child = os.fork()
        if child == 0:
            say("pid", os.getpid())
            try:
                bound = int(max_nbytes) or None
                write_for_ever(Path(path), codec, dtype, bound, int(first), int(seed))
            except BaseException:  # noqa: BLE001 - the test shows it
                say("error", traceback.format_exc().replace("\n", " | "))
            os._exit(1)
        _, status = os.waitpid(child, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
