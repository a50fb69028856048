"""The program of one rank of ``ferrodist demo``: ``python -m ferrodist.demo.worker``, started by the launcher."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path


def main(folder: Path, num_epochs: int, seed: int) -> None:
    """Train as the rank that the environment names, and write the results into a folder, which has the pipe."""
    # Ctrl-C ends the demo, without a traceback from each rank: also in the seconds in which torch is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: PLC0415

    from ferrodist.backends.process_group import destroy_process_group, init_process_group  # noqa: PLC0415
    from ferrodist.demo.results import write_progress, write_result  # noqa: PLC0415
    from ferrodist.demo.training import train  # noqa: PLC0415

    # Images of 8 by 8 pixels leave a second thread nothing to do, and on busy cores threads wait for each other.
    torch.set_num_threads(1)
    group = init_process_group("tcp")
    # The other ranks are as far as rank 0, which reports for all.
    with (folder / "progress").open("wb", buffering=0) if group.rank == 0 else nullcontext() as pipe:
        report = (lambda _: None) if pipe is None else partial(write_progress, pipe)
        weights, history = train(group, num_epochs=num_epochs, seed=seed, on_progress=report)
    write_result(folder, group.rank, {name: tensor.numpy() for name, tensor in weights.items()}, history)
    destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
