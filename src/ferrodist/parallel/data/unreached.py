"""Which parameters a forward's outputs depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["find_unreached"]

_CHECKPOINT = "CheckpointFunctionBackward"


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
