"""Models whose own code makes plain tensors, sharded by a plan."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ferrodist as fd
from ferrodist import (
    CollectiveMismatchError,
    ColumnParallel,
    DTensor,
    RankFailedError,
    RowParallel,
    UnsupportedOpError,
    VocabularyParallel,
)
from ferrodist.testing import run_ranks


def mesh_of(group):
    return fd.DeviceMesh(group, (group.world_size,), ("tp",))


class Positions(nn.Linear):
    """Scales its rows by their numbers, which it makes."""

    def forward(self, x):
        return super().forward(x) * torch.arange(x.shape[0])[:, None]


class Block(nn.Module):
    """What models' code does: position ids, a causal mask, rotary angles, an empty cache, lists as indices."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        cache = [torch.tensor([])]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (4, 2)).transpose(1, 2) for one in (q, k, v))
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
        q, k = q * angles.cos(), k * angles.cos()
        cache[0] = torch.cat([cache[0].to(x.dtype), k], -2)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        scores = q @ cache[0].transpose(-1, -2) + mask
        found = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + self.out(found)


class Decoder(nn.Module):
    """A small language model that is written with plain tensors in it."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16, bias=False)
        self.recomputes = recomputes
        self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)

    def encode(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x

    def forward(self, ids):
        x = self.encode(ids)
        scores = self.head(x)
        total = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        total.index_add_(0, torch.arange(x.shape[0]), scores[:, [0, -1]].sum(1))
        rows, _ = torch.where(ids > 7)
        return (
            scores
            + total[:, None]
            + self.tokens.weight[rows[0]].sum() * torch.stack([torch.tensor(0.5, dtype=x.dtype), self.scale[0]]).sum()
            + functional.pad(ids, (0, 1))[:, 1:, None]
        )

    @torch.no_grad()
    def generate(self, ids):
        for _ in range(3):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids


PLAN = {
    "tokens": VocabularyParallel(),
    "blocks.*.qkv": ColumnParallel(blocks=3),
    "blocks.*.out": RowParallel(),
    "head": ColumnParallel(),
}


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def train(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", [PLAN, {}], ids=["sharded", "replicated"])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_that_makes_plain_tensors(plan, check, recomputes):
    """It trains and generates as in one process; outputs are plain, and gradients of parameters distributed."""
    model = seeded(lambda: Decoder(recomputes=recomputes))
    ids = torch.tensor([[3, 9, 1, 12, 5], [8, 2, 2, 0, 7]])
    alone = copy.deepcopy(model)
    written, losses = alone.generate(ids), train(alone, ids)

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), mesh_of(group), plan, check=check)
        got = mine.generate(ids)
        assert type(got) is torch.Tensor
        assert got.tolist() == written.tolist()
        assert train(mine, ids) == pytest.approx(losses, rel=1e-10)
        assert all(isinstance(one.grad, DTensor) for one in mine.parameters())

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (lambda: Positions(6, 6), {"": ColumnParallel()}),
        (lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True), {}),
        (lambda: nn.GRU(6, 4), {}),
        (lambda: nn.Sequential(nn.Linear(6, 6), Positions(6, 6)), {"0": ColumnParallel(), "1": RowParallel()}),
    ],
)
def test_modules_that_make_plain_tensors(make, plan):
    """Position ids, and the initial zeros of recurrent layers; forward and backward."""
    model, x = seeded(make), torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    first = copy.deepcopy(model)(x)
    expected = first[0] if isinstance(first, tuple) else first
    alone = copy.deepcopy(model)
    result = alone(x)
    (result[0] if isinstance(result, tuple) else result).square().sum().backward()

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), mesh_of(group), plan)
        result = mine(x)
        result = result[0] if isinstance(result, tuple) else result
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_without_a_rule_on_replicated_tensors(dtype):
    """torch's LSTM kernel has no rule: it needs no consent if all inputs are replicated.

    On processors without instructions for bfloat16 torch has that kernel for float32 only.
    """
    model = seeded(lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True)).to(dtype)
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = copy.deepcopy(model)
    expected = alone(x)[0]
    expected.square().sum().backward()

    def program(group):
        mesh = mesh_of(group)
        mine = fd.parallelize(copy.deepcopy(model), mesh, {}, fallback="error")
        result = mine(x)[0]
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        if dtype is torch.float32:  # sharded ones would have to be gathered, which nobody has asked for
            with pytest.raises(UnsupportedOpError, match="no rule"):
                mine(fd.distribute(x, mesh, fd.Shard(1)))

    run_ranks(program, 2)


def test_a_plain_tensor_on_one_rank_only():
    """The others go on, so the next call is an error, on all ranks: it says where the tensor is."""

    def program(group):
        model = nn.Sequential(nn.Linear(4, 4), Differing(*[torch.ones(4)] * (group.rank == 0)))
        fd.parallelize(model, mesh_of(group), {"1.inner": ColumnParallel()})
        with pytest.raises(CollectiveMismatchError) as caught:
            fd.allreduce(model(torch.ones(2, 4)).detach(), group=group)
        return str(caught.value)

    told = run_ranks(program, 2)
    assert (
        "Rank 0 compared the plain tensors that it has beside distributed ones, the first for aten.mul.Tensor in"
        in (told[0])
    )


def copied(buffer, x):
    return buffer.copy_(x)


def set_by_rows(buffer, x):
    buffer[0] = x[1]
    buffer[torch.tensor([2, 1])] = x[:2]
    return buffer


def added(buffer, x):
    buffer += x
    return buffer.index_add_(0, torch.tensor([0, 2, 0]), x)


class Buffered(nn.Module):
    """Writes what a layer gives to a tensor that it makes, and returns that."""

    def __init__(self, write):
        super().__init__()
        self.inner, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        return self.write(torch.zeros(3, 4, dtype=x.dtype), self.inner(x))


@pytest.mark.parametrize("write", [copied, set_by_rows, added])
@pytest.mark.parametrize("style", [ColumnParallel, RowParallel])
def test_plain_tensors_that_are_written_and_returned(write, style):
    """Plain tensors to which distributed ones were written give gradients back to those."""
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Buffered(write))), torch.linspace(-1, 1, 12).view(3, 4)
    x = x.double()
    alone = copy.deepcopy(model)
    expected = alone(x)
    expected.square().sum().backward()

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), mesh_of(group), {"1.inner": style()})
        result = mine(x)
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        with pytest.raises(CollectiveMismatchError, match="the gradient in backward"):
            (mine(x) * (group.rank + 1)).sum().backward()

    run_ranks(program, 2)


class Differing(nn.Module):
    """Mixes plain tensors that are others on each rank."""

    def __init__(self, *values):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.values = values

    def forward(self, x):
        x = self.inner(x)
        for one in self.values:
            x = x * one
        return x


@pytest.mark.parametrize(
    ("kind", "check"), [("elements", False), ("elements", True), ("shape", False), ("shape", True), ("number", False)]
)
def test_plain_tensors_that_differ_between_ranks(kind, check):
    """All ranks raise, with the module's path, at the end of the forward at the latest."""

    def program(group):
        values = torch.ones(4) * (group.rank if kind == "elements" else 1)
        values = [values[: 1 if kind == "shape" and group.rank else 4]]
        values += [torch.ones(4)] if kind == "number" and group.rank else []
        model = nn.Sequential(nn.Linear(4, 4), Differing(*values))
        fd.parallelize(model, mesh_of(group), {"1.inner": ColumnParallel()}, check=check)
        with pytest.raises(CollectiveMismatchError) as caught:
            model(torch.ones(2, 4))
        return str(caught.value)

    for message in run_ranks(program, 2):
        assert "plain tensors beside distributed ones count as replicated, and differ between ranks" in message
        assert "in module '1'" in message
        assert "aten.mul.Tensor" in message


