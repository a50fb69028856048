"""The command ``ferrodist demo``: options, output, exit code. Only the ranks import torch."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.installation import describe_missing
from ferrodist.launch import LaunchSpec, ProgramKind, launch
from ferrodist.launch.output import print_warning
from ferrodist.launch.spec import check_rank_count
from ferrodist.wording import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from ferrodist.demo.results import Progress, RunResult

_MIN_ACCURACY = 0.97
_MAX_RANKS = 48  # one image of each batch (`results.BATCH_SIZE`) for every rank
_MAX_EPOCHS = 100_000
_REQUIRED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo; a ValueError names an option that is out of range."""

    ranks: int = 2
    epochs: int = 12
    seed: int = 0
    plot: Path = Path("demo.png")

    def __post_init__(self) -> None:
        folder = self.plot.absolute().parent
        ranks = f"--ranks must be 2 to {_MAX_RANKS}, not {self.ranks}: they are compared with 1 rank, and share batches"
        for is_valid, error in (
            (2 <= self.ranks <= _MAX_RANKS, f"{ranks} of {_MAX_RANKS} images"),
            (1 <= self.epochs <= _MAX_EPOCHS, f"--epochs must be 1 to {_MAX_EPOCHS}, not {self.epochs}"),
            (0 <= self.seed < 2**63, f"--seed must be 0 to 2**63 - 1, not {self.seed}"),
            (folder.is_dir(), f"--plot: there is no folder {self.plot.parent}; make it first"),
            (not self.plot.is_dir(), f"--plot: {self.plot} is a folder; name a file in it"),
            (
                os.access(self.plot if self.plot.exists() else folder, os.W_OK),
                f"--plot: {self.plot} can't be written; choose another place",
            ),
        ):
            if not is_valid:
                raise ValueError(error)


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist demo``."""
    for name in ("ranks", "epochs", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{name} (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="where the plot goes (default %(default)s)")
    # Not from an instance, whose checks are for those who run the demo.
    parser.set_defaults(**{option.name: option.default for option in fields(DemoOptions)})


def demo_options(arguments: argparse.Namespace) -> DemoOptions:
    """Turn parsed arguments into options; ValueError also for more ranks than this host allows."""
    options = DemoOptions(arguments.ranks, arguments.epochs, arguments.seed, arguments.plot)
    check_rank_count("--ranks", options.ranks)
    return options


def run_demo(options: DemoOptions) -> int:
    """Train on one rank and on several, compare, and check both; returns the exit code.

    1 when the accuracy is below 97%, the weights differ by more than rounding explains, or the extra ``demo`` is not
    installed; the launcher's exit code when a run failed.
    """
    if missing := describe_missing("the demo", "demo", _REQUIRED):
        print_warning(missing)
        return 1
    from ferrodist.demo.display import TrainingDisplay, save_plot  # noqa: PLC0415 - needs the extra

    results: list[RunResult] = []
    with TrainingDisplay() as display:
        for num_ranks in (1, options.ranks):
            display.begin(counted(num_ranks, "rank"))
            outcome = _train(options, num_ranks, display.show)
            if isinstance(outcome, int):
                return outcome
            results.append(outcome)
    (one, _), (several, _) = results
    save_plot(options.plot, one, several, num_ranks=options.ranks, min_accuracy=_MIN_ACCURACY)
    return _report(options, *results)


def _train(options: DemoOptions, num_ranks: int, show: Callable[[Progress], None]) -> RunResult | int:
    """Train in new processes; returns the result, or the launcher's exit code when it failed."""
    from ferrodist.demo.results import follow_progress, read_result  # noqa: PLC0415 - needs NumPy

    with tempfile.TemporaryDirectory(prefix="ferrodist-demo-") as folder:
        arguments = (folder, str(options.epochs), str(options.seed))
        spec = LaunchSpec(
            program="ferrodist.demo.worker", arguments=arguments, kind=ProgramKind.MODULE, nproc_per_node=num_ranks
        )
        with follow_progress(Path(folder, "0.progress"), show):
            code = launch(spec)
        return read_result(Path(folder), num_ranks) if code == 0 else code


def _report(options: DemoOptions, one: RunResult, several: RunResult) -> int:
    """Print the comparison; returns the exit code."""
    from ferrodist.demo.results import BATCH_SIZE, EPS, are_identical, compare_weights  # noqa: PLC0415 - needs NumPy

    histories, (alone, weights) = (one[0], several[0]), (one[1][0], several[1])
    history, num_steps, ranks = several[0], len(several[0].losses), counted(options.ranks, "rank")
    comparison, identical = compare_weights(alone, weights[0], num_steps), are_identical(weights)
    checks = {
        f"test accuracy is below {_MIN_ACCURACY:.0%}": all(run.accuracies[-1] >= _MIN_ACCURACY for run in histories),
        f"the {ranks} hold different weights": identical,
        "the weights differ by more than rounding explains": comparison.absolute <= comparison.bound,
    }
    failures = [failure for failure, passed in checks.items() if not passed]
    images = f"{history.num_train} images of handwritten digits in global batches of {BATCH_SIZE}"
    factors = f"eps {EPS:.1e} x {num_steps} steps x largest weight {comparison.largest_weight:.2f}"
    same = "the same weights, bit for bit" if identical else "DIFFERENT weights"
    lines = [
        "",
        f"{images}, {options.epochs} epochs, {num_steps} steps; {history.num_test} images for the test.",
        *(
            f"  {title:<18} test accuracy {run.accuracies[-1]:.2%}, trained in {run.seconds:.1f} s"
            for title, run in zip(("1 rank", f"{ranks} over TCP"), histories, strict=True)
        ),
        "",
        f"The {ranks} hold {same}. Compared with 1 rank:",
        f"  largest difference of a weight: {comparison.absolute:.1e}",
        f"  relative to its tensor's largest weight: {comparison.relative:.1e}",
        f"  allowed: {comparison.bound:.1e}, which is float32 {factors}",
        "  Seeds, batches and updates are the same; only the order in which a batch is summed is not, and float32",
        "  rounds each sum. The bound lets each step move a weight by one unit in its last place: a rule of thumb,",
        "  for later steps may enlarge or damp a difference.",
        "",
        f"plot: {options.plot}",
        *(f"FAILED: {failure}" for failure in failures),
    ]
    if sys.stdout is not None:
        sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0
