"""DDP in unusual programs: replaced gradients, modules in two DDPs, unusual outputs."""

import contextlib
import copy
import dataclasses
import threading
import time
from functools import partial

import pytest
import torch
from ddp_ranks import CountingBackend, assert_same_bits, caught, mlp, seeded
from torch.utils.checkpoint import checkpoint

from ferrodist import DDP, CollectiveMismatchError, DistributedTimeoutError, UnsupportedOpError, comm_hooks
from ferrodist.parallel.ddp.comm_hooks import compression, power_sgd, top_k
from ferrodist.parallel.ddp.comm_hooks.error_feedback import ErrorFeedback
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native-threads"]


def linear(size=2):
    return torch.nn.Linear(size, 1, bias=False)


def of_rank(group, size=2, dtype=None):
    return torch.full((1, size), group.rank + 1.0, dtype=dtype)


def other_data(model):
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-1, 1)


CHANGES = {
    "double": lambda model: model.double(),
    "there and back": lambda model: model.double().float(),
    "half": lambda model: model.half(),
    "grad.data": other_data,
    "grad": lambda model: setattr(model.weight, "grad", model.weight.grad.clone()),
}


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_moved_to_other_memory_are_averaged(change, backend, as_views):
    """Giving a gradient other memory or another dtype between two steps doesn't change averages."""

    def train(group):
        model = linear()
        ddp = DDP(model, group, gradient_as_bucket_view=as_views)
        ddp(of_rank(group)).sum().backward()
        CHANGES[change](model)
        found = []
        for _ in range(2):
            ddp.zero_grad()
            ddp(of_rank(group, dtype=model.weight.dtype)).sum().backward()
            found += model.weight.grad.flatten().tolist()
        return found

    assert run_ranks(train, 2, backend=backend) == [[1.5] * 4] * 2


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_on_parameters_run_before_gradients_are_sent(backend, when, replaces):
    """A hook that clips or scales is part of the gradient, whether it was made before the DDP or after."""

    def scale(parameter):
        if replaces:
            parameter.grad = 2 * parameter.grad
        else:
            parameter.grad.mul_(2)

    def hook(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)

    def train(group):
        model = torch.nn.Sequential(*[torch.nn.Linear(40, 40, bias=False) for _ in range(3)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.eye(40))
        if when == "before":
            hook(model)
        ddp = DDP(model, group, bucket_size_mb=1e-6)
        if when == "after":
            hook(model)
        wrong = 0
        for _ in range(10):
            ddp.zero_grad()
            ddp(of_rank(group, 40)).sum().backward()
            wrong += sum(not torch.all(parameter.grad == 3) for parameter in model.parameters())
        return wrong

    assert run_ranks(train, 2, backend=backend) == [0, 0]


def test_a_parameter_belongs_to_the_last_ddp():
    """An older DDP of it refuses to train, on all ranks, until the newer one is collected."""

    def share(group):
        layer = linear()
        older = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), layer), group)
        newer = DDP(layer, group)
        newer(of_rank(group)).sum().backward()
        error = repr(caught(lambda: older(of_rank(group))))
        del newer
        older(of_rank(group)).sum().backward()
        return error

    for error in run_ranks(share, 2):
        assert error.startswith(UnsupportedOpError.__name__)
        assert "'1.weight' of DDP model 0 (Sequential) belongs to DDP model 1 (Linear)" in error


def test_a_ddp_inside_another_is_refused():
    """The outer one owns the parameters, and the inner one says so."""

    def nest(group):
        inner = DDP(linear(), group)
        outer = DDP(torch.nn.Sequential(inner), group)
        return caught(lambda: outer(of_rank(group)))

    for error in run_ranks(nest, 2):
        assert "wrap that once" in str(error)


def test_ranks_that_freeze_different_parameters_get_an_error():
    """Even if the parameters have one shape."""

    def train(group):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        ddp = DDP(model, group)
        ddp(of_rank(group)).sum().backward()
        model[group.rank].weight.requires_grad_(False)
        ddp.zero_grad()
        return caught(lambda: ddp(of_rank(group).requires_grad_()).sum().backward())

    for error in run_ranks(train, 2):
        assert type(error) is CollectiveMismatchError
        assert "rank 1 of group 'world' averaged gradients of other parameters" in str(error)


@pytest.mark.parametrize("block", ["join", "no_sync", "both"])
@pytest.mark.parametrize("change", ["unfreeze", "double"])
def test_changes_directly_before_a_block(change, block):
    """Changes since the last step are noticed when a join block begins, also by a rank without batches."""

    def train(group):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), linear())
        if change == "unfreeze":
            model[0].weight.requires_grad_(False)
        with torch.no_grad():
            model[0].weight.fill_(1)
            model[1].weight.fill_(1)
        ddp = DDP(model, group)
        ddp(of_rank(group)).sum().backward()
        ddp.zero_grad()
        if change == "unfreeze":
            model[0].weight.requires_grad_(True)
        else:
            model.double()
        dtype = model[0].weight.dtype
        with ddp.join() if block != "no_sync" else contextlib.nullcontext():
            for _ in range(2 - group.rank if block == "join" else 2):
                with ddp.no_sync() if block != "join" else contextlib.nullcontext():
                    ddp.zero_grad()
                    ddp(of_rank(group, dtype=dtype)).sum().backward()
                if block != "join":
                    ddp(of_rank(group, dtype=dtype)).sum().backward()
        return [parameter.grad.flatten().tolist() for parameter in model.parameters()]

    first = run_ranks(train, 2, timeout=60)[0]
    mean = 1.0 if block == "join" else 3.0  # the last step is rank 0's alone; or two backwards of 1 and 2
    assert first == [[mean] * 4, [2 * mean] * 2]


