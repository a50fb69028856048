"""An optimizer's state, whole or as this rank's part, by parameter names.

A tensor of the shape of its parameter's piece is divided as the parameter is, as momenta are; all else is the same on
all ranks, as a number of steps. Those of a parameter without dims, which one rank has whole, can't be told apart by
their shapes: what counts is how the same entry is at the optimizer's other parameters. A whole state says which are
divided (``divided``), for the ranks that load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.all_gather import all_gather_with_sizes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, add_error_context
from ferrodist.parallel.fsdp.dtensor_params import join_parts
from ferrodist.parallel.fsdp.state_dict import check_owner, owner_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_param import FlatParameters
    from ferrodist.parallel.fsdp.unit import Unit


class OptimizerState:
    """Gives and takes the state of optimizers of a model's pieces; see `FSDP` for each method.

    Args:
        units: The model's units.
        axes: Who divides it.
    """

    def __init__(self, units: Sequence[Unit], axes: ShardAxes) -> None:
        self._flats = [flat for unit in units for flat in unit.flats]
        self._axes = axes

    @torch.no_grad()
    def full(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `FSDP.full_optimizer_state_dict`."""
        homes = self._homes(optimizer)
        self._compare(optimizer, homes)
        state: dict[str, dict[str, Any]] = {}
        divided: dict[str, list[str]] = {}
        for parameter, (flat, place) in homes.items():
            if parameter in optimizer.state:
                keys = divided[flat.names[place]] = _divided_keys(optimizer, parameter)
                state[flat.names[place]] = {
                    key: self._join(value, flat, place) if key in keys else _copy(value)
                    for key, value in optimizer.state[parameter].items()
                }
        return {"state": state, "divided": divided, "param_groups": _named_groups(optimizer, homes)}

    @torch.no_grad()
    def load_full(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """See `FSDP.load_full_optimizer_state_dict`."""
        homes = self._homes(optimizer)
        group = self._axes.whole
        with add_error_context(
            lambda: f"Rank {group.rank} was in load_full_optimizer_state_dict().", "Every rank must call it."
        ):
            problems = all_gather_object(_problem(optimizer, homes, state), group=group)
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ValueError(
                    f"the optimizer state of rank {rank} does not fit the optimizer: {problem}. Nothing was loaded."
                )
        parts: dict[str, dict[str, Any]] = {}
        for flat, place in homes.values():
            entries = state["state"].get(flat.names[place])
            if entries is None:
                continue
            divided = state["divided"][flat.names[place]]
            piece = flat.layout.piece(place, self._axes.shard_rank)
            parts[flat.names[place]] = {
                key: flat.layout.shape_piece(
                    place, flat.layout.flatten(place, flat.cut(place, value))[piece.start :][: piece.size]
                )
                if key in divided
                else value
                for key, value in entries.items()
            }
        _load(optimizer, homes, {"state": parts, "param_groups": state["param_groups"]})

    @torch.no_grad()
    def sharded(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `FSDP.sharded_optimizer_state_dict`."""
        homes = self._homes(optimizer)
        return {
            **owner_of(self._axes, self._flats),
            "state": {
                flat.names[place]: {key: _copy(value) for key, value in optimizer.state[parameter].items()}
                for parameter, (flat, place) in homes.items()
                if parameter in optimizer.state
            },
            "param_groups": _named_groups(optimizer, homes),
        }

    def load_sharded(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """See `FSDP.load_sharded_optimizer_state_dict`."""
        check_owner(state, owner_of(self._axes, self._flats), "optimizer")
        homes = self._homes(optimizer)
        if problem := _form_problem(optimizer, homes, state):
            raise ValueError(f"the optimizer state does not fit the optimizer: {problem}. Nothing was loaded.")
        for parameter, (flat, place) in homes.items():
            for key, value in state["state"].get(flat.names[place], {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"{key!r} of {flat.names[place]!r} has shape {tuple(value.shape)}, and this rank's piece"
                        f" {tuple(parameter.shape)}: it was divided in another way. Nothing was loaded."
                    )
        _load(optimizer, homes, state)

    def _homes(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, tuple[FlatParameters, int]]:
        """Where each of the optimizer's parameters lies, in the order of its groups."""
        places = {piece: (flat, place) for flat in self._flats for place, piece in enumerate(flat.parameters)}
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in places:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not of this FSDP:"
                        " make it with fsdp.parameters()"
                    )
                found[parameter] = places[parameter]
        return found

    def _compare(
        self, optimizer: torch.optim.Optimizer, homes: Mapping[torch.Tensor, tuple[FlatParameters, int]]
    ) -> None:
        """Raise, the same on every rank, unless all ranks have state of the same kinds."""
        kinds = [
            (flat.names[place], list(optimizer.state[parameter]), _divided_keys(optimizer, parameter))
            for parameter, (flat, place) in homes.items()
            if parameter in optimizer.state
        ]
        digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
        group = self._axes.whole
        with add_error_context(
            lambda: f"Rank {group.rank} was collecting full_optimizer_state_dict().", "Every rank must call it."
        ):
            digests = all_gather_object(digest, group=group)
        differing = tuple(rank for rank, other in enumerate(digests) if other != digests[0])
        if differing:
            raise CollectiveMismatchError(
                f"the optimizers of the ranks of group {group.name!r} have state of other parameters or kinds than rank"
                " 0's: make the same optimizer, and step it as often, on every rank",
                ranks=differing,
            )

    def _join(self, value: torch.Tensor, flat: FlatParameters, place: int) -> torch.Tensor:
        if self._axes.shard is None:
            whole = value.clone()
        else:
            sizes = [flat.layout.piece(place, rank).size for rank in range(flat.layout.num_shards)]
            joined = all_gather_with_sizes(value.reshape(-1), sizes, dim=0, group=self._axes.shard)
            whole = flat.layout.unflatten(place, joined)
        return join_parts(whole, flat.distributed[place])


_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers (Adam, NAdam, ASGD and others) keep as tensors without dims, whatever the parameter's."""


def _divided_keys(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[str]:
    """The entries of a parameter's state that are divided as it is."""
    fitting = [
        key
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    return fitting if parameter.dim() else [key for key in fitting if _is_divided_elsewhere(optimizer, key)]


def _is_divided_elsewhere(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether an entry has the shape of its parameter where that has dims; by its name, where there is none."""
    shapes = [
        (entries[key].shape, other.shape)
        for other, entries in optimizer.state.items()
        if other.dim() and isinstance(entries.get(key), torch.Tensor)
    ]
    return any(own == of_parameter for own, of_parameter in shapes) if shapes else key not in _NUMBERS


def _problem(
    optimizer: torch.optim.Optimizer,
    homes: Mapping[torch.Tensor, tuple[FlatParameters, int]],
    state: Mapping[str, Any],
) -> str | None:
    """Why a whole state does not fit an optimizer, or None."""
    if problem := _form_problem(optimizer, homes, state):
        return problem
    if not isinstance(state.get("divided"), Mapping):
        return "it lacks what is divided, by names"
    for flat, place in homes.values():
        name, shape = flat.names[place], flat.whole_shape(place)
        entries = state["state"].get(name)
        if entries is None:
            continue
        if name not in state["divided"]:
            return f"it lacks what is divided of {name!r}"
        for key in state["divided"][name]:
            value = entries.get(key)
            if not isinstance(value, torch.Tensor):
                return f"{key!r} of {name!r} is no tensor"
            if value.shape != shape:
                return f"{key!r} of {name!r} has shape {tuple(value.shape)} where the parameter has {tuple(shape)}"
    return None


def _form_problem(
    optimizer: torch.optim.Optimizer,
    homes: Mapping[torch.Tensor, tuple[FlatParameters, int]],
    state: Mapping[str, Any],
) -> str | None:
    """Why a state can't be one of the optimizer's parameters, or None."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return "it lacks state, by names"
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, Mapping) and "params" in each for each in groups):
        return "it lacks param_groups"
    own = [sorted(group["params"]) for group in _named_groups(optimizer, homes)]
    if own != [sorted(group["params"]) for group in groups]:
        have = counted(len(groups), "group")
        return f"it has {have} of parameters, the optimizer {len(own)}, or they have other parameters"
    known = {name for names in own for name in names}
    for name, entries in state["state"].items():
        if name not in known:
            return f"it has state of {name!r}, which the optimizer has not"
        if not isinstance(entries, Mapping):
            return f"its state of {name!r} is no dict"
    return None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _named_groups(
    optimizer: torch.optim.Optimizer, homes: Mapping[torch.Tensor, tuple[FlatParameters, int]]
) -> list[dict[str, Any]]:
    def name(parameter: torch.Tensor) -> str:
        flat, place = homes[parameter]
        return flat.names[place]

    return [{**group, "params": [name(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]


def _load(
    optimizer: torch.optim.Optimizer,
    homes: Mapping[torch.Tensor, tuple[FlatParameters, int]],
    state: Mapping[str, Any],
) -> None:
    """Give an optimizer state by parameter names."""
    own = [group["params"] for group in _named_groups(optimizer, homes)]
    numbers = {name: number for number, name in enumerate(name for names in own for name in names)}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(state["param_groups"], own, strict=True)
    ]
    # Optimizers keep some tensors as they come, and then write to them: what the caller has stays as it is.
    entries = {
        numbers[name]: {key: _copy(value) for key, value in values.items()} for name, values in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
