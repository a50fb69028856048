"""DDP: when gradients are averaged, in one backward and over several."""

import contextlib
import copy

import pytest
import torch
from ddp_ranks import Branches, CountingBackend, Tied, assert_same_bits, caught, mlp, seeded
from torch.utils.checkpoint import checkpoint

from ferrodist import DDP, SimulatedBackend
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.testing import run_ranks

TINY = 1e-9  # a bucket for each parameter


def gradients_of(ddp):
    return {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}


def part_of_batch(group, num_features=6):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, num_features, generator=generator).double()[group.rank :: group.world_size]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_accumulates_without_messages(world_size):
    """Backwards in no_sync() send nothing, and the next one averages the sum of all."""
    start = seeded(mlp)

    def gradients(group):
        ddp = DDP(copy.deepcopy(start), group)
        inputs = part_of_batch(group)
        with ddp.no_sync():
            for row in inputs[:-1]:
                ddp(row).sum().backward()
        sent = len(group.engine("cpu").sizes)
        ddp(inputs[-1]).sum().backward()
        plain = DDP(copy.deepcopy(start), group)
        plain(inputs).sum().backward()
        return sent, gradients_of(ddp), gradients_of(plain)

    for sent, accumulated, at_once in run_ranks(gradients, world_size, backend=CountingBackend.create_group):
        assert sent == 0
        for name, gradient in accumulated.items():
            torch.testing.assert_close(gradient, at_once[name], rtol=0, atol=1e-12)


def test_no_sync_leaves_buffers_alone():
    """A forward in no_sync() sends no buffers either, so ranks may run different numbers of them."""

    def forwards(group):
        ddp = DDP(torch.nn.BatchNorm1d(2), group)
        with ddp.no_sync():
            for _ in range(group.rank):
                ddp(torch.ones(3, 2))
        return ddp(torch.ones(3, 2)).shape

    assert run_ranks(forwards, 3) == [(3, 2)] * 3


