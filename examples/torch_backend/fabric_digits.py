"""Train on handwritten digits with Lightning Fabric, whose ranks talk by ferrodist.

    pip install lightning '.[demo]'
    torchrun --nproc-per-node 2 examples/torch_backend/fabric_digits.py

What differs from any other program with Fabric is one argument: ``process_group_backend="ferrodist"``.
"""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    """Train as one rank."""
    strategy = DDPStrategy(process_group_backend="ferrodist")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(data, [1440, 357])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    batches = fabric.setup_dataloaders(DataLoader(train, batch_size=24, shuffle=True))
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, EPOCHS + 1):
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.print(f"epoch {epoch}: loss {mean:.4f}")
    with torch.no_grad():
        inputs, labels = test[:]
        mine = slice(fabric.global_rank, None, fabric.world_size)
        right = fabric.all_reduce((model(inputs[mine]).argmax(1) == labels[mine]).sum(), reduce_op="sum")
    fabric.print(f"{right.item() / len(labels):.1%} of {len(labels)} digits are right")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
