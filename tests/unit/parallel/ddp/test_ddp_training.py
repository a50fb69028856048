"""Twenty steps of training end as in one process."""

import copy

import pytest
import torch
from ddp_ranks import TiedGpt, assert_same_bits, seeded

from ferrodist import DDP, convert_sync_batchnorm
from ferrodist.testing import run_ranks

NUM_STEPS = 20
BATCH = 12

BACKENDS = ["simulated", "tcp-threads", "native-threads"]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 3))


def cnn():
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 4)),
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 3),
    )


def features(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def text(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(19, (BATCH, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


TASKS = {"mlp": (mlp, features), "cnn": (cnn, features), "gpt": (TiedGpt, text)}


def loss_of(model, inputs, labels):
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def in_dtype(inputs, dtype):
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def train_alone(model, batches, make_optimizer, dtype):
    """One process with whole batches."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(NUM_STEPS):
        inputs, labels = batches(step)
        optimizer.zero_grad()
        loss = loss_of(model, in_dtype(inputs, dtype), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def train_in_parts(model, batches, make_optimizer, num_parts):
    """One process that adds up the gradients of parts of the batch in their order, and divides: DDP's order."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        inputs, labels = batches(step)
        for part in range(num_parts):
            rows = slice(part * BATCH // num_parts, (part + 1) * BATCH // num_parts)
            loss = loss_of(model, inputs[rows], labels[rows])
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= num_parts
        optimizer.step()
    return model.state_dict(), losses


def train_rank(group, start, batches, make_optimizer, dtype=torch.float32):
    model = convert_sync_batchnorm(copy.deepcopy(start), group)
    ddp = DDP(model, group, bucket_size_mb=1e-3)
    optimizer, losses = make_optimizer(ddp.parameters()), []
    rows = slice(group.rank * BATCH // group.world_size, (group.rank + 1) * BATCH // group.world_size)
    for step in range(NUM_STEPS):
        inputs, labels = batches(step)
        optimizer.zero_grad()
        loss = loss_of(ddp, in_dtype(inputs[rows], dtype), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return ddp.state_dict(), losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_training_equals_one_process(task, optimizer):
    """In double precision weights and losses are those of one process with the whole batch, to far below 1e-6."""
    make, batches = TASKS[task]
    start = seeded(make)
    expected, losses = train_alone(copy.deepcopy(start), batches, OPTIMIZERS[optimizer], torch.float64)
    results = run_ranks(train_rank, 3, start, batches, OPTIMIZERS[optimizer], torch.float64)
    assert_same_bits([state for state, _ in results])
    means = torch.tensor([own for _, own in results]).mean(dim=0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=1e-6, atol=0)
    for name, tensor in expected.items():
        torch.testing.assert_close(results[0][0][name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("task", TASKS)
def test_float32_training_equals_one_process(task):
    """In single precision weights and losses agree to 1e-6 of the largest weight."""
    make, batches = TASKS[task]
    start = seeded(make, torch.float32)
    expected, losses = train_alone(copy.deepcopy(start), batches, OPTIMIZERS["sgd"], torch.float32)
    results = run_ranks(train_rank, 2, start, batches, OPTIMIZERS["sgd"])
    means = torch.tensor([own for _, own in results]).mean(dim=0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=2e-6, atol=0)
    for name, tensor in expected.items():
        scale = 1e-6 * max(1.0, tensor.abs().max().item())
        torch.testing.assert_close(results[0][0][name], tensor, rtol=1e-6, atol=scale, msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", ["mlp", "gpt"])
def test_training_has_the_bits_of_one_process_that_adds_in_order(task, backend, optimizer):
    """If one process adds up the ranks' gradients in rank order, weights and losses are the same bits."""
    make, batches = TASKS[task]
    start = seeded(make, torch.float32)
    expected, losses = train_in_parts(copy.deepcopy(start), batches, OPTIMIZERS[optimizer], 2)
    results = run_ranks(train_rank, 2, start, batches, OPTIMIZERS[optimizer], backend=backend)
    assert [own for pair in zip(*(own for _, own in results), strict=True) for own in pair] == losses
    assert_same_bits([expected, *(state for state, _ in results)])


def test_all_backends_give_the_same_bits():
    """A network with synchronised batch norm ends with the same bits in memory, over TCP and in the engine."""
    make, batches = TASKS["cnn"]
    start = seeded(make, torch.float32)
    states = []
    for backend in BACKENDS:
        states += [state for state, _ in run_ranks(train_rank, 3, start, batches, OPTIMIZERS["sgd"], backend=backend)]
    assert_same_bits(states)
