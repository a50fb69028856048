"""`coalesce`: collectives that are started inside a block run fused when it ends."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import TYPE_CHECKING, TypeAlias

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import shares_memory, writing_to
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.reduce_op import PremultipliedSum
from ferrodist.collectives.work import CollectiveCall, PendingCollective, ThreadCollective, collector, run_at, submit
from ferrodist.errors import CollectiveMismatchError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend

    _Collected: TypeAlias = tuple[CollectiveCall[object], ThreadCollective[object]]


@contextlib.contextmanager
def coalesce(group: Backend | None = None) -> Iterator[None]:
    """Collect the collectives that are started inside the block, and run them fused when it ends.

    Consecutive allreduces of one dtype and reduction, or broadcasts of one dtype and root, are fused into one on their
    concatenated elements: one verification and one set of messages for any number of small tensors, with the same
    bits as without. The smallest of their timeouts holds for all. Collectives whose tensors share memory with another's
    result are not fused, so tensors that share memory on one rank must share it on all.
    Other collectives start one after the other, in the order in which they were called.

    First the ranks compare their blocks, within the smallest timeout in the block. When the blocks differ, or a rank
    does not reach the end of its block, all pending collectives raise that error.

    Inside the block use the ``async_*`` functions; each returns a `PendingCollective`, which starts when the block
    ends. When the block raises, nothing is sent and the pending collectives fail with that error. Copies of the block's
    context, such as those of asyncio tasks made inside, can't be used for collectives after its end.

    Args:
        group: The group of all collectives in the block; None is the default group.

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
        _fail([pending for _, pending in block.end()], error)
        raise
    finally:
        collected = block.end()
        collector.reset(token)
    if collected:
        _start(collected, chosen)


class _Block:
    """The `CoalescingContext` of one block."""

    def __init__(self, group: Backend) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._collected: list[_Collected] = []
        self._has_ended = False

    def collect(self, prepared: CollectiveCall[object]) -> PendingCollective[object]:
        name = prepared.op.operation
        if prepared.group is not self._group:
            raise RuntimeError(
                f"{name} on group {prepared.group.name!r} inside coalesce() of group {self._group.name!r}:"
                " a block is for one group"
            )
        pending: ThreadCollective[object] = ThreadCollective(name, self._group.name)
        with self._lock:  # another thread, in a copy of the context, may call while the block ends
            self.check_open(name)
            pending.is_started = False
            self._collected.append((prepared, pending))
        return pending

    def check_open(self, name: str) -> None:
        if self._has_ended:
            raise RuntimeError(
                f"{name} in a copy of the context of a coalesce() block that has ended, as asyncio tasks and callbacks"
                " made inside the block run in: make those outside of it"
            )

    def end(self) -> list[_Collected]:
        """Refuse further calls, and return those that were collected."""
        with self._lock:
            self._has_ended = True
            return self._collected


def _start(collected: list[_Collected], group: Backend) -> None:
    """Compare the ranks' blocks, fuse what can be fused, and start all calls."""
    try:
        runs = _runs(collected)
        submit(_comparison(runs, group))
        for members in runs:
            joined = submit(_fused(members))
            for _, pending in members:
                pending.fused_into = joined  # which is done only when it is done on the GPU, too
                pending.is_started = True
    except BaseException as error:
        _fail([pending for _, pending in collected if not pending.is_started], error)
        raise


def _fail(unstarted: list[ThreadCollective[object]], error: BaseException) -> None:
    """End calls that never start."""
    for pending in unstarted:
        pending.is_started = True
        pending.fail(error)


def _runs(collected: list[_Collected]) -> list[list[_Collected]]:
    """Group consecutive calls of one kind that can be fused: none touches another's result."""
    runs: list[list[_Collected]] = []
    last_key: tuple[object, ...] | None = None
    for item in collected:
        op, key = item[0].op, _fusion_key(item[0])
        if (
            key is not None
            and key == last_key
            and not any(
                shares_memory(other.op.out, op.source) or shares_memory(other.op.out, op.out) for other, _ in runs[-1]
            )
        ):
            runs[-1].append(item)
        else:
            runs.append([item])
        last_key = key
    return runs


