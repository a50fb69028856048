"""An optimizer's state, whole or as this rank's part, by parameter names.

A tensor of the shape of its parameter's piece is divided as the parameter is, as momenta are; all else is the same on
all ranks, as a number of steps. A whole state says which are which (``divided``): those of a parameter of one element
can't be told apart by their shapes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.gathering import all_gather_by_sizes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError
from ferrodist.parallel.sharded.model_state import check_owner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.parallel.sharded.parameter import FlatParameters
    from ferrodist.parallel.sharded.strategy import Axes
    from ferrodist.parallel.sharded.unit import Unit

__all__ = ["OptimizerState"]


class OptimizerState:
    """Gives and takes the state of optimizers of a model's pieces; see `FSDP` for each method.

    Args:
        units: The model's units.
        axes: Who divides it.
    """

    def __init__(self, units: Sequence[Unit], axes: Axes) -> None:
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
                divided[flat.names[place]] = [
                    key for key, value in optimizer.state[parameter].items() if _is_divided(key, value, parameter)
                ]
                state[flat.names[place]] = {
                    key: self._join(value, flat, place) if _is_divided(key, value, parameter) else _copy(value)
                    for key, value in optimizer.state[parameter].items()
                }
        return {"state": state, "divided": divided, "param_groups": _named_groups(optimizer, homes)}

    @torch.no_grad()
    def load_full(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """See `FSDP.load_full_optimizer_state_dict`."""
        homes = self._homes(optimizer)
        if not {"state", "divided", "param_groups"} <= set(state):
            raise ValueError("this is no state of full_optimizer_state_dict(): it lacks what is divided, by names")
        parts: dict[str, dict[str, Any]] = {}
        for parameter, (flat, place) in homes.items():
            entries = state["state"].get(flat.names[place])
            if entries is None:
                continue
            divided = state["divided"][flat.names[place]]
            piece = flat.layout.piece(place, self._axes.shard_rank)
            parts[flat.names[place]] = {
                key: value.reshape(-1)[piece.start :][: piece.size].view(parameter.shape) if key in divided else value
                for key, value in entries.items()
            }
        _load(optimizer, homes, {"state": parts, "param_groups": state["param_groups"]})

    @torch.no_grad()
    def sharded(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `FSDP.sharded_optimizer_state_dict`."""
        homes = self._homes(optimizer)
        return {
            "rank": self._axes.whole.rank,
            "world_size": self._axes.whole.world_size,
            "state": {
                flat.names[place]: {key: _copy(value) for key, value in optimizer.state[parameter].items()}
                for parameter, (flat, place) in homes.items()
                if parameter in optimizer.state
            },
            "param_groups": _named_groups(optimizer, homes),
        }

    def load_sharded(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """See `FSDP.load_sharded_optimizer_state_dict`."""
        check_owner(state, self._axes, "optimizer")
        homes = self._homes(optimizer)
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
            (flat.names[place], key, _is_divided(key, value, parameter))
            for parameter, (flat, place) in homes.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        ]
        digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
        group = self._axes.whole
        with explain_errors(
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
            return value.clone()
        sizes = [flat.layout.piece(place, rank).size for rank in range(flat.layout.num_shards)]
        joined = all_gather_by_sizes(value.reshape(-1), sizes, dim=0, group=self._axes.shard)
        return joined.view(flat.layout.shapes[place])


def _is_divided(key: str, value: object, parameter: torch.Tensor) -> bool:
    # A number of steps has the shape of a whole parameter without dims.
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"


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
    other = [list(group["params"]) for group in state["param_groups"]]
    if [sorted(names) for names in own] != [sorted(names) for names in other]:
        raise ValueError(
            f"the state has {len(other)} groups of parameters, the optimizer {len(own)}, or they have other parameters."
            " Nothing was loaded."
        )
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
