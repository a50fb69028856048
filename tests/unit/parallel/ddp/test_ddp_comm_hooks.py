"""Communication hooks, which reduce a bucket instead of an allreduce."""

import copy
import math
import threading

import pytest
import torch
from ddp_ranks import CountingBackend, assert_same_bits, caught, mlp, seeded

from ferrodist import (
    DDP,
    CollectiveMismatchError,
    DistributedTimeoutError,
    ReduceOp,
    SimulatedBackend,
    async_allreduce,
    comm_hooks,
)
from ferrodist.testing import run_ranks

HOOKS = {
    "allreduce": lambda: comm_hooks.allreduce,
    "bfloat16": lambda: comm_hooks.bfloat16_compression,
    "float16": lambda: comm_hooks.float16_compression,
    "power_sgd": lambda: comm_hooks.PowerSGD(rank=2, start_step=1),
    "top_k": lambda: comm_hooks.TopK(0.2),
}


def rows(rank, world_size):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 6, generator=generator).double()
    targets = inputs @ torch.randn(6, 3, generator=generator).double()
    return inputs[rank::world_size], targets[rank::world_size]


def train(group, start, make_hook, num_steps, **options):
    ddp = DDP(copy.deepcopy(start), group, comm_hook=make_hook and make_hook(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    inputs, targets = (part.to(next(ddp.parameters()).dtype) for part in rows(group.rank, group.world_size))
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
    return ddp.state_dict(), loss.item(), [parameter.grad.clone() for parameter in ddp.parameters()]


def test_the_plain_hook_gives_the_bits_of_no_hook():
    """The hook that does the same as DDP gives the same training."""
    start = seeded(mlp, torch.float32)
    states = [run_ranks(train, 3, start, hook, 4)[0][0] for hook in (None, HOOKS["allreduce"])]
    assert_same_bits(states)


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_stay_equal_and_learn(hook, as_views):
    """With each hook the ranks keep the same bits, and the loss falls to less than half of what it was."""
    start = seeded(mlp, torch.float32)
    options = {"bucket_size_mb": 2e-4, "gradient_as_bucket_view": as_views}
    first = run_ranks(train, 3, start, HOOKS[hook], 1, **options)
    results = run_ranks(train, 3, start, HOOKS[hook], 40, **options)
    assert_same_bits([state for state, _, _ in results])
    assert sum(loss for _, loss, _ in results) < sum(loss for _, loss, _ in first) / 2


@pytest.mark.parametrize(("hook", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_compression_rounds_to_16_bits(hook, bits):
    """Compressed averages differ from exact ones, by no more than rounding twice."""
    start = seeded(mlp, torch.float32)
    exact = run_ranks(train, 2, start, None, 1)[0][2]
    rounded = run_ranks(train, 2, start, HOOKS[hook], 1)[0][2]
    assert any(not torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0 ** (2 - bits), atol=1e-3)


def test_compression_leaves_half_precision_as_it_is():
    """Gradients of 16 bits are averaged as they are."""

    def gradient(group, hook):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False, dtype=torch.float16), group, comm_hook=hook)
        ddp(torch.full((1, 1), group.rank + 1.0, dtype=torch.float16)).sum().backward()
        return ddp.module.weight.grad

    assert [grad.item() for grad in run_ranks(gradient, 2, comm_hooks.bfloat16_compression)] == [1.5, 1.5]


def matrix_gradients(group, hook, num_steps=1):
    """Gradients of a matrix of 12 x 10, equal in each step; averages of each step, and the exact one."""
    weights = [torch.randn(12, 10, generator=torch.Generator().manual_seed(rank)) for rank in range(group.world_size)]
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(12, 10))
    module.bias = torch.nn.Parameter(torch.zeros(3))
    ddp = DDP(module, group, comm_hook=hook)
    found = []
    for _ in range(num_steps):
        ddp.zero_grad()
        ((module.weight * weights[group.rank]).sum() + (module.bias * group.rank).sum()).backward()
        assert module.bias.grad.tolist() == [0.5] * 3
        found.append(module.weight.grad.clone())
    return found, sum(weights) / group.world_size


@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_has_the_rank_it_is_given(rank):
    """The average is a matrix of low rank, and its residual is sent in the following steps."""

    def averages(group):
        return matrix_gradients(group, comm_hooks.PowerSGD(rank=rank, start_step=0), 60)

    (found, exact), (others, _) = run_ranks(averages, 2)
    assert torch.linalg.matrix_rank(found[0]).item() == rank
    assert not torch.allclose(found[0], exact)
    assert all(torch.equal(a, b) for a, b in zip(found, others, strict=True))
    # Error feedback: the sum of what was sent is the sum of the gradients, but for one bounded remainder.
    short, long = (torch.linalg.norm(sum(found[:count]) / count - exact).item() for count in (6, 60))
    assert long < short / 4


def test_power_sgd_averages_exactly_at_first():
    """Before start_step everything is averaged as it is."""
    found, exact = run_ranks(lambda group: matrix_gradients(group, comm_hooks.PowerSGD(start_step=2), 2), 2)[0]
    assert all(torch.allclose(average, exact) for average in found)


def test_power_sgd_sends_thin_matrices():
    """The messages have (rows + columns) * rank elements in place of rows * columns."""

    def sizes(group):
        matrix_gradients(group, comm_hooks.PowerSGD(rank=2, start_step=0))
        return group.engine("cpu").sizes

    (first, _) = run_ranks(sizes, 2, backend=CountingBackend.create_group)
    # P and the vector, the trailer (2 for each of 2 parameters and for each of 2 ranks), Q.
    assert first == [12 * 2 + 3, 8, 10 * 2]


def test_top_k_sends_the_largest_and_feeds_back_the_rest():
    """An element that was not sent comes in a later step, with all that it has accumulated."""

    def gradients(group):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(4))
        ddp = DDP(module, group, comm_hook=comm_hooks.TopK(0.25))
        found = []
        for _ in range(4):
            ddp.zero_grad()
            (module.weight * torch.tensor([8.0, 3.0, 0.0, -1.0]) * (group.rank + 1)).sum().backward()
            found.append(module.weight.grad.tolist())
        return found

    # The mean of the ranks' gradients is (12, 4.5, 0, -1.5); 4.5 gathers to 13.5 by the third step.
    expected = [[12.0, 0, 0, 0], [12.0, 0, 0, 0], [0, 13.5, 0, 0], [24.0, 0, 0, 0]]
    assert run_ranks(gradients, 2) == [expected] * 2


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_top_k_divides_by_the_number_of_ranks(ratio):
    """Three ranks' choices are added up and divided by three."""

    def gradient(group):
        module = torch.nn.Linear(2, 1, bias=False)
        ddp = DDP(module, group, comm_hook=comm_hooks.TopK(ratio))
        ddp(torch.tensor([[3.0 * (group.rank + 1), 0.0]])).sum().backward()
        return module.weight.grad.tolist()

    assert run_ranks(gradient, 3) == [[[6.0, 0.0]]] * 3