class Writing(nn.Module):
    """Has a plain tensor written, other elements of which each rank had before."""

    def __init__(self, write, rank):
        super().__init__()
        self.inner, self.write, self.rank = nn.Linear(4, 4), write, rank

    def forward(self, x):
        memory = torch.full((3, 4), float(self.rank))
        self.write(memory, self.inner(x))
        return memory


def set_by_halves(memory, x):
    memory[:, :2] = x[:, :2]
    memory[:, 2:] = x[:, 2:]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda memory, x: memory.copy_(x),
        lambda memory, x: torch.add(x, 1, out=memory),
        lambda memory, x: torch.mm(x, x.mT @ x, out=memory),
        set_by_halves,
    ],
)
def test_memory_that_is_overwritten_may_differ_before(write, check):
    """`torch.empty` differs on each rank: only elements that are not overwritten are compared."""

    def program(group):
        torch.manual_seed(0)
        model = fd.parallelize(Writing(write, group.rank), mesh_of(group), {"inner": ColumnParallel()}, check=check)
        with torch.no_grad():
            return model(torch.ones(3, 4)).tolist()

    first, second = run_ranks(program, 2, backend="native")
    assert first == second


@pytest.mark.parametrize("check", [False, True])
def test_partly_written_memory_is_compared(check):
    """Rows that were not written differ on each rank: all raise when the model returns them."""

    def program(group):
        def write(memory, x):
            memory[0] = x[0]

        model = fd.parallelize(Writing(write, group.rank), mesh_of(group), {"inner": ColumnParallel()}, check=check)
        with torch.no_grad(), pytest.raises(CollectiveMismatchError, match="for the result in the model"):
            model(torch.ones(3, 4))

    run_ranks(program, 2)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, number: x * number,
        lambda x, number: x.clone().add_(number),
        lambda x, number: torch.stack([x.sum(), number]),
        lambda x, number: x.masked_fill(x > 0, number),
        lambda x, number: torch._foreach_mul([x], number)[0],
        lambda x, number: torch.addmm(number, x, x.mT),
        lambda x, number: x.index_select(0, number.long() % 2),
        lambda x, number: number[None] * 2,
    ],
)
def test_scalars_that_differ_between_ranks(use, check):
    """Scalar tensors are compared too, also in calls that were cached with an equal one."""

    class Model(nn.Linear):
        number = torch.tensor(1.0)

        def forward(self, x):
            return use(super().forward(x), self.number)

    def program(group):
        model = fd.parallelize(Model(4, 4), mesh_of(group), {"": ColumnParallel()}, check=check)
        for _ in range(2):
            model(torch.ones(2, 4))
        model.number = torch.tensor(1.0 + group.rank)
        with pytest.raises(CollectiveMismatchError, match="count as replicated, and differ between ranks"):
            model(torch.ones(2, 4))

    run_ranks(program, 2)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no_grad", "rank 0 with gradients of 4 parameters .*, rank 1 without gradients"),
        ("eval", "rank 0 with .* in training, .*, rank 1 with .* in evaluation"),
        ("frozen", "rank 0 with gradients of 4 parameters .*, rank 1 with gradients of 3 parameters"),
        ("order", "of model 1 of the mesh, rank 1 .* of model 2 of the mesh"),
    ],
)
def test_calls_that_differ_between_ranks(change, message, check):
    """They would wait for each other in backward, or compute with each other's activations."""

    def program(group):
        mesh, layers = mesh_of(group), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6) if check else Positions(6, 6))
        model, other = (fd.parallelize(copy.deepcopy(layers), mesh, {"0": RowParallel()}, check=check) for _ in "ab")
        is_other = group.rank == 1
        model.train(not (is_other and change == "eval"))
        model[0].bias.requires_grad_(not (is_other and change == "frozen"))
        called = other if is_other and change == "order" else model
        with (
            torch.set_grad_enabled(not (is_other and change == "no_grad")),
            pytest.raises(CollectiveMismatchError, match=message),
        ):
            called(torch.ones(2, 6))

    run_ranks(program, 2, timeout=20)


