"""Gradients across ranks: torch.autograd.gradcheck sees all ranks as one function of p inputs and p outputs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import ferrodist as fd
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend

    Body = Callable[..., tuple[torch.Tensor, ...]]

_GROUP_TIMEOUT = 20.0


def _on_ranks(group: list[SimulatedBackend], body: Body, tensors: list[list[torch.Tensor]]) -> list[Any]:
    """Call ``body(handle, *tensors)`` for every rank, each in its thread."""
    results: list[Any] = [None] * len(group)
    errors: list[BaseException] = []

    def work(handle: SimulatedBackend) -> None:
        try:
            results[handle.rank] = body(handle, *tensors[handle.rank])
        except BaseException as error:
            errors.append(error)
            handle.abort(repr(error))

    threads = [threading.Thread(target=work, args=(handle,)) for handle in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _gradient_of(body: Body, num_inputs: int, *, twice: bool) -> Body:
    """The backward of ``body`` as a body: from its inputs and its outputs' gradients to its inputs' gradients."""

    def backward(handle: SimulatedBackend, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = (
            [tensor.detach().requires_grad_() for tensor in tensors[:num_inputs]] if not twice else tensors[:num_inputs]
        )
        outputs = body(handle, *inputs)
        pairs = [(out, grad) for out, grad in zip(outputs, tensors[num_inputs:], strict=True) if out.requires_grad]
        outs, grads = [out for out, _ in pairs], [grad for _, grad in pairs]
        if twice:
            return torch.autograd.grad(outs, inputs, grads, create_graph=True)
        # Not autograd.grad: it leaves out what no input of this rank depends on, which other ranks may wait for.
        torch.autograd.backward(outs, grads)
        return tuple(torch.zeros_like(i) if i.grad is None else i.grad for i in inputs)

    return backward


class _AcrossRanks(torch.autograd.Function):
    """All ranks as one function; its inputs are each rank's, one rank after the other."""

    @staticmethod
    def forward(ctx: Any, group: list[SimulatedBackend], body: Body, twice: bool, *flat: torch.Tensor) -> Any:
        num = len(flat) // len(group)
        per_rank = [list(flat[rank * num : (rank + 1) * num]) for rank in range(len(group))]
        leaves = [[tensor.detach().requires_grad_() for tensor in tensors] for tensors in per_rank]
        results = _on_ranks(group, body, leaves)
        ctx.group, ctx.body, ctx.num, ctx.twice = group, body, num, twice
        ctx.num_outputs = len(results[0])
        ctx.save_for_backward(*flat)
        return tuple(tensor.detach() for outputs in results for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flat, num, outs = ctx.saved_tensors, ctx.num, ctx.num_outputs
        mixed = [
            tensor
            for rank in range(len(ctx.group))
            for tensor in (*flat[rank * num : (rank + 1) * num], *grads[rank * outs : (rank + 1) * outs])
        ]
        gradient = _gradient_of(ctx.body, num, twice=ctx.twice)
        return None, None, None, *_AcrossRanks.apply(ctx.group, gradient, ctx.twice, *mixed)


_opened: list[SimulatedBackend] = []


@pytest.fixture(autouse=True)
def _close_groups() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def _across(world_size: int, call: Callable[[Backend, torch.Tensor], Any], *, twice: bool = False):
    """The function from the ranks' inputs to what ``call(group, input)`` gives on each rank."""
    group = SimulatedBackend.create_group(world_size, timeout=_GROUP_TIMEOUT)
    _opened.extend(group)

    def body(handle: SimulatedBackend, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = call(handle, x)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(out for out in _AcrossRanks.apply(group, body, twice, *inputs) if out.numel())

    return function


def _inputs(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, *, zeros: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(world_size)]
    if zeros:  # no zero, one of one rank, and one of several ranks at the same place
        tensors[0].view(-1)[0] = 0
        for tensor in tensors[-2:]:
            tensor.view(-1)[1] = 0
    return [tensor.requires_grad_() for tensor in tensors]


def _premultiplied(group: Backend) -> fd.collectives.reduce_op.PremultipliedSum:
    return fd.premultiplied_sum(0.5 + group.rank)


def _coalesced(group: Backend, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with fd.coalesce(group):
        handles = [
            fd.async_allreduce(x, group=group),
            fd.async_allreduce(x * 2, group=group),
            fd.async_broadcast(x, 1, group=group),
        ]
    return tuple(handle.wait() for handle in handles)


def _uneven(group: Backend, x: torch.Tensor) -> torch.Tensor:
    """Of the same tensor each rank takes a part of another size."""
    return x[: group.rank + 1]


def _exchange_counts(group: Backend) -> tuple[list[int], list[int]]:
    p = group.world_size
    counts = [[(src + 2 * dst) % 3 for dst in range(p)] for src in range(p)]
    return counts[group.rank], [counts[src][group.rank] for src in range(p)]


def _exchange(group: Backend, x: torch.Tensor) -> torch.Tensor:
    send, receive = _exchange_counts(group)
    return fd.all_to_all_single_uneven(x[: sum(send)], send, receive, group=group)


_REDUCTIONS = {
    "sum": lambda group: fd.ReduceOp.SUM,
    "mean": lambda group: fd.ReduceOp.MEAN,
    "product": lambda group: fd.ReduceOp.PRODUCT,
    "premultiplied": _premultiplied,
    "min": lambda group: fd.ReduceOp.MIN,
    "max": lambda group: fd.ReduceOp.MAX,
}

_FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]

_MOVEMENT: dict[str, Callable[[Backend, torch.Tensor], Any]] = {
    "broadcast": lambda g, x: fd.broadcast(x, 1, group=g),
    "async_broadcast": lambda g, x: fd.async_broadcast(x, 0, group=g).wait(),
    "all_gather": lambda g, x: fd.all_gather(x, group=g),
    "all_gather along 1": lambda g, x: fd.all_gather(x, 1, group=g),
    "all_gather along -1 of a transposed tensor": lambda g, x: fd.all_gather(x.t(), -1, group=g),
    "all_gather of numbers": lambda g, x: fd.all_gather(x.sum(), group=g),
    "async_all_gather": lambda g, x: fd.async_all_gather(x, 1, group=g).wait(),
    "all_gather_uneven": lambda g, x: fd.all_gather_uneven(_uneven(g, x), group=g),
    "all_gather_uneven along 1": lambda g, x: fd.all_gather_uneven(_uneven(g, x).t(), 1, group=g),
    "gather": lambda g, x: fd.gather(x, 1, group=g),
    "gather along 1": lambda g, x: fd.gather(x, 0, dim=1, group=g),
    "gather of uneven parts": lambda g, x: fd.gather(_uneven(g, x), 1, group=g),
    "gather of numbers": lambda g, x: fd.gather(x.sum(), 0, group=g),
    "scatter": lambda g, x: fd.scatter(x if g.rank == 1 else None, 1, group=g),
    "scatter along 1": lambda g, x: fd.scatter(x if g.rank == 0 else None, dim=1, group=g),
    "reduce_scatter": lambda g, x: fd.reduce_scatter(x[: g.world_size], group=g),
    "reduce_scatter of uneven parts": lambda g, x: fd.reduce_scatter(x, group=g),
    "reduce_scatter along 1, mean": lambda g, x: fd.reduce_scatter(x, fd.ReduceOp.MEAN, dim=1, group=g),
    "reduce_scatter, premultiplied": lambda g, x: fd.reduce_scatter(x, _premultiplied(g), group=g),
    "async_reduce_scatter": lambda g, x: fd.async_reduce_scatter(x, dim=-1, group=g).wait(),
    "all_to_all of tensors": lambda g, x: fd.all_to_all(list(x[: g.world_size].unbind(0)), group=g),
    "all_to_all of one tensor": lambda g, x: fd.all_to_all(x[: g.world_size], group=g),
    "async_all_to_all": lambda g, x: fd.async_all_to_all(x[: g.world_size], group=g).wait(),
    "all_to_all_single_uneven": _exchange,
    "async_allreduce": lambda g, x: fd.async_allreduce(x.t(), group=g).wait(),
    "allreduce of numbers": lambda g, x: fd.allreduce(x.sum(), group=g),
    "coalesced": _coalesced,
    "one after the other": lambda g, x: fd.allreduce(fd.all_gather(x * x, group=g).sin(), group=g),
}

_SHAPE = (4, 2)


_REDUCTION_CASES = [
    *((name, torch.float64, False) for name in _REDUCTIONS),
    *((name, torch.complex128, False) for name in ("sum", "mean", "product", "premultiplied")),
    *(("product", dtype, True) for dtype in (torch.float64, torch.complex128)),
]


@pytest.mark.parametrize(
    ("name", "dtype", "zeros"),
    _REDUCTION_CASES,
    ids=[f"{name}-{str(dtype)[6:]}{'-with-zeros' * zeros}" for name, dtype, zeros in _REDUCTION_CASES],
)
def test_gradients_of_reductions(name: str, dtype: torch.dtype, zeros: bool) -> None:
    """Of allreduce and reduce: the numerical derivative of every rank's output by every rank's input."""
    op_of, world_size = _REDUCTIONS[name], 3
    inputs = _inputs(world_size, (2, 2), dtype, zeros=zeros)
    for call in (
        lambda g, x: fd.allreduce(x, op_of(g), group=g),
        lambda g, x: fd.async_allreduce(x, op_of(g), group=g).wait(),
        lambda g, x: fd.reduce(x, 1, op_of(g), group=g),
    ):
        assert gradcheck(_across(world_size, call), inputs, fast_mode=dtype.is_complex)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("name", _MOVEMENT)
def test_gradients_of_movement(name: str, dtype: torch.dtype) -> None:
    """All other collectives, along all dims, even and uneven, blocking and started."""
    world_size = 3
    shape = (_SHAPE[0], 2) if "along 1" not in name or "scatter" not in name else (2, 4)
    inputs = _inputs(world_size, shape, dtype)
    assert gradcheck(_across(world_size, _MOVEMENT[name]), inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["sum", "mean", "premultiplied", "product"])
def test_second_gradients(name: str) -> None:
    """Gradients of gradients, of a function that is not linear in the result."""
    op_of = _REDUCTIONS[name]
    inputs = _inputs(2, (2,), torch.float64, zeros=name == "product")
    assert gradgradcheck(_across(2, lambda g, x: fd.allreduce(x, op_of(g), group=g) ** 2, twice=True), inputs)


def test_second_gradients_of_rooted_operations_are_refused() -> None:
    """Where only the root would go on, a gradient of a gradient raises on the root, and no rank waits."""

    def on_rank(group: Backend) -> None:
        for call in (fd.reduce, fd.broadcast, fd.gather):
            x = torch.ones(4, dtype=torch.float64, requires_grad=True)
            result = (call(x) ** 2).sum()
            (grad,) = torch.autograd.grad(result, x, create_graph=True)
            if group.rank == 0:
                with pytest.raises(RuntimeError, match="once_differentiable"):
                    grad.sum().backward()
        fd.barrier()

    run_ranks(on_rank, 2)


def test_gradients_on_one_rank() -> None:
    """A group of one differentiates like no group at all."""
    for op_of in _REDUCTIONS.values():
        function = _across(1, lambda g, x, op_of=op_of: fd.allreduce(x, op_of(g), group=g))
        assert gradcheck(function, _inputs(1, (3,), torch.float64))


@pytest.mark.parametrize("dtype", _FLOATS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", _REDUCTIONS)
def test_gradients_of_every_float(name: str, dtype: torch.dtype) -> None:
    """Of every floating-point dtype, the 8-bit ones too, the gradient is that of float64, rounded once."""

    def gradients(group: Backend, x: torch.Tensor) -> list[torch.Tensor]:
        op = _REDUCTIONS[name](group)
        calls = [lambda x: fd.allreduce(x, op), lambda x: fd.reduce(x, 1, op)]
        calls += [lambda x: fd.reduce_scatter(x, op)] * (name not in {"product", "min", "max"})
        grads = []
        for call in calls:
            leaf = x.clone().requires_grad_()
            call(leaf).to(torch.float64).sum().backward()
            grads.append(leaf.grad)
        return grads

    def on_rank(group: Backend) -> None:
        exact = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64).roll(group.rank)
        for grad, expected in zip(gradients(group, exact.to(dtype)), gradients(group, exact), strict=True):
            assert grad.dtype is dtype
            assert torch.equal(grad.to(torch.float64), expected.to(dtype).to(torch.float64))

    run_ranks(on_rank, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["of-another-dtype", "of-the-same-dtype"])
def test_autograd_grad_comes_through_scatter(dtype: torch.dtype) -> None:
    """An empty tensor among the inputs of autograd.grad leads it through scatter on ranks that have no tensor."""

    def on_rank(group: Backend) -> tuple[list[float], float]:
        leads = group.rank == 1
        x = torch.arange(4.0, dtype=torch.float64, requires_grad=True) if leads else torch.empty(0, dtype=dtype)
        weight = torch.tensor(2.0 + group.rank, dtype=torch.float64, requires_grad=True)
        part = fd.scatter(x.requires_grad_(), 1)
        grads = torch.autograd.grad((part * weight).sum(), [x, weight])
        assert grads[0].dtype is x.dtype
        assert grads[0].shape == x.shape
        for empty in (None, torch.empty(0)):  # which backward() does not need
            x.grad = None
            fd.scatter(x if leads else empty, 1).sum().backward()
        assert x.grad is None or x.grad.tolist() == [1.0] * 4
        with torch.no_grad():
            assert not fd.scatter(x, 1).requires_grad
        return grads[0].tolist(), grads[1].item()

    assert run_ranks(on_rank, 2) == [([], 1.0), ([2.0, 2.0, 3.0, 3.0], 5.0)]


def test_equal_extremes_share_the_gradient() -> None:
    """Where several ranks have the extremum each gets an equal part, also where it is NaN."""

    def on_rank(group: Backend) -> torch.Tensor:
        x = torch.tensor([1.0, float(group.rank), float("nan") if group.rank else 0.0], requires_grad=True)
        fd.allreduce(x, fd.ReduceOp.MAX).sum().backward()
        return x.grad

    grads = run_ranks(on_rank, 3)
    assert [grad.tolist() for grad in grads] == [[1.0, 0.0, 0.0], [1.0, 0.0, 1.5], [1.0, 3.0, 1.5]]


def test_results_may_be_changed_in_place() -> None:
    """A result is a tensor like any other: written to in place, and an error where the gradient needs its old value."""

    def on_rank(group: Backend) -> torch.Tensor:
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        for op in (fd.ReduceOp.SUM, fd.ReduceOp.MEAN, fd.ReduceOp.PRODUCT, fd.premultiplied_sum(1.0)):
            fd.allreduce(x, op).add_(1).mul_(2)
        for result in (
            fd.broadcast(x),
            fd.all_gather(x),
            fd.reduce_scatter(x),
            fd.gather(x),
            fd.all_to_all(x),
            fd.reduce(x),
        ):
            result.add_(1)
        total = fd.allreduce(x)
        total.mul_(2)
        total.sum().backward()
        largest = fd.allreduce(x, fd.ReduceOp.MAX)
        largest.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            largest.sum().backward()
        return x.grad

    assert [grad.tolist() for grad in run_ranks(on_rank, 2)] == [[4.0, 4.0]] * 2


def test_tensors_of_all_to_all_are_independent() -> None:
    """Each received tensor has memory of its own and may be changed in place, with and without a gradient."""

    def on_rank(group: Backend) -> list[list[float]]:
        for call in (fd.all_to_all, lambda parts: fd.async_all_to_all(parts).wait()):
            plain = call([torch.ones(3), torch.ones(3)])
            assert len({tensor.untyped_storage().data_ptr() for tensor in plain}) == 2
            plain[0].zero_()
            assert plain[1].tolist() == [1.0] * 3
            sent = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
            first, second = call(sent)
            first.mul_(3).add_(1)
            assert first._base is None
            (first.sum() + 2 * second.sum()).backward()
        return [tensor.grad.tolist() for tensor in sent]

    assert run_ranks(on_rank, 2) == [[[3.0, 3.0]] * 2, [[2.0, 2.0]] * 2]


@pytest.mark.parametrize("op", [fd.ReduceOp.PRODUCT, fd.ReduceOp.MIN], ids=str)
def test_inputs_that_were_changed_are_found(op: fd.ReduceOp) -> None:
    """Backward raises, on all ranks, when an input that it needs was written to: a wrong gradient is never given."""

    def on_rank(group: Backend) -> None:
        x = torch.ones(3, requires_grad=True) * 2
        for result in (fd.allreduce(x, op), fd.reduce(x, 0, op)):
            with torch.no_grad():
                x.mul_(3)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()

    run_ranks(on_rank, 2)


def test_no_history_where_none_is_wanted() -> None:
    """Results don't require grad when the input doesn't, or under no_grad; and broadcast from a root without grad."""

    def on_rank(group: Backend) -> None:
        plain, graded = torch.ones(4), torch.ones(4, requires_grad=True)
        calls = [fd.allreduce, fd.broadcast, fd.all_gather, fd.gather, fd.reduce_scatter, fd.all_to_all, fd.reduce]
        for call in calls:
            assert not call(plain).requires_grad
            assert call(graded).requires_grad
            with torch.no_grad():
                assert not call(graded).requires_grad
        assert fd.scatter(graded if group.rank == 0 else None).requires_grad
        assert not fd.scatter(plain if group.rank == 0 else None).requires_grad

    run_ranks(on_rank, 2)


def test_reduce_scatter_says_what_it_cannot_differentiate() -> None:
    """Backward through reduce_scatter with MAX raises at once, on all ranks, and says what to do."""

    def on_rank(group: Backend) -> None:
        x = torch.ones(4, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"use allreduce and narrow\(\)"):
            fd.reduce_scatter(x, fd.ReduceOp.MAX).sum().backward()
        fd.barrier()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("op", [fd.ReduceOp.SUM, fd.ReduceOp.PRODUCT, fd.ReduceOp.MAX], ids=str)
def test_results_are_freed_at_once(op: fd.ReduceOp) -> None:
    """A result and its history hold no cycle: memory comes back without the garbage collector."""

    def on_rank(group: Backend) -> list[weakref.ref[torch.Tensor]]:
        x = torch.ones(4, requires_grad=True)
        results = [fd.allreduce(x, op), fd.reduce(x, 0, op), fd.async_allreduce(x, op).wait()]
        return [weakref.ref(result.grad_fn) for result in results]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in run_ranks(on_rank, 1)[0]] == [None] * 3
    finally:
        gc.enable()
