"""FSDP of tensor-parallel modules, over the other axis of a mesh: ranks compute the result of one process."""

import copy
import time
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ferrodist as fd
from ferrodist import FSDP, DeviceMesh, DTensor, Partial, ReduceOp, Shard, ShardingStrategy
from ferrodist.errors import CollectiveMismatchError, DistributedError, RankFailedError, UnsupportedOpError
from ferrodist.testing import run_ranks

PLAN = {"*.up": fd.ColumnParallel(), "*.down": fd.RowParallel()}
STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
}
LIMIT = 1e-12


class Pair(torch.nn.Module):
    """Two layers, the first of which tensor parallelism divides by columns and the second by rows."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, inputs):
        return inputs + self.down(torch.tanh(self.up(inputs))) * self.scale


class Stack(torch.nn.Module):
    """Pairs, of which one has a size that does not divide evenly, and undivided layers with a tied weight between."""

    def __init__(self, *, checkpoints=False):
        super().__init__()
        self.first = Pair(4, 6)
        self.middle = torch.nn.Linear(4, 4)
        self.second = Pair(4, 5)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.middle.weight
        self.call = partial(checkpoint, use_reentrant=False) if checkpoints else lambda module, *inputs: module(*inputs)

    def forward(self, inputs):
        hidden = torch.relu(self.middle(self.call(self.first, inputs)))
        return self.call(self.second, self.tied(hidden))


def seeded(seed=1, **options):
    """A model whose weights don't depend on who draws random numbers at the same time: make it before the ranks."""
    torch.manual_seed(seed)
    return Stack(**options).double()


INPUTS = torch.rand(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss_of(model, inputs):
    return ((model(inputs) - 1) ** 2).mean()


def mesh_of(group, shape=(2, 2), names=("dp", "tp")):
    return DeviceMesh(group, shape, names)


def divided(model, mesh, axes="dp", *, offset=0.0, **options):
    """FSDP over ``axes`` of a copy that is parallel over "tp"; with an offset on ranks whose values don't count."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(offset)
    fd.parallelize(model, mesh["tp"], PLAN)
    return FSDP(model, mesh[axes], **{"wrap": (Pair, torch.nn.Linear), **options})


def part(mesh, axes, inputs=INPUTS):
    """This rank's part of the batch."""
    group = mesh[axes].group
    return inputs.chunk(group.world_size)[group.rank]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, inputs=INPUTS, *, num_steps=3, max_norm=None, norm_type=2.0, is_torchs=False):
    """The norms before clipping."""
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        if isinstance(model, FSDP) and max_norm is not None and not is_torchs:
            norms.append(model.clip_grad_norm_(max_norm, norm_type))
        elif max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))
        optimizer.step()
    return torch.tensor(norms, dtype=torch.float64)


def alone(model, **options):
    model = copy.deepcopy(model)
    norms = train(model, adam(model), **options)
    return model.state_dict(), norms


def check_close(state, expected, limit=LIMIT):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert type(state[name]) is torch.Tensor, name
        torch.testing.assert_close(
            state[name], value, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_that_of_one_process(run, strategy):
    """Weights after clipped steps of AdamW; values come from rank 0 of the mesh, and optimizers see shards."""
    model = seeded()

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh, offset=group.rank, strategy=STRATEGIES[strategy])
        assert not any(isinstance(shard, fd.DTensor) for shard in fsdp.parameters())
        norms = train(fsdp, adam(fsdp), part(mesh, "dp"), max_norm=0.1)
        return fsdp.full_state_dict(), norms

    expected, expected_norms = alone(model, max_norm=0.1)
    for state, norms in run(program, 4):
        check_close(state, expected)
        torch.testing.assert_close(norms, expected_norms, rtol=LIMIT, atol=0)


def test_replicas_of_a_tensor_parallel_model(run):
    """HSDP: a mesh of three axes, of which FSDP has two."""
    model = seeded()

    def program(group):
        mesh = mesh_of(group, (2, 2, 2), ("copies", "dp", "tp"))
        fsdp = divided(model, mesh, ("copies", "dp"), offset=group.rank)
        train(fsdp, adam(fsdp), part(mesh, ("copies", "dp")), num_steps=2, max_norm=0.1)
        return fsdp.full_state_dict()

    expected, _ = alone(model, num_steps=2, max_norm=0.1)
    for state in run(program, 8):
        check_close(state, expected)


