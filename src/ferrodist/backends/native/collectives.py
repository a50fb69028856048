"""The collectives of a group, by the native engine."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends import stragglers
from ferrodist.backends.native.binding import SHARE_NAME_BYTES, call_of_line, dtype_name, dtype_number, load
from ferrodist.backends.native.bootstrap import open_communicator, open_symmetric
from ferrodist.backends.native.errors import abort_record, public_error, queued_error
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.verification import left_reason
from ferrodist.deadline import Deadline, Elapsed, long_wait
from ferrodist.errors import DistributedError
from ferrodist.torch_private.autograd import increment_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.symmetric_memory import ContiguousSharedView
    from ferrodist.backends.native.topology import HostTopology

_POLL_SECONDS = 0.05


class FastPath(NamedTuple):
    """What native/bindings/fast_path.cpp takes a group's plain calls by."""

    communicator: Any
    timeout: float
    engine: NativeEngine


class NativeEngine:
    """`Collectives` of a group whose ranks share memory on each host, and are connected between hosts.

    Memory and connections are made when the first collective runs, so that making a group takes no message.

    Args:
        group: The group.
        place: Where its ranks are.
    """

    def __init__(self, group: Backend, place: HostTopology) -> None:
        # First, for it goes first: its end waits for its thread, which may use what is kept below.
        self.compiled: Any = None
        """The engine's compiled part, once its ranks have met."""
        self._communicator: Any = None
        self._group = group
        self._place = place
        self._reserving = threading.Lock()
        self._num_reserved = 0
        self._opened = threading.Event()
        self._has_begun = False
        self.num_ranks = group.world_size
        self.group_name = group.name
        self._end: Callable[[Any], object] | None = None
        self.failure_type: type[Exception] = load().Failure

    @property
    def timeout(self) -> float:
        """Seconds that a call may take when it names no timeout itself: the group's, which may change."""
        return self._group.timeout

    def reserve(self) -> int:
        """Take the next position among the group's collectives."""
        with self._reserving:
            if self.compiled is not None:
                return int(self.compiled.reserve())
            self._num_reserved += 1
            return self._num_reserved - 1

    def open(self, call: CollectiveSignature, timeout: float) -> None:
        """Make the shared memory, for the first collective of the group."""
        deadline = Deadline(timeout)
        self._has_begun = True
        communicator = open_communicator(self._group, self._place, call, timeout)
        communicator.tell_of_long_waits(
            long_wait().timeout, partial(_warn_of_late_ranks, group=self._group.name, rank=self._group.rank)
        )
        with self._reserving:
            self._communicator = communicator
            if self._end is not None:
                self._end(communicator)
        try:
            communicator.meet(deadline.remaining())
        except BaseException as failure:
            raise self._ended_by(failure, call, timeout) from None
        with self._reserving:
            for _ in range(self._num_reserved):
                communicator.reserve()
            self.compiled = communicator
        self._opened.set()
        load().load_tensor_interface(torch.Tensor, torch.nn.Parameter, increment_version)
        self._group.quick = FastPath(communicator, self.timeout, self)

    @property
    def is_opening(self) -> bool:
        """Whether ranks are meeting for the first collective, for which they need the group's messages."""
        return self._has_begun and self.compiled is None

    def end(self, how: Callable[[Any], object]) -> None:
        """Do something final to the communicator, now or when there is one."""
        with self._reserving:
            if self._communicator is not None:
                how(self._communicator)
            else:
                self._end = how

    def abort(self, error: DistributedError) -> None:
        """End the group for all ranks of this host."""
        record = abort_record(error)
        self.end(lambda communicator: communicator.abort(record))

    def await_turn(self, sequence: int) -> None:
        """Return when all before have ended, or the group has."""
        if self.compiled is not None:
            with contextlib.suppress(self.failure_type):
                self.compiled.await_turn(sequence)

    def leave(self) -> None:
        """Leave the group: ranks that wait for this one get an error."""
        self._group.quick = None
        self.end(lambda communicator: communicator.leave())

    def stop(self) -> None:
        """In a forked child: nothing works here any more, and nobody is told."""
        self._reserving = threading.Lock()
        self.end(lambda communicator: communicator.stop())

    # The collectives: see `Collectives`.

    def share(self, operation: str, payload: bytes, *, timeout: float, sequence: int) -> list[bytes]:
        """Give every rank the bytes of each, in rank order."""
        call = CollectiveSignature(operation=operation)
        shared: list[bytes] = self._run(
            "share", call, timeout, sequence, operation.encode().ljust(SHARE_NAME_BYTES, b"\0"), payload
        )
        return shared

    def barrier(self, *, timeout: float, sequence: int) -> None:
        """Return when all ranks have called."""
        self._run("barrier", CollectiveSignature(operation="barrier"), timeout, sequence)

    def allreduce(self, out: torch.Tensor, source: torch.Tensor, op: Any, *, timeout: float, sequence: int) -> None:
        """Fold ``source`` over the ranks into every rank's ``out``, which may be ``source``."""
        call = _call("allreduce", source, source.numel(), op=op)
        reduction = _reduction(source, op)
        self._run("allreduce", call, timeout, sequence, out.data_ptr(), source.data_ptr(), source.numel(), *reduction)

    def reduce(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        op: Any,
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold ``source`` over the ranks into the root's ``out``, which may be its ``source``; None elsewhere."""
        call = _call("reduce", source, source.numel(), op=op, root=root)
        addresses = (_address(out), source.data_ptr())
        self._run("reduce", call, timeout, sequence, *addresses, source.numel(), root, *_reduction(source, op))

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout: float, sequence: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""
        call = _call("broadcast", tensor, tensor.numel(), root=root)
        self._run("broadcast", call, timeout, sequence, tensor.data_ptr(), tensor.numel(), dtype_number(tensor), root)

    def all_gather(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into every ``out``, one after the other."""
        call = _call("all_gather", out, out.numel(), dim=dim)
        addresses = (out.data_ptr(), source.data_ptr())
        self._run("all_gather", call, timeout, sequence, *addresses, counts, dtype_number(out), dim)

    def gather(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into the root's ``out``; None elsewhere."""
        call = _call("gather", source, sum(counts), root=root)
        addresses = (_address(out), source.data_ptr())
        self._run("gather", call, timeout, sequence, *addresses, counts, dtype_number(source), root)

    def scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor | None,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy part r of the root's ``source``, of ``counts[r]`` elements, into rank r's ``out``."""
        call = _call("scatter", out, sum(counts), root=root)
        addresses = (out.data_ptr(), _address(source))
        self._run("scatter", call, timeout, sequence, *addresses, counts, dtype_number(out), root)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        op: Any,
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold part r of every rank's ``source`` into rank r's ``out``."""
        call = _call("reduce_scatter", source, source.numel(), op=op, dim=dim)
        addresses = (out.data_ptr(), source.data_ptr())
        self._run("reduce_scatter", call, timeout, sequence, *addresses, counts, dim, *_reduction(source, op))

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        unit: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Send part r of ``source`` to rank r, and collect what the ranks sent here in ``out``."""
        call = _call("all_to_all", source, unit)
        addresses = (out.data_ptr(), source.data_ptr())
        counts = (send_counts, receive_counts, unit)
        self._run("all_to_all", call, timeout, sequence, *addresses, *counts, dtype_number(source))

    def _run(
        self, collective: str, call: CollectiveSignature, timeout: float, sequence: int, *arguments: object
    ) -> Any:
        if self._group.failure is not None:
            raise self._group.failure.fresh()
        deadline = Deadline(timeout)
        if self.compiled is None:
            self._open_at(sequence, call, deadline)
        try:
            return getattr(self.compiled, collective)(*arguments, timeout=deadline.remaining(), place=sequence)
        except BaseException as failure:
            raise self._ended_by(failure, call, timeout) from None

    def empty_symmetric(
        self, call: CollectiveSignature, size_bytes: int, timeout: float, joined: Sequence[tuple[int, int]] = ()
    ) -> tuple[torch.Tensor, list[ContiguousSharedView]]:
        """Make symmetric memory, of ``size_bytes`` on each rank: a tensor of bytes, which keeps it.

        And views of the parts ``joined`` of all ranks' memory: see `open_symmetric`. Ordinary memory, and no views,
        where the ranks are on several hosts.
        """
        deadline = Deadline(timeout)
        self.share(call.operation, b"", timeout=timeout, sequence=self.reserve())  # in step with other collectives
        if self._place.num_hosts > 1:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), []
        return open_symmetric(
            self._group,
            self._place,
            self.compiled,
            call,
            size_bytes=size_bytes,
            joined=joined,
            timeout=deadline.remaining(),
        )

    # What the short ways need: see collectives/quick.py.

    def call_error(
        self,
        failure: BaseException,
        operation: str,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
        **facts: Any,
    ) -> BaseException:
        """End the group for what ended a call of ``compiled``, and return what to raise; a barrier has no tensors."""
        if tensor is None or out is None:
            return self._ended_by(failure, CollectiveSignature(operation=operation), self.timeout)
        count = out.numel() if operation == "all_gather" else tensor.numel()
        if operation == "all_to_all":  # of each rank's part
            count //= self.num_ranks
        return self._ended_by(failure, _call(operation, tensor, count, **facts), self.timeout)

    def has_left(self, failure: BaseException) -> bool:
        """Whether what ended a wait has also ended this rank's part in the group."""
        return isinstance(failure, self.failure_type) or self.compiled.is_broken

    def _ended_by(self, failure: BaseException, call: CollectiveSignature, timeout: float) -> BaseException:
        """End the group for what ended a call in the engine, and return what it is called in public."""
        if not isinstance(failure, self.failure_type):  # an interruption: this rank is out of step with the others
            self._group.abort(left_reason(self._group.rank, call, failure))
            return failure
        error = public_error(self._group, failure, call, timeout)
        self._group.abort(error)
        return (self._group.failure or error).fresh()

    def _open_at(self, sequence: int, call: CollectiveSignature, deadline: Deadline) -> None:
        """Open for the first collective of the group; the others wait for it."""
        if sequence == 0:
            try:
                self.open(call, deadline.remaining())
            except DistributedError as error:
                self._group.abort(error)
                raise (self._group.failure or error).fresh() from None
            except BaseException as failure:
                raise self._ended_by(failure, call, deadline.timeout) from None
            return
        while not self._opened.wait(min(_POLL_SECONDS, deadline.remaining())):
            if self._group.failure is not None:
                raise self._group.failure.fresh()
            if deadline.expired:
                late = queued_error(self._group, call.at(sequence), Elapsed.of(deadline))
                self._group.abort(late)
                raise late


def _warn_of_late_ranks(
    place: int, line: bytes, late: Sequence[int], elapsed: float, timeout: float, *, group: str, rank: int
) -> None:
    """Name whom the call at a place waits for, if no other rank does; the engine calls it in whatever thread waits."""
    if stragglers.is_speaker(rank, late):
        call = call_of_line(line, place)
        stragglers.warn_about_stragglers(call, late, group=group, rank=rank, elapsed=Elapsed(elapsed, timeout))


def _call(
    operation: str, tensor: torch.Tensor, count: int, *, op: Any = "", root: int = -1, dim: int = -1
) -> CollectiveSignature:
    name = dtype_name(tensor.dtype)
    return CollectiveSignature(operation=operation, dtype=name, reduce_op=str(op), root=root, dim=dim, count=count)


def _reduction(tensor: torch.Tensor, op: Any) -> tuple[int, int, float]:
    return dtype_number(tensor), op.number, getattr(op, "factor", 1.0)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
