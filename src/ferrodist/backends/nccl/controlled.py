"""Groups that stand on a control group: another backend's group of the same ranks, over which they say what they need.

The control group connects the ranks, finds the dead, carries bytes and compares calls; NCCL moves tensors between GPUs.
A failure of the one is a failure of the other: the control group's ends the communicators, and what NCCL or a deadline
of a GPU finds ends the control group on all ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ferrodist.backends.base import NonBlockingBackend
from ferrodist.backends.call import MAX_PAYLOAD, Call
from ferrodist.backends.native import NativeBackend, is_native_available
from ferrodist.backends.nccl.collectives import NcclCollectives
from ferrodist.backends.nccl.launcher import Launcher
from ferrodist.backends.nccl.library import load_nccl, why_no_nccl
from ferrodist.backends.nccl.messages import NcclMessages
from ferrodist.backends.nccl.streams import CudaStreams
from ferrodist.backends.nccl.watch import Watch
from ferrodist.backends.sub import SubBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.weak import held_now
from ferrodist.errors import BackendUnavailable, InvalidRankError, PeerLostError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer, Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.listening import Listener, Signal
    from ferrodist.backends.nccl.communicator import Library
    from ferrodist.backends.nccl.streams import Stream, Streams
    from ferrodist.backends.request import Late, Request
    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError
    from ferrodist.rendezvous import Membership

__all__ = ["ControlledBackend", "control_of", "reasons_without_nccl"]


def control_of(membership: Membership, timeout: float, deadline: Deadline) -> Backend:
    """The control group of ranks that have met: native where it is installed."""
    kind = NativeBackend if is_native_available() else TcpBackend
    return kind.from_membership(membership, timeout, deadline)


def reasons_without_nccl(control: Backend, deadline: Deadline) -> dict[int, str]:
    """Why ranks have no NCCL, by rank; all ranks call it."""
    own = (why_no_nccl() or "").encode()[:MAX_PAYLOAD]
    said = control.agreement.reach(Call(operation="is there NCCL", payload=own), deadline.remaining())
    return {rank: reason.decode(errors="replace") for rank, reason in enumerate(said) if reason}


class ControlledBackend(NonBlockingBackend):
    """A group with NCCL for tensors on GPUs, over a control group, which it closes with itself.

    Args:
        control: A group of another backend, of which nothing else is made.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.
    """

    def __init__(
        self,
        control: Backend,
        *,
        stream: Stream | None = None,
        library: Callable[[], Library] = load_nccl,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(control.rank, control.world_size, timeout=control.timeout, name=control.name)
        self._control = control
        self._is_closed = False
        self._stream = stream
        self._library = library
        self._streams = CudaStreams() if streams is None else streams
        self.agreement = control.agreement
        self.collectives = control.collectives
        self.quick = control.quick
        self.tensor_messages = control.tensor_messages
        self.subgroups = control.subgroups  # which tells the control group of those that are dropped
        self._watch = Watch(f"ferrodist-nccl-{control.name}-{control.rank}", self._streams.begin_watching)
        self._launchers: weakref.WeakValueDictionary[int, Launcher] = weakref.WeakValueDictionary()  # by group
        self._launcher = self._launcher_of(self)
        self.device_collectives = NcclCollectives(self, self._launcher)
        self.device_messages = NcclMessages(self, self._launcher)
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

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self._control.failure

    def _check_tag(self, tag: int) -> None:
        """Raise UnsupportedOpError for messages that this group does not carry; it carries all."""

    def _launcher_of(self, group: Backend) -> Launcher:
        """The launcher of this group or of a sub-group, made when first asked for."""
        found = self._launchers.get(group.group_id)
        if found is None:
            found = Launcher(group, self._library, self._streams, self._watch, self._stream)
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

    def abort(self, reason: str | DistributedError) -> None:
        """End the group on all ranks; see `Backend.abort`."""
        self._control.abort(reason)

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`. What this rank has launched is completed first, for at most 5 s."""
        if self._is_closed:
            return
        self._is_closed = True
        self.quick = self.tensor_messages = None  # as the control group does with its own
        for launcher in held_now(self._launchers.values):
            launcher.release(self.failure or launcher.failure)
        self._watch.close()
        self._control.close(timeout)
        self._run_close_callbacks()

    # Bytes.

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; see `Backend.send`."""
        self._check_tag(tag)
        self._control.send(data, dst, tag=tag, timeout=timeout)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive bytes; see `Backend.recv`."""
        self._check_tag(tag)
        return self._control.recv(buffer, src, tag=tag, timeout=timeout)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        self._check_tag(tag)
        return self._control.isend(data, dst, tag=tag)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return at once."""
        self._check_tag(tag)
        return self._control.irecv(buffer, src, tag=tag)

    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        """See `Backend.try_send`."""
        return self._control.try_send(data, dst, tag=tag)

    def listen(
        self,
        src: int,
        size_bytes: int,
        heard: Callable[[list[bytes]], None],
        ended: Callable[[DistributedError], None],
        *,
        tag: int = 0,
    ) -> Listener:
        """See `Backend.listen`."""
        return self._control.listen(src, size_bytes, heard, ended, tag=tag)

    def signal(self) -> Signal:
        """See `Backend.signal`."""
        return self._control.signal()

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has called it. Work on GPUs may still be under way: see `synchronize`."""
        self._control.barrier(timeout)

    def find_late(self, peers: tuple[int, ...], within: float) -> Late:
        """See `Backend.find_late`."""
        return self._control.find_late(peers, within)

    # Sub-groups.

    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """End one sub-group on all its members; see `Backend.abort_subgroup`."""
        self._control.abort_subgroup(group_id, members, error)

    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        """Why a sub-group can't be used any more, or None."""
        return self._control.subgroup_failure(group_id, members)

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        """See `Backend.open_subgroup`."""
        self._control.open_subgroup(group_id, members, name)

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """See `Backend.close_subgroup`."""
        launcher = self._launchers.pop(group_id, None)
        if launcher is not None:
            launcher.release(self._control.subgroup_failure(group_id, members))
        self._control.close_subgroup(group_id, members)

    def subgroup_collectives(self, subgroup: Backend) -> Any:
        """See `Backend.subgroup_collectives`."""
        return self._control.subgroup_collectives(subgroup)

    def subgroup_tensor_messages(self, subgroup: Backend) -> Any:
        """See `Backend.subgroup_tensor_messages`."""
        return self._control.subgroup_tensor_messages(subgroup)

    def subgroup_device_collectives(self, subgroup: Backend) -> NcclCollectives:
        """See `Backend.subgroup_device_collectives`."""
        launcher = self._launcher_of(subgroup)
        subgroup.on_synchronize(launcher.synchronize)
        return NcclCollectives(subgroup, launcher)

    def subgroup_device_messages(self, subgroup: Backend) -> NcclMessages:
        """See `Backend.subgroup_device_messages`."""
        return NcclMessages(subgroup, self._launcher_of(subgroup))
