"""Checksums, raw copies and INT8 of the compiled kernels, each beside its peer, on one core.

A case is timed alternately with its peer, seven times each, in the thread's processor time, so that
what else runs disturbs little; the medians are shown. INT8 is counted
in bytes of the numbers (float16: two each), not in the smaller ones that are stored. Records lie in
a buffer that is used again and again; the pool is larger than the processor's caches.

    python benchmarks/kernels.py [--json]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import google_crc32c
import numba
import numpy as np
from rich.console import Console
from rich.table import Table

from pagedkv.checksum import crc32c
from pagedkv.codec import FixedCodec, Int8, Raw
from pagedkv.memory import PageMemory
from pagedkv.spec import KVSpec, format_nbytes

REPEATS = 7
POOL_NBYTES = 2**28
BATCH_NBYTES = 2**19
"""Pages that one call moves; their records stay in the cache, as they do between disk and pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: figures of ours and of its peer, and how many times better ours is."""

    case: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    ratio: float


def specs() -> dict[str, KVSpec]:
    """Geometries by name: 192 KiB and 2 MiB a page of half precision, and a tiny one."""
    sizes = (
        {"num_layers": 24, "num_kv_heads": 2, "head_dim": 64, "page_tokens": 16},
        {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "page_tokens": 16},
    )
    made = [
        KVSpec(dtype=dtype, model="benchmark", **size)
        for dtype in ("float16", "bfloat16", "float32")
        for size in sizes
    ]
    tiny = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 15, "page_tokens": 1, "num_kinds": 1}
    made.append(KVSpec(dtype="float32", model="benchmark", **tiny))
    return {f"{spec.dtype}, {format_nbytes(spec.page_nbytes)}": spec for spec in made}


class Pool:
    """A layer-first pool with numbers in it, and records of some of its pages."""

    def __init__(self, spec: KVSpec, codec: FixedCodec) -> None:
        self.spec, self.codec = spec, codec
        slots = max(1, min(POOL_NBYTES // spec.page_nbytes, 20_000))
        self.count = max(1, min(BATCH_NBYTES // spec.page_nbytes, slots))
        shape = (spec.held_layers, spec.num_kinds, slots, *spec.layer_shape[1:])
        size = spec.page_nbytes * slots
        self.buffer = np.zeros(size + 64, np.uint8)
        start = -self.buffer.ctypes.data % 64
        self.array = self.buffer[start : start + size].view(spec.np_dtype).reshape(shape)
        rng = np.random.default_rng(0)
        for layer in self.array:
            layer[...] = rng.standard_normal(layer.shape, np.float32).astype(spec.np_dtype)
        order = rng.permutation(slots)
        self.batches = [order[i : i + self.count] for i in range(0, slots, self.count)]
        self.batches = [batch for batch in self.batches if len(batch) == self.count]
        self.next = 0
        record = spec.held_layers * (codec.layer_nbytes(spec) + 4)
        self.stored = np.empty(self.count * record, np.uint8)
        self.offsets = np.arange(self.count, dtype=np.int64) * record
        self.crcs = np.empty((self.count, spec.held_layers), np.uint32)
        self.good = np.ones(self.count, np.bool_)

    @property
    def batch_nbytes(self) -> int:
        """Bytes of the numbers that one call moves."""
        return self.count * self.spec.page_nbytes

    def batch(self) -> Any:
        """The next pages, which have long left the cache."""
        self.next = (self.next + 1) % len(self.batches)
        return self.batches[self.next]

    def memory(self) -> PageMemory:
        """The next pages, where they are."""
        layer, kind, slot = self.array.strides[:3]
        return PageMemory(
            self.array.ctypes.data + self.batch().astype(np.int64) * slot, layer, kind
        )

    def pack(self) -> None:
        """Ours."""
        self.codec.pack(self.spec, self.memory(), self.stored, self.crcs)

    def unpack(self) -> None:
        """Ours."""
        self.codec.unpack(
            self.spec,
            self.stored,
            self.offsets,
            self.spec.held_layers,
            self.memory(),
            self.crcs,
            self.good,
        )
        assert self.good.all()

    def _payloads(self) -> Any:
        return self.stored.reshape(*self.crcs.shape, -1)[:, :, :-4]

    def pack_numpy(self) -> None:
        """The peer."""
        for payloads, slot in zip(self._payloads(), self.batch(), strict=True):
            for payload, layer in zip(payloads, self.array[:, :, slot], strict=True):
                self.codec.encode(self.spec, layer, payload)

    def unpack_numpy(self) -> None:
        """The peer."""
        for payloads, slot in zip(self._payloads(), self.batch(), strict=True):
            for payload, layer in zip(payloads, self.array[:, :, slot], strict=True):
                self.codec.decode(self.spec, payload, layer)


def pair(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of one call of each; both are called before."""
    calls = (ours, peer)
    counts = []
    for call in calls:
        call()
        start = time.thread_time()
        call()
        counts.append(max(1, int(0.03 / (time.thread_time() - start))))
    seconds: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for taken, call, count in zip(seconds, calls, counts, strict=True):
            start = time.thread_time()
            for _ in range(count):
                call()
            taken.append((time.thread_time() - start) / count)
    return float(np.median(seconds[0])), float(np.median(seconds[1]))


