"""The modules of a block with this rank's parameters and without wrappers, for forwards that record no gradients.

The wrappers of layers inside of a block decide where a layer's operators run, and record gradients between ranks. On
local tensors without gradients nothing is left to decide: the block's own code runs on modules of the same classes and
attributes that have local parameters, and layers sharded by rows sum their results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ferrodist.parallel.tensor_parallel.forward_wrappers import has_own_forward
from ferrodist.parallel.tensor_parallel.local_calls import NotLocalError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.linear_on_local import linear_on_local
from ferrodist.tensor.placement import Shard
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.mesh import DeviceMesh

_BY_ROWS = (Shard(1),)
_OWN = ("_parameters", "_modules", "forward")
"""The attributes of a local module that are not its original's."""


class _Part(NamedTuple):
    """A module of a block, its children by their names and places among the parts, and its row-parallel forward."""

    module: nn.Module
    children: dict[str, int | None]
    forward: Callable[[torch.Tensor], torch.Tensor] | None


class LocalModules:
    """The local modules of a block. NotLocalError: a forward inside is not its class's."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        self._parts: list[_Part] = []  # children before their parents, so the block is the last
        self._places: dict[nn.Module, int] = {}
        self._add(block, mesh)

    def _add(self, module: nn.Module, mesh: DeviceMesh) -> int:
        if module not in self._places:
            children = {
                name: None if child is None else self._add(child, mesh) for name, child in own_modules(module).items()
            }
            if not has_own_forward(module):
                raise NotLocalError
            weight: Any = own_parameters(module).get("weight")
            is_by_rows = isinstance(module, nn.Linear) and isinstance(weight, DTensor) and weight.placements == _BY_ROWS
            forward = _RowForward(module, mesh) if is_by_rows else None
            self._parts.append(_Part(module, children, forward))
            self._places[module] = len(self._parts) - 1
        return self._places[module]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block on plain tensors. Attributes that its code sets are set in the original modules."""
        made: list[nn.Module] = []
        for part in self._parts:
            local: nn.Module = object.__new__(type(part.module))
            state = local.__dict__
            state.update(part.module.__dict__)
            state.pop("forward", None)
            state["_parameters"] = {
                name: one._local if isinstance(one, DTensor) else one  # noqa: SLF001
                for name, one in own_parameters(part.module).items()
            }
            state["_modules"] = {name: None if at is None else made[at] for name, at in part.children.items()}
            if part.forward is not None:
                state["forward"] = part.forward
            made.append(local)
        block = made[-1]
        result = type(block).forward(block, *args, **kwargs)
        for part, local in zip(self._parts, made, strict=True):
            before = part.module.__dict__
            for name, value in local.__dict__.items():
                if before.get(name, before) is not value and name not in _OWN:
                    before[name] = value
        return result


class _RowForward:
    """The forward of a linear layer sharded by rows: this rank's part of the result, summed over the ranks."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._parameters, self._mesh = own_parameters(module), mesh

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear's forward has it
        """Compute the layer."""
        weight: Any = self._parameters["weight"]
        bias: Any = self._parameters.get("bias")
        return linear_on_local(input, weight, bias, self._mesh)
