"""Which engine carries a tensor: that depends on where the tensor is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ferrodist.collectives.device_streams import is_capturing
from ferrodist.collectives.operation import collectives_of
from ferrodist.collectives.staged import staged_collectives_of
from ferrodist.collectives.staged_messages import StagedMessages
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, DeviceMessages

__all__ = ["FALLBACK_VARIABLE", "engine_of", "messages_of"]

FALLBACK_VARIABLE = "FERRODIST_ENABLE_GPU_FALLBACK"
"""1 lets tensors on GPUs go through the host's memory in groups that have no engine for them; read at each call."""


def engine_of(group: Backend, device: torch.device) -> Collectives:
    """The engine of a group for tensors on a device.

    Raises:
        UnsupportedOpError: The group carries no tensors there; what to do is said.
    """
    if device.type == "cpu":
        _check_carries_cpu(group)
        return collectives_of(group)
    engine: Collectives | None = group.device_collectives
    if engine is not None:
        return engine
    _check_fallback(group, device)
    return staged_collectives_of(group)


def messages_of(group: Backend, device: torch.device) -> DeviceMessages | None:
    """What takes a group's tensors from rank to rank on a device; None on the CPU, where the group's own messages do.

    Raises:
        UnsupportedOpError: As for `engine_of`.
    """
    if device.type == "cpu":
        _check_carries_cpu(group)
        return None
    messages: DeviceMessages | None = group.device_messages
    if messages is not None:
        return messages
    _check_fallback(group, device)
    return StagedMessages(group)


def _check_carries_cpu(group: Backend) -> None:
    if not group.carries_cpu_tensors:
        raise UnsupportedOpError(
            f"group {group.name!r} carries tensors on GPUs alone: make it with backend 'hybrid', which carries both, or"
            " pass tensor.cuda()"
        )


def _check_fallback(group: Backend, device: torch.device) -> None:
    """Raise UnsupportedOpError unless tensors on a GPU may go through the host's memory in a group."""
    _check_carries_cpu(group)
    if os.environ.get(FALLBACK_VARIABLE) != "1":
        raise UnsupportedOpError(
            f"group {group.name!r} has no engine for tensors on {device}: make the group with backend 'hybrid' or"
            f" 'nccl'; or set {FALLBACK_VARIABLE}=1, on all ranks, for them to go through the host's memory; or pass"
            " tensor.cpu()"
        )
    if is_capturing():
        raise UnsupportedOpError(
            "a CUDA graph can't capture what goes through the host's memory: call it outside of the graph"
        )
