"""What wrappers of modules ask of autograd: the backward they are in, and when gradients reach a forward's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.torch_private.autograd import base_of, current_graph_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["current_backward", "find_outputs", "find_tensors", "hook_gradients"]


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
