"""Units of a model: the modules whose parameters are gathered together."""

from __future__ import annotations

import warnings
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    WrapPolicy: TypeAlias = Callable[[str, torch.nn.Module], bool]


def by_class(*kinds: type[torch.nn.Module]) -> WrapPolicy:
    """Make each module of these classes a unit, such as the blocks of a transformer."""
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in kinds):
        raise TypeError(f"a unit's class must be a subclass of torch.nn.Module, which {kinds!r} are not")
    return lambda _name, module: isinstance(module, kinds)


def by_size(min_numel: int) -> WrapPolicy:
    """Make units of at least ``min_numel`` elements, the smallest modules that have as many first."""
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
        raise ValueError(f"min_numel must be a positive integer, not {min_numel!r}")
    seen: dict[torch.nn.Module, int] = {}

    def left(module: torch.nn.Module) -> int:
        """Elements that no unit inside the module takes."""
        if module not in seen:
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            inside = {child: left(child) for child in module.children()}
            seen[module] = own + sum(
                size for child, size in inside.items() if size < min_numel or not _is_called(child)
            )
        return seen[module]

    return lambda name, module: not name or left(module) >= min_numel  # the root is a unit, however small


class UnitSpec(NamedTuple):
    """A unit before it is sharded: a module, and its parameters without those of units inside it.

    Names are those in the model, whose own is empty; ``registrations`` are the (module, attribute) pairs of each
    parameter.
    """

    name: str
    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    registrations: dict[str, list[tuple[torch.nn.Module, str]]]


def find_units(root: torch.nn.Module, wrap: object) -> list[UnitSpec]:
    """Divide a model's parameters among units, the root first; a pure function of module and policy.

    A parameter belongs to the smallest unit that contains all modules where it is registered, so that tied ones are
    gathered whenever one of their modules is called. Units without parameters of their own are left out, except the
    root, which is alone, with a warning, if the policy chooses no module.
    """
    policy = _policy_of(wrap)
    chosen = {}
    for name, module in root.named_modules():
        answer = policy(name, module)
        if not isinstance(answer, bool):
            raise TypeError(f"the wrap policy must return True or False, not {answer!r} as for {name!r}")
        if answer:
            chosen[module] = name
    if wrap is not None and not any(map(_has_forward, chosen)):
        warnings.warn(
            f"wrap= chose no module of {type(root).__name__}, so all of it is one unit, which every rank gathers in"
            " forward and backward: name a class that it has, as that of its blocks, or leave wrap= out",
            stacklevel=3,
        )
    names = {root: "", **{module: name for module, name in chosen.items() if _is_called(module)}}
    specs = {
        module: UnitSpec(name=name, module=module, parameters={}, registrations={}) for module, name in names.items()
    }
    paths = _paths(root, names)
    found: dict[torch.nn.Parameter, tuple[str, list[tuple[torch.nn.Module, str]], list[torch.nn.Module]]] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            title = f"{prefix}.{attribute}" if prefix else attribute
            name, registrations, common = found.get(parameter, (title, [], paths[module]))
            found[parameter] = (name, [*registrations, (module, attribute)], _common(common, paths[module]))
    for parameter, (name, registrations, path) in found.items():
        specs[path[-1]].parameters[name] = parameter
        specs[path[-1]].registrations[name] = registrations
    return [spec for spec in specs.values() if spec.parameters or spec.module is root]


def _policy_of(wrap: object) -> WrapPolicy:
    if wrap is None:
        return lambda _name, _module: False
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


def _is_called(module: torch.nn.Module) -> bool:
    """True unless parameters are needed without a call of the module's forward, as in attention's last layer."""
    return _has_forward(module) and not isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _paths(root: torch.nn.Module, units: Collection[torch.nn.Module]) -> dict[torch.nn.Module, list[torch.nn.Module]]:
    """The units around each module, from the root inwards; for a module that is registered twice those around both."""
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
    """The common beginning of two paths."""
    return [first for first, _ in takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))]
