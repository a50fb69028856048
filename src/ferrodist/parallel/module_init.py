"""Whether all ranks make the same thing of the same module.

Modules on the meta device get memory and values, one at a time.
"""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.arguments import elements_overlap
from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError, add_error_context
from ferrodist.torch_private.modules import own_buffers, own_parameters
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline


def compare_forms(
    lines: Sequence[str], group: Backend, deadline: Deadline, *, maker: str, module: str, refusal: str | None = None
) -> None:
    """Compare what ranks say about their modules with what rank 0 says; every rank of the group calls this.

    Each rank receives rank 0's list and then a sentence from each rank, so that lists don't travel from everyone to
    everyone.

    Args:
        lines: What this rank has, one thing a line, as "parameter 'weight' of shape ...".
        group: The group.
        deadline: For all of it.
        maker: What is made of the module, as "DDP".
        module: The module's class.
        refusal: Why it can't be made of this rank's module.

    Raises:
        CollectiveMismatchError: On every rank, naming the first difference. The group stays good.
        UnsupportedOpError: On every rank, with the first rank's refusal. The group stays good.
    """
    with add_error_context(
        lambda: f"Rank {group.rank} was giving {with_article(module)} to {maker}.",
        "Every rank of the group must make it, at the same place of its program.",
    ):
        expected = broadcast_object(list(lines), group=group, timeout=deadline.remaining())
        answer = [_first_difference(lines, expected, group.rank), refusal]
        answers = all_gather_object(answer, group=group, timeout=deadline.remaining())
    refused = {rank: reason for rank, (_, reason) in enumerate(answers) if reason is not None}
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


def _first_difference(mine: Sequence[str], expected: Sequence[str], rank: int) -> str | None:
    for own, other in zip_longest(mine, expected, fillvalue="nothing more"):
        if own != other:
            return f"rank {rank} has {own} where rank 0 has {other}"
    return None


def write_obstacle(tensor: torch.Tensor) -> str:
    """Why nothing can be written to a tensor; empty when it can."""
    if tensor.is_inference():
        return "was made under inference_mode"
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        with contextlib.suppress(RuntimeError):  # without memory of its own, as a DTensor: check_tensor refuses it
            if elements_overlap(tensor):
                return "has elements that share memory (expand, as_strided)"
    return ""


def find_unsynchronised(module: torch.nn.Module, group: Backend) -> str | None:
    """A sentence about the first `torch.nn.SyncBatchNorm` that would be a plain batch norm here; None when none would.

    It synchronises over groups of torch's, where there are some, and on devices that are no CPUs.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and group.world_size > 1 and not _is_synchronised(layer):
            return (
                f"{name or 'the module'!r} is a torch.nn.SyncBatchNorm, which would normalise by each rank's batch"
                " alone (it synchronises on GPUs, and over groups of torch.distributed): call"
                " ferrodist.convert_sync_batchnorm(module) before"
            )
    return None


def _is_synchronised(layer: torch.nn.SyncBatchNorm) -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    tensors = [*layer.parameters(), *layer.buffers()]
    if any(tensor.device.type == "cpu" for tensor in tensors):
        return False
    return bool(distributed.get_world_size(layer.process_group) > 1)


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """Whether some of a module's own parameters and buffers are on the meta device."""
    tensors = (*own_parameters(module).values(), *own_buffers(module).values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def find_initialiser(
    name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None
) -> Callable[[torch.nn.Module], object]:
    """What gives a module's own parameters and buffers their values: ``init``, or its ``reset_parameters``.

    Raises:
        UnsupportedOpError: There is none.
    """
    give = init if init is not None else getattr(type(module), "reset_parameters", None)
    if give is None:
        raise UnsupportedOpError(
            f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(): pass"
            " init=, a function that gives such a module's parameters and buffers their values"
        )
    return give


def materialise(
    name: str,
    module: torch.nn.Module,
    init: Callable[[torch.nn.Module], object] | None,
    device: torch.device | str = "cpu",
) -> None:
    """Give a module's own parameters and buffers that are on the meta device memory and values; others keep theirs.

    Args:
        name: The module's.
        module: It is changed in place.
        init: Gives its own parameters and buffers their values; None calls its ``reset_parameters``.
        device: Where they get memory.

    Raises:
        UnsupportedOpError: Nothing gives it values.
    """
    if not has_meta_tensors(module):
        return
    give = find_initialiser(name, module, init)
    tensors = {**own_parameters(module), **own_buffers(module)}
    kept = {key: tensor.clone() for key, tensor in tensors.items() if tensor is not None and not tensor.is_meta}
    for key, tensor in tensors.items():
        if tensor is None or not tensor.is_meta:
            continue
        real = torch.empty_like(tensor, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            setattr(module, key, torch.nn.Parameter(real, requires_grad=tensor.requires_grad))
        else:
            own_buffers(module)[key] = real
    give(module)
    for key, values in kept.items():
        getattr(module, key).copy_(values)
