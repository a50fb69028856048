"""What users pass, turned into what engines take: flat, contiguous tensors, where the user's are."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.autograd.forward_ad import unpack_dual

from ferrodist.backends.base import check_rank
from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.device_streams import keep_until_now
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.views import elements_overlap, shares_memory
from ferrodist.deadline import check_timeout
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.modes import is_in_torch_dispatch_mode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from ferrodist.backends.base import Backend

__all__ = [
    "Target",
    "check_dim",
    "check_integer",
    "check_out",
    "check_out_of_root",
    "check_root",
    "check_tensor",
    "flatten",
    "group_and_timeout",
    "prepare_late_out",
    "prepare_out",
    "writing_to",
]


_DEVICE_TYPES = ("cpu", "cuda")


def group_and_timeout(group: Backend | None, timeout: float | None) -> tuple[Backend, float]:
    """The group and the seconds that a call means."""
    chosen = resolve_group(group)
    return chosen, chosen.timeout if timeout is None else check_timeout(timeout)


def check_root(group: Backend, rank: int, name: str) -> int:
    """``rank`` as an int; raises unless it is a rank of ``group``."""
    return check_rank(group, rank, f"{name}={rank!r}")


def check_integer(number: int, name: str) -> int:
    """``number`` as an int, whatever integer it is; raises TypeError for what is none, as a bool."""
    if not isinstance(number, bool):
        with contextlib.suppress(TypeError):
            return operator.index(number)
    raise TypeError(f"{name} must be an integer, not {number!r}")


def check_out_of_root(group: Backend, root: int, out: object) -> None:
    """Raise ValueError when ``out`` is given on a rank that gets no result."""
    if out is not None and group.rank != root:
        raise ValueError(f"only rank {root} gets a result: pass out= there, not on rank {group.rank}")


def check_dim(tensor: torch.Tensor, dim: int) -> int:
    """``dim`` as a number from 0; raises IndexError outside of the tensor's dims, ValueError for a 0-dim tensor."""
    dim = check_integer(dim, "dim")
    if tensor.dim() == 0:
        raise ValueError("a zero-dimensional tensor has no dim to divide or join along: reshape it to (1,) first")
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"dim {dim} is not a dim of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_layout(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise UnsupportedOpError unless ``tensor`` has one shape, and its elements at strides."""
    if tensor.is_nested:
        raise UnsupportedOpError(
            f"{name} is a nested tensor, which has no one shape: pass its parts ({name}.unbind()), or one padded tensor"
            f" (torch.nested.to_padded_tensor({name}, 0.0))"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedOpError(f"{name} has layout {tensor.layout}: pass a dense tensor (to_dense())")


def check_tensor(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise unless collectives can carry ``tensor``.

    Raises:
        TypeError: It is no dense tensor of a known dtype on the CPU or a GPU. Whether a group carries what is on a GPU
            is `engine_of`'s question.
        NotImplementedError: It carries a forward-mode tangent, or this is inside of a functorch transform or
            of make_fx.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    check_layout(tensor, name)
    if tensor.device.type not in _DEVICE_TYPES:
        raise UnsupportedOpError(
            f"{name} is on {tensor.device}: groups carry tensors on the CPU and on CUDA devices, pass {name}.cpu()"
        )
    check_dtype(tensor.dtype)
    if _is_traced():
        raise NotImplementedError(
            "make_fx does not record collectives and messages: the graph would lack them. Call them outside of what it"
            " traces."
        )
    if not _has_memory(tensor):
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
    """Whether `make_fx` records what this thread does with tensors; the tensors themselves don't show it."""
    if not is_in_torch_dispatch_mode():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: PLC0415 - loads much, and is here by now

    return get_proxy_mode() is not None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are in memory; of one without elements, whether they could be."""
    try:
        # Not the tensor's own memory: a transform also wraps what is made from tensors that it did not wrap.
        return tensor.detach().data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, as one dimension: the tensor's own memory when it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def writing_to(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Inside of this, elements may be written to a tensor: no history is recorded, and inference tensors take it."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a result goes.

    Args:
        flat: What the engine writes: the result's elements in order, with the dim that is joined or divided first.
        result: What the user gets, with the result's shape.
        view: ``result`` with that dim first, when ``flat`` is not its memory.
        refusal: Why the user gets an error in place of the result.
    """

    flat: torch.Tensor
    result: torch.Tensor
    view: torch.Tensor | None = None
    refusal: Exception | None = None

    def finish(self) -> torch.Tensor:
        """Bring what the engine wrote to the user's tensor."""
        if self.refusal is not None:
            raise self.refusal
        if self.view is not None:
            with writing_to(self.view):
                self.view.copy_(self.flat.view(self.view.shape))
            keep_until_now(self.flat)
        elif not self.result.is_inference():
            # The engine wrote raw memory: autograd must learn that what it may have saved has changed.
            torch.autograd.graph.increment_version(self.result)
        return self.result


def check_out(
    out: torch.Tensor | None,
    source: torch.Tensor | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise for an ``out`` that can't be, as far as shape and dtype are known; see `prepare_out`."""
    if out is None:
        return
    if out is not source:  # which was checked
        check_tensor(out, "out")
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
    if not out.is_contiguous() and elements_overlap(out):
        raise ValueError("out has elements that share memory (expand, as_strided): pass a tensor of its own memory")


def prepare_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
    dim: int = 0,
    in_place: bool = False,
) -> Target:
    """Make or check the tensor a result goes to.

    Args:
        out: The user's, or None for a fresh one.
        shape: The result's shape.
        dtype: The result's dtype.
        source: The call's input, if any.
        device: Where a fresh tensor is made; None makes it where ``source`` is, or on the CPU.
        dim: The dim that is joined or divided, from 0.
        in_place: Whether the engine may write to its input, when that is ``out``.

    Raises:
        ValueError: ``out`` has another shape, is on another device than ``source``, or has elements that share memory,
            as those of an expanded tensor do.
        TypeError: ``out`` has another dtype.
        RuntimeError: Gradients would be lost: an input or ``out`` requires grad while grad mode is on.
    """
    check_out(out, source, shape=shape, dtype=dtype)
    if device is None:
        device = torch.device("cpu") if source is None else source.device
    result = torch.empty(tuple(shape), dtype=dtype, device=device) if out is None else out
    view = result.movedim(dim, 0) if dim else result
    plain = view.is_contiguous() and not view.is_conj() and not view.is_neg()
    if plain and (source is None or (in_place and _same(result, source)) or not shares_memory(result, source)):
        return Target(flat=view.detach().view(-1), result=result)
    return Target(flat=torch.empty(result.numel(), dtype=dtype, device=result.device), result=result, view=view)


def prepare_late_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
    dim: int = 0,
) -> Target:
    """`prepare_out` for a result whose shape was learned from other ranks, which are in the call already.

    They count on this rank, so it takes part with a tensor of its own, and raises what is wrong with ``out`` when it
    has: the group goes on.
    """
    try:
        return prepare_out(out, shape, dtype, source, device=device, dim=dim)
    except (ValueError, TypeError, RuntimeError) as error:
        device = source.device if device is None and source is not None else device
        return replace(prepare_out(None, shape, dtype, device=device, dim=dim), refusal=error)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have their elements in the same places."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
