"""The command ``pagedkv simulate``."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from pagedkv.cost_model import CostModel
    from pagedkv.simulate import SimulationResult
    from pagedkv.trace import Trace

Progress = Callable[[int, int], None]

_SHARES = (0.01, 0.05, 0.1, 0.3)
"""Of the trace's different pages: the sizes that are simulated by default."""
_CURVE_SIZES = 60
"""Points of a curve that is computed at once."""
_REPLAYED_SIZES = 8
"""Points of a curve for which each takes a replay."""


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON lines, our own, or CSV of keys; gzip is read as it is.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="An eviction policy, 'clairvoyant', or 'all'; may be repeated.  [default: all]",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        list[str] | None,
        typer.Option(
            "--slots",
            metavar="N[,N…]",
            help="Pages that the pool holds; may be repeated. Default: 1, 5, 10 and 30 % of the"
            " trace's different pages.",
            show_default=False,
        ),
    ] = None,
    store_slots: Annotated[
        int, typer.Option("--store-slots", metavar="N", help="Pages of a store below the pool.")
    ] = 0,
    admission: Annotated[
        str,
        typer.Option("--admission", metavar="NAME", help="What the store takes in."),
    ] = "all",
    page_tokens: Annotated[
        int | None,
        typer.Option(
            "--page-tokens",
            metavar="N",
            help="Tokens of a page. Default: the trace's; 512 for Mooncake's, 16 for CSV.",
            show_default=False,
        ),
    ] = None,
    page_nbytes: Annotated[
        str | None,
        typer.Option(
            "--page-nbytes",
            metavar="SIZE",
            help="Bytes of a page, such as 2MiB. Default: the trace's, or 128KiB a token.",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-us",
            metavar="US",
            help="Cost model: microseconds of prefill a token.  [default: 40]",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        float | None,
        typer.Option(
            "--attention-ns",
            metavar="NS",
            help="Cost model: nanoseconds of attention a pair of tokens.  [default: 1.3]",
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--disk",
            metavar="SIZE",
            help="Cost model: bytes a second that the disk reads.  [default: 5GB]",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw hit rate against capacity: .png, .svg or .pdf.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over the plot's file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """Tell what a cache would have hit: a trace replayed under eviction policies.

    The policies are the objects that a cache uses. 'clairvoyant' knows what comes, and is the
    bound. docs/simulate.md defines every figure, docs/traces.md the formats.
    """
    from pagedkv.admission import make_admission
    from pagedkv.cost_model import CostModel
    from pagedkv.recorded import is_recorded
    from pagedkv.simulate import simulate as run
    from pagedkv.spec import parse_nbytes

    admitting = make_admission(admission)
    names = _policies(policy or ["all"])
    sizes = _sizes(slots or [])
    costs: dict[str, float] = {}
    if prefill is not None:
        costs["prefill_s_per_token"] = prefill / 1e6
    if attention is not None:
        costs["attention_s_per_pair"] = attention / 1e9
    if bandwidth is not None:
        costs["store_bytes_per_s"] = parse_nbytes(bandwidth)
    cost = CostModel(**costs)
    nbytes = None if page_nbytes is None else parse_nbytes(page_nbytes)
    if plot is not None:
        from pagedkv.hit_rate_plot import check_plot

        check_plot(plot, force=force)
    if is_recorded(trace):
        _refuse_for_recorded(
            {
                "--store-slots": store_slots,
                "--page-tokens": page_tokens,
                "--page-nbytes": page_nbytes,
                "--plot": plot,
            }
        )
        _simulate_recorded(trace, policy, sizes, cost, as_json=as_json)
        return
    read = _read(trace, page_tokens, nbytes, shown=not as_json)
    sizes = sizes or _default_sizes(read)
    with _progress("simulating", shown=not as_json) as progress:
        results = run(
            read,
            names,
            sizes,
            store_slots=store_slots,
            admission=admitting,
            cost=cost,
            progress=progress,
        )
    if plot is not None:
        from pagedkv.hit_rate_plot import plot_hit_rates

        curves = _curves(read, names, store_slots, admission, shown=not as_json)
        plot_hit_rates([*results, *curves], plot, f"{trace.name}: {read.num_pages:,} pages")
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    title = (
        f"{trace.name}: {read.num_requests:,} requests, {read.num_pages:,} pages,"
        f" {read.num_distinct:,} different"
    )
    console.print(_table(title, results))
    console.print(_footer(read, results), highlight=False, soft_wrap=True)
    if plot is not None:
        console.print(f"Plot: {plot}", soft_wrap=True)


def _refuse_for_recorded(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(
            f"a trace that a live cache recorded does not take {' and '.join(given)}: it is "
            "replayed as the cache was, with its pages and its store"
        )


def _simulate_recorded(
    path: Path, policies: list[str] | None, sizes: list[int], cost: "CostModel", *, as_json: bool
) -> None:
    """Replay what a live cache did; without ``--policy`` under the policy that it had."""
    from pagedkv.recorded import read_recorded
    from pagedkv.simulate import CLAIRVOYANT
    from pagedkv.simulate_recorded import simulate_recorded

    with _progress(f"reading {path.name}", shown=not as_json) as progress:
        recorded = read_recorded(path, progress)
    names = _policies(policies or [recorded.policy])
    if policies and CLAIRVOYANT in policies:
        raise ValueError(
            f"{CLAIRVOYANT!r} needs a trace of requests: what a live cache is asked next depends "
            "on what it hit"
        )
    with _progress("simulating", shown=not as_json) as progress:
        results = simulate_recorded(
            recorded,
            [name for name in names if name != CLAIRVOYANT],
            sizes,
            cost=cost,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(f"{path.name}: recorded under {recorded.policy}", results))


def _policies(names: list[str]) -> list[str]:
    """The policies that were asked for, 'all' spelt out; an unknown one is a ``ValueError``."""
    from pagedkv.simulate import known_policies

    known = known_policies()
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(f"there is no policy {name!r}: take one of {', '.join(known)}, or all")
    return list(
        dict.fromkeys(one for name in names for one in (known if name == "all" else [name]))
    )


def _sizes(texts: list[str]) -> list[int]:
    """The numbers in ``--slots``, each once."""
    from pagedkv.simulate import check_slots

    sizes: list[int] = []
    for text in ",".join(texts).split(",") if texts else []:
        try:
            size = int(text)
        except ValueError:
            raise ValueError(
                f"--slots has {text.strip()!r}: give numbers of pages, such as 1000,5000"
            ) from None
        check_slots("--slots", size)
        sizes.append(size)
    return list(dict.fromkeys(sizes))


def _default_sizes(trace: "Trace") -> list[int]:
    return sorted({max(1, round(share * trace.num_distinct)) for share in _SHARES})


def _read(path: Path, page_tokens: int | None, page_nbytes: int | None, *, shown: bool) -> "Trace":
    from pagedkv.traces import read_trace

    with _progress(f"reading {path.name}", shown=shown) as progress:
        trace = read_trace(
            path, page_tokens=page_tokens, page_nbytes=page_nbytes, progress=progress
        )
    for warning in trace.warnings:
        typer.echo(f"pagedkv: warning: {warning}", err=True)
    return trace


def _curves(
    trace: "Trace", names: list[str], store_slots: int, admission: str, *, shown: bool
) -> "list[SimulationResult]":
    """More sizes for a plot: many where they cost little."""
    from pagedkv.admission import make_admission
    from pagedkv.hit_rate_plot import plot_sizes
    from pagedkv.simulate import CLAIRVOYANT
    from pagedkv.simulate import simulate as run

    quick = [name for name in names if name == CLAIRVOYANT or (name == "lru" and not store_slots)]
    slow = [name for name in names if name not in quick]
    results: list[SimulationResult] = []
    for some, count in ((quick, _CURVE_SIZES), (slow, _REPLAYED_SIZES)):
        if some:
            with _progress("more sizes for the plot", shown=shown) as progress:
                results += run(
                    trace,
                    some,
                    plot_sizes(trace.num_distinct, count),
                    store_slots=store_slots,
                    admission=make_admission(admission),
                    progress=progress,
                )
    return results


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[Progress | None]:
    """A bar on stderr, if that is a terminal and nothing else is to be read there."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(title: str, results: "list[SimulationResult]") -> "Table":
    from rich.table import Table

    from pagedkv.spec import format_nbytes

    has_store = any(result.admission for result in results)
    table = Table(title=title)
    table.add_column("policy")
    headings = ["slots", "hit rate", "tokens", "tokens saved", "first token"]
    if has_store:
        headings[3:3] = ["from store", "written", "read", "written a hit"]
    for heading in [*headings, "accesses/s"]:
        table.add_column(heading, justify="right")
    last = results[0].policy
    for result in results:
        if result.policy != last:
            table.add_section()
        last = result.policy
        cells = [
            f"{result.slots:,}",
            f"{result.hit_rate:.2%}",
            f"{result.token_hit_rate:.2%}",
        ]
        if has_store:
            per_hit = result.bytes_written_per_hit
            cells += [
                f"{result.store_hits / max(1, result.num_pages):.2%}",
                format_nbytes(result.bytes_written),
                format_nbytes(result.bytes_read),
                "" if per_hit is None else format_nbytes(per_hit),
            ]
        cells += [
            f"{result.prefill_tokens_saved:,}",
            f"{result.mean_ttft_s * 1000:,.0f} ms",
            f"{result.accesses_per_second:,.0f}",
        ]
        style = "bold" if result.policy == "pagedkv" else None
        table.add_row(result.policy, *cells, style=style)
    return table


def _footer(trace: "Trace", results: "list[SimulationResult]") -> str:
    text = (
        "From cold. Hit rate: requested pages within leading runs that were held; tokens: the same"
        f" by tokens, {trace.page_tokens} a page. First token: mean, under the cost model of"
        " docs/simulate.md."
    )
    if results[0].store_slots:
        text += (
            f" Below the pool a store of {results[0].store_slots:,} pages, which takes in:"
            f" {results[0].admission}; clairvoyant: one tier as large as both."
        )
    return text
