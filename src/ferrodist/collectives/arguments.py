"""From a user's arguments to an engine's, and back: checks, flat tensors, output buffers, autograd history.

The checks raise before anything is sent. `flatten` and `prepare_out` make the flat, contiguous tensors that engines
take, `OutputBuffer.finish` brings the result to the user's tensor, and `attach` records its history.

The gradient of a collective is a collective. The loss is the sum of all ranks' losses, so the gradient of a rank's
input is the sum over the ranks of the gradients of all outputs that depend on it. A result records history when this
rank's input requires grad (and grad mode is on); then every rank of the group must run backward through it, which is a
collective with the group's timeout.

[Note: gradients out of step]
A gradient's collective is compared like any other: operation, dtype, reduction, number of elements, root and dim. If a
rank out of step calls another one, all ranks raise `CollectiveMismatchError`. Whether a call is a gradient's is not
compared: if one rank is in the backward of an allreduce and another makes a forward allreduce of as many elements of
that dtype and reduction, they match, and both get a meaningless result. So ranks must run the same forwards and
backwards in the same order. DDP's buckets have fingerprints of their own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import once_differentiable

from ferrodist.arguments import check_int
from ferrodist.backends.base import check_rank
from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.deadline import check_timeout
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.modes import is_in_torch_dispatch_mode
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ferrodist.backends.base import Backend

    Backward = Callable[..., torch.Tensor]


class _Attached(torch.autograd.Function):
    """Attaches a result that was computed elsewhere to the graph of its input."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        computed: list[torch.Tensor],
        backward: Backward,
        saved: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        ctx.backward_of = backward
        ctx.source_shape = source.shape
        ctx.save_for_backward(*saved)
        return computed[0]  # in a list: else it would come out as a view, which users may not write to

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = ctx.backward_of(grads[0], *ctx.saved_tensors)
        return grad.view(ctx.source_shape), None, None, None


class _AttachedOnce(_Attached):
    """`_Attached` for a gradient that is not differentiable."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Attached.backward(ctx, *grads)


def records_history(source: torch.Tensor | None) -> bool:
    """True if the result of a call on ``source`` records history."""
    return source is not None and source.requires_grad and torch.is_grad_enabled()


def attach(
    source: torch.Tensor, result: torch.Tensor, backward: Backward, *saved: torch.Tensor, once: bool = False
) -> torch.Tensor:
    """Give a result its history: ``backward(gradient of result, *saved)`` is the gradient of ``source``.

    Autograd detects later writes to ``saved``. ``once`` refuses a second derivative: of collectives with a root it
    would have a history on the root only, and the other ranks would not take part.
    """
    function = _AttachedOnce if once else _Attached
    attached = function.apply(source, [result], backward, saved)  # type: ignore[no-untyped-call]
    assert isinstance(attached, torch.Tensor)
    return attached


def finish_with(
    target: OutputBuffer,
    source: torch.Tensor,
    out: torch.Tensor | None,
    backward: Backward,
    *saved: torch.Tensor,
    saves_result: bool = False,  # after `saved`
    once: bool = False,
) -> Callable[[], torch.Tensor]:
    """Make the function that finishes a call: it returns the result, with a history if ``source`` records one."""
    recorded = records_history(source) and out is None

    def finish() -> torch.Tensor:
        result = target.finish()
        if not recorded:
            return result
        return attach(source, result, backward, *saved, *([result] if saves_result else []), once=once)

    return finish


def compute_shard_sizes(total: int, world_size: int) -> list[int]:
    """Divide ``total`` elements over ranks as evenly as possible: the first ranks get one more."""
    if total < 0 or world_size < 1:
        raise ValueError(f"cannot divide {counted(total, 'element')} over {counted(world_size, 'rank')}")
    # Also of a total that the compiler traces, which has no divmod; a comparison would bind the graph to few totals.
    return [(total + world_size - 1 - rank) // world_size for rank in range(world_size)]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """The offsets of concatenated parts of these sizes, and the end as one more."""
    return [0, *itertools.accumulate(sizes)]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a flat, writable memoryview, which keeps it alive."""
    if not tensor.numel():  # whose strides may be anything
        return memoryview(bytearray())
    # As strided: a single element may have any stride, such as the 0 of an expanded one.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if the memory ranges of two tensors overlap, whoever owns them."""
    if not one.numel() or not other.numel():
        return False
    (start, stop), (other_start, other_stop) = _span(one), _span(other)
    return start < other_stop and other_start < stop


def elements_overlap(*tensors: torch.Tensor) -> bool:
    """True if any two elements, of one tensor or of several, share memory; exact for any strides."""
    ordered = sorted((tensor for tensor in tensors if tensor.numel()), key=torch.Tensor.data_ptr)
    clusters: list[list[torch.Tensor]] = []
    end = 0
    for tensor in ordered:
        start, stop = _span(tensor)
        if clusters and start < end:
            clusters[-1].append(tensor)
        else:
            clusters.append([tensor])
        end = max(end, stop)
    return any(_collide(cluster) for cluster in clusters if len(cluster) > 1 or not _has_nested_strides(cluster[0]))


