"""An optimizer's state dict, full or sharded, by parameter names.

A tensor of the shape of its parameter's shard is sharded as the parameter is, such as a momentum; all others are equal
on all ranks, such as a number of steps. For a parameter without dims, which one rank has alone, shapes don't tell: the
same entry of the optimizer's other parameters decides. A full state lists the sharded entries (``divided``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ferrodist.collectives.all_gather import all_gather_with_sizes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError
from ferrodist.parallel.fsdp.dtensor_params import full_tensor
from ferrodist.parallel.fsdp.state_dict import check_shard_identity, shard_identity
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_param import FlatParameters

    Locations: TypeAlias = Mapping[torch.Tensor, tuple[str, FlatParameters, int]]


class OptimizerStateDict:
    """Full and sharded state dicts of optimizers of a model's shards; `FSDP` explains the methods."""

    def __init__(self, flats: Sequence[FlatParameters], axes: ShardAxes) -> None:
        self._flats, self._axes = flats, axes

    @torch.no_grad()
    def full(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather an optimizer's full state; raises, the same on every rank, unless all have the same entries."""
        locations = self._locate(optimizer)
        kinds = [
            (name, list(optimizer.state[parameter]), _divided_keys(optimizer, parameter))
            for parameter, (name, *_) in locations.items()
            if parameter in optimizer.state
        ]
        digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
        group = self._axes.world
        with self._axes.in_collective("collecting full_optimizer_state_dict()"):
            digests = all_gather_object(digest, group=group)
        differing = tuple(rank for rank, other in enumerate(digests) if other != digests[0])
        if differing:
            raise CollectiveMismatchError(
                f"the optimizers of the ranks of group {group.name!r} have state of other parameters or kinds than rank"
                " 0's: make the same optimizer, and step it as often, on every rank",
                ranks=differing,
            )
        state: dict[str, dict[str, Any]] = {}
        divided: dict[str, list[str]] = {}
        for parameter, (name, flat, index) in locations.items():
            if parameter in optimizer.state:
                keys = divided[name] = _divided_keys(optimizer, parameter)
                state[name] = {
                    key: self._gather_full(value, flat, index) if key in keys else _copy(value)
                    for key, value in optimizer.state[parameter].items()
                }
        return {"state": state, "divided": divided, "param_groups": _named_groups(optimizer, locations)}

    @torch.no_grad()
    def load_full(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full state that all ranks have."""
        locations = self._locate(optimizer)
        with self._axes.in_collective("in load_full_optimizer_state_dict()"):
            problems = all_gather_object(_find_mismatch(optimizer, locations, state), group=self._axes.world)
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ValueError(
                    f"the optimizer state of rank {rank} does not fit the optimizer: {problem}. Nothing was loaded."
                )
        local_state: dict[str, dict[str, Any]] = {}
        for name, flat, index in locations.values():
            entries = state["state"].get(name)
            if entries is None:
                continue
            divided = state["divided"][name]
            local_state[name] = {
                key: flat.shard_of(index, flat.slice_local(index, value)) if key in divided else value
                for key, value in entries.items()
            }
        _load(optimizer, locations, {"state": local_state, "param_groups": state["param_groups"]})

    @torch.no_grad()
    def sharded(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Copy this rank's shard of an optimizer's state."""
        locations = self._locate(optimizer)
        return {
            **shard_identity(self._axes, self._flats),
            "state": {
                name: {key: _copy(value) for key, value in optimizer.state[parameter].items()}
                for parameter, (name, *_) in locations.items()
                if parameter in optimizer.state
            },
            "param_groups": _named_groups(optimizer, locations),
        }

    def load_sharded(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's shard of an optimizer's state."""
        check_shard_identity(state, shard_identity(self._axes, self._flats), "optimizer")
        locations = self._locate(optimizer)
        if problem := _find_form_mismatch(optimizer, locations, state):
            raise ValueError(f"the optimizer state does not fit the optimizer: {problem}. Nothing was loaded.")
        for parameter, (name, *_) in locations.items():
            for key, value in state["state"].get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"{key!r} of {name!r} has shape {tuple(value.shape)}, and this rank's shard"
                        f" {tuple(parameter.shape)}: it was sharded in another way. Nothing was loaded."
                    )
        _load(optimizer, locations, state)

    def _locate(self, optimizer: torch.optim.Optimizer) -> Locations:
        """The name, flat parameters and index of each of the optimizer's parameters, in the order of its groups."""
        known = {
            shard: (name, flat, index)
            for flat in self._flats
            for index, (name, shard) in enumerate(zip(flat.names, flat.parameters, strict=True))
        }
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not of this FSDP:"
                        " make it with fsdp.parameters()"
                    )
                found[parameter] = known[parameter]
        return found

    def _gather_full(self, value: torch.Tensor, flat: FlatParameters, index: int) -> torch.Tensor:
        if self._axes.shard is None:
            whole = value.clone()
        else:
            sizes = [flat.layout.shard_range(index, rank).size for rank in range(flat.layout.num_shards)]
            gathered = all_gather_with_sizes(value.reshape(-1), sizes, dim=0, group=self._axes.shard)
            whole = flat.layout.unflatten(index, gathered)
        return full_tensor(whole, flat.dtensor_specs[index])


_SCALAR_ENTRIES = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries of torch's optimizers (Adam, NAdam, ASGD and others) that never have dims."""


def _divided_keys(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[str]:
    """The entries of a parameter's state that are sharded as it is."""
    fitting = [
        key
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    if parameter.dim():
        return fitting
    divided = []
    for key in fitting:  # by the entry's shape where parameters have dims, or by its name
        shapes = [
            (entries[key].shape, other.shape)
            for other, entries in optimizer.state.items()
            if other.dim() and isinstance(entries.get(key), torch.Tensor)
        ]
        if any(own == of_parameter for own, of_parameter in shapes) if shapes else key not in _SCALAR_ENTRIES:
            divided.append(key)
    return divided


def _find_mismatch(optimizer: torch.optim.Optimizer, locations: Locations, state: Mapping[str, Any]) -> str | None:
    """The reason why a full state does not fit an optimizer, or None."""
    if problem := _find_form_mismatch(optimizer, locations, state):
        return problem
    if not isinstance(state.get("divided"), Mapping):
        return "it lacks 'divided', the sharded entries by names"
    for name, flat, index in locations.values():
        shape = flat.full_shape(index)
        entries = state["state"].get(name)
        if entries is None:
            continue
        if name not in state["divided"]:
            return f"it lacks the sharded entries of {name!r} in 'divided'"
        for key in state["divided"][name]:
            value = entries.get(key)
            if not isinstance(value, torch.Tensor):
                return f"{key!r} of {name!r} is not a tensor"
            if value.shape != shape:
                return f"{key!r} of {name!r} has shape {tuple(value.shape)} where the parameter has {tuple(shape)}"
    return None


def _find_form_mismatch(optimizer: torch.optim.Optimizer, locations: Locations, state: Mapping[str, Any]) -> str | None:
    """The reason why a state can't belong to the optimizer's parameters, or None."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return "it lacks state, by names"
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, Mapping) and "params" in each for each in groups):
        return "it lacks param_groups"
    own = [sorted(group["params"]) for group in _named_groups(optimizer, locations)]
    if own != [sorted(group["params"]) for group in groups]:
        have = counted(len(groups), "group")
        return f"it has {have} of parameters, the optimizer {len(own)}, or they have other parameters"
    known = {name for names in own for name in names}
    for name, entries in state["state"].items():
        if name not in known:
            return f"it has state of {name!r}, which the optimizer does not have"
        if not isinstance(entries, Mapping):
            return f"its state of {name!r} is not a dict"
    return None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _named_groups(optimizer: torch.optim.Optimizer, locations: Locations) -> list[dict[str, Any]]:
    return [{**group, "params": [locations[each][0] for each in group["params"]]} for group in optimizer.param_groups]


def _load(optimizer: torch.optim.Optimizer, locations: Locations, state: Mapping[str, Any]) -> None:
    """Load a state by parameter names into an optimizer."""
    own = [group["params"] for group in _named_groups(optimizer, locations)]
    indices = {name: index for index, name in enumerate(name for names in own for name in names)}
    groups = [
        {**group, "params": [indices[name] for name in names]}
        for group, names in zip(state["param_groups"], own, strict=True)
    ]
    # Optimizers adopt some tensors and then write to them; the caller's must not change.
    entries = {
        indices[name]: {key: _copy(value) for key, value in values.items()} for name, values in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