@pytest.mark.parametrize("hook", ["power_sgd", "top_k"])
@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e38])
def test_residuals_outlast_an_overflow(hook, factor):
    """When one rank overflows and scales are halved after it, training continues as without that step."""
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(4))

    def averages(group, steps):
        ddp = DDP(torch.nn.Linear(16, 16), group, comm_hook=HOOKS[hook]())
        torch.nn.init.eye_(ddp.module.weight)
        torch.nn.init.zeros_(ddp.module.bias)
        found = []
        for size, scale in steps:
            ddp.zero_grad()
            own = factor if scale is None and group.rank == 1 else 1.0
            (ddp(inputs * size).square().sum() * own * (scale or 1.0)).backward()
            found.append(ddp.module.weight.grad / (scale or 1.0))
        return found

    plain = run_ranks(averages, 2, [(size, 1.0) for size in range(1, 6)])
    steps = [(1, 2.0), (2, 2.0), (3, 2.0), (4, None), (4, 1.0), (5, 1.0)]
    for expected, (*before, overflown, fourth, fifth) in zip(plain, run_ranks(averages, 2, steps), strict=True):
        assert not overflown.isfinite().all()
        for right, found in zip(expected, [*before, fourth, fifth], strict=True):
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("hook", ["power_sgd", "top_k"])
def test_training_with_a_scaler_recovers(hook):
    """A scaler that begins too high decreases, and then the optimizer steps."""

    def train_scaled(group):
        ddp = DDP(torch.nn.Linear(16, 16), group, comm_hook=HOOKS[hook]())
        before = ddp.module.weight.detach().clone()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(ddp(torch.ones(4, 16)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), torch.equal(before, ddp.module.weight), ddp.module.weight.isfinite().all().item()

    for scale, is_unmoved, is_finite in run_ranks(train_scaled, 2):
        assert 2.0**110 < scale < 2.0**127
        assert not is_unmoved
        assert is_finite


class TwoWeights(torch.nn.Module):
    """Uses one of its matrices, or both."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(12, 10))
        self.second = torch.nn.Parameter(torch.zeros(12, 10))

    def forward(self, direction, used):
        return sum((getattr(self, name) * direction).sum() for name in used)


@pytest.mark.parametrize("on_some_ranks", [False, True], ids=["no_rank", "some_ranks"])
@pytest.mark.parametrize("make_hook", [lambda: comm_hooks.PowerSGD(1, start_step=0), lambda: comm_hooks.TopK(0.05)])
def test_residuals_wait_for_their_parameters(make_hook, on_some_ranks):
    """Residuals survive steps in which a parameter has no gradient: sums of averages become exact."""
    directions = torch.randn(2, 12, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def total(group):
        ddp = DDP(TwoWeights().double(), group, comm_hook=make_hook(), find_unused_parameters=True)
        found = torch.zeros(12, 10, dtype=torch.float64)
        for step in range(80):
            ddp.zero_grad()
            mine = directions[group.rank]
            if step == 0:
                ddp(mine, ["first", "second"]).backward()
            elif step < 6:
                has_both = on_some_ranks and group.rank == 0
                ddp(mine * (1e-3 if not has_both else 0), ["first", "second"] if has_both else ["second"]).backward()
            else:
                ddp(mine * 0, ["first", "second"]).backward()
            if ddp.module.first.grad is not None:
                found += ddp.module.first.grad
        return found

    first, second = run_ranks(total, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, directions.mean(0), rtol=0, atol=1e-3)


def test_power_sgd_keeps_its_warm_start_through_zeros():
    """Steps whose gradients are zeros don't harm the next one."""

    def gradients(group, num_zeros):
        ddp = DDP(torch.nn.Linear(16, 16, bias=False), group, comm_hook=comm_hooks.PowerSGD(2, start_step=0))
        for step in range(num_zeros + 1):
            ddp.zero_grad()
            (ddp(torch.eye(16)[:2]).sum() * (step == num_zeros)).backward()
        return ddp.module.weight.grad

    torch.testing.assert_close(run_ranks(gradients, 2, 3)[0], run_ranks(gradients, 2, 0)[0], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_power_sgd_compresses_other_layouts(layout):
    """Matrices whose memory is in another order are as thin in messages, and of as low a rank."""

    def average(group):
        module = torch.nn.Module()
        weight = torch.randn(12, 8, 3, 3, generator=torch.Generator().manual_seed(group.rank))
        if layout == "channels_last":
            value = torch.zeros(12, 8, 3, 3).to(memory_format=torch.channels_last)
        else:
            weight, value = weight.reshape(12, 72), torch.zeros(72, 12).t()
        module.weight = torch.nn.Parameter(value)
        ddp = DDP(module, group, comm_hook=comm_hooks.PowerSGD(2, start_step=0))
        del group.engine("cpu").sizes[:]
        (ddp.module.weight * weight).sum().backward()
        return torch.linalg.matrix_rank(module.weight.grad.reshape(12, 72)).item(), group.engine("cpu").sizes

    for rank, sizes in run_ranks(average, 2, backend=CountingBackend.create_group):
        assert rank == 2
        assert {sizes[0], sizes[2]} == {12 * 2, 72 * 2}


@pytest.mark.parametrize("hook", ["power_sgd", "top_k"])
def test_a_hook_with_residuals_serves_one_model(hook):
    """A second DDP with the same hook object gets an error; a copy of the first has a copy of the hook."""

    def attempt(group):
        shared = HOOKS[hook]()
        first, second = (DDP(torch.nn.Linear(4, 4), group, comm_hook=shared) for _ in range(2))
        first(torch.ones(1, 4)).sum().backward()
        copy.deepcopy(first)(torch.ones(1, 4)).sum().backward()
        DDP(first.module, group, comm_hook=shared)(torch.ones(1, 4)).sum().backward()
        group.barrier()
        return caught(second(torch.ones(1, 4)).sum().backward)

    errors = run_ranks(attempt, 2)
    assert any(isinstance(error, ValueError) for error in errors)
    for error in errors:
        assert "of two models, whose residuals would mix" in str(error)


def test_continued_calls_its_function_once():
    """A second waiter gets the first one's result."""
    calls = []

    def then(result):
        calls.append(result)
        return result * 2

    def program(group):
        pending = comm_hooks.Continued(async_allreduce(torch.ones(1), group=group), then)
        return pending.wait() is pending.wait(), pending.wait().item()

    assert run_ranks(program, 1) == [(True, 2.0)]
    assert len(calls) == 1


def test_a_custom_hook():
    """Any function from a bucket to a pending collective will do; the result may be another tensor."""
    seen = []

    def halved(bucket):
        if bucket.group.rank == 0:
            seen.append((bucket.index, bucket.names, [tuple(part.shape) for part in bucket.gradients]))
        return async_allreduce(bucket.tensor / 2, ReduceOp.MEAN, group=bucket.group)

    def gradient(group):
        ddp = DDP(torch.nn.Linear(2, 1), group, comm_hook=halved)
        ddp(torch.full((1, 2), float(group.rank))).sum().backward()
        return ddp.module.weight.grad.tolist(), ddp.module.bias.grad.tolist()

    assert run_ranks(gradient, 2) == [([[0.25, 0.25]], [0.5])] * 2
    assert seen == [(0, ("bias", "weight"), [(1,), (1, 2)])]


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (lambda bucket: bucket.tensor, "must return a PendingCollective, as async_allreduce"),
        (
            lambda bucket: async_allreduce(bucket.tensor[:1].clone(), group=bucket.group),
            r"gave shape \(1,\) for a bucket",
        ),
    ],
)
def test_results_of_hooks_are_checked(hook, text):
    """A hook that returns something else raises from backward, with the expected result."""

    def attempt(group):
        ddp = DDP(torch.nn.Linear(2, 1), group, comm_hook=hook)
        group.barrier()
        return caught(ddp(torch.ones(1, 2)).sum().backward)

    errors = run_ranks(attempt, 2)
    assert any(isinstance(error, TypeError) for error in errors)
    for error in errors:
        with pytest.raises(Exception, match=text):
            raise error


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: comm_hooks.PowerSGD(rank=0), ValueError, "rank must be at least 1, not 0"),
        (lambda: comm_hooks.PowerSGD(start_step=1.5), TypeError, "start_step must be an integer"),
        (lambda: comm_hooks.TopK(0), ValueError, "ratio must be above 0"),
        (lambda: comm_hooks.TopK(math.nan), ValueError, "ratio must be above 0"),
        (lambda: comm_hooks.TopK("1"), TypeError, "ratio must be a number"),
        (
            lambda: DDP(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0], comm_hook=comm_hooks.PowerSGD),
            TypeError,
            r"pass an instance, PowerSGD\(\)",
        ),
    ],
)
def test_wrong_arguments(make, kind, text):
    """Each is refused by name."""
    with pytest.raises(kind, match=text):
        make()