def _has_nested_strides(tensor: torch.Tensor) -> bool:
    """True if each dim steps over all elements of the dims with smaller strides, as in all slices."""
    reach = 0
    for stride, size in sorted(_steps(tensor)):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _collide(tensors: list[torch.Tensor]) -> bool:
    """Detect elements that share memory by marking bytes; takes as much memory as the tensors span."""
    start, stop = min(_span(tensor)[0] for tensor in tensors), max(_span(tensor)[1] for tensor in tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    if total > stop - start or any(stride == 0 for tensor in tensors for stride, _ in _steps(tensor)):
        return True
    marks = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    for tensor in tensors:
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        marks.as_strided((*tensor.shape, item), (*strides, 1), tensor.data_ptr() - start).fill_(True)
    return int(marks.sum()) < total


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of the dims of more than one element."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


_DEVICE_TYPES = ("cpu", "cuda")


def group_and_timeout(group: Backend | None, timeout: float | None) -> tuple[Backend, float]:
    """The group and the timeout of a call, from its arguments."""
    chosen = resolve_group(group)
    return chosen, chosen.timeout if timeout is None else check_timeout(timeout)


def check_root(group: Backend, rank: int, name: str) -> int:
    """Return ``rank`` as an int; raises unless it is a rank of ``group``."""
    return check_rank(group, rank, f"{name}={rank!r}")


def check_out_of_root(group: Backend, root: int, out: object) -> None:
    """Raise ValueError when ``out`` is given on a rank that gets no result."""
    if out is not None and group.rank != root:
        raise ValueError(f"only rank {root} gets a result: pass out= there, not on rank {group.rank}")


def check_dim(tensor: torch.Tensor, dim: int) -> int:
    """Return ``dim`` counted from 0; raises IndexError for an invalid dim, ValueError for a 0-dim tensor."""
    dim = check_int("dim", dim)
    if tensor.dim() == 0:
        raise ValueError("a zero-dimensional tensor has no dim to divide or join along: reshape it to (1,) first")
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim {dim} is not a dim of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of ints; TypeError unless it is a sequence of integers, ValueError below 0."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, as (4,), not {shape!r}") from None
    return tuple(check_int(f"shape[{dim}]", size, min=0) for dim, size in enumerate(sizes))


def check_layout(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise UnsupportedOpError for nested and sparse tensors."""
    if tensor.is_nested:
        raise UnsupportedOpError(
            f"{name} is a nested tensor, which has no one shape: pass its parts ({name}.unbind()), or one padded tensor"
            f" (torch.nested.to_padded_tensor({name}, 0.0))"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedOpError(f"{name} has layout {tensor.layout}: pass a dense tensor (to_dense())")


def check_tensor(tensor: torch.Tensor, name: str = "tensor", *, in_graphs: bool = False) -> None:
    """Raise TypeError or NotImplementedError unless collectives carry ``tensor``.

    `engine_of` checks whether the group supports the device. ``in_graphs`` says whether it may be one of a graph that
    the compiler traces.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    check_layout(tensor, name)
    if tensor.device.type not in _DEVICE_TYPES:
        raise UnsupportedOpError(
            f"{name} is on {tensor.device}: groups carry tensors on the CPU and on CUDA devices, pass {name}.cpu()"
        )
    check_dtype(tensor.dtype)
    if in_graphs and is_traced(tensor):
        return
    if _is_traced():
        raise NotImplementedError(
            "make_fx does not record collectives and messages: the graph would lack them. Call them outside of what it"
            " traces."
        )
    if not has_memory(tensor):
        raise NotImplementedError(
            f"{name} has no memory to send: collectives and messages don't go through the functorch transforms (vmap,"
            " torch.func.grad, jvp, functionalize) or wrappers as DTensor. Call them outside; backward() and"
            " torch.autograd.grad go through collectives."
        )
    if unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call] # None at once outside of dual levels
        raise NotImplementedError(
            f"{name} carries a tangent of forward-mode differentiation, which would be lost: collectives and messages"
            f" have gradients for backward() only. Pass {name}.detach(), or unpack_dual(...) and send the tangent too."
        )


def _is_traced() -> bool:
    """True if `make_fx` records this thread's operations, which the tensors don't show."""
    if not is_in_torch_dispatch_mode():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: PLC0415 - large, and loaded by now

    return get_proxy_mode() is not None


