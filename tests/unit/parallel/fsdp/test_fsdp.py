"""FSDP: ranks that shard a model compute the result of one process."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ferrodist import FSDP, DeviceMesh, MixedPrecision, ReduceOp, ShardingStrategy, allreduce, convert_sync_batchnorm
from ferrodist.parallel.fsdp import flat_layout, flat_memory, flat_param, scheduler
from ferrodist.testing import run_ranks

BATCH = 12  # divides over 1, 2, 3 and 4 ranks
NUM_STEPS = 20
LIMIT = 2e-6  # relative, in the norm of all weights together; 3 ranks come to 1.2e-6 with torch 2.14 and 2.15


def mlp():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )


def cnn():
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 3)),
        torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),  # a bias would have no gradient but rounding: see Block
        torch.nn.BatchNorm2d(4),
        torch.nn.SiLU(),
        torch.nn.Conv2d(4, 2, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 3),
    )


class Block(torch.nn.Module):
    """A block of a transformer.

    Without biases of keys, whose gradient is 0 but for rounding, which Adam divides by itself.
    """

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width, bias=False)
        self.mix = torch.nn.Linear(width, width)

    def forward(self, inputs):
        query, key, value = self.attention(self.norm(inputs)).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return inputs + self.mix(functional.gelu(attended))


class Gpt(torch.nn.Module):
    """A transformer with tied embeddings; inputs are floats, made tokens."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(Block(8) for _ in range(3))
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, inputs):
        hidden = self.embedding((inputs * 7).long() % 11)
        for block in self.blocks:
            if self.checkpointing is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing == "reentrant")
        return self.head(hidden).mean(1)


MODELS = {"mlp": (mlp, torch.nn.Linear), "cnn": (cnn, (torch.nn.Conv2d, torch.nn.Linear)), "gpt": (Gpt, Block)}
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": torch.optim.AdamW,
}
STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.hybrid(2),
}


def seeded(make, *arguments):
    """A model whose weights don't depend on who draws random numbers at the same time: make it before the ranks."""
    torch.manual_seed(1)
    return make(*arguments)


def batches(num_steps=NUM_STEPS):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.rand(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator))
        for _ in range(num_steps)
    ]


def part(tensor, group):
    return tensor.chunk(group.world_size)[group.rank]


def train(model, steps, optimizer, group=None):
    """The losses of the whole batches."""
    losses = []
    for batch in steps:
        optimizer.zero_grad()
        inputs, labels = batch if group is None else (part(tensor, group) for tensor in batch)
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    return losses if group is None else allreduce(losses, ReduceOp.MEAN, group=group)


def distance(state, expected):
    """How far weights are from others, in the norm of all together, relative to it."""
    assert state.keys() == expected.keys()
    difference = sum(float((state[name].double() - expected[name].double()).norm() ** 2) for name in expected)
    return math.sqrt(difference / sum(float(value.double().norm() ** 2) for value in expected.values()))


def alone(model, make_optimizer, steps):
    model = copy.deepcopy(model)
    losses = train(model, steps, make_optimizer(model.parameters()))
    return model.state_dict(), losses


def sharded_run(group, model, make_optimizer, steps, **options):
    model = copy.deepcopy(model)
    if any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
        model = convert_sync_batchnorm(model, group)
    fsdp = FSDP(model, group, **options)
    losses = train(fsdp, steps, make_optimizer(fsdp.parameters()), group)
    return fsdp.full_state_dict(), losses


def check_equal_to_one_process(model, optimizer, world_size, backend, **options):
    steps = batches()
    if next(model.parameters()).dtype is torch.float64:
        steps = [(inputs.double(), labels) for inputs, labels in steps]
    expected, expected_losses = alone(model, OPTIMIZERS[optimizer], steps)
    results = run_ranks(sharded_run, world_size, model, OPTIMIZERS[optimizer], steps, backend=backend, **options)
    for state, losses in results:
        assert distance(state, expected) < LIMIT
        assert torch.allclose(losses, expected_losses, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in MODELS), ("mlp", "momentum")])
def test_training_equals_one_process(name, strategy, optimizer):
    """After 20 steps loss and weights are those of one process with all ranks' batches, with every strategy."""
    make, wrap = MODELS[name]
    world_size = 4 if strategy == "hybrid" else 2
    check_equal_to_one_process(
        seeded(make), optimizer, world_size, "simulated", strategy=STRATEGIES[strategy], wrap=wrap
    )


