"""The command ``ferrodist demo``: its options. Only the ranks import torch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.installation import describe_missing
from ferrodist.launch.host_limits import check_rank_count
from ferrodist.launch.terminal import print_warning

if TYPE_CHECKING:
    import argparse

_MAX_RANKS = 48  # one image of each batch (`worker.BATCH_SIZE`) for every rank
_MAX_EPOCHS = 100_000
_REQUIRED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo."""

    ranks: int = 2
    epochs: int = 12
    seed: int = 0
    plot: Path = Path("demo.png")


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist demo``."""
    for name in ("ranks", "epochs", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{name} (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="where the plot goes (default %(default)s)")
    parser.set_defaults(**asdict(DemoOptions()))


def demo_options(arguments: argparse.Namespace) -> DemoOptions:
    """Turn parsed arguments into options; a ValueError names an option that is out of range."""
    options = DemoOptions(arguments.ranks, arguments.epochs, arguments.seed, arguments.plot)
    folder = options.plot.absolute().parent
    written = options.plot if options.plot.exists() else folder
    ranks = f"--ranks must be 2 to {_MAX_RANKS}, not {options.ranks}: they are compared with 1 rank, and share batches"
    for is_valid, error in (
        (2 <= options.ranks <= _MAX_RANKS, f"{ranks} of {_MAX_RANKS} images"),
        (1 <= options.epochs <= _MAX_EPOCHS, f"--epochs must be 1 to {_MAX_EPOCHS}, not {options.epochs}"),
        (0 <= options.seed < 2**63, f"--seed must be 0 to 2**63 - 1, not {options.seed}"),
        (folder.is_dir(), f"--plot: there is no folder {options.plot.parent}; make it first"),
        (not options.plot.is_dir(), f"--plot: {options.plot} is a folder; name a file in it"),
        (os.access(written, os.W_OK), f"--plot: {options.plot} can't be written; choose another place"),
    ):
        if not is_valid:
            raise ValueError(error)
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
    from ferrodist.demo.comparison import compare_runs  # noqa: PLC0415 - needs the extra

    return compare_runs(**asdict(options))