def test_a_shard_group_of_one_rank(run):
    """Norms and states still go over the other axis."""
    model = seeded()

    def program(group):
        mesh = mesh_of(group, (1, 3))
        fsdp = divided(model, mesh)
        norms = train(fsdp, adam(fsdp), num_steps=2, max_norm=0.1)
        return fsdp.full_state_dict(), norms

    expected, expected_norms = alone(model, num_steps=2, max_norm=0.1)
    for state, norms in run(program, 3):
        check_close(state, expected)
        torch.testing.assert_close(norms, expected_norms, rtol=LIMIT, atol=0)


class Joined(torch.nn.Module):
    """A layer that is made divided, in a model of plain ones."""

    def __init__(self, mesh, plain, of_meta=False):
        super().__init__()
        self.plain = copy.deepcopy(plain)
        if mesh is None:
            self.divided = copy.deepcopy(plain)
            return
        self.divided = fd.ColumnParallelLinear(4, 4, mesh=mesh, gather_output=True, dtype=torch.float64)
        for name, own in list(self.divided.named_parameters()):
            with torch.no_grad():
                own.copy_(fd.distribute(getattr(plain, name).detach(), mesh, own.placements, src=None))
        if of_meta:
            self.unknown = torch.nn.Module()
            self.unknown.weight = torch.nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, inputs):
        return self.divided(torch.tanh(self.plain(inputs)))


@pytest.mark.parametrize("is_torchs", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_norms_where_only_some_parameters_are_dtensors(norm_type, is_torchs):
    """Plain parameters count once, though all ranks of the other axis have them."""
    plain = torch.nn.Linear(4, 4).double()

    def program(group):
        mesh = mesh_of(group)
        fsdp = FSDP(Joined(mesh["tp"], plain), mesh["dp"])
        norms = train(fsdp, adam(fsdp), part(mesh, "dp"), max_norm=0.1, norm_type=norm_type, is_torchs=is_torchs)
        return fsdp.full_state_dict(), norms

    expected, expected_norms = alone(Joined(None, plain), max_norm=0.1, norm_type=norm_type)
    for state, norms in run_ranks(program, 4):
        check_close(state, expected)
        torch.testing.assert_close(norms, expected_norms, rtol=LIMIT, atol=0)


def test_accumulation_without_sync(run):
    """Backwards inside no_sync leave their gradients, which the next one averages with its own."""
    model = seeded()
    first, second = INPUTS, INPUTS.flip(1)

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh)
        optimizer = adam(fsdp)
        with fsdp.no_sync():
            loss_of(fsdp, part(mesh, "dp", first)).backward()
        loss_of(fsdp, part(mesh, "dp", second)).backward()
        optimizer.step()
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    optimizer = adam(own)
    loss_of(own, first).backward()
    loss_of(own, second).backward()
    optimizer.step()
    for state in run(program, 4):
        check_close(state, own.state_dict())


def test_checkpointed_and_frozen_layers(run):
    """Segments are recomputed with DTensors, and so are layers that are unfrozen later."""
    model = seeded(checkpoints=True)

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh)
        trained = fsdp.module.first.up.weight
        trained.requires_grad_(False)
        optimizer = adam(fsdp)
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        trained.requires_grad_(True)
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    optimizer = adam(own)
    own.first.up.weight.requires_grad_(False)
    train(own, optimizer, num_steps=1)
    own.first.up.weight.requires_grad_(True)
    train(own, optimizer, num_steps=1)
    for state in run(program, 4):
        check_close(state, own.state_dict())


def test_mixed_precision():
    """DTensors are gathered, and used, in the compute dtype."""
    model = seeded()
    seen = []

    def program(group):
        mesh = mesh_of(group)
        low = fd.MixedPrecision(param_dtype=torch.float32, buffer_dtype=torch.float32)
        fsdp = divided(model, mesh, mixed_precision=low)
        layer = fsdp.module.first.up
        layer.register_forward_pre_hook(lambda *_: seen.append((type(layer.weight), layer.weight.dtype)))
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        train(fsdp, optimizer, part(mesh, "dp"))
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    train(own, torch.optim.SGD(own.parameters(), lr=0.1))
    for state in run_ranks(program, 4):
        assert {value.dtype for name, value in state.items() if "scale" not in name} == {torch.float64}
        check_close({name: value.double() for name, value in state.items()}, own.state_dict(), limit=1e-6)
    assert set(seen) == {(DTensor, torch.float32)}


# States.