def _fusion_key(prepared: CollectiveCall[object]) -> tuple[object, ...] | None:
    """A key that is equal for calls that can be fused; None for other calls."""
    op = prepared.op
    if prepared.run is not None or op.kind not in (CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST):
        return None
    if isinstance(
        op.reduction, PremultipliedSum
    ):  # a rank whose factors happen to be equal would fuse what others can't
        return None
    return op.kind, op.tensor.dtype, op.device, op.reduction, op.root


def _comparison(runs: list[list[_Collected]], group: Backend) -> CollectiveCall[None]:
    """The first call of a block, which compares the blocks: ranks with different ones would mix up elements."""
    text = ", ".join("+".join(_describe(prepared) for prepared, _ in members) for members in runs)
    timeout = min(prepared.op.timeout for members in runs for prepared, _ in members)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    payload = digest + text.encode()[: MAX_PAYLOAD - len(digest)]
    engine = host_engine_of(group)
    op = CollectiveOp(kind=CollectiveKind.SHARE, name="coalesce", payload=payload, timeout=timeout)

    def run(sequence: int) -> None:
        payloads = engine.run(op, sequence) or []
        differing = [rank for rank, other in enumerate(payloads) if other[:16] != payloads[0][:16]]
        if differing:
            described = "; ".join(
                f"rank {rank}: {payloads[rank][16:].decode(errors='replace')}" for rank in (0, differing[0])
            )
            error = CollectiveMismatchError(
                f"the ranks of group {group.name!r} put different operations into a coalesce() block: {described}. (A +"
                " joins operations that travel as one: of one kind and dtype, and without memory in common.)",
                ranks=tuple(differing),
            )
            group.abort(error)
            raise error

    return CollectiveCall(op=op, group=group, engine=engine, run=run, finish=lambda: None)


def _describe(prepared: CollectiveCall[object]) -> str:
    op = prepared.op
    count = "" if _fusion_key(prepared) is None else f"[{op.tensor.numel()}]"
    device = "" if op.device is None or op.device.type == "cpu" else f" on {op.device.type}"
    return f"{op.operation}{count}{device}"


def _fused(members: list[_Collected]) -> CollectiveCall[None]:
    """One call that does the work of ``members`` and ends their handles."""
    calls = [prepared for prepared, _ in members]
    first = calls[0]
    ops = [prepared.op for prepared in calls]
    timeout = min(op.timeout for op in ops)
    enqueues = getattr(first.engine, "enqueue", False)
    pieces: list[torch.Tensor] = []

    def run(sequence: int) -> None:
        try:
            if len(ops) > 1:
                joined = torch.cat([op.source for op in ops])
                first.engine.run(ops[0].replace(source=joined, out=joined, timeout=timeout), sequence)
                pieces.extend(torch.split(joined, [op.out.numel() for op in ops]))
                if not enqueues:
                    copy_pieces()
            else:
                run_at(first, sequence)
        except BaseException as error:
            for _, pending in members:
                pending.fail(error)
            if not isinstance(error, DistributedError):  # such as no memory: other ranks would wait for this one
                first.group.abort(left_reason(first.group.rank, f"a coalesced {first.op.operation}", error))
            raise
        for prepared, pending in members:
            pending.succeed(prepared.finish)

    def copy_pieces() -> None:
        for op, piece in zip(ops, pieces, strict=False):  # no pieces if there is one call
            with writing_to(op.out):
                op.out.copy_(piece)
            record_use_on_streams(op.out)
            record_use_on_streams(piece)

    return CollectiveCall(
        op=first.op,
        group=first.group,
        engine=first.engine,
        run=run,
        finish=copy_pieces if enqueues else lambda: None,  # in the order of the waiting thread's stream
    )