def has_memory(tensor: torch.Tensor) -> bool:
    """True if a tensor has memory of its own; one without elements counts if it could have."""
    try:
        # `detach` first: a transform also wraps results of tensors that it did not wrap.
        return tensor.detach().data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, in one dim: the tensor's own memory if it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def flatten_parts(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The elements of the parts into which sizes divide a dim, part after part, each as `flatten` has them."""
    if _is_outermost(tensor.shape, dim):  # in which the parts follow one another
        return flatten(tensor)
    if not is_traced(tensor) and len(set(sizes)) == 1:  # sizes of a graph can be symbols, which are not compared
        divided = tensor.view(*tensor.shape[:dim], len(sizes), sizes[0], *tensor.shape[dim + 1 :])
        return flatten(divided.movedim(dim, 0))
    parts = torch.split(tensor.detach(), list(sizes), dim)
    flat = tensor.new_empty(tensor.numel())
    for part, own in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        own.view(part.shape).copy_(part)
    return flat


def _is_outermost(shape: Sequence[int], dim: int) -> bool:
    return all(size == 1 for size in shape[:dim])


def writing_to(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context for writing to a tensor without history, also to an inference tensor."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBuffer:
    """The output of a call."""

    flat: torch.Tensor  # which the engine writes: the elements in order, part after part if the result is joined
    result: torch.Tensor  # the user's
    parts: Sequence[torch.Tensor] = ()  # the result's, if `flat` is not its memory
    refusal: Exception | None = None  # raised in place of returning the result

    def finish(self) -> torch.Tensor:
        """Copy the engine's output to the user's tensor if needed, and return that."""
        if self.refusal is not None:
            raise self.refusal
        if self.parts:
            with writing_to(self.result):
                pieces = torch.split(self.flat, [part.numel() for part in self.parts])
                for part, own in zip(self.parts, pieces, strict=True):
                    part.copy_(own.view(part.shape))
            record_use_on_streams(self.flat)
        elif not self.result.is_inference() and not is_traced(self.result):
            # The engine wrote raw memory: a tensor that autograd may have saved has changed.
            torch.autograd.graph.increment_version(self.result)
        return self.result


def check_out(
    out: torch.Tensor | None,
    source: torch.Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check ``out`` as far as shape and dtype are known; see `prepare_out`."""
    if out is None:
        return
    if out is not source:  # which was checked
        check_tensor(out, "out", in_graphs=True)
    if shape is not None and tuple(out.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    if dtype is not None and out.dtype is not dtype:
        raise TypeError(f"out is {out.dtype}, the result is {dtype}")
    if source is not None and out.device != source.device:
        raise ValueError(f"out is on {out.device}, the tensor on {source.device}: pass tensors of one device")
    if torch.is_grad_enabled() and (out.requires_grad or (source is not None and source.requires_grad)):
        raise RuntimeError(
            "out= does not support automatic differentiation: use the result of the functional form, or torch.no_grad()"
        )
    if not is_traced(out) and not out.is_contiguous() and elements_overlap(out):
        raise ValueError("out has elements that share memory (expand, as_strided): pass a tensor of its own memory")


def prepare_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    in_place: bool = False,
) -> OutputBuffer:
    """Make or check the tensor a result goes to; raises as `check_out`.

    ``device`` is that of a fresh tensor; None is that of the source, or the CPU. A result that is joined has parts of
    these ``sizes`` along ``dim``, from 0. ``in_place`` says whether the engine may write to its input, when that is
    ``out``.
    """
    check_out(out, source, shape=shape, dtype=dtype)
    if device is None:
        device = torch.device("cpu") if source is None else source.device
    result = torch.empty(tuple(shape), dtype=dtype, device=device) if out is None else out
    joined = sizes is not None and not _is_outermost(result.shape, dim)
    plain = not joined and result.is_contiguous() and not result.is_conj() and not result.is_neg()
    if plain and (out is None or source is None or _may_write(out, source, in_place=in_place)):
        return OutputBuffer(flat=result.detach().view(-1), result=result)
    parts = torch.split(result, list(sizes), dim) if joined and sizes is not None else (result,)
    return OutputBuffer(flat=torch.empty(result.numel(), dtype=dtype, device=result.device), result=result, parts=parts)


def _may_write(out: torch.Tensor, source: torch.Tensor, *, in_place: bool) -> bool:
    """True if the engine may write to ``out`` itself, beside a source that it reads."""
    if is_traced(out):
        return False
    is_same = in_place and out.data_ptr() == source.data_ptr() and out.shape == source.shape
    return is_same or not shares_memory(out, source)


def prepare_late_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> OutputBuffer:
    """`prepare_out` for a result whose shape came from other ranks, which are in the call already.

    This rank must take part, so with an invalid ``out`` it does with a fresh tensor, and raises afterwards.
    """
    try:
        return prepare_out(out, shape, dtype, source, device=device, dim=dim, sizes=sizes)
    except (ValueError, TypeError, RuntimeError) as error:
        device = source.device if device is None and source is not None else device
        return replace(prepare_out(None, shape, dtype, device=device, dim=dim, sizes=sizes), refusal=error)


_NUMPY_KINDS = frozenset("biufSU")
"""NumPy's kinds of booleans, integers, floats, bytes and text; times and records have no Python equal."""


def python_value(value: Any) -> Any:
    """Convert a NumPy scalar to the equal bool, int, float, bytes or str; other values stay, also long doubles."""
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return value.item()
    return value
