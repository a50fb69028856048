"""The demo for the eye: progress bars on a terminal, lines elsewhere, and a plot of both runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.progress import BarDisplay, open_bars

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.progress import TaskID

    from ferrodist.demo.results import History, Progress

_ONE, _SEVERAL, _QUIET = "#9ecae1", "#08519c", "#888888"


class TrainingDisplay(BarDisplay):
    """The state of runs, one after the other: a bar for each on a terminal, else a line for each epoch. A context."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        bars = open_bars(
            console,
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TimeElapsedColumn(),
        )
        super().__init__(console, bars)
        self._task: TaskID | None = None
        self._title, self._accuracy = "", "-"

    def begin(self, title: str) -> None:
        """Show the next run."""
        self._title, self._accuracy = title, "-"
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=1, loss="-", accuracy="-")

    def show(self, progress: Progress) -> None:
        """Show the state of the run. Called in another thread than the rest."""
        if progress.accuracy is not None:
            self._accuracy = f"{progress.accuracy:.1%}"
        if self._bars is None:
            if progress.accuracy is not None:
                self._console.print(
                    f"{self._title}: epoch {progress.epoch:2}, step {progress.step} of {progress.num_steps},"
                    f" loss {progress.loss:.4f}, test accuracy {self._accuracy}",
                    highlight=False,
                    soft_wrap=True,
                )
            return
        assert self._task is not None
        self._bars.update(
            self._task,
            completed=progress.step,
            total=progress.num_steps,
            loss=f"{progress.loss:.4f}",
            accuracy=self._accuracy,
        )


def save_plot(path: Path, one: History, several: History, *, num_ranks: int, min_accuracy: float) -> None:
    """Draw the run on one rank and the run on several into a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes, difference_axes = figure.subplots(1, 3)
    figure.suptitle(f"Handwritten digits: the same training on 1 rank and on {num_ranks} ranks")
    _draw_losses(loss_axes, one, several, num_ranks)
    _draw_accuracies(accuracy_axes, one, several, min_accuracy)
    _draw_difference(difference_axes, one, several)
    for axes in (loss_axes, accuracy_axes, difference_axes):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _draw_losses(axes: Axes, one: History, several: History, num_ranks: int) -> None:
    # The runs coincide: the first is drawn broad and pale, so that both are seen.
    steps = range(1, len(one.losses) + 1)
    axes.plot(steps, one.losses, color=_ONE, linewidth=4, label="1 rank")
    axes.plot(steps, several.losses, color=_SEVERAL, linewidth=1, label=f"{num_ranks} ranks")
    axes.set(title="Training loss", xlabel="step", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_accuracies(axes: Axes, one: History, several: History, min_accuracy: float) -> None:
    epochs = range(1, len(one.accuracies) + 1)
    axes.plot(epochs, one.accuracies, color=_ONE, linewidth=4, marker="o", markersize=9)
    axes.plot(epochs, several.accuracies, color=_SEVERAL, linewidth=1, marker="o", markersize=3)
    _draw_level(axes, min_accuracy, f"at least {min_accuracy:.0%}", below=True)
    axes.annotate(
        f"{several.accuracies[-1]:.1%}",
        (len(epochs), several.accuracies[-1]),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right",
        color=_SEVERAL,
    )
    lowest = min(*one.accuracies, *several.accuracies, min_accuracy)
    axes.set(title="Test accuracy", xlabel="epoch", ylim=(lowest - 0.02, 1.005))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_difference(axes: Axes, one: History, several: History) -> None:
    difference = np.abs(np.subtract(one.losses, several.losses))
    steps = np.arange(1, len(difference) + 1)
    axes.plot(steps, difference, ".", color=_SEVERAL, markersize=3)
    eps = float(np.finfo(np.float32).eps)
    # Equal losses are on the zero line, which a plain logarithmic axis does not have.
    axes.set_yscale("symlog", linthresh=eps / 4)
    axes.set(title="Difference of the losses", xlabel="step", ylim=(-eps / 16, max(10 * difference.max(), 100 * eps)))
    _draw_level(axes, eps, "float32 eps")


def _draw_level(axes: Axes, value: float, label: str, *, below: bool = False) -> None:
    """Draw a dashed line with its label at the right edge."""
    axes.axhline(value, color=_QUIET, linewidth=1, linestyle="--")
    axes.annotate(
        label,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -4 if below else 3),
        textcoords="offset points",
        ha="right",
        va="top" if below else "baseline",
        color=_QUIET,
    )
