"""Attention over a block table, beside what torch does with keys and values that lie in a row.

    python benchmarks/attention.py [--part decode|int8|prefill] [--rounds 9] [--json]

One layer of an 8B-class model: 32 query heads on 8 KV heads of 128 channels, pages of 16 tokens.
Our pages lie anywhere in the pool; the peers' keys and values are contiguous, but for "gather".
Both sides use two threads. ``docs/benchmarks.md`` says more.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from measure.compare import Bench, Target, Timed, Unit, gigabytes_a_second, rested, run
from measure.pages import seconds_of

import pagedkv as pk
from pagedkv.attention_rule import AttentionRule
from pagedkv.codec import Int8
from pagedkv.page_attention import PageAttention, Places

Array = npt.NDArray[Any]

HEADS, QUERY_HEADS, CHANNELS, PAGE_TOKENS = 8, 32, 128, 16
THREADS = 2
MILLISECONDS = Unit(name="ms", amount=1e3, is_rate=False)
TIMES = 8
"""Calls of a round where both sides are ours: no thread of torch's has to be waited for."""
MANY = Unit(name="ms", amount=1e3 / TIMES, is_rate=False)


def spec_of(dtype: str) -> pk.KVSpec:
    """One layer of the model."""
    return pk.KVSpec(
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=CHANNELS,
        page_tokens=PAGE_TOKENS,
        dtype=dtype,
        model="random numbers",
    )


