"""How much smaller real KV becomes without loss, and how fast, with what Zarr v3 has on board.

A model reads a text; its KV are cut into what a store compresses at a time, one layer of a page
(``(kind, token, head, channel)``), in float32 as computed, and cast to bfloat16 and to float16.
Each setting compresses and decompresses every chunk into memory, in one thread, chunk by chunk,
and must give back every bit. The peer, ``raw``, copies the chunks with numpy. Speeds are by CPU
time, so that other processes disturb them less: what is measured never waits.

``transposed`` puts the tokens last before anything else (Zarr's ``transpose`` codec), so that the
numbers of a channel are neighbours. Its time includes that.

``break-even`` is the speed of a disk, for each reading thread, above which reading raw chunks is
faster than reading and decompressing small ones: decompression speed times ``1 - 1/ratio``.

    python benchmarks/lossless_kv.py [--tokens 1024] [--repeats 5] [--json] [--text FILE]
                                     [--family smollm2|gemma3 | --model DIR]

Where the families come from, and the terms of Gemma: see ``benchmarks/quantisation_kl.py``.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import ml_dtypes
import numcodecs.blosc
import numpy as np
import numpy.typing as npt
import torch
from _families import FAMILIES, load_family
from numcodecs import Blosc, Zstd
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

from pagedkv_adapters.demo.model import load

DTYPES: tuple[tuple[str, Any], ...] = (
    ("float32", np.float32),
    ("bfloat16", ml_dtypes.bfloat16),
    ("float16", np.float16),
)
PAGE_TOKENS = 16

Chunk = npt.NDArray[Any]
"""Unsigned integers, ``(kind, token, head, channel)``: numpy copies bfloat16 one by one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to compress: with Blosc (``cname`` at ``clevel``), or with Zstd alone.

    Args:
        cname: Compressor in Blosc, or ``"zstd alone"``.
        clevel: Blosc's level 1 to 9, or that of Zstd itself.
        shuffle: ``"byte"``, ``"bit"`` or ``"none"``.
        transposed: Whether tokens are put last first.
    """

    cname: str
    clevel: int
    shuffle: str
    transposed: bool = False

    @property
    def name(self) -> str:
        """For people, and for ``case``."""
        asides = "" if self.shuffle == "none" else f" {self.shuffle}shuffle"
        return f"{self.cname} {self.clevel}{asides}{' transposed' if self.transposed else ''}"

    def compressor(self, itemsize: int) -> Any:
        """The numcodecs codec for numbers of ``itemsize`` bytes."""
        if self.cname == "zstd alone":
            return Zstd(level=self.clevel)
        shuffle = {"byte": Blosc.SHUFFLE, "bit": Blosc.BITSHUFFLE}[self.shuffle]
        return Blosc(self.cname, clevel=self.clevel, shuffle=shuffle, typesize=itemsize)


SETTINGS = (
    *(Setting("zstd", level, kind) for kind in ("byte", "bit") for level in (1, 3, 5)),
    *(Setting("lz4", level, kind) for kind in ("byte", "bit") for level in (1, 5, 9)),
    *(Setting("zstd alone", level, "none") for level in (1, 3)),
    Setting("zstd", 1, "byte", transposed=True),
    Setting("lz4", 9, "bit", transposed=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one setting made of the KV of one dtype; speeds in bytes of raw KV a second."""

    dtype: str
    setting: str
    raw_page_nbytes: int
    page_nbytes: float
    compress: float
    decompress: float
    copy: float

    @property
    def ratio(self) -> float:
        """Raw bytes to compressed ones."""
        return self.raw_page_nbytes / self.page_nbytes

    @property
    def break_even(self) -> float:
        """Disk speed, bytes a second, up to which reads gain."""
        return self.decompress * max(0.0, 1 - 1 / self.ratio)


def compute_pages(model: Any, ids: torch.Tensor) -> npt.NDArray[np.float32]:
    """KV of ``ids``, ``(1, token)``, as ``(page, layer, kind, token, head, channel)``."""
    cache = DynamicCache()
    with torch.inference_mode():
        model(ids, cache=cache, logits_to_keep=1)
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    numbers = torch.stack(layers).transpose(2, 3)  # (layer, kind, token, head, channel)
    pages = numbers.unflatten(2, (-1, PAGE_TOKENS)).permute(2, 0, 1, 3, 4, 5)
    return pages.contiguous().numpy()


