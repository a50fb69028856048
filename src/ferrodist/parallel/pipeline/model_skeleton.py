"""A copy of a model without parameters, whose units' calls go to a handler."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.parallel.pipeline.model_flow import is_integer
from ferrodist.parallel.pipeline.model_units import ModelUnits, copy_to_host, copy_without_memory, find_constants
from ferrodist.torch_private.modules import clear_hooks, own_buffers, own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Set as AbstractSet


_REFUSED = "_ferrodist_refused"  # the attribute with names that can't be read, and what to call them


class _CallHandler(threading.local):
    """The handler of calls of a skeleton's units, in this thread: (path, args, kwargs) to the result.

    Args:
        skeleton: The skeleton; its ``own_unit`` is called where there is no handler, when a checkpoint computes again.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None


class Skeleton:
    """A copy of a model without parameters, whose units pass their calls on to a `_CallHandler`."""

    def __init__(self, model: torch.nn.Module, units: ModelUnits) -> None:
        self.own_unit: Callable[[str], torch.nn.Module | None] = lambda _path: None
        """Finds a unit of the stage that runs the skeleton; None for those of others."""
        self.handler = _CallHandler(self)
        self._paths = tuple(units.units)
        self._constants = find_constants(units)
        kept = {id(tensor) for tensor in self._constants.values()}
        self.model = copy_without_memory(
            model, units, lambda tensor: copy_to_host(tensor) if id(tensor) in kept else _one_element(tensor, "cpu")
        )
        self._device = torch.device("cpu")
        originals = {path: self.model.get_submodule(path) for path in self._paths}
        self._weights = {
            f"{path}.{name}": tensor
            for path in units.stateful
            for name, tensor in (*originals[path].named_parameters(), *originals[path].named_buffers())
            if f"{path}.{name}" not in self._constants
        }
        proxies = {path: _make_proxy(original, path, self.handler) for path, original in originals.items()}
        memo: dict[int, Any] = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        memo.update({id(original): proxies[path] for path, original in reversed(originals.items())})
        self.model = copy.deepcopy(self.model, memo)
        for path, proxy in proxies.items():  # a module with two names has two proxies
            parent, _, name = path.rpartition(".")
            own_modules(self.model.get_submodule(parent))[name] = proxy

    def install(self, own: Mapping[str, torch.Tensor]) -> None:
        """Put tensors in the place of the model's own parameters and buffers."""
        for name, tensor in own.items():
            parent, _, key = name.rpartition(".")
            container = self.model.get_submodule(parent)
            tables: list[dict[str, Any]] = [own_parameters(container), own_buffers(container)]
            next(table for table in tables if key in table)[key] = tensor

    def move_to(self, device: torch.device) -> None:
        """Give the units' stand-ins for parameters, and their constants, the device of the real ones."""
        if device == self._device:
            return
        for path, module in self.model.named_modules():
            tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        is_constant = f"{path}.{name}" in self._constants
                        moved = tensor.to(device) if is_constant else _one_element(tensor, device)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        table[name] = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        self._device = device

    def refuse_reads(self, changed: Mapping[str, AbstractSet[str]]) -> None:
        """Refuse reads of attributes of units, which only the units' own stages have set."""
        for path, names in changed.items():
            for full_name in names:
                part, _, name = full_name.rpartition(".")
                try:
                    module = self.model.get_submodule(f"{path}.{part}" if part else path)
                except AttributeError:  # made by the forward
                    continue
                contents = vars(module)
                if _REFUSED not in contents:
                    contents[_REFUSED] = {}
                    kind: Any = type(module)
                    object.__setattr__(module, "__class__", _guarded_class(kind))  # not the proxy's own
                contents[_REFUSED][name] = f"{path}.{full_name}"

    def run(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run the model's code, with ``call`` for each call of a unit."""
        before, self.handler.call = self.handler.call, call
        try:
            return self.model(*args, **kwargs)
        finally:
            self.handler.call = before

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The stand-ins for the units' parameters and buffers."""
        return self._weights


@functools.cache
def _proxy_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_ferrodist_forward"](args, kwargs)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        path, handler = vars(self)["_ferrodist_path"]
        if handler.call is not None:
            raise ValueError(
                f"the model's code sets {f'{path}.{name}'!r} outside of the forward of this module, which only its"
                " stage has: pass the value as an argument"
            )
        kind.__setattr__(self, name, value)

    return _derive(kind, {"__call__": torch.nn.Module.__call__, "forward": forward, "__setattr__": set_attribute})


@functools.cache
def _guarded_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class whose instances refuse reads of some attributes."""

    def get(self: Any, name: str) -> Any:
        refused = object.__getattribute__(self, "__dict__").get(_REFUSED, {})
        if name in refused:
            raise ValueError(
                f"the model's code reads {refused[name]!r}, which the forward of this module sets, and which only its"
                " stage has: let it return the value"
            )
        return kind.__getattribute__(self, name)

    return _derive(kind, {"__getattribute__": get, "forward": kind.forward})


def _derive(kind: type[torch.nn.Module], contents: dict[str, Any]) -> type[torch.nn.Module]:
    derived: Any = type(kind.__name__, (kind,), {**contents, "__module__": kind.__module__})
    derived.forward = contents["forward"]  # transformers' __init_subclass__ wraps it for checkpointing
    return derived  # type: ignore[no-any-return]


def _one_element(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A view of one element, which has shape, dtype and device for code that asks for them; its values are NaN."""
    is_floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.full((), torch.nan if is_floating else 0, dtype=tensor.dtype, device=device).expand(tensor.shape)


def _make_proxy(original: torch.nn.Module, path: str, handler: _CallHandler) -> torch.nn.Module:
    """A module with all attributes of a unit, whose calls go to the handler."""

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handler.call is not None:
            return handler.call(path, args, kwargs)
        unit = handler.skeleton.own_unit(path)
        if unit is None:
            raise RuntimeError(
                f"module {path!r} was called outside of the forward of its stage: call the stage instead; a"
                " torch.utils.checkpoint in the model's code can only have modules of one stage"
            )
        return unit(*args, **kwargs)

    kind: type[torch.nn.Module] = _proxy_class(type(original))  # type: ignore[arg-type] # any class has a hash
    proxy = kind.__new__(kind)
    vars(proxy).update(vars(original))
    vars(proxy).pop("forward", None)  # modules may have one of their own
    vars(proxy)["_ferrodist_path"] = path, handler
    clear_hooks(proxy)
    vars(proxy)["_ferrodist_forward"] = forward
    return proxy


def allocate(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor like one on the meta device, of NaN, or of zeros for integers."""
    real = torch.full_like(tensor, 0 if is_integer(tensor.dtype) else torch.nan, device=device, requires_grad=False)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(real, requires_grad=tensor.requires_grad) if is_parameter else real


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own parameters and buffers."""
    return {**own_parameters(module), **own_buffers(module)}


@contextlib.contextmanager
def dense(module: torch.nn.Module, kept: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give a module memory in place of its stand-ins, so that it can be initialised; some tensors are kept."""
    tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
    replaced = [(table, dict(table)) for table in tables]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and name not in kept:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                table[name] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    try:
        yield
    finally:
        for table, before in replaced:
            table.update({name: tensor for name, tensor in before.items() if name not in kept})
