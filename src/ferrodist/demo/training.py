"""The model, the data and the training loop of each rank.

Only the order of additions depends on the number of ranks. Everything random comes from one seed on every rank: the
initial weights, and the order of the images, of which each rank takes its shard of every batch. The loss is a sum
divided by the size of the whole batch, so that shards need not be of equal size.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.demo.results import BATCH_SIZE, History, Progress
from ferrodist.parallel.ddp import DDP

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_SPLIT_SEED = 0  # the test images are the same whatever --seed says


def make_model(seed: int) -> torch.nn.Module:
    """A convolutional network of 38,282 parameters.

    It keeps differences by rounding small. Its activation is smooth: with ReLU a difference in the last bit of a sum
    can switch a unit on or off, and runs that round differently drifted apart by 4e-2 instead of 1e-6. Its weights
    begin at a scale (Kaiming's) at which training has no unstable phase; one enlarged the differences to 8e-4.
    """
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
    group: Backend, *, num_epochs: int, seed: int, on_progress: Callable[[Progress], None]
) -> tuple[dict[str, torch.Tensor], History]:
    """Train on scikit-learn's 1797 handwritten digits; returns the parameters by name, and the history.

    All ranks of ``group`` call this alike.
    """
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1  # N x 1 x 8 x 8, from -1 to 1
    labels = torch.tensor(digits.target)[order]
    num_test = len(order) // 5  # the first ones, which training never sees
    num_train = len(order) - num_test
    num_steps = num_epochs * (num_train // BATCH_SIZE)
    ddp = DDP(make_model(seed), group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    shuffle = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    accuracies: list[float] = []
    begin = time.perf_counter()
    for epoch in range(1, num_epochs + 1):
        order = num_test + torch.randperm(num_train, generator=shuffle)
        for batch in torch.split(order, BATCH_SIZE)[: num_train // BATCH_SIZE]:
            losses.append(_step(ddp, optimizer, images[batch], labels[batch], group))
            schedule.step()
            on_progress(Progress(len(losses), num_steps, epoch, losses[-1]))
        with torch.no_grad():
            hits = ddp(images[:num_test]).argmax(dim=1) == labels[:num_test]
        accuracies.append(hits.double().mean().item())
        on_progress(Progress(len(losses), num_steps, epoch, losses[-1], accuracies[-1]))
    return ddp.state_dict(), History(losses, accuracies, time.perf_counter() - begin, num_train, num_test)


def _step(
    ddp: DDP, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, group: Backend
) -> float:
    """Train on this rank's shard of a batch; returns the loss of the whole batch."""
    sizes = compute_shard_sizes(len(labels), group.world_size)
    own_images, own_labels = (torch.split(whole, sizes)[group.rank] for whole in (images, labels))
    optimizer.zero_grad()
    summed = cross_entropy(ddp(own_images), own_labels, reduction="sum", label_smoothing=0.1)
    # DDP averages gradients over the ranks; this makes it a sum.
    loss = summed * (group.world_size / len(labels))
    torch.autograd.backward(loss)
    optimizer.step()
    return allreduce(loss.detach(), ReduceOp.MEAN, group=group).item()
