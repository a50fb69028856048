"""Several collectives as one: what is started inside the block travels when the block ends."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import TYPE_CHECKING, TypeAlias

import torch

from ferrodist.backends.cuda import record_use_on_streams
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import shares_memory, writing_to
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.work import Operation, PendingCollective, QueuedCollective, collector, run_later
from ferrodist.errors import CollectiveMismatchError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend

if TYPE_CHECKING:
    _Collected: TypeAlias = tuple[Operation[object], QueuedCollective[object]]


@contextlib.contextmanager
def coalesce(group: Backend | None = None) -> Iterator[None]:
    """Gather the collectives that are started inside the block and send them together when it ends.

    Neighbouring allreduces of one dtype and operation, or broadcasts of one dtype and root, become one on their
    elements laid end to end: one agreement and one set of messages for any number of small tensors, and the same
    bits as without. The smallest of their timeouts holds for all of them. What shares memory with another's result is
    not joined, so tensors that share memory on one rank must on all.
    Other collectives start one after the other, in the order in which they were called.

    First the ranks compare what they have collected, within the smallest timeout in the block. When their blocks
    differ, or a rank does not come to its own, all pending operations raise that.

    Inside the block use the ``async_*`` forms; each gives its `PendingCollective`, which starts when the block ends.
    When the block raises, nothing is sent and the pending operations fail with that error. Copies of the block's
    context, as asyncio tasks made inside run in, are of no use for collectives after its end.

    Args:
        group: The group of all operations in the block; None is the default group.

    Raises:
        RuntimeError: A blocking collective was called inside the block, or one of another group, or blocks were nested;
            or a copy of the block's context was used after its end.
    """
    chosen = resolve_group(group)
    outer = collector.get()
    if outer is not None:
        outer.check_open("coalesce")
        raise RuntimeError("coalesce() blocks can't be nested: put all operations into one")
    block = _Block(chosen)
    token = collector.set(block)
    try:
        yield
    except BaseException as error:
        for _, pending in block.end():
            pending.start()
            pending.fail(error)
        raise
    finally:
        collected = block.end()
        collector.reset(token)
    if collected:
        _start(collected, chosen)


class _Block:
    """What the operations inside go to; see `Collector`."""

    def __init__(self, group: Backend) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._collected: list[_Collected] = []
        self._has_ended = False

    def collect(self, operation: Operation[object]) -> PendingCollective[object]:
        if operation.group is not self._group:
            raise RuntimeError(
                f"{operation.name} on group {operation.group.name!r} inside coalesce() of group {self._group.name!r}:"
                " a block is for one group"
            )
        pending: QueuedCollective[object] = QueuedCollective(operation.name, self._group.name)
        with self._lock:  # another thread, in a copy of the context, may come when the block ends
            self.check_open(operation.name)
            self._collected.append((operation, pending.hold()))
        return pending

    def check_open(self, name: str) -> None:
        if self._has_ended:
            raise RuntimeError(
                f"{name} in a copy of the context of a coalesce() block that has ended, as asyncio tasks and callbacks"
                " made inside the block run in: make those outside of it"
            )

    def end(self) -> list[_Collected]:
        """Take nothing more, and give what was collected."""
        with self._lock:
            self._has_ended = True
            return self._collected


def _start(collected: list[_Collected], group: Backend) -> None:
    """Compare what the ranks collected, join what can be joined, and start all of it."""
    runs = _runs(collected)
    run_later(_comparison(runs, group))
    for members in runs:
        joined = run_later(_fused(members))
        for _, pending in members:
            pending.follow(joined)  # which knows when it is done on a GPU, too
            pending.start()


def _runs(collected: list[_Collected]) -> list[list[_Collected]]:
    """Divide into runs that can be joined: neighbours of one kind that don't touch each other's results."""
    runs: list[list[_Collected]] = []
    for item in collected:
        part = item[0].fusible
        last = [other.fusible for other, _ in runs[-1]] if runs else []
        joins = part is not None and all(
            other is not None
            and other.key == part.key
            and not shares_memory(other.out, part.source)
            and not shares_memory(other.out, part.out)
            for other in last
        )
        if joins and last:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _comparison(runs: list[list[_Collected]], group: Backend) -> Operation[None]:
    """The first operation of a block: ranks that collected or joined other operations would mix up elements."""
    text = ", ".join("+".join(_describe(operation) for operation, _ in members) for members in runs)
    timeout = min(operation.timeout for members in runs for operation, _ in members)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    payload = digest + text.encode()[: MAX_PAYLOAD - len(digest)]

    def run(sequence: int) -> None:
        engine = host_engine_of(group)
        payloads = engine.share("coalesce", payload, timeout=timeout, sequence=sequence)
        differing = [rank for rank, other in enumerate(payloads) if other[:16] != payloads[0][:16]]
        if differing:
            said = "; ".join(
                f"rank {rank}: {payloads[rank][16:].decode(errors='replace')}" for rank in (0, differing[0])
            )
            error = CollectiveMismatchError(
                f"the ranks of group {group.name!r} put different operations into a coalesce() block: {said}. (A +"
                " joins operations that travel as one: of one kind and dtype, and without memory in common.)",
                ranks=tuple(differing),
            )
            group.abort(error)
            raise error

    return Operation(
        name="coalesce",
        group=group,
        engine=host_engine_of(group),
        device=None,
        timeout=timeout,
        run=run,
        finish=lambda: None,
    )


def _describe(operation: Operation[object]) -> str:
    count = f"[{operation.fusible.source.numel()}]" if operation.fusible else ""
    place = "" if operation.device is None or operation.device.type == "cpu" else f" on {operation.device.type}"
    return f"{operation.name}{count}{place}"


def _fused(members: list[_Collected]) -> Operation[None]:
    """One operation that does what all of ``members`` do and ends their pending handles."""
    operations = [operation for operation, _ in members]
    first = operations[0]
    parts = [operation.fusible for operation in operations if operation.fusible is not None]
    timeout = min(operation.timeout for operation in operations)

    def run(sequence: int) -> None:
        try:
            if len(parts) > 1:
                out = torch.cat([part.source for part in parts])
                parts[0].run(out, out, timeout, sequence)
                pieces.extend(torch.split(out, [part.out.numel() for part in parts]))
                if not enqueues:
                    take_pieces()
            else:
                first.run(sequence)
        except BaseException as error:
            for _, pending in members:
                pending.fail(error)
            if not isinstance(error, DistributedError):  # as of memory that is short: the others would wait for us
                first.group.abort(left_reason(first.group.rank, f"a coalesced {first.name}", error))
            raise
        for operation, pending in members:
            pending.succeed(operation.finish)

    def take_pieces() -> None:
        for part, piece in zip(parts, pieces, strict=False):  # there are none of a run of one
            with writing_to(part.out):
                part.out.copy_(piece)
            record_use_on_streams(part.out)
            record_use_on_streams(piece)

    pieces: list[torch.Tensor] = []
    enqueues = getattr(first.engine, "enqueue", False)
    return Operation(
        name=first.name,
        group=first.group,
        engine=first.engine,
        device=first.device,
        timeout=timeout,
        run=run,
        finish=take_pieces if enqueues else lambda: None,  # else in the order of the stream of who waits
    )
