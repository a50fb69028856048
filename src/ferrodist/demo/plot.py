"""The picture of a demo: both runs' loss and accuracy, and the difference between their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ferrodist.demo.results import History

_ONE, _SEVERAL, _QUIET = "#9ecae1", "#08519c", "#888888"


def save_plot(path: Path, one: History, several: History, *, num_ranks: int, wanted_accuracy: float) -> None:
    """Draw the run on one rank and the run on several into a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    loss_axes, accuracy_axes, difference_axes = figure.subplots(1, 3)
    figure.suptitle(f"Handwritten digits: the same training on 1 rank and on {num_ranks} ranks")
    _draw_losses(loss_axes, one, several, num_ranks)
    _draw_accuracies(accuracy_axes, one, several, wanted_accuracy)
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


def _draw_accuracies(axes: Axes, one: History, several: History, wanted: float) -> None:
    epochs = range(1, len(one.accuracies) + 1)
    axes.plot(epochs, one.accuracies, color=_ONE, linewidth=4, marker="o", markersize=9)
    axes.plot(epochs, several.accuracies, color=_SEVERAL, linewidth=1, marker="o", markersize=3)
    axes.axhline(wanted, color=_QUIET, linewidth=1, linestyle="--")
    axes.annotate(
        f"at least {wanted:.0%}",
        (1, wanted),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=_QUIET,
    )
    axes.annotate(
        f"{several.accuracies[-1]:.1%}",
        (len(epochs), several.accuracies[-1]),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right",
        color=_SEVERAL,
    )
    lowest = min(*one.accuracies, *several.accuracies, wanted)
    axes.set(title="Test accuracy", xlabel="epoch", ylim=(lowest - 0.02, 1.005))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_difference(axes: Axes, one: History, several: History) -> None:
    difference = np.abs(np.subtract(one.losses, several.losses))
    steps = np.arange(1, len(difference) + 1)
    axes.plot(steps, difference, ".", color=_SEVERAL, markersize=3)
    eps = float(np.finfo(np.float32).eps)
    # Equal losses lie on the zero line, which a plain logarithmic axis does not have.
    axes.set_yscale("symlog", linthresh=eps / 4)
    axes.set(title="Difference of the losses", xlabel="step", ylim=(-eps / 16, max(10 * difference.max(), 100 * eps)))
    axes.axhline(eps, color=_QUIET, linewidth=1, linestyle="--")
    axes.annotate(
        "float32 eps",
        (1, eps),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=_QUIET,
    )
