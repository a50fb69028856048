"""A group whose ranks are those of an MPI communicator."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.backends.abort_reason import pack_reason, unpack_reason
from ferrodist.backends.lifecycle import track
from ferrodist.backends.liveness import LivenessProbe
from ferrodist.backends.mailbox_backend import MAX_AHEAD, GroupReceive, MailboxBackend, PeerExit, Send
from ferrodist.backends.mpi import runtime
from ferrodist.backends.mpi.collectives import MpiDataPlane, MpiVerifier
from ferrodist.backends.mpi.runtime import check_job, library_version
from ferrodist.backends.mpi.transport import (
    Frame,
    FrameTransport,
    FrameType,
    IncomingMessages,
    OutgoingMessages,
    ProgressThread,
    QueuedFrame,
)
from ferrodist.backends.request import Stragglers, answer_seconds
from ferrodist.deadline import Deadline, check_timeout, resolve_timeout
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    DistributedTimeoutError,
    PeerLostError,
    ProtocolError,
    ranks_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.mailbox import Message
    from ferrodist.backends.request import Request

_WORLD = 0

_CLOSE_SECONDS = 5.0
"""How long `MpiBackend.close` waits until what this rank has sent is with MPI's other ranks."""

_GRACE_SECONDS = 0.2
_PARKING_SECONDS = 0.5
"""How long the news that a rank has left waits for that rank's own."""

_LOOK_SECONDS = 0.05
"""How long a rank that comes late waits for a look of another thread's, which may find that others have given up."""

_DIED = PeerExit(what="died: MPI reports its process as failed")


@dataclass(frozen=True, slots=True, eq=False)
class _DeferredAbort:
    """The end of a group that another rank tells of, before the rank that is its reason has.

    Args:
        group_id: The group.
        error: The reason.
        deadline: When to act on it all the same.
    """

    group_id: int
    error: DistributedError
    deadline: Deadline