def test_inputs_of_different_shapes_name_the_module():
    """The first collective that differs is in it; the remedy finds the input."""

    def program(group):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = fd.parallelize(layers, mesh_of(group), {"0": ColumnParallel(), "1": RowParallel()})
        where = f"Rank {group.rank} was in a forward of a parallelized model, in module '1'. .* check=True"
        with pytest.raises(CollectiveMismatchError, match=where):
            model(torch.ones(2 + group.rank, 4))

    run_ranks(program, 2)


def test_different_inputs_are_found_with_check():
    """They count as replicated; with `check` the ranks compare them too."""

    def program(group):
        model = fd.parallelize(nn.Linear(4, 4), mesh_of(group), {"": ColumnParallel()}, check=True)
        with pytest.raises(CollectiveMismatchError, match="for the forward"):
            model(torch.ones(2, 4) * group.rank)
        model(torch.ones(2, 4))

    run_ranks(program, 2)


def test_different_inputs_are_found_with_other_tensors():
    """A model that makes plain tensors compares its inputs in the same exchange, without `check`."""

    def program(group):
        model = fd.parallelize(Positions(4, 4), mesh_of(group), {"": ColumnParallel()})
        with pytest.raises(CollectiveMismatchError, match=r"for the forward in the model, rank 1 .* other elements"):
            model(torch.ones(2, 4) * group.rank)
        model(torch.ones(2, 4))

    run_ranks(program, 2)


