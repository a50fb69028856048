"""The engine of collectives in the compiled module."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends import stragglers
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import (
    SHARE_NAME_BYTES,
    dtype_number,
    enable_tensor_views,
    load,
    signature_of_record,
)
from ferrodist.backends.native.bootstrap import open_communicator, open_symmetric
from ferrodist.backends.native.errors import abort_record, public_error
from ferrodist.backends.verification import left_reason, queued_error
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.shared_view import ContiguousSharedView
    from ferrodist.backends.native.topology import HostTopology
    from ferrodist.backends.signature import CollectiveSignature

_POLL_INTERVAL_SECONDS = 0.05


class NativeEngine:
    """A `HostEngine` of a group whose ranks share memory on each host, and are connected between hosts.

    `open` opens memory and connections: for a new group at once, for a sub-group at its first collective, so that
    making one takes no message.
    """

    def __init__(self, group: Backend, topology: HostTopology) -> None:
        # First, for it is destroyed first: that waits for its thread, which may use the attributes below.
        self.communicator: Any = None  # the compiled communicator, once it is open on all ranks
        self._opening: Any = None
        self._group = group
        self._topology = topology
        self._reserving = threading.Lock()
        self._num_reserved = 0
        self._opened = threading.Event()
        self._has_begun = False
        self.num_ranks = group.world_size
        self.group_name = group.name
        self._action_when_open: Callable[[Any], object] | None = None
        module = load()
        self.failure_type: type[Exception] = module.Failure
        self.share_room: int = module.SHARE_ROOM if topology.num_hosts == 1 else module.SHARE_ROOM_BETWEEN_HOSTS

    @property
    def timeout(self) -> float:
        """Default timeout of a call in seconds: the group's, which may change."""
        return self._group.timeout

    def reserve(self) -> int:
        """Take the next sequence number of the group's collectives."""
        with self._reserving:
            if self.communicator is not None:
                return int(self.communicator.reserve())
            self._num_reserved += 1
            return self._num_reserved - 1

    def open(self, call: CollectiveSignature, timeout: float) -> None:
        """Open the communicator. All ranks call it: as the group is made, or for a sub-group's first collective."""
        deadline = Deadline(timeout)
        self._has_begun = True
        communicator = open_communicator(self._group, self._topology, call, timeout)
        communicator.set_long_wait_callback(
            long_wait().timeout, partial(_warn_about_stragglers, group=self._group.name, rank=self._group.rank)
        )
        with self._reserving:
            self._opening = communicator
            if self._action_when_open is not None:
                self._action_when_open(communicator)
        try:
            communicator.handshake(deadline.remaining())
        except BaseException as failure:
            raise self._abort_for(failure, call, timeout) from None
        with self._reserving:
            for _ in range(self._num_reserved):
                communicator.reserve()
            self.communicator = communicator
        self._opened.set()
        enable_tensor_views()
        if self._group.fast_path is not None:
            self._group.fast_path = self._group.fast_path._replace(communicator=communicator)

    @property
    def is_opening(self) -> bool:
        """Return whether ranks are opening the communicator, for which they need the group's messages."""
        return self._has_begun and self.communicator is None

    def _when_open(self, action: Callable[[Any], object]) -> None:
        """Call ``action`` with the communicator, now or once it is open; of several, the last one is called then."""
        with self._reserving:
            if self._opening is not None:
                action(self._opening)
            else:
                self._action_when_open = action

    def abort(self, error: DistributedError) -> None:
        """End the group on all ranks of this host."""
        record = abort_record(error)
        self._when_open(lambda communicator: communicator.abort(record))

    def await_turn(self, sequence: int) -> None:
        """Return when all earlier collectives have ended, or the group has."""
        if self.communicator is not None:
            with contextlib.suppress(self.failure_type):
                self.communicator.await_turn(sequence)

    def leave(self) -> None:
        """Leave the group: ranks that wait for this one get an error."""
        self._group.fast_path = None
        self._when_open(lambda communicator: communicator.leave())

    def stop(self) -> None:
        """In a forked child: make the communicator unusable, without notice to other ranks."""
        self._reserving = threading.Lock()
        self._when_open(lambda communicator: communicator.stop())

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective."""
        if self._group.failure is not None:
            raise self._group.failure.fresh()
        deadline = Deadline(op.timeout)
        if self.communicator is None:
            self._open_at(sequence, op.signature(), deadline)
        try:
            collective = getattr(self.communicator, op.kind)
            payloads: list[bytes] | None = collective(
                *_ARGUMENTS[op.kind](op), timeout=deadline.remaining(), ticket=sequence
            )
        except BaseException as failure:
            raise self._abort_for(failure, op.signature(payload=op.payload), op.timeout) from None
        return payloads

    def empty_symmetric(
        self, call: CollectiveSignature, size_bytes: int, timeout: float, joined: Sequence[tuple[int, int]] = ()
    ) -> tuple[torch.Tensor, list[ContiguousSharedView]]:
        """Allocate symmetric memory of ``size_bytes`` on each rank: a tensor of bytes, and views of all ranks' memory.

        The views are of the parts ``joined`` (see `open_symmetric`). If the ranks are on several hosts, the memory is
        ordinary, and there are no views.
        """
        deadline = Deadline(timeout)
        share = CollectiveOp(kind=CollectiveKind.SHARE, name=call.operation, timeout=timeout)
        self.run(share, self.reserve())  # in step with other collectives
        if self._topology.num_hosts > 1:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), []
        return open_symmetric(
            self._group,
            self._topology,
            self.communicator,
            call,
            size_bytes=size_bytes,
            joined=joined,
            timeout=deadline.remaining(),
        )

    # For the fast path: see collectives/fast_path.py.

    def call_error(
        self,
        failure: BaseException,
        operation: str,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        op: Any = None,
        timeout: float | None = None,
        unit: int | None = None,
        **facts: Any,
    ) -> BaseException:
        """End the group because of a failed call of ``compiled``; returns the error. A barrier has no tensors."""
        if unit is None:
            unit = 0 if tensor is None else tensor.numel() // self.num_ranks
        limit = self.timeout if timeout is None else timeout
        kind = CollectiveKind(operation)
        failed = CollectiveOp(kind=kind, source=tensor, out=out, reduction=op, unit=unit, timeout=limit, **facts)
        return self._abort_for(failure, failed.signature(), failed.timeout)

    def has_left(self, failure: BaseException) -> bool:
        """Return whether the failure of a wait has ended this rank's part in the group, too."""
        return isinstance(failure, self.failure_type) or self.communicator.is_broken

    def _abort_for(self, failure: BaseException, call: CollectiveSignature, timeout: float) -> BaseException:
        """End the group because of a failure in the engine; returns its public error."""
        if not isinstance(failure, self.failure_type):  # an interruption: this rank is out of step with the others
            self._group.abort(left_reason(self._group.rank, call, failure))
            return failure
        error = public_error(self._group, failure, call, timeout)
        self._group.abort(error)
        return (self._group.failure or error).fresh()

    def _open_at(self, sequence: int, call: CollectiveSignature, deadline: Deadline) -> None:
        """Open for the first collective of the group; the others wait for that."""
        if sequence == 0:
            try:
                self.open(call, deadline.remaining())
            except DistributedError as error:
                self._group.abort(error)
                raise (self._group.failure or error).fresh() from None
            except BaseException as failure:
                raise self._abort_for(failure, call, deadline.timeout) from None
            return
        while not self._opened.wait(min(_POLL_INTERVAL_SECONDS, deadline.remaining())):
            if self._group.failure is not None:
                raise self._group.failure.fresh()
            if deadline.expired:
                late = queued_error(self._group, call.at(sequence), Elapsed.of(deadline))
                self._group.abort(late)
                raise late