class _Receive(GroupReceive):
    """A receive whose waiting moves the group's frames."""

    __slots__ = ()

    def ended_within(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; False when it has not come."""
        backend = self._backend
        assert isinstance(backend, MpiBackend)
        return self._done or backend.move_until(self.done, timeout)


class MpiBackend(MailboxBackend):
    """A rank of a group over MPI: Open MPI, MPICH, or another one that mpi4py drives.

    MPI moves bytes: collectives by its own non-blocking collectives, messages by its messages. Which call belongs to
    which is agreed on before, and what is reduced is folded here, in rank order. So errors, deadlines and bits are
    those of the other backends, in every dtype.

    The ranks are started by ``mpiexec``, ``srun`` or ``ferrodist run --mpi``. All of them make the group, and may make
    several. MPI is started with the first, unless the program has, and ended when the interpreter exits and all ranks
    have left all groups.

    A rank that dies is `PeerLostError` on the others under Open MPI with ``mpiexec --with-ft ulfm``; `shrink` then
    makes a group of those that are left. Elsewhere ``mpiexec`` ends the job.

    Args:
        communicator: An intracommunicator of mpi4py, of which duplicates are used; None is MPI.COMM_WORLD.
        timeout: Seconds a blocking call may take when it names no timeout itself.
        name: What error messages call the group.
        connect_timeout: Seconds for all ranks to come; None takes ``timeout``.

    Raises:
        BackendUnavailable: There is no mpi4py or no MPI here, or not one that several threads may call.
        InvalidWorldSizeError: MPI says that this process is alone, and its launcher that it is not.
        RendezvousError: On every rank, when some did not come in time; they are named.
    """

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
        self._messages, collective = self._communicators
        self._messenger = FrameTransport(mpi, self._messages, self._on_frame)
        self._out = OutgoingMessages(self._messenger, self._push, self._finish_send)
        self._in = IncomingMessages(self._mailbox, self._accept, self._push)
        self._liveness = LivenessProbe(self._ping, self._move_while_alive)
        self._parked: list[_DeferredAbort] = []
        self._parted: set[int] = set()  # ranks that have left the world, or died
        self._has_said_goodbye = False
        self._watches_deaths = runtime.call_safely(mpi, self._messages.Get_failed) is not None
        self._actions: dict[FrameType, Callable[[int, Frame, memoryview], None]] = {
            FrameType.EAGER: self._in.on_eager,
            FrameType.OFFER: self._in.on_offer,
            FrameType.GRANT: self._out.on_grant,
            FrameType.DATA: self._in.on_data,
            FrameType.WITHDRAW: self._in.on_withdraw,
            FrameType.ABORT: self._on_abort,
            FrameType.LEFT: self._on_left,
            FrameType.PING: self._on_ping,
            FrameType.PONG: self._on_pong,
        }
        self.data_plane: MpiDataPlane = MpiDataPlane(mpi, collective, self._is_in_vain, self._explain, self._grace)
        self.verifier: MpiVerifier = MpiVerifier(
            self, self.data_plane, self._find_behind, partial(self._look, _LOOK_SECONDS)
        )
        self._process = os.getpid()
        self._progress = ProgressThread(
            look=self._look,
            patrol=self._patrol,
            is_awaited=lambda: self._out.is_any_left or self._mailbox.is_awaited,
            is_over=self._is_over,
            ended=self._release,
            name=f"ferrodist-mpi-{name}-{self.rank}",
        )
        runtime.use(self)
        track(self)
        self._progress.start()

    @classmethod
    def of_job(cls, rank: int | None, world_size: int | None, timeout: float, deadline: Deadline) -> MpiBackend:
        """The group of all ranks of this process's MPI job.

        Args:
            rank: What the user says this rank is, or None.
            world_size: What the user says their number is, or None.
            timeout: Seconds a blocking call may take when it names no timeout itself.
            deadline: When all must have come.

        Raises:
            InvalidWorldSizeError, InvalidRankError: MPI says otherwise.
        """
        communicator = runtime.start(deadline).COMM_WORLD
        check_job(communicator, rank, world_size)
        return cls(communicator, timeout=timeout, connect_timeout=deadline.remaining())

    # Sending.

    def _start_send(self, send: Send) -> None:
        self._out.start(send)

    def _take_back(self, send: Send) -> bool:
        return self._out.take_back(send)

    def _push(self, rank: int, outgoing: QueuedFrame) -> None:
        try:
            self._messenger.push(rank, outgoing)
        except self._mpi.Exception as error:
            self._explain(error)

    # Receiving.

    def _post(self, buffer: memoryview, source: int, tag: int) -> Request:
        receive = _Receive(self, self._mailbox, buffer, source, tag)
        self._mailbox.post(receive, partial(self.refusal, tag, source))
        return receive

    def move_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False when that has not come within so many seconds."""
        return self._progress.wait_until(done, timeout)

    def _move_while_alive(self, done: Callable[[], bool], timeout: float) -> None:
        """Move frames until ``done()``, or the group has failed, or for so many seconds."""
        self.move_until(lambda: done() or self.failure is not None, timeout)

    def _look(self, patience: float = 0) -> bool:
        """Move what can be moved; whether there was anything."""
        try:
            return self._messenger.look(patience)
        except ProtocolError as error:
            self.abort(error)
        except self._mpi.Exception as error:
            self._explain(error)
        return True

    def _on_frame(self, source: int, frame: Frame, payload: memoryview) -> None:
        self._actions[frame.kind](source, frame, payload)

    def _on_abort(self, source: int, frame: Frame, payload: memoryview) -> None:
        try:
            reason = unpack_reason(payload, self.world_size)
        except ValueError as error:
            raise ProtocolError(f"an ABORT frame with {error}") from None
        if not self._is_told(source, frame):
            return
        if self._unheard_leavers(frame.group, reason):
            self._parked.append(_DeferredAbort(frame.group, reason, Deadline(_PARKING_SECONDS)))
        else:
            self.fail_group(frame.group, reason)

    def _unheard_leavers(self, group_id: int, error: DistributedError) -> set[int]:
        """The ranks that a group is told to have lost, and that have not said goodbye here yet.

        What they sent before that is on its way too, and others may have been faster to say that they left: see
        [Note: left and died].
        """
        members = self._members.get(group_id, ())
        if not isinstance(error, PeerLostError) or not all(rank < len(members) for rank in error.ranks):
            return set()
        named = {members[rank] for rank in error.ranks} - {self.rank}
        return {rank for rank in named if self.departure_error(group_id, rank) is None}

    def _act_on_parked(self) -> None:
        """Fail groups whose lost ranks have been heard of meanwhile, or have not for long."""
        for parked in self._parked.copy():
            if parked.deadline.expired or not self._unheard_leavers(parked.group_id, parked.error):
                with contextlib.suppress(ValueError):  # another thread has
                    self._parked.remove(parked)
                    self.fail_group(parked.group_id, parked.error)

    def _on_left(self, source: int, frame: Frame, _payload: memoryview) -> None:
        if self._is_told(source, frame):
            self.peer_left(frame.group, source)
        self._act_on_parked()
        if frame.group == _WORLD:
            self._liveness.note_progress(source, frame.message)
            self._parted.add(source)

    def _ping(self, rank: int) -> None:
        self._push(rank, QueuedFrame(Frame(FrameType.PING)))

    def _on_ping(self, source: int, _frame: Frame, _payload: memoryview) -> None:
        self._push(source, QueuedFrame(Frame(FrameType.PONG, self.verifier.num_entered)))

    def _on_pong(self, source: int, frame: Frame, _payload: memoryview) -> None:
        self._liveness.note_progress(source, frame.message)
        self._liveness.on_answer(source)

    def _is_told(self, source: int, frame: Frame) -> bool:
        """Whether to act on a notice of a group's end: not on one of a group that its sender is no member of."""
        if not self._may_be_ahead(frame.group, source):
            raise ProtocolError(
                f"rank {source} tells of the ends of more than {MAX_AHEAD} groups that rank {self.rank} has not made",
                ranks=(source,),
            )
        return self._is_member(frame.group, source)

    def _forget_messages(self, applies: Callable[[Message], bool]) -> None:
        super()._forget_messages(applies)
        self._in.forget(applies)

    # Who is there, and who is late.

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Put a wait in vain down to those of the peers that do not answer, or else to all; see
        `Backend.find_stragglers`.
        """
        if within == 0 or self.failure is not None:
            return Stragglers(ranks=peers)
        silent = self._liveness.find_silent(peers, within)
        if not silent:
            return Stragglers(ranks=peers)
        who = f"{ranks_text(silent)} of group {self.name!r}"
        return Stragglers(ranks=silent, detail=f" ({who} {'does' if len(silent) == 1 else 'do'} not answer)")

    def _find_behind(self, sequence: int) -> tuple[int, ...]:
        """The ranks to which it is put down that not all have entered a collective."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return self._liveness.find_behind(others, sequence, answer_seconds(self.timeout))

    def _is_in_vain(self) -> bool:
        """Whether a collective that this rank is in can't end: fails the group when a rank has left before it."""
        if self.failure is not None:
            return True
        for rank in self._parted.copy():
            departure = self.departure_error(_WORLD, rank)
            if departure is not None and not self._liveness.has_entered(rank, self.verifier.num_entered - 1):
                self.abort(departure)
                return True
        return False

    def _grace(self) -> float:
        """Seconds for which a collective may still end that this rank is in, when the group has failed.

        A rank that left after this collective makes the next one fail, and the news of that may be here before the
        last bytes of this one.
        """
        return _GRACE_SECONDS if isinstance(self.failure, PeerLostError) else 0.0

    def _patrol(self) -> None:
        """Look whether ranks have died, where MPI tells; called from time to time."""
        self._act_on_parked()
        if not self._watches_deaths:
            return
        mpi, messages = self._mpi, self._messages
        failed = runtime.call_safely(mpi, messages.Get_failed)
        if failed is None or failed.Get_size() == 0:
            return
        numbers = failed.Translate_ranks(list(range(failed.Get_size())), messages.Get_group())
        for rank in set(numbers) - self._parted:
            self._lose(rank)
        runtime.call_safely(mpi, messages.Ack_failed)  # or receives from any rank are refused

    def _lose(self, rank: int) -> None:
        self._parted.add(rank)
        self._messenger.lose(rank)
        for message in self._in.forget(lambda message: message.source == rank):
            self._mailbox.withdraw(message)
        self.peer_died(rank, _DIED)

    def _explain(self, error: Exception) -> None:
        """End the group for what MPI raised: for the ranks that have died, if that is the reason."""
        mpi = self._mpi
        deaths = {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED}
        self._patrol()
        is_known = bool(self._parted) and isinstance(error, mpi.Exception) and error.Get_error_class() in deaths
        if self.failure is None and not is_known:  # one that had left before it died is nobody's loss
            self.abort(runtime.translate(mpi, error))

    # Notices, and the end.

    def _notify_abort(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        payload = pack_reason(error)
        for rank in members:
            if rank != self.rank:
                self._push(rank, QueuedFrame(Frame(FrameType.ABORT, group=group_id), payload))

    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        for rank in members:
            if rank != self.rank:
                self._push(rank, QueuedFrame(Frame(FrameType.LEFT, self.verifier.num_entered, group_id)))

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`.

        Args:
            timeout: Seconds to wait until MPI has sent what this rank has; None for five.
        """
        deadline = Deadline(_CLOSE_SECONDS if timeout is None else check_timeout(timeout))
        if os.getpid() != self._process or not self._close_groups():
            return  # closed already, or in a forked child: MPI is the parent's
        try:
            self._leave_groups()
            self._has_said_goodbye = True
            self.move_until(self._messenger.is_idle, deadline.remaining())
        finally:
            self._run_close_callbacks()

    def _is_over(self) -> bool:
        """Whether nothing comes or goes any more: this rank has said that it left the group, and so have all others.

        A rank that is closing it has not said so yet, and the others wait for that.
        """
        return self._has_said_goodbye and len(self._parted) == self.world_size - 1 and self._messenger.is_idle()

    def _release(self) -> None:
        """All ranks have left: called by the thread that moved the frames, as its last act."""
        self._messenger.end()  # a thread that closes the group may look yet, and another one begin a collective
        has_failed = _WORLD in self._failures
        if self.data_plane.end() and not has_failed:
            for communicator in self._communicators:
                runtime.call_safely(self._mpi, communicator.Free)
        runtime.forget(self, has_failed=has_failed or bool(self._died))

    def has_parted(self, patience: float) -> bool:
        """Wait until all ranks have left the group; whether they have, ``patience`` seconds after a failure."""
        while not self._progress.join(patience):
            if _WORLD in self._failures or os.getpid() != self._process:
                return False
        return True

    def leave_to_parent(self, error: DistributedError) -> None:
        """In a forked child: the group stays the parent's, and using it here raises ``error``, and does not hang."""
        self._state_lock = threading.Lock()  # the parent's threads may have held it
        self._ended = error

    def shrink(self, *, timeout: float | None = None, name: str | None = None) -> MpiBackend:
        """A new group of the ranks that are left, in their order; all of them call this.

        This group stays failed; close it when you like. Needs Open MPI and ``mpiexec --with-ft ulfm``.

        Args:
            timeout: Seconds for all to come; None takes the group's.
            name: What error messages call the new group; None for this one's name.

        Raises:
            BackendUnavailable: This MPI can't go on after the death of a rank.
            DistributedTimeoutError: Some rank that is left did not call it in time.
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        deadline = Deadline(limit)
        mpi = self._mpi
        if not self._watches_deaths:
            raise BackendUnavailable(
                f"{library_version()} can't make a group of the ranks that are left: use Open MPI, started with"
                " mpiexec --with-ft ulfm"
            )
        communicator = runtime.in_thread(self._messages.Shrink, deadline)
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
