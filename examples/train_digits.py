"""Train a convolutional network on handwritten digits with DDP.

    ferrodist run --nproc-per-node 2 examples/train_digits.py
    python examples/train_digits.py

The second form is one process and needs no launcher. Both train on the same batches, and so to the same accuracy but
for rounding. The data come with scikit-learn: pip install '.[demo]'.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import ferrodist as fd

EPOCHS = 10
BATCH_SIZE = 48  # over all ranks, with equal parts for 2, 3, 4, 6, ...


def make_model() -> nn.Module:
    """Make a small network for images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    """Train as one rank of the job, or alone when no launcher has given this process a rank."""
    group = fd.init_process_group() if "RANK" in os.environ else fd.SimulatedBackend.create_group(1)[0]

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    shuffle = torch.Generator().manual_seed(0)  # the same order on every rank
    test, train = torch.randperm(len(labels), generator=shuffle).split([357, 1440])

    torch.manual_seed(0)
    model = fd.DDP(make_model(), group)  # every rank takes rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, EPOCHS + 1):
        for batch in train[torch.randperm(len(train), generator=shuffle)].split(BATCH_SIZE):
            mine = batch[group.rank :: group.world_size]  # this rank's part of the batch
            optimizer.zero_grad()
            loss = criterion(model(images[mine]), labels[mine])
            loss.backward()  # when it returns, gradients are the mean over the ranks
            optimizer.step()
        loss = fd.allreduce(loss.detach(), fd.ReduceOp.MEAN, group=group)
        if group.rank == 0:
            print(f"epoch {epoch:2}: loss {loss:.4f}")

    if group.rank == 0:  # every rank has the same weights, so one is enough
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(dim=1) == labels[test]).float().mean()
        print(f"{group.world_size} rank(s): test accuracy {accuracy:.1%}")
    fd.destroy_process_group()  # does nothing for a process that trains alone


if __name__ == "__main__":
    main()
