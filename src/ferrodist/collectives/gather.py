"""gather and scatter, which are each other's gradient."""

from __future__ import annotations

import math
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.arguments import check_int
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.all_gather import ConcatSpec, share_parts
from ferrodist.collectives.arguments import (
    OutputBuffer,
    check_dim,
    check_out,
    check_out_of_root,
    check_root,
    check_tensor,
    compute_shard_sizes,
    finish_with,
    flatten,
    flatten_parts,
    group_and_timeout,
    prepare_late_out,
    prepare_out,
    records_history,
)
from ferrodist.collectives.engines.host import host_engine_of, share_bytes
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.payloads import (
    abort_for_disagreement,
    abort_for_protocol_error,
    check_sizes,
    dtype_at,
    elements_after,
    few_elements,
    unpack_payloads,
)
from ferrodist.collectives.profiling import is_recorded, record
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.work import CollectiveCall, complete, execute, refuse_in_coalesce
from ferrodist.deadline import Deadline
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

_MAX_SCATTER_DIMS = 12

# Every rank's dim and src; the root's also has: dtype's index in DTYPES, flags, num dims. The shape follows, and the
# elements if they are few: see [Note: shared sizes] in native/bindings/shared_sizes.h.
_SCATTER_CALL = struct.Struct("<ii")
_SCATTER_HEAD = struct.Struct("<iiBBB")
_RECORDS_HISTORY, _IS_ON_GPU = 1, 2  # the flags