@pytest.mark.parametrize("name", MODELS)
def test_training_in_double_precision_equals_one_process(name, monkeypatch):
    """The difference in float32 is rounding: in float64 it is a billion times smaller."""
    monkeypatch.setattr(f"{__name__}.LIMIT", 1e-13)
    make, wrap = MODELS[name]
    check_equal_to_one_process(seeded(make).double(), "adamw", 3, "simulated", wrap=wrap)


@pytest.mark.parametrize(
    ("backend", "uses_shared_view"), [("tcp-threads", False), ("native-threads", False), ("native", True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_process_on_each_backend(name, backend, uses_shared_view, monkeypatch):
    """The same over connections and shared memory, with three ranks, which divide hardly any shape evenly."""
    if uses_shared_view:  # as large units are
        monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)
    make, wrap = MODELS[name]
    check_equal_to_one_process(seeded(make), "adamw", 3, backend, wrap=wrap)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"forward_prefetch": 0, "backward_prefetch": 0},
        {"forward_prefetch": 5, "backward_prefetch": 5},
        {"reshard_after_forward": False},
        {"wrap": None},
        {"wrap": (Block, torch.nn.Linear, torch.nn.LayerNorm)},
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_options_change_no_result(world_size, options):
    """Prefetching, freeing and the choice of units change when ranks communicate, not the result."""
    check_equal_to_one_process(seeded(Gpt), "adamw", world_size, "simulated", **{"wrap": Block, **options})


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("kind", ["reentrant", "other"])
def test_activation_checkpointing(kind, prefetch):
    """Recomputed blocks find their parameters in backward."""
    model = seeded(Gpt, kind)
    check_equal_to_one_process(model, "momentum", 2, "simulated", wrap=Block, backward_prefetch=prefetch)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_foreach_and_fused_optimizers(options):
    """They step on shards, also empty ones, as on parameters."""
    model, steps = seeded(mlp), batches(5)

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, **options)

    expected, _ = alone(model, make, steps)
    for state, _ in run_ranks(sharded_run, 3, model, make, steps, wrap=torch.nn.Linear):
        assert distance(state, expected) < LIMIT


def test_an_optimizer_made_before_stays_right(run):
    """The module's own parameters become the shards, so that the optimizer holds no stale ones."""
    model, steps = seeded(mlp), batches(3)
    expected, _ = alone(model, OPTIMIZERS["momentum"], steps)

    def program(group):
        own = copy.deepcopy(model)
        optimizer = OPTIMIZERS["momentum"](own.parameters())
        fsdp = FSDP(own, group, wrap=torch.nn.Linear)
        train(fsdp, steps, optimizer, group)
        return fsdp.full_state_dict()

    for state in run(program, 2):
        assert distance(state, expected) < LIMIT


