"""The same model on every rank: its structure is verified, and its values are broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from ferrodist.collectives.arguments import check_tensor
from ferrodist.collectives.coalescing import coalesce
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.reduce import async_broadcast
from ferrodist.collectives.reduce_op import ReduceOp, check_reduction
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.ddp.bucket import compute_bucket_assignment
from ferrodist.parallel.module_init import (
    describe,
    describe_tensors,
    find_unsynchronised_batch_norm,
    verify_across_ranks,
    write_obstacle,
)
from ferrodist.parallel.parameter_claims import describe_claim
from ferrodist.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline
    from ferrodist.parallel.ddp.config import Options


def verify_module(
    module: torch.nn.Module, options: Options | None, group: Backend, deadline: Deadline, *, maker: str = "DDP"
) -> None:
    """Compare parameters, buffers and options with those of rank 0; every rank of the group calls this.

    Raises on every rank, and leaves the group usable: CollectiveMismatchError at the first difference; ValueError or
    UnsupportedOpError at what collectives can't send, is lazy, owned by an FSDP, or a DTensor.
    """
    options_lines = [f"the option {line}" for line in (options.describe() if options else ())]
    lines = describe_tensors(module.named_parameters(), module.named_buffers(), _describe_tensor)
    refusal = describe_claim(module.named_parameters())
    named = (*module.named_parameters(), *module.named_buffers())
    dtensor = next((name for name, tensor in named if isinstance(tensor, DTensor)), None)
    if refusal is None and dtensor is not None:
        refusal = (
            f"{dtensor!r} is a DTensor, as parallelize() makes them, and {maker} takes plain tensors: use FSDP with"
            " strategy=ShardingStrategy.NO_SHARD over another axis of the mesh"
        )
    refusal = refusal or find_unsynchronised_batch_norm(module, group)
    name = type(module).__name__
    verify_across_ranks([*options_lines, *lines], group, deadline, maker=maker, module=name, refusal=refusal)
    check_supported(module, group, maker=maker)


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    if is_lazy(tensor) or tensor.is_nested:
        return describe(name, tensor)
    obstacle = write_obstacle(tensor)
    return f"{describe(name, tensor)}{' on meta' if tensor.is_meta else ''}{obstacle and ' that ' + obstacle}"


def check_supported(module: torch.nn.Module, group: Backend, *, maker: str = "DDP") -> None:
    """Raise for a parameter or buffer that can't be sent; all ranks do, where their modules are the same."""
    parameters = ((f"parameter {name!r}", parameter) for name, parameter in module.named_parameters())
    tensors = [*parameters, *((f"buffer {name!r}", buffer) for name, buffer in module.named_buffers())]
    for title, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"{title} is lazy and has no shape yet: run the module once before {maker}")
        if group.world_size == 1:
            continue
        first_title, first = tensors[0]
        if tensor.device != first.device:
            raise UnsupportedOpError(
                f"{maker} takes a module on one device, and {title} of {type(module).__name__} is on {tensor.device},"
                f" {first_title} on {first.device}: move it with module.to(device)"
            )
        try:
            check_tensor(tensor)
            engine_of(group, tensor.device)
            if tensor.requires_grad:
                check_reduction(tensor.dtype, ReduceOp.MEAN)
        except TypeError as error:
            raise UnsupportedOpError(
                f"{maker} can't give every rank {title} of {type(module).__name__}: {error}"
            ) from None
        if obstacle := write_obstacle(tensor):
            raise UnsupportedOpError(
                f"{maker} can't give every rank {title} of {type(module).__name__}: it {obstacle}, so nothing can be"
                " written to it. Make it a clone()."
            )


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], root: int, group: Backend, *, max_bytes: float, deadline: Deadline
) -> None:
    """Overwrite every rank's tensors with the root's, in messages of about ``max_bytes`` of one dtype each."""
    if group.world_size == 1:
        return
    with torch.no_grad():
        for bucket in compute_bucket_assignment(tensors, max_bytes):
            timeout = deadline.remaining()
            with coalesce(group):
                pending = [
                    async_broadcast(tensors[position], root, group=group, out=tensors[position], timeout=timeout)
                    for position in bucket.members
                ]
            for broadcast in pending:
                broadcast.wait()
