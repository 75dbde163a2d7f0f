"""What ``pagedkv demo --long`` found, as data and as tables."""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

import pagedkv as pk

STAGING_NBYTES = 16 * 2**20
"""The most that an open sequence stages in while it attends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """One generation at a long context, in a process of its own.

    Args:
        output_tokens: The generated ids.
        text: The same as text.
        num_prompt_tokens: Tokens of the prompt.
        prefill_s: Seconds to the first token.
        total_s: Seconds to the last one.
        peak_nbytes: The most memory that the process had at once.
        resident_nbytes: The memory that it had before, with the model loaded and warm.
        kv_nbytes: Bytes of the KV of prompt and answer, and with PagedKV only, as all below.
        layer_nbytes: Bytes of one layer of it.
        pool_nbytes: Bytes of the pool.
        num_slots: Its slots.
        num_pages: Pages of the sequence.
        prefill_chunk_tokens: Tokens of the prompt that went through the model at once.
        num_prefill_slices_loaded: Single layers of pages read from disk up to the first token.
        num_slices_attended: Those attended to after it, in any tier.
        num_slices_loaded: Those of them that were read from disk.
    """

    output_tokens: tuple[int, ...]
    text: str = ""
    num_prompt_tokens: int
    prefill_s: float
    total_s: float
    peak_nbytes: int
    resident_nbytes: int
    kv_nbytes: int = 0
    layer_nbytes: int = 0
    pool_nbytes: int = 0
    num_slots: int = 0
    num_pages: int = 0
    prefill_chunk_tokens: int = 0
    num_prefill_slices_loaded: int = 0
    num_slices_attended: int = 0
    num_slices_loaded: int = 0

    @property
    def token_s(self) -> float:
        """Seconds a token after the first."""
        return (self.total_s - self.prefill_s) / max(1, len(self.output_tokens) - 1)

    @property
    def hit_rate(self) -> float:
        """Share of what was attended to after the first token that was in the pool."""
        return _hit_rate(self.num_slices_attended, self.num_slices_loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """The attention of all layers for one token.

    Args:
        from_disk: Whether the page cache was dropped before.
        seconds: What it took.
        num_slices_attended: Single layers of pages attended to.
        num_slices_loaded: Those of them that were read from disk.
        slices_nbytes: Their bytes as they are stored.
        device_nbytes: Bytes that came from a device meanwhile; None where nobody counts them.
    """

    from_disk: bool
    seconds: float
    num_slices_attended: int
    num_slices_loaded: int
    slices_nbytes: int
    device_nbytes: int | None

    @property
    def hit_rate(self) -> float:
        """Share of what was attended to that was in the pool."""
        return _hit_rate(self.num_slices_attended, self.num_slices_loaded)

    @property
    def slices_gb_s(self) -> float:
        """Stored bytes read, in GB a second."""
        return self.slices_nbytes / self.seconds / 1e9

    @property
    def device_gb_s(self) -> float | None:
        """Bytes from a device, in GB a second."""
        return None if self.device_nbytes is None else self.device_nbytes / self.seconds / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON-serialisable values."""
        rates = {
            "tokens_s": 1 / self.seconds,
            "slices_gb_s": self.slices_gb_s,
            "device_gb_s": self.device_gb_s,
            "hit_rate": self.hit_rate,
        }
        return asdict(self) | rates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Decode steps behind a long cache, in a process of its own.

    Args:
        num_tokens: Tokens of the cache.
        num_pages: Its pages.
        num_slots: Slots of the pool.
        kv_nbytes: Bytes of all pages in the spec's dtype.
        store_nbytes: Bytes on disk.
        pool_nbytes: Bytes of the pool.
        peak_nbytes: The most memory that the process had at once.
        resident_nbytes: What it had before it opened the cache, kernels loaded.
        open_s: Seconds to open store and sequence, which fills the pool.
        steps: The steps; the last one came from the page cache.
    """

    num_tokens: int
    num_pages: int
    num_slots: int
    kv_nbytes: int
    store_nbytes: int
    pool_nbytes: int
    peak_nbytes: int
    resident_nbytes: int
    open_s: float
    steps: tuple[DecodeStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongResult:
    """Both parts of the long demo.

    Args:
        model: Name of the model.
        is_demo_text: Whether its prompt is the demo's own text.
        spec: KV of the cache that was decoded from.
        num_query_heads: Of its queries.
        dynamic: The model with transformers' DynamicCache.
        paged: The model with PagedKV.
        decode: The decode steps.
    """

    model: str
    is_demo_text: bool
    spec: pk.KVSpec
    num_query_heads: int
    dynamic: ModelRun
    paged: ModelRun
    decode: DecodeRun

    @property
    def tokens_identical(self) -> bool:
        """Whether the model generated the same tokens with both caches."""
        return self.dynamic.output_tokens == self.paged.output_tokens

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-serialisable values."""
        return {
            "model": self.model,
            "tokens_identical": self.tokens_identical,
            "dynamic_cache": asdict(self.dynamic) | {"token_s": self.dynamic.token_s},
            "paged": asdict(self.paged)
            | {"token_s": self.paged.token_s, "hit_rate": self.paged.hit_rate},
            "decode": asdict(self.decode)
            | {
                "pool_share": self.decode.num_slots / self.decode.num_pages,
                "staging_nbytes": STAGING_NBYTES,
                "steps": [step.to_dict() for step in self.decode.steps],
            },
        }

    def render(self) -> Group:
        """The result for a terminal."""
        return Group(
            *self._answers(),
            self._model_table(),
            *self._model_lines(),
            self._decode_table(),
            *self._decode_lines(),
        )

    def _answers(self) -> Iterator[Text]:
        if self.dynamic.text == self.paged.text:
            yield Text.assemble(("Both: ", "bold"), self.paged.text.strip(), "\n")
            return
        for name, run in (("DynamicCache", self.dynamic), ("PagedKV", self.paged)):
            yield Text.assemble((f"{name}: ", "bold"), run.text.strip(), "\n")

    def _model_table(self) -> Table:
        table = Table(title=f"{self.model}, a prompt of {self.paged.num_prompt_tokens:,} tokens")
        table.add_column("")
        table.add_column("DynamicCache", justify="right")
        table.add_column("PagedKV, small pool", justify="right")
        for row in self._model_rows():
            table.add_row(*row)
        return table

    def _model_rows(self) -> Iterator[tuple[str, str, str]]:
        one, two = self.dynamic, self.paged
        size = pk.format_nbytes
        same = "yes" if self.tokens_identical else "NO"
        yield "tokens identical", f"{len(one.output_tokens)} tokens", same
        yield "KV (pool)", size(two.kv_nbytes), size(two.pool_nbytes)
        yield "  share of the KV", "100%", f"{two.pool_nbytes / two.kv_nbytes:.1%}"
        yield "pages held (slots)", "", f"{two.num_pages:,} ({two.num_slots:,})"
        yield "page layers read back, prefill", "", f"{two.num_prefill_slices_loaded:,}"
        yield "page layers read back, decoding", "", f"{two.num_slices_loaded:,}"
        yield "hits in the pool, decoding", "", f"{two.hit_rate:.1%}"
        yield "prefill", f"{one.prefill_s:.2f} s", f"{two.prefill_s:.2f} s"
        yield "a token after it", f"{one.token_s:.3f} s", f"{two.token_s:.3f} s"
        yield "peak memory of the process", size(one.peak_nbytes), size(two.peak_nbytes)
        more, less = (size(run.peak_nbytes - run.resident_nbytes) for run in (one, two))
        yield "  above the loaded model", more, less

    def _model_lines(self) -> Iterator[Text]:
        paged = self.paged
        text = "The demo's chapter" if self.is_demo_text else "The text"
        chunk = paged.prefill_chunk_tokens
        mask = chunk * (paged.num_prompt_tokens + len(paged.output_tokens))
        yield Text(
            f"{text} was repeated up to that length. Each column is a process of its own. "
            "The attention is sdpa for DynamicCache, pagedkv for PagedKV. "
            f"With PagedKV the prompt went through the model {chunk:,} tokens at a time, and each "
            f"time the attention of a layer had all its keys and values "
            f"({pk.format_nbytes(paged.layer_nbytes)}), torch's copies of them and a mask "
            f"(up to {pk.format_nbytes(mask)}) in memory beside the pool: that part of a prefill "
            "grows with the context, by the layer. DynamicCache took the prompt at once.\n"
        )

    def _decode_table(self) -> Table:
        run, spec = self.decode, self.spec
        table = Table(
            title=f"A cache like an 8B model's, {run.num_tokens:,} tokens: attention, no model"
        )
        table.add_column("step, read from")
        for name in ("seconds", "tokens/s", "GB/s slices", "GB/s device", "pool hits"):
            table.add_column(name, justify="right")
        for number, step in enumerate(run.steps, 1):
            device = step.device_gb_s
            table.add_row(
                f"{number}, disk" if step.from_disk else f"{number}, page cache",
                f"{step.seconds:.2f}",
                f"{1 / step.seconds:.2f}",
                f"{step.slices_gb_s:.2f}",
                "unknown" if device is None else f"{device:.2f}",
                f"{step.hit_rate:.1%}",
            )
        table.caption = (
            f"{spec.num_layers} layers, {spec.num_kv_heads} KV heads of {spec.head_dim} channels, "
            f"{self.num_query_heads} query heads; a step is one token through all layers"
        )
        return table

    def _decode_lines(self) -> Iterator[Text]:
        run, size = self.decode, pk.format_nbytes
        from_disk = [step for step in run.steps if step.from_disk]
        share = run.num_slots / run.num_pages
        more = run.peak_nbytes - run.resident_nbytes
        yield Text.assemble(
            "\nA step from the disk took ",
            (f"{statistics.median(step.seconds for step in from_disk):.2f} s", "bold"),
            ", median, and read ",
            (f"{statistics.median(step.slices_gb_s for step in from_disk):.2f} GB/s", "bold"),
            f". Hits in the pool: {from_disk[-1].hit_rate:.1%}; it holds {share:.1%} of the pages.",
        )
        yield Text(
            f"On disk: {size(run.store_nbytes)} as INT8; "
            f"{size(run.kv_nbytes)} it would be as {self.spec.dtype}. "
            f"Opening it took {run.open_s:.1f} s."
        )
        yield Text(
            f"Peak memory of the process: {size(run.peak_nbytes)}, {size(more)} more than before "
            f"the cache was opened. Pool and staging: {size(run.pool_nbytes)} + "
            f"{size(STAGING_NBYTES)}."
        )
        if not any(step.device_nbytes for step in from_disk):
            yield Text(
                "Nothing came from a device, as far as the system tells: the folder may be in "
                "memory.",
                style="bold",
            )

    def next_steps(self, program: str, python: str) -> list[Text]:
        """What to type next, where ``program`` is the command and ``python`` its interpreter."""
        steps = (
            ("a larger pool", f"{program} demo --long --pool 25%"),
            ("the same as a program to read", f"{python} examples/long_context.py"),
            ("what this disk can do", f"{program} bench"),
        )
        return [
            Text("\nNext, try", style="bold"),
            *(Text.assemble((f"  {what:<31}", "dim"), (line, "cyan")) for what, line in steps),
        ]


def _hit_rate(num_attended: int, num_loaded: int) -> float:
    return 1 - num_loaded / num_attended if num_attended else 1.0