def measure(pages: Chunk, dtype: str, repeats: int) -> list[Result]:
    """Every setting over ``pages`` of ``dtype``, ``(page, layer, kind, token, head, channel)``."""
    chunks = list(pages.view(f"u{pages.itemsize}").reshape(-1, *pages.shape[2:]))
    target = np.empty_like(chunks[0])
    copy = median(_seconds(lambda c: np.copyto(target, c), chunks) for _ in range(repeats))
    results = []
    for setting in track(SETTINGS, dtype, console=Console(stderr=True), transient=True):
        compress, decompress = _functions(setting, target)
        stored = [compress(chunk) for chunk in chunks]
        for chunk, payload in zip(chunks, stored, strict=True):
            decompress(payload)
            if not np.array_equal(chunk, target):
                raise AssertionError(f"{setting.name} of {dtype} did not give the bits back")
        forward = median(_seconds(compress, chunks) for _ in range(repeats))
        backward = median(_seconds(decompress, stored) for _ in range(repeats))
        results.append(
            Result(
                dtype=dtype,
                setting=setting.name,
                raw_page_nbytes=pages[0].nbytes,
                page_nbytes=sum(map(len, stored)) / len(pages),
                compress=pages.nbytes / forward,
                decompress=pages.nbytes / backward,
                copy=pages.nbytes / copy,
            )
        )
    return results


def _functions(
    setting: Setting, target: Chunk
) -> tuple[Callable[[Chunk], bytes], Callable[[bytes], object]]:
    """What compresses a chunk, and what decompresses into ``target``."""
    codec = setting.compressor(target.itemsize)
    if not setting.transposed:
        return codec.encode, lambda payload: codec.decode(payload, target)
    order = (0, 2, 3, 1)
    view = target.transpose(order)
    buffer = np.empty_like(view, order="C")

    def decompress(payload: bytes) -> None:
        codec.decode(payload, buffer)
        np.copyto(view, buffer)

    return lambda chunk: codec.encode(np.ascontiguousarray(chunk.transpose(order))), decompress


def _seconds(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """CPU time of ``work`` on all ``items``."""
    start = thread_time()
    for item in items:
        work(item)
    return thread_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="length of the text (1024)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (5)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--family", choices=FAMILIES, default="smollm2", help="(smollm2)")
    source.add_argument("--model", type=Path, help="folder of another transformers model")
    parser.add_argument("--text", type=Path, help="what is read (a chapter of Alice)")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args(arguments)
    if options.tokens < PAGE_TOKENS or options.tokens % PAGE_TOKENS:
        parser.error(f"--tokens is {options.tokens}: give a multiple of {PAGE_TOKENS}")
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}: give at least 1")

    model, tokenizer = load(options.model) if options.model else load_family(options.family)
    book = files("pagedkv_adapters.demo").joinpath("alice.txt")
    text = (options.text or book).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : options.tokens]
    if ids.shape[1] < options.tokens:
        parser.error(f"the text has {ids.shape[1]} tokens only: give another, or fewer --tokens")

    numcodecs.blosc.use_threads = False
    numcodecs.blosc.set_nthreads(1)
    pages = compute_pages(model, ids)
    results = [
        result
        for name, dtype in DTYPES
        for result in measure(pages.astype(dtype), name, options.repeats)
    ]
    model_name = options.model.name if options.model else options.family
    if options.json:
        print(json.dumps(_rows(results, model_name), indent=2))
    else:
        _print_tables(results, model_name)


def _rows(results: Sequence[Result], model_name: str) -> list[dict[str, object]]:
    """One object for each number; ``ratio`` says how many times better than raw it is."""
    rows: list[dict[str, object]] = []
    for r in results:
        case = f"{model_name} {r.dtype} {r.setting}"
        for what, unit, ours, peer, ratio in (
            ("size", "bytes a page", r.page_nbytes, r.raw_page_nbytes, r.ratio),
            ("compress", "GB/s", r.compress / 1e9, r.copy / 1e9, r.compress / r.copy),
            ("decompress", "GB/s", r.decompress / 1e9, r.copy / 1e9, r.decompress / r.copy),
        ):
            rows.append(
                {
                    "case": f"{case}: {what}",
                    "unit": unit,
                    "ours": ours,
                    "peer": peer,
                    "peer_name": "raw",
                    "ratio": ratio,
                }
            )
    return rows


def _print_tables(results: Sequence[Result], model_name: str) -> None:
    console = Console()
    console.print(f"{model_name}: lossless compression of KV, chunk by chunk, one thread")
    for dtype, _ in DTYPES:
        rows = [result for result in results if result.dtype == dtype]
        raw = f"{rows[0].raw_page_nbytes:,} bytes a page raw, copied at {rows[0].copy / 1e9:.1f}"
        table = Table(title=f"{dtype}; {raw} GB/s")
        for heading in ("setting", "ratio", "compress", "decompress", "break-even"):
            table.add_column(heading, justify="left" if heading == "setting" else "right")
        for r in rows:
            speeds = (f"{s / 1e9:.2f}" for s in (r.compress, r.decompress, r.break_even))
            table.add_row(r.setting, f"{r.ratio:.3f}", *speeds)
        console.print(table)
    console.print("ratio: raw bytes to compressed ones; the others in GB of raw KV a second")


if __name__ == "__main__":
    main()
