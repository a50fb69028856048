"""DDP: ranks together compute the result of one process, and errors are raised."""

import contextlib
import copy
import gc
import pickle
import re
from functools import partial

import pytest
import torch
from ddp_ranks import Branches, CountingBackend, Tied, assert_same_bits, caught, mlp, seeded
from torch.utils.checkpoint import checkpoint

from ferrodist import DDP, ReduceOp, SimulatedBackend, SubBackend, allreduce
from ferrodist.backends.base import Backend
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    InvalidRankError,
    PeerLostError,
    RankFailedError,
    UnsupportedOpError,
)
from ferrodist.parallel.ddp.join import Join
from ferrodist.parallel.ddp.reducer import Reducer
from ferrodist.parallel.module_guard import ModuleGuard
from ferrodist.testing import run_ranks

NOT_PICKLED = (Backend, Reducer, ModuleGuard, Join)
BATCH = 12  # divides over 1, 2 and 3 ranks
SMALL = 1e-4  # a bucket of about a hundred bytes: several buckets for small models
LIMIT = 20


def cnn_with_frozen_layer():
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 3)),
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.SiLU(),
        torch.nn.Conv2d(4, 2, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 3),
    )
    model[3].weight.requires_grad_(False)
    return model


MODELS = {"mlp": mlp, "cnn": cnn_with_frozen_layer, "tied": Tied}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def batches(num_steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, 6, generator=generator).to(dtype),
            torch.randint(3, (BATCH,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def own_copy(model, rank):
    """The model as a rank would have built it: with values of its own everywhere but on rank 0."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(rank)
    return model


def train(model, steps, optimizer):
    for inputs, labels in steps:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def train_rank(group, model, steps, make_optimizer, bucket_size_mb=SMALL):
    ddp = DDP(own_copy(model, group.rank), group, bucket_size_mb=bucket_size_mb)
    part = BATCH // group.world_size
    mine = [tuple(tensor[group.rank * part : (group.rank + 1) * part] for tensor in step) for step in steps]
    train(ddp, mine, make_optimizer(ddp.parameters()))
    return ddp.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_that_of_one_process(world_size, model, optimizer):
    """Ranks with parts of a batch end with the weights of one process with the whole, and with each other's bits."""
    start, steps, make_optimizer = seeded(MODELS[model]), batches(6), OPTIMIZERS[optimizer]
    alone = copy.deepcopy(start)
    train(alone, steps, make_optimizer(alone.parameters()))
    states = run_ranks(train_rank, world_size, start, steps, make_optimizer)
    assert_same_bits(states)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(states[0][name], tensor, rtol=0, atol=1e-12, msg=name)
        assert not torch.equal(tensor, start.state_dict()[name]) or name == "3.weight"


def test_float32_training_equals_that_of_one_process():
    """In single precision the weights agree to 1e-6."""
    start, steps, make_optimizer = seeded(mlp, torch.float32), batches(6, torch.float32), OPTIMIZERS["sgd"]
    alone = copy.deepcopy(start)
    train(alone, steps, make_optimizer(alone.parameters()))
    states = run_ranks(train_rank, 2, start, steps, make_optimizer)
    assert_same_bits(states)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(states[0][name], tensor, rtol=0, atol=1e-6, msg=name)


def test_bucket_size_does_not_change_the_result():
    """One bucket for everything, or one for each parameter: the same bits."""
    start, steps = seeded(mlp), batches(3)
    states = [
        run_ranks(train_rank, 3, start, steps, OPTIMIZERS["adam"], bucket_size_mb)[0]
        for bucket_size_mb in (1e-9, SMALL, 25, float("inf"))
    ]
    assert_same_bits(states)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tcp_gives_the_bits_of_one_process(world_size):
    """Training over TCP ends with the bits that it ends with in memory."""
    start, steps = seeded(mlp, torch.float32), batches(3, torch.float32)
    states = [
        run_ranks(train_rank, world_size, start, steps, OPTIMIZERS["adam"], backend=backend)
        for backend in ("simulated", "tcp-threads")
    ]
    assert_same_bits([*states[0], *states[1]])


def test_an_allreduce_for_each_bucket():
    """A step reduces each bucket once, in reverse order of the parameters, and nothing else."""
    start, steps = seeded(mlp), batches(4)

    def count(group):
        train_rank(group, start, steps, OPTIMIZERS["sgd"], bucket_size_mb=300 / 2**20)
        return group.engine("cpu").sizes

    # In bytes: 24 (bias), 120 (weight), 40, 280, 56, 336; a bucket has two elements more for each parameter, and two
    # for each rank.
    expected = [(3 + 15 + 5) + 6 + 4, 35 + 2 + 4, 7 + 2 + 4, 42 + 2 + 4]
    assert run_ranks(count, 2, backend=CountingBackend.create_group) == [expected * 4] * 2


def test_buckets_start_during_backward():
    """The first bucket is on its way before the gradient of the first layer has been computed."""
    start = seeded(mlp)

    def overlaps(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=SMALL)
        seen = []
        ddp.module[0].weight.register_hook(lambda grad: seen.append(group.engine("cpu").begun.wait(LIMIT)))
        ddp(batches(1)[0][0]).sum().backward()
        return seen

    assert run_ranks(overlaps, 2, backend=CountingBackend.create_group) == [[True], [True]]


def test_ranks_start_buckets_in_one_order():
    """Ranks whose gradients come in different orders still reduce their buckets in the same order."""
    start = seeded(Branches)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=1e-9)
        order = []
        for index, branch in enumerate(ddp.module.branches):
            branch.weight.register_hook(lambda grad, index=index: order.append(index))
        ddp(torch.full((1, 2), group.rank).double(), *((0, 1, 2), (1, 2, 0))[group.rank]).backward()
        return order, [branch.weight.grad.tolist() for branch in ddp.module.branches]

    assert run_ranks(gradients, 2) == [([2, 1, 0], [[[0.5, 0.5]]] * 3), ([0, 2, 1], [[[0.5, 0.5]]] * 3)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_dtypes(world_size):
    """Each dtype is averaged in buckets of its own, and gradients keep their parameters' dtypes."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float32]

    def gradients(group):
        module = torch.nn.Module()
        module.items = torch.nn.ParameterList(torch.ones(3, dtype=dtype) for dtype in dtypes)
        ddp = DDP(module, group)
        sum((item * (group.rank + 1)).real.sum().float() for item in ddp.module.items).backward()
        return [item.grad for item in module.items]

    mean = (world_size + 1) / 2
    for grads in run_ranks(gradients, world_size):
        assert [grad.dtype for grad in grads] == dtypes
        assert all(torch.equal(grad, torch.full_like(grad, mean)) for grad in grads)


def test_half_precision_gradients_are_averaged_in_single_precision():
    """The mean of large bfloat16 or float16 gradients neither overflows nor is rounded in between."""

    def gradients(group):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        ddp = DDP(module, group)
        (ddp.module.weight * 60000).sum().backward()
        return module.weight.grad.tolist()

    assert run_ranks(gradients, 2) == [[60000.0] * 2] * 2


def test_gradients_keep_the_strides_of_their_parameter():
    """Parameters that are not contiguous are packed and written back element by element."""

    def gradients(group):
        conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        ddp = DDP(conv, group, find_unused_parameters=True)
        weights = torch.arange(24.0).view(3, 2, 2, 2) * (group.rank + 1)
        (conv.weight * weights).sum().backward()
        first = conv.weight.grad.clone()
        conv.weight.grad = None
        if group.rank:
            (conv.weight * weights).sum().backward()
        else:
            ddp.sync_gradients()
        return first, conv.weight.grad, conv.weight.stride()

    for first, second, strides in run_ranks(gradients, 2):
        assert torch.equal(first, torch.arange(24.0).view(3, 2, 2, 2) * 1.5)
        assert torch.equal(second, torch.arange(24.0).view(3, 2, 2, 2))
        assert second.stride() == strides


def test_a_parameter_that_some_ranks_use():
    """Ranks without a gradient contribute zeros and get the average; a gradient that no rank has stays None."""
    start = seeded(Branches)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=1e-9, find_unused_parameters=True)
        ddp(torch.ones(1, 2).double(), *((0, 1) if group.rank else (1,))).backward()
        return [branch.weight.grad for branch in ddp.module.branches]

    for used_by_one, used_by_all, used_by_none in run_ranks(gradients, 2):
        assert used_by_one.tolist() == [[0.5, 0.5]]
        assert used_by_all.tolist() == [[1.0, 1.0]]
        assert used_by_none is None


def test_a_parameter_that_no_rank_uses_stays_as_it_is():
    """Optimizers skip it, with weight decay and momentum too, as in one process."""
    start = seeded(Branches)

    def weights(group):
        ddp = DDP(copy.deepcopy(start), group)
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.ones(1, 2).double(), 0).backward()
            optimizer.step()
        return ddp.state_dict()

    for state in run_ranks(weights, 2):
        assert not torch.equal(state["branches.0.weight"], start.branches[0].weight)
        assert torch.equal(state["branches.2.weight"], start.branches[2].weight)


def test_backwards_accumulate():
    """Two backwards without an optimizer step between them give the sum of both means."""
    start, steps = seeded(mlp), batches(2)
    alone = copy.deepcopy(start)
    for inputs, labels in steps:
        torch.nn.functional.cross_entropy(alone(inputs), labels).backward()

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=SMALL)
        part = slice(group.rank * 4, group.rank * 4 + 4)
        for inputs, labels in steps:
            torch.nn.functional.cross_entropy(ddp(inputs[part]), labels[part]).backward()
        return [parameter.grad for parameter in ddp.parameters()]

    for grads in run_ranks(gradients, 3):
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-12)


def test_a_graph_may_be_used_twice():
    """A second backward through the same graph is a round of its own."""
    start = seeded(Branches)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group)
        loss = ddp(torch.full((1, 2), group.rank + 1.0).double(), 0)
        loss.backward(retain_graph=True)
        loss.backward()
        return ddp.module.branches[0].weight.grad.tolist()

    assert run_ranks(gradients, 2) == [[[3.0, 3.0]]] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_modules(use_reentrant):
    """Backwards inside the backward, as re-entrant checkpointing does them, give the same gradients in one round."""
    start, (inputs, labels) = seeded(Tied), batches(1)[0]
    alone = copy.deepcopy(start)
    torch.nn.functional.cross_entropy(alone(inputs), labels).backward()

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=1e-9)
        module, part = ddp.module, slice(group.rank * 6, group.rank * 6 + 6)
        hidden = inputs[part].clone().requires_grad_()
        for layer in (module.first, module.second):
            hidden = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), hidden, use_reentrant=use_reentrant)
        torch.nn.functional.cross_entropy(module.last(hidden), labels[part]).backward()
        assert len(group.engine("cpu").sizes) == len(list(ddp.parameters()))
        return [parameter.grad for parameter in ddp.parameters()]

    for grads in run_ranks(gradients, 2, backend=CountingBackend.create_group):
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-12)


def test_sync_gradients_averages_gradients_set_by_hand():
    """Gradients that a program assigns are averaged on demand."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(2, 1), group)
        for parameter in ddp.parameters():
            parameter.grad = torch.full_like(parameter, float(group.rank))
        ddp.sync_gradients()
        return [parameter.grad.flatten().tolist() for parameter in ddp.parameters()]

    assert run_ranks(gradients, 3) == [[[1.0, 1.0], [1.0]]] * 3


def test_sync_gradients_replaces_gradients_that_cannot_be_written_to():
    """A gradient that was expanded, or made under inference_mode, is replaced by one with its own memory."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(3, 1), group)
        ddp.module.weight.grad = torch.tensor(float(group.rank)).expand(1, 3)
        ddp.module.bias.grad = made_under_inference_mode(lambda: torch.tensor([float(group.rank)]))
        ddp.sync_gradients()
        return [(parameter.grad.tolist(), parameter.grad.is_contiguous()) for parameter in ddp.parameters()]

    assert run_ranks(gradients, 3) == [[([[1.0, 1.0, 1.0]], True), ([1.0], True)]] * 3


def test_sync_gradients_after_backward_changes_nothing():
    """An explicit call may follow backward, as in programs for the crate."""
    start = seeded(mlp)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group)
        ddp(batches(1)[0][0] + group.rank).sum().backward()
        before = [parameter.grad.clone() for parameter in ddp.parameters()]
        ddp.sync_gradients(timeout=LIMIT)
        return before, [parameter.grad for parameter in ddp.parameters()]

    for before, after in run_ranks(gradients, 2):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_unfrozen_parameters_join():
    """A parameter that begins to require grad is averaged from then on, and one that stops is left out."""

    def gradients(group):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        for layer in model:
            torch.nn.init.ones_(layer.weight)
        model[0].weight.requires_grad_(False)
        ddp = DDP(model, group)
        found = []
        for frozen, thawed in ((0, 1), (1, 0)):
            model[frozen].weight.requires_grad_(False)
            model[thawed].weight.requires_grad_(True)
            ddp.zero_grad()
            ddp(torch.full((1, 1), group.rank + 1.0)).sum().backward()
            found.append((model[thawed].weight.grad.item(), model[frozen].weight.grad))
        return found

    assert run_ranks(gradients, 2) == [[(1.5, None), (1.5, None)]] * 2


@pytest.mark.parametrize(("bucket_size_mb", "num_messages"), [(25, 2), (100 / 2**20, 6)])
def test_parameters_come_from_rank_0(bucket_size_mb, num_messages):
    """At construction every rank takes rank 0's parameters and buffers, in the tensors it has and in few messages."""
    start = seeded(lambda: torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(3)), torch.float32)

    def states(group):
        model = own_copy(start, group.rank)
        before = [tensor.data_ptr() for tensor in model.state_dict().values()]
        DDP(model, group, bucket_size_mb=bucket_size_mb)
        in_place = before == [tensor.data_ptr() for tensor in model.state_dict().values()]
        return model.state_dict(), in_place, group.engine("cpu").num_broadcasts

    for state, in_place, count in run_ranks(states, 3, backend=CountingBackend.create_group):
        assert_same_bits([start.state_dict(), state])
        assert in_place
        assert count == num_messages + 1  # the comparison of the modules takes one


def test_parameters_come_from_any_root():
    """broadcast_parameters sends the values of the given rank, and refuses a rank that doesn't exist."""

    def values(group):
        ddp = DDP(torch.nn.Linear(2, 2), group)
        torch.nn.init.constant_(ddp.module.weight, group.rank)
        ddp.broadcast_parameters(root=2, timeout=LIMIT)
        error = caught(lambda: ddp.broadcast_parameters(root=3))
        return ddp.module.weight.flatten().tolist(), error

    for weights, error in run_ranks(values, 3):
        assert weights == [2.0] * 4
        assert isinstance(error, InvalidRankError)


def test_a_broadcast_of_parameters_ends_in_its_time():
    """The given timeout holds when a rank does not come, whatever the group's."""

    def attempt(group):
        ddp = DDP(torch.nn.Linear(2, 1), group)
        group.barrier()
        if group.rank == 1:
            return caught(lambda: group.recv(bytearray(1), 0, timeout=LIMIT))
        return caught(lambda: ddp.broadcast_parameters(timeout=0.05))

    for error in run_ranks(attempt, 2):
        assert type(error) is DistributedTimeoutError
        assert error.ranks == (1,)


def test_buffers_come_from_rank_0_before_each_forward():
    """In training mode running statistics are rank 0's when a forward begins; without the option they differ."""

    def statistics(group, broadcast_buffers):
        ddp = DDP(torch.nn.BatchNorm1d(1, momentum=1.0), group, broadcast_buffers=broadcast_buffers)
        ddp(torch.tensor([[1.0], [3.0]]) + group.rank)
        own = ddp.module.running_mean.item()
        seen = []
        ddp.module.register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.item()))
        ddp(torch.zeros(2, 1))
        return own, seen

    assert run_ranks(statistics, 2, True) == [(2.0, [2.0]), (3.0, [2.0])]
    assert run_ranks(statistics, 2, False) == [(2.0, [2.0]), (3.0, [3.0])]


