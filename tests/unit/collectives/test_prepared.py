"""Prepared collectives: results, tensors that change, wrong arguments, groups that end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ferrodist as fd
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native-threads", "tcp"]


def _prepare_all(mine, **options):
    """A prepared call of each collective, with what its function returns."""
    return {
        "allreduce": (fd.prepare_allreduce(mine, **options), lambda: fd.allreduce(mine)),
        "max": (fd.prepare_allreduce(mine, fd.ReduceOp.MAX, **options), lambda: fd.allreduce(mine, fd.ReduceOp.MAX)),
        "broadcast": (fd.prepare_broadcast(mine, 1, **options), lambda: fd.broadcast(mine, 1)),
        "all_gather": (fd.prepare_all_gather(mine, **options), lambda: fd.all_gather(mine)),
        "all_gather, dim 1": (fd.prepare_all_gather(mine, 1, **options), lambda: fd.all_gather(mine, 1)),
        "reduce_scatter": (fd.prepare_reduce_scatter(mine, **options), lambda: fd.reduce_scatter(mine)),
        "reduce_scatter, dim 1": (
            fd.prepare_reduce_scatter(mine, dim=1, **options),
            lambda: fd.reduce_scatter(mine, dim=1),
        ),
        "all_to_all": (fd.prepare_all_to_all(mine, **options), lambda: fd.all_to_all(mine)),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"timeout": 30}])
def test_each_call_is_the_functions(backend, options):
    """With the elements of the time of the call, in the same result each time; of strided tensors too."""

    def program(group):
        for strided in (False, True):
            mine = torch.arange(24.0).view(4, 6) * (1 + group.rank)
            mine = mine[:, ::2] if strided else mine[:, :3].contiguous()
            for name, (call, function) in _prepare_all(mine, **options).items():
                results = []
                for _ in range(3):
                    mine += 1 + group.rank
                    expected = function()
                    results.append(call())
                    assert torch.equal(results[-1], expected), name
                assert all(result is call.result for result in results), name

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_may_call_the_function(backend):
    """A prepared call meets the function's call on another rank."""

    def program(group):
        mine = torch.ones(2) + group.rank
        call = fd.prepare_allreduce(mine, out=mine) if group.rank else lambda: fd.allreduce(mine, out=mine)
        for expected in (3, 6, 12):
            assert call() is mine
            assert mine.tolist() == [expected] * 2

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_change_after_the_preparation(backend):
    """A tensor of another size is refused before data moves; other memory of the same size is used."""

    def program(group):
        mine = torch.ones(4)
        call = fd.prepare_allreduce(mine)
        assert call().tolist() == [2] * 4
        mine.data = torch.full((4,), 5.0)
        assert call().tolist() == [10] * 4
        mine.data = torch.ones(1000)
        with pytest.raises(ValueError, match="out has shape"):
            call()
        mine.data = torch.full((4,), 2.0)
        assert call().tolist() == [4] * 4
        mine.requires_grad_()
        with pytest.raises(RuntimeError, match="out="):
            call()
        with torch.no_grad():
            assert call().tolist() == [4] * 4
        mine.requires_grad_(requires_grad=False)
        mine.resize_(2)
        with pytest.raises(ValueError, match="out has shape"):
            call()
        mine.data = torch.full((4,), 3)
        with pytest.raises(TypeError, match="out"):
            call()
        square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        call, result = fd.prepare_allreduce(square), call.result
        assert call().tolist() == [[2, 4], [6, 8]]
        square.t_()  # with the same memory
        assert call().tolist() == [[2, 6], [4, 8]]
        call.result.t_()
        assert call().tolist() == [[2, 6], [4, 8]]
        assert result.tolist() == [4] * 4
        del group

    run_ranks(program, 2, backend=backend)


def test_a_result_that_a_backward_needs_has_been_written():
    """As after the function."""

    def program(group):
        call = fd.prepare_allreduce(torch.ones(2))
        for _ in range(2):
            weight = torch.ones(2, requires_grad=True)
            product = weight * call()
            call()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        del group

    run_ranks(program, 2, backend="native-threads")


