"""Groups with NCCL for tensors on GPUs, over a control group for everything else.

A failure of the control group aborts the NCCL communicators; an error of NCCL, or a missed deadline on a GPU, aborts
the control group on all ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer, Self, override

from ferrodist.backends.base import check_rank
from ferrodist.backends.cuda_streams import Streams, allow_queries_during_capture, streams_of
from ferrodist.backends.delegating_backend import DelegatingBackend
from ferrodist.backends.native.backend import open_host_group
from ferrodist.backends.nccl.communicator import Library, load_nccl, why_no_nccl
from ferrodist.backends.nccl.engine import NcclEngine
from ferrodist.backends.nccl.p2p import NcclP2P
from ferrodist.backends.nccl.stream_executor import StreamExecutor
from ferrodist.backends.nccl.watchdog import Watchdog
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.backends.weak import snapshot_weak
from ferrodist.deadline import check_timeout
from ferrodist.errors import BackendUnavailable, InvalidRankError, PeerLostError, UnsupportedOpError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous import Membership


def reasons_without_nccl(control: Backend, deadline: Deadline) -> dict[int, str]:
    """The reasons why ranks can't use NCCL, by rank; collective."""
    own = (why_no_nccl() or "").encode()[:MAX_PAYLOAD]
    answers = control.verifier.verify(CollectiveSignature(operation="is there NCCL", payload=own), deadline.remaining())
    return {rank: reason.decode(errors="replace") for rank, reason in enumerate(answers) if reason}


