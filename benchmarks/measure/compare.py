"""Ours against its peers: rounds that alternate, medians, a table or JSON."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

Timed = Callable[[], float]
"""Does one round's work, preparing what it needs, and gives the seconds of what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a round's seconds are turned into.

    Args:
        name: As the table shows it.
        amount: What is divided by the seconds, or (times) what the seconds are multiplied by.
        is_rate: Whether more is better.
    """

    name: str
    amount: float
    is_rate: bool

    def value(self, seconds: float) -> float:
        """The figure of one round."""
        return self.amount / seconds if self.is_rate else self.amount * seconds

    def ratio(self, ours: float, peer: float) -> float:
        """How many times better ours is."""
        return ours / peer if self.is_rate else peer / ours


def rested(timed: Timed) -> Timed:
    """The same, begun when the threads of what ran before have gone to sleep.

    OpenMP's threads wait for more work in a loop for a while, and would take a core from others.
    """

    def begin() -> float:
        time.sleep(0.05)
        return timed()

    return begin


def gigabytes_a_second(nbytes: int, of: str = "") -> Unit:
    """10^9 bytes a second, for rounds that move ``nbytes``."""
    return Unit(name=f"GB/s {of}".strip(), amount=nbytes / 1e9, is_rate=True)


def microseconds_a_page(num_pages: int) -> Unit:
    """Microseconds a page, for rounds of ``num_pages``."""
    return Unit(name="µs a page", amount=1e6 / num_pages, is_rate=False)


SECONDS = Unit(name="s", amount=1.0, is_rate=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is aimed at: so many times the peer, or a figure of ours that is small enough."""

    ratio: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        parts = [] if self.ratio is None else [f"ratio {self.ratio:g}"]
        parts += [] if self.at_most is None else [f"≤ {self.at_most:g}"]
        return ", ".join(parts)

    def is_met(self, result: "Result") -> bool:
        """Whether a result is as good as it shall be."""
        if self.at_most is not None and result.ours > self.at_most:
            return False
        return self.ratio is None or result.ratio is None or result.ratio >= self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case against one peer: medians over the rounds.

    Args:
        case: What was done.
        unit: What ``ours`` and ``peer`` are in.
        ours: Our figure.
        peer: The peer's; None if it could not run, for the reason that ``peer_name`` gives.
        peer_name: What the peer is, and how durable.
        ratio: How many times better ours is.
        target: What is aimed at; shown in the table only.
    """

    case: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    ratio: float | None
    target: Target | None = None

    def to_dict(self) -> dict[str, str | float | None]:
        """What ``--json`` prints of it."""
        names = ("case", "unit", "ours", "peer", "peer_name", "ratio")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class Bench:
    """One run of a benchmark: its options, and the results so far.

    Args:
        folder: An empty folder on the disk that is measured.
        rounds: Rounds of each case; the medians of these are reported.
        tiny: Do as little as possible, to see that everything works; the figures mean nothing.
        progress: Shows how far it is.
        files: Files that were named on the command line, by option; None for those that were not.
    """

    folder: Path
    rounds: int
    tiny: bool
    progress: Progress
    files: Mapping[str, Path | None] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def count(self, full: int, tiny: int) -> int:
        """How many pages, batches or the like a case takes."""
        return tiny if self.tiny else full

    def compare(
        self,
        case: str,
        unit: Unit,
        ours: Timed,
        peers: Mapping[str, Timed | None],
        *,
        targets: Mapping[str, Target] | None = None,
    ) -> None:
        """Run ours and its peers in turn, and add a result for each peer.

        Each runs once untimed first, then ``rounds`` times; the order turns round each time, so
        that what goes on in the machine meanwhile hits all of them alike. A peer that is None
        cannot run, and its name says why.
        """
        able = [name for name, timed in peers.items() if timed is not None]
        runs = [ours, *(timed for timed in peers.values() if timed is not None)]
        seconds: list[list[float]] = [[] for _ in runs]
        numbers = range(1 if self.tiny else 0, self.rounds + 1)
        task = self.progress.add_task(case, total=len(numbers) * len(runs))
        for number in numbers:
            for index in list(range(len(runs)))[:: -1 if number % 2 else 1]:
                taken = runs[index]()
                if number:
                    seconds[index].append(taken)
                self.progress.advance(task)
        self.progress.remove_task(task)
        mine, *others = (unit.value(statistics.median(times)) for times in seconds)
        found = dict(zip(able, others, strict=True))
        for name in peers:
            self.add(case, unit, mine, found.get(name), name, target=(targets or {}).get(name))

    def add(
        self,
        case: str,
        unit: Unit,
        ours: float,
        peer: float | None,
        peer_name: str,
        *,
        target: Target | None = None,
    ) -> None:
        """Add a result that was measured elsewhere."""
        self.results.append(
            Result(
                case=case,
                unit=unit.name,
                ours=ours,
                peer=peer,
                peer_name=peer_name,
                ratio=None if peer is None else unit.ratio(ours, peer),
                target=target,
            )
        )


def run(
    title: str,
    parts: Mapping[str, Callable[[Bench], None]],
    arguments: Sequence[str] | None = None,
    *,
    files: Mapping[str, str] | None = None,
    footer: str | None = None,
) -> None:
    """Parse the command line, run the parts, and print what they found.

    Args:
        title: What the benchmark shows, in a line.
        parts: Groups of cases by the name that ``--part`` takes.
        arguments: The command line's.
        files: More options, each of which names a file, and what their help says.
        footer: What the table says below; by default how it was measured.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (5)")
    parser.add_argument("--part", action="append", choices=parts, help="only these (all)")
    parser.add_argument("--folder", type=Path, help="where on the disk (the temporary folder)")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    for name, text in (files or {}).items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: give at least 1")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with (
        tempfile.TemporaryDirectory(prefix="pagedkv-bench-", dir=options.folder) as folder,
        nullcontext() if options.json else progress,
    ):
        bench = Bench(
            folder=Path(folder),
            rounds=options.rounds,
            tiny=options.tiny,
            progress=progress,
            files={name: getattr(options, name) for name in files or {}},
        )
        chosen = options.part or list(parts)
        whole = progress.add_task("all", total=len(chosen))
        for name in chosen:
            parts[name](bench)
            progress.advance(whole)
    if options.json:
        print(json.dumps([result.to_dict() for result in bench.results], indent=2))
    else:
        _print_table(title, bench, footer)


def _print_table(title: str, bench: Bench, footer: str | None) -> None:
    table = Table(title=title)
    table.add_column("case, and what it is compared with", overflow="fold", ratio=1)
    for heading in ("figure", "unit", "ratio", "target"):
        table.add_column(heading, justify="left" if heading == "unit" else "right", no_wrap=True)
    last = ""
    for result in bench.results:
        if result.case != last:
            table.add_section()
            table.add_row(f"[bold]{result.case}[/bold]", _text(result.ours), result.unit)
        color = "" if result.target is None else "green" if result.target.is_met(result) else "red"
        table.add_row(
            f"  {result.peer_name}",
            _text(result.peer),
            "",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            f"[{color}]{result.target}[/{color}]" if color else "",
        )
        last = result.case
    console = Console()
    console.print(table)
    console.print(
        footer
        or f"Medians of {bench.rounds} rounds; ratio: how many times better ours is;"
        f" {os.cpu_count()} cores. On the disk of the temporary folder, unless --folder names"
        " another."
    )


def _text(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,.3g}" if figure < 1000 else f"{figure:,.0f}"