STEPS = {
    "backward": lambda ddp, inputs: ddp(inputs).square().sum().backward(),
    "several forwards": lambda ddp, inputs: (ddp(inputs) + ddp(inputs + 1)).square().sum().backward(),
    "no gradient": lambda ddp, inputs: torch.no_grad()(ddp)(inputs),
    "explicit": lambda ddp, inputs: (ddp(inputs).square().sum().backward(), ddp.sync_gradients()),
    "after no_sync": lambda ddp, inputs: (
        _in_no_sync(ddp, inputs),
        ddp(inputs).square().sum().backward(),
    ),
    "evaluated between": lambda ddp, inputs: (
        ddp(inputs).square().sum().backward(),
        ddp.eval()(inputs),
        ddp.train()(inputs).square().sum().backward(),
    ),
}
OPTIONS = {"explicit": {"overlap_comm": False}}


def _in_no_sync(ddp, inputs):
    with ddp.no_sync():
        ddp(inputs).square().sum().backward()


@pytest.mark.parametrize("step", STEPS)
def test_ranks_evaluate_with_equal_buffers(step):
    """After the last step running statistics and outputs in evaluation are the same on all ranks: those of rank 0."""

    def evaluated(group):
        ddp = DDP(torch.nn.BatchNorm1d(2), group, **OPTIONS.get(step, {}))
        for _ in range(3):
            STEPS[step](ddp, torch.arange(8.0).view(4, 2) * (group.rank + 1) + group.rank)
        ddp.eval()
        return ddp(torch.ones(1, 2)), ddp.state_dict(), ddp.module.num_batches_tracked

    first, *others = run_ranks(evaluated, 3)
    assert float(first[1]["running_mean"].sum()) > 0
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_evaluation_with_different_buffers_warns():
    """A rank that evaluates after a forward without averaging is warned, once, with advice."""

    def evaluated(group):
        ddp = DDP(torch.nn.BatchNorm1d(2), group)
        _in_no_sync(ddp, torch.arange(8.0).view(4, 2) + group.rank)
        ddp.eval()
        with pytest.warns(UserWarning, match=r"buffers of its own.*Call broadcast_parameters\(\)"):
            ddp(torch.ones(1, 2))
        ddp.broadcast_parameters()
        return ddp(torch.ones(1, 2)).tolist()

    first, second = run_ranks(evaluated, 2, backend="native")
    assert first == second


