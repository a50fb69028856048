"""The state of a block's forward on local tensors, which its layers find by `LOCAL_CALL`; see `local_blocks`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.linear_on_local import linear_on_local, share_input
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.torch_private.autograd import version_of

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh

_LEAST_DIMS = 2


class NotLocalError(Exception):
    """A block can't compute on local tensors."""


class LocalCall:
    """A forward of a block in which tensors are plain: replicated, or this rank's features of sharded ones.

    An error in a trial is not the program's.
    """

    def __init__(self, mesh: DeviceMesh, *, is_trial: bool) -> None:
        self._mesh, self.is_trial = mesh, is_trial
        self._shared: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def linear(self, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A linear layer; NotLocalError: another kind of input or parameters than a block's."""
        if (
            not isinstance(weight, DTensor)
            or isinstance(tensor, DTensor)
            or tensor.dim() < _LEAST_DIMS
            or tensor.dtype is not weight.dtype
            or not (bias is None or isinstance(bias, DTensor))
        ):
            raise NotLocalError
        (placed,) = weight.placements
        if isinstance(placed, Replicate):
            return linear_on_local(tensor, weight, bias, None)
        assert isinstance(placed, Shard), "parameters are never partial"
        if placed.dim == 0:
            return linear_on_local(self.share(tensor), weight, bias, None)
        return linear_on_local(tensor, weight, bias, self._mesh)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """`share_input`, once for all layers that take the tensor: the sum of its gradients is one allreduce.

        Norms call this for their results. Backward makes the sums in the reversed order of these calls, and on
        DTensors in that of the norms: both are the same messages then, if a rank computes on DTensors alone.
        """
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        version = version_of(tensor)
        found, found_version, shared = self._shared.get(id(tensor), (None, 0, tensor))
        if found is None or found_version != version:
            shared = share_input(tensor, self._mesh)
            self._shared[id(tensor)] = (tensor, version, shared)
        return shared


LOCAL_CALL: ContextVar[LocalCall | None] = ContextVar("ferrodist_local_call", default=None)
"""The forward of a block on local tensors that this thread is in, if any."""
