"""`OptimizerState`: an optimizer's state by parameter names, as an object in a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.state import inner_module, unwrap_modules
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.local_shards import annotate_flat_shard, flat_shard_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SCALAR_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers (Adam, NAdam, ASGD and others) that is a scalar tensor whatever the parameter's shape."""


class OptimizerState:
    """An optimizer's state by parameter names, so that it fits the same parameters with another sharding.

    Args:
        model: The module whose parameters the optimizer updates.
        optimizer: The optimizer.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"OptimizerState takes a module and its optimizer, not {type(model).__name__} and"
                f" {type(optimizer).__name__}"
            )
        self._model = model
        self._optimizer = optimizer

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The names of the optimizer's parameters, in the order of its groups."""
        first_names = getattr(self._model, "first_names", {})  # of what other ranks have by other names
        known = {
            parameter: first_names.get(name, name) for name, parameter in inner_module(self._model).named_parameters()
        }
        names = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not: make"
                        " it with the model's parameters()"
                    )
                names[parameter] = known[parameter]
        return names

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``state`` by names, with the optimizer's own tensors, and ``param_groups`` of names.

        Raises:
            ValueError: The optimizer has a parameter that the model lacks, or state that is not a parameter's.
        """
        names = self._parameter_names()
        others = [key for key in self._optimizer.state if key not in names]
        if others:
            raise ValueError(
                f"the optimizer has state of {str(others[0])[:50]!r}, which is none of its parameters: checkpoints"
                " carry the state of parameters only"
            )
        state = {}
        for parameter, name in names.items():
            entries = self._optimizer.state.get(parameter)
            if entries:
                for value in entries.values():
                    _annotate_like(value, parameter)
                state[name] = dict(entries)
        # Dict keys of all ranks are merged; a list would have to be the same on all.
        collect = dict.fromkeys if self._is_partial else list
        groups = [
            {**group, "params": collect([names[parameter] for parameter in group["params"]])}
            for group in self._optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def targets(self, shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]) -> dict[str, Any]:
        """Allocate the tensors that saved ones are loaded into, also before the optimizer's first step."""
        names = self._parameter_names()
        full_shapes = {name: _full_shape(parameter) for parameter, name in names.items()}
        # For scalar parameters, shapes don't tell per-element state from scalars; other parameters' state does.
        is_per_element = {
            key: shape == full_shapes[name]
            for name, entries in shapes.items()
            for key, (shape, _) in entries.items()
            if full_shapes.get(name)
        }
        made: dict[str, Any] = {}
        for parameter, name in names.items():
            made[name] = {}
            for key, (shape, dtype) in shapes.get(name, {}).items():
                if shape == full_shapes[name] and (shape or is_per_element.get(key, key not in _SCALAR_STATE)):
                    made[name][key] = empty_shard_like(parameter, dtype)
                else:
                    made[name][key] = torch.empty(shape, dtype=dtype, device="cpu")
        return made

    @property
    def _is_partial(self) -> bool:
        """True if other ranks have other parameters of the model, according to a wrapper's ``is_partial``."""
        return any(getattr(each, "is_partial", False) for each in unwrap_modules(self._model))

    def _groups(self) -> list[list[str]]:
        names = self._parameter_names()
        return [[names[parameter] for parameter in group["params"]] for group in self._optimizer.param_groups]

    def check_groups(self, saved: Sequence[Sequence[Any]], where: str) -> None:
        """Check that the saved parameter groups are the optimizer's, or contain them if it has a part of the model."""
        current = self._groups()
        if len(current) == len(saved) and all(
            set(group) == set(saved_group) or (self._is_partial and set(group) <= set(saved_group))
            for group, saved_group in zip(current, saved, strict=True)
        ):
            return
        wanted, found = ({name for group in groups for name in group} for groups in (current, saved))
        other = sorted(map(str, wanted ^ found))
        which = f": {other[0]!r} is only in one of them" if other else ""
        raise DistCheckpointError(
            f"{where} has {counted(len(wanted), 'parameter')} in {counted(len(current), 'group')}, and was saved with"
            f" {len(found)} in {len(saved)}, which are not the same{which}. Make the optimizer with the groups that"
            " it was saved with, or leave it out of what is loaded"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state.

        Raises:
            DistCheckpointError: The state has other parameters. Nothing was loaded.
        """
        current = self._groups()
        self.check_groups([list(group["params"]) for group in state_dict["param_groups"]], "the optimizer")
        indices = {name: index for index, name in enumerate(name for group in current for name in group)}
        groups = [
            {**group, "params": [indices[name] for name in names_of_group]}
            for group, names_of_group in zip(state_dict["param_groups"], current, strict=True)
        ]
        state = {indices[name]: dict(entries) for name, entries in state_dict["state"].items() if name in indices}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        # torch casts floating-point state to the parameter's dtype; the saved dtype counts.
        for parameter, name in self._parameter_names().items():
            taken = self._optimizer.state.get(parameter)
            if taken and name in state_dict["state"]:
                taken.update(_with_dtypes(dict(taken), dict(state_dict["state"][name])))


def _with_dtypes(taken: Any, saved: Any) -> Any:
    """Return an optimizer's loaded state in the dtypes in which it was saved."""
    if isinstance(saved, torch.Tensor) and isinstance(taken, torch.Tensor):
        return taken if taken.dtype == saved.dtype else saved.to(taken.device)
    if isinstance(saved, dict) and isinstance(taken, dict):
        return {key: _with_dtypes(taken.get(key), value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(taken, (list, tuple)) and len(taken) == len(saved):
        return type(saved)(_with_dtypes(*pair) for pair in zip(taken, saved, strict=True))
    return saved


def _full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the full tensor of which a parameter is a local shard."""
    flat_shard = flat_shard_of(parameter)
    if flat_shard is None:
        return tuple(parameter.shape)
    return flat_shard.shape if flat_shard.spec is None else flat_shard.spec.shape


def empty_shard_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor with a parameter's sharding."""
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    _annotate_like(made, parameter)
    return made


def _annotate_like(value: Any, parameter: torch.Tensor) -> None:
    """Mark a tensor of an optimizer's state as a flat shard, if it has its parameter's shape."""
    flat_shard = flat_shard_of(parameter)
    if flat_shard is not None and isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
        annotate_flat_shard(value, flat_shard)
