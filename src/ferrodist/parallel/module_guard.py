"""`ModuleGuard`, which notices a module that is changed after DDP, FSDP or LocalSGD wrapped it."""

from __future__ import annotations

import operator
from itertools import starmap
from typing import TYPE_CHECKING, Any

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class ModuleGuard:
    """Notices changes of a module's sub-modules and parameters, cheaply enough to look in every step.

    Of a wrapper that ``exchanges_parameters`` itself, as FSDP does, only their names must stay.
    """

    def __init__(self, module: torch.nn.Module, wrapper: str, *, exchanges_parameters: bool = False) -> None:
        self._module, self._wrapper, self._exchanges = module, wrapper, exchanges_parameters
        self._named = dict(module.named_parameters(remove_duplicate=False))
        self._parameters = tuple(module.parameters())
        self._requires_grad = self._read_requires_grad()
        self._versions: tuple[int, ...] = ()
        self._remember()

    def _remember(self) -> None:
        self._modules = list(self._module.modules())
        members = ((own_parameters(each), own_modules(each)) for each in self._modules)
        self._members: list[tuple[Mapping[str, Any], list[Any], Mapping[str, Any], list[Any]]] = [
            (parameters, list(parameters), modules, list(modules.items()))
            if self._exchanges
            else (parameters, list(parameters.values()), modules, list(modules.values()))
            for parameters, modules in members
        ]

    def check_unchanged(self, title: str) -> None:
        """Raise UnsupportedOpError, naming the first of them, if parameters were added, replaced or removed."""
        if all(starmap(_same_names if self._exchanges else _same_objects, self._members)):
            return
        if change := self._find_change():
            name, what = change
            values = "; to change values, write to the parameter in place (copy_, load_state_dict without assign=True)"
            raise UnsupportedOpError(
                f"parameter {name!r} of {title} {what} after {self._wrapper} was made of the module. Change the module"
                f" first, and then make a new {self._wrapper} of it, on all ranks{'' if self._exchanges else values}."
            )
        self._remember()  # sub-modules without parameters came or went

    def _find_change(self) -> tuple[str, str] | None:
        """The name of a changed parameter and what has happened to it."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        known = set(map(id, self._modules))
        if self._exchanges:  # a module that was replaced may have parameters of the same names
            for path, each in self._module.named_modules():
                if id(each) not in known and (name := next(iter(dict(each.named_parameters(prefix=path))), None)):
                    return name, "was added"
        for name in [*now, *self._named]:
            if name not in self._named:
                return name, "was added"
            if name not in now:
                return name, "was removed"
            if not self._exchanges and now[name] is not self._named[name]:
                return name, "was replaced by another"
        return None

    def take_requires_grad_change(self) -> bool:
        """True if other parameters require grad than at the last call; the next call compares with this one."""
        now = self._read_requires_grad()
        changed, self._requires_grad = now != self._requires_grad, now
        return changed

    def take_value_change(self) -> bool:
        """True if a parameter's version counter differs from the last call; the next call compares with this one."""
        now = tuple(map(version_of, self._parameters))
        changed, self._versions = now != self._versions, now
        return changed

    def _read_requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]


# These look at the modules' own dictionaries, which is faster than a walk by `named_parameters`.


def _same_names(
    parameters: Mapping[str, Any], names: list[Any], modules: Mapping[str, Any], named_modules: list[Any]
) -> bool:
    return list(modules.items()) == named_modules and list(parameters) == names


def _same_objects(
    parameters: Mapping[str, Any], known: list[Any], modules: Mapping[str, Any], known_modules: list[Any]
) -> bool:
    return (
        len(parameters) == len(known)
        and len(modules) == len(known_modules)
        and all(map(operator.is_, parameters.values(), known))
        and all(map(operator.is_, modules.values(), known_modules))
    )
