"""Key-value caches of transformers models in blocks that compute on local tensors.

Outside of such a block the keys and values of a cache, of shape (batch, heads, tokens, features), are DTensors sharded
by heads. Inside, the block's code gets this rank's heads, by a `LocalCache` in place of the cache. Only caches of
transformers that grow by concatenation are known; their class is found without importing transformers.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, cast

import torch

from ferrodist.parallel.tensor_parallel.local_calls import NotLocalError
from ferrodist.tensor.dtensor import DTensor, wrap_local
from ferrodist.tensor.placement import Shard
from ferrodist.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.mesh import DeviceMesh

_BY_HEADS = (Shard(1),)
_HEADS = 1
_CACHED = ("keys", "values")


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache that `LocalCache` knows."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None or type(value) is not module.DynamicCache or getattr(value, "offloading", False):
        return False
    known = (module.DynamicLayer, module.DynamicSlidingWindowLayer)
    return all(type(layer) in known for layer in value.layers)


def copy_cache(cache: Any) -> Any:
    """Another cache with the same values; to update one does not change the other.

    Its tensors are detached, for a trial that has it waits for the next forward, and must not hold a graph until then.
    """
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name in _CACHED if layer.is_initialized else ():
            setattr(layer, name, getattr(layer, name).detach())
    return made


def cached_tensors(cache: Any) -> list[torch.Tensor]:
    """The keys and values of all layers that have some."""
    return [getattr(layer, name) for layer in cache.layers if layer.is_initialized for name in _CACHED]


def map_caches(function: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a forward with each cache replaced."""
    replaced = tuple([function(one) if is_cache(one) else one for one in args])
    return replaced, {name: function(one) if is_cache(one) else one for name, one in kwargs.items()}


class LocalCache:
    """A cache as a block's code sees it: it adds keys and values of this rank's heads, and gets back those."""

    def __init__(self, cache: Any, mesh: DeviceMesh) -> None:
        self._cache, self._mesh = cache, mesh
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._num_layers = len(cache.layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_index: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values to a layer, and return all of them. NotLocalError: its heads have no equal shards."""
        layers = self._cache.layers
        if layer_index < len(layers):
            layer = layers[layer_index]
            self._before.append((layer, dict(layer.__dict__)))
            if layer.is_initialized:
                for name in _CACHED:
                    setattr(layer, name, self._localize(getattr(layer, name)))
        try:
            found: tuple[torch.Tensor, torch.Tensor] = self._cache.update(keys, values, layer_index, *args, **kwargs)
        finally:
            if layer_index < len(layers) and layers[layer_index].is_initialized:
                for name in _CACHED:
                    setattr(layers[layer_index], name, self._distribute(getattr(layers[layer_index], name)))
        return found

    def undo(self) -> None:
        """Undo all updates."""
        for layer, attributes in reversed(self._before):
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
        del self._cache.layers[self._num_layers :]

    def _localize(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            if tensor.numel():
                raise NotLocalError
            return tensor
        # Gradients that go on to a former forward are not tried.
        goes_on = tensor.requires_grad and torch.is_grad_enabled()
        if tensor.placements != _BY_HEADS or tensor.shape[_HEADS] % self._mesh.size or goes_on:
            raise NotLocalError
        return tensor.to_local()

    def _distribute(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.dim() <= _HEADS:
            return tensor
        shape = list(tensor.shape)
        shape[_HEADS] *= self._mesh.size
        return cast("torch.Tensor", wrap_local(tensor, DTensorSpec.make(self._mesh, _BY_HEADS, shape, tensor.dtype)))
