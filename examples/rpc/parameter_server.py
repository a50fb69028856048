"""Train a network on handwritten digits with a parameter server: trainers wait for nobody.

    ferrodist run --nproc-per-node 3 examples/rpc/parameter_server.py
    python examples/rpc/parameter_server.py

Rank 0 keeps the parameters, and all other ranks train: each pulls the newest parameters, and pushes its gradients while
it goes on. Meanwhile others have pushed theirs, so gradients are of parameters that are a few steps old; how old they
are is counted, and those that are too old are refused. The second form is one process that does both. The data come
with scikit-learn: pip install '.[demo]'.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import threading
import weakref
from collections import Counter, deque
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ferrodist as fd

BATCH_SIZE = 32
LEARNING_RATE = 0.1
PATIENCE = 60.0  # seconds that a pull or a push may take


class Parameters:
    """A model's parameters, and what trainers pushed to them. Agents call methods of an object side by side.

    Args:
        model: What is trained.
        most_stale: Gradients of parameters that more steps have changed since are refused.
    """

    def __init__(self, model: nn.Module, most_stale: int) -> None:
        self.losses: list[float] = []
        self.staleness: Counter[int] = Counter()
        self.num_refused = 0
        self._parameters = list(model.parameters())
        self._most_stale = most_stale
        self._version = 0
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, list[torch.Tensor]]:
        """The parameters, and how many steps have made them."""
        with self._lock:
            # A result is sent after this returns, when the next push may have changed the parameters.
            return self._version, [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def push(self, version: int, gradients: list[torch.Tensor], loss: float) -> bool:
        """Make a step, if the gradients are of parameters that are new enough; whether they are."""
        with self._lock:
            staleness = self._version - version
            self.staleness[staleness] += 1
            self.losses.append(loss)
            if staleness > self._most_stale:
                self.num_refused += 1
                return False
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter -= LEARNING_RATE * gradient  # noqa: PLW2901 - in place
            self._version += 1
            return True


def make_model() -> nn.Module:
    """Make a small network for images of 64 pixels, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and those to test with."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    test, train = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split([357, 1440])
    return images[train], labels[train], images[test], labels[test]


def train(parameters: fd.rpc.RRef, seed: int, steps: int, most_pushes: int = 2) -> int:
    """Train as one of several.

    Args:
        parameters: A reference to `Parameters`.
        seed: Of this trainer's batches.
        steps: How often to push.
        most_pushes: Of these, how many may be on their way.

    Returns:
        How many pushes were refused.
    """
    images, labels, _, _ = load_data()
    draw = torch.Generator().manual_seed(seed)
    model = make_model()
    pushes: deque[fd.rpc.Future] = deque()
    num_refused = 0
    for _ in range(steps):
        version, values = parameters.rpc_sync(timeout=PATIENCE).pull()
        model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
        batch = torch.randint(len(labels), (BATCH_SIZE,), generator=draw)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))  # new tensors: those of pushes must not change
        if len(pushes) == most_pushes:
            num_refused += not pushes.popleft().result()
        pushes.append(parameters.rpc_async(timeout=PATIENCE).push(version, list(gradients), loss.item()))
    return num_refused + sum(not push.result() for push in pushes)


def parse_arguments() -> argparse.Namespace:
    """How long to train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pushes", type=int, default=1500, help="of all trainers together (default: 1500)")
    parser.add_argument(
        "--most-stale", type=int, default=8, metavar="STEPS", help="refuse gradients that are older (default: 8)"
    )
    parser.add_argument("--plot", type=Path, help="a PNG file for the losses and how old gradients were")
    return parser.parse_args()


def draw_plot(losses: list[float], staleness: Counter[int], path: Path) -> None:
    """Draw the losses, and how old gradients were."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - nothing else needs it

    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    loss_axes, staleness_axes = figure.subplots(1, 2)
    loss_axes.plot(losses, color="#9ecae1", linewidth=0.6, label="a batch")
    means = torch.tensor(losses).unfold(0, min(50, len(losses)), 1).mean(dim=1).tolist()
    first = len(losses) - len(means)
    loss_axes.plot(range(first, first + len(means)), means, color="#08519c", label=f"mean of {first + 1}")
    loss_axes.set(title="Training loss", xlabel="push", ylabel="nats", yscale="log")
    loss_axes.legend(frameon=False)
    staleness_axes.bar(list(staleness), list(staleness.values()), color="#08519c")
    staleness_axes.set(title="How old gradients were", xlabel="steps since the pull", ylabel="pushes")
    for axes in (loss_axes, staleness_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def serve(agent: fd.rpc.RpcAgent, options: argparse.Namespace) -> None:
    """Keep the parameters, have the other ranks train, and say how that went."""
    _, _, images, labels = load_data()
    model = make_model()
    parameters = Parameters(model, options.most_stale)
    freed = threading.Event()
    weakref.finalize(parameters, freed.set)

    trainers = range(1, agent.world_size) if agent.world_size > 1 else range(1)
    shares = [
        options.pushes // len(trainers) + (each < options.pushes % len(trainers)) for each in range(len(trainers))
    ]
    reference = agent.reference(parameters)
    calls = [
        agent.rpc_async(rank, "train", reference, seed, steps, timeout=600)
        for seed, (rank, steps) in enumerate(zip(trainers, shares, strict=True), start=1)
    ]
    while concurrent.futures.wait(calls, timeout=1).not_done:
        recent = parameters.losses[-50:]
        print(f"{len(parameters.losses):5} pushes: loss {sum(recent) / max(1, len(recent)):.4f}", flush=True)
    num_refused = sum(call.result() for call in calls)  # raises what a trainer raised

    with torch.no_grad():
        scores = model(images)
    recent = parameters.losses[-50:]
    accuracy = (scores.argmax(dim=1) == labels).float().mean()
    print(f"{len(trainers)} trainer(s), {len(parameters.losses)} pushes, {num_refused} refused")
    print(f"loss {sum(recent) / len(recent):.4f}, test loss {functional.cross_entropy(scores, labels):.4f}")
    print(f"test accuracy {accuracy:.1%}")
    ages = ", ".join(f"{age} ({count})" for age, count in sorted(parameters.staleness.items()))
    print(f"steps since the pull, and how often: {ages}")
    if options.plot is not None:
        draw_plot(parameters.losses, parameters.staleness, options.plot)
    del parameters, reference
    was_freed = freed.wait(PATIENCE)  # trainers tell when they have no reference any more; the last one frees it
    counts = agent.num_references()
    left = counts.for_others + counts.for_itself + counts.elsewhere
    print(f"parameters {'freed' if was_freed else 'not freed'}, references left: {left}")


def main() -> None:
    """Serve, or train, as one rank of the job, or do both when no launcher has given this process a rank."""
    options = parse_arguments()
    group = fd.init_process_group() if "RANK" in os.environ else fd.SimulatedBackend.create_group(1)[0]
    with fd.rpc.RpcContext(group, {"train": train, "Parameters": Parameters}, drain_timeout=600) as agent:
        if agent.rank == 0:
            serve(agent, options)
        # All others have nothing to do here: they serve the call of train().
    fd.destroy_process_group()  # does nothing for a process that is alone


if __name__ == "__main__":
    main()
