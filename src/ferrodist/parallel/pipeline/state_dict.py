"""State dicts of a rank's stages under the names of the whole model."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.torch_private.modules import compiled_module, own_modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class ModulePart(torch.nn.Module):
    """A part of a module of the whole model, with some of its children, of which other stages have others.

    A stage of that kind says what it has.
    """

    contents: str = "nothing"
    """The names of what a stage has, in short."""
    replicated_names: frozenset[str] = frozenset()
    """Tensors of a stage that others have under the same name."""


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers with a ``checkpoint_module()``, and inside compiled modules."""
    while True:
        wraps = getattr(module, "checkpoint_module", None)
        inner = wraps() if wraps is not None else compiled_module(module)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


class StateDictMapper:
    """Mapping between the names of a rank's stages and those of the whole model."""

    def __init__(self, stages: Mapping[int, torch.nn.Module], prefixes: Sequence[str]) -> None:
        self._stages, self._prefixes = stages, prefixes

    def make_module(self) -> torch.nn.Module:
        """A module that has the stages where the whole model has them; it can't be called.

        Of stages with one prefix it has the children, parameters and buffers. They are the same objects, so that a
        state loaded into it is loaded into the stages.
        """
        whole = torch.nn.Module()
        for index, stage in self._stages.items():
            prefix = self._prefixes[index]
            names = prefix.split(".")[:-1]
            if names and sum(self._prefixes[other].startswith(prefix) for other in self._stages) == 1:
                _get_or_add_submodule(whole, names[:-1]).add_module(names[-1], unwrap(stage))
            else:
                _add_contents(_get_or_add_submodule(whole, names), unwrap(stage))
        return whole

    def inner_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The stages, by their names in the whole model."""
        for index, stage in self._stages.items():
            yield self._prefixes[index].removesuffix("."), unwrap(stage)

    def rename(self, state: dict[str, Any], prefix: str) -> dict[str, str]:
        """Rename the tensors of a state of the whole model for ``ModuleDict`` ``stages``, in place.

        Each stage gets all tensors below its prefix, since modules may load names of earlier versions. The rest is
        dropped, except names that don't begin with ``prefix``, such as ``"pipeline."`` for a pipeline inside another
        module. Returns for each stage its new and its old prefix.
        """
        given = {name: state.pop(name) for name in [*state] if name.startswith(prefix)}
        model_prefixes = {}
        for index, stage in self._stages.items():
            own, in_model = f"{prefix}{_own_prefix(index, stage)}", f"{prefix}{self._prefixes[index]}"
            names = [name for name in given if name.startswith(in_model)]
            state.update({own + name[len(in_model) :]: given[name] for name in names})
            model_prefixes[own] = in_model
        return model_prefixes

    def rename_versions(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with its modules' versions from ``state_dict``, also under the names of ``stages``."""
        if (versions := getattr(state, "_metadata", None)) is None:
            return state
        found = dict(versions)
        for index, stage in self._stages.items():
            own = _own_prefix(index, stage)
            for name, version in versions.items():
                if f"{name}.".startswith(self._prefixes[index]):
                    rest = name[len(self._prefixes[index]) :]
                    found[f"{own}{rest}".removesuffix(".")] = version
        renamed = OrderedDict(state)
        vars(renamed)["_metadata"] = found
        return renamed


def _own_prefix(index: int, stage: torch.nn.Module) -> str:
    """The prefix of a stage's names in a pipeline."""
    inner = unwrap(stage)
    path = next(name for name, module in stage.named_modules() if module is inner)
    return f"stages.{index}.{path}".removesuffix(".") + "."


def _add_contents(whole: torch.nn.Module, module: torch.nn.Module) -> None:
    """Add a module's children, parameters and buffers to another; of children in parts all parts."""
    attributes: Any = vars(whole)
    for attribute in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        attributes[attribute].update(getattr(module, attribute))
    for name, child in own_modules(module).items():
        if isinstance(child, ModulePart):
            _add_contents(_get_or_add_submodule(whole, [name]), child)
        else:
            attributes["_modules"][name] = child


def _get_or_add_submodule(whole: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module:
    """The submodule of these names, added if it doesn't exist."""
    submodule = whole
    for name in names:
        if name not in own_modules(submodule):  # modules may have attributes of any name
            submodule.add_module(name, torch.nn.Module())
        submodule = submodule.get_submodule(name)
    return submodule
