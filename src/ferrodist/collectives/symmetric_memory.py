"""Tensors in memory that all ranks of a host share, on which collectives need no staging copies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.native.engine import NativeEngine
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.collectives.arguments import check_shape, group_and_timeout
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.shared_view import ContiguousSharedView

# All ranks' memory together, which each rank maps: the address space of 48 bits.
_MAX_BYTES = 1 << 48


def empty_symmetric(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor on which the group's collectives need no staging copies.

    Otherwise it is an ordinary tensor. Ranks access each other's memory where all pass the tensors of one call, or the
    same parts of them, as input (and as ``out``, in allreduce) of a collective. Where ranks share no memory, as on
    backends other than native, it is ``torch.empty``.

    Don't use the memory after a failed collective: ranks that are stopped, or have not learned of the failure, may
    still write to it.

    The memory lives as long as any tensor in it, also after the group was closed; each rank frees its own.

    Args:
        shape: The shape, equal on all ranks.
        dtype: The dtype, equal on all ranks.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        BackendUnavailable: The memory can't be allocated; raised on all ranks.
        TypeError: ``shape`` is not a sequence of integers, or collectives don't carry ``dtype``.
        ValueError: A size is negative, or the ranks' tensors together have more bytes than a process can address.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    check_dtype(dtype)
    chosen, limit = group_and_timeout(group, timeout)
    sizes = check_shape(shape)
    count = math.prod(sizes)
    size_bytes = count * dtype.itemsize
    if size_bytes * chosen.world_size > _MAX_BYTES:
        raise ValueError(
            f"a tensor of shape {sizes} and {dtype} has {counted(size_bytes, 'byte')}; those of the"
            f" {counted(chosen.world_size, 'rank')} of"
            f" group {chosen.name!r} together may have {_MAX_BYTES}: pass a smaller shape"
        )
    name = str(dtype).removeprefix("torch.")
    call = CollectiveSignature(operation="empty_symmetric", dtype=name, count=count)
    memory, _ = _make(chosen, call, size_bytes, (), limit)
    return memory.view(dtype).view(sizes)


def empty_with_views(
    size_bytes: int, joined: Sequence[tuple[int, int]], *, group: Backend
) -> tuple[torch.Tensor, list[ContiguousSharedView]]:
    """Make symmetric memory with concatenated views of the ranks' parts; a collective with equal arguments.

    ``joined`` has offset and size of each part to view, in bytes, in whole pages, not empty. Returns this rank's
    memory, as bytes, and for each part a view of all ranks' parts in rank order. A view shows what the ranks write to
    their memory; writes to the view are private. No views where ranks share no memory. Raises as `empty_symmetric`.
    """
    call = CollectiveSignature(operation="empty_joined", dtype="uint8", count=size_bytes)
    return _make(group, call, size_bytes, joined, group.timeout)


def _make(
    group: Backend, call: CollectiveSignature, size_bytes: int, joined: Sequence[tuple[int, int]], timeout: float
) -> tuple[torch.Tensor, list[ContiguousSharedView]]:
    engine = group.engine("cpu")
    if not isinstance(engine, NativeEngine):
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), []
    return engine.empty_symmetric(call, size_bytes, timeout, joined)
