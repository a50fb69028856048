"""The model, the data and the training loop of each rank.

Only the order of additions depends on the number of ranks. Everything random comes from one seed on every rank: the
initial weights, and the order of the images, of which each rank takes its shard of every batch. The loss is a sum
divided by the size of the whole batch, so that shards need not be of equal size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.demo.results import History, Progress
from ferrodist.parallel.ddp import DDP

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

BATCH_SIZE = 48  # images in a step, over all ranks

_LEARNING_RATE = 0.05
_SPLIT_SEED = 0  # the test images are the same whatever --seed says


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Scikit-learn's 1797 handwritten digits, which come with the package; training never sees the fifth for the test.

    Images have shape (N, 1, 8, 8) and values from -1 to 1, labels shape (N,) and values 0 to 9.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read the digits, and split them."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        test, rest = order[: len(order) // 5], order[len(order) // 5 :]
        return cls(
            train_images=images[rest], train_labels=labels[rest], test_images=images[test], test_labels=labels[test]
        )


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
    """Train on the ranks of ``group``, which all call this alike; returns the parameters by name, and the history."""
    digits = Digits.load()
    ddp = DDP(make_model(seed), group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE, momentum=0.9, nesterov=True)
    num_train = len(digits.train_labels)
    num_steps = num_epochs * (num_train // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    shuffle = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    accuracies: list[float] = []
    begin = time.perf_counter()
    for epoch in range(1, num_epochs + 1):
        order = torch.randperm(num_train, generator=shuffle)
        for batch in torch.split(order, BATCH_SIZE)[: num_train // BATCH_SIZE]:
            losses.append(_step(ddp, optimizer, digits.train_images[batch], digits.train_labels[batch], group))
            schedule.step()
            on_progress(Progress(step=len(losses), num_steps=num_steps, epoch=epoch, loss=losses[-1]))
        accuracies.append(_accuracy(ddp, digits, group))
        on_progress(
            Progress(step=len(losses), num_steps=num_steps, epoch=epoch, loss=losses[-1], accuracy=accuracies[-1])
        )
    history = History(
        losses=losses,
        accuracies=accuracies,
        seconds=time.perf_counter() - begin,
        num_train=num_train,
        num_test=len(digits.test_labels),
        batch_size=BATCH_SIZE,
    )
    return ddp.state_dict(), history


def _step(
    ddp: DDP, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, group: Backend
) -> float:
    """Train on this rank's shard of a batch; returns the loss of the whole batch."""
    sizes = compute_shard_sizes(len(labels), group.world_size)
    own_images, own_labels = torch.split(images, sizes)[group.rank], torch.split(labels, sizes)[group.rank]
    optimizer.zero_grad()
    summed = cross_entropy(ddp(own_images), own_labels, reduction="sum", label_smoothing=0.1)
    # DDP averages gradients over the ranks; this makes it a sum.
    loss = summed * (group.world_size / len(labels))
    torch.autograd.backward(loss)
    optimizer.step()
    return allreduce(loss.detach(), ReduceOp.MEAN, group=group).item()


@torch.no_grad()
def _accuracy(ddp: DDP, digits: Digits, group: Backend) -> float:
    """The accuracy on all test images; each rank classifies its shard."""
    sizes = compute_shard_sizes(len(digits.test_labels), group.world_size)
    images, labels = (torch.split(of, sizes)[group.rank] for of in (digits.test_images, digits.test_labels))
    ddp.eval()
    num_right = (ddp(images).argmax(dim=1) == labels).sum()
    ddp.train()
    return allreduce(num_right, group=group).item() / len(digits.test_labels)
