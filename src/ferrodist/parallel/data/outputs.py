"""What a forward returned: the tensors in it, and the parameters that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["find_outputs", "find_unreached"]

_CHECKPOINT = "CheckpointFunctionBackward"


def find_outputs(result: object) -> list[torch.Tensor]:
    """The tensors that require grad in tensors, tuples, lists, sets, mappings and dataclasses, to any depth."""
    return [tensor for tensor in _tensors_in(result, set()) if tensor.requires_grad]


def _tensors_in(result: object, above: set[int]) -> Iterator[torch.Tensor]:
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
    else:
        return
    if id(result) in above:  # it contains itself
        return
    for part in parts:
        yield from _tensors_in(part, above | {id(result)})


def find_unreached(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """`id` of the parameters that no output depends on; none where the outputs don't tell.

    They don't where there are none, or behind re-entrant checkpoints, whose graphs are made during backward. Walks the
    whole graph, one step of Python for each operation in it.
    """
    if not outputs:
        return frozenset()
    reached: set[int] = set()
    seen = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    reached.update(id(output) for output in outputs if output.grad_fn is None)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _CHECKPOINT:
            return frozenset()
        leaf = getattr(node, "variable", None)  # of the nodes that accumulate gradients
        if leaf is not None:
            reached.add(id(leaf))
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(id(parameter) for parameter in parameters if id(parameter) not in reached)
