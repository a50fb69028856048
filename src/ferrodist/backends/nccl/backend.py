"""NCCL as a backend.

Groups whose tensors on GPUs go by NCCL, over a control group.

The control group's failure ends the communicators, and what NCCL or a deadline of a GPU finds ends the control group on
all ranks.

Both kinds of tensors in one group: a host's backend for the CPU, NCCL for GPUs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.control_plane import ControlPlaneBackend, control_of
from ferrodist.backends.lifecycle import snapshot_weak
from ferrodist.backends.nccl.collectives import NcclEngine
from ferrodist.backends.nccl.communicator import load_nccl, why_no_nccl
from ferrodist.backends.nccl.p2p import NcclP2P
from ferrodist.backends.nccl.stream_executor import StreamExecutor
from ferrodist.backends.nccl.streams import CudaStreams
from ferrodist.backends.nccl.watchdog import Watchdog
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.errors import BackendUnavailable, InvalidRankError, PeerLostError, UnsupportedOpError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer, Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Library
    from ferrodist.backends.nccl.streams import Stream, Streams
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous import Membership


def reasons_without_nccl(control: Backend, deadline: Deadline) -> dict[int, str]:
    """Why ranks have no NCCL, by rank; all ranks call it."""
    own = (why_no_nccl() or "").encode()[:MAX_PAYLOAD]
    said = control.agreement.reach(CollectiveSignature(operation="is there NCCL", payload=own), deadline.remaining())
    return {rank: reason.decode(errors="replace") for rank, reason in enumerate(said) if reason}


class NcclGroup(ControlPlaneBackend):
    """A group with NCCL for tensors on GPUs, over a control group, which it closes with itself.

    Args:
        control: A group of another backend, of which nothing else is made.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is no stream, or ``control`` no group.
    """

    def __init__(
        self,
        control: Backend,
        *,
        stream: Stream | None = None,
        library: Callable[[], Library] = load_nccl,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(control)
        if stream is not None and not hasattr(stream, "cuda_stream"):
            raise TypeError(f"{type(self).__name__} takes a torch.cuda.Stream as stream, or None, not {stream!r}")
        reason = why_no_nccl() if library is load_nccl else None
        if reason is not None:
            raise BackendUnavailable(
                f"{type(self).__name__} needs NCCL on all ranks, and rank {control.rank} can't use it: {reason}."
                " 'ferrodist doctor' tells what is there.",
                ranks=(control.rank,),
            )
        self._is_closed = False
        self._stream = stream
        self._library = library
        self._streams = CudaStreams() if streams is None else streams
        self.agreement = control.agreement
        self.use_engine("cpu", control.engine("cpu"), control.p2p("cpu"))
        self.fast_path = control.fast_path
        self._watch = Watchdog(f"ferrodist-nccl-{control.name}-{control.rank}", self._streams.begin_watching)
        self._launchers: weakref.WeakValueDictionary[int, StreamExecutor] = weakref.WeakValueDictionary()  # by group
        self._launcher = self._launcher_of(self)
        self.use_engine("cuda", NcclEngine(self, self._launcher), NcclP2P(self, self._launcher))
        self.on_synchronize(self._launcher.synchronize)

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of all ranks that met, over a native control group, or TCP where there is no engine.

        Raises:
            BackendUnavailable: On all ranks, when one can't use NCCL; with the reason.
        """
        control = control_of(membership, timeout, deadline)
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
            raise BackendUnavailable(
                f"{cls.__name__} needs NCCL on all ranks, and {ranks_text(tuple(reasons))} can't use it: {reason}."
                " 'ferrodist doctor' tells what is there.",
                ranks=tuple(reasons),
            )

    def _launcher_of(self, group: Backend) -> StreamExecutor:
        """The launcher of this group or of a sub-group, made when first asked for."""
        found = self._launchers.get(group.group_id)
        if found is None:
            found = StreamExecutor(group, self._library, self._streams, self._watch, self._stream)
            self._launchers[group.group_id] = found
        return found

    def shrink(self, lost: Sequence[int] | None = None, *, timeout: float | None = None) -> SubBackend:
        """Make a group of the ranks that are left when others have died; all of these call it.

        It is a sub-group with a communicator of its own, which works where this group's messages still get through: not
        when rank 0 of a TCP star has died.

        Args:
            lost: The ranks that are gone, the same on all callers; None takes those of the `PeerLostError` that this
                group has failed with.
            timeout: Seconds a blocking call in the new group may take when it names none itself; None takes this
                group's.

        Raises:
            InvalidRankError: No rank was lost, or all were.
        """
        if lost is None:
            failure = self.failure
            lost = failure.ranks if isinstance(failure, PeerLostError) else ()
        if not lost:
            raise InvalidRankError(
                f"group {self.name!r} knows of no lost rank: pass lost=, the same on all ranks that are left"
            )
        survivors = [rank for rank in range(self.world_size) if rank not in set(lost)]
        return SubBackend(self, survivors, timeout=timeout, label="shrink")

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`. What this rank has launched is completed first, for at most 5 s."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fast_path = None  # as the control group does with its own
        for launcher in snapshot_weak(self._launchers.values):
            launcher.release(self.failure or launcher.failure)
        self._watch.close()
        self._control.close(timeout)
        self._run_close_callbacks()

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has called it. Work on GPUs may still be under way: see `synchronize`."""
        self._control.barrier(timeout)

    # Sub-groups.

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """See `Backend.close_subgroup`."""
        launcher = self._launchers.pop(group_id, None)
        if launcher is not None:
            launcher.release(self._control.subgroup_failure(group_id, members))
        super().close_subgroup(group_id, members)

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        super().equip_subgroup(subgroup)
        launcher = self._launcher_of(subgroup)
        subgroup.on_synchronize(launcher.synchronize)
        subgroup.use_engine("cuda", NcclEngine(subgroup, launcher), NcclP2P(subgroup, launcher))


class NcclBackend(NcclGroup):
    """A rank of a group that carries tensors on GPUs by NCCL, and no bytes.

    `send` and `recv` raise UnsupportedOpError; so do their other forms. All else is as in a `HybridBackend`: barriers,
    objects and tensors on the CPU, which `DDP`, `FSDP`, `Pipeline` and checkpoints use for what ranks tell each other,
    go by the control group.

    Args:
        control: A group of the same ranks, of any backend but this; this one closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is no stream, or ``control`` no group.
    """

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Refused; tensors' heads are not."""
        self._check_tag(tag)
        super().send(data, dst, tag=tag, timeout=timeout)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().recv(buffer, src, tag=tag, timeout=timeout)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().isend(data, dst, tag=tag)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().irecv(buffer, src, tag=tag)

    def _check_tag(self, tag: int) -> None:
        if channel_of_tag(tag) == Channel.BYTES:
            raise UnsupportedOpError(
                f"group {self.name!r} is NCCL's, which carries tensors and no bytes: make it with backend 'hybrid', or"
                " call ferrodist.send with a tensor"
            )


class HybridBackend(NcclGroup):
    """A rank of a group that carries bytes and tensors on the CPU by one backend, and tensors on GPUs by NCCL.

    The communicators of NCCL are made when the first collective or message on a GPU comes.

    Args:
        control: A group of the same ranks, a `NativeBackend` or `TcpBackend`; this one closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is no stream, or ``control`` no group.
    """

    _nccl: NcclBackend | None = None

    @property
    def tcp(self) -> Backend:
        """The group of the host: what carries bytes and tensors on the CPU. Its order of calls is this group's."""
        return self._control

    @property
    def nccl(self) -> NcclBackend:
        """This group as an `NcclBackend`, which carries no bytes. Its order of calls is this group's."""
        if self._nccl is None:
            self._nccl = NcclBackend.__new__(NcclBackend)
            self._nccl.__dict__ = self.__dict__  # one group under two classes: what is known of either is of both
        return self._nccl

    def synchronize_nccl(self, timeout: float | None = None) -> None:
        """Wait on the host until NCCL has done what this rank has launched in this group: `synchronize`."""
        self.synchronize(timeout)


def best_backend(membership: Membership, timeout: float, deadline: Deadline) -> Backend:
    """What ``init_process_group(None)`` makes: a hybrid group where all ranks have NCCL and a GPU, else the host's."""
    control = control_of(membership, timeout, deadline)
    try:
        return control if reasons_without_nccl(control, deadline) else HybridBackend(control)
    except BaseException:
        control.close()
        raise
