"""A group whose ranks are those of an MPI communicator."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.framed_backend import FramedBackend
from ferrodist.backends.group_observer import PeerExit
from ferrodist.backends.lifecycle import track
from ferrodist.backends.liveness import LivenessProbe
from ferrodist.backends.mailbox import Receive
from ferrodist.backends.mpi import runtime
from ferrodist.backends.mpi.data_plane import MpiDataPlane
from ferrodist.backends.mpi.runtime import check_job, library_version
from ferrodist.backends.mpi.transport import FrameTransport, ProgressThread, QueuedFrame
from ferrodist.backends.mpi.verification import MpiVerifier
from ferrodist.backends.mpi.wire import MAX_PAYLOAD, Frame
from ferrodist.backends.native.binding import enable_tensor_views
from ferrodist.backends.request import answer_seconds
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import LOW_64_BITS, WORLD_GROUP_ID, group_of_tag
from ferrodist.deadline import Deadline, check_timeout, resolve_timeout
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    DistributedTimeoutError,
    PeerLostError,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ferrodist.backends.mailbox_backend import Send

_CLOSE_SECONDS = 5.0  # how long `MpiBackend.close` waits until MPI has sent this rank's messages
_GRACE_SECONDS = 0.2
_POLL_SECONDS = 0.01  # between two questions to MPI's detector of deaths
_DETECTION_SECONDS = 2.0  # how long MPI may know of a death before it tells whose
_DEFERRED_ABORT_SECONDS = 0.5  # how long a third rank's notice that a rank is lost waits for the lost rank's own notice

_SHARED_POLL_SECONDS = 0.05
"""How long a late rank waits for another thread's poll, which may receive that others have given up."""

_DIED = PeerExit(what="died: MPI reports its process as failed")


class _Receive(Receive):
    """A receive whose wait moves the group's frames."""

    __slots__ = ("backend",)

    backend: MpiBackend

    @override
    def ended_within(self, timeout: float) -> bool:
        return self._done or self.backend.progress_until(self.done, timeout)