def speed(
    case: str, nbytes: int, peer_name: str, ours: Callable[[], object], peer: Callable[[], object]
) -> Row:
    seconds = pair(ours, peer)
    return Row(
        case=case,
        unit="GB/s",
        ours=nbytes / seconds[0] / 1e9,
        peer=nbytes / seconds[1] / 1e9,
        peer_name=peer_name,
        ratio=seconds[1] / seconds[0],
    )


@numba.njit
def checksum_all(address: int, nbytes: int, count: int) -> int:
    """Checksum ``count`` blocks, as the kernels do with the layers of pages: in one call."""
    last = np.uint32(0)
    for number in range(count):
        last = crc32c(address + number * nbytes, nbytes)
    return last


def checksum_rows() -> Iterator[Row]:
    data = np.random.default_rng(0).integers(0, 256, 2**18, np.uint8)
    for nbytes in (64, 2048, 8192, 65536):
        blocks = data.reshape(-1, nbytes)
        yield speed(
            f"CRC32C of blocks of {nbytes} bytes",
            data.nbytes,
            "google_crc32c",
            partial(checksum_all, data.ctypes.data, nbytes, len(blocks)),
            lambda blocks=blocks: [google_crc32c.value(block) for block in blocks],
        )


def page_rows() -> Iterator[Row]:
    for name, spec in specs().items():
        pool = Pool(spec, Raw())
        peer = "numpy copy without CRC"
        yield speed(f"raw pack, {name}", pool.batch_nbytes, peer, pool.pack, pool.pack_numpy)
        pool.pack()  # the peer left no checksums
        yield speed(f"raw unpack, {name}", pool.batch_nbytes, peer, pool.unpack, pool.unpack_numpy)
        for scales in ("channel", "token"):
            codec = Int8(key_scales=scales, value_scales=scales)
            pool = Pool(spec, codec)
            case = f"scale a {scales}, {name}"
            nbytes, peer = pool.batch_nbytes, "numpy without CRC"
            yield speed(f"INT8 pack, {case}", nbytes, peer, pool.pack, pool.pack_numpy)
            pool.pack()
            yield speed(f"INT8 unpack, {case}", nbytes, peer, pool.unpack, pool.unpack_numpy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args()
    rows = [*checksum_rows(), *page_rows()]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("case", "unit", "ours", "peer", "ratio", "peer's name")
    for row in rows:
        figures = (f"{value:.2f}" for value in (row.ours, row.peer, row.ratio))
        table.add_row(row.case, row.unit, *figures, row.peer_name)
    Console().print(table)


if __name__ == "__main__":
    main()
