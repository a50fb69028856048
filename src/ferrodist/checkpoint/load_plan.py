"""The plan of a load: a saved tree is matched with the objects it is loaded into, which yields the boxes to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.checkpoint.format.tree import (
    PerRank,
    check_depth,
    decode_leaf,
    is_leaf_node,
    path_text,
    referenced_keys,
    split_node,
    tensor_key,
)
from ferrodist.checkpoint.optimizer_state import OptimizerState, empty_shard_like
from ferrodist.checkpoint.state import (
    Stateful,
    check_tensor,
    inner_module,
    module_state,
    refuse_optimizer,
    tensor_identity,
)
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.local_shards import LocalShard, flat_shard_of, local_shard
from ferrodist.tensor.spec import DTensorSpec, check_placements
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from ferrodist.checkpoint.format.manifest import Manifest
    from ferrodist.checkpoint.shard_metadata import ShardMetadata
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement

    Builder = Callable[[], Any]
    """Returns the loaded value of a node once all tensors are filled."""


_LOAD_AS_SAVED = "put None there to load it as it was saved"


class Placed:
    """Stands, in the ``into`` of a load, for a tensor that becomes a `DTensor`.

    Args:
        mesh: The device mesh.
        placements: The placement on each axis of the mesh; a single one for a mesh of one axis.
        dtype: The dtype to convert to; None keeps the saved one.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Placement | Sequence[Placement], *, dtype: torch.dtype | None = None
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.dtype = dtype