def test_an_input_that_the_model_also_uses_as_a_plain_tensor():
    """It is compared as all plain tensors that are mixed with distributed ones."""

    class Scaled(nn.Linear):
        def forward(self, x, _scale):
            return super().forward(x) * self.scale

    def program(group):
        model = fd.parallelize(Scaled(4, 4), mesh_of(group), {"": ColumnParallel()})
        model.scale = torch.full((4,), 1.0 + group.rank)
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 .* other elements"):
            model(torch.ones(2, 4), model.scale)

    run_ranks(program, 2)


def test_ranks_that_generate_different_tokens():
    """`generate` calls the forward with the model's own tokens: ranks that draw other ones raise at once."""

    class Writer(nn.Linear):
        def generate(self, x, draw):
            for _ in range(2):
                x = self(x) + draw
            return x

    def program(group):
        model = fd.parallelize(Writer(4, 4), mesh_of(group), {"": ColumnParallel()})
        model.generate(torch.ones(2, 4), 1.0)
        with pytest.raises(CollectiveMismatchError, match=r"for the forward in the model, rank 1 .* other elements"):
            model.generate(torch.ones(2, 4), float(group.rank))

    run_ranks(program, 2)


def test_plain_tensors_that_differ_in_backward():
    """As in a hook on a gradient: all ranks raise at the end of the backward."""

    def program(group):
        model = fd.parallelize(nn.Linear(4, 4), mesh_of(group), {"": ColumnParallel()})
        for same in (True, False):
            out = model(torch.ones(2, 4))
            mask = torch.tensor([1.0, 2.0, 0.0, 3.0]) + (0 if same else group.rank)
            handle = model.weight.register_hook(lambda grad, mask=mask: grad * mask)
            if same:
                out.sum().backward()
                assert model.weight.grad.full_tensor()[0].tolist() == [2.0, 4.0, 0.0, 6.0]
            else:
                with pytest.raises(CollectiveMismatchError, match="in backward"):
                    out.sum().backward()
            handle.remove()
        model(torch.ones(2, 4)).sum().backward()  # and the next one begins anew

    run_ranks(program, 2)