class Branches(torch.nn.Module):
    """Takes some of several ways, and multiplies."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs, *taken):
        return [self.branches[branch](inputs) for branch in taken]


def test_parameters_that_some_or_no_rank_reaches(run):
    """A rank without a gradient contributes zeros; a gradient that no rank has stays None."""
    model = seeded(Branches)
    inputs, _ = batches(1)[0]

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        outputs = fsdp(inputs, 0, 1, 2)
        (outputs[0].sum() + outputs[1].sum() if group.rank == 0 else outputs[0].sum()).backward()
        grads = [shard.grad for shard in fsdp.parameters()]
        with_gradients = [grad is not None for grad in grads]
        total = fsdp.clip_grad_norm_(math.inf)
        return with_gradients, float(total)

    for with_gradients, total in run(program, 2):
        assert with_gradients == [True] * 4 + [False] * 2
        own = copy.deepcopy(model)
        outputs = own(inputs, 0, 1)
        (outputs[0].sum() + outputs[1].sum() / 2).backward()
        assert total == pytest.approx(float(torch.nn.utils.clip_grad_norm_(own.parameters(), math.inf)), rel=1e-6)


def test_frozen_parameters(run):
    """They are gathered, not reduced, keep their values and get no gradient; freezing may change between steps."""
    model = seeded(mlp)
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    steps = batches(4)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        optimizer = OPTIMIZERS["momentum"](fsdp.parameters())
        train(fsdp, steps[:2], optimizer, group)
        fsdp.module[2].requires_grad_(True)
        train(fsdp, steps[2:], optimizer, group)
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](own.parameters())
    train(own, steps[:2], optimizer)
    own[2].requires_grad_(True)
    train(own, steps[2:], optimizer)
    for state in run(program, 2):
        assert distance(state, own.state_dict()) < LIMIT


@pytest.mark.parametrize("ending", ["backward", "sync_gradients"])
@pytest.mark.parametrize("is_syncing", [True, False])
def test_gradient_accumulation(is_syncing, ending):
    """Two backwards before a step are one with both batches, whether or not the first is averaged at once."""
    model, steps = seeded(Gpt), batches(6)
    pairs = list(zip(steps[::2], steps[1::2], strict=True))

    def accumulate(fsdp, optimizer, group):
        for first, second in pairs:
            optimizer.zero_grad()
            for inputs, labels, syncs in [(*first, is_syncing), (*second, is_syncing or ending == "backward")]:
                loss = functional.cross_entropy(fsdp(part(inputs, group)), part(labels, group)) / 2
                if syncs:
                    loss.backward()
                else:
                    with fsdp.no_sync():
                        loss.backward()
            fsdp.sync_gradients()
            optimizer.step()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=Block)
        accumulate(fsdp, OPTIMIZERS["momentum"](fsdp.parameters()), group)
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](own.parameters())
    for first, second in pairs:
        optimizer.zero_grad()
        for inputs, labels in (first, second):
            (functional.cross_entropy(own(inputs), labels) / 2).backward()
        optimizer.step()
    for state in run_ranks(program, 2):
        assert distance(state, own.state_dict()) < LIMIT


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_is_exact(strategy, norm_type):
    """The norm is the whole model's, the same on all ranks, and gradients are scaled by it."""
    model = seeded(mlp)
    inputs, labels = batches(1)[0]
    own = copy.deepcopy(model)
    functional.cross_entropy(own(inputs), labels).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1, norm_type))

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        functional.cross_entropy(fsdp(part(inputs, group)), part(labels, group)).backward()
        before = float(fsdp.clip_grad_norm_(0.1, norm_type))
        after = float(fsdp.clip_grad_norm_(math.inf, norm_type))
        return before, after

    results = run_ranks(program, 4)
    assert len(set(results)) == 1
    before, after = results[0]
    assert before == pytest.approx(expected, rel=1e-6)
    assert after == pytest.approx(min(0.1, expected), rel=1e-4)


def started_on(monkeypatch, rank):
    """A list that fills with the names of the collectives that FSDP starts on a rank: ranks are threads."""
    names = []

    def noting(original, name, *arguments, group, **keywords):
        if group.rank == rank:
            names.append(name)
        return original(*arguments, group=group, **keywords)

    for module, name in [
        (flat_param, "all_gather"),
        (flat_param, "async_all_gather"),
        (flat_param, "async_reduce_scatter"),
        (flat_param, "async_allreduce"),
        (scheduler, "barrier"),
        (flat_memory, "empty_symmetric"),
    ]:
        monkeypatch.setattr(module, name, partial(noting, getattr(module, name), name.removeprefix("async_")))
    return names


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Of four units the outermost and the last two stay from forward to backward.
        ("full", {"all_gather": 4 + 1, "reduce_scatter": 4}),
        ("grad-op", {"all_gather": 4, "reduce_scatter": 4}),
        ("none", {"allreduce": 4}),
    ],
)
def test_number_of_collectives_in_a_step(run, strategy, expected, monkeypatch):
    """A step gathers each unit before forward, and again before backward unless it stayed, and reduces it once. Where
    ranks compute in shared memory units are not gathered, and a barrier ends forward and backward.
    """
    model, steps = seeded(Gpt), batches(2)
    names = started_on(monkeypatch, rank=0)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=Block)
        optimizer = OPTIMIZERS["adamw"](fsdp.parameters())
        train(fsdp, steps[:1], optimizer)
        if group.rank == 0:
            names.clear()
        train(fsdp, steps[1:], optimizer)

    run(program, 4)
    uses_shared_view = run is not run_ranks and strategy != "none"
    assert Counter(names) == Counter(expected) + Counter(barrier=2 * uses_shared_view)


