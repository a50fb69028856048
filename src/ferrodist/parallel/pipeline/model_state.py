"""State that a model's code keeps in attributes of modules: which of it a run changes, and which modules share it.

Stages run copies of the model's code, and each unit in one stage only. So an object that a unit and another module have
as an attribute, such as a list of losses, is another one in each copy: what one writes to it, the others don't see.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import UserDict, deque
from enum import Enum
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferrodist.parallel.pipeline.model_memory import memory_of
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import hooks_of, own_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ferrodist.parallel.pipeline.model_units import ModelUnits

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that all modules have
_CODE = "the model's code"
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEVELS = 3  # of objects in each other that are looked at
_MANY = 1000  # items of a collection that are
_MOST = 10_000  # objects that are
_MOST_BYTES = 1 << 20  # of an array that is
_NOT_ENTERED = {"torch", "ferrodist", "logging"}  # whose objects change when they are used, such as a logger


class Snapshot:
    """The contents of an object, and of objects in it, to find out whether they have changed.

    Args:
        value: Any object. Modules, functions and classes are not entered.
    """

    def __init__(self, value: Any) -> None:
        self._contents = list(islice(_contents_of(value, _LEVELS, set()), _MOST))
        self._versions = [_version(each) for each in self._contents]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot) or self._versions != other._versions:
            return False
        return len(self._contents) == len(other._contents) and all(map(_is_same, self._contents, other._contents))

    __hash__ = None  # type: ignore[assignment]


def attributes_of(module: torch.nn.Module) -> dict[str, tuple[Any, Snapshot]]:
    """The attributes and buffers of a module and of the modules in it, by name, each with its contents."""
    known: dict[int, Snapshot] = {}  # of objects that many modules have, such as configurations
    return {
        f"{path}.{name}".lstrip("."): (value, _snapshot_once(value, known))
        for path, part in module.named_modules()
        for name, value in (*vars(part).items(), *own_buffers(part).items())
        if name not in _OF_MODULES
    }


def changed_attributes(before: Mapping[str, tuple[Any, Snapshot]], module: torch.nn.Module) -> dict[str, bool]:
    """The names of attributes that were set, or whose objects have changed, since `attributes_of`.

    True is for those whose former objects have changed.
    """
    after = attributes_of(module)
    found = {name: Snapshot(value) != state for name, (value, state) in before.items()}
    return {
        name: found.get(name, False)
        for name in {**before, **after}
        if found.get(name) or name not in before or name not in after or not _is_same(before[name][0], after[name][0])
    }


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module itself, but for those that all modules have."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def names_in_evaluation(model: torch.nn.Module) -> frozenset[str]:
    """The names of a model's modules in mode of evaluation."""
    return frozenset(path for path, part in model.named_modules(remove_duplicate=False) if not part.training)


def set_evaluation(model: torch.nn.Module, evaluating: AbstractSet[str]) -> None:
    """Set mode of evaluation for a model's modules of these names, and mode of training for all others."""
    for path, part in model.named_modules(remove_duplicate=False):
        part.training = path not in evaluating


class SharedObjects:
    """The objects that units have as attributes and that other modules of a model have, too.

    Args:
        model: The model.
        units: The model's units.
    """

    def __init__(self, model: torch.nn.Module, units: ModelUnits) -> None:
        self._users: dict[int, dict[int, str]] = {}
        self._kept: list[Any] = []  # so that no other object gets their ids
        inner = {id(part) for unit in units.units.values() for part in unit.modules()}
        self.containers = {path: part for path, part in model.named_modules() if id(part) not in inner}
        """The modules outside of units, by name."""
        for part in self.containers.values():
            self._add(_attributes(part), 0, _CODE)
        for path, unit in units.units.items():
            for part in unit.modules():
                self._add([part, *_attributes(part)], id(unit), f"module {path!r}")
        self.of_hooks = {path: found for path, unit in units.units.items() if (found := self._captured(unit))}
        """For each unit with hooks the objects of other modules that these have."""
        for path, captured in self.of_hooks.items():
            self._add(captured, id(units.units[path]), f"a hook of module {path!r}")
        self.of_code = [
            (path, name)
            for path, part in self.containers.items()
            for name, value in attributes(part).items()
            if id(part) in self._users or self.other_user(value, None) is not None
        ]
        """The attributes of containers with objects that units or their hooks have, too, and all of those containers
        that they have themselves: names of container and attribute."""

    def other_user(self, value: Any, unit: torch.nn.Module | None) -> str | None:
        """The name of another user of an object, or of one in it; ``unit`` is the one that has it, None the code."""
        own = 0 if unit is None else id(unit)
        for each in _mutable_in(value):
            for user, name in self._users.get(id(_identity(each)), {}).items():
                if user != own:
                    return name
        return None

    def _add(self, values: Iterable[Any], user: int, name: str) -> None:
        for value in values:
            for each in _mutable_in(value):
                self._users.setdefault(id(_identity(each)), {}).setdefault(user, name)
                self._kept.append(_identity(each))

    def _captured(self, unit: torch.nn.Module) -> list[Any]:
        hooks = [hook for part in unit.modules() for hook in hooks_of(part)]
        containers = {id(part) for part in self.containers.values()}
        found = [each for hook in hooks for each in captured_by(hook)]
        return [each for each in found if id(each) in containers or self.other_user(each, unit) is not None]