def test_a_module_of_a_model_called_by_itself():
    """From outside it returns full plain tensors for plain ones, as the model does, and DTensors for DTensors."""
    model, x = (
        seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 6)))),
        torch.ones(4, 6),
    )
    expected = model(x.double())

    def program(group):
        mesh = mesh_of(group)
        mine = fd.parallelize(copy.deepcopy(model), mesh, {"0": ColumnParallel(), "1.1": RowParallel()})
        hidden = mine[0](x.double())
        assert type(hidden) is torch.Tensor
        torch.testing.assert_close(hidden, model[0](x.double()))
        for result in (mine[1](hidden), mine[1][1](mine[1][0](hidden)), mine(x.double())):
            assert type(result) is torch.Tensor
            torch.testing.assert_close(result, expected)
        full = fd.distribute(x.double(), mesh, fd.Replicate())
        assert isinstance(mine[0](full), DTensor)
        mine(x.double()).sum().backward()
        mine.zero_grad()
        mine[1](mine[0](x.double())).sum().backward()
        torch.testing.assert_close(mine[0].bias.grad.full_tensor().sum(), model_grad)
        kept = fd.parallelize(copy.deepcopy(model), mesh, {"0": ColumnParallel()}, gathers_outputs=False)
        assert isinstance(kept(x.double()), DTensor)

    alone = copy.deepcopy(model)
    alone(x.double()).sum().backward()
    model_grad = alone[0].bias.grad.sum()
    run_ranks(program, 2)


def test_parameters_added_later_are_refused():
    """A plain parameter would get a distributed gradient: the error names the module."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x) @ self.more

    def program(group):
        model = fd.parallelize(nn.Sequential(Adapter()), mesh_of(group), {})
        model[0].more = nn.Parameter(torch.eye(4))
        with pytest.raises(ValueError, match=r"in module '0' \(Adapter\).*it is a leaf that requires grad"):
            model(torch.ones(2, 4))
        model = fd.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh_of(group), {})
        model[0].weight = nn.Parameter(torch.eye(4))  # of which the operator gets a view
        with pytest.raises(ValueError, match=r"in module '0' \(Linear\).*it is a leaf that requires grad, or a view"):
            model(torch.ones(2, 4))

    run_ranks(program, 2)


@pytest.mark.parametrize("change", ["order", "no_grad"])
def test_different_forwards_after_one_with_gradients(change):
    """They would compute with each other's activations: the models make no plain tensors, and are not checked."""

    def program(group):
        mesh, layer = mesh_of(group), nn.Linear(4, 4)
        models = [fd.parallelize(copy.deepcopy(layer), mesh, {"": RowParallel()}) for _ in range(2)]
        models[0](torch.ones(2, 4)).sum().backward()
        called = models[group.rank if change == "order" else 0]
        match = {"order": "rank 1 one of model 2 of", "no_grad": "rank 1 one of .* without gradients"}[change]
        with (
            torch.set_grad_enabled(group.rank == 0 or change == "order"),
            pytest.raises(CollectiveMismatchError, match=match),
        ):
            called(torch.ones(2, 4))
        models[1](torch.ones(2, 4))  # the group goes on

    run_ranks(program, 2)


def test_copies_and_errors_leave_no_state():
    """A copy of a model is independent, and an error in a forward doesn't leave plain tensors allowed."""

    class Failing(Positions):
        def forward(self, x):
            result = super().forward(x)
            if self.training:
                raise RuntimeError("on purpose")
            return result

    def program(group):
        mesh = mesh_of(group)
        model = fd.parallelize(nn.Sequential(Failing(6, 6)), mesh, {})
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match="on purpose"):
                one.train()(torch.ones(4, 6))
            with pytest.raises(ValueError, match="distribute it too"):
                _ = fd.distribute(torch.ones(4), mesh, fd.Replicate()) * torch.ones(4)
            one.eval()(torch.ones(4, 6))

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_an_error_on_one_rank_is_one_on_all(backend):
    """The others learn of it in their next collective, by the module's path; one on all ranks costs nobody the group.

    Without this they would wait for the rank until their timeout.
    """

    def program(group):
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        plan = {"0": ColumnParallel(), "1": RowParallel()}
        model = fd.parallelize(
            nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 8)),
            mesh_of(group),
            {f"0.{name}": style for name, style in plan.items()},
        )
        x = torch.ones(2, 8)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            model(x[:, 1:])
        note = f"This was in module '0.0' of a parallelized model, on rank {group.rank} of group {group.name!r}."
        assert sys.version_info < (3, 11) or caught.value.__notes__ == [note]
        model(x)
        kind, message = RankFailedError, r"failed on rank 1 of group '.*', in module '0.0': RuntimeError: .*mat1 and"
        if group.rank == 1:
            kind, message = RuntimeError, "shapes cannot be multiplied"
        with pytest.raises(kind, match=message):
            model(x[:, group.rank :])
        assert group.failure is not None

    run_ranks(program, 2, backend=backend, timeout=30)