def _warn_about_stragglers(
    sequence: int, line: bytes, late: Sequence[int], elapsed: float, timeout: float, *, group: str, rank: int
) -> None:
    """Warn about the ranks that a call waits for, if no other rank does; the engine calls it in the waiting thread."""
    if stragglers.is_first_waiting_rank(rank, late):
        call = signature_of_record(line, sequence)
        stragglers.warn_about_stragglers(call, late, group=group, rank=rank, elapsed=Elapsed(elapsed, timeout))


def _tensors(op: CollectiveOp) -> tuple[int, int]:
    return _address(op.out), _address(op.source)


def _reduction(op: CollectiveOp) -> tuple[int, int, float]:
    return dtype_number(op.source), op.reduction.number, getattr(op.reduction, "factor", 1.0)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_ARGUMENTS: dict[CollectiveKind, Callable[[CollectiveOp], tuple[Any, ...]]] = {
    CollectiveKind.ALLREDUCE: lambda op: (*_tensors(op), op.source.numel(), *_reduction(op)),
    CollectiveKind.REDUCE: lambda op: (*_tensors(op), op.source.numel(), op.root, *_reduction(op)),
    CollectiveKind.BROADCAST: lambda op: (op.out.data_ptr(), op.out.numel(), dtype_number(op.out), op.root),
    CollectiveKind.ALL_GATHER: lambda op: (*_tensors(op), op.counts, dtype_number(op.out), op.dim),
    CollectiveKind.GATHER: lambda op: (*_tensors(op), op.counts, dtype_number(op.source), op.root),
    CollectiveKind.SCATTER: lambda op: (*_tensors(op), op.counts, dtype_number(op.out), op.root),
    CollectiveKind.REDUCE_SCATTER: lambda op: (*_tensors(op), op.counts, op.dim, *_reduction(op)),
    CollectiveKind.ALL_TO_ALL: lambda op: (*_tensors(op), op.counts, op.recv_counts, op.unit, dtype_number(op.source)),
    CollectiveKind.BARRIER: lambda _: (),
    CollectiveKind.SHARE: lambda op: (op.name.encode().ljust(SHARE_NAME_BYTES, b"\0"), op.payload),
}
"""The arguments of the compiled communicator's method of each kind."""
