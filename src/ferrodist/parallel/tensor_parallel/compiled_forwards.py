"""Placement of a module's inputs and outputs in graphs of torch.compile.

[Note: compiled parallel modules]
The compiler traces a model's own code, and sees DTensors as tensors. What the wrapped forwards do to inputs and outputs
is a call in its graph, of a function that is given here, whose operators the compiler traces later: on shards, with the
operators of `tensor.traced` for moves between ranks. A graph names the placements by a text.

What a graph can't have (data-dependent code, an operator without a rule) breaks it, or is an error with
``fullgraph=True``. Between graphs the wrapped forwards run as without a compiler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Placement, Replicate
from ferrodist.tensor.plain_tensors import attach_compiled_check
from ferrodist.tensor.traced import find_named, name_for_graphs
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.compilers import allow_in_graphs, run_while_tracing

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.replica_check import ReplicaCheck


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlacement:
    """A placement that graphs give to tensors; ``given`` is that of plain ones.

    If ``wanted`` is None, DTensors stay as they are.
    """

    mesh: DeviceMesh
    given: Placement
    wanted: Placement | None

    @property
    def name(self) -> str:
        """The text by which graphs name this."""
        return name_for_graphs(f"{self.given} to {self.wanted}", self, self.mesh)


_PLACED = "_ferrodist_placed"
"""The attribute of a graph's tensor that has what `place` made of it."""


def place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor as a DTensor with the placement of a `GraphPlacement`.

    Layers that take the same tensor get the same result: the sum of its gradients is reduced over the ranks.
    """
    placement: GraphPlacement = find_named(name)
    if not isinstance(tensor, DTensor):
        shape = tensor.shape if isinstance(placement.given, Replicate | Partial) else None
        tensor = DTensor.from_local(tensor, placement.mesh, placement.given, shape=shape)
    if placement.wanted is None:
        return tensor
    if tensor.grad_fn is None or not torch.is_grad_enabled():
        return tensor.redistribute(placement.wanted)
    state = (name, version_of(tensor))
    before, made = getattr(tensor, _PLACED, (None, None))
    if made is None or before != state:
        made = tensor.redistribute(placement.wanted)
        setattr(tensor, _PLACED, (state, made))
    return made


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor."""
    assert isinstance(tensor, DTensor), "`place` has made it"
    return tensor.to_local()


def whole(tensor: DTensor) -> torch.Tensor:
    """The full plain tensor."""
    return tensor.full_tensor()


@run_while_tracing
def prepare_compiler() -> bool:
    """Let graphs contain the functions above; the compiler calls this while it traces."""
    allow_in_graphs([place, shard, whole])
    return True


_checks: WeakValueDictionary[str, ReplicaCheck] = WeakValueDictionary()
_numbers = itertools.count()


def name_model(check: ReplicaCheck) -> str:
    """A text for `begin_model` of the parallel model that has a check, as long as the check lives."""
    name = f"model {next(_numbers)}"
    _checks[name] = check
    return name


@run_while_tracing
def begin_model(name: str) -> bool:
    """Prepare for the forward of a parallel model that the compiler traces, which calls this."""
    attach_compiled_check(_checks[name])
    return True
