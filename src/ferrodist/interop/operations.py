"""torch's collectives as calls of an engine: each function looks at the arguments, and says what is to be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ferrodist.collectives.prepare import check_tensor
from ferrodist.collectives.reduce_op import Op, PremultipliedSum, ReduceOp, check_reduction
from ferrodist.errors import UnsupportedOpError
from ferrodist.interop.layouts import Joined, Target, moved, row_size, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, TensorCollectives

    Run = Callable[[TensorCollectives, float, int], None]
    """Called with the engine, the seconds it may take, and its place among the group's collectives."""

__all__ = [
    "OPERATIONS",
    "Collective",
    "all_gather",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "only",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduction",
    "scatter",
]

OPERATIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}
"""torch's reductions as ours."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A checked call.

    Args:
        name: Of the collective.
        device: Where its tensors are; None when it has none.
        results: What torch's ``Work.result()`` gives.
        run: Does it.
    """

    name: str
    device: torch.device | None
    results: list[Any]
    run: Run


def reduction(given: Any) -> Op:
    """A reduction of torch's as ours; a premultiplied sum has its factor from torch."""
    kind = getattr(given, "op", given)
    found = OPERATIONS.get(kind)
    if found is not None:
        return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = given.__getstate__()[1]
        return PremultipliedSum(float(factor))
    raise UnsupportedOpError(f"there is no reduction {given}: there are {', '.join(each.name for each in OPERATIONS)}")


def only(tensors: Sequence[Any], what: str) -> Any:
    """The one member of a list, in which torch's methods take what there is one of on each rank."""
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor a rank, not {len(tensors)}")
    return tensors[0]


def barrier() -> Collective:
    """Of nothing."""

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        cast("Collectives", engine).barrier(timeout=timeout, sequence=place)

    return Collective("barrier", None, [], run)


def allreduce(tensor: torch.Tensor, op: Op) -> Collective:
    """Of a dense tensor, in place."""
    _check(tensor, op)
    target, source = Target(tensor), source_of(tensor)

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.allreduce(target.flat, source, op, timeout=timeout, sequence=place)
        target.finish()

    return Collective("allreduce", tensor.device, [tensor], run)


def reduce(group: Backend, tensor: torch.Tensor, root: int, op: Op) -> Collective:
    """Into the root's tensor."""
    _check(tensor, op)
    target, source = (Target(tensor) if group.rank == root else None), source_of(tensor)

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.reduce(None if target is None else target.flat, source, op, root, timeout=timeout, sequence=place)
        if target is not None:
            target.finish()

    return Collective("reduce", tensor.device, [tensor], run)


def broadcast(group: Backend, tensor: torch.Tensor, root: int) -> Collective:
    """Of the root's tensor."""
    _check(tensor)
    target = None if group.rank == root else Target(tensor)
    flat = moved(source_of(tensor) if target is None else target.flat)

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.broadcast(flat, root, timeout=timeout, sequence=place)
        if target is not None:
            target.finish()

    return Collective("broadcast", tensor.device, [tensor], run)


