"""Whether a module still consists of what it was divided as."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    import torch

__all__ = ["Structure"]


class Structure:
    """Remembers a module's sub-modules and the names of their parameters, cheaply enough to look in every forward.

    Args:
        module: The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._remember()

    def _remember(self) -> None:
        self._parts = [
            (each, list(own_modules(each).items()), list(own_parameters(each))) for each in self._module.modules()
        ]

    def check(self) -> None:
        """Raise if parameters were added or removed, or sub-modules that have some.

        Raises:
            UnsupportedOpError: One is named.
        """
        if all(
            list(own_modules(each).items()) == modules and list(own_parameters(each)) == parameters
            for each, modules, parameters in self._parts
        ):
            return
        before = {id(module) for module, _, _ in self._parts}
        for path, each in self._module.named_modules():
            if id(each) in before:
                continue
            name = next((name for name, _ in each.named_parameters(prefix=path)), None)
            if name is not None:
                self._refuse(name, "was added")
        names = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        for name in sorted(names ^ self._names):
            self._refuse(name, "was added" if name in names else "was removed")
        self._remember()  # sub-modules without parameters came or went

    def _refuse(self, name: str, what: str) -> None:
        raise UnsupportedOpError(
            f"parameter {name!r} {what} after FSDP was made, which divides those that it was made with: change the"
            " module first, and then make FSDP of it, on all ranks"
        )
