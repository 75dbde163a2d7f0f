"""The command ``pagedkv simulate``."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli_output import JsonOption, console, print_json, progress_bar
from pagedkv.simulation_tables import HOW_ESTIMATED, footer, print_tables

if TYPE_CHECKING:
    from pagedkv.admission import AdmissionPolicy
    from pagedkv.cost_model import CostModel
    from pagedkv.simulate import SimulationResult
    from pagedkv.trace import Trace

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
            help="fifo, lru, lfu, clock, sieve, s3-fifo, arc, 2q, lru-2, pagedkv, clairvoyant, or"
            " all; may be repeated. Default: all; of a recorded trace the policy of its cache.",
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
        str | None,
        typer.Option(
            "--admission",
            metavar="NAME",
            help="What the store takes in: all, seen-twice or likely.  [default: all]",
            show_default=False,
        ),
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Tell what a cache would have hit: a trace replayed under eviction policies.

    The policies are the objects that a cache uses. 'clairvoyant' knows what comes, and is the
    bound. docs/simulate.md defines every figure, docs/traces.md the formats.
    """
    from pagedkv.admission import make_admission
    from pagedkv.cost_model import CostModel
    from pagedkv.recorded import is_recorded
    from pagedkv.simulate import check_slots
    from pagedkv.simulate import simulate as run
    from pagedkv.spec import parse_nbytes

    admitting = make_admission(admission or "all")
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
        _simulate_recorded(
            trace,
            policy,
            sizes,
            None if admission is None else admitting,
            cost,
            as_json=as_json,
        )
        return
    check_slots("--store-slots", store_slots, least=0)
    if admission is not None and not store_slots:
        raise ValueError("--admission says what a store takes in: give --store-slots too")
    read = _read(trace, page_tokens, nbytes, shown=not as_json)
    sizes = sizes or _default_sizes(read)
    with progress_bar("simulating", shown=not as_json) as progress:
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

        curves = _curves(read, names, store_slots, admitting, shown=not as_json)
        plot_hit_rates([*results, *curves], plot, f"{trace.name}: {read.num_pages:,} pages")
    if as_json:
        print_json([asdict(result) for result in results])
        return
    out = console()
    out.print(
        f"{trace.name}: {read.num_requests:,} requests for {read.num_pages:,} pages, of which"
        f" {read.num_distinct:,} are different"
    )
    print_tables(out, results)
    out.print(footer(read, results))
    if plot is not None:
        out.print(f"Plot: {plot}")


def _refuse_for_recorded(options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(
            f"a trace that a live cache recorded does not take {' and '.join(given)}: it is "
            "replayed as the cache was, with its pages and its store"
        )


def _simulate_recorded(
    path: Path,
    policies: list[str] | None,
    sizes: list[int],
    admission: "AdmissionPolicy | None",
    cost: "CostModel",
    *,
    as_json: bool,
) -> None:
    """Replay what a live cache did; without ``--policy`` under the policy that it had."""
    from pagedkv.admission import ADMISSION_NAMES
    from pagedkv.policies import POLICY_NAMES
    from pagedkv.recorded import read_recorded
    from pagedkv.simulate import CLAIRVOYANT
    from pagedkv.simulate_recorded import simulate_recorded

    with progress_bar(f"reading {path.name}", shown=not as_json) as progress:
        recorded = read_recorded(path, progress)
    if admission is not None and not recorded.has_store:
        raise ValueError("--admission says what a store takes in, and the recorded cache had none")
    if not policies and recorded.policy not in POLICY_NAMES:
        raise ValueError(
            f"{path} was recorded under {recorded.policy!r}, a policy that has no name here: give"
            " --policy, or the object to pagedkv.simulate_recorded"
        )
    if admission is None and recorded.uses_admission and recorded.admission not in ADMISSION_NAMES:
        raise ValueError(
            f"{path} was recorded with admission {recorded.admission!r}, which has no name here:"
            " give --admission, or the object to pagedkv.simulate_recorded"
        )
    names = _policies(policies or [recorded.policy])
    if policies and CLAIRVOYANT in policies:
        raise ValueError(
            f"{CLAIRVOYANT!r} needs a trace of requests: what a live cache is asked next depends "
            "on what it hit"
        )
    with progress_bar("simulating", shown=not as_json) as progress:
        results = simulate_recorded(
            recorded,
            [name for name in names if name != CLAIRVOYANT],
            sizes,
            admission=admission,
            cost=cost,
            progress=progress,
        )
    if as_json:
        print_json([asdict(result) for result in results])
        return
    out = console()
    out.print(
        f"{path.name}: {results[0].num_requests:,} requests for {results[0].num_pages:,} pages,"
        f" recorded under {recorded.policy}"
    )
    print_tables(out, results)
    out.print(
        f"Hit rate: requested pages that were held, {recorded.page_tokens} tokens a page."
        f" {HOW_ESTIMATED}"
    )


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

    with progress_bar(f"reading {path.name}", shown=shown) as progress:
        trace = read_trace(
            path, page_tokens=page_tokens, page_nbytes=page_nbytes, progress=progress
        )
    for warning in trace.warnings:
        typer.echo(f"pagedkv: warning: {warning}", err=True)
    return trace


def _curves(
    trace: "Trace",
    names: list[str],
    store_slots: int,
    admission: "AdmissionPolicy",
    *,
    shown: bool,
) -> "list[SimulationResult]":
    """More sizes for a plot: many where they cost little."""
    from pagedkv.hit_rate_plot import plot_sizes
    from pagedkv.simulate import CLAIRVOYANT
    from pagedkv.simulate import simulate as run

    quick = [name for name in names if name == CLAIRVOYANT or (name == "lru" and not store_slots)]
    slow = [name for name in names if name not in quick]
    results: list[SimulationResult] = []
    for some, count in ((quick, _CURVE_SIZES), (slow, _REPLAYED_SIZES)):
        if some:
            with progress_bar("more sizes for the plot", shown=shown) as progress:
                results += run(
                    trace,
                    some,
                    plot_sizes(trace.num_distinct, count),
                    store_slots=store_slots,
                    admission=admission,
                    progress=progress,
                )
    return results
