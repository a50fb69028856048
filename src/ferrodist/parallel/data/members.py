"""The parameters that a module had when it was wrapped, and what has happened to them since."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Members"]


class Members:
    """Remembers a module's sub-modules and parameters, cheaply enough to look at them in every step.

    Args:
        module: The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._names = dict(module.named_parameters(remove_duplicate=False))
        self._places = _find_places(module)
        self._parameters = tuple(module.parameters())
        self._trainable = self._find_trainable()
        self._versions: tuple[int, ...] = ()

    def check_same(self, title: str, *, maker: str = "DDP") -> None:
        """Raise if parameters were added, replaced or removed.

        Raises:
            UnsupportedOpError: Naming the first of them.
        """
        if all(
            _are_same(parameters, old) and _are_same(modules, old_modules)
            for parameters, old, modules, old_modules in self._places
        ):
            return
        if change := self._find_change():
            name, what = change
            raise UnsupportedOpError(
                f"parameter {name!r} of {title} {what} after that was made, and it averages those that it was made"
                f" with. Change the module first, and then make a new {maker} of it, on all ranks; to change"
                " values, write to the parameter in place (copy_, load_state_dict without assign=True)."
            )
        self._places = _find_places(self._module)  # sub-modules without parameters came or went

    def _find_change(self) -> tuple[str, str] | None:
        """The name of a parameter, and what has happened to it."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name in [*now, *self._names]:
            if name not in self._names:
                return name, "was added"
            if name not in now:
                return name, "was removed"
            if now[name] is not self._names[name]:
                return name, "was replaced by another"
        return None

    def change_trainable(self) -> bool:
        """Whether other parameters require grad than when this was last asked."""
        now = self._find_trainable()
        changed, self._trainable = now != self._trainable, now
        return changed

    def have_changed(self) -> bool:
        """Whether the version counter of a parameter has changed since this was last asked."""
        now = tuple(map(version_of, self._parameters))
        changed, self._versions = now != self._versions, now
        return changed

    def _find_trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]


def _find_places(module: torch.nn.Module) -> list[Any]:
    """Of each sub-module its own dictionaries, which are faster to look at than `named_parameters` is to walk."""
    return [
        (parameters, tuple(parameters.values()), modules, tuple(modules.values()))
        for parameters, modules in ((own_parameters(owner), own_modules(owner)) for owner in module.modules())
    ]


def _are_same(now: Mapping[str, object], old: tuple[object, ...]) -> bool:
    return len(now) == len(old) and all(map(operator.is_, now.values(), old))
