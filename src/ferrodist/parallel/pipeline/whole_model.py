"""A rank's stages as parts of the whole model: modules under the names that they have there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["make_whole", "unwrap"]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose names count: what wraps it says so by ``checkpoint_module()``; or it was compiled."""
    while True:
        wraps = getattr(module, "checkpoint_module", None)
        inner = wraps() if wraps is not None else getattr(module, "_orig_mod", None)  # torch.compile's
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def make_whole(stages: Mapping[int, torch.nn.Module], prefixes: Sequence[str]) -> torch.nn.Module:
    """A module that has the stages where the whole model has them; it can't be called.

    Of stages that are at one place it has the children, parameters and buffers. They are the same objects, so that what
    is loaded into it is loaded into the stages.

    Args:
        stages: By their numbers.
        prefixes: Of all stages: what their names begin with in the whole model.
    """
    whole = torch.nn.Module()
    for number, stage in stages.items():
        names = prefixes[number].split(".")[:-1]
        if names and sum(prefixes[other].startswith(prefixes[number]) for other in stages) == 1:
            _find_place(whole, names[:-1]).add_module(names[-1], unwrap(stage))
        else:
            _graft(unwrap(stage), _find_place(whole, names))
    return whole


def _find_place(whole: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module:
    """The module of these names; what isn't there is made."""
    place = whole
    for name in names:
        if name not in place._modules:  # noqa: SLF001 - modules may have attributes of any name
            place.add_module(name, torch.nn.Module())
        place = place.get_submodule(name)
    return place


def _graft(module: torch.nn.Module, place: torch.nn.Module) -> None:
    """Give a place all that a module has."""
    parts: Any = vars(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        vars(place)[kind].update(parts[kind])
    vars(place)["_non_persistent_buffers_set"].update(parts["_non_persistent_buffers_set"])