def test_hooks_are_compared():
    """A rank with another hook is named when the DDP is made."""

    def attempt(group):
        hook = comm_hooks.bfloat16_compression if group.rank else comm_hooks.float16_compression
        return caught(lambda: DDP(torch.nn.Linear(1, 1), group, comm_hook=hook))

    for error in run_ranks(attempt, 2):
        assert type(error) is CollectiveMismatchError
        assert "comm_hook=bfloat16_compression where rank 0 has the option comm_hook=float16_compression" in str(error)


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda rank: comm_hooks.PowerSGD(2 + rank), ["PowerSGD(rank=3, start", "PowerSGD(rank=2, start"]),
        (lambda rank: comm_hooks.PowerSGD(start_step=rank), ["start_step=1", "start_step=0"]),
        (lambda rank: comm_hooks.PowerSGD(seed=rank), ["seed=1", "seed=0"]),
        (lambda rank: comm_hooks.TopK((rank + 1) / 4), ["TopK(ratio=0.5)", "TopK(ratio=0.25)"]),
    ],
)
def test_settings_of_hooks_are_compared(make, texts):
    """A rank whose hook has other settings is named when the DDP is made."""
    errors = run_ranks(lambda group: caught(lambda: DDP(torch.nn.Linear(1, 1), group, comm_hook=make(group.rank))), 2)
    for error in errors:
        assert type(error) is CollectiveMismatchError
        assert error.ranks == (1,)
        assert all(text in str(error) for text in texts)


def test_a_second_waiter_keeps_its_timeout():
    """A thread that waits for a continued collective gives up in time while another one waits."""
    is_waiting, may_end = threading.Event(), threading.Event()

    def then(result):
        is_waiting.set()
        may_end.wait(20)
        return result

    def program(group):
        pending = comm_hooks.Continued(async_allreduce(torch.ones(1), group=group), then)
        first = threading.Thread(target=pending.wait)
        first.start()
        is_waiting.wait(20)
        try:
            return type(caught(lambda: pending.wait(0.05)))
        finally:
            may_end.set()
            first.join()

    assert run_ranks(program, 1) == [DistributedTimeoutError]