@dataclass
class LoadPlanner:
    """Matches a saved tree with the objects that are loaded."""

    manifest: Manifest
    rank: int
    world_size: int
    shards: ShardMetadata | None = None
    make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = lambda shape, dtype: torch.empty(
        shape, dtype=dtype, device="cpu"
    )
    targets: list[tuple[str, torch.Tensor, LocalShard]] = field(default_factory=list)
    """Keys of saved tensors, the tensors they fill, and this rank's shards of these."""
    used: set[str] = field(default_factory=set)
    """The keys of saved tensors that are loaded here."""
    missing: list[str] = field(default_factory=list)
    """The paths of wanted values that were not saved."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """The keys and paths of saved tensors that a module or optimizer here doesn't have."""
    _new_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors allocated here, by key."""

    def match(self, node: Any, into: Any, path: tuple[object, ...] = ()) -> Builder:
        """Match a node with ``into`` and return a builder of the loaded value."""
        check_depth(path)
        matcher: Callable[[Any, Any, tuple[object, ...]], Builder]
        match into:
            case torch.Tensor():
                matcher = self._add_tensor
            case Placed():
                matcher = self._match_placed
            case torch.nn.Module():
                matcher = self._match_module
            case OptimizerState():
                matcher = self._match_optimizer
            case PerRank():
                matcher = self._match_per_rank
            case torch.optim.Optimizer():
                refuse_optimizer(path)
            case Stateful():
                matcher = self._match_stateful
            case Mapping() if not isinstance(into, Counter) and (into or type(into) is not dict):
                matcher = self._match_mapping
            case list() | tuple() if not isinstance(into, torch.Size) and (into or type(into) not in (list, tuple)):
                matcher = self._match_sequence
            case _:  # also an empty dict, list or tuple: it asks for the saved value
                return self.decode(node, path)
        return matcher(node, into, path)

    def decode(self, node: Any, path: tuple[object, ...] = ()) -> Builder:
        """Return a builder of a node's full value, with full tensors."""
        if is_leaf_node(node):
            value = decode_leaf(node)
            return lambda: value
        if (members := _keys_and_nodes(node)) is not None:
            builders = {key: self.decode(each, (*path, key)) for key, each in members.items()}
            return lambda: {key: build() for key, build in builders.items()}
        mark, content = split_node(node)
        if mark in ("tensor", "array"):
            tensor = self._new_tensor(content, path)
            return tensor.numpy if mark == "array" else lambda: tensor
        if mark == "per_rank":
            return self._match_per_rank(node, PerRank(None), path, is_wanted=False)
        sequence = [self.decode(each, (*path, index)) for index, each in enumerate(content)]
        return lambda: _SEQUENCE_TYPES[mark]([build() for build in sequence])

    def _new_tensor(self, key: str, path: tuple[object, ...]) -> torch.Tensor:
        """Allocate a full tensor, or this rank's shard; once for tied tensors."""
        if key not in self._new_tensors:
            saved = self.manifest.tensors[key]
            spec = self.shards.tensor_specs.get(tensor_key(path)) if self.shards else None
            shape = saved.shape if spec is None else spec.shape_of(self.rank)
            made = self.make(shape, dtype_from_name(saved.dtype))
            self._new_tensors[key] = made
            self._add_target(key, made, path)
        return self._new_tensors[key]

    def _add_tensor(self, node: Any, into: torch.Tensor, path: tuple[object, ...]) -> Builder:
        key = self._key(node, path)
        check_tensor(into, path)
        self._add_target(key, into, path)
        return lambda: into

    def _key(self, node: Any, path: tuple[object, ...]) -> str:
        if not isinstance(node, dict) or not ({"tensor", "array"} & set(node)):
            raise DistCheckpointError(
                f"{path_text(path)} should be a tensor, but the saved value is not one: {_LOAD_AS_SAVED}"
            )
        key: str = node.get("tensor") or node["array"]
        return key

    def _add_target(self, key: str, tensor: torch.Tensor, path: tuple[object, ...]) -> None:
        """Have a tensor filled, if the saved one fits it."""
        into = self.shards.part(tensor_key(path), tensor, self.rank) if self.shards else local_shard(tensor)
        saved = self.manifest.tensors[key]
        if into.shape != saved.shape:
            raise DistCheckpointError(
                f"{path_text(path)} has shape {into.shape}, and was saved with shape {saved.shape}: load it into a"
                " tensor of that shape"
            )
        if not _is_safe_cast(dtype_from_name(saved.dtype), into.dtype):
            raise DistCheckpointError(
                f"{path_text(path)} is {into.dtype}, and was saved as torch.{saved.dtype}, which doesn't convert to it"
                " without losing more than precision: load it into a tensor of the saved dtype, and convert that"
            )
        self.used.add(key)
        self.targets.append((key, tensor, into))

    def _match_placed(self, node: Any, into: Placed, path: tuple[object, ...]) -> Builder:
        key = self._key(node, path)
        saved = self.manifest.tensors[key]
        dtype = into.dtype or dtype_from_name(saved.dtype)
        placements = check_placements(into.mesh, into.placements, saved.shape)
        layout = DTensorSpec.make(into.mesh, placements, saved.shape, dtype)
        made = DTensor._wrap(torch.empty(layout.local_shape, dtype=dtype, device="cpu"), layout)
        return self._add_tensor(node, made, path)

    def _match_per_rank(self, node: Any, into: PerRank, path: tuple[object, ...], *, is_wanted: bool = True) -> Builder:
        if not isinstance(node, dict) or "per_rank" not in node:
            raise DistCheckpointError(
                f"{path_text(path)} should be PerRank, but was not saved as one: load it into the value alone"
            )
        saved = node["per_rank"]
        if self.world_size == self.manifest.world_size:
            if str(self.rank) in saved:
                return self.match(saved[str(self.rank)], into.value, path)
            if is_wanted:
                self.missing.append(path_text(path))
            return lambda: into.value
        if into.resize is None and not is_wanted:
            by_rank = {int(rank): self.decode(each, (*path, rank)) for rank, each in saved.items()}
            return lambda: {rank: build() for rank, build in by_rank.items()}
        if into.resize is None:
            raise DistCheckpointError(
                f"{path_text(path)} was saved by {counted(len(saved), 'rank')}, each its own, and is loaded by"
                f" {self.world_size}: load it into PerRank(value, resize=function), which makes a rank's value of the"
                " saved ones, or leave it out of what is loaded"
            )
        builders = [self.decode(saved[rank], path) for rank in sorted(saved, key=int)]
        resize = into.resize

        def finish() -> Any:
            made = resize([build() for build in builders], self.rank, self.world_size)
            if not isinstance(into.value, Stateful):
                return made
            into.value.load_state_dict(made)
            return into.value

        return finish

    def _match_mapping(
        self, node: Any, into: Mapping[Any, Any], path: tuple[object, ...], first_names: Mapping[str, str] | None = None
    ) -> Builder:
        """Match a dict; ``first_names`` maps names of tied tensors to the first name of each."""
        saved = _keys_and_nodes(node)
        if saved is None:
            raise DistCheckpointError(
                f"{path_text(path)} should be a dict, but the saved value is not one: {_LOAD_AS_SAVED}"
            )
        builders: dict[Any, Builder] = {}
        for key, target in into.items():
            if key in saved:
                builders[key] = self.match(saved[key], target, (*path, key))
            elif isinstance(target, torch.Tensor) and _is_tied_and_saved(target, into, saved):
                builders[key] = _constant(target)
            elif (other := _tied_name(key, saved, first_names or {})) is not None:
                builders[key] = self.match(saved[other], target, (*path, key))
            else:
                self.missing.append(path_text((*path, key)))
                builders[key] = _constant(target)
        return lambda: {key: build() for key, build in builders.items()}

    def _note_unexpected(self, saved: Mapping[str, Any], present: Collection[str], path: tuple[object, ...]) -> None:
        """Record saved tensors that this rank doesn't have; another rank may."""
        for key, node in saved.items():
            if key not in present:
                self.unexpected.update(dict.fromkeys(referenced_keys(node), path_text((*path, key))))

    def _match_sequence(self, node: Any, into: Sequence[Any], path: tuple[object, ...]) -> Builder:
        kind = list if isinstance(into, list) else tuple
        saved = node if kind is list else node.get("tuple") if isinstance(node, dict) else None
        if not isinstance(saved, list) or len(saved) != len(into):
            found = counted(len(saved), "member") if isinstance(saved, list) else "something else"
            raise DistCheckpointError(
                f"{path_text(path)} should be {with_article(kind.__name__)} of {len(into)}, and was saved as {found}:"
                f" {_LOAD_AS_SAVED}"
            )
        builders = [self.match(each, into[index], (*path, index)) for index, each in enumerate(saved)]
        return lambda: kind([build() for build in builders])

    def _match_module(self, node: Any, into: torch.nn.Module, path: tuple[object, ...]) -> Builder:
        state = module_state(into)
        inner = inner_module(into)
        tensor_ids = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
        saved = _keys_and_nodes(node) or {}
        # Extra state and other values go through load_state_dict.
        others = [key for key, value in state.items() if key in saved and id(value) not in tensor_ids]
        # None for values that are loaded as saved.
        wanted = {
            key: value if isinstance(value, torch.Tensor) and not key.endswith("_extra_state") else None
            for key, value in state.items()
        }
        build = self._match_mapping(node, wanted, path, getattr(into, "first_names", None))
        self._note_unexpected(saved, state, path)

        def finish() -> torch.nn.Module:
            loaded = build()
            if others:
                inner.load_state_dict({key: loaded[key] for key in others}, strict=False)
            return into

        return finish

    def _match_stateful(self, node: Any, into: Stateful, path: tuple[object, ...]) -> Builder:
        build = self._match_saved(node, into.state_dict(), path)

        def finish() -> Stateful:
            into.load_state_dict(build())
            return into

        return finish

    def _match_saved(self, node: Any, current: Any, path: tuple[object, ...]) -> Builder:
        """Match all that a node has, with tensors sharded as they are now if they are."""
        if isinstance(current, Mapping) and isinstance(node, dict) and "dict" in node:
            members = node["dict"].items()
            builders = {key: self._match_saved(each, current.get(key), (*path, key)) for key, each in members}
            return lambda: {key: build() for key, build in builders.items()}
        if isinstance(current, torch.Tensor) and (isinstance(current, DTensor) or flat_shard_of(current) is not None):
            return self._add_tensor(node, empty_shard_like(current, current.dtype), path)
        return self.decode(node, path)

    def _shapes(self, nodes: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of the tensors among nodes."""
        keys = {name: node["tensor"] for name, node in nodes.items() if isinstance(node, dict) and "tensor" in node}
        tensors = self.manifest.tensors
        return {name: (tensors[key].shape, dtype_from_name(tensors[key].dtype)) for name, key in keys.items()}

    def _match_optimizer(self, node: Any, into: OptimizerState, path: tuple[object, ...]) -> Builder:
        try:
            entries, groups, names = _parse_optimizer_node(node)
        except (TypeError, KeyError, AttributeError):
            raise DistCheckpointError(
                f"{path_text(path)} should be an OptimizerState, but the saved value is not one: {_LOAD_AS_SAVED}"
            ) from None
        into.check_groups(names, path_text(path))
        shapes = {name: self._shapes(nodes) for name, nodes in entries.items()}
        made = into.targets(shapes)
        builders = {
            name: {
                key: self.match(each, made[name].get(key), (*path, "state", name, key))
                for key, each in entries.get(name, {}).items()
            }
            for name in made
        }
        self._note_unexpected(node["dict"]["state"]["dict"], made, (*path, "state"))
        build_groups = self.decode(groups, (*path, "param_groups"))

        def finish() -> OptimizerState:
            state = {name: {key: build() for key, build in each.items()} for name, each in builders.items() if each}
            into.load_state_dict({"state": state, "param_groups": build_groups()})
            return into

        return finish


_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}


def _parse_optimizer_node(node: Any) -> tuple[dict[str, dict[str, Any]], Any, list[list[str]]]:
    """Return the nodes of each parameter's state, the node of the groups, and the parameter names of each group.

    Raises TypeError, KeyError or AttributeError for the node of anything but an `OptimizerState`.
    """
    root = node["dict"]
    entries = {name: each["dict"] for name, each in root["state"]["dict"].items()}
    names = []
    for group in root["param_groups"]:
        params = group["dict"]["params"]
        # A dict if the ranks have parts of the model: a list would have to be the same on all; see `OptimizerState`.
        members = params["dict"] if isinstance(params, dict) else params
        names.append([str(name) for name in members])
    return entries, root["param_groups"], names


def _keys_and_nodes(node: Any) -> dict[Any, Any] | None:
    """Return the children of a dict's node; None for other nodes."""
    if isinstance(node, dict) and "dict" in node:
        return dict(node["dict"])
    if isinstance(node, dict) and "pairs" in node:
        return {decode_leaf(key): each for key, each in node["pairs"]}
    return None


def _is_tied_and_saved(tensor: torch.Tensor, into: Mapping[Any, Any], saved: Collection[Any]) -> bool:
    """Return whether a tensor is tied to one that was saved: other writers save tied tensors once, under any name."""
    identity = tensor_identity(tensor)
    others = (other for key, other in into.items() if key in saved and isinstance(other, torch.Tensor))
    return any(tensor_identity(other) == identity for other in others)


def _tied_name(key: Any, saved: Mapping[Any, Any], first_names: Mapping[str, str]) -> str | None:
    """Return another name of a tied tensor under which it was saved."""
    first = first_names.get(key)
    names = [name for name, other in first_names.items() if other == first] if first is not None else []
    return next((name for name in names if name in saved), None)


def _constant(value: Any) -> Builder:
    return lambda: value


def _is_safe_cast(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast loses only precision."""
    if saved is wanted:
        return True
    if torch.can_cast(torch.int8, saved) and torch.can_cast(saved, torch.int8):  # both are integers
        if wanted is torch.bool or not torch.can_cast(wanted, torch.int8):
            return torch.can_cast(saved, wanted)
        source_info, target_info = torch.iinfo(saved), torch.iinfo(wanted)
        return target_info.min <= source_info.min and source_info.max <= target_info.max
    return torch.can_cast(saved, wanted)
