"""Several collectives as one: what is started inside the block travels when the block ends."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.operation import Operation, collector, run_later
from ferrodist.collectives.pending import PendingCollective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend

__all__ = ["coalesce"]


@contextlib.contextmanager
def coalesce(group: Backend | None = None) -> Iterator[None]:
    """Gather the collectives that are started inside the block and send them together when it ends.

    Allreduces of one dtype and operation, and broadcasts of one dtype and root, become one operation each on their
    elements laid end to end: one agreement and one set of messages for any number of small tensors, and the same
    bits as without.
    Other collectives start one after the other, in the order in which they were called.

    Inside the block use the ``async_*`` forms; each gives its `PendingCollective`, which starts when the block ends.
    When the block raises, nothing is sent and the pending operations fail with that error.

    Args:
        group: The group of all operations in the block; None is the default group.

    Raises:
        RuntimeError: A blocking collective was called inside the block, or one of another group, or blocks were nested.
    """
    chosen = resolve_group(group)
    if collector.get() is not None:
        raise RuntimeError("coalesce() blocks can't be nested: put all operations into one")
    collected: list[tuple[Operation[object], PendingCollective[object]]] = []

    def collect(operation: Operation[object]) -> PendingCollective[object]:
        if operation.group is not chosen:
            raise RuntimeError(
                f"{operation.name} on group {operation.group.name!r} inside coalesce() of group {chosen.name!r}:"
                " a block is for one group"
            )
        pending: PendingCollective[object] = PendingCollective(operation.name, chosen.name)
        collected.append((operation, pending))
        return pending

    token = collector.set(collect)
    try:
        yield
    except BaseException as error:
        for _, pending in collected:
            pending.fail(error)
        raise
    finally:
        collector.reset(token)
    _start(collected)


def _start(collected: list[tuple[Operation[object], PendingCollective[object]]]) -> None:
    """Join what can be joined, in the order in which each kind came first, and start all of it."""
    kinds: dict[object, list[tuple[Operation[object], PendingCollective[object]]]] = defaultdict(list)
    for i, (operation, pending) in enumerate(collected):
        kinds[operation.fusible.key if operation.fusible else i].append((operation, pending))
    for members in kinds.values():
        run_later(_fused(members))


def _fused(members: list[tuple[Operation[object], PendingCollective[object]]]) -> Operation[None]:
    """One operation that does what all of ``members`` do and ends their pending handles."""
    operations = [operation for operation, _ in members]
    parts = [operation.fusible for operation in operations if operation.fusible is not None]

    def run(sequence: int) -> None:
        try:
            if len(parts) > 1:
                out = torch.cat([part.source for part in parts])
                parts[0].run(out, out, sequence)
                for part, piece in zip(parts, torch.split(out, [part.out.numel() for part in parts]), strict=True):
                    part.out.copy_(piece)
            else:
                operations[0].run(sequence)
        except BaseException as error:
            for _, pending in members:
                pending.fail(error)
            raise
        for operation, pending in members:
            pending.succeed(operation.finish)

    return Operation(name=operations[0].name, group=operations[0].group, run=run, finish=lambda: None)
