"""Which engine carries a tensor: that depends on where the tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.collectives.operation import collectives_of
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, DeviceMessages

__all__ = ["engine_of", "messages_of"]


def engine_of(group: Backend, device: torch.device) -> Collectives:
    """The engine of a group for tensors on a device.

    Raises:
        UnsupportedOpError: The group carries no tensors there; what to do is said.
    """
    if device.type == "cpu":
        _check_carries_cpu(group)
        return collectives_of(group)
    engine: Collectives | None = group.device_collectives
    if engine is None:
        raise _uncarried(group, device)
    return engine


def messages_of(group: Backend, device: torch.device) -> DeviceMessages | None:
    """What takes a group's tensors from rank to rank on a device; None on the CPU, where the group's own messages do.

    Raises:
        UnsupportedOpError: As for `engine_of`.
    """
    if device.type == "cpu":
        _check_carries_cpu(group)
        return None
    messages: DeviceMessages | None = group.device_messages
    if messages is None:
        raise _uncarried(group, device)
    return messages


def _check_carries_cpu(group: Backend) -> None:
    if not group.carries_cpu_tensors:
        raise UnsupportedOpError(
            f"group {group.name!r} carries tensors on GPUs alone: make it with backend 'hybrid', which carries both, or"
            " pass tensor.cuda()"
        )


def _uncarried(group: Backend, device: torch.device) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"group {group.name!r} has nothing that carries tensors on {device}: make the group with backend 'hybrid' or"
        " 'nccl', or pass tensor.cpu()"
    )
