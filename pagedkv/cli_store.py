"""The commands of ``pagedkv`` that look after a store.

Each calls one function of the library and prints what it returns. Heavy imports wait inside.
"""

import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli_output import (
    JsonOption,
    StoreArgument,
    console,
    mistakes,
    print_json,
    progress_bar,
    time_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pagedkv.diskbench import BenchResult
    from pagedkv.findings import VerifyReport
    from pagedkv.inspect import StoreInfo
    from pagedkv.listing import PageRun

_MAX_LINES = 50
"""Findings that are printed; ``--json`` prints all."""


def verify(
    store: StoreArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Drop exactly what is damaged and rebuild what can be derived."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a store and tell what is damaged, and what that costs.

    The store may be in use; a lane that a process is writing is checked but not repaired. The exit
    status is 0 if all is well (or has been repaired), 1 if not, 2 if there is no store.
    """
    with mistakes(), progress_bar("verifying", shown=not as_json) as progress:
        from pagedkv.verify import verify_store

        report = verify_store(store, repair=repair, progress=progress)
    if as_json:
        print_json(asdict(report) | {"is_clean": report.is_clean})
    else:
        _print_report(report)
    if not report.is_clean:
        raise typer.Exit(1)


def info(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Tell what a store holds: specs, codec, pages, bytes, lanes, dead space, age."""
    with mistakes():
        from pagedkv.inspect import store_info

        result = store_info(store)
    if as_json:
        print_json(asdict(result) | {"fill": result.fill})
    else:
        out = console()
        for table in _info_tables(result):
            out.print(table)


def ls(
    store: StoreArgument,
    long: Annotated[bool, typer.Option("--long", "-l", help="One line a page.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Lines to print; 0 prints all.")
    ] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the pages of a store as a tree of prefixes.

    A line is a run of pages that follow one another; where prefixes part, what comes after is
    indented. It tells the last page's key, pages, tokens, the tokens before, and the first token
    ids.
    """
    with mistakes():
        from pagedkv.listing import list_runs

        listing = list_runs(store, single=long, limit=limit or None)
    if as_json:
        print_json(asdict(listing))
        return
    out = console()
    for run in listing.runs:
        out.print(_run_line(run))
    more = listing.num_runs - len(listing.runs)
    if more:
        out.print(f"… and {more:,} more lines (--limit 0 prints all)")
    out.print(f"{listing.num_pages:,} pages")


def gc(
    store: StoreArgument,
    max_size: Annotated[
        str, typer.Option("--max-size", metavar="SIZE", help="Bound of the store, such as 2GiB.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Give up the pages that were used least lately until a store is within a size.

    Rows of other processes that are writing now are left alone.
    """
    with mistakes():
        from pagedkv.spec import format_nbytes, parse_nbytes
        from pagedkv.store import PageStore

        bound = parse_nbytes(max_size)
        with PageStore.open(_existing(store)) as opened:
            report = opened.collect(bound)
    is_within = report.nbytes_after <= bound
    if as_json:
        print_json(asdict(report) | {"is_within": is_within})
    else:
        typer.echo(
            f"{format_nbytes(report.nbytes_before)} before, {format_nbytes(report.nbytes_after)}"
            f" now: {report.num_segments_removed:,} segments removed,"
            f" {report.num_pages_evicted:,} pages evicted ({report.num_pages_dead:,} of them"
            f" dead), {report.num_pages_moved:,} moved"
        )
        if not is_within:
            typer.echo(
                f"pagedkv: more than {max_size} is left: documents, and lanes that other processes"
                " write, stay",
                err=True,
            )
    if not is_within:
        raise typer.Exit(1)


def bench(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder on the disk to measure.")
    ] = Path(),
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Bytes of the pages.")
    ] = "512MiB",
    page: Annotated[
        str, typer.Option("--page", metavar="SIZE", help="About the bytes of a page.")
    ] = "192KiB",
    as_json: JsonOption = False,
) -> None:
    """Measure this disk: a store against a plain file with the same bytes.

    Durable writes, warm and cold reads, medians of five rounds, in gigabytes of float16 pages a
    second. It works in a scratch folder in DIR, which takes about twice SIZE and is always removed.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let it clean up
    try:
        with mistakes(), progress_bar("measuring", shown=not as_json) as progress:
            from pagedkv.diskbench import bench_disk

            results = bench_disk(folder, size=size, page=page, progress=progress)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        console().print(_bench_table(results, folder))


def _existing(store: Path) -> Path:
    if not store.is_dir():
        raise ValueError(f"there is no store at {store}")
    return store


def _print_report(report: "VerifyReport") -> None:
    from pagedkv.spec import format_nbytes

    for finding in report.findings[:_MAX_LINES]:
        end = "repaired" if finding.repaired else finding.cost
        typer.echo(f"{finding} ({end})")
    if len(report.findings) > _MAX_LINES:
        typer.echo(f"… and {len(report.findings) - _MAX_LINES:,} more findings (--json lists all)")
    for name in report.foreign:
        typer.echo(f"{name}: not of this store, left alone")
    if report.busy_lanes:
        lanes = ", ".join(map(str, report.busy_lanes))
        typer.echo(f"in use, not to be repaired now: lane {lanes}")
    typer.echo(
        f"{report.num_pages:,} pages in {report.num_segments:,} segments,"
        f" {format_nbytes(report.nbytes_read)} read: {report.num_good_pages:,} good,"
        f" {report.num_lost_pages:,} lost, {len(report.findings):,} findings"
    )
    open_findings = sum(not finding.repaired for finding in report.findings)
    if report.findings and not open_findings:
        typer.echo("all repaired")
    elif open_findings:
        typer.echo(f"{open_findings:,} not repaired")


def _info_tables(result: "StoreInfo") -> "Iterator[Table]":
    from rich.table import Table

    from pagedkv.spec import format_nbytes

    table = Table(title=result.path, show_header=False)
    table.add_column()
    table.add_column()
    codec = dict(result.codec)
    name = codec.pop("name")
    details = ", ".join(f"{key} {value}" for key, value in codec.items())
    table.add_row("format version", str(result.format_version))
    table.add_row("codec", f"{name} ({details})" if details else name)
    table.add_row("token ids kept", "yes" if result.store_tokens else "no")
    table.add_row("on disk", format_nbytes(result.nbytes))
    if result.max_nbytes is not None and result.fill is not None:
        table.add_row("bound", f"{format_nbytes(result.max_nbytes)}, {result.fill:.0%} full")
    if result.oldest_ns is not None and result.newest_ns is not None:
        table.add_row("oldest page", time_text(result.oldest_ns))
        table.add_row("newest page", time_text(result.newest_ns))
    if result.num_torn_chunks:
        table.add_row("torn segments", f"{result.num_torn_chunks:,}: run pagedkv verify")
    yield table
    for group in result.groups:
        spec = group.spec
        share = group.kv_nbytes / group.pool_nbytes if group.pool_nbytes else 0.0
        table = Table(title=f"group {spec.group}", show_header=False)
        table.add_column()
        table.add_column()
        table.add_row("model", spec.model)
        table.add_row(
            "layers x kinds x tokens x heads x channels",
            " x ".join(map(str, spec.page_shape)) + f" {spec.dtype}",
        )
        table.add_row("a page", format_nbytes(spec.page_nbytes))
        table.add_row(
            "pages",
            f"{group.num_pages:,}: {group.num_full_pages:,} full, {group.num_tails:,} tails,"
            f" {group.num_opaque_pages:,} without tokens",
        )
        table.add_row("copies in other lanes", f"{group.num_rows - group.num_pages:,}")
        table.add_row("pages that no prefix leads to", f"{group.num_dead_pages:,}")
        table.add_row("segments", f"{group.num_segments:,} of up to {group.segment_rows:,} pages")
        table.add_row(
            "pages on disk, in the pool",
            f"{format_nbytes(group.kv_nbytes)}, {format_nbytes(group.pool_nbytes)} ({share:.0%})",
        )
        table.add_row("of that, dead", format_nbytes(group.dead_nbytes))
        yield table
    table = Table(title="lanes")
    for column in ("lane", "in use", "last writer", "segments", "pages", "bytes"):
        table.add_column(column, justify="left" if column == "last writer" else "right")
    for lane in result.lanes:
        table.add_row(
            str(lane.lane),
            "yes" if lane.is_held else "no",
            lane.last_writer,
            f"{lane.num_segments:,}",
            f"{lane.num_pages:,}",
            format_nbytes(lane.nbytes),
        )
    yield table
    if result.evictions:
        table = Table(title="last evictions")
        for column in ("page", "time", "reason"):
            table.add_column(column)
        for page in result.evictions:
            reason = page.reason.name.lower().replace("_", " ")
            table.add_row(page.key.hex()[:16], time_text(page.time_ns), reason)
        yield table


def _run_line(run: "PageRun") -> str:
    indent = "  " * min(run.level, 20)
    pages = f"{run.num_pages:,} page{'s' if run.num_pages > 1 else ''}"
    tail = " with a tail" if run.ends_in_tail else ""
    tokens = f"{run.num_tokens:,} tokens from {run.start_token:,}"
    ids = " ".join(map(str, run.first_tokens)) or "unknown"
    kind = {"opaque": ", a page without a prefix", "orphan": ", its prefix is gone"}
    return (
        f"{indent}{run.last_key.hex()[:12]}  {pages}{tail}, {tokens}"
        f"{kind.get(run.start, '')}: {ids} …"
    )


def _bench_table(results: "list[BenchResult]", folder: Path) -> "Table":
    from rich.table import Table

    table = Table(title=f"The disk of {folder.absolute()}")
    for column in ("", "store", results[0].peer_name, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result.case,
            f"{result.ours:.2f} {result.unit}",
            f"{result.peer:.2f} {result.unit}",
            f"{result.ratio:.2f}",
        )
    return table
