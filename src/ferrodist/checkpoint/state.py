"""The state of a save, in two steps: objects become their ``state_dict()``, then all becomes a tree and tensors by key.

In a state, an object stands for its ``state_dict()``. A module's tensors are its own, not copies. Wrappers of a module
(DDP, FSDP, ``torch.compile``) use the names of the wrapped module, so that a checkpoint fits all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch

from ferrodist.checkpoint.format.safetensors import dtype_name
from ferrodist.checkpoint.format.tree import (
    Node,
    PerRank,
    check_collisions,
    check_depth,
    encode_key,
    encode_leaf,
    path_text,
    tensor_key,
)
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.local_shards import flat_shard_of
from ferrodist.tensor.placement import Partial
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.torch_private.modules import compiled_module
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from ferrodist.tensor.spec import DTensorSpec


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and loads its state, as schedulers and data loaders do."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load the state."""


class SavedElsewhere:
    """Marks a replica of a tensor that another rank saves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def collect_state(value: Any, partials: PartialSums, path: tuple[object, ...] = ()) -> Any:
    """Replace the objects in a state by their states, and partial DTensors by copies.

    TypeError for a bare optimizer, ValueError if too deep.
    """
    check_depth(path)
    if isinstance(value, torch.optim.Optimizer):
        refuse_optimizer(path)
    if isinstance(value, PerRank):
        return PerRank(collect_state(value.value, partials, (*path, "own")), resize=value.resize)
    if isinstance(value, torch.nn.Module):
        value = _module_state_to_save(value)
    elif isinstance(value, Stateful) and not isinstance(value, type):
        return collect_state(value.state_dict(), partials, (*path, "state_dict()"))
    elif isinstance(value, DTensor):
        return partials.copy(value)
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: collect_state(each, partials, (*path, key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        members = [collect_state(each, partials, (*path, index)) for index, each in enumerate(value)]
        return members if isinstance(value, list) else tuple(members)
    return value


def refuse_optimizer(path: Sequence[object]) -> NoReturn:
    """Raise TypeError for an optimizer in a state."""
    raise TypeError(
        f"{path_text(path)} is an optimizer, which knows its parameters by numbers, and these are other ones when the"
        " model is sharded differently: use OptimizerState(model, optimizer) in its place"
    )


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's state dict, with its own tensors."""
    return dict(inner_module(module).state_dict(keep_vars=True))


def _module_state_to_save(module: torch.nn.Module) -> dict[str, Any]:
    """Return the same, with buffers marked if a wrapper says that another rank saves them."""
    state = module_state(module)
    if all(getattr(each, "saves_buffers", True) for each in unwrap_modules(module)):
        return state
    buffers = set(inner_module(module).buffers())
    return {
        key: SavedElsewhere(value) if isinstance(value, torch.Tensor) and value in buffers else value
        for key, value in state.items()
    }


def inner_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the innermost module, whose names count; wrappers return theirs from ``checkpoint_module()``."""
    return list(unwrap_modules(module))[-1]


def unwrap_modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and the modules that it wraps, from outside to inside."""
    while True:
        yield module
        wraps: Callable[[], torch.nn.Module] | None = getattr(module, "checkpoint_module", None)
        inner = wraps() if wraps is not None else compiled_module(module)
        if not isinstance(inner, torch.nn.Module):
            return
        module = inner