class Sample:
    """A sequence of random keys and values in scattered pages, and the same in a row for torch."""

    def __init__(self, dtype: str, num_tokens: int, num_queries: int) -> None:
        rng = np.random.default_rng(0)
        spec = spec_of(dtype)
        shape = (2, num_tokens, HEADS, CHANNELS)
        self.kv = rng.standard_normal(shape, dtype=np.float32).astype(spec.np_dtype)
        self.queries = rng.standard_normal((num_queries, QUERY_HEADS, CHANNELS), dtype=np.float32)
        self.cache = pk.PagedKVCache(spec, 2 * -(-num_tokens // PAGE_TOKENS))
        self.sequence = self.cache.open_sequence()
        others = self.cache.open_sequence()
        for start in range(0, num_tokens, PAGE_TOKENS):  # by turns, so that no two pages touch
            part = self.kv[:, None, start : start + PAGE_TOKENS]
            self.sequence.append(*part)
            others.append(*part)

    @contextmanager
    def torch_tensors(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Queries, keys and values as torch takes them, ``(1, head, token, channel)``, float32."""
        arrays = (self.queries, *self.kv.astype(np.float32))
        yield tuple(torch.from_numpy(a).transpose(0, 1)[None].contiguous() for a in arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return int(self.kv.nbytes)

    def attend(self) -> Array:
        """Ours."""
        return self.sequence.attend(0, self.queries)


def decode(bench: Bench) -> None:
    """One query at 8,192 tokens; and how fast memory can be read at all."""
    num_tokens = bench.count(8192, 64)
    sample = Sample("float32", num_tokens, 1)
    with sample.torch_tensors() as (q, k, v), sample.cache:
        expected = _sdpa(q, k, v)
        _check(sample.attend(), expected)
        peers: dict[str, Timed | None] = {
            "torch SDPA, contiguous": _timed(lambda: _sdpa(q, k, v)),
            "torch matrix products by group, contiguous": _timed(lambda: _grouped(q, k, v)),
            "gather, then torch SDPA": _timed(lambda: _gathered(sample)),
        }
        targets = {name: Target(ratio=r) for name, r in zip(peers, (4, 2, 12), strict=True)}
        case = f"decode {num_tokens} float32"
        timed = _timed(sample.attend)
        bench.compare(case, MILLISECONDS, timed, peers, targets=targets)
        unit = gigabytes_a_second(sample.nbytes)
        bench.compare(
            f"{case}, bytes read",
            unit,
            timed,
            {"a sum over as many bytes, two threads": _timed(_reader(sample.kv))},
            targets={"a sum over as many bytes, two threads": Target(ratio=0.6)},
        )
        for dtype in ("float16", "bfloat16"):
            other = Sample(dtype, num_tokens, 1)
            with other.cache:
                name = "ours, float32"
                bench.compare(
                    f"decode {num_tokens} {dtype}",
                    MANY,
                    _many(other.attend),
                    {name: _many(sample.attend)},
                    targets={name: Target(ratio=1.4)},
                )


def int8(bench: Bench) -> None:
    """One query at 8,192 tokens that are stored as INT8, in the system's cache, beside float32."""
    num_tokens = bench.count(8192, 64)
    sample = Sample("float32", num_tokens, 1)
    spec, path = spec_of("float32"), bench.folder / "int8.zarr"
    tokens = np.arange(num_tokens)
    with (
        pk.PagedKVCache(spec, 64, pk.PageStore.open(path, spec, codec="int8")) as cache,
        cache.open_sequence() as sequence,
    ):
        sequence.append(*sample.kv[:, None], tokens)
        cache.flush()
    name = "ours, float32 in the pool"
    _records(bench, sample)
    with sample.cache:
        peer = sample.attend()
        for how, memory_map in (("mapped", True), ("staged", False)):
            store = pk.PageStore.open(path, spec, memory_map=memory_map)
            with pk.PagedKVCache(spec, 1, store) as cache, cache.open_sequence(tokens) as sequence:
                error = float(np.abs(sequence.attend(0, sample.queries) - peer).max())
                assert error < 0.05, f"INT8 differs by {error}"
                bench.compare(
                    f"decode {num_tokens} int8, {how}",
                    MANY,
                    _many(partial(sequence.attend, 0, sample.queries)),
                    {name: _many(sample.attend)},
                    targets={name: Target(ratio=2)},
                )
    shutil.rmtree(path)


def _records(bench: Bench, sample: Sample) -> None:
    """The kernel alone: INT8 records that are in memory, and verified, beside pages of float32."""
    spec, num_tokens = spec_of("float32"), len(sample.kv[0])
    codec = Int8()
    pages = sample.kv.reshape(2, -1, PAGE_TOKENS, HEADS, CHANNELS).swapaxes(0, 1).copy()
    nbytes = codec.layer_nbytes(spec)
    records = np.zeros((len(pages), -(-nbytes // 64) * 64), np.uint8)
    for page, record in zip(pages, records, strict=True):
        codec.encode(spec, page, record[:nbytes])
    keys, starts = (
        array.ctypes.data + np.arange(len(array)) * array.strides[0] for array in (pages, records)
    )
    nowhere = np.zeros(len(pages), np.int64)
    layout = codec.layout(spec)

    def attend(places: Places) -> Array:
        rule = AttentionRule()
        attention = PageAttention(spec, sample.queries, num_tokens, rule, layout)
        attention.attend(0, places)
        return attention.result()

    ours = partial(attend, Places(nowhere, nowhere, starts))
    peer = partial(attend, Places(keys, keys + pages.strides[1]))
    assert float(np.abs(ours() - peer()).max()) < 0.05
    name = "ours, float32, kernel alone"
    bench.compare(
        f"decode {num_tokens} int8, kernel alone",
        MANY,
        _many(ours),
        {name: _many(peer)},
        targets={name: Target(ratio=2)},
    )


def prefill(bench: Bench) -> None:
    """All queries of a prompt of 2,048 tokens."""
    num_tokens = bench.count(2048, 64)
    sample = Sample("float32", num_tokens, num_tokens)
    with sample.torch_tensors() as (q, k, v), sample.cache:
        expected = _sdpa(q, k, v)
        _check(sample.attend(), expected)
        name = "torch SDPA, contiguous"
        bench.compare(
            f"prefill {num_tokens} float32",
            MILLISECONDS,
            _timed(sample.attend),
            {name: _timed(lambda: _sdpa(q, k, v))},
            targets={name: Target(ratio=1 / 1.2)},
        )


def _timed(work: Callable[[], object]) -> Timed:
    return rested(lambda: seconds_of(work))


def _many(work: Callable[[], object]) -> Timed:
    """A round of ``TIMES`` calls, one after the other, as the layers of a model make them."""

    def repeat() -> None:
        for _ in range(TIMES):
            work()

    return lambda: seconds_of(repeat)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True
    )


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    grouped = q.reshape(HEADS, QUERY_HEADS // HEADS, CHANNELS)
    weights = torch.softmax(grouped @ k[0].transpose(1, 2) * CHANNELS**-0.5, -1)
    return weights @ v[0]


def _gathered(sample: Sample) -> torch.Tensor:
    with sample.sequence.gather(0) as kinds:
        for kind in kinds:
            kind.flags.writeable = True  # torch warns of what it may not write
        k, v = (torch.from_numpy(kind).transpose(0, 1)[None] for kind in kinds)
        q = torch.from_numpy(sample.queries).transpose(0, 1)[None]
        return _sdpa(q, k, v)


def _reader(kv: Array) -> Callable[[], object]:
    words = kv.reshape(-1).view(np.int64)

    def read() -> None:
        _sum(words)

    read()
    return read


@numba.njit(parallel=True)
def _sum(words: Any) -> Any:
    total = np.int64(0)
    for number in numba.prange(len(words)):
        total += words[number]
    return total


def _check(ours: Array, theirs: torch.Tensor) -> None:
    expected = theirs[0].transpose(0, 1).numpy()
    error = float(np.abs(ours - expected).max())
    assert error < 1e-4, f"ours differs from torch's by {error}"


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    numba.set_num_threads(THREADS)
    run("Attention over a block table", {"decode": decode, "int8": int8, "prefill": prefill})
