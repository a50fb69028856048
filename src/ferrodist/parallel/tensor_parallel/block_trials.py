"""Trials of a block on local tensors, for `LocalBlock`: which there were, and what they compare."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ferrodist.parallel.tensor_parallel.local_caches import cached_tensors, is_cache
from ferrodist.parallel.tensor_parallel.local_calls import NotLocalError
from ferrodist.parallel.tensor_parallel.wrapped_forwards import find_dtensors
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.trial_values import random_like
from ferrodist.torch_private.autograd import accumulate_grad_type
from ferrodist.torch_private.modes import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIMPLE_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""The types of arguments and results that are compared by value."""

_LEAST_TRIALS = 2
"""The number of shapes of inputs with which a kind of forward is tried, even if they are about as large."""

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_REFUSED_METHODS = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__),
    *(torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook),
}


class Kind(NamedTuple):
    """A kind of forwards that all run in the same way: what decides the code's path, but for sizes."""

    settings: tuple[bool, ...]
    arguments: tuple[Any, ...]


class Trials:
    """The sizes of inputs with which a kind of forwards was tried."""

    def __init__(self) -> None:
        self.has_failed = False
        self.wanted: set[tuple[torch.Size, ...]] = set()
        """The sizes of trials that wait for the other ranks."""
        self.sizes: set[tuple[torch.Size, ...]] = set()
        self._magnitudes: set[tuple[int, ...]] = set()

    def has_seen(self, sizes: tuple[torch.Size, ...]) -> bool:
        """Return whether inputs of these sizes need no trial."""
        is_new = len(self.sizes) < _LEAST_TRIALS and sizes not in self.sizes
        return not is_new and _magnitudes(sizes) in self._magnitudes

    def add(self, sizes: tuple[torch.Size, ...]) -> None:
        """Add the sizes of a trial that succeeded."""
        self.sizes.add(sizes)
        self._magnitudes.add(_magnitudes(sizes))


def _magnitudes(sizes: tuple[torch.Size, ...]) -> tuple[int, ...]:
    """For each dim the number of bits of its size."""
    return tuple([dim.bit_length() for size in sizes for dim in size])


class _RefuseOperators(DispatchMode):  # type: ignore[misc]
    """A mode in which operators that read values of tensors, as ``item``, raise NotLocalError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _READS.isdisjoint(func.tags):
            raise NotLocalError
        return func(*args, **(kwargs or {}))


class _RefuseFunctions(TorchFunctionMode):
    """A mode in which the methods of `_REFUSED_METHODS` raise NotLocalError, unless a collective calls them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED_METHODS and not sys._getframe(1).f_globals.get("__name__", "").startswith("ferrodist."):  # noqa: SLF001
            raise NotLocalError
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refuse_reads() -> Iterator[None]:
    """A block in which code may neither read values of tensors nor hook their gradients: NotLocalError.

    With other values the code could take another path, and hooks would see this rank's part of a gradient.
    """
    with _RefuseOperators(), _RefuseFunctions():
        yield


def random_plain(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor like a plain one of floats or truth values, the same for a seed; others are returned as they are.

    The values of the first forwards may hide a difference, as a mask does that hides nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    if tensor.is_floating_point() and not tensor.requires_grad:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
    if tensor.dtype is torch.bool:
        made = torch.randint(2, tensor.shape, generator=generator, dtype=torch.uint8).bool()
        made[..., :1] = True  # a row of a mask without any gives NaN
        return made
    return tensor


def structure_of(result: Any) -> Any:
    """A result but for the values of its tensors. NotLocalError: it has objects of other types."""
    if isinstance(result, torch.Tensor):
        return (type(result), result.dtype, result.shape)
    if type(result) in SIMPLE_TYPES:
        return (type(result), result)
    if isinstance(result, Mapping):
        return (type(result), *[(name, structure_of(one)) for name, one in result.items()])
    if isinstance(result, list | tuple):
        return (type(result), *map(structure_of, result))
    raise NotLocalError


def values_and_grads(result: Any, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors of a result, and the gradients of inputs by random gradients of these."""
    results = find_dtensors(result)
    roots = [one for one in results if one.requires_grad]
    leaves = [one for one in inputs if one.requires_grad]
    if not roots or not torch.is_grad_enabled():
        return list(results)
    if not _find_graph_leaves(roots) <= set(map(id, leaves)):
        raise NotLocalError  # the block does not own one, so the ranks' parts of its gradient would not be summed
    cotangents = [random_like(one.detach(), 1000 + number) for number, one in enumerate(roots)]
    return [*results, *torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)]


def find_cached(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The keys and values in the caches among the arguments of a forward."""
    return [tensor for one in [*args, *kwargs.values()] if is_cache(one) for tensor in cached_tensors(one)]


def are_equal(one: Any, other: Any) -> bool:
    """Return whether DTensors have the same placements and local values, or other objects are the same."""
    if {type(one), type(other)} != {DTensor}:
        return one is other
    return one.placements == other.placements and torch.equal(one.detach().to_local(), other.detach().to_local())


def share_memory(result: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a result is the memory of an input or of another result: a write to one would change the other."""
    results = find_dtensors(result)
    own, taken = _memories(results), _memories(inputs)
    return len(set(own)) < len(own) or not set(own).isdisjoint(taken)


def _memories(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The addresses of the memory of DTensors that have elements."""
    locals_ = [one.to_local() for one in tensors if isinstance(one, DTensor)]
    return [one.untyped_storage().data_ptr() for one in locals_ if one.numel()]


def _find_graph_leaves(roots: Sequence[torch.Tensor]) -> set[int]:
    """The ids of the tensors that a backward from these would give gradients."""
    queue: list[Any] = [one.grad_fn or get_gradient_edge(one).node for one in roots]
    seen, found = set(queue), set()
    while queue:
        node = queue.pop()
        if isinstance(node, accumulate_grad_type):
            found.add(id(node.variable))
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        queue.extend(following)
    return found


def generator_states() -> tuple[Any, ...]:
    """The states of the generators that code uses if it is given none."""
    numbers = np.random.get_state(legacy=False)["state"]
    return (torch.get_rng_state().tolist(), random.getstate(), numbers["key"].tolist(), numbers["pos"])
