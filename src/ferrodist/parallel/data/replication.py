"""Every rank has the same model: its form is compared, its values come from one rank."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from ferrodist.collectives.coalescing import coalesce
from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.collectives.reductions import async_broadcast
from ferrodist.errors import CollectiveMismatchError
from ferrodist.parallel.data.buckets import plan_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

__all__ = ["broadcast_tensors", "check_same_form"]


def check_same_form(module: torch.nn.Module, group: Backend, deadline: Deadline) -> None:
    """Compare the module's parameters and buffers with those of rank 0; every rank of the group calls this.

    Compared are their number, names, shapes and dtypes, and which parameters require grad. Each rank receives
    rank 0's list and then one sentence from each rank, so that lists don't travel from everyone to everyone.

    Raises:
        CollectiveMismatchError: On every rank, naming the first parameter or buffer that differs. The group stays good.
        ValueError: A lazy parameter has no shape yet.
    """
    mine = _describe(module)
    expected = broadcast_object(mine, group=group, timeout=deadline.remaining())
    sentences = all_gather_object(
        _first_difference(mine, expected, group.rank), group=group, timeout=deadline.remaining()
    )
    differing = {rank: sentence for rank, sentence in enumerate(sentences) if sentence is not None}
    if differing:
        raise CollectiveMismatchError(
            f"the ranks of group {group.name!r} gave DDP different modules:"
            f" {next(iter(differing.values()))}. Build the same module on every rank.",
            ranks=tuple(differing),
        )


def _describe(module: torch.nn.Module) -> list[str]:
    descriptions = []
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} is lazy and has no shape yet: run the module once before DDP")
        role = "parameter" if parameter.requires_grad else "frozen parameter"
        descriptions.append(f"{role} {_form(name, parameter)}")
    descriptions += [f"buffer {_form(name, buffer)}" for name, buffer in module.named_buffers()]
    return descriptions


def _form(name: str, tensor: torch.Tensor) -> str:
    return f"{name!r} of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _first_difference(mine: Sequence[str], expected: Sequence[str], rank: int) -> str | None:
    for own, other in zip_longest(mine, expected, fillvalue="nothing more"):
        if own != other:
            return f"rank {rank} has {own} where rank 0 has {other}"
    return None


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], root: int, group: Backend, *, max_bytes: float, deadline: Deadline
) -> None:
    """Overwrite every rank's tensors with the root's, in messages of about ``max_bytes`` that carry one dtype each.

    Args:
        tensors: Of equal shapes and dtypes on all ranks; any strides. Autograd sees nothing of it.
        root: The rank whose values everyone gets.
        group: The group, on all of whose ranks this is called.
        max_bytes: Bounds the memory that is needed beside the tensors.
        deadline: For all messages together.
    """
    if group.world_size == 1:
        return
    with torch.no_grad():
        for bucket in plan_buckets(tensors, max_bytes):
            timeout = deadline.remaining()  # one for all: operations with other timeouts don't travel together
            with coalesce(group):
                pending = [
                    async_broadcast(tensors[place], root, group=group, out=tensors[place], timeout=timeout)
                    for place in bucket.members
                ]
            for broadcast in pending:
                broadcast.wait()
