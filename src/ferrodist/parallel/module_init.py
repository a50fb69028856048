"""Modules that are about to be wrapped: compared between ranks, checked, and materialised from the meta device."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ferrodist.collectives.arguments import elements_overlap
from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError, add_error_context
from ferrodist.torch_private.modules import own_buffers, own_parameters
from ferrodist.transformers_models import find_transformers_initialiser
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

    Initialiser: TypeAlias = Callable[[torch.nn.Module], object]


def verify_across_ranks(
    lines: Sequence[str],
    group: Backend,
    deadline: Deadline,
    *,
    maker: str,
    module: str,
    refusal: str | None = None,
    failure: Exception | None = None,
) -> None:
    """Compare the ranks' descriptions of their modules with rank 0's; every rank of the group calls this.

    Each rank receives rank 0's lines (one for an item) and then a sentence from each rank. All raise
    CollectiveMismatchError at the first difference, or UnsupportedOpError with the first rank's ``refusal`` or
    ``failure``, which the rank itself raises as it is. The group stays usable.
    """
    with add_error_context(
        lambda: f"Rank {group.rank} was giving {with_article(module)} to {maker}.",
        "Every rank of the group must make it, at the same point of its program.",
    ):
        expected = broadcast_object(list(lines), group=group, timeout=deadline.remaining())
        pairs = zip_longest(lines, expected, fillvalue="nothing more")
        found = (f"rank {group.rank} has {own} where rank 0 has {other}" for own, other in pairs if own != other)
        answer = [next(found, None), refusal if failure is None else str(failure)]
        answers = all_gather_object(answer, group=group, timeout=deadline.remaining())
    refused = {rank: reason for rank, (_, reason) in enumerate(answers) if reason is not None}
    if failure is not None:
        raise failure from failure.__cause__
    if refused:
        rank, reason = next(iter(refused.items()))
        raise UnsupportedOpError(f"{maker} can't take the module of rank {rank}: {reason}", ranks=tuple(refused))
    differing = {rank: difference for rank, (difference, _) in enumerate(answers) if difference is not None}
    if differing:
        raise CollectiveMismatchError(
            f"the ranks of group {group.name!r} gave {maker} different modules: {next(iter(differing.values()))}. Build"
            " the same module, with the same options, on every rank.",
            ranks=tuple(differing),
        )


def describe(name: str, tensor: torch.Tensor) -> str:
    """A line about a parameter or buffer for `verify_across_ranks`: name, shape, dtype, layout and type of device.

    The meta device is left out, since some wrappers take modules that are there on some ranks only.
    """
    if is_lazy(tensor):
        return f"{name!r} (lazy)"
    if tensor.is_nested:  # no shape; refused later
        return f"{name!r} (nested)"
    layout = "" if tensor.layout is torch.strided else f" and {tensor.layout}"
    device = "" if tensor.device.type in {"cpu", "meta"} else f" on {tensor.device.type}"
    return f"{name!r} of shape {tuple(tensor.shape)} and {tensor.dtype}{layout}{device}"


def describe_tensors(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    buffers: Iterable[tuple[str, torch.Tensor]],
    describe_one: Callable[[str, torch.Tensor], str],
) -> list[str]:
    """The lines about parameters and buffers for `verify_across_ranks`."""
    lines = [f"{'' if one.requires_grad else 'frozen '}parameter {describe_one(name, one)}" for name, one in parameters]
    return lines + [f"buffer {describe_one(name, one)}" for name, one in buffers]


def write_obstacle(tensor: torch.Tensor) -> str:
    """The reason why nothing can be written to a tensor, or an empty string."""
    if tensor.is_inference():
        return "was made under inference_mode"
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        with contextlib.suppress(RuntimeError):  # no memory of its own, such as a DTensor, which check_tensor refuses
            if elements_overlap(tensor):
                return "has elements that share memory (expand, as_strided)"
    return ""


def find_unsynchronised_batch_norm(module: torch.nn.Module, group: Backend) -> str | None:
    """A sentence about the first `torch.nn.SyncBatchNorm` that wouldn't synchronise over this group, or None."""
    distributed = torch.distributed
    has_torch_group = distributed.is_available() and distributed.is_initialized()
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.SyncBatchNorm) or group.world_size == 1:
            continue
        is_on_gpu = all(tensor.device.type != "cpu" for tensor in (*layer.parameters(), *layer.buffers()))
        if not (has_torch_group and is_on_gpu and distributed.get_world_size(layer.process_group) > 1):
            return (
                f"{name or 'the module'!r} is a torch.nn.SyncBatchNorm, which would normalise by each rank's batch"
                " alone (it synchronises on GPUs, and over groups of torch.distributed): call"
                " ferrodist.convert_sync_batchnorm(module) before"
            )
    return None


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """True if some of a module's own parameters and buffers are on the meta device."""
    tensors = (*own_parameters(module).values(), *own_buffers(module).values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


class LeaveEmpty:
    """The initialiser that ``init="empty"`` stands for: parameters are left out, since they are loaded later.

    A module that has buffers on the meta device too is initialised whole, by ``other``: buffers may be in no file.
    """

    def __init__(self, other: Initialiser | None) -> None:
        self.other = other

    def __call__(self, module: torch.nn.Module) -> None:
        """Do nothing; `materialise` calls the other one."""


def resolve_initialiser(init: object, module: torch.nn.Module) -> Initialiser | None:
    """The function that an argument ``init`` stands for; None is that of each module. TypeError, ValueError."""
    if init is None:
        return find_transformers_initialiser(module)
    if isinstance(init, str):
        if init != "empty":
            raise ValueError(f'init must be a function of a module, "empty" or None, not {init!r}')
        return LeaveEmpty(find_transformers_initialiser(module))
    if not callable(init):
        raise TypeError(f'init must be a function of a module, "empty" or None, not {type(init).__name__}')
    found: Initialiser = init
    return found


def empty_value(dtype: torch.dtype) -> float:
    """The elements of parameters that are not loaded yet: NaN, so that none is used before; 0 in dtypes without it."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def _has_meta_buffers(module: torch.nn.Module) -> bool:
    return any(buffer is not None and buffer.is_meta for buffer in own_buffers(module).values())


def find_initialiser(name: str, module: torch.nn.Module, init: Initialiser | None) -> Initialiser:
    """The function that initialises a module's own tensors: ``init``, or its ``reset_parameters``."""
    if isinstance(init, LeaveEmpty) and not _has_meta_buffers(module):
        return init
    other = init.other if isinstance(init, LeaveEmpty) else init
    initialise = other if other is not None else getattr(type(module), "reset_parameters", None)
    if initialise is None:
        raise UnsupportedOpError(
            f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(): pass"
            " init=, a function that initialises such a module's parameters and buffers"
        )
    return initialise


def materialise(
    name: str, module: torch.nn.Module, init: Initialiser | None, device: torch.device | str = "cpu"
) -> None:
    """Allocate and initialise a module's own tensors that are on the meta device; others keep their values.

    `LeaveEmpty` leaves a module on the meta device that has parameters there alone.
    """
    if not has_meta_tensors(module) or (isinstance(init, LeaveEmpty) and not _has_meta_buffers(module)):
        return
    initialise = find_initialiser(name, module, init)
    tensors = {**own_parameters(module), **own_buffers(module)}
    existing = {key: tensor.clone() for key, tensor in tensors.items() if tensor is not None and not tensor.is_meta}
    for key, tensor in tensors.items():
        if tensor is None or not tensor.is_meta:
            continue
        real = torch.empty_like(tensor, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            setattr(module, key, torch.nn.Parameter(real, requires_grad=tensor.requires_grad))
        else:
            own_buffers(module)[key] = real
    initialise(module)
    for key, values in existing.items():
        getattr(module, key).copy_(values)
