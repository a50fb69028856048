"""The parts of a model that may be in different stages: its units, and the containers whose code calls them.

::

    container          a module that holds a list of blocks, at any depth, or such a list: every stage runs its code
    unit               a child of a container, itself not one: a block, an embedding, a norm, a head; one stage calls it
    container tensor   a parameter or buffer of a container itself, such as a table of positions

A unit without parameters and persistent buffers, such as a dropout or a table of rotations, has no stage of its own.
The code of containers may read a unit's constants, buffers such as default token types; see `find_constants`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from ferrodist.torch_private.modules import clear_hooks, own_buffers, own_modules, own_parameters
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnits:
    """Units and container tensors of a model, by their names in it."""

    units: dict[str, torch.nn.Module]
    """All units in the order of registration. A module with two names is there twice."""
    stateful: tuple[str, ...]
    """The units with parameters or persistent buffers, which have a stage."""
    blocks: frozenset[str]
    """The units in lists of blocks."""
    own: dict[str, torch.Tensor]
    """Parameters and buffers of containers."""


def find_units(model: torch.nn.Module, lists: Sequence[str] | None) -> ModelUnits:
    """Find the units of a model.

    Args:
        model: The model.
        lists: Names of the lists of blocks, whose children are the blocks; None finds them: the outermost ModuleLists
            and Sequentials of at least two children that have parameters and are of one class; and ModuleLists of any
            classes with at least half of the model's parameters.

    Raises:
        ValueError: The model has no such list, or a parameter has no shape yet.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is lazy, and has no shape yet: call the model once before it is split")
    if lists is None:
        found = [path for path, _ in _find_lists(model)]
    else:
        if isinstance(lists, str) or not isinstance(lists, Iterable):
            raise TypeError(f"blocks must be names of lists of blocks, such as ['model.layers'], not {lists!r}")
        found = [_check_list(model, each) for each in lists]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of at least two blocks of one class: name the"
            " lists to divide in blocks=, or use split_sequential for a Sequential of different modules"
        )
    containers = {""}
    for path in found:
        names = path.split(".")
        containers.update(".".join(names[:count]) for count in range(1, len(names) + 1))
    return _collect(model, containers, found)


def _collect(model: torch.nn.Module, containers: set[str], lists: Sequence[str]) -> ModelUnits:
    units: dict[str, torch.nn.Module] = {}
    own: dict[str, torch.Tensor] = {}
    for path, container in model.named_modules(remove_duplicate=False):
        if path not in containers:
            continue
        prefix = f"{path}." if path else ""
        tensors = {**own_parameters(container), **own_buffers(container)}
        own.update({prefix + name: tensor for name, tensor in tensors.items() if tensor is not None})
        for name, child in own_modules(container).items():
            if child is None or prefix + name in containers:
                continue
            if type(child).forward is torch.nn.Module.forward:  # a list, whose modules the container's code calls
                containers.add(prefix + name)
            else:
                units[prefix + name] = child
    return ModelUnits(
        units=units,
        stateful=tuple(path for path, unit in units.items() if unit.state_dict(keep_vars=True)),
        blocks=frozenset(path for path in units if path.rpartition(".")[0] in lists),
        own=own,
    )


def find_constants(units: ModelUnits) -> dict[str, torch.Tensor]:
    """The units' own buffers of integers that no checkpoint has, by name: every stage has them.

    Those on the meta device have no values yet, and are left out.
    """
    return {
        f"{path}.{name}": tensor
        for path in units.stateful
        for name, tensor in own_buffers(units.units[path]).items()
        if tensor is not None
        and not (tensor.is_meta or tensor.is_floating_point() or tensor.is_complex())
        and name not in units.units[path].state_dict(keep_vars=True)
    }


def _find_lists(
    module: torch.nn.Module, path: str = "", total: int | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    total = sum(each.numel() for each in module.parameters()) if total is None else total
    if _is_list_of_blocks(module, total):
        yield path, module
        return
    for name, child in own_modules(module).items():
        if child is not None:
            yield from _find_lists(child, f"{path}.{name}" if path else name, total)


def _is_list_of_blocks(module: torch.nn.Module, total: int) -> bool:
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
        return False
    children = [child for child in own_modules(module).values() if child is not None]
    if not all(any(True for _ in child.parameters()) for child in children):
        return False
    if len({type(child) for child in children}) == 1:
        return True
    size = sum(each.numel() for each in module.parameters())
    return isinstance(module, torch.nn.ModuleList) and 2 * size >= total


def _check_list(model: torch.nn.Module, path: str) -> str:
    if not isinstance(path, str):
        raise TypeError(f"blocks must be names of lists of blocks, such as ['model.layers'], not {path!r}")
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if found is None or not list(found.children()):
        raise ValueError(f"{path!r} in blocks is not a list of modules of the model: pass names such as 'model.layers'")
    return path


def copy_without_memory(
    model: torch.nn.Module, units: ModelUnits, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """A copy of a model in which units with state have ``stand_in(tensor)`` for each tensor.

    The rest is on the CPU. Values of tensors on the meta device are zeros there. Caches of keys and values are switched
    off in its configurations, and the units have no hooks.

    Raises:
        ValueError: The model can't be copied.
    """
    replaced = {
        id(tensor)
        for path in units.stateful
        for tensor in (*units.units[path].parameters(), *units.units[path].buffers())
    }
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copied = stand_in(tensor) if id(tensor) in replaced else copy_to_host(tensor)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    try:
        copied_model = copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"{with_article(type(model).__name__)} can't be copied, which split_model does with all but its"
            f" parameters: {error}"
        ) from error
    for module in copied_model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    for path in units.units:
        for module in copied_model.get_submodule(path).modules():
            clear_hooks(module)
    return copied_model


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; zeros for a tensor on the meta device."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return tensor.detach().to("cpu", copy=True)
