"""Train on handwritten digits with Hugging Face Accelerate, whose ranks talk by ferrodist.

    pip install accelerate '.[demo]'
    torchrun --nproc-per-node 2 examples/torch_backend/accelerate_digits.py

What differs from any other program with Accelerate is one line: the ranks have met when it looks for them. (Of its own
argument ``backend`` it takes names that it knows.)
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    """Train as one rank."""
    torch.distributed.init_process_group("ferrodist")
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(data, [1440, 357])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, batches, tests = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=24, shuffle=True), DataLoader(test, batch_size=64)
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, EPOCHS + 1):
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
    found = []
    with torch.no_grad():
        for inputs, labels in tests:
            found.append(accelerator.gather_for_metrics(model(inputs).argmax(1) == labels))
    correct = torch.cat(found)
    accelerator.print(f"{correct.float().mean():.1%} of {len(correct)} digits are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
