"""A model's state dict, full or sharded."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.collectives.reduce import broadcast
from ferrodist.errors import ranks_text
from ferrodist.parallel.fsdp.dtensor_params import full_tensor, local_tensor, slice_local, spec_of

if TYPE_CHECKING:
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_param import FlatParameters

_EXTRA = "_extra_state"  # torch's name for the result of `get_extra_state`, behind the module's name


class ModelStateDict:
    """Full and sharded state dicts of a model; `FSDP` explains the methods."""

    def __init__(self, module: torch.nn.Module, flats: Sequence[FlatParameters], axes: ShardAxes) -> None:
        self._module, self._flats, self._axes = module, flats, axes
        # Stored now, since a failed backward leaves full parameters in the module.
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        self._extras = {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: each
            for prefix, each in module.named_modules(remove_duplicate=False)
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        }

    @torch.no_grad()
    def full(self, *, rank0_only: bool) -> dict[str, torch.Tensor]:
        """Gather the full state dict."""
        is_wanted = not rank0_only or self._axes.world.rank == 0
        found: dict[torch.Tensor, torch.Tensor] = {}
        with self._axes.in_collective("collecting full_state_dict()"):
            for flat in self._flats:
                full = flat.gather_full()
                if not is_wanted:
                    continue
                for shard, value, spec in zip(flat.parameters, full, flat.dtensor_specs, strict=True):
                    found[shard] = full_tensor(value, spec).clone()
            if not is_wanted:
                return {}
            state = dict(self._module.state_dict(keep_vars=True))
            for name, entry in state.items():
                if isinstance(entry, torch.Tensor):  # a parameter or buffer, and no extra state
                    full_copy = found.get(entry)
                    if full_copy is None:
                        full_copy = full_tensor(local_tensor(entry), spec_of(entry)).detach().clone()
                    state[name] = full_copy
            return state

    @torch.no_grad()
    def load_full(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Load a full state dict that all ranks have, or rank 0 alone."""
        is_sent = self._is_only_on_rank_0(state)
        extras: Mapping[str, Any] | None = None if state is None else {name: state[name] for name in self._extras}
        if is_sent and self._extras:
            extras = self._send_extras(extras)
        for flat in self._flats:
            full = [] if state is None else [state[self._names[shard][0]] for shard in flat.parameters]
            wanted = [flat.slice_local(index, value) for index, value in enumerate(full)]
            if is_sent:
                flat.scatter_from_rank0(None if state is None else wanted)
            else:
                for index, value in enumerate(wanted):
                    flat.load(index, value)
        for name, buffer in self._buffers().items():
            local = local_tensor(buffer)
            if state is not None:
                local.copy_(slice_local(state[name], spec_of(buffer)))
            if is_sent:
                broadcast(local, 0, group=self._axes.world, out=local)
        self._set_extras(extras or {})

    def _is_only_on_rank_0(self, state: Mapping[str, torch.Tensor] | None) -> bool:
        """Compare the ranks' arguments; False when all have the state."""
        group = self._axes.world
        problem = None if state is None else self._find_mismatch(state)
        with self._axes.in_collective("in load_full_state_dict()"):
            answers = all_gather_object([state is not None, problem], group=group)
        for rank, (_, found) in enumerate(answers):
            if found is not None:
                raise ValueError(f"the state dict of rank {rank} does not fit the module: {found}. Nothing was loaded.")
        have = [rank for rank, (has_state, _) in enumerate(answers) if has_state]
        if have not in ([0], list(range(group.world_size))):
            who = f"{ranks_text(have)} of group {group.name!r} passed it" if have else "no rank passed it"
            raise ValueError(f"load_full_state_dict takes the state on all ranks, or on rank 0 alone, but {who}")
        return len(have) < group.world_size

    def _send_extras(self, extras: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Rank 0's extra states, on every rank, sent as a file that torch reads without running code."""
        sent = None
        if extras is not None:
            file = io.BytesIO()
            with contextlib.suppress(pickle.PickleError, TypeError, AttributeError):
                torch.save(extras, file)
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                sent = file.getvalue()
        sent = broadcast_object(sent, group=self._axes.world)
        if sent is None:
            raise ValueError(
                "load_full_state_dict can't send the result of get_extra_state(), since torch.load refuses its types"
                " with weights_only=True: pass the state on all ranks. Nothing was loaded."
            )
        received: dict[str, Any] = torch.load(io.BytesIO(sent), weights_only=True)
        return received if extras is None else extras

    @torch.no_grad()
    def sharded(self) -> dict[str, Any]:
        """Copy this rank's shard of the state."""
        parameters = {}
        for flat in self._flats:
            for index, parameter in enumerate(flat.parameters):
                shard_range = flat.layout.shard_range(index, self._axes.shard_rank)
                parameters[self._names[parameter][0]] = {
                    "piece": parameter.detach().reshape(-1).clone(),
                    "start": shard_range.start,
                    "shape": list(flat.layout.shapes[index]),
                }
        return {
            **shard_identity(self._axes, self._flats),
            "parameters": parameters,
            "buffers": {name: local_tensor(buffer).detach().clone() for name, buffer in self._buffers().items()},
            "extra_state": {name: module.get_extra_state() for name, module in self._extras.items()},
        }

    @torch.no_grad()
    def load_sharded(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shard of the state."""
        check_shard_identity(state, shard_identity(self._axes, self._flats), "model")
        state = {"extra_state": {}, **state}
        own = self.sharded()
        if problem := _find_sharded_mismatch(own, state):
            raise ValueError(f"{problem}. Nothing was loaded.")
        for flat in self._flats:
            for parameter in flat.parameters:
                parameter.copy_(state["parameters"][self._names[parameter][0]]["piece"].view(parameter.shape))
        for name, buffer in self._buffers().items():
            local_tensor(buffer).copy_(state["buffers"][name])
        self._set_extras(state["extra_state"])

    def _set_extras(self, extras: Mapping[str, Any]) -> None:
        for name, value in extras.items():
            self._extras[name].set_extra_state(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that belong to the state, by name."""
        template = self._module.state_dict(keep_vars=True)
        others = {name for names in self._names.values() for name in names} | set(self._extras)
        return {
            name: entry for name, entry in template.items() if isinstance(entry, torch.Tensor) and name not in others
        }

    def _find_mismatch(self, state: object) -> str | None:
        """The reason why a full state dict does not fit, or None."""
        shapes = {name: buffer.shape for name, buffer in self._buffers().items()}
        for flat in self._flats:
            for index, shard in enumerate(flat.parameters):
                shapes.update(dict.fromkeys(self._names[shard], torch.Size(flat.full_shape(index))))
        if not isinstance(state, Mapping):
            return "it is not a dict"
        if missing := sorted({*shapes, *self._extras} - set(state)):
            return f"it lacks {_first_of(missing)}"
        if unknown := sorted(set(state) - set(self._module.state_dict(keep_vars=True))):
            return f"it has {_first_of(unknown)}, which the module does not have"
        for name, shape in shapes.items():
            if not isinstance(state[name], torch.Tensor):
                return f"{name!r} is not a tensor"
            if state[name].shape != shape:
                return f"{name!r} has shape {tuple(state[name].shape)} where the module has {tuple(shape)}"
        return None


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]!r} and {len(names) - 1} more" if len(names) > 1 else repr(names[0])


