"""Transformers sharded by plans, against the same ones in one process: results and communication."""

import copy
import importlib.util
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_counter import ByteCounter
from torch import nn
from torch.nn import functional

import ferrodist as fd
from ferrodist import ColumnParallel, DeviceMesh, DTensor, Replicate, RowParallel, SequenceParallel, Shard, Style
from ferrodist.parallel.tensor_parallel import async_linear
from ferrodist.tensor.redistribute_plan import RedistributeKind
from ferrodist.testing import run_ranks

COLLECTIVES = {
    RedistributeKind.ALLREDUCE,
    RedistributeKind.ALL_GATHER,
    RedistributeKind.REDUCE_SCATTER,
    RedistributeKind.ALL_TO_ALL,
    RedistributeKind.EXCHANGE,
}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def load_example():
    path = Path(__file__).parents[4] / "examples" / "gpt" / "train.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
WIDTH, LENGTH = 128, 8  # two heads


def sharded_sequences(chunks=1):
    """The example's plan with the sequence sharded between the layers of a block."""
    return {
        "tokens": fd.VocabularyParallel(outputs=Shard(1)),
        "positions": Style(outputs=Shard(0)),
        "blocks.*.norms.*": SequenceParallel(),
        "blocks.*.queries_keys_values": ColumnParallel(blocks=3, chunks=chunks),
        "blocks.*.projection": RowParallel(outputs=Shard(1)),
        "blocks.*.hidden": ColumnParallel(chunks=chunks),
        "blocks.*.output": RowParallel(outputs=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColumnParallel(),
    }


PLANS = {"replicated": example.PLAN, "sequence": sharded_sequences(), "overlapped": sharded_sequences(chunks=2)}


def gpt(num_layers=2, width=WIDTH):
    torch.manual_seed(0)
    return example.Gpt(width, num_layers, LENGTH).double()


def tokens_of(batch=2, length=LENGTH):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(example.VOCABULARY, (batch, length + 1), generator=generator)


class WithLoss(nn.Module):
    """A model and its loss in one, so that logits stay sharded."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        scores = self.model(tokens[:, :-1])
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens[:, 1:].reshape(-1))


def inside(plan):
    return {f"model.{path}": style for path, style in plan.items()}


def mesh_of(group):
    return DeviceMesh(group, (group.world_size,), ("tp",))


def count(steps):
    return dict(Counter(step.kind for step in steps if step.kind in COLLECTIVES))


def check_gradients(sharded, plain):
    for (name, own), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert own.grad.placements == own.placements, name
        torch.testing.assert_close(
            own.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_gpt_equals_the_unsharded_one(plan, size):
    """Loss, logits and all gradients; on three ranks nothing divides evenly but the embedding: not even the heads."""
    model, tokens = gpt(), tokens_of()
    loss = WithLoss(model)(tokens)
    loss.backward()
    scores = model(tokens[:, :-1]).detach()

    def program(group):
        sharded = copy.deepcopy(model)
        sharded.zero_grad()
        sharded = fd.parallelize(sharded, mesh_of(group), PLANS[plan])
        assert sharded.head.weight is sharded.tokens.weight
        got = WithLoss(sharded)(tokens)
        torch.testing.assert_close(got, loss, **CLOSE)
        got.backward()
        check_gradients(sharded, model)
        with torch.no_grad():
            torch.testing.assert_close(sharded(tokens[:, :-1]), scores, **CLOSE)

    run_ranks(program, size)


BLOCK_PLANS = {
    name: {path.removeprefix("blocks.*."): style for path, style in plan.items() if path.startswith("blocks.")}
    for name, plan in PLANS.items()
}


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        ("replicated", {RedistributeKind.ALLREDUCE: 2}, {RedistributeKind.ALLREDUCE: 2}),
        # The weights and biases of two norms, and the two biases that are added to shards of the sequence.
        (
            "sequence",
            {RedistributeKind.ALL_GATHER: 2, RedistributeKind.REDUCE_SCATTER: 2},
            {RedistributeKind.ALL_GATHER: 2, RedistributeKind.REDUCE_SCATTER: 2, RedistributeKind.ALLREDUCE: 4},
        ),
        # Pieces of what is gathered, and the input once more in backward.
        (
            "overlapped",
            {RedistributeKind.ALL_GATHER: 4, RedistributeKind.REDUCE_SCATTER: 2},
            {RedistributeKind.ALL_GATHER: 6, RedistributeKind.REDUCE_SCATTER: 4, RedistributeKind.ALLREDUCE: 4},
        ),
    ],
)
def test_collectives_of_a_block(plan, forward, backward):
    """Two allreduces each way, or a reduce_scatter and an all_gather for each; nothing else is sent."""

    def program(group):
        mesh = mesh_of(group)
        block = fd.parallelize(example.Block(WIDTH, 2).double(), mesh, BLOCK_PLANS[plan], gathers_outputs=False)
        placement = Replicate() if plan == "replicated" else Shard(1)
        x = fd.distribute(torch.ones(2, LENGTH, WIDTH, dtype=torch.float64), mesh, placement).requires_grad_()
        block(x).sum().backward()  # what is sent once, to agree
        block.zero_grad()
        group.num_bytes = 0
        with fd.record_redistributions() as steps:
            out = block(x)
        assert out.placements == (placement,)
        found = [count(steps)]
        grad = fd.distribute(torch.ones(out.shape, dtype=torch.float64), mesh, placement, src=None)
        with fd.record_redistributions() as others:
            out.backward(grad)
        return *found, count(others), group.num_bytes, sum(step.size_bytes for step in (*steps, *others))

    results = run_ranks(program, 2, backend=ByteCounter.create_group)
    for there, back, sent, told in results:
        assert (there, back) == (forward, backward)
        # Beyond what is recorded only the agreements travel, 384 bytes for each: one at the beginning of the forward,
        # and one about each collective.
        assert told <= sent <= told + 400 * (1 + sum(there.values()) + sum(back.values()))


def test_logits_stay_sharded_until_the_loss():
    """In a step of the model only two numbers of each row of logits are sent, and one back."""
    num_layers, tokens = 2, tokens_of()
    rows = tokens[:, 1:].numel()

    def program(group):
        model = fd.parallelize(WithLoss(gpt(num_layers)), mesh_of(group), inside(PLANS["replicated"]))
        with fd.record_redistributions() as steps:
            loss = model(tokens)
        with fd.record_redistributions() as others:
            loss.backward()
        found = []
        for told in (steps, others):
            assert count(told) == {RedistributeKind.ALLREDUCE: len([step for step in told if step.kind in COLLECTIVES])}
            found.append(Counter(step.before.shape for step in told if step.kind in COLLECTIVES))
        return found

    hidden = (*tokens[:, 1:].shape, WIDTH)
    for there, back in run_ranks(program, 2):
        # Two of each block, and one of the embedding; the partial losses are reduced at the end.
        assert there == {hidden: 2 * num_layers + 1, (rows, 1): 2, (): 1}
        assert back == {hidden: 2 * num_layers + 1, (rows, 1): 1}


def test_sharded_outputs():
    """With gathers_outputs=False logits are DTensors, and a loss outside of the model equals one inside."""
    model, tokens = gpt(), tokens_of()
    expected = WithLoss(model)(tokens)
    expected.backward()

    def program(group):
        mesh = mesh_of(group)
        sharded = copy.deepcopy(model)
        sharded.zero_grad()
        sharded = fd.parallelize(sharded, mesh, PLANS["replicated"], gathers_outputs=False)
        scores = sharded(tokens[:, :-1])
        assert scores.placements == (Shard(2),)
        targets = fd.distribute(tokens[:, 1:].reshape(-1), mesh, Replicate(), src=None)
        loss = functional.cross_entropy(scores.reshape(-1, example.VOCABULARY), targets)
        torch.testing.assert_close(loss.full_tensor(), expected, **CLOSE)
        loss.backward()
        check_gradients(sharded, model)

    run_ranks(program, 2)


class Dropping(nn.Module):
    """Dropout of replicated tensors, of sharded features, and of sharded sequences."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.before, self.within, self.after = (nn.Dropout(0.5) for _ in range(3))

    def forward(self, x):
        hidden = self.within(torch.relu(self.up(self.before(self.norm(x)))))
        return x + self.after(self.down(hidden))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_dropout_equals_one_process(is_sequence):
    """Masks are those of full tensors, however these are sharded; in processes, as threads share torch's generator."""
    plan = {
        "norm": SequenceParallel() if is_sequence else Style(),
        "up": ColumnParallel(),
        "down": RowParallel(outputs=Shard(1) if is_sequence else Replicate()),
    }

    def run(model, x):
        torch.manual_seed(7)
        x = x.clone().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        return out, x.grad

    def program(group):
        torch.manual_seed(1)
        model = Dropping().double()
        x = torch.randn(2, 6, 12, dtype=torch.float64)
        expected = run(model, x)
        sharded = copy.deepcopy(model)
        sharded.zero_grad()
        got = run(fd.parallelize(sharded, mesh_of(group), plan), x)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
        check_gradients(sharded, model)
        model.eval()
        sharded.eval()
        with torch.no_grad():
            torch.testing.assert_close(sharded(x), model(x), **CLOSE)

    run_ranks(program, 2, backend="native")


def test_gathering_overlaps_the_product(monkeypatch):
    """While a chunk is multiplied the next one is being gathered, and no more than that."""
    log = []

    class Watched:
        def __init__(self, pending, name):
            self.pending, self.name = pending, name

        def wait(self):
            log.append(f"wait {self.name}")
            return self.pending.wait()

    def watch(start):
        numbers = iter(range(9))

        def started(*args, **named):
            number = next(numbers)
            log.append(f"start {number}")
            return Watched(start(*args, **named), number)

        return started

    def linear(*args):
        log.append("multiply")
        return functional.linear(*args)

    layer, x = nn.Linear(4, 6).double(), torch.ones(1, 6, 4, dtype=torch.float64)
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    sharded = fd.parallelize(copy.deepcopy(layer), mesh, {"": ColumnParallel(chunks=3)}, gathers_outputs=False)
    monkeypatch.setattr(async_linear, "async_all_gather", watch(async_linear.async_all_gather))
    monkeypatch.setattr(async_linear, "functional", SimpleNamespace(linear=linear))
    got = sharded(fd.distribute(x, mesh, Shard(1)))
    torch.testing.assert_close(got.to_local(), layer(x), **CLOSE)
    assert ", ".join(log) == ("start 0, wait 0, start 1, multiply, wait 1, start 2, multiply, wait 2, multiply")


def test_chunks_under_autocast():
    """They are sent and multiplied in the small dtype; gradients have the parameters' dtype."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 8, 4, generator=generator)
    layer = nn.Linear(4, 6)

    def run(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        full = out.full_tensor() if isinstance(out, DTensor) else out
        full.float().square().sum().backward()
        return full.detach()

    expected = run(layer, x)

    def program(group):
        mesh = mesh_of(group)
        sharded = fd.parallelize(copy.deepcopy(layer), mesh, {"": ColumnParallel(chunks=2)}, gathers_outputs=False)
        its = fd.distribute(x, mesh, Shard(1), src=None).requires_grad_()
        with fd.record_redistributions() as steps:
            got = run(sharded, its)
        assert {step.before.dtype for step in steps} >= {torch.bfloat16}
        assert (got.dtype, its.grad.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
        for own, other in zip(sharded.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=0.05, atol=0.05)

    run_ranks(program, 2)


@pytest.mark.parametrize("blocks", [1, 3])
def test_chunks_of_inputs_of_any_shape(blocks):
    """Inputs of two, three and four dims, with and without bias, and under no_grad."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def program(group, layer, x, grad):
        mesh = mesh_of(group)
        sharded = copy.deepcopy(layer)
        sharded.zero_grad()
        sharded = fd.parallelize(sharded, mesh, {"": ColumnParallel(chunks=2, blocks=blocks)}, gathers_outputs=False)
        its = fd.distribute(x.detach(), mesh, Shard(x.dim() - 2), src=None).requires_grad_()
        out = sharded(its)
        assert out.placements == (Shard(x.dim() - 1, blocks),)
        with torch.no_grad():
            expected = layer(x)
            torch.testing.assert_close(out.full_tensor(), expected, **CLOSE)
            torch.testing.assert_close(sharded(its).full_tensor(), expected, **CLOSE)
        out.backward(fd.distribute(grad, mesh, Replicate(), src=None))
        torch.testing.assert_close(its.grad.full_tensor(), x.grad, **CLOSE)
        check_gradients(sharded, layer)

    for shape, bias in (((8, 4), True), ((2, 8, 4), False), ((3, 2, 8, 4), True)):
        layer = nn.Linear(4, 12, bias=bias).double()
        for own in layer.parameters():
            own.data = draw(*own.shape)
        x, grad = draw(*shape).requires_grad_(), draw(*shape[:-1], 12)
        layer(x).backward(grad)
        run_ranks(program, 2, layer, x, grad)
