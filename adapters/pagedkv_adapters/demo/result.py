"""What the demo found, as data and as a table."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

import pagedkv as pk
from pagedkv_adapters.demo.run import PagedSetup, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Three runs of one prompt, side by side.

    Args:
        model: Name of the model.
        spec: Its KV.
        num_prompt_tokens: Tokens of the prompt.
        setup: The cache of the second and third run.
        dynamic: With transformers' DynamicCache.
        paged: With PagedKV and the small pool.
        resumed: The same in a new process, from what the second run left on disk.
        texts: What each of them generated.
    """

    model: str
    spec: pk.KVSpec
    num_prompt_tokens: int
    setup: PagedSetup
    dynamic: Run
    paged: Run
    resumed: Run
    texts: tuple[str, str, str]

    @property
    def runs(self) -> dict[str, Run]:
        """The runs by name."""
        return {"dynamic_cache": self.dynamic, "paged": self.paged, "resumed": self.resumed}

    @property
    def tokens_identical(self) -> bool:
        """Whether all three generated the same tokens."""
        return len({run.output_tokens for run in self.runs.values()}) == 1

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV of prompt and answer; the last token's is never computed."""
        num_tokens = self.num_prompt_tokens + len(self.dynamic.output_tokens) - 1
        return num_tokens * self.spec.page_nbytes // self.spec.page_tokens

    @property
    def speedup(self) -> float:
        """Time to first token of the full prefill over that of the resumed run."""
        return self.dynamic.ttft_s / self.resumed.ttft_s

    def pages_evicted(self, run: Run) -> int:
        """Pages that the pool had no room for: those that had to leave, or never got in."""
        return run.num_pages_evicted + self.pages_without_slot(run)

    def pages_without_slot(self, run: Run) -> int:
        """Pages that went to disk from the start, a layer at a time; they count by their layers."""
        return run.num_slices_spilled // self.spec.held_layers

    def pages_loaded(self, run: Run) -> int:
        """Pages read back from disk; those read a layer at a time count by their layers."""
        return run.num_pages_loaded + run.num_slices_loaded // self.spec.held_layers

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-serialisable values."""
        return {
            "model": self.model,
            "tokens_identical": self.tokens_identical,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_reused_tokens": self.resumed.num_reused_tokens,
            "kv_nbytes": self.kv_nbytes,
            "pool_nbytes": self.paged.pool_nbytes,
            "pages_evicted": self.pages_evicted(self.paged),
            "pages_without_slot": self.pages_without_slot(self.paged),
            "pages_loaded": self.pages_loaded(self.paged),
            "ttft_full_s": self.dynamic.ttft_s,
            "ttft_paged_s": self.paged.ttft_s,
            "ttft_resumed_s": self.resumed.ttft_s,
            "codec": self.setup.codec,
            "store_path": str(self.setup.store_path),
            "store_nbytes": self.resumed.store_nbytes,
            "output_tokens": {name: list(run.output_tokens) for name, run in self.runs.items()},
            "output_text": dict(zip(self.runs, self.texts, strict=True)),
            "runs": {
                name: {key: value for key, value in asdict(run).items() if key != "output_tokens"}
                for name, run in self.runs.items()
            },
        }

    def render(self) -> Group:
        """The result for a terminal."""
        table = Table(title=f"{self.model}, a prompt of {self.num_prompt_tokens:,} tokens")
        table.add_column("")
        table.add_column("DynamicCache", justify="right")
        table.add_column("PagedKV, small pool", justify="right")
        table.add_column("new process", justify="right")
        for name, *cells in self._rows():
            table.add_row(name, *cells)
        return Group(*self._answers(), table, *self._closing_lines())

    def _answers(self) -> Iterator[Text]:
        if len(set(self.texts)) == 1:
            yield Text.assemble(("All three: ", "bold"), self.texts[0].strip(), "\n")
            return
        for name, text in zip(("DynamicCache", "PagedKV", "New process"), self.texts, strict=True):
            yield Text.assemble((f"{name}: ", "bold"), text.strip(), "\n")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        first, *others = self.runs.values()
        same = ["yes" if r.output_tokens == first.output_tokens else "NO" for r in others]
        yield ("tokens identical", f"{len(first.output_tokens)} tokens", *same)
        held = [pk.format_nbytes(run.pool_nbytes) for run in others]
        yield ("KV (pool)", pk.format_nbytes(self.kv_nbytes), *held)
        shares = [f"{run.pool_nbytes / self.kv_nbytes:.0%}" for run in others]
        yield ("  share of the KV", "100%", *shares)
        yield ("pages evicted to disk", "", *(f"{self.pages_evicted(run):,}" for run in others))
        never = (f"{self.pages_without_slot(run):,}" for run in others)
        yield ("  never had a slot", "", *never)
        yield ("pages loaded", "", *(f"{self.pages_loaded(run):,}" for run in others))
        yield ("prompt tokens reused", "", *(f"{run.num_reused_tokens:,}" for run in others))
        yield (
            "time to first token",
            f"{first.ttft_s:.2f} s",
            f"{self.paged.ttft_s:.2f} s",
            f"{self.resumed.ttft_s:.2f} s",
        )
        yield ("time to last token", *(f"{run.total_s:.2f} s" for run in self.runs.values()))

    def _closing_lines(self) -> Iterator[Text]:
        same = ("yes", "bold green") if self.tokens_identical else ("no", "bold red")
        yield Text.assemble("\nTokens identical in all three runs: ", same, ".")
        if not self.tokens_identical and self.setup.codec == "int8":
            yield Text("INT8 approximates and may choose other words; the codec raw is exact.")
        if self.resumed.num_reused_tokens:
            yield Text.assemble(
                "Resumed from the store, the time to the first token was ",
                (f"1/{self.speedup:.1f}", "bold"),
                " of that of the full prefill\n"
                "(the store's files were still in the system's cache).",
            )
        else:
            yield Text("Nothing was reused: the prompt fills no page.")
        yield Text.assemble(
            ("\nStore  ", "bold"),
            f"{self.setup.store_path}, {pk.format_nbytes(self.resumed.store_nbytes)}, "
            f"codec {self.setup.codec}",
        )

    def next_steps(self, program: str, python: str) -> list[Text]:
        """What to type next, where ``program`` is the command and ``python`` its interpreter."""
        other = "raw" if self.setup.codec == "int8" else "int8"
        array = self.setup.store_path / "lane-0000" / f"group-{self.spec.group}" / "kv"
        look = f"import zarr; print(zarr.open_array('{array}', mode='r').info)"
        steps = (
            ("a smaller pool, another codec", f"{program} demo --codec {other} --pool 25%"),
            ("your own model and text", f"{program} demo --model DIR --prompt FILE"),
            ("a context of 10 times the pool", f"{program} demo --long"),
            ("what longer contexts need", f"{program} size --context 8192 --memory 8GiB"),
            ("the store in plain Zarr", f'{python} -c "{look}"'),
        )
        return [
            Text("\nNext, try", style="bold"),
            *(Text.assemble((f"  {what:<31}", "dim"), (line, "cyan")) for what, line in steps),
        ]
