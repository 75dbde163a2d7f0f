"""The lines that show what the demo is doing."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def shown_progress() -> Progress:
    """Lines on stderr, each with a bar that moves: what is done, and what is being done."""
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim", markup=False),
        console=Console(stderr=True),
    )


@contextmanager
def task_shown(progress: Progress, name: str) -> Iterator[None]:
    """A line for something that takes unknown time."""
    task = progress.add_task(name, total=None, text="")
    yield
    progress.update(task, total=1, completed=1)