def all_gather(group: Backend, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Collective:
    """Into a tensor for each rank, whose sizes may differ."""
    _check_list(group, outputs, tensor, "outputs")
    joined = Joined(outputs, is_read=False)
    if joined.counts[group.rank] != tensor.numel():
        raise ValueError(
            f"this rank's output has {joined.counts[group.rank]} elements, its input {tensor.numel()}: each rank's"
            " output must be as large as its input"
        )
    return _gather_into(joined, joined.flat, list(outputs), tensor, joined.counts)


def all_gather_single(group: Backend, output: torch.Tensor, tensor: torch.Tensor) -> Collective:
    """Into one tensor, in which the ranks' lie one after the other."""
    _check(output)
    _check_like(output, tensor)
    if output.numel() != group.world_size * tensor.numel():
        raise ValueError(
            f"the output must have the input's {tensor.numel()} elements for each of {group.world_size} ranks, not"
            f" {output.numel()}"
        )
    target = Target(output)
    return _gather_into(target, target.flat, [output], tensor, [tensor.numel()] * group.world_size)


def _gather_into(
    target: Target | Joined, flat: torch.Tensor, results: list[Any], tensor: torch.Tensor, counts: Sequence[int]
) -> Collective:
    _check(tensor)
    out, source, scale = _moved_alike(flat, source_of(tensor))
    sizes = [count * scale for count in counts]

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.all_gather(out, source, sizes, dim=0, timeout=timeout, sequence=place)
        target.finish()

    return Collective("all_gather", tensor.device, results, run)


def gather(group: Backend, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Collective:
    """Into the root's tensors, one for each rank, all of one size; None elsewhere."""
    _check(tensor)
    joined = None
    if outputs is not None:
        _check_list(group, outputs, tensor, "outputs")
        joined = Joined(outputs, is_read=False)
        _check_even(joined, tensor)
    source = moved(source_of(tensor))
    flat = None if joined is None else moved(joined.flat)
    counts = [source.numel()] * group.world_size

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.gather(flat, source, counts, root, timeout=timeout, sequence=place)
        if joined is not None:
            joined.finish()

    return Collective("gather", tensor.device, list(outputs or ()), run)


def scatter(group: Backend, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> Collective:
    """Of the root's tensors, one for each rank, all of one size; None elsewhere."""
    _check(tensor)
    source = None
    if inputs is not None:
        _check_list(group, inputs, tensor, "inputs")
        joined = Joined(inputs, is_read=True)
        _check_even(joined, tensor)
        source = moved(joined.flat)
    target = Target(tensor)
    flat = moved(target.flat)
    counts = [flat.numel()] * group.world_size

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.scatter(flat, source, counts, root, timeout=timeout, sequence=place)
        target.finish()

    return Collective("scatter", tensor.device, [tensor], run)


def reduce_scatter(group: Backend, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op) -> Collective:
    """Of a tensor for each rank, whose sizes may differ."""
    _check_list(group, inputs, output, "inputs")
    joined = Joined(inputs, is_read=True)
    if joined.counts[group.rank] != output.numel():
        raise ValueError(
            f"this rank's input has {joined.counts[group.rank]} elements, its output {output.numel()}: each rank's"
            " output must be as large as the inputs for it"
        )
    return _reduce_parts(output, joined.flat, joined.counts, op)


def reduce_scatter_single(group: Backend, output: torch.Tensor, tensor: torch.Tensor, op: Op) -> Collective:
    """Of one tensor, in which the ranks' parts lie one after the other."""
    _check(tensor)
    _check_like(tensor, output)
    if tensor.numel() != group.world_size * output.numel():
        raise ValueError(
            f"the input must have the output's {output.numel()} elements for each of {group.world_size} ranks, not"
            f" {tensor.numel()}"
        )
    return _reduce_parts(output, source_of(tensor), [output.numel()] * group.world_size, op)


def _reduce_parts(output: torch.Tensor, source: torch.Tensor, counts: Sequence[int], op: Op) -> Collective:
    _check(output, op)
    target = Target(output)

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.reduce_scatter(target.flat, source, counts, op, dim=0, timeout=timeout, sequence=place)
        target.finish()

    return Collective("reduce_scatter", output.device, [output], run)


def all_to_all_single(
    group: Backend,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Collective:
    """Of rows of one tensor; without splits each rank has as many."""
    _check(output)
    _check(tensor)
    _check_like(output, tensor)
    if not tensor.dim() or not output.dim():
        raise ValueError("all_to_all_single divides tensors along their first dim, which one of no dims lacks")
    row = row_size(tensor) or row_size(output) or 1
    target = Target(output)
    return _exchange(
        target,
        target.flat,
        source_of(tensor),
        results=[output],
        send_counts=_split(group, tensor, input_splits, "input"),
        receive_counts=_split(group, output, output_splits, "output"),
        row=row,
    )


def _split(group: Backend, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
    """How many elements go to each rank, or come from it."""
    size = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if size % group.world_size:
            raise ValueError(
                f"the {what} has {size} rows, which {group.world_size} ranks can't share evenly: pass"
                f" {what}_split_sizes"
            )
        splits = [size // group.world_size] * group.world_size
    if len(splits) != group.world_size or min(splits) < 0 or sum(splits) != size:
        raise ValueError(
            f"{what}_split_sizes {list(splits)} must be one for each of {group.world_size} ranks, and together the"
            f" {size} rows of the {what}"
        )
    return [count * row_size(tensor) for count in splits]


def all_to_all(group: Backend, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Collective:
    """Of a tensor to each rank, whose sizes may differ."""
    _check_list(group, outputs, inputs[0] if inputs else outputs[0], "outputs")
    _check_list(group, inputs, outputs[0], "inputs")
    source, target = Joined(inputs, is_read=True), Joined(outputs, is_read=False)
    return _exchange(
        target,
        target.flat,
        source.flat,
        results=list(outputs),
        send_counts=source.counts,
        receive_counts=target.counts,
        row=1,
    )


def _exchange(
    target: Target | Joined,
    flat: torch.Tensor,
    source: torch.Tensor,
    *,
    results: list[Any],
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    row: int,
) -> Collective:
    out, sent, scale = _moved_alike(flat, source)
    sizes = [[count * scale for count in counts] for counts in (send_counts, receive_counts)]

    def run(engine: TensorCollectives, timeout: float, place: int) -> None:
        engine.all_to_all(out, sent, *sizes, unit=row * scale, timeout=timeout, sequence=place)
        target.finish()

    return Collective("all_to_all", source.device, results, run)


# What is wrong with arguments.


def _moved_alike(out: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both as `moved`, and how many elements that makes of one."""
    scale = source.element_size() if moved(source) is not source else 1
    return moved(out), moved(source), scale


def _check(tensor: torch.Tensor, op: Op | None = None) -> None:
    """Raise unless a tensor can be moved, or folded where there is an ``op``."""
    if op is not None:
        check_tensor(tensor)
        check_reduction(tensor.dtype, op)
    elif tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        check_tensor(tensor)  # says what is wrong


def _check_like(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype is not other.dtype or one.device != other.device:
        raise ValueError(
            f"input and output must be of one dtype, on one device, not {other.dtype} on {other.device} and"
            f" {one.dtype} on {one.device}"
        )


def _check_list(group: Backend, tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    if len(tensors) != group.world_size:
        raise ValueError(f"{what} must be one tensor for each of {group.world_size} ranks, not {len(tensors)}")
    for tensor in tensors:
        _check(tensor)
        _check_like(tensor, like)


def _check_even(joined: Joined, tensor: torch.Tensor) -> None:
    if set(joined.counts) != {tensor.numel()}:
        raise ValueError(
            f"the tensors of the list must have {tensor.numel()} elements each, as this rank's other one, not"
            f" {joined.counts}"
        )
