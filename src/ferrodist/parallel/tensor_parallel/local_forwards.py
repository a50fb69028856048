"""Forwards of layers that compute on local shards at once, without a dispatch of each of their operators.

Linear layers, and norms whose parameters are replicated, are most of the operators of a transformer. What they compute
is what the operators would compute on DTensors; other placements than the common ones, autocast and compilation go the
way of the operators.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ferrodist.parallel.tensor_parallel.forward_wrappers import ForwardWrapper
from ferrodist.parallel.tensor_parallel.local_calls import LOCAL_CALL, NotLocalError
from ferrodist.parallel.tensor_parallel.wrapped_forwards import map_nested
from ferrodist.tensor.dtensor import DTensor, wrap_local
from ferrodist.tensor.linear import linear
from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.compilers import is_compiling
from ferrodist.torch_private.modules import own_buffers, own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.mesh import DeviceMesh

_REPLICATED = (Replicate(),)


def make_local_forward(module: nn.Module) -> Callable[..., Any]:
    """A forward of the module on local shards if there is one, else its own."""
    kind = type(module)
    if "forward" in module.__dict__:
        return module.forward
    if kind.forward is nn.Linear.forward and isinstance(module, nn.Linear):
        return LinearForward(module)
    # Norms by their names, as most are classes of the models': they draw no random numbers, and few have state.
    is_norm = kind.__name__.endswith("Norm") and not own_buffers(module) and not own_modules(module)
    return NormForward(module) if is_norm else module.forward


def _is_sharded(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and not (isinstance(parameter, DTensor) and parameter.placements == _REPLICATED)


class NormForward(ForwardWrapper):
    """The forward of a norm on this rank's tensors, where inputs and parameters are replicated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self._has_state = False  # set by the first forward that assigns to an attribute
        self._writes: bool | None = None  # whether it writes to its inputs, as seen in the first forward
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        if is_compiling():
            return self._forward(*args, **kwargs)
        if (call := LOCAL_CALL.get()) is not None:
            result = self._compute_in_block(args, kwargs)
            if isinstance(result, torch.Tensor):
                call.share(result)
            return result
        module = self._forward.__self__
        parameters = own_parameters(module)
        if (
            kwargs
            or not args
            or self._has_state
            or self._writes
            or not all(isinstance(one, DTensor) and one.placements == _REPLICATED for one in args)
            or any(map(_is_sharded, parameters.values()))
            # Parametrizations and hooks that compute parameters, which would be DTensors.
            or own_modules(module)
            or own_buffers(module)
            or any(isinstance(one, DTensor) for one in module.__dict__.values())
        ):
            return self._forward(*args, **kwargs)
        if self._writes is None:  # local tensors, which are views, could not be written
            versions = [version_of(one) for one in args if not one.is_inference()]
            result = self._forward(*args)
            self._writes = versions != [version_of(one) for one in args if not one.is_inference()]
            return result
        result, has_changed = self._run([one.to_local() for one in args])
        if has_changed:
            self._has_state = True
            return self._forward(*args)
        mesh = args[0].mesh
        return map_nested(lambda one: _wrap(one, mesh), result)

    def _compute_in_block(self, args: Any, kwargs: Any) -> Any:
        """Compute the layer on plain tensors. NotLocalError: it can't."""
        are_tensors = all(isinstance(one, torch.Tensor) for one in args)
        if kwargs or not are_tensors or self._has_state or self._writes is not False:
            raise NotLocalError
        # Of views, for gradients are summed in the same order then as those of `to_local`.
        result, self._has_state = self._run([one.view_as(one) for one in args])
        if self._has_state:
            raise NotLocalError
        return result

    def _run(self, args: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """Run the module's code on another module with local parameters: this one may run in other threads too.

        Returns the result, and whether the code has changed the module's attributes.
        """
        module = self._forward.__self__
        own = {
            name: one.to_local() if isinstance(one, DTensor) else None for name, one in own_parameters(module).items()
        }
        local: nn.Module = object.__new__(type(module))
        before = {**module.__dict__, "_parameters": own}
        local.__dict__.update(before)
        result = type(module).forward(local, *args)
        after = local.__dict__
        has_changed = len(after) != len(before) or any(after.get(name) is not one for name, one in before.items())
        return result, has_changed


def _wrap(result: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(result, DTensor):
        return result
    return wrap_local(result, DTensorSpec.make(mesh, _REPLICATED, result.shape, result.dtype))


class LinearForward(ForwardWrapper):
    """The forward of a linear layer on local shards: replicated, or sharded by columns or by rows."""

    places_grads = True
    """Gradients of sharded outputs and inputs have the tensor's placement."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module.forward)
        functools.update_wrapper(self, self._forward)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear's forward has it
        """Compute the layer."""
        if is_compiling():
            return self._forward(input)  # type: ignore[no-any-return]
        module = self._forward.__self__
        if (call := LOCAL_CALL.get()) is not None:
            return call.linear(input, module.weight, module.bias)
        given: Any = (input, module.weight, module.bias)
        result: torch.Tensor | None = None
        if all(isinstance(one, DTensor) or one is None for one in given) and not torch.is_autocast_enabled("cpu"):
            result = linear(*given)
        return self._forward(input) if result is None else result
