"""The program of one rank of ``ferrodist demo``: ``python -m ferrodist.demo.worker``, started by the launcher.

Only the order of additions depends on the number of ranks. Everything random comes from one seed on every rank: the
initial weights, and the order of the images, of which each rank takes its shard of every batch. The loss is a sum
divided by the size of the whole batch, so that shards need not be of equal size. Rank 0 reports its progress to the
command, and all ranks their results, in files: JSON and NumPy's, which hold no code.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BATCH_SIZE = 48  # images in a step, over all ranks
_SPLIT_SEED = 0  # the test images are the same whatever --seed says


class Progress(msgspec.Struct, frozen=True):
    """The state of a run after a step; ``accuracy`` is given at the end of an epoch."""

    step: int
    num_steps: int
    epoch: int
    loss: float
    accuracy: float | None = None


class History(msgspec.Struct, frozen=True):
    """The history of a training; ``seconds`` are without the start of processes."""

    losses: list[float]  # of the global batch at each step, before the step
    accuracies: list[float]  # on the test images after each epoch
    seconds: float
    num_train: int
    num_test: int


def main(folder: Path, num_epochs: int, seed: int) -> None:
    """Train as the rank that the environment names, and write progress and results into a folder."""
    # Ctrl-C ends the demo, without a traceback from each rank: also in the seconds in which torch is imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch  # noqa: PLC0415

    # Images of 8 by 8 pixels leave a second thread nothing to do, and on busy cores threads wait for each other.
    torch.set_num_threads(1)
    group = fd.init_process_group("tcp")
    # The command follows rank 0's file: the other ranks are as far.
    with (folder / f"{group.rank}.progress").open("wb", buffering=0) as file:
        weights, history = train(group, num_epochs, seed, lambda state: file.write(msgspec.json.encode(state) + b"\n"))
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    np.savez(folder / f"{group.rank}.npz", allow_pickle=False, **arrays)
    (folder / f"{group.rank}.json").write_bytes(msgspec.json.encode(history))
    fd.destroy_process_group()


def make_model(seed: int) -> torch.nn.Module:
    """A convolutional network of 38,282 parameters.

    It keeps differences by rounding small. Its activation is smooth: with ReLU a difference in the last bit of a sum
    can switch a unit on or off, and runs that round differently drifted apart by 4e-2 instead of 1e-6. Its weights
    begin at a scale (Kaiming's) at which training has no unstable phase; one enlarged the differences to 8e-4.
    """
    import torch  # noqa: PLC0415

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.SiLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 64),
        torch.nn.SiLU(),
        torch.nn.Linear(64, 10),
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            torch.nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
        else:
            torch.nn.init.zeros_(parameter)
    return model


def train(
    group: fd.Backend, num_epochs: int, seed: int, on_progress: Callable[[Progress], object]
) -> tuple[dict[str, torch.Tensor], History]:
    """Train on scikit-learn's 1797 handwritten digits, all ranks alike; returns parameters by name, and the history."""
    import torch  # noqa: PLC0415
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1  # N x 1 x 8 x 8, from -1 to 1
    labels = torch.tensor(digits.target)[order]
    num_test = len(order) // 5  # the first ones, which training never sees
    num_train = len(order) - num_test
    num_steps = num_epochs * (num_train // BATCH_SIZE)
    ddp = fd.DDP(make_model(seed), group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    shuffle = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    accuracies: list[float] = []
    begin = time.perf_counter()
    for epoch in range(1, num_epochs + 1):
        order = num_test + torch.randperm(num_train, generator=shuffle)
        for batch in torch.split(order, BATCH_SIZE)[: num_train // BATCH_SIZE]:
            # This rank's shard of the batch. DDP averages gradients over the ranks; the factor makes it a sum.
            own = batch.tensor_split(group.world_size)[group.rank]
            optimizer.zero_grad()
            scores = ddp(images[own])
            summed = torch.nn.functional.cross_entropy(scores, labels[own], reduction="sum", label_smoothing=0.1)
            loss = summed * (group.world_size / len(batch))
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            losses.append(fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=group).item())
            on_progress(Progress(len(losses), num_steps, epoch, losses[-1]))
        with torch.no_grad():
            hits = ddp(images[:num_test]).argmax(dim=1) == labels[:num_test]
        accuracies.append(hits.double().mean().item())
        on_progress(Progress(len(losses), num_steps, epoch, losses[-1], accuracies[-1]))
    return ddp.state_dict(), History(losses, accuracies, time.perf_counter() - begin, num_train, num_test)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