def test_units_are_reduced_while_backward_goes_on(monkeypatch):
    """When autograd reaches a layer, the one behind it has been reduced, and the one before it is being gathered."""
    names = started_on(monkeypatch, rank=0)
    model = seeded(mlp)

    def note(index, _module, _inputs, output):
        output.register_hook(lambda _: names.append(index))

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        for index in (0, 2, 4) if group.rank == 0 else ():
            fsdp.module[index].register_forward_hook(partial(note, index))
        for _ in range(2):
            loss = fsdp(torch.ones(1, 6)).sum()
            if group.rank == 0:
                names.clear()
            loss.backward()

    run_ranks(program, 2)
    # Units 4 and 2 have stayed from forward. The outermost one has nothing to reduce.
    assert names == [4, "reduce_scatter", "all_gather", 2, "reduce_scatter", 0, "reduce_scatter"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_are_gathered_while_forward_goes_on(run, prefetch):
    """From the second forward on, the requested number of next units is being gathered, and previous ones are freed."""
    model = seeded(mlp)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear, forward_prefetch=prefetch, backward_prefetch=0)
        seen = []
        for unit in fsdp._units[1:]:
            unit.module.register_forward_hook(lambda *_: seen.append([each.state.value for each in fsdp._units[1:]]))
        with torch.no_grad():
            for _ in range(2):
                seen.clear()
                fsdp(torch.ones(1, 6))
        return seen

    coming = ["gathering"] * prefetch + ["sharded"] * 2
    for seen in run(program, 2):
        for index, states in enumerate(seen):
            assert states == ["sharded"] * (index + 1) + coming[: 2 - index]


def test_the_same_bits_on_every_backend_and_for_every_division(monkeypatch):
    """Means are computed in rank order: bits don't depend on the strategy or the backend."""
    model, steps = seeded(Gpt), batches(5)

    def bits(backend, **options):
        states = run_ranks(sharded_run, 3, model, OPTIMIZERS["adamw"], steps, backend=backend, wrap=Block, **options)
        return states[0]

    expected, expected_losses = bits("simulated", strategy=ShardingStrategy.NO_SHARD)
    for backend, uses_shared_view in [
        ("simulated", 0),
        ("tcp-threads", 0),
        ("native-threads", 0),
        ("native-threads", 1),
    ]:
        if uses_shared_view:
            monkeypatch.setattr(flat_layout, "_SMALL_BYTES", 0)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            state, losses = bits(backend, strategy=strategy)
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert torch.equal(losses, expected_losses)


def test_one_rank_computes_the_bits_of_a_module():
    """Without other ranks nothing is rounded differently."""
    model, steps = seeded(Gpt), batches(5)
    expected, expected_losses = alone(model, OPTIMIZERS["momentum"], steps)
    ((state, losses),) = run_ranks(sharded_run, 1, model, OPTIMIZERS["momentum"], steps, wrap=Block)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(losses, expected_losses)


def test_a_mesh_of_two_axes(run):
    """Replicas along the first, shards along the second: the same as hybrid(2) of the group."""
    model, steps = seeded(mlp), batches(3)
    expected, _ = alone(model, OPTIMIZERS["momentum"], steps)

    def program(group, ranks):
        mesh = DeviceMesh(group, (2, 2), ("replicate", "shard"), ranks=ranks)
        fsdp = FSDP(copy.deepcopy(model), mesh, wrap=torch.nn.Linear)
        train(fsdp, steps, OPTIMIZERS["momentum"](fsdp.parameters()), group)
        assert fsdp._axes.num_shards == 2
        return fsdp.full_state_dict()

    for ranks in (None, (0, 2, 1, 3)):
        for state in run(program, 4, ranks):
            assert distance(state, expected) < LIMIT


@pytest.mark.parametrize(("shape", "num_shards"), [((2,), 2), ((1, 2), 2), ((2, 1), 1)])
def test_meshes_of_which_one_axis_has_one_rank(shape, num_shards):
    """Such a mesh means full sharding, or replicas only."""
    model, steps = seeded(mlp), batches(2)
    expected, _ = alone(model, OPTIMIZERS["momentum"], steps)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), DeviceMesh(group, shape), wrap=torch.nn.Linear)
        train(fsdp, steps, OPTIMIZERS["momentum"](fsdp.parameters()), group)
        assert fsdp._axes.num_shards == num_shards
        assert distance(fsdp.full_state_dict(), expected) < LIMIT

    run_ranks(program, 2)


def test_a_slice_of_a_mesh():
    """Two models, each sharded over the ranks of one slice."""
    model, steps = seeded(mlp), batches(2)
    expected, _ = alone(model, OPTIMIZERS["momentum"], steps)

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("model", "shard"))["shard"]
        fsdp = FSDP(copy.deepcopy(model), mesh, wrap=torch.nn.Linear)
        train(fsdp, steps, OPTIMIZERS["momentum"](fsdp.parameters()), mesh.group)
        assert distance(fsdp.full_state_dict(), expected) < LIMIT

    run_ranks(program, 4)


