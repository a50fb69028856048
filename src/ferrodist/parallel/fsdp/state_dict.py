"""A model's state, whole or as this rank's part."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.collectives.reduce import broadcast
from ferrodist.errors import add_error_context
from ferrodist.parallel.fsdp.dtensor_params import cut_part, describe_part, join_parts, layout_of, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_param import FlatParameters
    from ferrodist.parallel.fsdp.unit import Unit

_EXTRA = "_extra_state"
"""How torch calls what `get_extra_state` gives, behind the module's name."""


class ModelState:
    """Gives and takes the state of a model's units; see `FSDP` for each method.

    Args:
        module: The model.
        units: Its units.
        axes: Who divides it.
    """

    def __init__(self, module: torch.nn.Module, units: Sequence[Unit], axes: ShardAxes) -> None:
        self._module = module
        self._flats = [flat for unit in units for flat in unit.flats]
        self._axes = axes
        names: dict[torch.Tensor, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        # Kept, for a backward that failed leaves other parameters in the module than the pieces.
        self._names = names
        self._extras = {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: each
            for prefix, each in module.named_modules(remove_duplicate=False)
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        }

    @torch.no_grad()
    def full(self, *, rank0_only: bool) -> dict[str, torch.Tensor]:
        """See `FSDP.full_state_dict`."""
        is_wanted = not rank0_only or self._axes.whole.rank == 0
        values: dict[torch.nn.Parameter, torch.Tensor] = {}
        with add_error_context(
            lambda: f"Rank {self._axes.whole.rank} was collecting full_state_dict().", "Every rank must call it."
        ):
            for flat in self._flats:
                whole = flat.gather_values()
                if not is_wanted:
                    continue
                for piece, value, layout in zip(flat.parameters, whole, flat.distributed, strict=True):
                    values[piece] = join_parts(value, layout).clone()
            if not is_wanted:
                return {}
            template = self._module.state_dict(keep_vars=True)
            return {
                name: entry if not _is_tensor(entry) else values[entry] if entry in values else _copy_whole(entry)
                for name, entry in template.items()
            }

    @torch.no_grad()
    def load_full(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """See `FSDP.load_full_state_dict`."""
        group = self._axes.whole
        names = self._names
        is_sent = self._is_only_on_rank_0(state)
        extras: Mapping[str, Any] | None = None if state is None else {name: state[name] for name in self._extras}
        if is_sent and self._extras:
            extras = self._send_extras(extras)
        for flat in self._flats:
            whole = [] if state is None else [state[names[piece][0]] for piece in flat.parameters]
            wanted = [flat.cut(place, value) for place, value in enumerate(whole)]
            if is_sent:
                flat.take_values(None if state is None else wanted)
            else:
                for place, value in enumerate(wanted):
                    flat.load(place, value)
        for name, buffer in self._buffers().items():
            part = part_of(buffer)
            if state is not None:
                part.copy_(cut_part(state[name], layout_of(buffer)))
            if is_sent:
                broadcast(part, 0, group=group, out=part)
        self._set_extras(extras or {})

    def _is_only_on_rank_0(self, state: Mapping[str, torch.Tensor] | None) -> bool:
        """Compare what ranks have; False when all have the state."""
        group = self._axes.whole
        problem = None if state is None else self._problem(state)
        with add_error_context(lambda: f"Rank {group.rank} was in load_full_state_dict().", "Every rank must call it."):
            answers = all_gather_object([state is not None, problem], group=group)
        for rank, (_, found) in enumerate(answers):
            if found is not None:
                raise ValueError(f"the state dict of rank {rank} does not fit the module: {found}. Nothing was loaded.")
        have = [rank for rank, (has_state, _) in enumerate(answers) if has_state]
        if have not in ([0], list(range(group.world_size))):
            raise ValueError(
                f"load_full_state_dict takes the state on all ranks or on rank 0, but it came on ranks {have}"
            )
        return len(have) < group.world_size

    def _send_extras(self, extras: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Rank 0's extra states, on every rank; as a file that torch reads without running code."""
        group = self._axes.whole
        sent = None if extras is None else _as_file(extras)
        sent = broadcast_object(sent, group=group)
        if sent is None:
            raise ValueError(
                "load_full_state_dict can't send what get_extra_state() gave, for it is not of kinds that torch.load"
                " takes with weights_only=True: pass the state on all ranks. Nothing was loaded."
            )
        received: dict[str, Any] = torch.load(io.BytesIO(sent), weights_only=True)
        return received if extras is None else extras

    @torch.no_grad()
    def sharded(self) -> dict[str, Any]:
        """See `FSDP.sharded_state_dict`."""
        names = self._names
        parameters = {}
        for flat in self._flats:
            for place, parameter in enumerate(flat.parameters):
                piece = flat.layout.piece(place, self._axes.shard_rank)
                parameters[names[parameter][0]] = {
                    "piece": parameter.detach().reshape(-1).clone(),
                    "start": piece.start,
                    "shape": list(flat.layout.shapes[place]),
                }
        return {
            **owner_of(self._axes, self._flats),
            "parameters": parameters,
            "buffers": {name: part_of(buffer).detach().clone() for name, buffer in self._buffers().items()},
            "extra_state": {name: module.get_extra_state() for name, module in self._extras.items()},
        }

    @torch.no_grad()
    def load_sharded(self, state: Mapping[str, Any]) -> None:
        """See `FSDP.load_sharded_state_dict`."""
        check_owner(state, owner_of(self._axes, self._flats), "model")
        state = {"extra_state": {}, **state}
        mine = self.sharded()
        if problem := _sharded_problem(mine, state):
            raise ValueError(f"{problem}. Nothing was loaded.")
        names = self._names
        for flat in self._flats:
            for parameter in flat.parameters:
                parameter.copy_(state["parameters"][names[parameter][0]]["piece"].view(parameter.shape))
        for name, buffer in self._buffers().items():
            part_of(buffer).copy_(state["buffers"][name])
        self._set_extras(state["extra_state"])

    def _set_extras(self, extras: Mapping[str, Any]) -> None:
        for name, value in extras.items():
            self._extras[name].set_extra_state(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that belong to the state, by name."""
        template = self._module.state_dict(keep_vars=True)
        others = {name for names in self._names.values() for name in names} | set(self._extras)
        return {name: entry for name, entry in template.items() if _is_tensor(entry) and name not in others}

    def _problem(self, state: object) -> str | None:
        """Why a full state dict does not fit, or None."""
        shapes = {name: buffer.shape for name, buffer in self._buffers().items()}
        for flat in self._flats:
            for place, piece in enumerate(flat.parameters):
                shapes.update(dict.fromkeys(self._names[piece], torch.Size(flat.whole_shape(place))))
        if not isinstance(state, Mapping):
            return "it is no dict"
        if missing := sorted({*shapes, *self._extras} - set(state)):
            return f"it lacks {missing[0]!r} and {len(missing) - 1} more"
        if unknown := sorted(set(state) - set(self._module.state_dict(keep_vars=True))):
            return f"it has {unknown[0]!r}, which the module has not, and {len(unknown) - 1} more"
        for name, shape in shapes.items():
            if not _is_tensor(state[name]):
                return f"{name!r} is no tensor"
            if state[name].shape != shape:
                return f"{name!r} has shape {tuple(state[name].shape)} where the module has {tuple(shape)}"
        return None


def owner_of(axes: ShardAxes, flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """What a sharded state says of the rank that saves it.

    With ``parts`` where parameters are parts of distributed ones, and ``orders`` where elements lie in another order of
    dims than the parameter's own.
    """
    parts = {
        name: describe_part(layout)
        for flat in flats
        for name, layout in zip(flat.names, flat.distributed, strict=True)
        if layout is not None
    }
    orders = {
        name: list(order)
        for flat in flats
        for name, order in zip(flat.names, flat.layout.orders, strict=True)
        if order is not None and flat.layout.num_shards > 1
    }
    more = {"parts": parts, "orders": orders}
    return {
        "rank": axes.whole.rank,
        "world_size": axes.whole.world_size,
        **{key: value for key, value in more.items() if value},
    }


def check_owner(state: Mapping[str, Any], owner: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless a sharded state is this rank's, which `owner_of` has described."""
    if not isinstance(state, dict) or not {"rank", "world_size"} <= set(state):
        raise ValueError(f"this is no sharded {what} state: it lacks rank and world_size")
    mine = (owner["rank"], owner["world_size"])
    if (state["rank"], state["world_size"]) != mine:
        raise ValueError(
            f"this is the {what} state of rank {state['rank']} of {state['world_size']}, and this is rank {mine[0]} of"
            f" {mine[1]}: sharded states fit the rank that saved them, full ones any number. Nothing was loaded."
        )
    if owner.get("orders", {}) != state.get("orders", {}):
        name = min({*owner.get("orders", {}), *state.get("orders", {})})
        raise ValueError(
            f"the {what} state has the elements of {name!r}, or of another parameter, in another order than this model,"
            " as weights in memory_format=torch.channels_last have: make the model as it was, or save full states."
            " Nothing was loaded."
        )
    own, theirs = owner.get("parts", {}), state.get("parts", {})
    for name in sorted({*own, *theirs}):
        if own.get(name) != theirs.get(name):
            raise ValueError(
                f"this is the {what} state of another part of {name!r}: of {theirs.get(name, 'all of it')}, where this"
                f" rank has {own.get(name, 'all of it')}: sharded states fit the rank that saved them, full ones any"
                " division. Nothing was loaded."
            )


def _sharded_problem(mine: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """What is wrong with a sharded state where this one would fit, or None."""
    for part in ("parameters", "buffers", "extra_state"):
        if not isinstance(state.get(part), Mapping):
            return f"this is no sharded model state: it lacks {part}"
        if odd := sorted(set(mine[part]) ^ set(state[part])):
            return f"the state has other {part} than the module, as {odd[0]!r}"
    for name, own in mine["parameters"].items():
        if problem := _piece_problem(own, state["parameters"][name]):
            return f"{name!r} {problem}"
    for name, own in mine["buffers"].items():
        other = state["buffers"][name]
        if not _is_tensor(other) or own.shape != other.shape:
            return f"buffer {name!r} is no tensor of its shape in the state"
    return None


def _piece_problem(own: Mapping[str, Any], other: Any) -> str | None:
    if not isinstance(other, Mapping) or not {"piece", "start", "shape"} <= set(other):
        return "lacks piece, start or shape in the state"
    if not _is_tensor(other["piece"]):
        return "has a piece in the state that is no tensor"
    same = own["start"] == other["start"] and own["shape"] == other["shape"]
    if not same or own["piece"].numel() != other["piece"].numel():
        return (
            "is divided in another way, or has another shape, than in the state: build the model with the same units"
            " and strategy, or save full_state_dict()"
        )
    return None


def _as_file(value: object) -> bytes | None:
    """What torch can read again without running code, or None."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError):
        return None
    return file.getvalue()


def _copy_whole(buffer: torch.Tensor) -> torch.Tensor:
    return join_parts(part_of(buffer), layout_of(buffer)).detach().clone()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
