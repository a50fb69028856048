"""Tensors that share memory in the stage that calls a unit, and are separate in others, such as a returned argument.

What is written in place to one of them changes the others in that stage alone. So these may not be used afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.torch_private.operators import schema_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


_OVERWRITES = frozenset(f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "random"))


@dataclass(slots=True)
class _Group:
    """Memory that is one in the stage of a unit."""

    path: str
    members: list[Any]
    is_kept: bool
    """True if a module keeps it, as a parameter or buffer."""


class UnitMemory:
    """Memory of arguments and results of units' calls."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._stale: dict[int, tuple[Any, str]] = {}  # with what an error says

    def join(self, path: str, memories: Sequence[Any], *, is_kept: bool) -> None:
        """Note that in the stage of unit ``path`` these are one; ``is_kept`` if a module keeps that."""
        group = _Group(path, [], is_kept)
        for memory in memories:
            known = self._groups.get(id(memory))
            group.members += [memory] if known is None else known.members
            group.is_kept |= known is not None and known.is_kept
        self._groups.update((id(each), group) for each in group.members)

    def write(self, tensor: torch.Tensor) -> None:
        """Note that code between units writes to a tensor; ValueError if a module keeps it."""
        memory = memory_of(tensor)
        group = self._groups.get(id(memory))
        if group is None:
            return
        if group.is_kept:
            raise ValueError(
                f"the model's code writes in place to a tensor of which module {group.path!r} has returned the memory,"
                " and which a module keeps as a parameter or buffer: write to a copy"
            )
        message = (
            f"the model's code writes in place to an argument or a result of module {group.path!r} that it also has"
            " as another tensor, and uses that one, too: stages without this module have two; write to a copy"
        )
        for each in group.members:
            if each is not memory:
                self._stale[id(each)] = each, message

    def refuse(self, memories: Iterable[Any], message: str) -> None:
        """Refuse further uses of tensors of this memory, with an error that says this."""
        self._stale.update((id(each), (each, message)) for each in memories)

    def check_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise ValueError if one of these tensors may not be used any more."""
        if not self._stale:
            return
        for tensor in tensors:
            found = self._stale.get(id(memory_of(tensor)))
            if found is not None:
                raise ValueError(found[1])


class ContainerTensors:
    """Parameters and buffers of the modules around the blocks, which must be the same before each call.

    Code may overwrite a whole buffer in each call, before it uses it.

    Args:
        tensors: The tensors by name.
        tied: The names of those that units have, too.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], tied: Collection[str]) -> None:
        self.tensors, self._tied = tensors, tied
        self._names = {id(memory_of(tensor)): name for name, tensor in tensors.items()}
        self._used: set[str] = set()
        self._overwritten: set[str] = set()

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that code between units, or a unit, uses tensors."""
        self._used.update(name for each in tensors if (name := self._names.get(id(memory_of(each)))) is not None)

    def write(self, operator: str, tensor: torch.Tensor) -> None:
        """Note that an operator writes to a tensor; ValueError if that changes what the next call finds."""
        name = self._names.get(id(memory_of(tensor)))
        if name is None or name in self._overwritten:
            return
        is_whole = operator in _OVERWRITES and tensor.shape == self.tensors[name].shape
        if is_whole and name not in self._used and name not in self._tied:
            self._overwritten.add(name)
            return
        raise ValueError(
            f"the model's code changes its buffer {name!r} in place, by {operator}, and what a stage doesn't come to"
            " would be missing from the next call: buffers of modules around the blocks must be constants; count and"
            " average outside of the model"
        )


def memory_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor, which its views share; the tensor itself if it has none."""
    return tensor.untyped_storage() if tensor.layout is torch.strided and not tensor.is_nested else tensor


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Any]:
    """The arguments that an operator writes to."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.is_write:
            yield args[index] if index < len(args) else (kwargs or {}).get(argument.name)