def test_a_rank_may_evaluate_alone():
    """In evaluation mode forward needs no other rank."""

    def outputs(group):
        ddp = DDP(torch.nn.BatchNorm1d(2), group).eval()
        return ddp(torch.ones(3, 2)).shape if group.rank == 1 else None

    assert run_ranks(outputs, 2) == [None, (3, 2)]


def test_two_forwards_before_one_backward():
    """Buffers may be broadcast between a forward and its backward."""

    def gradients(group):
        ddp = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), group)
        inputs = torch.arange(8.0).view(4, 2)
        (ddp(inputs) * inputs + ddp(inputs + 1)).sum().backward()
        return [parameter.grad for parameter in ddp.parameters()]

    first, second = run_ranks(gradients, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Renamed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.other = torch.nn.Parameter(torch.zeros(2))


class WithBuffer(torch.nn.Linear):
    def __init__(self, state=None):
        super().__init__(2, 2)
        self.register_buffer("state", torch.zeros(1) if state is None else state)


DIFFERENT = {
    "shape": (
        lambda: torch.nn.Linear(3, 2),
        r"'weight' of shape \(2, 3\).* where rank 0 has .*'weight' of shape \(2, 2\)",
    ),
    "dtype": (lambda: torch.nn.Linear(2, 2).double(), r"torch\.float64 where rank 0 has .*torch\.float32"),
    "number": (lambda: torch.nn.Linear(2, 2, bias=False), r"nothing more where rank 0 has parameter 'bias'"),
    "name": (
        Renamed,
        r"'other' .* where rank 0 has .*'bias'",
    ),
    "frozen": (
        lambda: torch.nn.Linear(2, 2).requires_grad_(False),
        r"frozen parameter 'weight'.* where rank 0 has parameter",
    ),
    "buffer": (WithBuffer, r"buffer 'state' of shape \(1,\).* where rank 0 has nothing more"),
    "device": (lambda: torch.nn.Linear(2, 2, device="meta"), r"torch\.float32 on meta where rank 0 has .*float32\."),
    "lazy": (lambda: torch.nn.LazyLinear(2), r"parameter 'weight' \(lazy\) where rank 0 has parameter 'weight'"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_modules_are_refused(kind):
    """A rank whose module differs is named on all ranks, with the first difference; the group stays usable."""
    make, pattern = DIFFERENT[kind]

    def attempt(group):
        error = caught(lambda: DDP(make() if group.rank == 1 else torch.nn.Linear(2, 2), group))
        return error, allreduce(torch.ones(1), group=group).item()

    for error, total in run_ranks(attempt, 3):
        assert isinstance(error, CollectiveMismatchError)
        assert error.ranks == (1,)
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 has .*{pattern}"):
            raise error
        assert total == 3.0


def with_integer_parameter():
    module = torch.nn.Linear(2, 2)
    module.register_parameter("kind", torch.nn.Parameter(torch.zeros(1, dtype=torch.uint32), requires_grad=False))
    return module


def with_expanded_parameter():
    module = torch.nn.Linear(2, 2)
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(1).expand(4)))
    return module


def made_under_inference_mode(make):
    with torch.inference_mode():
        return make()


UNSUPPORTED = {
    "buffer": (
        lambda: WithBuffer(torch.zeros(1, dtype=torch.uint16)),
        r"buffer 'state' of WithBuffer.*not torch.uint16",
    ),
    "parameter": (with_integer_parameter, r"parameter 'kind' of Linear.*not torch.uint32"),
    "layout": (lambda: WithBuffer(torch.eye(2).to_sparse()), r"buffer 'state' of WithBuffer.*layout torch.sparse_coo"),
    "nested": (
        lambda: WithBuffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        r"buffer 'state' of WithBuffer.*a nested tensor",
    ),
    "device": (lambda: torch.nn.Linear(2, 2, device="meta"), r"parameter 'weight' of Linear.*is on meta"),
    "expanded buffer": (
        lambda: WithBuffer(torch.ones(1).expand(4)),
        r"buffer 'state' of WithBuffer.*share memory.*clone\(\)",
    ),
    "expanded parameter": (with_expanded_parameter, r"parameter 'scale' of Linear.*share memory"),
    "inference buffer": (
        lambda: WithBuffer(made_under_inference_mode(lambda: torch.ones(4))),
        r"buffer 'state' of WithBuffer.*made under inference_mode",
    ),
    "inference parameter": (
        lambda: made_under_inference_mode(lambda: torch.nn.Linear(2, 2)),
        r"parameter 'weight' of Linear.*made under inference_mode",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_tensors_that_cannot_be_sent_are_named(kind):
    """A parameter or buffer that collectives can't send is named on every rank, and the group stays usable."""
    make, pattern = UNSUPPORTED[kind]

    def attempt(group):
        return caught(lambda: DDP(make(), group)), allreduce(torch.ones(1), group=group).item()

    for error, total in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        with pytest.raises(UnsupportedOpError, match=pattern):
            raise error
        assert total == 2.0


def test_a_buffer_that_was_replaced_is_named():
    """A buffer that can't be written to any more is named by forward, and the group stays usable."""
    make, pattern = UNSUPPORTED["expanded buffer"]

    def attempt(group):
        module = WithBuffer(torch.ones(4))
        module.register_buffer("other", torch.ones(1))
        ddp = DDP(module, group)
        ddp.module.state = make().state
        return caught(lambda: ddp(torch.ones(2))), allreduce(torch.ones(1), group=group).item()

    for error, total in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        with pytest.raises(UnsupportedOpError, match=pattern):
            raise error
        assert total == 2.0


def test_a_buffer_that_was_replaced_under_inference_mode():
    """It gets rank 0's values like any other."""

    def attempt(group):
        module = WithBuffer(torch.ones(4))
        module.register_buffer("other", torch.ones(1))
        ddp = DDP(module, group)
        ddp.module.state = made_under_inference_mode(lambda: torch.full((4,), group.rank + 5.0))
        ddp(torch.ones(2))
        return ddp.module.state.tolist()

    assert run_ranks(attempt, 2) == [[5.0] * 4] * 2


def test_uneven_parameter_sets_name_the_first_missing():
    """The error about a rank with more parameters than rank 0 names the first of them."""

    def attempt(group):
        return str(caught(lambda: DDP(mlp()[: 3 + group.rank], group)))

    messages = run_ranks(attempt, 2)
    assert messages[0] == messages[1]
    assert "rank 1 has parameter '3.weight' of shape (3, 5)" in messages[0]
    assert "where rank 0 has nothing more" in messages[0]


def test_state_dict_is_the_modules():
    """States move between a bare and a wrapped module, also inside other modules."""
    start = seeded(mlp)

    def exchange(group):
        ddp = DDP(mlp().double(), group)
        outer = torch.nn.ModuleDict({"model": ddp, "head": torch.nn.Linear(1, 1)})
        bare = torch.nn.ModuleDict({"model": mlp().double(), "head": torch.nn.Linear(1, 1)})
        assert list(ddp.state_dict()) == list(start.state_dict())
        assert ddp.load_state_dict(start.state_dict()) == start.load_state_dict(start.state_dict())
        assert list(outer.state_dict()) == list(bare.state_dict())
        bare.load_state_dict(outer.state_dict())
        with torch.no_grad():
            bare["model"][0].bias += 1
        outer.load_state_dict(bare.state_dict())
        return ddp.state_dict(), bare["model"].state_dict()

    for wrapped, bare in run_ranks(exchange, 2):
        assert_same_bits([bare, wrapped])
        assert torch.equal(wrapped["0.bias"], start[0].bias + 1)


class Deep(torch.nn.Module):
    """A module with a child that has the name by which DDP knows its own."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.mark.parametrize("make", [mlp, Deep, lambda: torch.nn.Linear(2, 2)])
def test_names_are_those_of_the_state_dict(make):
    """Names of named_parameters and named_buffers can be loaded and looked up, also inside other modules."""
    ddp = DDP(make(), SimulatedBackend.create_group(1)[0])
    for model in (ddp, torch.nn.ModuleDict({"model": ddp})):
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert set(named) == set(model.state_dict())
        model.load_state_dict({name: tensor.detach().clone() for name, tensor in named.items()})
    for name, parameter in ddp.named_parameters():
        assert ddp.get_parameter(name) is parameter
        assert ddp.get_parameter(f"module.{name}") is parameter
    for name, buffer in ddp.named_buffers():
        assert ddp.get_buffer(name) is buffer
    modules = dict(ddp.named_modules(remove_duplicate=False))
    assert set(modules) == set(dict(ddp.module.named_modules()))
    assert all(ddp.get_submodule(name) is module for name, module in modules.items() if name)
    assert {ddp, *ddp.module.modules()} == set(ddp.modules())


@pytest.mark.parametrize("make", [mlp, Deep, lambda: torch.nn.Linear(2, 2)])
def test_a_checkpoint_of_torchs_ddp_is_loaded(make):
    """Names that all begin with "module.", as torch's DDP saves them, load into the module without it."""
    ddp, start = DDP(make(), SimulatedBackend.create_group(1)[0]), make()
    theirs = torch.nn.Module()
    theirs.module = start
    outer, their_outer = torch.nn.ModuleDict({"model": ddp}), torch.nn.ModuleDict({"model": theirs})
    for mine, other in ((ddp, theirs), (outer, their_outer)):
        with torch.no_grad():
            for tensor in (*start.parameters(), *start.buffers()):
                tensor.add_(1)
        mine.load_state_dict(other.state_dict())
        assert_same_bits([ddp.state_dict(), start.state_dict()])
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict({"module.other": torch.ones(1)})


@pytest.mark.parametrize(("how", "expected"), [("abort", GroupAbortedError), ("close", PeerLostError)])
def test_a_peer_that_leaves_during_backward(how, expected):
    """Survivors get the error from backward itself, whichever bucket they wait for."""
    start = seeded(mlp)

    def backward(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=SMALL)
        if group.rank == 1:
            leave = (lambda grad: group.close()) if how == "close" else (lambda grad: group.abort("out of memory"))
            ddp.module[2].weight.register_hook(leave)
        loss = ddp(batches(1)[0][0]).sum()
        return caught(loss.backward)

    errors = run_ranks(backward, 3)
    assert all(type(errors[rank]) is expected and errors[rank].ranks == (1,) for rank in (0, 2))
    assert type(errors[1]) is (GroupClosedError if how == "close" else GroupAbortedError)


class Critic(torch.nn.Linear):
    """Another model than `torch.nn.Linear`, of the same form."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_backwards_of_equal_models_in_another_order(odd, dtype):
    """Gradients are not swapped: every rank gets the same error, which names the models."""

    def backwards(group):
        actor, critic = (DDP(kind(2, 1, dtype=dtype), group) for kind in (torch.nn.Linear, Critic))
        inputs = torch.full((1, 2), group.rank, dtype=dtype)
        losses = [model(inputs).sum().abs() for model in (actor, critic)]
        error = caught(losses[group.rank == odd].backward)
        return error, type(group.failure)

    others = [rank for rank in range(3) if rank != odd]
    for error, failure in run_ranks(backwards, 3):
        assert type(error) is failure is CollectiveMismatchError
        assert error.ranks == (odd,)
        assert f"rank {odd} averaged bucket 0 of DDP model 1 (Critic)" in str(error)
        assert f"ranks {others[0]}, {others[1]} averaged bucket 0 of DDP model 0 (Linear)" in str(error)


def test_buckets_of_two_models_in_one_backward():
    """Where the ranks' losses join two models in another order, the first bucket that differs ends it."""

    def backward(group):
        models = [DDP(torch.nn.Linear(2, 1, bias=False), group) for _ in range(2)]
        outputs = [model(torch.ones(1, 2)).sum() for model in (models if group.rank else models[::-1])]
        return caught(sum(outputs).backward)

    for error in run_ranks(backward, 2):
        assert type(error) is CollectiveMismatchError
        assert error.ranks == ()
        assert "DDP model 0 (Linear)" in str(error)
        assert "DDP model 1 (Linear)" in str(error)


@pytest.mark.parametrize("num_models", [2, 130])
def test_several_models_of_one_group_train(num_models):
    """Any number of equal models train in one group as long as the ranks keep one order."""

    def gradients(group):
        models = [DDP(torch.nn.Linear(1, 1, bias=False), group) for _ in range(num_models)]
        for number, model in reversed(list(enumerate(models))):
            model(torch.full((1, 1), number + group.rank + 0.5)).sum().backward()
        return [model.module.weight.grad.item() for model in models]

    assert run_ranks(gradients, 2) == [[number + 1.0 for number in range(num_models)]] * 2


def test_a_bucket_that_meets_another_allreduce():
    """Another allreduce of the same size is not taken for a bucket."""

    def backward(group):
        ddp = DDP(torch.nn.Linear(50, 1, bias=False), group)
        if group.rank == 1:
            return allreduce(torch.full((50 + 2 + 4,), 1e3), ReduceOp.MEAN, group=group).numel()
        return caught(ddp(torch.ones(1, 50)).sum().backward)

    error, _ = run_ranks(backward, 2)
    assert type(error) is CollectiveMismatchError
    assert "some rank called an allreduce of its own" in str(error)


def test_a_rank_that_skips_backward():
    """The others' timeout names the model and parameters that DDP was averaging, with advice."""

    def backward(group):
        ddp = DDP(torch.nn.Linear(2, 1), group)
        if group.rank == 1:
            return caught(lambda: group.recv(bytearray(1), 0, timeout=LIMIT))
        return caught(lambda: ddp.sync_gradients(timeout=0.05))

    error, _ = run_ranks(backward, 2)
    assert type(error) is DistributedTimeoutError
    assert error.ranks == (1,)
    assert "rank 1 has not called it" in str(error)
    assert "bucket 0 of 1 of DDP model 0 (Linear), whose gradients rank 0 was averaging: 'bias' and 1 more" in str(
        error
    )
    assert "fewer batches than the others (see join()), skips a backward" in str(error)


def test_a_rank_that_is_in_forward_already():
    """A rank that skipped backward meets the others' gradients with its buffers: both errors say what DDP was doing."""

    def step(group):
        ddp = DDP(torch.nn.BatchNorm1d(1), group)
        loss = ddp(torch.ones(2, 1)).sum()
        return caught(lambda: ddp(torch.ones(2, 1)) if group.rank else loss.backward())

    first, second = run_ranks(step, 2)
    assert type(first) is type(second) is CollectiveMismatchError
    assert "whose gradients rank 0 was averaging: 'bias' and 1 more. Look for a rank" in str(first)
    assert "Before forward DDP model 0 (BatchNorm1d) broadcasts the buffers of rank 0." in str(second)


def test_a_rank_that_does_not_make_the_model():
    """The others' timeout says that they were making a DDP."""

    def make(group):
        if group.rank == 1:
            return caught(lambda: group.recv(bytearray(1), 0, timeout=LIMIT))
        return caught(lambda: DDP(torch.nn.Linear(1, 1), group))

    error, _ = run_ranks(make, 2, backend=partial(SimulatedBackend.create_group, timeout=0.05))
    assert type(error) is DistributedTimeoutError
    assert error.ranks == (1,)
    assert "Rank 0 was giving a Linear to DDP. Every rank of the group must make it" in str(error)


def test_a_failed_backward_before_any_bucket_may_be_repeated():
    """A failure before anything was sent leaves the ranks in step."""
    start = seeded(Branches)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group)

        def fail(grad):
            raise ArithmeticError("once")

        handle = ddp.module.branches[0].weight.register_hook(fail)
        first = ddp(torch.ones(1, 2).double(), 0, 1, 2)
        errors = [type(caught(first.backward))]
        handle.remove()
        ddp.zero_grad()
        ddp(torch.full((1, 2), group.rank).double(), 0, 1, 2).backward()
        return errors, [branch.weight.grad.tolist() for branch in ddp.module.branches]

    assert run_ranks(gradients, 2) == [([ArithmeticError], [[[0.5, 0.5]]] * 3)] * 2


@pytest.mark.parametrize("freezes", [False, True])
def test_a_failed_backward_after_a_bucket_ends_the_group(freezes):
    """A rank that continued after a failed backward would mix up buckets: all ranks get an error instead."""
    start = seeded(Branches)

    def backward(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=1e-9)
        inputs = torch.ones(1, 2).double()
        if group.rank == 0:
            return caught(ddp(inputs, 0, 1, 2).backward)

        def fail(grad):
            raise ArithmeticError("once")

        ddp.module.branches[0].weight.register_hook(fail)
        loss = ddp(inputs, 0, 1, 2)
        assert type(caught(loss.backward)) is ArithmeticError
        ddp.module.branches[0].weight.requires_grad_(not freezes)  # one that freezes needs other buckets
        return caught(lambda: ddp(inputs, 0, 1, 2))

    for error in run_ranks(backward, 2):
        assert type(error) is GroupAbortedError
        assert "earlier backward of DDP model 0 (Branches) on rank 1" in str(error)
        assert "Make a new group" in str(error)


def test_gradient_counts_of_a_failed_backward_are_forgotten():
    """After a backward that failed before any bucket started, gradients in another order start no bucket early."""
    start = seeded(Branches)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group)  # one bucket, which had some of its gradients when backward failed
        inputs = torch.ones(1, 2).double()

        def fail(grad):
            raise ArithmeticError("once")

        hook = ddp.module.branches[0].weight.register_hook(fail)
        assert type(caught(ddp(inputs, 0, 1, 2).backward)) is ArithmeticError
        hook.remove()
        ddp.zero_grad()
        ddp(inputs * (group.rank + 1), 2, 1, 0).backward()
        return {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}

    assert_same_bits(run_ranks(gradients, 2))


def test_a_module_that_changes_its_dtype_is_averaged_in_the_new_one():
    """After double() gradients are reduced in float64, not through the former float32 buckets."""

    def gradient(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group)
        ddp.double()
        ddp(torch.full((1, 1), 0.1 * (group.rank + 1), dtype=torch.float64)).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(gradient, 2) == [(0.1 + 0.2) / 2] * 2


def test_a_module_may_be_wrapped_again():
    """A collected DDP leaves no hooks: the next one's gradients are averaged once, and a copy's never."""

    def count(group):
        module = torch.nn.Linear(2, 2)
        for _ in range(2):
            ddp = DDP(module, group)
            del ddp
        gc.collect()
        module(torch.ones(1, 2)).sum().backward()
        ddp = DDP(module, group)
        ddp(torch.ones(1, 2)).sum().backward()
        copy.deepcopy(ddp.module)(torch.ones(1, 2)).sum().backward()
        return len(group.engine("cpu").sizes)

    assert run_ranks(count, 2, backend=CountingBackend.create_group) == [1, 1]


def test_sparse_gradients_are_refused():
    """An embedding with sparse gradients raises out of backward, saying what to do."""

    def attempt(group):
        ddp = DDP(torch.nn.Embedding(4, 2, sparse=True), group)
        return caught(ddp(torch.tensor([1])).sum().backward)

    for error in run_ranks(attempt, 2):
        assert isinstance(error, UnsupportedOpError)
        assert "sparse=False" in str(error)


def test_a_sparse_gradient_of_one_rank_ends_the_group():
    """A rank that refuses a gradient when others have started buckets aborts the group instead of letting them wait."""

    def attempt(group):
        layers = torch.nn.Embedding(4, 2, sparse=group.rank == 1), torch.nn.Linear(2, 1)
        ddp = DDP(torch.nn.Sequential(*layers), group, bucket_size_mb=1e-9)
        group.barrier()
        return caught(ddp(torch.tensor([1])).sum().backward)

    for error in run_ranks(attempt, 3):
        assert type(error) is UnsupportedOpError
        assert error.ranks == (1,)
        assert "the gradient of '0.weight' on rank 1" in str(error)


def test_gradients_are_checked_before_any_is_sent():
    """Where all ranks refuse an assigned gradient the group stays usable, and the next round starts anew."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(2, 1), group, bucket_size_mb=1e-9)
        weight, bias = ddp.module.weight, ddp.module.bias
        weight.grad, bias.grad = torch.ones_like(weight).to_sparse(), torch.ones_like(bias)
        error = caught(ddp.sync_gradients)
        weight.grad, bias.grad = torch.full_like(weight, group.rank), torch.full_like(bias, group.rank)
        ddp.sync_gradients()
        return type(error), len(group.engine("cpu").sizes), weight.grad.tolist(), bias.grad.tolist()

    results = run_ranks(gradients, 3, backend=CountingBackend.create_group)
    assert results == [(UnsupportedOpError, 2, [[1.0, 1.0]], [1.0])] * 3


def test_an_interrupted_reduction_ends_the_group():
    """A rank that is interrupted while its buckets are under way can't begin another round with the others."""

    def attempt(group):
        ddp = DDP(torch.nn.Linear(2, 1), group)
        group.barrier()
        if group.rank == 1:

            def interrupt():
                raise KeyboardInterrupt

            ddp._reducer.buckets[0].wait = interrupt
            with pytest.raises(KeyboardInterrupt):
                ddp.sync_gradients()
            return group.failure
        return caught(lambda: [ddp.sync_gradients() for _ in range(2)])

    for error in run_ranks(attempt, 2):
        assert type(error) is GroupAbortedError
        assert error.ranks == (1,)
        assert "averaging gradients failed with KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("bucket_size_mb", [SMALL, 25], ids=["several buckets", "one bucket"])
@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize(
    ("options", "drops_gradient", "what"),
    [({}, False, "changed"), ({}, True, "changed"), ({"fused": True}, True, "lost its gradient")],
    ids=["step", "step and zero_grad", "fused step and zero_grad"],
)
def test_an_optimizer_that_steps_in_a_hook_is_refused(options, drops_gradient, what, wrapped, bucket_size_mb):
    """It would step with each rank's own gradients: backward raises on every rank, and names a parameter."""

    def attempt(group):
        model = mlp()
        ddp = DDP(model, group, bucket_size_mb=bucket_size_mb) if wrapped == "before" else None
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, **options)

            def step(_, optimizer=optimizer):
                optimizer.step()
                if drops_gradient:
                    optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        ddp = ddp or DDP(model, group, bucket_size_mb=bucket_size_mb)
        group.barrier()  # else a rank may still be making its DDP when the other's error comes
        return caught(ddp(torch.ones(1, 6)).sum().backward)

    for error in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        assert re.search(rf"parameter '\d\.\w+' of DDP model 0 \(Sequential\) {what} during backward", str(error))


