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
`torch._C._autograd._top_saved_tensors_default_hooks`  2.10 to 2.15
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

_OVERLAP = "wrapper that sends gradients while a backward runs (DDP, FSDP)"

current_graph_task: Any = look_up(torch._C, "_current_graph_task_id", _OVERLAP)
"""Return the id of the backward that this thread runs, or -1."""

# The public function of this name takes three times the time.
increment_version: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)

_engine = getattr(Variable, "_execution_engine", None)

queue_callback: Any = look_up(_engine, "queue_callback", _OVERLAP)
"""Call a function at the end of the backward that this thread runs."""

run_backward: Any = look_up(_engine, "run_backward", "backward of a pipeline in two phases")
"""Run a backward from edges of the graph."""

accumulate_grad_type: Any = getattr(getattr(torch._C, "_functions", None), "AccumulateGrad", None) or type(
    torch.autograd.graph.get_gradient_edge(torch.empty(0, requires_grad=True)).node
)
"""The class of graph nodes that accumulate into ``grad``."""


def sequence_number(node: Node) -> int:
    """Return the sequence number of a node among those of its thread."""
    return node._sequence_nr()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view, or None."""
    return tensor._base


def backward_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the hooks on a tensor's gradient."""
    return tensor._backward_hooks or {}


def has_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks that run after its ``grad`` is accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


_top_saved_tensor_hooks: Any = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", lambda _ignores_tracing: True
)


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks take what autograd saves, as those of activation checkpoints; True if torch can't say."""
    return _top_saved_tensor_hooks(True) is not None
