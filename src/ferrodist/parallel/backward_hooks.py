"""Hooks on a forward's outputs, where a backward begins; the running backward; a check of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import base_of, current_graph_task

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