def test_mixed_precision(run):
    """Parameters are gathered in one dtype, gradients averaged in another, and the shards stay float32."""
    model, steps = seeded(Gpt), batches(5)
    seen = set()

    def program(group):
        own = copy.deepcopy(model)
        own.head.register_forward_pre_hook(lambda module, args: seen.add((module.weight.dtype, args[0].dtype)))
        fsdp = FSDP(
            own,
            group,
            wrap=Block,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_inputs=False),
        )
        losses = train(fsdp, steps, OPTIMIZERS["adamw"](fsdp.parameters()), group)
        assert {shard.dtype for shard in fsdp.parameters()} == {torch.float32}
        assert {shard.grad.dtype for shard in fsdp.parameters()} == {torch.float32}
        return fsdp.full_state_dict(), losses

    expected, expected_losses = alone(model, OPTIMIZERS["adamw"], steps)
    for state, losses in run(program, 2):
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert distance(state, expected) < 0.05
        assert torch.allclose(losses.float(), expected_losses, rtol=0.02)
    assert seen == {(torch.bfloat16, torch.bfloat16)}


class _Counting(torch.nn.Linear):
    """A layer that writes to a dict of its arguments."""

    def forward(self, x, seen):
        seen["dtype"] = x.dtype
        return super().forward(x)


def test_mixed_precision_leaves_other_arguments_as_they_are(run):
    """A dict without tensors to cast is the caller's own; one with some is a copy."""

    def program(group):
        fsdp = FSDP(_Counting(3, 2), group, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        own, cast = {"name": 1}, {"scale": torch.ones(2)}
        fsdp(torch.ones(1, 3), own)
        fsdp(torch.ones(1, 3), seen=cast)
        return own, list(cast)

    assert run(program, 2) == [({"name": 1, "dtype": torch.bfloat16}, ["scale"])] * 2


def test_meta_device(run):
    """A model that never existed in full gets rank 0's values, and trains."""
    with torch.device("meta"):
        model = mlp()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        state = fsdp.full_state_dict()
        train(fsdp, batches(2), OPTIMIZERS["adamw"](fsdp.parameters()), group)
        return state

    first, second = run(program, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.abs().max() > 0 for value in first.values())


def test_lstm(run):
    """Modules with lists of their parameters see full ones in forward."""
    model = torch.nn.LSTM(6, 4, batch_first=True)
    inputs = torch.rand(BATCH, 5, 6)
    expected, _ = model(inputs)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group)
        outputs, _ = fsdp(part(inputs, group))
        outputs.sum().backward()
        return outputs.detach()

    assert torch.allclose(torch.cat(run(program, 2)), expected, atol=1e-6)


def test_two_forwards_then_two_backwards(run):
    """Each backward follows its own forward."""
    model, steps = seeded(Gpt), batches(2)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=Block)
        losses = [functional.cross_entropy(fsdp(part(a, group)), part(b, group)) for a, b in steps]
        for loss in losses:
            loss.backward()
        return fsdp.clip_grad_norm_(math.inf)

    own = copy.deepcopy(model)
    for inputs, labels in steps:
        functional.cross_entropy(own(inputs), labels).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(own.parameters(), math.inf))
    for total in run(program, 2):
        assert float(total) == pytest.approx(expected, rel=1e-5)


def test_everything_that_is_sent_was_set(run, monkeypatch):
    """The padding of gradient rows, and tokens, are bytes that somebody has written, wherever memory comes from."""
    sent = []

    def record(function):
        def recorded(tensor, *args, **kwargs):
            sent.append(tensor.detach().clone())
            return function(tensor, *args, **kwargs)

        return recorded

    def poisoned(shape, dtype=torch.float32, **kwargs):
        return empty_symmetric(shape, dtype, **kwargs).fill_(255 if dtype is torch.uint8 else math.nan)

    empty_symmetric = flat_memory.empty_symmetric
    monkeypatch.setattr(flat_memory, "empty_symmetric", poisoned)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for module, name in (
        (flat_param, "async_reduce_scatter"),
        (flat_param, "async_allreduce"),
        (flat_param, "async_all_gather"),
        (flat_param, "all_gather"),
    ):
        monkeypatch.setattr(module, name, record(getattr(module, name)))

    def program(group):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            fsdp = FSDP(mlp(), group, strategy=strategy, wrap=torch.nn.Linear)
            train(fsdp, batches(1), OPTIMIZERS["adamw"](fsdp.parameters()), group)

    torch.use_deterministic_algorithms(True)
    try:
        run(program, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    rows = [tensor for tensor in sent if tensor.is_floating_point()]
    tokens = [tensor for tensor in sent if tensor.dtype is torch.uint8]
    assert rows
    assert all(tensor.isfinite().all() for tensor in rows)
    assert not any(tensor.any() for tensor in tokens)