def test_no_hooks_stay_on_leaves():
    """A module that returns its input or a parameter leaves no hooks on them."""

    class Echo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, inputs):
            return inputs, self.scale, self.layer(inputs)

    def train(group):
        ddp = DDP(Echo(), group)
        inputs = of_rank(group).requires_grad_()
        for _ in range(3):
            _, scale, outputs = ddp(inputs)
            (outputs.sum() * scale).backward()
        return len(inputs._backward_hooks or ()) + len(ddp.module.scale._backward_hooks or ())

    assert run_ranks(train, 2) == [0, 0]


@pytest.mark.parametrize("bucket_size_mb", [25, 1e-6])
def test_a_parameter_used_outside_of_forward(bucket_size_mb):
    """With unused parameters allowed its bucket doesn't wait: a later gradient is an error, and not lost."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = linear(), linear()
            torch.nn.init.ones_(self.unused.weight)

        def forward(self, inputs):
            return self.used(inputs)

    def train(group, *, comes_late):
        ddp = DDP(Half(), group, find_unused_parameters=True, bucket_size_mb=bucket_size_mb)

        def penalty():
            return (group.rank + 1) * ddp.module.unused.weight.square().sum()

        # Autograd takes first what was computed last.
        if comes_late:
            early = penalty()
            loss = ddp(of_rank(group)).sum() + early
            return str(caught(loss.backward))
        (ddp(of_rank(group)).sum() + penalty()).backward()
        return [parameter.grad.flatten().tolist() for parameter in ddp.parameters()]

    for error in run_ranks(lambda group: train(group, comes_late=True), 2):
        assert "'unused.weight' of DDP model 0 (Half) got a gradient on rank" in error
        assert "used outside of the forward's outputs" in error
    assert run_ranks(lambda group: train(group, comes_late=False), 2) == [[[1.5, 1.5], [3.0, 3.0]]] * 2


@dataclasses.dataclass
class Later:
    """An output with a field that nobody has set."""

    scores: torch.Tensor
    cache: object = dataclasses.field(init=False)


def test_outputs_in_unusual_containers():
    """Containers that contain themselves, lack a field, or are sets."""

    class Odd(torch.nn.Module):
        def __init__(self, form):
            super().__init__()
            self.layer, self.form = linear(), form

        def forward(self, inputs):
            scores = self.layer(inputs)
            if self.form == "cycle":
                found = {"scores": scores}
                found["self"] = found
                return found
            return Later(scores) if self.form == "field" else {scores}

    def train(group, form):
        ddp = DDP(Odd(form), group)
        outputs = ddp(of_rank(group))
        scores = outputs.scores if form == "field" else outputs["scores"] if form == "cycle" else next(iter(outputs))
        scores.sum().backward()
        return ddp.module.layer.weight.grad.flatten().tolist()

    for form in ("cycle", "field", "set"):
        assert run_ranks(train, 2, form) == [[1.5, 1.5]] * 2


def test_sync_gradients_with_a_hook_ends_in_its_time():
    """The timeout also bounds the hook's collective."""
    has_ended = threading.Event()

    def late(group):
        ddp = DDP(linear(), group, overlap_comm=False, comm_hook=comm_hooks.allreduce)
        ddp(of_rank(group)).sum().backward()
        if group.rank:
            has_ended.wait(20)
            return None
        began = time.monotonic()
        error = caught(lambda: ddp.sync_gradients(timeout=0.3))
        seconds = time.monotonic() - began
        has_ended.set()
        return type(error), seconds

    (kind, seconds), _ = run_ranks(late, 2)
    assert issubclass(kind, DistributedTimeoutError)
    assert seconds < 5


def test_hooks_pass_the_timeout_on(monkeypatch):
    """Each collective of the hooks starts with the timeout of `sync_gradients`, also one that is longer than the
    group's."""
    found = []

    def recording(call):
        def start(*args, **kwargs):
            found.append(kwargs["timeout"])
            return call(*args, **kwargs)

        return start

    for module in (compression, power_sgd, top_k):
        for name in {"async_allreduce", "async_all_gather"} & vars(module).keys():
            monkeypatch.setattr(module, name, recording(getattr(module, name)))

    def train(group):
        hooks = (
            comm_hooks.allreduce,
            comm_hooks.bfloat16_compression,
            comm_hooks.PowerSGD(1, start_step=0),
            comm_hooks.TopK(),
        )
        for hook in hooks:
            ddp = DDP(torch.nn.Linear(4, 4), group, overlap_comm=False, comm_hook=hook)
            ddp(torch.ones(1, 4)).sum().backward()
            ddp.sync_gradients(timeout=50)

    run_ranks(train, 2)
    assert found == [50.0] * 10


