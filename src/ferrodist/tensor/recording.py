"""Which steps were taken to bring tensors from one layout to another, for those who want to know."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.tensor.plan import Step

__all__ = ["note_step", "record_redistributions"]

_records: ContextVar[tuple[list[Step], ...]] = ContextVar("records", default=())


@contextlib.contextmanager
def record_redistributions() -> Iterator[list[Step]]:
    """Collect the steps of all redistributions inside the block on this rank, also of those that operators ask for.

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
