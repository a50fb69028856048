"""The runs on one rank and on several, their progress, their comparison, and its plot.

The launcher forwards the ranks' output line by line, which would break a progress bar, and it needs the main thread for
signals: so rank 0 appends its progress to a file, which a thread follows.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.demo.worker import BATCH_SIZE, History, Progress
from ferrodist.launch import LaunchSpec, ProgramKind, launch
from ferrodist.progress import Bars
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    RunResult = tuple[History, Sequence[Mapping[str, Any]]]

EPS = float(np.finfo(np.float32).eps)  # the distance from 1 to the next larger float32
MIN_ACCURACY = 0.97
_POLL_INTERVAL_SECONDS = 0.05
_ONE, _SEVERAL, _QUIET = "#9ecae1", "#08519c", "#888888"


def compare_runs(ranks: int, epochs: int, seed: int, plot: Path) -> int:
    """Train on one rank and on several, compare and plot; returns the exit code, see `run_demo`."""
    results: list[RunResult] = []
    with TrainingDisplay() as display:
        for num_ranks in (1, ranks):
            display.begin(counted(num_ranks, "rank"))
            outcome = _train(num_ranks, epochs, seed, display.show)
            if isinstance(outcome, int):
                return outcome
            results.append(outcome)
    save_plot(plot, *(history for history, _ in results), num_ranks=ranks)
    return _report(plot, *results)


def _train(num_ranks: int, epochs: int, seed: int, show: Callable[[Progress], None]) -> RunResult | int:
    """Train in new processes; returns rank 0's history and each rank's parameters, or a failed launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="ferrodist-demo-") as folder:
        arguments = (folder, str(epochs), str(seed))
        spec = LaunchSpec(
            program="ferrodist.demo.worker", arguments=arguments, kind=ProgramKind.MODULE, nproc_per_node=num_ranks
        )
        with follow_progress(Path(folder, "0.progress"), show):
            code = launch(spec)
        if code != 0:
            return code
        weights = [dict(np.load(Path(folder, f"{rank}.npz"), allow_pickle=False)) for rank in range(num_ranks)]
        return msgspec.json.decode(Path(folder, "0.json").read_bytes(), type=History), weights


def _report(plot: Path, one: RunResult, several: RunResult) -> int:
    """Print the comparison; returns the exit code."""
    histories, (alone, weights) = (one[0], several[0]), (one[1][0], several[1])
    history, num_steps, ranks = several[0], len(several[0].losses), counted(len(weights), "rank")
    comparison, identical = compare_weights(alone, weights[0], num_steps), are_identical(weights)
    checks = {
        f"test accuracy is below {MIN_ACCURACY:.0%}": all(run.accuracies[-1] >= MIN_ACCURACY for run in histories),
        f"the {ranks} hold different weights": identical,
        "the weights differ by more than rounding explains": comparison.absolute <= comparison.bound,
    }
    failures = [failure for failure, passed in checks.items() if not passed]
    images = f"{history.num_train} images of handwritten digits in global batches of {BATCH_SIZE}"
    bound = f"{comparison.bound:.1e}, which is float32 eps {EPS:.1e} x {num_steps} steps x largest weight"
    same = "the same weights, bit for bit" if identical else "DIFFERENT weights"
    lines = [
        "",
        f"{images}, {len(history.accuracies)} epochs, {num_steps} steps; {history.num_test} images for the test.",
        *(
            f"  {title:<18} test accuracy {run.accuracies[-1]:.2%}, trained in {run.seconds:.1f} s"
            for title, run in zip(("1 rank", f"{ranks} over TCP"), histories, strict=True)
        ),
        "",
        f"The {ranks} hold {same}. Compared with 1 rank:",
        f"  largest difference of a weight: {comparison.absolute:.1e}",
        f"  relative to its tensor's largest weight: {comparison.relative:.1e}",
        f"  allowed: {bound} {comparison.largest_weight:.2f}",
        "  Seeds, batches and updates are the same; only the order in which a batch is summed is not, and float32",
        "  rounds each sum. The bound lets each step move a weight by one unit in its last place: a rule of thumb,",
        "  for later steps may enlarge or damp a difference.",
        "",
        f"plot: {plot}",
        *(f"FAILED: {failure}" for failure in failures),
    ]
    if sys.stdout is not None:
        sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0


