"""Wrappers that leave the names of a module's parameters, buffers and sub-modules unchanged."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WrappedModule = TypeVar("WrappedModule", bound=torch.nn.Module, default=torch.nn.Module)  # a wrapper's

_MODULE_PREFIX = "module."  # prefix of names in state dicts that torch's DDP has saved


class TransparentWrapper(torch.nn.Module):
    """A wrapper whose state dict, also inside other modules, has the names of its ``checkpoint_module()``."""

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that defines the names."""
        raise NotImplementedError

    def inner_module(self) -> torch.nn.Module:
        """The same module, also in the middle of a step."""
        return self.checkpoint_module()

    def inner_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The wrapped modules with their name prefixes."""
        yield "", self.inner_module()

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """This module and the wrapped ones under their own names; see `torch.nn.Module.named_modules`."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            for name, inner in self.inner_modules():
                yield from inner.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """The module of a name from `named_modules`."""
        if target:
            with contextlib.suppress(AttributeError):
                return self.inner_module().get_submodule(target)
        return super().get_submodule(target)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter of a name from ``named_parameters``."""
        with contextlib.suppress(AttributeError):
            return self.inner_module().get_parameter(target)
        return super().get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer of a name from ``named_buffers``."""
        with contextlib.suppress(AttributeError):
            return self.inner_module().get_buffer(target)
        return super().get_buffer(target)


def strip_module_prefix(state: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """Remove the ``module.`` of torch's DDP from a state dict for a module, where all names begin with it."""
    names = list(state)
    if not names or not all(name.startswith(_MODULE_PREFIX) for name in names):
        return state
    if not set(module.state_dict(keep_vars=True)).isdisjoint(names):  # it has a child of that name
        return state
    stripped = OrderedDict((name.removeprefix(_MODULE_PREFIX), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        vars(stripped)["_metadata"] = {
            name.removeprefix(_MODULE_PREFIX.rstrip(".")).removeprefix("."): version
            for name, version in versions.items()
        }
    return stripped
