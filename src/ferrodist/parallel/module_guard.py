"""Wrappers' view of a module: the backward under way, hooks on outputs, owners of parameters, and `ModuleGuard`.

DDP, FSDP, LocalSGD and tensor parallelism share these. `current_backward_id` and `hook_gradients` find where a backward
begins, `claim_parameters` marks parameters that a wrapper has changed for good, and `ModuleGuard` notices a module that
is changed after it was wrapped.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import base_of, current_graph_task, version_of
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


def current_backward_id() -> int:
    """Autograd's id of the backward that this thread runs, or -1."""
    return int(current_graph_task())


def find_outputs(result: object) -> list[torch.Tensor]:
    """The tensors that require grad in a module's result; see `find_tensors`."""
    return [tensor for tensor in find_tensors(result) if tensor.requires_grad]


def find_tensors(result: object, ancestors: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """The tensors in a module's result: in containers, dataclasses and attributes of objects, at any depth."""
    children: Iterable[object]
    if isinstance(result, torch.Tensor):
        yield result
        return
    if isinstance(result, Mapping):
        children = result.values()
    elif isinstance(result, (tuple, list, set, frozenset)):
        children = result
    elif is_dataclass(result) and not isinstance(result, type):
        children = [getattr(result, field.name, None) for field in fields(result)]
    elif hasattr(result, "__dict__") and not isinstance(result, (type, torch.nn.Module)):
        children = [child for child in vars(result).values() if isinstance(child, (torch.Tensor, Mapping, tuple, list))]
    else:
        return
    if id(result) in ancestors:  # it contains itself
        return
    for child in children:
        yield from find_tensors(child, ancestors | {id(result)})


def hook_gradients(outputs: Sequence[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` when a gradient reaches one of a forward's outputs.

    The base of a view is hooked too: an in-place operation gives the view another history, without the hook. Leaves
    are hooked only where there is nothing else: they outlive the forward and would accumulate hooks.
    """
    bases = [base for tensor in outputs if (base := base_of(tensor)) is not None]
    found = [*outputs, *(base for base in bases if base.requires_grad)]
    for tensor in [tensor for tensor in found if not tensor.is_leaf] or found:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def weak_method(owner: object, method: Callable[..., None], *bound: object) -> Callable[..., None]:
    """Bind a method, and first arguments, without holding its object: for hooks that the object itself holds."""
    reference = weakref.ref(owner)

    def call(*arguments: object) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *bound, *arguments)

    return call


def check_dense(
    names: Sequence[str], parameters: Sequence[torch.nn.Parameter], group: Backend, *, wrapper: str
) -> None:
    """Raise for a gradient that is not dense."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UnsupportedOpError(
                f"the gradient of {name!r} on rank {group.rank} of group {group.name!r} has layout"
                f" {parameter.grad.layout}: {wrapper} averages dense gradients, as of an embedding with sparse=False",
                ranks=(group.rank,),
            )


_claims = WeakIdKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: str) -> None:
    """Mark parameters as an owner's for as long as they live, which may be longer than the owner does."""
    for parameter in parameters:
        _claims[parameter] = owner


def describe_claim(parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The claim on the first of these named parameters that has one, as a clause for messages, or None."""
    for name, parameter in parameters:
        if parameter in _claims:
            return f"parameter {name!r} belongs to {_claims[parameter]}"
    return None


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
