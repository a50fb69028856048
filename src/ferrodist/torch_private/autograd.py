"""Private names of torch's autograd.

===================================================  =================
`torch._C._current_graph_task_id`                    2.10 to 2.15
`torch._C._increment_version`                        2.10 to 2.15
`torch._C._functions.AccumulateGrad`                 2.10 to 2.15
`Variable._execution_engine`                         2.10 to 2.15
`Node._sequence_nr`, `Node._raw_saved_...`           2.10 to 2.15
`Tensor._version`, `_base`                           2.10 to 2.15
`Tensor._backward_hooks`                             2.10 to 2.15
`Tensor._post_accumulate_grad_hooks`                 2.10 to 2.15
===================================================  =================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from ferrodist.torch_private.names import look_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.autograd.graph import Node

__all__ = [
    "accumulate_grad_type",
    "backward_hooks",
    "base_of",
    "current_graph_task",
    "has_accumulate_hooks",
    "increment_version",
    "queue_callback",
    "run_backward",
    "sequence_number",
    "version_of",
]

_OVERLAP = "wrapper that sends gradients while a backward runs (DDP, FSDP)"

current_graph_task: Any = look_up(torch._C, "_current_graph_task_id", _OVERLAP)
"""Return autograd's number of the backward that this thread is in, or -1."""

# The public function of this name does the same in three times the time.
increment_version: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)

_engine = getattr(Variable, "_execution_engine", None)

queue_callback: Any = look_up(_engine, "queue_callback", _OVERLAP)
"""Have a function called at the end of the backward that this thread is in."""

run_backward: Any = look_up(_engine, "run_backward", "backward of a pipeline in two phases")
"""Run a backward from edges of a graph."""

accumulate_grad_type: Any = getattr(getattr(torch._C, "_functions", None), "AccumulateGrad", None) or type(
    torch.autograd.graph.get_gradient_edge(torch.empty(0, requires_grad=True)).node
)
"""The class of the nodes of a graph that add to ``grad``."""


def sequence_number(node: Node) -> int:
    """Return when a node was made, among those of its thread."""
    return node._sequence_nr()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a view is of, or None."""
    return tensor._base


def backward_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the hooks that see the tensor's gradients."""
    return tensor._backward_hooks or {}


def has_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Whether functions are called when the tensor's ``grad`` has been added to."""
    return bool(tensor._post_accumulate_grad_hooks)
