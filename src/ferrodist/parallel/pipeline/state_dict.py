"""A rank's stages as parts of the whole model: modules under the names that they have there."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.torch_private.modules import compiled_module, own_modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose names count: what wraps it says so by ``checkpoint_module()``; or it was compiled."""
    while True:
        wraps = getattr(module, "checkpoint_module", None)
        inner = wraps() if wraps is not None else compiled_module(module)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


class StateDictMapper:
    """Where a pipeline's stages of one rank are in the whole model.

    Args:
        stages: By their numbers.
        prefixes: Of all stages: what their names begin with in the whole model.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], prefixes: Sequence[str]) -> None:
        self._stages = stages
        self._prefixes = prefixes

    def make(self) -> torch.nn.Module:
        """A module that has the stages where the whole model has them; it can't be called.

        Of stages that are at one place it has the children, parameters and buffers. They are the same objects, so that
        what is loaded into it is loaded into the stages.
        """
        whole = torch.nn.Module()
        for number, stage in self._stages.items():
            prefix = self._prefixes[number]
            names = prefix.split(".")[:-1]
            if names and sum(self._prefixes[other].startswith(prefix) for other in self._stages) == 1:
                _find_place(whole, names[:-1]).add_module(names[-1], unwrap(stage))
            else:
                _graft(unwrap(stage), _find_place(whole, names))
        return whole

    def places(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The stages, by the names of their places in the whole model."""
        for number, stage in self._stages.items():
            yield self._prefixes[number].removesuffix("."), unwrap(stage)

    def rename(self, state: dict[str, Any], prefix: str) -> dict[str, str]:
        """Give the tensors of a state of the whole model the names of ``ModuleDict`` ``stages``.

        Each stage gets all that lies where it is, for modules may know names of earlier versions of theirs. The rest is
        dropped.

        Args:
            state: The state, changed in place; what does not begin with the prefix stays.
            prefix: What all names begin with, as ``"pipeline."`` where the pipeline is part of another module.

        Returns:
            For each stage what its names begin with now, and what they began with.
        """
        given = {name: state.pop(name) for name in [*state] if name.startswith(prefix)}
        places = {}
        for number, stage in self._stages.items():
            own, place = f"{prefix}{_own_prefix(number, stage)}", f"{prefix}{self._prefixes[number]}"
            state.update({own + name[len(place) :]: value for name, value in given.items() if name.startswith(place)})
            places[own] = place
        return places

    def rename_versions(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with its modules' versions, which ``state_dict`` has given it, by the names of ``stages`` too."""
        if (versions := getattr(state, "_metadata", None)) is None:
            return state
        found = dict(versions)
        for number, stage in self._stages.items():
            own = _own_prefix(number, stage)
            for name, version in versions.items():
                if f"{name}.".startswith(self._prefixes[number]):
                    rest = name[len(self._prefixes[number]) :]
                    found[f"{own}{rest}".removesuffix(".")] = version
        renamed = OrderedDict(state)
        vars(renamed)["_metadata"] = found
        return renamed


def _own_prefix(number: int, stage: torch.nn.Module) -> str:
    """What the names of a stage begin with in a pipeline."""
    inner = unwrap(stage)
    path = next(name for name, module in stage.named_modules() if module is inner)
    return f"stages.{number}.{path}".removesuffix(".") + "."


def _find_place(whole: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module:
    """The module of these names; what isn't there is made."""
    place = whole
    for name in names:
        if name not in own_modules(place):  # modules may have attributes of any name
            place.add_module(name, torch.nn.Module())
        place = place.get_submodule(name)
    return place


def _graft(module: torch.nn.Module, place: torch.nn.Module) -> None:
    """Give a place all that a module has."""
    parts: Any = vars(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        vars(place)[kind].update(parts[kind])
    vars(place)["_non_persistent_buffers_set"].update(parts["_non_persistent_buffers_set"])