def test_no_sync_ends_with_an_error():
    """An exception inside the block doesn't leave averaging switched off."""

    def gradient(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group)
        with contextlib.suppress(ArithmeticError), ddp.no_sync():
            raise ArithmeticError
        ddp(torch.full((1, 1), float(group.rank))).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(gradient, 2) == [0.5, 0.5]


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_are_views_of_the_buckets(as_views):
    """Gradients are in the buckets' memory, in every step, with any zero_grad; or have their own on request."""

    def are_views(group):
        ddp = DDP(torch.nn.Linear(3, 2), group, gradient_as_bucket_view=as_views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        found = []
        for set_to_none in (True, False, True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            ddp(torch.full((1, 3), group.rank + 1.0)).sum().backward()
            memory = {bucket.tensor.untyped_storage().data_ptr() for bucket in ddp._reducer.buckets}
            found += [parameter.grad.untyped_storage().data_ptr() in memory for parameter in ddp.parameters()]
            assert ddp.module.weight.grad.tolist() == [[1.5] * 3] * 2
            optimizer.step()
        return set(found)

    assert run_ranks(are_views, 2) == [{as_views}] * 2


class OutOfOrder(torch.nn.Module):
    """Uses its layers in another order than it has them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(4))

    def forward(self, inputs):
        for index in (2, 0, 3, 1):
            inputs = self.layers[index](inputs)
        return inputs


def test_buckets_are_rebuilt_in_the_order_of_arrival():
    """The first step reduces in reverse order of the parameters, later ones in the order in which gradients come."""

    def orders(group):
        ddp = DDP(OutOfOrder(), group, bucket_size_mb=TINY)
        found = []
        for _ in range(3):
            found.append([bucket.names[0][7] for bucket in ddp._reducer.buckets])
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
        return found

    assert run_ranks(orders, 2) == [[["3", "2", "1", "0"], *[["1", "3", "0", "2"]] * 2]] * 2


def test_rank_0_decides_the_order():
    """Ranks whose gradients come in different orders still rebuild the same buckets."""
    start = seeded(Branches)

    def orders(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY)
        for _ in range(2):
            ddp(torch.ones(1, 2).double(), *((0, 1, 2), (1, 2, 0))[group.rank]).backward()
        return [bucket.names for bucket in ddp._reducer.buckets], gradients_of(ddp)

    (first, gradients), (second, others) = run_ranks(orders, 2)
    assert first == second
    assert_same_bits([gradients, others])


def test_the_first_bucket_is_small():
    """A megabyte is sent before the first bucket of full size is complete."""

    def sizes(group):
        ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 1024, bias=False) for _ in range(4)]), group)
        return [bucket.tensor.nbytes for bucket in ddp._reducer.buckets]

    assert run_ranks(sizes, 2) == [[1 << 20, 3 << 20]] * 2


@pytest.mark.parametrize("lacking", [(1,), (0, 2)])
def test_a_parameter_without_a_gradient_on_some_ranks_is_named(lacking):
    """All ranks raise, naming the parameter and the ranks that lack its gradient, and the group stays usable."""
    start = seeded(Branches)

    def attempt(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY)
        inputs = torch.ones(1, 2).double()
        error = caught(ddp(inputs, *((1,) if group.rank in lacking else (0, 1))).backward)
        ddp.zero_grad()
        ddp(inputs, 0, 1).backward()
        return error, group.failure

    for error, failure in run_ranks(attempt, 3):
        assert type(error) is CollectiveMismatchError
        assert error.ranks == lacking
        assert "parameter 'branches.0.weight' of DDP model 0 (Branches) got no gradient on rank" in str(error)
        assert "find_unused_parameters=True" in str(error)
        assert failure is None


def test_buckets_do_not_wait_for_unused_parameters():
    """With find_unused_parameters a bucket whose parameters the outputs don't depend on starts during backward."""
    start = seeded(Branches)

    def overlaps(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY, find_unused_parameters=True)
        seen = []
        ddp.module.branches[0].weight.register_hook(lambda grad: seen.append(group.engine("cpu").begun.wait(20)))
        ddp(torch.ones(1, 2).double(), 0, 1).backward()  # the first bucket is that of branch 2
        return seen, ddp.module.branches[2].weight.grad

    def keeps(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY, find_unused_parameters=True)
        hidden = [ddp(torch.ones(1, 2).double(), index) for index in (0, group.rank + 1)]  # two forwards, one backward
        sum(hidden).backward()
        return gradients_of(ddp)

    assert run_ranks(overlaps, 2, backend=CountingBackend.create_group) == [([True], None)] * 2
    assert_same_bits(run_ranks(keeps, 2))


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["inside", "whole model"])
def test_checkpointing(use_reentrant, static_graph, whole):
    """Activation checkpointing of both kinds, in the model or around it, doesn't change gradients."""
    start = seeded(Tied)

    def gradients(group):
        inputs = part_of_batch(group).requires_grad_()
        plain = DDP(copy.deepcopy(start), group)
        plain(inputs).square().sum().backward()
        ddp = DDP(copy.deepcopy(start), group, static_graph=static_graph, bucket_size_mb=TINY)
        module = ddp.module
        if not whole:
            kind = {"use_reentrant": use_reentrant}

            def forward(inputs):
                inputs = checkpoint(lambda x: torch.tanh(module.first(x)), inputs, **kind)
                inputs = checkpoint(lambda x: torch.tanh(module.second(x)), inputs, **kind)
                return checkpoint(module.last, inputs, **kind)

            module.forward = forward
        for _ in range(3):
            ddp.zero_grad()
            outputs = checkpoint(ddp, inputs, use_reentrant=use_reentrant) if whole else ddp(inputs)
            group.engine("cpu").sizes.clear()
            outputs.square().sum().backward()
            assert len(group.engine("cpu").sizes) == len(list(ddp.parameters()))
        return gradients_of(plain), gradients_of(ddp)

    for plain, checkpointed in run_ranks(gradients, 2, backend=CountingBackend.create_group):
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-12)