class PartialSums:
    """The partial DTensors of a state, as copies that have the reduced tensors' specs, and later their elements."""

    def __init__(self) -> None:
        self._sources: dict[torch.Tensor, DTensorSpec] = {}
        """By copy: the spec of the partial DTensor."""

    def copy(self, tensor: DTensor) -> DTensor:
        """Return a copy of a partial DTensor; DTensors without partial sums as they are."""
        spec = tensor._spec
        if not any(isinstance(placement, Partial) for placement in spec.placements):
            return tensor
        copy = DTensor._wrap(tensor._local.detach().clone(), spec.without_partial)
        self._sources[copy] = spec
        return copy

    def addend(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """This rank's mesh coordinate along the axes along which a tensor is yet to be reduced."""
        if (spec := self._sources.get(tensor)) is None:
            return ()
        return tuple(
            index for index, one in zip(spec.coordinate, spec.placements, strict=True) if isinstance(one, Partial)
        )

    def reduce(self) -> None:
        """Reduce all copies in place; all ranks of their meshes call this."""
        for copy, source in self._sources.items():
            assert isinstance(copy, DTensor)
            copy._local.copy_(redistribute_local(copy._local, source, copy._spec))
        self._sources.clear()


@dataclass
class Encoder:
    """Encodes a state as a node, and collects its tensors."""

    rank: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors by key; tied tensors are here once."""
    paths: dict[str, str] = field(default_factory=dict)
    """The path of each tensor in the state."""
    per_rank_keys: set[str] = field(default_factory=set)
    """The keys of tensors within a `PerRank`, which only this rank has."""
    unsaved: set[str] = field(default_factory=set)
    """The keys of tensors that another rank saves."""
    _keys_by_identity: dict[object, str] = field(default_factory=dict)
    _keep_alive: list[torch.Tensor] = field(default_factory=list)
    _in_per_rank: bool = False
    """True while a value within a `PerRank` is encoded."""

    def encode(self, value: Any, path: tuple[object, ...] = ()) -> Node:
        """Encode a value."""
        check_depth(path)
        tensor = value.tensor if isinstance(value, SavedElsewhere) else value
        if isinstance(tensor, torch.Tensor):
            key = self._add(tensor, path)
            if tensor is not value and not self._in_per_rank:
                self.unsaved.add(key)
            return {"tensor": key}
        if isinstance(value, np.ndarray):
            return {"array": self._add(self._tensor_from_array(value, path), path)}
        if isinstance(value, PerRank):
            return {"per_rank": {str(self.rank): self._encode_per_rank(value.value, path)}}
        if isinstance(value, Mapping) and not isinstance(value, Counter):
            return self._encode_mapping(value, path)
        if isinstance(value, (list, tuple)):
            members = [self.encode(each, (*path, index)) for index, each in enumerate(value)]
            mark = "size" if isinstance(value, torch.Size) else "tuple"
            return members if isinstance(value, list) else {mark: members}
        return encode_leaf(value, path)

    def _encode_per_rank(self, value: Any, path: tuple[object, ...]) -> Node:
        before, known, was_own = set(self.tensors), self._keys_by_identity, self._in_per_rank
        # Tensors here aren't tied to tensors outside: other ranks have other memory under this name.
        self._keys_by_identity, self._in_per_rank = {}, True
        try:
            node = self.encode(value, (*path, f"rank{self.rank}"))
        finally:
            self._keys_by_identity, self._in_per_rank = known, was_own
        self.per_rank_keys |= set(self.tensors) - before
        return node

    def _encode_mapping(self, value: Mapping[Any, Any], path: tuple[object, ...]) -> Node:
        keys = [encode_key(key, path) for key in value]
        nodes = [self.encode(each, (*path, key)) for key, each in value.items()]
        if all(isinstance(key, str) for key in keys):
            return {"dict": dict(zip(keys, nodes, strict=True))}
        check_collisions(value, path_text(path))
        return {"pairs": [list(pair) for pair in zip(keys, nodes, strict=True)]}

    def _tensor_from_array(self, array: np.ndarray[Any, Any], path: tuple[object, ...]) -> torch.Tensor:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{path_text(path)} is a masked array: save its data and its mask")
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
        try:
            return torch.from_numpy(native if native.flags.writeable else native.copy())
        except TypeError as error:
            raise TypeError(f"{path_text(path)} is an array of {array.dtype}, which checkpoints don't carry") from error

    def _add(self, tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        check_tensor(tensor, path)
        identity = tensor_identity(tensor)
        if (known := self._keys_by_identity.get(identity)) is not None:
            return known
        key = tensor_key(path)
        if key == "__metadata__":
            raise ValueError(f"{path_text(path)} is a tensor of a name that safetensors files need: rename it")
        if key in self.tensors:
            raise ValueError(
                f"two tensors would be named {key!r} in the files, that of {self.paths[key]} and that of"
                f" {path_text(path)}: rename one"
            )
        self._keys_by_identity[identity] = key
        self._keep_alive.append(tensor)  # an address identifies a tensor only during its lifetime
        self.tensors[key], self.paths[key] = tensor, path_text(path)
        return key


def tensor_identity(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that are the same memory."""
    local = getattr(tensor, "_local", None)
    plain = tensor if local is None else local
    if plain.is_nested or not plain.numel() or plain.layout is not torch.strided or plain.device.type == "meta":
        return id(tensor)
    layout = plain.data_ptr(), tuple(plain.shape), plain.stride(), plain.dtype, plain.is_conj(), plain.is_neg()
    return (*layout, getattr(tensor, "_spec", None), flat_shard_of(tensor))


def check_tensor(tensor: torch.Tensor, path: tuple[object, ...]) -> None:
    """Raise TypeError unless a tensor is dense, has a supported dtype and elements in memory."""
    where = path_text(path)
    try:
        dtype_name(tensor.dtype)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{where} has no shape yet: run the module once before it is saved")
    if tensor.is_nested:
        raise TypeError(f"{where} is a nested tensor, which has no single shape: save its components, tensor.unbind()")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a {tensor.layout} tensor: save to_dense() of it")
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor):
        raise TypeError(f"{where} is {with_article(type(tensor).__qualname__)}, made of other tensors: save these")
    if getattr(tensor, "_local", tensor).device.type == "meta":
        raise TypeError(f"{where} is on the meta device and has no elements: materialize it first")
