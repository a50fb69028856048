"""Which steps were taken to bring tensors from one layout to another, for those who want to know."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ferrodist.tensor.layout import Layout
from ferrodist.tensor.placement import Shard
from ferrodist.tensor.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement
    from ferrodist.tensor.plan import Step

__all__ = ["note_move", "note_step", "record_redistributions"]

_records: ContextVar[tuple[list[Step], ...]] = ContextVar("records", default=())


@contextlib.contextmanager
def record_redistributions() -> Iterator[list[Step]]:
    """Collect the steps of all redistributions inside the block on this rank, also of those that operators ask for.

    What operators send themselves is among them: a softmax along a divided dim folds two numbers of each row, a chunked
    linear layer gathers its input in pieces.

    ::

        with fd.record_redistributions() as steps:
            loss = model(batch)
        for step in steps:
            print(step)

    Yields:
        A list that grows: of each step the ``move`` (as an allreduce), the ``axes`` of the mesh, the layouts ``before``
        and ``after``, and ``size_bytes``.
    """
    steps: list[Step] = []
    token = _records.set((*_records.get(), steps))
    try:
        yield steps
    finally:
        _records.reset(token)


def note_step(step: Step) -> None:
    """Tell those who record of a step that is being taken."""
    for record in _records.get():
        record += [step]


def note_move(part: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
    """Tell those who record that a tensor, of which this rank has a part, is being moved by what computes an operator.

    Args:
        part: Under ``before``, which is partial, or divides a dim evenly.
        mesh: The ranks that take part, all of its axes alike.
        before: How the tensor lies along each axis.
        after: How it will lie.
    """
    if not _records.get():
        return
    shape = list(part.shape)
    if isinstance(before, Shard):
        shape[before.dim] *= mesh.size
    source = Layout.of(mesh, [before] * mesh.ndim, shape, part.dtype)
    for step in make_plan(source, source.placed([after] * mesh.ndim)).steps:
        note_step(step)
