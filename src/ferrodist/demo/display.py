"""The demo for the eye: progress bars on a terminal, lines elsewhere, and a plot of both runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.demo.results import EPS
from ferrodist.progress import Bars

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.demo.results import History, Progress

_ONE, _SEVERAL, _QUIET = "#9ecae1", "#08519c", "#888888"


class TrainingDisplay(Bars):
    """The state of runs, one after the other: a bar for each on a terminal, else a line for each epoch. A context."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(
            console or Console(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TimeElapsedColumn(),
        )

    def begin(self, title: str) -> None:
        """Show the next run."""
        self._title, self._task = title, self.add_task(title, total=1, loss="-", accuracy="-")

    def show(self, progress: Progress) -> None:
        """Show the state of the run. Called in another thread than the rest."""
        loss, steps = f"{progress.loss:.4f}", progress.num_steps
        known: dict[str, Any] = {} if progress.accuracy is None else {"accuracy": f"{progress.accuracy:.1%}"}
        self.update(self._task, completed=progress.step, total=steps, loss=loss, **known)
        if known and self.disable:
            where = f"epoch {progress.epoch:2}, step {progress.step} of {steps}"
            line = f"{self._title}: {where}, loss {loss}, test accuracy {known['accuracy']}"
            self.console.print(line, highlight=False, soft_wrap=True)


def save_plot(path: Path, one: History, several: History, *, num_ranks: int, min_accuracy: float) -> None:
    """Draw the run on one rank and the run on several into a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes, difference_axes = figure.subplots(1, 3)
    figure.suptitle(f"Handwritten digits: the same training on 1 rank and on {num_ranks} ranks")
    # The runs coincide: the first is drawn broad and pale, so that both are seen.
    steps = range(1, len(one.losses) + 1)
    loss_axes.plot(steps, one.losses, color=_ONE, linewidth=4, label="1 rank")
    loss_axes.plot(steps, several.losses, color=_SEVERAL, linewidth=1, label=f"{num_ranks} ranks")
    loss_axes.set(title="Training loss", xlabel="step", ylim=(0, None))
    loss_axes.legend(frameon=False)
    _draw_accuracies(accuracy_axes, one.accuracies, several.accuracies, min_accuracy)
    difference = np.abs(np.subtract(one.losses, several.losses))
    difference_axes.plot(steps, difference, ".", color=_SEVERAL, markersize=3)
    # Equal losses are on the zero line, which a plain logarithmic axis does not have.
    difference_axes.set_yscale("symlog", linthresh=EPS / 4)
    limits = -EPS / 16, max(10 * difference.max(), 100 * EPS)
    difference_axes.set(title="Difference of the losses", xlabel="step", ylim=limits)
    _draw_level(difference_axes, EPS, "float32 eps", offset=3)
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _draw_accuracies(axes: Axes, one: list[float], several: list[float], min_accuracy: float) -> None:
    epochs = range(1, len(one) + 1)
    axes.plot(epochs, one, color=_ONE, linewidth=4, marker="o", markersize=9)
    axes.plot(epochs, several, color=_SEVERAL, linewidth=1, marker="o", markersize=3)
    _draw_level(axes, min_accuracy, f"at least {min_accuracy:.0%}", offset=-10)
    last = len(epochs), several[-1]
    axes.annotate(f"{last[1]:.1%}", last, xytext=(0, 7), textcoords="offset points", ha="right", color=_SEVERAL)
    axes.set(title="Test accuracy", xlabel="epoch", ylim=(min(*one, *several, min_accuracy) - 0.02, 1.005))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_level(axes: Axes, value: float, label: str, *, offset: float) -> None:
    """Draw a dashed line, with its label at the right edge, some points above it."""
    axes.axhline(value, color=_QUIET, linewidth=1, linestyle="--")
    shift: dict[str, Any] = {"xytext": (-2, offset), "textcoords": "offset points"}
    axes.annotate(label, (1, value), xycoords=("axes fraction", "data"), ha="right", color=_QUIET, **shift)