@contextlib.contextmanager
def follow_progress(path: Path, show: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``show``, in a thread, with each state that is appended to a file; an error that it raises ends the context.

    Rank 0 goes on meanwhile: rich, for one, raises SystemExit when the reader of its output has left.
    """
    path.touch()
    is_over = threading.Event()

    def follow() -> None:
        pending, was_over = b"", False
        with path.open("rb") as file:
            while not was_over:
                was_over = is_over.wait(_POLL_INTERVAL_SECONDS)
                *lines, pending = (pending + file.read()).split(b"\n")
                for line in lines:
                    show(msgspec.json.decode(line, type=Progress))

    with ThreadPoolExecutor(1, "ferrodist-demo-progress") as threads:
        followed = threads.submit(follow)
        try:
            yield
        finally:
            is_over.set()
        followed.result()


class Comparison(NamedTuple):
    """The difference between the weights of two runs.

    [Note: bound]
    In exact arithmetic the runs are equal. In float32 they add the same numbers in another order: each rank sums
    over its shard of the batch, and then the ranks' sums are added. That moves a gradient by some of its last bits, so
    a step leaves a weight that differs by about one unit in its last place, ``eps`` times the weight. ``eps * steps *
    largest weight`` adds these up as if all went in one direction: a rule of thumb and not a theorem. Over 40
    trainings (seeds 0 to 19, 5 to 20 epochs) on 2, 3 and 4 ranks the difference was 0.2% to 1.3% of the bound. Mistakes
    are far outside: a loss that is 0.1% off by 15 times, 2 missing images of each 48 by 1,400 times, a sum of the
    gradients in place of their mean by 15,000 times.
    """

    absolute: float  # the largest difference of two weights
    relative: float  # the largest difference within a tensor, divided by its largest weight; the largest of all tensors
    bound: float  # the allowed value of `absolute`; a NaN is not within it
    largest_weight: float  # the largest absolute value of a weight


def compare_weights(one: Mapping[str, Any], other: Mapping[str, Any], num_steps: int) -> Comparison:
    """Compare two models' parameters: NumPy arrays of float32, by name."""
    differences = np.array([np.abs(one[name] - other[name]).max() for name in one], float)
    sizes = np.array([np.abs(weight).max() for weight in one.values()], float)
    relative, largest = differences / np.maximum(sizes, EPS), float(sizes.max())
    return Comparison(float(differences.max()), float(relative.max()), EPS * num_steps * largest, largest)


def are_identical(weights: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all ranks hold the same weights, bit for bit."""
    bits = [{name: weight.tobytes() for name, weight in model.items()} for model in weights]
    return all(model == bits[0] for model in bits)


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
            line = f"{self._title}: epoch {progress.epoch:2}, step {progress.step} of {steps}, loss {loss}"
            self.console.print(f"{line}, test accuracy {known['accuracy']}", highlight=False, soft_wrap=True)


def save_plot(path: Path, one: History, several: History, *, num_ranks: int) -> None:
    """Draw the run on one rank and the run on several into a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    loss_axes, accuracy_axes, difference_axes = figure.subplots(1, 3)
    figure.suptitle(f"Handwritten digits: the same training on 1 rank and on {num_ranks} ranks")
    # The runs coincide: the first is drawn broad and pale, so that both are seen.
    for run, color, width, label in ((one, _ONE, 4, "1 rank"), (several, _SEVERAL, 1, f"{num_ranks} ranks")):
        style: dict[str, Any] = {"color": color, "linewidth": width}
        steps, epochs = range(1, len(run.losses) + 1), range(1, len(run.accuracies) + 1)
        loss_axes.plot(steps, run.losses, label=label, **style)
        accuracy_axes.plot(epochs, run.accuracies, marker="o", markersize=2 * width + 1, **style)
    loss_axes.set(title="Training loss", xlabel="step", ylim=(0, None))
    loss_axes.legend(frameon=False)
    lowest = min(*one.accuracies, *several.accuracies, MIN_ACCURACY) - 0.02
    accuracy_axes.set(title="Test accuracy", xlabel="epoch", ylim=(lowest, 1.005))
    last, above = (len(several.accuracies), several.accuracies[-1]), {"textcoords": "offset points", "ha": "right"}
    accuracy_axes.annotate(f"{last[1]:.1%}", last, xytext=(0, 7), color=_SEVERAL, **above)
    accuracy_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    difference = np.abs(np.subtract(one.losses, several.losses))
    difference_axes.plot(steps, difference, ".", color=_SEVERAL, markersize=3)
    # Equal losses are on the zero line, which a plain logarithmic axis does not have.
    difference_axes.set_yscale("symlog", linthresh=EPS / 4)
    limits = -EPS / 16, max(10 * difference.max(), 100 * EPS)
    difference_axes.set(title="Difference of the losses", xlabel="step", ylim=limits)
    for axes, level, label, offset in (
        (accuracy_axes, MIN_ACCURACY, f"at least {MIN_ACCURACY:.0%}", -10),
        (difference_axes, EPS, "float32 eps", 3),
    ):
        axes.axhline(level, color=_QUIET, linewidth=1, linestyle="--")
        place: Any = ("axes fraction", "data")
        axes.annotate(label, (1, level), xycoords=place, xytext=(-2, offset), color=_QUIET, **above)
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