def test_a_second_gradient_after_its_bucket_has_started_is_refused():
    """Where a re-entrant checkpoint uses a parameter again, all ranks raise with advice, and static_graph solves it."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(2 * torch.eye(2))

        def forward(self, inputs):
            return checkpoint(lambda x: x @ self.weight, inputs, use_reentrant=True) @ self.weight

    def attempt(group, **options):
        ddp = DDP(Twice(), group, **options)
        inputs = torch.full((1, 2), group.rank + 1.0, requires_grad=True)
        group.barrier()
        error = caught(lambda: ddp(inputs).sum().backward())
        return error, ddp.module.weight.grad

    for error, _ in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        assert "'weight' of DDP model 0 (Twice) got a gradient on rank" in str(error)
        assert "use_reentrant=False" in str(error)
        assert "pass static_graph=True to DDP" in str(error)
    for error, gradient in run_ranks(attempt, 2, static_graph=True):
        assert error is None
        assert torch.equal(gradient, torch.full((2, 2), 6.0))


def test_a_static_graph_that_changes_is_refused():
    """A parameter that the first step used and a later one does not is named on all ranks."""
    start = seeded(Branches)

    def attempt(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY, static_graph=True)
        inputs = torch.ones(1, 2).double()
        ddp(inputs, 0, 1).backward()
        group.barrier()
        return caught(lambda: ddp(inputs, 0).backward())

    for error in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        assert "'branches.1.weight' of DDP model 0 (Branches) got its gradient less often" in str(error)
        assert "static_graph=True" in str(error)


def test_a_static_graph_starts_buckets_during_backward():
    """From the second step on buckets start when their counted gradients are there, without waiting for unused ones."""
    start = seeded(Branches)

    def overlaps(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=TINY, static_graph=True)
        order = (0, 1)
        ddp(torch.ones(1, 2).double(), *order).backward()
        group.engine("cpu").begun.clear()
        seen = []
        first, last = (bucket.parameters[0] for bucket in ddp._reducer.buckets[:2])
        last.register_hook(lambda grad: seen.append(group.engine("cpu").begun.wait(20)))
        assert first is not last
        ddp(torch.ones(1, 2).double(), *order).backward()
        return seen

    assert run_ranks(overlaps, 2, backend=CountingBackend.create_group) == [[True]] * 2


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True, which torch says once
def test_double_backward_is_refused():
    """create_graph=True would need a graph across ranks: the error names an alternative, which works."""
    start = seeded(mlp)

    def attempt(group):
        ddp = DDP(copy.deepcopy(start), group)
        inputs = part_of_batch(group).requires_grad_()
        error = caught(lambda: ddp(inputs).sum().backward(create_graph=True))
        ddp.zero_grad()
        outputs = ddp(inputs).sum()
        (slope,) = torch.autograd.grad(outputs, inputs, create_graph=True)
        (outputs + slope.square().sum()).backward()
        return error, gradients_of(ddp)

    (error, first), (_, second) = run_ranks(attempt, 2)
    assert type(error) is UnsupportedOpError
    assert "torch.autograd.grad(..., create_graph=True)" in str(error)
    assert_same_bits([first, second])


def with_new_layer(module):
    module.extra = torch.nn.Linear(1, 1)


def with_new_parameter(module):
    module[0].scale = torch.nn.Parameter(torch.ones(1))


def with_other_parameter(module):
    module[0].weight = torch.nn.Parameter(torch.zeros(7, 6, dtype=torch.float64))


def without_layer(module):
    del module[3]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_new_layer, r"'extra.weight' of DDP model 0 \(Sequential\) was added"),
        (with_new_parameter, "'0.scale' .* was added"),
        (with_other_parameter, "'0.weight' .* was replaced"),
        (without_layer, "'3.weight' .* was removed"),
    ],
)
def test_parameters_that_change_afterwards_are_refused(change, text):
    """A new parameter, which would not be averaged, is named by the next forward, with advice."""

    def attempt(group):
        ddp = DDP(seeded(mlp), group)
        change(ddp.module)
        return caught(lambda: ddp(torch.ones(1, 6).double()))

    for error in run_ranks(attempt, 2):
        assert type(error) is UnsupportedOpError
        with pytest.raises(UnsupportedOpError, match=f"parameter {text}.* make a new DDP"):
            raise error


def test_a_layer_without_parameters_may_be_added():
    """The guard watches parameters only."""

    def output(group):
        ddp = DDP(torch.nn.Sequential(torch.nn.Linear(1, 1)), group)
        ddp.module.append(torch.nn.Sigmoid())
        return [ddp(torch.ones(1, 1)).shape for _ in range(2)]

    assert run_ranks(output, 2) == [[(1, 1)] * 2] * 2


@pytest.mark.parametrize("how", ["sync_gradients", "overlapped_sync_gradients"])
def test_averaging_without_overlap(how):
    """With overlap_comm=False backward sends nothing, and either call averages to the bits of overlapped averaging."""
    start = seeded(mlp)

    def gradients(group):
        inputs = part_of_batch(group)
        plain = DDP(copy.deepcopy(start), group)
        plain(inputs).sum().backward()
        ddp = DDP(copy.deepcopy(start), group, overlap_comm=False, bucket_size_mb=TINY)
        for _ in range(3):
            group.engine("cpu").sizes.clear()
            ddp.zero_grad()
            ddp(inputs).sum().backward()
            assert group.engine("cpu").sizes == []
            getattr(ddp, how)(timeout=20)
            assert len(group.engine("cpu").sizes) == 6
        return gradients_of(plain), gradients_of(ddp)

    for plain, explicit in run_ranks(gradients, 2, backend=CountingBackend.create_group):
        assert_same_bits([plain, explicit])


def test_a_step_before_averaging_is_refused():
    """With overlap_comm=False a step before sync_gradients() is an error of the next forward."""

    def attempt(group):
        ddp = DDP(torch.nn.Linear(1, 1), group, overlap_comm=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for synchronises in (True, True, False):
            ddp(torch.ones(1, 1)).sum().backward()
            if synchronises:
                ddp.sync_gradients()
            optimizer.step()
        return caught(lambda: ddp(torch.ones(1, 1)))

    for error in run_ranks(attempt, 2):
        assert type(error) is RuntimeError
        assert "call sync_gradients() before optimizer.step()" in str(error)


def test_parameters_that_are_views_of_one_tensor():
    """Parameters that are views of one tensor have gradients of their own, all averaged."""

    def gradients(group):
        memory = torch.ones(4)
        module = torch.nn.Module()
        module.first, module.second = (torch.nn.Parameter(memory[part]) for part in (slice(0, 3), slice(1, 4)))
        ddp = DDP(module, group)
        ((module.first.sum() + 2 * module.second.sum()) * group.rank).backward()
        return [parameter.grad.tolist() for parameter in ddp.parameters()]

    assert run_ranks(gradients, 3) == [[[1.0] * 3, [2.0] * 3]] * 3


def test_options_are_compared():
    """A rank with another option is named when the DDP is made, since it would reduce other messages."""

    def attempt(group):
        return caught(lambda: DDP(torch.nn.Linear(1, 1), group, bucket_size_mb=group.rank + 1))

    for error in run_ranks(attempt, 2):
        assert type(error) is CollectiveMismatchError
        assert "the option bucket_size_mb=2.0 where rank 0 has the option bucket_size_mb=1.0" in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"static_graph": 1}, TypeError, "static_graph must be True or False, not int"),
        ({"comm_hook": "fp16"}, TypeError, "comm_hook must be a function"),
        ({"overlap_comm": None}, TypeError, "overlap_comm must be True or False"),
    ],
)
def test_wrong_options(options, kind, text):
    """Each is refused by name."""
    with pytest.raises(kind, match=text):
        DDP(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0], **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own looking around
@pytest.mark.usefixtures("compiles_in_threads")
def test_a_compiled_module():
    """A compiled module is averaged like any other, and so is a compiled DDP."""
    start = seeded(mlp)

    def gradients(group):
        found = []
        for wrap in (
            lambda: DDP(copy.deepcopy(start), group),
            lambda: DDP(torch.compile(copy.deepcopy(start), backend="eager"), group),
            lambda: torch.compile(DDP(copy.deepcopy(start), group), backend="eager"),
        ):
            model = wrap()
            model(part_of_batch(group)).sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        return found

    for plain, *compiled in run_ranks(gradients, 2):
        for grads in compiled:
            assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))


def test_autocast_and_gradient_scaling():
    """Under autocast with a GradScaler ranks step alike, and all skip a step in which one rank's gradient overflows."""
    start = seeded(mlp, torch.float32)

    def train(group):
        ddp = DDP(copy.deepcopy(start), group)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        states, scales = [], []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ddp(part_of_batch(group).float()).square().mean()
            if step == 1 and group.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            states.append(copy.deepcopy(ddp.state_dict()))
            scales.append(scaler.get_scale())
        return states, scales

    (first, scales), (second, others) = run_ranks(train, 2)
    assert scales == others == [1024.0, 512.0, 512.0]
    for states in zip(first, second, strict=True):
        assert_same_bits(states)
    assert_same_bits(first[:2])
    assert not torch.equal(first[2]["0.weight"], first[1]["0.weight"])