def saved(group, model):
    """Whole states after a step, by an FSDP of a tensor-parallel module, and the weights after another."""
    mesh = mesh_of(group)
    fsdp = divided(model, mesh)
    optimizer = adam(fsdp)
    train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
    states = fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer)
    only_first = fsdp.full_state_dict(rank0_only=True)
    assert only_first.keys() == (states[0].keys() if mesh["dp"].group.rank == 0 else set())
    train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
    return states, fsdp.full_state_dict()


def saved_undivided(group, model):
    """The same by an FSDP of the module as it is."""
    fsdp = FSDP(copy.deepcopy(model), group)
    optimizer = adam(fsdp)
    train(fsdp, optimizer, part(mesh_of(group, (2, 1)), "dp"), num_steps=1)
    return fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer)


def continued(group, model, states):
    """The weights after a step from states of an undivided module's."""
    mesh = mesh_of(group)
    fsdp = divided(model, mesh)
    optimizer = adam(fsdp)
    fsdp.load_full_state_dict(states[0] if mesh["dp"].group.rank == 0 else None)
    check_close(fsdp.full_state_dict(), states[0], limit=0)
    fsdp.load_full_state_dict(states[0])
    fsdp.load_full_optimizer_state_dict(optimizer, states[1])
    train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
    return fsdp.full_state_dict()


def continued_undivided(group, model, states):
    """The same in an FSDP of the module as it is."""
    fsdp = FSDP(copy.deepcopy(model), group)
    optimizer = adam(fsdp)
    fsdp.load_full_state_dict(states[0])
    fsdp.load_full_optimizer_state_dict(optimizer, states[1])
    train(fsdp, optimizer, INPUTS, num_steps=1)
    return fsdp.full_state_dict()


def test_full_states_are_those_of_the_undivided_module(run):
    """They load into an FSDP of an undivided module and vice versa, and training continues as in one process."""
    model, other = seeded(), seeded(3)
    with torch.no_grad():
        other.first.scale.add_(1)  # buffers come with the state
    expected, _ = alone(model, num_steps=2)
    states, after = run(saved, 4, model)[0]
    check_close(after, expected)
    assert states[1]["state"]["first.up.weight"]["exp_avg"].shape == (6, 4)
    plain = copy.deepcopy(other)
    plain.load_state_dict(states[0])
    check_close(alone(model, num_steps=1)[0], states[0])
    check_close(run(continued_undivided, 1, other, states)[0], expected)
    for state in run(continued, 4, other, run(saved_undivided, 2, model)[0]):
        check_close(state, expected)


def test_states_that_do_not_fit_are_refused():
    """A local tensor instead of the full one, and another rank's shard; nothing is loaded."""
    model = seeded()
    states = {}

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh)
        optimizer = adam(fsdp)
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        before = fsdp.full_state_dict()
        wrong = {**before, "first.up.weight": before["first.up.weight"][:3]}
        with pytest.raises(ValueError, match=r"'first.up.weight' has shape \(3, 4\) where the module has \(6, 4\)"):
            fsdp.load_full_state_dict(wrong)
        whole = fsdp.full_optimizer_state_dict(optimizer)
        whole["state"]["first.up.weight"]["exp_avg"] = torch.ones(3, 4)
        with pytest.raises(ValueError, match=r"has shape \(3, 4\) where the parameter has \(6, 4\)"):
            fsdp.load_full_optimizer_state_dict(optimizer, whole)
        states[mesh.coordinate] = fsdp.sharded_state_dict(), fsdp.sharded_optimizer_state_dict(optimizer)
        fd.barrier(group=group)
        at, other = mesh.coordinate
        for load, state in zip(
            [fsdp.load_sharded_state_dict, partial(fsdp.load_sharded_optimizer_state_dict, optimizer)],
            states[at, 1 - other],
            strict=True,
        ):
            with pytest.raises(
                ValueError, match=r"state of another local tensor of 'first\.down\.bias'.*Nothing was loaded"
            ):
                load(state)
        check_close(fsdp.full_state_dict(), before, limit=0)

    run_ranks(program, 4)


def test_sharded_states_come_back(run):
    """Model and optimizer continue exactly, from this rank's shard alone."""
    model = seeded()

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh)
        optimizer = adam(fsdp)
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        states = fsdp.sharded_state_dict(), fsdp.sharded_optimizer_state_dict(optimizer)
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        expected = fsdp.full_state_dict()
        fsdp = divided(model, mesh)
        optimizer = adam(fsdp)
        fsdp.load_sharded_state_dict(states[0])
        fsdp.load_sharded_optimizer_state_dict(optimizer, states[1])
        train(fsdp, optimizer, part(mesh, "dp"), num_steps=1)
        check_close(fsdp.full_state_dict(), expected, limit=0)

    run(program, 4)