def test_drift_is_noticed_after_an_unfreeze():
    """A step with unaveraged gradients is refused though parameters were unfrozen in between."""

    def train(group):
        model = torch.nn.Sequential(linear(), torch.nn.Linear(1, 1))
        model[1].requires_grad_(False)
        ddp = DDP(model, group, overlap_comm=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp(of_rank(group)).sum().backward()
        model[1].requires_grad_(True)
        ddp(of_rank(group))
        optimizer.step()
        return caught(lambda: ddp(of_rank(group)))

    for error in run_ranks(train, 2):
        assert "call sync_gradients() before optimizer.step()" in str(error)


def test_accumulation_without_averages_may_go_on_for_steps():
    """Inside no_sync a rank may step by itself, as with LocalSGD, also without overlap."""

    def train(group):
        ddp = DDP(linear(), group, overlap_comm=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.no_sync():
            for _ in range(3):
                optimizer.zero_grad()
                ddp(of_rank(group)).sum().backward()
                optimizer.step()
        return True

    assert run_ranks(train, 2) == [True, True]


def test_a_ddp_inside_a_checkpoint_sees_the_same_buffers_twice():
    """Its second forward, in backward, broadcasts no buffers."""

    def train(group):
        ddp = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), group)
        inputs = torch.randn(4, 2, requires_grad=True)
        counts = []
        ddp.module.register_forward_pre_hook(lambda *_: counts.append(group.engine("cpu").num_broadcasts))
        checkpoint(ddp, inputs, use_reentrant=False).square().sum().backward()
        first, second = counts
        return second - first

    assert run_ranks(train, 2, backend=CountingBackend.create_group) == [0, 0]


def test_unused_parameters_do_not_hold_up_buckets_in_later_steps():
    """Parameters that one forward did not use may be used by the next, and vice versa."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = torch.nn.ModuleList(linear() for _ in range(2))

        def forward(self, inputs, branch):
            return self.branches[branch](inputs)

    def train(group):
        ddp = DDP(Branches(), group, find_unused_parameters=True, bucket_size_mb=1e-6)
        found = []
        for branch in (0, 1, 0):
            ddp.zero_grad()
            outputs = ddp(of_rank(group), branch)
            unreached = len(ddp._reducer._round.unused)
            outputs.sum().backward()
            found.append((unreached, ddp.module.branches[branch].weight.grad.tolist()))
        return found

    assert run_ranks(train, 2) == [[(1, [[1.5, 1.5]])] * 3] * 2


def test_a_copy_trains_beside_the_original():
    """Parameters of a copy are its own."""

    def train(group):
        ddp = DDP(seeded_start, group)
        twin = copy.deepcopy(ddp)
        for model in (ddp, twin):
            model(torch.ones(1, 6).double() * group.rank).sum().backward()
        return [parameter.grad for parameter in (*ddp.parameters(), *twin.parameters())]

    seeded_start = seeded(mlp)
    first, second = run_ranks(train, 2, backend="native")
    count = len(first) // 2
    assert_same_bits([{str(n): g for n, g in enumerate(part)} for part in
                      (first[:count], first[count:], second[:count], second[count:])])  # fmt: skip


def test_a_copy_begins_with_no_sync():
    """A copy joins its group in `no_sync`, and can be asked before whether its buffers are saved."""

    def train(group):
        ddp = copy.deepcopy(DDP(linear(), group))
        saves = ddp.saves_buffers
        with ddp.no_sync():
            ddp(of_rank(group)).sum().backward()
        ddp(of_rank(group)).sum().backward()
        return saves, ddp.module.weight.grad.tolist()

    assert run_ranks(train, 2) == [(True, [[3.0, 3.0]])] * 2


@pytest.mark.parametrize("hook", [None, partial(comm_hooks.PowerSGD, 1, start_step=0), comm_hooks.TopK])
def test_what_is_made_in_inference_mode(hook):
    """A copy that joins its group there, and gradients that are averaged there first, leave DDP able to train."""

    def train(group):
        options = {"overlap_comm": False, "comm_hook": hook and hook()}
        ddp = copy.deepcopy(DDP(torch.nn.Linear(4, 4, bias=False), group, **options))
        with torch.inference_mode():
            ddp(torch.ones(1, 4))
        for context in (torch.inference_mode, contextlib.nullcontext):
            ddp.zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
            with context():
                ddp.sync_gradients()
        return ddp.module.weight.grad.isfinite().all().item()

    assert run_ranks(train, 2) == [True, True]


def test_residuals_follow_a_model_to_another_device():
    """Lossy hooks begin anew there, as with another dtype."""
    residuals = ErrorFeedback("hook")
    residuals.residual("weight", torch.ones(2))
    assert residuals.residual("weight", torch.ones(2, device="meta")).device.type == "meta"