def test_a_negated_view_of_the_same_memory_is_noticed():
    """The imaginary part of a conjugate has the memory of that of the number, lazily negated."""

    def program(group):
        del group
        for number in (torch.tensor([1 + 2j]), torch.tensor(1 + 2j)):
            part = number.imag
            call = fd.prepare_allreduce(part)
            assert call().sum().item() == 4
            part.data = number.conj().imag
            assert call().sum().item() == -4

    run_ranks(program, 2, backend="native-threads")


def test_an_object_without_arguments_is_refused():
    """One that nobody has initialized."""
    with pytest.raises(TypeError):
        fd.PreparedCollective.__new__(fd.PreparedCollective)()


def test_threads_share_a_prepared_call():
    """Their calls follow each other."""

    def program(group):
        mine = torch.ones(2)
        call = fd.prepare_allreduce(mine, group=group)
        threads = [threading.Thread(target=lambda: [call() for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert call().tolist() == [2, 2]

    run_ranks(program, 2, backend="native")


def test_calls_leave_nothing_behind():
    """A call that is part of a cycle is collected."""

    class Holder:
        pass

    def program(group):
        del group
        holder = Holder()
        holder.tensor = torch.ones(2)
        holder.tensor.holder = holder
        holder.call = fd.prepare_allreduce(holder.tensor)
        holder.call()
        gone = weakref.ref(holder)
        del holder
        gc.collect()
        assert gone() is None

    run_ranks(program, 2, backend="native")


def test_tensors_live_as_long_as_the_call():
    """The call keeps them: nothing is written to memory that has been freed."""

    def program(group):
        call = fd.prepare_all_gather(torch.full((1000,), float(group.rank)))
        torch.full((1000,), 7.0)
        assert call().unique().tolist() == [0, 1]

    run_ranks(program, 2, backend="native-threads")


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda: fd.prepare_allreduce("none"), TypeError),
        (lambda: fd.prepare_allreduce(torch.ones(2, requires_grad=True)), RuntimeError),
        (lambda: fd.prepare_allreduce(torch.ones(2), out=torch.ones(3)), ValueError),
        (lambda: fd.prepare_allreduce(torch.ones(2), fd.ReduceOp.BAND), TypeError),
        (lambda: fd.prepare_allreduce(torch.ones(2), timeout=-1), ValueError),
        (lambda: fd.prepare_broadcast(torch.ones(2), 5), fd.InvalidRankError),
        (lambda: fd.prepare_all_gather(torch.ones(2), 3), IndexError),
        (lambda: fd.prepare_reduce_scatter(torch.ones(2), dim=1), IndexError),
        (lambda: fd.prepare_all_to_all(torch.ones(3)), ValueError),
        (lambda: fd.prepare_allreduce(torch.ones(2))(torch.ones(2)), TypeError),
        (lambda: fd.prepare_all_to_all([torch.ones(3), torch.ones(3)]), TypeError),
    ],
)
@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_wrong_arguments_are_refused_at_once(backend, prepare, error):
    """Nothing is sent: the other rank goes on."""

    def program(group):
        if group.rank == 0:
            with pytest.raises(error):
                prepare()
        assert fd.allreduce(torch.ones(1)).item() == 2

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_errors_are_the_functions(backend):
    """Another call of another rank raises on all ranks, and so does each call of a group that has ended."""

    def program(group):
        call = fd.prepare_allreduce(torch.ones(2 + group.rank))
        with pytest.raises(fd.CollectiveMismatchError):
            call()
        with pytest.raises(fd.DistributedError):
            call()

    run_ranks(program, 2, backend=backend)


def test_the_profiler_shows_each_call():
    """By the collective's name."""

    def program(group):
        call = fd.prepare_allreduce(torch.ones(2), group=group)
        call()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        return [event.name for event in profiler.events() if event.name.startswith("ferrodist")]

    assert run_ranks(program, 1, backend="native-threads") == [["ferrodist:allreduce"]]


def test_inside_coalesce():
    """Refused as the function is, for its result would not be there yet."""
    (group,) = fd.SimulatedBackend.create_group(1)
    call = fd.prepare_allreduce(torch.ones(2), group=group)
    with pytest.raises(RuntimeError, match="coalesce"), fd.coalesce(group):
        call()