def test_sharded_buffers():
    """Broadcast by rank 0 of FSDP's group, saved in full and as shards, and loaded again."""
    table = torch.arange(10.0).view(5, 2)

    def program(group):
        mesh = mesh_of(group)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4))
        fd.parallelize(module, mesh["tp"], {"0": fd.ColumnParallel()})
        mine = table + mesh["dp"].group.rank
        module.register_buffer("table", fd.distribute(mine, mesh["tp"], Shard(0), src=None))
        fsdp = FSDP(module, mesh["dp"])
        assert torch.equal(fsdp.full_state_dict()["table"], table)
        sharded = fsdp.sharded_state_dict()
        assert sharded["buffers"]["table"].shape == ((3, 2) if mesh["tp"].group.rank == 0 else (2, 2))
        state = {name: value + 1 for name, value in fsdp.full_state_dict().items()}
        fsdp.load_full_state_dict(state if mesh["dp"].group.rank == 0 else None)
        check_close(fsdp.full_state_dict(), state, limit=0)
        fsdp.load_sharded_state_dict(sharded)
        assert torch.equal(module.table.full_tensor(), table)

    run_ranks(program, 4)


def test_summoned_parameters(run):
    """DTensors inside the block; changes stay."""
    model = seeded()

    def program(group):
        fsdp = divided(model, mesh_of(group))
        with fsdp.summon_full_params(), torch.no_grad():
            weight = fsdp.module.second.up.weight
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
            weight.mul_(2)
            inside = fsdp(INPUTS)
        assert torch.equal(fsdp(INPUTS), inside)
        return fsdp.full_state_dict()

    expected = {**model.state_dict(), "second.up.weight": model.second.up.weight.detach() * 2}
    for state in run(program, 4):
        check_close(state, expected, limit=0)


def test_infinities_are_found_on_all_ranks():
    """One in the local shard of one rank makes all ranks of the mesh skip the step."""
    model = seeded()

    def program(group):
        fsdp = divided(model, mesh_of(group))
        optimizer, scaler = adam(fsdp), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss_of(fsdp, INPUTS)).backward()
        if group.rank == 1:
            next(shard for shard in fsdp.parameters() if shard.numel()).grad.fill_(torch.inf)
        fsdp.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        return fsdp.full_state_dict()

    for state in run_ranks(program, 4):
        check_close(state, model.state_dict(), limit=0)


# What is refused.


class Changing(Pair):
    """Writes to its weight, or gives it away, where parameters are gathered."""

    how = None

    def forward(self, inputs):
        weight = self.up.weight
        with torch.no_grad():
            if self.how == "writes":
                weight.mul_(2)
            elif self.how == "writes to the part":
                weight.to_local().mul_(2)
        if self.how == "returns":
            return weight
        return weight.redistribute([Shard(0)]) if self.how == "returns a view" else super().forward(inputs)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("writes", r"'0\.up\.weight' was changed"),
        ("writes to the part", r"'0\.up\.weight' was changed"),
        ("returns", "returned one of its parameters"),
        ("returns a view", "returned one of its parameters"),
    ],
)
def test_full_parameters_are_not_changed_or_returned(run, how, message):
    """Though they are DTensors, with local tensors in the unit's memory."""
    module = torch.nn.Sequential(Changing(4, 6).double())
    module[0].how = how

    def program(group):
        fsdp = divided(module, mesh_of(group), wrap=Pair)
        with pytest.raises(UnsupportedOpError, match=message):
            fsdp(INPUTS)

    run(program, 4)


def test_a_failure_reaches_ranks_of_other_groups():
    """One rank's error in a unit aborts the groups of both axes, long before a timeout."""
    module = torch.nn.Sequential(Changing(4, 6).double(), Pair(4, 6).double())

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(module, mesh, wrap=Pair)
        fsdp.module[0].how = "returns" if group.rank == 3 else None
        started = time.monotonic()
        with pytest.raises(DistributedError):
            fsdp(INPUTS)
        fsdp.sharded_state_dict()
        return time.monotonic() - started

    assert max(run_ranks(program, 4)) < 10


def parallel(mesh):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return fd.parallelize(module, mesh["tp"], {"0": fd.ColumnParallel(), "1": fd.RowParallel()})


