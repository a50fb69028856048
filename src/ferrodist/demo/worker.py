"""The program of one rank of ``ferrodist demo``: ``python -m ferrodist.demo.worker``, started by the launcher."""

from __future__ import annotations

import argparse
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the rank that the environment names, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m ferrodist.demo.worker")
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--progress", type=Path, required=True, help="the named pipe that the command reads")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)
    # Ctrl-C ends the demo, without a traceback from each rank: also in the seconds in which torch is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: PLC0415

    from ferrodist.backends.process_group import destroy_process_group, init_process_group  # noqa: PLC0415
    from ferrodist.demo.results import write_history, write_progress, write_weights  # noqa: PLC0415
    from ferrodist.demo.training import train  # noqa: PLC0415

    # Images of 8 by 8 pixels leave a second thread nothing to do, and on busy cores threads wait for each other.
    torch.set_num_threads(1)
    group = init_process_group("tcp")
    # The other ranks are as far as rank 0, which reports for all.
    with options.progress.open("wb", buffering=0) if group.rank == 0 else nullcontext() as pipe:
        report = (lambda _: None) if pipe is None else partial(write_progress, pipe)
        weights, history = train(group, num_epochs=options.epochs, seed=options.seed, on_progress=report)
    write_weights(options.folder, group.rank, {name: tensor.numpy() for name, tensor in weights.items()})
    if group.rank == 0:
        write_history(options.folder, history)
    destroy_process_group()


if __name__ == "__main__":
    main()
