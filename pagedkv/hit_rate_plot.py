"""A plot of hit rate against capacity."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.simulate import CLAIRVOYANT, SimulationResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path, *, force: bool) -> None:
    """Raise if a plot could not be written there, before anything is computed for it.

    Raises:
        ValueError: The suffix is none of ``SUFFIXES``, there is no such folder, or matplotlib is
            not installed.
        FileExistsError: There is a file, and ``force`` is not set.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a plot ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: make it first")
    if path.exists() and not force:
        raise FileExistsError(None, "File exists; --force writes over it", str(path))
    if find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib: install it with pip install 'pagedkv[report]'")


def plot_sizes(num_distinct: int, count: int) -> list[int]:
    """Capacities for a curve: ``count`` or fewer, log-spaced up to all pages of the trace."""
    low = min(max(10, num_distinct // 2000), num_distinct)
    return sorted({int(size) for size in np.geomspace(low, num_distinct, count).round()})


def plot_hit_rates(results: Sequence[SimulationResult], path: Path, title: str) -> None:
    """Draw a line for each policy, and write it; a file that is there is replaced.

    Raises:
        OSError: It cannot be written.
    """
    figure = _figure(results, title)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _figure(results: Sequence[SimulationResult], title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    for name in dict.fromkeys(result.policy for result in results):
        points = sorted({(r.slots, r.hit_rate) for r in results if r.policy == name})
        is_bound = name == CLAIRVOYANT
        axes.plot(
            [slots for slots, _ in points],
            [100 * rate for _, rate in points],
            label=name,
            color="black" if is_bound else None,
            linestyle="--" if is_bound else "-",
            linewidth=2.5 if name == "pagedkv" else 1.2,
            marker="o" if len(points) < 20 else None,
            markersize=3,
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity (pages)")
    axes.set_ylabel("hit rate, leading runs (% of requested pages)")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    return figure