def test_groups_with_different_local_tensors_are_refused():
    """The tensor-parallel axis, and the whole mesh; the module stays unchanged."""

    def program(group):
        mesh = mesh_of(group)
        module = parallel(mesh)
        before = dict(module.named_parameters())
        for over in (mesh["tp"], group):
            with pytest.raises(
                ValueError, match=r"different local tensors of parameter '0\.weight', at .*another axis"
            ):
                FSDP(module, over)
        assert all(now is before[name] for name, now in module.named_parameters())
        FSDP(module, mesh["dp"])

    run_ranks(program, 4)


def test_dtensors_that_cannot_be_sharded_are_refused():
    """Those with hooks of others than parallelize, and partial sums; specs that differ between ranks."""

    def program(group):
        mesh = mesh_of(group)
        module = parallel(mesh)
        module[0].weight.register_hook(lambda gradient: gradient)
        with pytest.raises(UnsupportedOpError, match=r"'0\.weight' has hooks"):
            FSDP(module, mesh["dp"])
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(fd.distribute(torch.ones(4), mesh["tp"], Partial(ReduceOp.SUM)))
        with pytest.raises(UnsupportedOpError, match="'weight' is a distributed one of partial sums"):
            FSDP(module, mesh["dp"])
        module = torch.nn.Sequential(torch.nn.Linear(4, 4))
        style = fd.ColumnParallel() if mesh["dp"].group.rank == 0 else fd.RowParallel()
        fd.parallelize(module, mesh["tp"], {"0": style})
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 has parameter '0\.weight'.*Shard\(1\).*Shard\(0\)"):
            FSDP(module, mesh["dp"])

    run_ranks(program, 4)


def test_dtensors_are_restored_when_construction_fails():
    """The module trains as before, and can be wrapped again."""
    plain = torch.nn.Linear(4, 4).double()

    def give(module):
        module.weight.fill_(0)

    def program(group):
        mesh = mesh_of(group)
        module = Joined(mesh["tp"], plain, of_meta=True)
        before = dict(module.divided.named_parameters())
        values = {name: parameter.full_tensor() for name, parameter in before.items()}
        with pytest.raises(UnsupportedOpError, match="no reset_parameters"):
            FSDP(module, mesh["dp"])
        for name, now in module.divided.named_parameters():
            assert now is before[name]
            assert torch.equal(now.full_tensor(), values[name])
        loss_of(module, INPUTS).backward()
        module.zero_grad()
        fsdp = FSDP(module, mesh["dp"], init=give)
        check_close({name: fsdp.full_state_dict()[f"divided.{name}"] for name in values}, values, limit=0)

    run_ranks(program, 4)


@pytest.mark.parametrize("make", [fd.DDP, partial(fd.LocalSGD, period=2)], ids=["DDP", "LocalSGD"])
def test_other_wrappers_refuse_dtensors(make):
    """With an alternative; also those of one rank."""

    def program(group):
        for shape in [(2, 1), (1, 2)]:
            mesh = mesh_of(group, shape)
            with pytest.raises(UnsupportedOpError, match=r"'0\.weight' is a DTensor.*FSDP with strategy=.*NO_SHARD"):
                make(parallel(mesh), mesh["dp"].group)

    run_ranks(program, 2)


@pytest.mark.parametrize("where", ["first", "first.down", "middle"])
def test_an_error_on_one_rank_is_one_on_all_axes(where):
    """Also on ranks of other axes, which have no collective with it: they would wait until their timeout."""
    model = seeded()

    def program(group):
        fsdp = divided(model, mesh_of(group), forward_prefetch=0)

        def fail(*_):
            if group.rank == 1:
                raise KeyError("on purpose")

        fsdp.module.get_submodule(where).register_forward_pre_hook(fail)
        kind = KeyError if group.rank == 1 else RankFailedError
        with pytest.raises(kind, match="on purpose"):
            loss_of(fsdp, INPUTS).backward()

    run_ranks(program, 4, timeout=30)


def test_an_error_of_one_replica_is_one_on_all():
    """Ranks that shard layers fail alike there, and the other replica learns of it."""
    model = seeded()

    def program(group):
        mesh = mesh_of(group)
        fsdp = divided(model, mesh)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fsdp(INPUTS[:, 1:])  # on all ranks alike
        fails = mesh["dp"].group.rank == 1
        kind, message = RankFailedError, r"in the forward of an FSDP of a Stack: RuntimeError"
        if fails:
            kind, message = RuntimeError, "shapes cannot be multiplied"
        with pytest.raises(kind, match=message):
            fsdp(INPUTS[:, int(fails) :])

    run_ranks(program, 4, timeout=30)
