"""Names of a module that is inside of another one, for which they are to be the same."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WrappedModule = TypeVar("WrappedModule", bound=torch.nn.Module, default=torch.nn.Module)
"""The type of the module that a wrapper is made for."""

_WRAPPER = "module."
"""What names begin with in files of modules that torch's DDP has wrapped."""


class InnerNames(torch.nn.Module):
    """A wrapper whose parameters, buffers and modules have the names that its ``checkpoint_module()`` gives them.

    So they are those of its state dict, in every module that has it inside, too.
    """

    def checkpoint_module(self) -> torch.nn.Module:
        """The module whose names count."""
        raise NotImplementedError

    def inner_module(self) -> torch.nn.Module:
        """The same, whatever is under way."""
        return self.checkpoint_module()

    def inner_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """What is inside, by the names that its tensors' names begin with."""
        yield "", self.inner_module()

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """This module, and those inside, by the names that they have there; see `torch.nn.Module.named_modules`."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            for name, inner in self.inner_modules():
                yield from inner.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """The module of a name, as `named_modules` has it."""
        if target:
            with contextlib.suppress(AttributeError):
                return self.inner_module().get_submodule(target)
        return super().get_submodule(target)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter of a name, as ``named_parameters`` has it."""
        with contextlib.suppress(AttributeError):
            return self.inner_module().get_parameter(target)
        return super().get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer of a name, as ``named_buffers`` has it."""
        with contextlib.suppress(AttributeError):
            return self.inner_module().get_buffer(target)
        return super().get_buffer(target)


def without_wrapper(state: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """A state for a module, without the ``module.`` with which all names begin in what torch's DDP has saved."""
    names = list(state)
    if not names or not all(name.startswith(_WRAPPER) for name in names):
        return state
    if not set(module.state_dict(keep_vars=True)).isdisjoint(names):  # it has a child of that name
        return state
    stripped = OrderedDict((name.removeprefix(_WRAPPER), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        vars(stripped)["_metadata"] = {
            name.removeprefix(_WRAPPER.rstrip(".")).removeprefix("."): version for name, version in versions.items()
        }
    return stripped