class NcclGroup(DelegatingBackend):
    """A group with NCCL for tensors on GPUs over a control group, which it closes with itself.

    The arguments are those of `NcclBackend`.
    """

    def __init__(
        self,
        control: Backend,
        *,
        stream: Any = None,
        library: Callable[[], Library] = load_nccl,
        streams: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        super().__init__(control)
        if stream is not None and not hasattr(stream, "cuda_stream"):
            raise TypeError(f"{type(self).__name__} takes a torch.cuda.Stream as stream, or None, not {stream!r}")
        reason = why_no_nccl() if library is load_nccl else None
        if reason is not None:
            raise self._unavailable_error((control.rank,), reason)
        self._is_closed = False
        self._stream = stream
        self._library = library
        self._streams = streams
        self.verifier = control.verifier
        self.use_engine("cpu", control.engine("cpu"), control.p2p("cpu"))
        self.fast_path = control.fast_path
        self._watchdog = Watchdog(f"ferrodist-nccl-{control.name}-{control.rank}", allow_queries_during_capture)
        self._executors: weakref.WeakValueDictionary[int, StreamExecutor] = weakref.WeakValueDictionary()  # by group
        self._executor = self._executor_of(self)
        self.use_engine("cuda", NcclEngine(self, self._executor), NcclP2P(self, self._executor))
        self.on_synchronize(self._executor.synchronize)

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of a rendezvous, over a native control group, or a TCP one without the native engine.

        Raises:
            BackendUnavailable: On all ranks, when one can't use NCCL; with the reason.
        """
        control = open_host_group(membership, timeout, deadline)
        try:
            cls._check_nccl(control, deadline)
            return cls(control)
        except BaseException:
            control.close()
            raise

    @classmethod
    def _check_nccl(cls, control: Backend, deadline: Deadline) -> None:
        reasons = reasons_without_nccl(control, deadline)
        if reasons:
            reason = (control.rank in reasons and why_no_nccl()) or reasons[min(reasons)]
            raise cls._unavailable_error(tuple(reasons), reason)

    @classmethod
    def _unavailable_error(cls, ranks: tuple[int, ...], reason: str) -> BackendUnavailable:
        return BackendUnavailable(
            f"{cls.__name__} needs NCCL on all ranks, and {ranks_text(ranks)} can't use it: {reason}."
            " 'ferrodist doctor' tells what is there.",
            ranks=ranks,
        )

    def _executor_of(self, group: Backend) -> StreamExecutor:
        """The executor of this group or of a sub-group, made on first use."""
        found = self._executors.get(group.group_id)
        if found is None:
            found = StreamExecutor(group, self._library, self._streams, self._watchdog, self._stream)
            self._executors[group.group_id] = found
        return found

    def shrink(self, lost: Sequence[int] | None = None, *, timeout: float | None = None) -> SubBackend:
        """Make a group of the surviving ranks when others have died; all survivors call it.

        It is a sub-group with a communicator of its own, which works where this group's messages still get through: not
        when rank 0 of a TCP star has died.

        Args:
            lost: The lost ranks, the same on all callers; None takes those of the `PeerLostError` with which this
                group has failed.
            timeout: Seconds a blocking call in the new group may take when it names none itself; None takes this
                group's.

        Raises:
            InvalidRankError: No rank was lost, or one of ``lost`` is not in this group.
        """
        if lost is None:
            failure = self.failure
            lost = failure.ranks if isinstance(failure, PeerLostError) else ()
        if not lost:
            raise InvalidRankError(
                f"group {self.name!r} knows of no lost rank: pass lost=, the same on all ranks that are left"
            )
        gone = {check_rank(self, rank, f"lost rank {rank!r}") for rank in lost}
        survivors = [rank for rank in range(self.world_size) if rank not in gone]
        return SubBackend(self, survivors, timeout=timeout, label="shrink")

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`. Operations launched by this rank are completed first, for up to 5 s."""
        if self._is_closed:
            return
        if timeout is not None:
            check_timeout(timeout)
        self._is_closed = True
        self.fast_path = None  # like the control group's own
        try:
            for executor in snapshot_weak(self._executors.values):
                executor.release(self.failure)
        finally:  # an error of NCCL, or an interruption, must not leave the others waiting for this rank
            self._watchdog.close()
            try:
                self._control.close(timeout)
            finally:
                self._run_close_callbacks()

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has called it. Work on GPUs may still be under way: see `synchronize`."""
        self._control.barrier(timeout)

    # Sub-groups.

    @override
    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        executor = self._executors.pop(group_id, None)
        if executor is not None:
            executor.release(self._control.subgroup_failure(group_id, members))
        super().close_subgroup(group_id, members)

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        super().equip_subgroup(subgroup)
        executor = self._executor_of(subgroup)
        subgroup.on_synchronize(executor.synchronize)
        subgroup.use_engine("cuda", NcclEngine(subgroup, executor), NcclP2P(subgroup, executor))


class NcclBackend(NcclGroup):
    """A rank of a group that transfers tensors on GPUs by NCCL, and no bytes.

    `send`, `recv`, `isend` and `irecv` raise UnsupportedOpError. Everything else is as in a `HybridBackend`: barriers,
    objects and tensors on the CPU, which `DDP`, `FSDP`, `Pipeline` and checkpoints use for metadata, go by the control
    group.

    Args:
        control: A group of the same ranks, of any backend but this one, which closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Returns NCCL, or raises BackendUnavailable; for tests.
        streams: Returns the streams of a GPU; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is not a stream, or ``control`` not a group.
    """

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Refused, except on internal channels, which carry tensors' headers."""
        self._check_tag(tag)
        self._control.send(data, dst, tag=tag, timeout=timeout)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Refused, as `send`."""
        self._check_tag(tag)
        return self._control.recv(buffer, src, tag=tag, timeout=timeout)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return self._control.isend(data, dst, tag=tag)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return self._control.irecv(buffer, src, tag=tag)

    def _check_tag(self, tag: int) -> None:
        if channel_of_tag(tag) == Channel.BYTES:
            raise UnsupportedOpError(
                f"group {self.name!r} is NCCL's, which carries tensors and no bytes: make it with backend 'hybrid', or"
                " call ferrodist.send with a tensor"
            )


class HybridBackend(NcclGroup):
    """A rank of a group that transfers bytes and CPU tensors by one backend, and tensors on GPUs by NCCL.

    The NCCL communicators are made by the first collective or message on a GPU.

    Args:
        control: A group of the same ranks, a `NativeBackend` or `TcpBackend`, which this one closes.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Returns NCCL, or raises BackendUnavailable; for tests.
        streams: Returns the streams of a GPU; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is not a stream, or ``control`` not a group.
    """

    _nccl: NcclBackend | None = None

    @property
    def tcp(self) -> Backend:
        """The control group, which transfers bytes and CPU tensors; both share one order of calls."""
        return self._control

    @property
    def nccl(self) -> NcclBackend:
        """This group as an `NcclBackend`, which transfers no bytes; both share one order of calls."""
        if self._nccl is None:
            self._nccl = NcclBackend.__new__(NcclBackend)
            self._nccl.__dict__ = self.__dict__  # one group under two classes, with one state
        return self._nccl

    def synchronize_nccl(self, timeout: float | None = None) -> None:
        """Wait on the host until NCCL has done this rank's operations in this group: the same as `synchronize`."""
        self.synchronize(timeout)


def best_backend(membership: Membership, timeout: float, deadline: Deadline) -> Backend:
    """The group of ``init_process_group(None)``: hybrid where all ranks have NCCL and a GPU, else without NCCL."""
    control = open_host_group(membership, timeout, deadline)
    try:
        return control if reasons_without_nccl(control, deadline) else HybridBackend(control)
    except BaseException:
        control.close()
        raise