class MpiBackend(FramedBackend):
    """A rank of a group over MPI: Open MPI, MPICH, or another one that mpi4py drives.

    MPI moves bytes: collectives by its own non-blocking collectives, messages by its messages. Calls are compared
    before data moves, and reductions are folded here, in rank order. So errors, deadlines and bits are those of the
    other backends, in every dtype.

    The ranks are started by ``mpiexec``, ``srun`` or ``ferrodist run --mpi``. All of them make the group, and may make
    several. MPI is started with the first, unless the program has, and finalized when the interpreter exits and all
    ranks have left all groups.

    A rank that dies is `PeerLostError` on the others under Open MPI with ``mpiexec --with-ft ulfm``; `shrink` then
    makes a group of the survivors. Elsewhere ``mpiexec`` ends the job.

    Args:
        communicator: An intracommunicator of mpi4py, which is duplicated; None is MPI.COMM_WORLD.
        timeout: Seconds a blocking call may take when it names no timeout itself.
        name: The group's name in error messages.
        connect_timeout: Seconds for all ranks to make the group; None takes ``timeout``.

    Raises:
        BackendUnavailable: mpi4py or MPI is missing here, or MPI does not support MPI_THREAD_MULTIPLE.
        InvalidWorldSizeError: MPI says that this process is alone, and its launcher that it is not.
        RendezvousError: On every rank, when some did not come in time; they are named.
    """

    _max_payload = MAX_PAYLOAD

    def __init__(
        self,
        communicator: Any = None,
        *,
        timeout: float | None = None,
        name: str = "world",
        connect_timeout: float | None = None,
    ) -> None:
        deadline = Deadline(resolve_timeout(timeout if connect_timeout is None else connect_timeout))
        self._mpi = mpi = runtime.start(deadline)
        if communicator is None:
            check_job(mpi.COMM_WORLD)
        parent = mpi.COMM_WORLD if communicator is None else communicator
        if not isinstance(parent, mpi.Intracomm) or parent == mpi.COMM_NULL:
            raise TypeError(f"communicator must be an intracommunicator of mpi4py, not {parent!r}")
        super().__init__(parent.Get_rank(), parent.Get_size(), timeout=timeout, name=name)
        self._communicators = runtime.duplicate(mpi, parent, name, deadline)
        self._message_communicator, collective_communicator = self._communicators
        self._transport = FrameTransport(mpi, self._message_communicator, self._on_frame)
        self._liveness = LivenessProbe(
            self._ping,
            lambda done, timeout: self.progress_until(lambda: done() or self.failure is not None, timeout),
        )
        # Aborts received from a third rank before the lost rank's own notice, which is waited for until a deadline.
        self._deferred_aborts: list[tuple[int, DistributedError, Deadline]] = []
        self._gone: set[int] = set()  # ranks that have left the world, or died
        self._announced_leaving = False
        self._detects_deaths = runtime.call_safely(mpi, self._message_communicator.Get_failed) is not None
        self._handlers = self._make_handlers()
        self.data_plane: MpiDataPlane = MpiDataPlane(
            mpi, collective_communicator, self._cannot_complete, self._abort_for, self._grace_seconds
        )
        self.verifier: MpiVerifier = MpiVerifier(
            self, self.data_plane, self._find_behind, partial(self._poll, _SHARED_POLL_SECONDS)
        )
        self._process = os.getpid()
        self._progress = ProgressThread(
            poll=self._poll,
            check_deaths=self._check_deaths,
            is_awaited=lambda: bool(self._unsent) or self._mailbox.is_awaited,
            is_over=self._is_over,
            on_end=self._release,
            name=f"ferrodist-mpi-{name}-{self.rank}",
        )
        self.takes_mpi_small_calls = self.world_size > 1 and enable_tensor_views()  # see collectives/mpi_small_calls.py
        self.encoded_calls: dict[Hashable, bytes] = {}
        runtime.register(self)
        track(self)
        self._progress.start()

    def _make_handlers(self) -> dict[FrameType, Callable[[int, Frame, memoryview], None]]:
        return {
            FrameType.EAGER: self._on_eager,
            FrameType.OFFER: self._on_offer,
            FrameType.GRANT: self._on_grant,
            FrameType.DATA: self._on_data,
            FrameType.WITHDRAW: self._on_withdraw,
            FrameType.ABORT: self._on_abort,
            FrameType.LEFT: self._on_left,
            FrameType.PING: lambda source, *_: self._push_frame(FrameType.PONG, source, self.verifier.num_entered),
            FrameType.PONG: self._on_pong,
        }

    @classmethod
    def from_job(cls, rank: int | None, world_size: int | None, timeout: float, deadline: Deadline) -> MpiBackend:
        """Make the group of all ranks of this process's MPI job.

        Args:
            rank: This rank according to the user, or None.
            world_size: The world size according to the user, or None.
            timeout: Seconds a blocking call may take when it names no timeout itself.
            deadline: The deadline for all ranks to make the group.

        Raises:
            InvalidWorldSizeError, InvalidRankError: MPI says otherwise.
        """
        communicator = runtime.start(deadline).COMM_WORLD
        check_job(communicator, rank, world_size)
        return cls(communicator, timeout=timeout, connect_timeout=deadline.remaining())

    # Sending.

    @override
    def _push_frame(
        self,
        kind: FrameType,
        rank: int,
        message: int = 0,
        *,
        group: int = 0,
        send: Send | None = None,
        offset: int = 0,
        payload: memoryview | bytes = b"",
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        tag = size_bytes = 0
        if send is not None:
            group, tag, size_bytes = group_of_tag(send.tag), send.tag & LOW_64_BITS, len(send.data)
        frame = Frame(kind, message, group, tag, size_bytes, offset)
        try:
            self._transport.push(rank, QueuedFrame(frame, payload, send, on_sent))
        except self._mpi.Exception as error:
            self._abort_for(error)

    @override
    def _drop_frames(self, send: Send) -> bool | None:
        num_dropped = self._transport.drop(send.peer, send)
        return None if self._transport.is_lost(send.peer) else num_dropped > 0

    # Receiving.

    @override
    def _make_receive(self, buffer: memoryview, source: int, tag: int) -> Receive:
        receive = _Receive(self._mailbox, buffer, source, tag)
        receive.backend = self
        return receive

    def progress_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False after ``timeout`` seconds."""
        return self._progress.wait_until(done, timeout)

    def _poll(self, patience: float = 0) -> bool:
        """Move the frames that can be moved; whether there were any."""
        try:
            return self._transport.poll(patience)
        except ProtocolError as error:
            self.abort(error)
        except self._mpi.Exception as error:
            self._abort_for(error)
        return True

    def _on_frame(self, source: int, frame: Frame, payload: memoryview) -> None:
        self._handlers[frame.kind](source, frame, payload)

    def _on_eager(self, source: int, frame: Frame, payload: memoryview) -> None:
        message = self._receive_eager(source, frame)
        if len(payload):
            self._mailbox.write_bytes(message, payload)

    def _on_data(self, source: int, frame: Frame, payload: memoryview) -> None:
        message = self._continued_message(source, frame)
        if message is not None:
            if frame.offset + len(payload) == frame.size_bytes:
                self._incoming.pop((source, frame.message), None)
            self._mailbox.write_bytes(message, payload, frame.offset)

    @override
    def _act_on_abort(self, group_id: int, error: DistributedError) -> None:
        if self._has_unnoticed_loss(group_id, error):
            self._deferred_aborts.append((group_id, error, Deadline(_DEFERRED_ABORT_SECONDS)))
        else:
            self.fail_group(group_id, error)

    def _has_unnoticed_loss(self, group_id: int, error: DistributedError) -> bool:
        """Return whether an abort names a lost rank that has not said here that it left.

        That rank's earlier messages are on their way too, and others may have been faster to report that it left: see
        [Note: left and died].
        """
        members = self._members.get(group_id, ())
        if not isinstance(error, PeerLostError) or not all(rank < len(members) for rank in error.ranks):
            return False
        named = {members[rank] for rank in error.ranks} - {self.rank}
        return any(self.peer_error(group_id, rank) is None for rank in named)

    def _act_on_deferred_aborts(self) -> None:
        for deferred in self._deferred_aborts.copy():
            group_id, error, deadline = deferred
            if deadline.expired or not self._has_unnoticed_loss(group_id, error):
                with contextlib.suppress(ValueError):  # another thread acts on it
                    self._deferred_aborts.remove(deferred)
                    self.fail_group(group_id, error)

    def _on_left(self, source: int, frame: Frame, _payload: memoryview) -> None:
        if self._accepts_notice(source, frame):
            self.peer_left(frame.group, source)
        self._act_on_deferred_aborts()
        if frame.group == WORLD_GROUP_ID:
            self._liveness.note_progress(source, frame.message)
            self._gone.add(source)

    def _on_pong(self, source: int, frame: Frame, _payload: memoryview) -> None:
        self._liveness.note_progress(source, frame.message)
        self._liveness.on_answer(source)

    # Liveness.

    @override
    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        if within == 0 or self.failure is not None:
            return Stragglers(ranks=peers)
        return self._silent_or_all(self._liveness.find_silent(peers, within), peers)

    def _find_behind(self, sequence: int) -> tuple[int, ...]:
        """The ranks because of which not all have entered a collective."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return self._liveness.find_behind(others, sequence, answer_seconds(self.timeout))

    def _cannot_complete(self) -> bool:
        """Return whether this rank's current collective can't complete; aborts the group when a rank left before it."""
        if self.failure is not None:
            return True
        for rank in self._gone.copy():
            peer_exit = self.peer_error(WORLD_GROUP_ID, rank)
            if peer_exit is not None and not self._liveness.has_entered(rank, self.verifier.num_entered - 1):
                self.abort(peer_exit)
                return True
        return False

    def _grace_seconds(self) -> float:
        """Seconds in which this rank's current collective may still complete although the group has failed.

        A rank that leaves after this collective makes the next one fail, and its notice may come before the last bytes
        of this one.
        """
        return _GRACE_SECONDS if isinstance(self.failure, PeerLostError) else 0.0

    def _check_deaths(self) -> None:
        """Find ranks that have died, where MPI reports them; called every 50 ms."""
        self._act_on_deferred_aborts()
        if not self._detects_deaths:
            return
        mpi, communicator = self._mpi, self._message_communicator
        failed = runtime.call_safely(mpi, communicator.Get_failed)
        if failed is None or failed.Get_size() == 0:
            return
        ranks = failed.Translate_ranks(list(range(failed.Get_size())), communicator.Get_group())
        for rank in set(ranks) - self._gone:
            self._gone.add(rank)
            self._transport.mark_lost(rank)
            self._withdraw_from(rank)
            self.peer_died(rank, _DIED)
        runtime.call_safely(mpi, communicator.Ack_failed)  # or receives from any rank are refused

    def _abort_for(self, error: Exception) -> None:
        """Abort the group for an exception of MPI's, or for the deaths that are its reason."""
        mpi = self._mpi
        deaths = {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED}
        is_death = isinstance(error, mpi.Exception) and error.Get_error_class() in deaths
        self._check_deaths()
        deadline = Deadline(_DETECTION_SECONDS)
        while (
            is_death and self._detects_deaths and not self._gone and self.failure is None and deadline.remaining() > 0
        ):
            time.sleep(_POLL_SECONDS)
            self._check_deaths()
        is_known = bool(self._gone) and is_death
        if self.failure is None and not is_known:  # a rank that had left before it died is not a loss
            self.abort(runtime.translate(mpi, error))

    # Notices, and the end.

    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        for rank in members:
            if rank != self.rank:
                self._push_frame(FrameType.LEFT, rank, self.verifier.num_entered, group=group_id)

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`.

        Args:
            timeout: Seconds to wait until MPI has sent this rank's messages; None for five.
        """
        deadline = Deadline(_CLOSE_SECONDS if timeout is None else check_timeout(timeout))
        if os.getpid() != self._process or not self._close_groups():
            return  # closed already, or in a forked child: MPI is the parent's
        try:
            self._leave_groups()
            self._announced_leaving = True
            self.progress_until(self._transport.is_idle, deadline.remaining())
        finally:
            self._run_close_callbacks()

    def _is_over(self) -> bool:
        """Return whether this rank and all others have announced that they left, so that no more frames come or go.

        A rank that is closing has not announced it yet, and the others wait for that.
        """
        return self._announced_leaving and len(self._gone) == self.world_size - 1 and self._transport.is_idle()

    def _release(self) -> None:
        """Free the communicators, once all ranks have left; the last act of the progress thread."""
        self._transport.close()  # a closing thread may still poll, and another one begin a collective
        has_failed = WORLD_GROUP_ID in self.failures
        if self.data_plane.close() and not has_failed:
            for communicator in self._communicators:
                runtime.call_safely(self._mpi, communicator.Free)
        runtime.unregister(self, has_failed=has_failed or bool(self._died))

    def wait_until_all_left(self, patience: float) -> bool:
        """Wait until all ranks have left; False once the group has failed and ``patience`` seconds have passed."""
        while not self._progress.join(patience):
            if WORLD_GROUP_ID in self.failures or os.getpid() != self._process:
                return False
        return True

    def shrink(self, *, timeout: float | None = None, name: str | None = None) -> MpiBackend:
        """Make a group of the surviving ranks, in their order; all survivors call this.

        This group stays failed; close it at any time. Needs Open MPI and ``mpiexec --with-ft ulfm``.

        Args:
            timeout: Seconds for all survivors to call this; None takes the group's.
            name: The new group's name in error messages; None takes this group's.

        Raises:
            BackendUnavailable: This MPI can't go on after the death of a rank.
            DistributedTimeoutError: Some survivor did not call this in time.
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        deadline = Deadline(limit)
        mpi = self._mpi
        if not self._detects_deaths:
            raise BackendUnavailable(
                f"{library_version()} can't make a group of the ranks that are left: use Open MPI, started with"
                " mpiexec --with-ft ulfm"
            )
        communicator = runtime.call_in_thread(self._message_communicator.Shrink, deadline)
        if isinstance(communicator, Exception):
            raise runtime.translate(mpi, communicator) from communicator
        if communicator is None:
            raise DistributedTimeoutError(
                f"shrink of group {self.name!r} on rank {self.rank}: not all of the ranks that are left called it"
                f" within {limit:g} s"
            )
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
        return MpiBackend(
            communicator, timeout=self.timeout, name=name or self.name, connect_timeout=deadline.remaining()
        )
