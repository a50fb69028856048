"""DDP.join: ranks with different numbers of batches."""

import copy

import pytest
import torch
from ddp_ranks import assert_same_bits, caught, mlp, seeded

from ferrodist import DDP, allreduce
from ferrodist.errors import CollectiveMismatchError, GroupAbortedError
from ferrodist.testing import run_ranks

COUNTS = [2, 5, 3]  # batches of each rank


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator).double(), torch.randn(4, 3, generator=generator).double()


def step_with(model, optimizer, batches):
    """One step of one process, on several batches at once."""
    optimizer.zero_grad()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@pytest.mark.parametrize("overlap_comm", [True, False])
@pytest.mark.parametrize("as_views", [True, False])
def test_uneven_batches_are_those_of_one_process(as_views, overlap_comm):
    """A step is that of one process with the remaining batches, and all ranks end with the same model."""
    start = seeded(mlp)
    alone = copy.deepcopy(start)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        step_with(alone, optimizer, [batch(rank, step) for rank, count in enumerate(COUNTS) if step < count])

    def train(group):
        ddp = DDP(
            copy.deepcopy(start),
            group,
            bucket_size_mb=1e-4,
            gradient_as_bucket_view=as_views,
            overlap_comm=overlap_comm,
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(COUNTS[group.rank]):
                inputs, targets = batch(group.rank, step)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
                if not overlap_comm:
                    ddp.sync_gradients()
                optimizer.step()
        ones = torch.ones(1, 6).double()
        optimizer.zero_grad()
        ddp(ones).sum().backward()  # after the block steps are as before
        return ddp.state_dict(), allreduce(torch.ones(1), group=group).item()

    results = run_ranks(train, 3)
    assert_same_bits([state for state, _ in results])
    assert [total for _, total in results] == [3.0] * 3
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(results[0][0][name], tensor, rtol=0, atol=1e-12)


def test_division_by_all_ranks():
    """With divide_by_initial_world_size ranks without a batch contribute zeros."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group)
        found = []
        with ddp.join(divide_by_initial_world_size=True):
            for _ in range(group.rank + 1):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                found.append(ddp.module.weight.grad.item())
        return found

    assert run_ranks(gradients, 2) == [[1.0], [1.0, 0.5]]


def test_buffers_come_from_a_rank_that_has_a_batch():
    """When rank 0 is done, buffers are those of the lowest rank that trains, and at the end all have the last one's."""

    def statistics(group):
        ddp = DDP(torch.nn.BatchNorm1d(1, momentum=1.0), group)
        with ddp.join():
            for step in range(group.rank + 1):
                ddp(torch.tensor([[1.0], [3.0]]) + 10 * group.rank + step).sum().backward()
        return ddp.module.running_mean.item(), ddp.module.num_batches_tracked.item()

    assert run_ranks(statistics, 3) == [(24.0, 3)] * 3


def test_buffers_are_equal_after_a_block_in_which_all_had_as_many_batches():
    """Even if no rank finished early, the ranks leave the block with one rank's buffers."""

    def statistics(group):
        ddp = DDP(torch.nn.BatchNorm1d(1, momentum=1.0), group)
        with ddp.join():
            ddp(torch.tensor([[1.0], [3.0]]) + 10 * group.rank).sum().backward()
        return ddp.eval().module.running_mean.item()

    assert run_ranks(statistics, 3) == [2.0] * 3


def test_accumulation_in_join():
    """Ranks that accumulate in no_sync() are shadowed only in backwards that average."""

    def gradients(group):
        ddp = DDP(torch.nn.Linear(1, 1, bias=False), group)
        found = []
        with ddp.join():
            for _ in range(group.rank + 1):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(torch.ones(1, 1)).sum().backward()
                ddp(torch.full((1, 1), group.rank + 1.0)).sum().backward()
                found.append(ddp.module.weight.grad.item())
        return found

    assert run_ranks(gradients, 2) == [[2.5], [2.5, 3.0]]


def test_no_batches_at_all():
    """The block ends when all ranks, or one, have no batches at all."""

    def train(group):
        ddp = DDP(torch.nn.Linear(1, 1), group)
        with ddp.join():
            pass
        with ddp.join():
            if group.rank:
                ddp(torch.ones(1, 1)).sum().backward()
        return ddp.state_dict()

    assert_same_bits(run_ranks(train, 2))


def test_early_termination_raises():
    """With throw_on_early_termination every rank raises when the first one is done, and the group stays usable."""

    def train(group):
        ddp = DDP(torch.nn.Linear(1, 1), group)
        steps = []

        def loop():
            with ddp.join(throw_on_early_termination=True):
                for step in range(1 + 2 * group.rank):
                    ddp(torch.ones(1, 1)).sum().backward()
                    steps.append(step)

        error = caught(loop)
        ddp(torch.ones(1, 1)).sum().backward()
        return error, steps

    for error, steps in run_ranks(train, 2):
        assert type(error) is RuntimeError
        assert "rank 0 of group 'world' used up the batches before the others" in str(error)
        assert steps == [0]


def test_an_error_inside_ends_the_group():
    """A rank that leaves by an exception aborts the group with its message, and the others don't wait."""

    def train(group):
        ddp = DDP(torch.nn.Linear(1, 1), group)

        def loop():
            with ddp.join():
                if group.rank == 1:
                    raise ArithmeticError("no such batch")
                ddp(torch.ones(1, 1)).sum().backward()

        return caught(loop)

    first, second = run_ranks(train, 2)
    assert type(first) is GroupAbortedError
    assert "left a join() block" in str(first)
    assert "no such batch" in str(first)
    assert type(second) is ArithmeticError


def test_steps_that_differ_are_named():
    """If one rank averages and another calls forward again, all get the same error."""

    def train(group):
        ddp = DDP(torch.nn.BatchNorm1d(1), group)

        def loop():
            with ddp.join():
                loss = ddp(torch.ones(2, 1)).sum()
                if group.rank:
                    ddp(torch.ones(2, 1))
                loss.backward()

        return caught(loop)

    for error in run_ranks(train, 2):
        assert type(error) is CollectiveMismatchError
        assert "rank 0 averages gradients, rank 1 calls forward" in str(error)


def test_joins_are_not_nested():
    """A second block inside is refused."""

    def nest(group):
        ddp = DDP(torch.nn.Linear(1, 1), group)
        with ddp.join():
            return caught(lambda: ddp.join().__enter__())

    for error in run_ranks(nest, 2):
        assert "can't be nested" in str(error)
