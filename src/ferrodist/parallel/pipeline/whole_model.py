"""A rank's stages as parts of the whole model: modules under the names that they have there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["make_whole", "unwrap"]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module whose names count: what wraps it says so by ``checkpoint_module()``."""
    while (wraps := getattr(module, "checkpoint_module", None)) is not None:
        module = wraps()
    return module


def make_whole(stages: Mapping[int, torch.nn.Module], prefixes: Sequence[str]) -> torch.nn.Module:
    """A module that has the stages' children, parameters and buffers where the whole model has them.

    They are the same objects, so that what is loaded into it is loaded into the stages. It can't be called.

    Args:
        stages: By their numbers.
        prefixes: Of all stages: what their names begin with in the whole model.
    """
    whole = torch.nn.Module()
    for number, stage in stages.items():
        place = whole
        for name in prefixes[number].split(".")[:-1]:
            if name not in place._modules:  # noqa: SLF001 - modules may have attributes of any name
                place.add_module(name, torch.nn.Module())
            place = place.get_submodule(name)
        _graft(unwrap(stage), place)
    return whole


def _graft(module: torch.nn.Module, place: torch.nn.Module) -> None:
    """Give a place all that a module has."""
    parts: Any = vars(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        vars(place)[kind].update(parts[kind])
    vars(place)["_non_persistent_buffers_set"].update(parts["_non_persistent_buffers_set"])
