"""Selects the engine of a call by the device of its tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ferrodist.backends.cuda_streams import is_capturing
from ferrodist.collectives.engines.gpu_staged import HostStagedP2P, host_staged_engine_of
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import CollectiveEngine, DeviceP2P

FALLBACK_VARIABLE = "FERRODIST_ENABLE_GPU_FALLBACK"
"""The environment variable that, set to 1, lets tensors on GPUs be staged through the host in groups without an engine
for them; read at each call."""


def engine_of(group: Backend, device: torch.device) -> CollectiveEngine:
    """The engine of a group for tensors on a device; raises UnsupportedOpError if there is none, or in a CUDA graph."""
    if device.type == "cpu":
        return host_engine_of(group)
    engine = group.engine(device.type)
    _check_gpu(group, device, has_engine=engine is not None)
    return host_staged_engine_of(group) if engine is None else engine


def device_p2p_of(group: Backend, device: torch.device) -> DeviceP2P | None:
    """The point-to-point engine of a group for a GPU; None on the CPU. Raises as `engine_of`."""
    if device.type == "cpu":
        return None
    messages = group.p2p(device.type)
    _check_gpu(group, device, has_engine=messages is not None)
    return HostStagedP2P(group) if messages is None else messages


def _check_gpu(group: Backend, device: torch.device, *, has_engine: bool) -> None:
    """Raise UnsupportedOpError unless the group has an engine for a GPU, or staging through the host is enabled."""
    if not has_engine and os.environ.get(FALLBACK_VARIABLE) != "1":
        raise UnsupportedOpError(
            f"group {group.name!r} has no engine for tensors on {device}: make the group with backend 'hybrid' or"
            f" 'nccl'; or set {FALLBACK_VARIABLE}=1, on all ranks, for them to go through the host's memory; or pass"
            " tensor.cpu()"
        )
    if is_capturing():
        raise UnsupportedOpError(
            f"a collective or message on {device} inside the capture of a CUDA graph: ferrodist compares calls and"
            " watches deadlines on the host, which a replayed graph would pass by. Call it outside of the graph."
        )
