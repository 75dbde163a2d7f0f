"""The tables of ``pagedkv simulate``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pagedkv.simulate import SimulationResult
    from pagedkv.trace import Trace

HOW_ESTIMATED = "First token: mean, under the cost model of docs/simulate.md."


def print_tables(out: "Console", results: "list[SimulationResult]") -> None:
    """What was hit and, if there was a store, what that cost; each fits into 80 columns."""
    from pagedkv.spec import format_nbytes

    headings = ["hit rate", "tokens", "tokens saved", "first token"]
    rows = [
        [
            f"{result.hit_rate:.2%}",
            f"{result.token_hit_rate:.2%}",
            f"{result.prefill_tokens_saved:,}",
            milliseconds(result.mean_ttft_s),
        ]
        for result in results
    ]
    out.print(_table(headings, results, rows))
    stored = [result for result in results if result.admission and result.policy != "clairvoyant"]
    if not stored:
        return
    headings = ["from store", "written", "read", "written a hit"]
    rows = [
        [
            f"{result.store_hits / max(1, result.num_pages):.2%}",
            format_nbytes(result.bytes_written),
            format_nbytes(result.bytes_read),
            "" if per_hit is None else format_nbytes(per_hit),
        ]
        for result in stored
        for per_hit in [result.bytes_written_per_hit]
    ]
    out.print(_table(headings, stored, rows))


def milliseconds(seconds: float) -> str:
    """Whole ones, or three digits of few."""
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _table(
    headings: list[str], results: "list[SimulationResult]", rows: list[list[str]]
) -> "Table":
    """A row for each result, a section for each policy."""
    from rich.table import Table

    named = [
        [result.policy, f"{result.slots:,}", *row]
        for result, row in zip(results, rows, strict=True)
    ]
    table = Table()
    for number, heading in enumerate(["policy", "slots", *headings]):
        texts = [*heading.split(), *(row[number] for row in named)]
        width = max(map(len, texts))  # headings wrap, figures never
        table.add_column(heading, justify="right" if number else "left", min_width=width)
    last = results[0].policy
    for result, cells in zip(results, named, strict=True):
        if result.policy != last:
            table.add_section()
        last = result.policy
        table.add_row(*cells, style="bold" if result.policy == "pagedkv" else None)
    return table


def footer(trace: "Trace", results: "list[SimulationResult]") -> str:
    """What the columns mean."""
    text = (
        "From cold. Hit rate: requested pages within leading runs that were held; tokens: the same"
        f" by tokens, {trace.page_tokens} a page. {HOW_ESTIMATED}"
    )
    if results[0].store_slots:
        text += (
            f" Below the pool a store of {results[0].store_slots:,} pages, which takes in:"
            f" {results[0].admission}; clairvoyant: one tier as large as both."
        )
    return text