def test_hooks_may_change_gradients():
    """A hook that only changes gradients is no error."""

    def gradient(group):
        model = torch.nn.Linear(1, 1, bias=False)

        def double(weight):
            weight.grad.mul_(2.0)

        model.weight.register_post_accumulate_grad_hook(double)
        ddp = DDP(model, group)
        ddp(torch.full((1, 1), float(group.rank))).sum().backward()
        return model.weight.grad.item()

    assert run_ranks(gradient, 3) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_module_is_trained_alone(is_gone):
    """Without its DDP, or in no_sync(), one rank may train the module while the others do something else."""

    def gradient(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group)
        module = ddp.module
        context = ddp.no_sync() if not is_gone else contextlib.nullcontext()
        del ddp
        with context:
            if group.rank == 1:
                module(torch.full((1, 1), 3.0)).sum().backward()
        return None if module.weight.grad is None else module.weight.grad.item()

    assert run_ranks(gradient, 2) == [None, 3.0]


def test_modules_without_trainable_parameters():
    """A module that has nothing to average still runs, and keeps its buffers equal."""

    def outputs(group):
        ddp = DDP(torch.nn.BatchNorm1d(1, affine=False), group)
        ddp.sync_gradients()
        ddp(torch.tensor([[1.0], [3.0]]) + group.rank)
        return ddp.module.running_mean.item()

    first, second = run_ranks(outputs, 2)
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((3,), TypeError, "torch.nn.Module, not int"),
        ((torch.nn.Linear(1, 1), "world"), TypeError, "group must be"),
        ((torch.nn.LazyLinear(1), None), ValueError, "'weight' is lazy"),
    ],
)
def test_wrong_arguments(arguments, kind, text):
    """Each is refused with the expected values."""

    def attempt(group):
        DDP(*arguments)

    with pytest.raises(RankFailedError, match=text) as failure:
        run_ranks(attempt, 1)
    assert isinstance(failure.value.__cause__, kind)