def _identity(value: Any) -> Any:
    """An object, or the memory of a tensor."""
    return memory_of(value) if isinstance(value, torch.Tensor) else value


def describe(objects: Sequence[Any]) -> list[Snapshot]:
    """The contents of objects, and the attributes of those that are modules."""
    values = (_attributes(each) if isinstance(each, torch.nn.Module) else [each] for each in objects)
    return [Snapshot(value) for several in values for value in several]


def _attributes(module: torch.nn.Module) -> list[Any]:
    return [*attributes(module).values(), *(each for each in own_buffers(module).values() if each is not None)]


def _mutable_in(value: Any) -> Iterator[Any]:
    """The objects that may change, in an object and with it: tensors, modules and collections, for example."""
    for each in islice(_contents_of(value, _LEVELS, set()), _MOST):
        is_entered = not isinstance(each, (*_PLAIN, tuple, frozenset, Enum)) and _children(each) is not None
        if is_entered or isinstance(each, (torch.Tensor, torch.nn.Module, np.ndarray)):
            yield each


def captured_by(function: Any, levels: int = _LEVELS) -> Iterator[Any]:
    """The objects that a function keeps: in its closure and defaults; those of a partial, a method or an object."""
    if isinstance(function, MethodType):
        inner = [function.__self__, function.__func__]
    elif isinstance(function, functools.partial):
        inner = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, FunctionType):
        cells = [each for cell in function.__closure__ or () for each in gc.get_referents(cell)]  # none if empty
        inner = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        inner = list(getattr(function, "__dict__", {}).values()) if callable(function) else []
    for each in inner:
        yield each
        is_function = isinstance(each, (FunctionType, MethodType, functools.partial))
        if is_function and levels > 0:
            yield from captured_by(each, levels - 1)


def _contents_of(value: Any, levels: int, seen: set[int]) -> Iterator[Any]:
    """An object and those in it, up to some levels, each once."""
    yield value
    if id(value) in seen or levels == 0:
        return
    children = _children(value)
    if children is None:
        return
    seen.add(id(value))
    for each in children:
        yield from _contents_of(each, levels - 1, seen)


def _children(value: Any) -> list[Any] | None:
    """The objects in one; None for one that isn't entered, or can't be."""
    if isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, MethodType)):
        return None
    try:
        if isinstance(value, (dict, UserDict)):
            kind: Any = dict if isinstance(value, dict) else UserDict
            return [len(value), *islice(kind.keys(value), _MANY), *islice(kind.values(value), _MANY)]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [len(value), *islice(value, _MANY)]
        is_entered = str(type(value).__module__).partition(".")[0] not in _NOT_ENTERED
        return _attributes_of_object(value) if is_entered else None
    except Exception:  # noqa: BLE001 - of the object's own code, or of another thread's writes
        return None


def _attributes_of_object(value: Any) -> list[Any] | None:
    kinds = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    slots = [slot for kind in kinds for slot in kind.values() if isinstance(slot, MemberDescriptorType)]
    found: list[Any] = []
    for slot in slots:
        with contextlib.suppress(AttributeError):  # not set
            found += [slot.__name__, slot.__get__(value)]
    try:
        contents = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found if slots else None
    return [*found, *contents.keys(), *contents.values()]


def _version(value: Any) -> int:
    """The number of writes to a tensor, or a hash of a small array's contents."""
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.nbytes <= _MOST_BYTES else 0
    return version_of(value) if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _snapshot_once(value: Any, known: dict[int, Snapshot]) -> Snapshot:
    if id(value) not in known:
        known[id(value)] = Snapshot(value)
    return known[id(value)]