def gather(
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Concatenate the ranks' tensors along ``dim``, in rank order, on rank ``dst``.

    Args:
        tensor: The input, of equal dtype on all ranks, and equal shape but for ``dim``, compared as for
            `all_gather_uneven`; any strides.
        dst: The rank that gets the result, the same on all ranks.
        dim: The dim to concatenate along.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor on rank ``dst``; None makes a fresh one. Refused elsewhere.
        timeout: Seconds; None takes the group's.

    Returns:
        On ``dst`` the concatenation; elsewhere an empty tensor, through which backward runs. Differentiable once.

    Raises:
        ValueError: ``out`` is given on another rank than ``dst``, has elements that share memory, or another shape.
            The shape is known only after the sizes were shared, so ``dst`` takes part first, and the group goes on.
        InvalidRankError: ``dst`` is not a rank of the group.
        IndexError: ``tensor`` has no such ``dim``.
        TypeError, RuntimeError: ``tensor`` or ``out`` is invalid, as for `allreduce`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(gather, tensor, dst, dim=dim, group=group, out=out, timeout=timeout)
    # A list has the payloads that the ranks have shared: the general path goes on from there.
    began = time.monotonic()
    result: torch.Tensor | list[bytes] | None = compiled.fast_gather(tensor, dst, dim, group, out, timeout)
    if isinstance(result, torch.Tensor):
        return result
    check_tensor(tensor)
    part = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    dim = check_dim(part, dim)
    chosen, limit = group_and_timeout(group, timeout)
    dst = check_root(chosen, dst, "dst")
    check_out_of_root(chosen, dst, out)
    check_out(out, part, dtype=part.dtype)
    deadline = Deadline(limit, elapsed=time.monotonic() - began)
    shared = share_parts("gather", part, dim, chosen, limit, root=dst, payloads=result)
    call = gather_call(part, shared.sizes, dst, dim=dim, group=chosen, out=out, timeout=deadline.remaining())
    return execute(call) if shared.elements is None else complete(call, shared.elements)


def gather_call(
    part: torch.Tensor,
    sizes: Sequence[int],
    dst: int,
    *,
    dim: int,
    group: Backend,
    out: torch.Tensor | None = None,
    timeout: float,
) -> CollectiveCall[torch.Tensor]:
    """`gather` with known sizes, ready to run: rank r's part has ``sizes[r]`` along ``dim``."""
    is_root = group.rank == dst
    engine = engine_of(group, part.device)
    concat = ConcatSpec(part, dim, sizes)
    source = flatten(part)
    if is_root:
        target = prepare_late_out(out, concat.shape, part.dtype, part, dim=dim, sizes=sizes)
    else:
        target = prepare_out(None, (0,), part.dtype, device=part.device)

    def backward(grad: torch.Tensor) -> torch.Tensor:
        fresh = prepare_out(None, part.shape, part.dtype, device=part.device)
        whole = grad if is_root else None
        return execute(scatter_call(whole, fresh, sizes, dst, dim=dim, group=group, timeout=group.timeout))

    op = CollectiveOp(
        kind=CollectiveKind.GATHER,
        source=source,
        out=target.flat if is_root else None,
        counts=concat.counts,
        root=dst,
        timeout=timeout,
    )
    finish = finish_with(target, part, out, backward, once=True)
    return CollectiveCall(op=op, group=group, engine=engine, finish=finish)


def scatter(
    tensor: torch.Tensor | None,
    src: int = 0,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Scatter rank ``src``'s tensor over the ranks along ``dim``.

    Sizes that the world size doesn't divide follow `compute_shard_sizes`. The other ranks get shape, dtype and kind of
    device from ``src``, at the cost of one more verification unless its tensor is small. If ``out`` does not fit, they
    take part before they raise, and the group goes on.

    Backward is a collective of all ranks. ``loss.backward()`` runs it everywhere. ``torch.autograd.grad`` runs it only
    on ranks with one of its inputs: for it the other ranks pass an empty tensor that requires grad, as `gather` returns
    one, and name it among the inputs.

    Args:
        tensor: The input on rank ``src``, of at most 12 dims. Elsewhere None, or an empty tensor, through which
            backward runs.
        src: The rank that has the input, the same on all ranks.
        dim: The dim to divide.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor for this rank's part; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor: this rank's part, on the device of ``tensor``, or on the current device of the kind
        of ``src``'s. Differentiable once, if ``src``'s tensor requires grad: on all ranks.

    Raises:
        ValueError: ``tensor`` is missing on ``src``, has elements elsewhere, or has no dim or too many; ``out`` has
            another shape, or elements that share memory.
        TypeError: ``tensor`` is not supported, ``out`` has another dtype, or ``dim`` is not an integer.
        RuntimeError: ``out`` is given where gradients would be lost.
        IndexError: ``dim`` is out of range: of ``tensor`` on ``src``, elsewhere of any tensor that scatter takes.
        InvalidRankError: ``src`` is not a rank of the group.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(scatter, tensor, src, dim=dim, group=group, out=out, timeout=timeout)
    began = time.monotonic()
    result = compiled.fast_scatter(tensor, src, dim, group, out, timeout)  # as for `gather`
    if isinstance(result, torch.Tensor):
        return result
    chosen, limit = group_and_timeout(group, timeout)
    src, dim = check_root(chosen, src, "src"), check_int("dim", dim)
    if not -_MAX_SCATTER_DIMS <= dim < _MAX_SCATTER_DIMS:
        raise IndexError(f"dim {dim} is not a dim of a tensor that scatter takes: it has at most {_MAX_SCATTER_DIMS}")
    check_out(out)
    payload = _check_scatter(tensor, src, dim, chosen, out)
    deadline = Deadline(limit, elapsed=time.monotonic() - began)
    payloads = result
    if payloads is None:
        refuse_in_coalesce("scatter")
        payloads = share_bytes(chosen, "scatter", payload, limit)
    head = _read_scatters(payloads, chosen)
    dim, shape = head.dim, head.shape
    sizes = compute_shard_sizes(shape[dim], chosen.world_size)
    device = _device_of_part(head.is_on_gpu, tensor, out)
    whole = tensor
    is_elsewhere = whole is not None and whole.device != device
    if whole is None or is_elsewhere or (head.is_recorded and not whole.requires_grad):
        # So that backward runs through here too.
        whole = torch.empty(0, requires_grad=head.is_recorded, device=device)
    with torch.enable_grad() if head.is_recorded else torch.no_grad():
        target = prepare_late_out(out, _part_shape(shape, dim, chosen), head.dtype, whole)
        if is_elsewhere:
            target = replace(target, refusal=ValueError(f"rank {src}'s tensor is on a {device.type}: pass one there"))
        call = scatter_call(whole, target, sizes, src, dim=dim, group=chosen, timeout=deadline.remaining())
        if head.elements is None:
            return execute(call)
        first, end = (sum(call.op.counts[:rank]) * head.dtype.itemsize for rank in (chosen.rank, chosen.rank + 1))
        return complete(call, [head.elements[first:end]])


def _check_scatter(tensor: torch.Tensor | None, src: int, dim: int, group: Backend, out: torch.Tensor | None) -> bytes:
    """Check a scatter's tensors on this rank; returns what it tells the others."""
    if group.rank != src:
        if tensor is not None:
            check_tensor(tensor)
            if tensor.numel():
                raise ValueError(f"rank {src} scatters: pass None on rank {group.rank}, or a tensor without elements")
        return _SCATTER_CALL.pack(dim, src)
    if tensor is None:
        raise ValueError(f"rank {src} scatters: pass the tensor there")
    check_tensor(tensor)
    dim = check_dim(tensor, dim)
    if tensor.dim() > _MAX_SCATTER_DIMS:
        raise ValueError(f"scatter takes tensors of at most {_MAX_SCATTER_DIMS} dims, not {tensor.dim()}: reshape it")
    check_out(out, tensor, shape=_part_shape(tensor.shape, dim, group), dtype=tensor.dtype)
    engine_of(group, tensor.device)
    flags = _RECORDS_HISTORY * records_history(tensor) | _IS_ON_GPU * tensor.is_cuda
    head = _SCATTER_HEAD.pack(dim, src, DTYPES.index(tensor.dtype), flags, tensor.dim())
    head += struct.pack(f"<{tensor.dim()}q", *tensor.shape)
    room = host_engine_of(group).share_room - len(head)
    if tensor.nbytes > room:
        return head
    parts = flatten_parts(tensor, dim, compute_shard_sizes(tensor.shape[dim], group.world_size))
    return head + few_elements(parts, room)


def _device_of_part(is_cuda: bool, *given: torch.Tensor | None) -> torch.device:  # noqa: FBT001 - read from a header
    """The device of this rank's part: that of a given tensor, if it is of the root's kind."""
    kind = "cuda" if is_cuda else "cpu"
    found = next((tensor.device for tensor in given if tensor is not None and tensor.device.type == kind), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _part_shape(shape: Sequence[int], dim: int, group: Backend) -> list[int]:
    """The shape of this rank's part of a tensor."""
    return [*shape[:dim], compute_shard_sizes(shape[dim], group.world_size)[group.rank], *shape[dim + 1 :]]


class _ScatterHead(NamedTuple):
    """The root's tensor in a scatter, as its description has told the other ranks."""

    dim: int
    dtype: torch.dtype
    is_recorded: bool
    is_on_gpu: bool
    shape: tuple[int, ...]
    elements: memoryview | None  # part after part, if they have come


def _read_scatters(payloads: Sequence[bytes], group: Backend) -> _ScatterHead:
    """Read what ranks have shared; raises the same error on every rank unless all have the same src and dim."""
    dims_and_roots = unpack_payloads(_SCATTER_CALL, payloads, group, "scatter")
    root = dims_and_roots[0][1]
    if len({src for _, src in dims_and_roots}) == 1:
        head = _read_scatter_of_root(payloads[root], root, group)
        if all(other in (head.dim, head.dim - len(head.shape)) for other, _ in dims_and_roots):
            return head
    calls = (f"rank {rank} called scatter(src={src}, dim={dim})" for rank, (dim, src) in enumerate(dims_and_roots))
    raise abort_for_disagreement(group, "a scatter", calls, "Pass the same src and dim on every rank.")


def _read_scatter_of_root(payload: bytes, root: int, group: Backend) -> _ScatterHead:
    if len(payload) < _SCATTER_HEAD.size:
        raise abort_for_protocol_error(group, root, "sent no shape with its scatter")
    dim, _, dtype_index, flags, num_dims = _SCATTER_HEAD.unpack_from(payload)
    if not 0 <= dim < num_dims <= _MAX_SCATTER_DIMS:
        raise abort_for_protocol_error(group, root, "named a dim with its scatter that no tensor has")
    sizes = struct.Struct(f"<{num_dims}q")
    start = _SCATTER_HEAD.size + sizes.size
    if len(payload) < start:
        raise abort_for_protocol_error(group, root, "sent no shape with its scatter")
    shape = sizes.unpack_from(payload, _SCATTER_HEAD.size)
    check_sizes(shape, group, root, "scatter")
    dtype = dtype_at(dtype_index, group, root, "scatter")
    size_bytes = math.prod(shape) * dtype.itemsize
    elements = elements_after(start, payload, size_bytes, group=group, rank=root, operation="scatter")
    is_on_gpu = bool(flags & _IS_ON_GPU)
    return _ScatterHead(dim, dtype, bool(flags & _RECORDS_HISTORY), is_on_gpu, shape, None if is_on_gpu else elements)


def scatter_call(
    tensor: torch.Tensor | None,
    target: OutputBuffer,
    sizes: Sequence[int],
    src: int,
    *,
    dim: int,
    group: Backend,
    timeout: float,
) -> CollectiveCall[torch.Tensor]:
    """`scatter` with known sizes, ready to run: rank r gets ``sizes[r]`` along ``dim``, this rank into ``target``."""
    is_root = group.rank == src
    part = target.result
    whole = tensor if tensor is not None else part.new_empty(0)
    engine = engine_of(group, part.device)
    source = flatten_parts(whole, dim, sizes) if is_root else None
    counts = ConcatSpec(part, dim, sizes).counts

    def backward(grad: torch.Tensor) -> torch.Tensor:
        joined = execute(gather_call(grad, sizes, src, dim=dim, group=group, timeout=group.timeout))
        return joined if is_root else torch.zeros_like(whole)

    op = CollectiveOp(
        kind=CollectiveKind.SCATTER, source=source, out=target.flat, counts=counts, root=src, timeout=timeout
    )
    finish = finish_with(target, whole, None, backward, once=True)
    return CollectiveCall(op=op, group=group, engine=engine, finish=finish)
