"""Which modules are units: what is gathered together."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

if TYPE_CHECKING:
    WrapPolicy: TypeAlias = Callable[[str, torch.nn.Module], bool]


def by_class(*kinds: type[torch.nn.Module]) -> WrapPolicy:
    """Make each module of these classes a unit, as the blocks of a transformer are."""
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in kinds):
        raise TypeError(f"a unit's class must be a subclass of torch.nn.Module, which {kinds!r} are not")
    return lambda _name, module: isinstance(module, kinds)


def by_size(min_numel: int) -> WrapPolicy:
    """Make units of at least ``min_numel`` elements, the smallest modules that have as many first."""
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
        raise ValueError(f"min_numel must be a positive integer, not {min_numel!r}")
    seen: dict[torch.nn.Module, int] = {}

    def left(module: torch.nn.Module) -> int:
        """Elements that no unit inside of the module takes."""
        if module not in seen:
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            inside = {child: left(child) for child in module.children()}
            seen[module] = own + sum(
                size for child, size in inside.items() if size < min_numel or not _is_called(child)
            )
        return seen[module]

    return lambda name, module: not name or left(module) >= min_numel  # the root is a unit, however small


@dataclass(slots=True, kw_only=True)
class UnitPlan:
    """A unit to be.

    Args:
        name: Its module's name; empty for the whole model.
        module: Its module.
        parameters: Its parameters, by name: those of the module that no unit inside takes.
        places: Where each of them is registered: (module, attribute).
    """

    name: str
    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    places: dict[str, list[tuple[torch.nn.Module, str]]]


def plan_units(root: torch.nn.Module, wrap: object) -> list[UnitPlan]:
    """Divide a model's parameters over units; a pure function of module and policy.

    A parameter belongs to the smallest unit that has all modules where it is registered, so that tied ones are gathered
    whenever one of their modules is called. Units without parameters of their own are left out, but for the root.

    Args:
        root: The model, which is the first unit.
        wrap: A module class, several of them, or a function of a module's name and the module. None makes one unit; so
            does what chooses no module, with a warning.

    Raises:
        TypeError: ``wrap`` is none of these, or returned no bool.
    """
    policy = _policy_of(wrap)
    chosen = {module: name for name, module in root.named_modules() if _chooses(policy, name, module)}
    if policy is not None and not any(map(_has_forward, chosen)):
        warnings.warn(
            f"wrap= chose no module of {type(root).__name__}, so all of it is one unit, which every rank has whole in"
            " forward and backward: name a class that it has, as that of its blocks, or leave wrap= out",
            stacklevel=3,
        )
    names = {root: "", **{module: name for module, name in chosen.items() if _is_called(module)}}
    plans = {module: UnitPlan(name=name, module=module, parameters={}, places={}) for module, name in names.items()}
    paths = _paths(root, names)
    found: dict[torch.nn.Parameter, tuple[str, list[tuple[torch.nn.Module, str]], list[torch.nn.Module]]] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            title = f"{prefix}.{attribute}" if prefix else attribute
            if parameter not in found:
                found[parameter] = (title, [], paths[module])
            name, places, common = found[parameter]
            places.append((module, attribute))
            found[parameter] = (name, places, _common(common, paths[module]))
    for parameter, (name, places, path) in found.items():
        plans[path[-1]].parameters[name] = parameter
        plans[path[-1]].places[name] = places
    return [plan for plan in plans.values() if plan.parameters or plan.module is root]


def _policy_of(wrap: object) -> WrapPolicy | None:
    if wrap is None:
        return None
    if isinstance(wrap, type):
        return by_class(wrap)
    if isinstance(wrap, (set, frozenset, tuple, list)):
        kinds: Collection[type[torch.nn.Module]] = wrap
        return by_class(*kinds)
    if callable(wrap):
        return wrap
    raise TypeError(
        f"wrap must be a module class, several of them, a function of a module's name and the module, or None, not"
        f" {type(wrap).__name__}"
    )


def _chooses(policy: WrapPolicy | None, name: str, module: torch.nn.Module) -> bool:
    if policy is None:
        return False
    answer = policy(name, module)
    if not isinstance(answer, bool):
        raise TypeError(f"the wrap policy must return True or False, not {answer!r} as for {name!r}")
    return answer


def _is_called(module: torch.nn.Module) -> bool:
    """Whether a module's forward says when its parameters are needed.

    Not that of a ModuleList, which has none, nor of attention's last layer, whose weight the attention itself uses.
    """
    return _has_forward(module) and not isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _paths(root: torch.nn.Module, units: Collection[torch.nn.Module]) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """The units around each module, from the root's inwards; of a module in two places those around both."""
    paths: dict[torch.nn.Module, list[torch.nn.Module]] = {}

    def visit(module: torch.nn.Module, above: list[torch.nn.Module]) -> None:
        path = [*above, module] if module in units else above
        known = paths.get(module)
        if known is not None:
            path = known if module in units else _common(known, path)
            if path == known:
                return
        paths[module] = path
        for child in module.children():
            visit(child, path)

    visit(root, [])
    return paths


def _common(one: list[torch.nn.Module], other: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """What two paths from the root have in common."""
    number = 0
    while number < min(len(one), len(other)) and one[number] is other[number]:
        number += 1
    return one[:number]