def shard_identity(axes: ShardAxes, flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """The entries of a sharded state that identify the rank and its shards.

    ``parts`` is for DTensors' local tensors, ``orders`` for dims that are not row-major.
    """
    parts = {
        name: f"{spec} of {spec.mesh.shape} ranks, at {spec.mesh.coordinate}"
        for flat in flats
        for name, spec in zip(flat.names, flat.dtensor_specs, strict=True)
        if spec is not None
    }
    dim_orders = {
        name: list(order)
        for flat in flats
        for name, order in zip(flat.names, flat.layout.dim_orders, strict=True)
        if order is not None and flat.layout.num_shards > 1
    }
    more = {key: value for key, value in (("parts", parts), ("orders", dim_orders)) if value}
    return {"rank": axes.world.rank, "world_size": axes.world.world_size, **more}


def check_shard_identity(state: Mapping[str, Any], identity: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless a sharded state has this rank's `shard_identity`."""
    if not isinstance(state, dict) or not {"rank", "world_size"} <= set(state):
        raise ValueError(f"this is not a sharded {what} state: it lacks rank and world_size")
    if (state["rank"], state["world_size"]) != (identity["rank"], identity["world_size"]):
        raise ValueError(
            f"this is the {what} state of rank {state['rank']} of {state['world_size']}, and this is rank"
            f" {identity['rank']} of {identity['world_size']}: sharded states fit the rank that saved them, full ones"
            " any number. Nothing was loaded."
        )
    if identity.get("orders", {}) != state.get("orders", {}):
        name = min({*identity.get("orders", {}), *state.get("orders", {})})
        raise ValueError(
            f"the {what} state has the elements of {name!r}, or of another parameter, in another order than this model,"
            " as weights in memory_format=torch.channels_last have: make the model as it was, or save full states."
            " Nothing was loaded."
        )
    own, saved = identity.get("parts", {}), state.get("parts", {})
    for name in sorted({*own, *saved}):
        if own.get(name) != saved.get(name):
            raise ValueError(
                f"this is the {what} state of another local tensor of {name!r}: of {saved.get(name, 'all of it')},"
                f" where this rank has {own.get(name, 'all of it')}: sharded states fit the rank that saved them, full"
                " ones any division. Nothing was loaded."
            )


def _find_sharded_mismatch(expected: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """The reason why a sharded state does not fit, or None."""
    for part in ("parameters", "buffers", "extra_state"):
        if not isinstance(state.get(part), Mapping):
            return f"this is not a sharded model state: it lacks {part}"
        if odd := sorted(set(expected[part]) ^ set(state[part])):
            return f"the state has other {part} than the module, as {odd[0]!r}"
    for name, own in expected["parameters"].items():
        if problem := _shard_mismatch(own, state["parameters"][name]):
            return f"{name!r} {problem}"
    for name, own in expected["buffers"].items():
        other = state["buffers"][name]
        if not isinstance(other, torch.Tensor) or own.shape != other.shape:
            return f"buffer {name!r} is not a tensor of its shape in the state"
    return None


def _shard_mismatch(own: Mapping[str, Any], other: Any) -> str | None:
    if not isinstance(other, Mapping) or not {"piece", "start", "shape"} <= set(other):
        return "lacks piece, start or shape in the state"
    if not isinstance(other["piece"], torch.Tensor):
        return "has a piece in the state that is not a tensor"
    same = own["start"] == other["start"] and own["shape"] == other["shape"]
    if not same or own["piece"].numel() != other["piece"].numel():
        return (
            "is sharded in another way, or has another shape, than in the state: build the model with the same units"
            " and strategy, or save full_state_dict()"
        )
    return None
