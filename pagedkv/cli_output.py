"""What the commands of ``pagedkv`` share: arguments, mistakes, progress, tables, JSON, times."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.errors import PagedKVError

if TYPE_CHECKING:
    from rich.console import Console

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def mistakes() -> Iterator[None]:
    """What cannot be done is one line on stderr and exit status 2."""
    try:
        yield
    except (PagedKVError, ValueError) as error:
        typer.echo(f"pagedkv: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, if that is a terminal and nothing else is to be read there."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def console() -> "Console":
    """Where tables go: stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON; keys of pages become hex digits."""

    def plain(other: object) -> str:
        return other.hex() if isinstance(other, bytes) else str(other)

    typer.echo(json.dumps(value, indent=2, default=plain))


def time_text(nanoseconds: int) -> str:
    """A time for people: nanoseconds since 1970 as a date in UTC."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(" ", "seconds")