def test_an_error_after_the_last_collective():
    """The others learn of it in the next one, as in backward."""

    def program(group):
        model = fd.parallelize(nn.Sequential(nn.Linear(8, 8)), mesh_of(group), {"0": RowParallel()})
        if group.rank == 1:
            model[0].register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
            with pytest.raises(RuntimeError, match="inconsistent tensor size"):
                model(torch.ones(2, 8))
            return
        output = model(torch.ones(2, 8))
        with pytest.raises(RankFailedError, match=r"failed on rank 1 of group .*, in the model: RuntimeError"):
            model(output)

    run_ranks(program, 2, timeout=30)


class FailsOnRank0(torch.autograd.Function):
    """An identity whose gradient raises on rank 0."""

    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.rank == 0:
            raise ValueError("an error in backward")
        return grad, None


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("next_forward", ["same", "no_grad", "other model"])
def test_a_forward_after_an_error_in_backward(next_forward, backend):
    """Its collectives are like those that the others call in the backward, and never take their elements."""

    def program(group):
        mesh, plan = mesh_of(group), {"0": ColumnParallel(), "1": RowParallel()}
        model, other = (fd.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, plan) for _ in range(2))
        x = torch.ones(2, 4, requires_grad=True)
        result = FailsOnRank0.apply(model(x), group.rank).sum()
        if group.rank == 0:
            with pytest.raises(ValueError, match="an error in backward"):
                result.backward()
            with (
                torch.set_grad_enabled(next_forward != "no_grad"),
                pytest.raises(CollectiveMismatchError, match=r"begin forward.* backward raises must not go on"),
            ):
                (other if next_forward == "other model" else model)(x)
        else:
            with pytest.raises(CollectiveMismatchError, match="begin forward"):
                result.backward()

    run_ranks(program, 2, backend=backend, timeout=20)


def test_exchanges_before_forwards():
    """One before each, once a forward with gradients has run: serving has none."""

    def program(group):
        model = fd.parallelize(nn.Linear(4, 4), mesh_of(group), {"": ColumnParallel()})
        x = torch.ones(2, 4)

        def count(forward):
            before = group.verifier.reserve()
            forward()
            return group.verifier.reserve() - before - 1

        counts = []
        for has_gradients in (False, True, False):
            with torch.set_grad_enabled(has_gradients):
                counts.append([count(lambda: model(x)) for _ in range(2)])
        assert counts == [[1, 1], [1, 2], [2, 2]]

    run_ranks(program, 2)


def test_an_operator_without_a_rule_names_the_module():
    """Else users of a library's model could not find the place."""

    class Factors(nn.Module):
        def forward(self, x):
            return torch.geqrf(x).tau

    def program(group):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Factors()))
        model = fd.parallelize(layers, mesh_of(group), {"0": fd.ColumnParallel()}, fallback="error")
        with pytest.raises(fd.UnsupportedOpError, match=r"no rule for .* in module '1.0' \(Factors\)"):
            model(torch.ones(4, 4))

    run_ranks(program, 2)
