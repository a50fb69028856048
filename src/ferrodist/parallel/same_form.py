"""Whether all ranks make the same thing of the same module."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.collectives.views import elements_overlap
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

__all__ = ["compare_forms", "find_unsynchronised", "write_obstacle"]


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
    with explain_errors(
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