@pytest.mark.parametrize(
    ("size", "kind"), [(0, ValueError), (float("nan"), ValueError), ("25", TypeError), (True, TypeError)]
)
def test_wrong_bucket_sizes(size, kind):
    """A bucket needs a size above 0."""
    group = SimulatedBackend.create_group(1)[0]
    with pytest.raises(kind, match="bucket_size_mb"):
        DDP(torch.nn.Linear(1, 1), group, bucket_size_mb=size)


def test_a_switch_is_true_or_false():
    """Other values than bools are refused."""
    group = SimulatedBackend.create_group(1)[0]
    with pytest.raises(TypeError, match="broadcast_buffers must be True or False, not str"):
        DDP(torch.nn.Linear(1, 1), group, broadcast_buffers="no")


def test_a_shallow_copy_is_refused():
    """It would average the gradients of one module twice."""
    ddp = DDP(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0])
    with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
        copy.copy(ddp)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_joins_a_group_when_it_trains(duplicate):
    """A DDP is copied and pickled without its group, and averages again from its first forward on."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group, find_unused_parameters=True)
        twin = duplicate(ddp)
        evaluated = twin.eval()(torch.ones(1, 1)).shape  # needs nobody
        twin.train()(torch.full((1, 1), group.rank + 1.0)).sum().backward()
        assert ddp.module.weight.grad is None
        assert list(twin.state_dict()) == list(ddp.state_dict())
        return evaluated, twin.module.weight.grad.item()

    assert run_ranks(gradients, 2) == [((1, 1), 1.5)] * 2


def test_a_pickled_ddp_has_nothing_of_its_group():
    """Its state is the module, options and flags: no group, reducer or guard, which belong to this process."""

    def leftovers(group):
        ddp = DDP(torch.nn.Linear(1, 1), group)
        copied = copy.deepcopy(ddp)
        states = (ddp.__getstate__(), copied.__getstate__())
        return [[name for name, value in state.items() if isinstance(value, NOT_PICKLED)] for state in states]

    assert run_ranks(leftovers, 2) == [[[], []]] * 2


def test_a_copy_keeps_a_group_that_is_not_the_default():
    """A copy of a model of a sub-group averages over that sub-group."""

    def gradient(group):
        if group.rank == 1:
            return None
        twin = copy.deepcopy(DDP(torch.nn.Linear(1, 1, bias=False), SubBackend(group, [0, 2])))
        twin(torch.full((1, 1), group.rank + 1.0)).sum().backward()
        return twin.module.weight.grad.item()

    assert run_ranks(gradient, 3) == [2.0, None, 2.0]


def test_a_closed_group_is_refused():
    """DDP on a group that was closed says so at once."""
    group = SimulatedBackend.create_group(1)[0]
    group.close()
    with pytest.raises(DistributedError, match="closed"):
        DDP(torch.nn.Linear(1, 1), group)
