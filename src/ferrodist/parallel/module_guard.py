"""What wrappers of modules ask of autograd: the backward they are in, and when gradients reach a forward's outputs.

Parameters that a wrapper has changed for good, so that no other takes them.

The parameters that a module had when it was wrapped, and what has happened to them since.

Whether a module still consists of what it was divided as.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import base_of, current_graph_task, version_of
from ferrodist.torch_private.modules import own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def current_backward() -> int:
    """The engine's number of the backward that this thread is in, or -1."""
    return int(current_graph_task())


def find_outputs(result: object) -> list[torch.Tensor]:
    """The tensors that require grad in what a module returned; see `find_tensors`."""
    return [tensor for tensor in find_tensors(result) if tensor.requires_grad]


def find_tensors(result: object) -> list[torch.Tensor]:
    """The tensors in what a module returned.

    They are found in tuples, lists, sets, mappings and dataclasses, to any depth, and in attributes of other objects.
    """
    return list(_tensors_in(result, frozenset()))


def _tensors_in(result: object, above: frozenset[int]) -> Iterator[torch.Tensor]:
    parts: Iterable[object]
    if isinstance(result, torch.Tensor):
        yield result
        return
    if isinstance(result, Mapping):
        parts = result.values()
    elif isinstance(result, (tuple, list, set, frozenset)):
        parts = result
    elif is_dataclass(result) and not isinstance(result, type):
        parts = [getattr(result, field.name, None) for field in fields(result)]
    elif hasattr(result, "__dict__") and not isinstance(result, (type, torch.nn.Module)):
        parts = [part for part in vars(result).values() if isinstance(part, (torch.Tensor, Mapping, tuple, list))]
    else:
        return
    if id(result) in above:  # it contains itself
        return
    for part in parts:
        yield from _tensors_in(part, above | {id(result)})


def hook_gradients(outputs: Sequence[torch.Tensor], notice: Callable[[torch.Tensor], None]) -> None:
    """Have ``notice`` called when a gradient reaches one of a forward's outputs.

    Of a view also its base is hooked: an operation in place gives the view another history, without the hook. Leaves
    are hooked only where there is nothing else: they live on, and would keep the hooks of all forwards.
    """
    bases = [base for tensor in outputs if (base := base_of(tensor)) is not None]
    found = [*outputs, *(base for base in bases if base.requires_grad)]
    for tensor in [tensor for tensor in found if not tensor.is_leaf] or found:
        tensor.register_hook(notice)  # type: ignore[no-untyped-call]


_owners = WeakIdKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: str) -> None:
    """Say for as long as the parameters live, which may be longer than their owner does, what has them."""
    for parameter in parameters:
        _owners[parameter] = owner


def describe_owner(parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """A sentence about the first of these named parameters that was claimed; None when none was."""
    for name, parameter in parameters:
        if parameter in _owners:
            return f"parameter {name!r} belongs to {_owners[parameter]}"
    return None


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
