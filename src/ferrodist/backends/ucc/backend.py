"""A group whose collectives UCC moves, over a control group of the same ranks, which does all else.

What UCC's ranks tell each other before they are connected, by the control group's messages.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.backends.control_plane import ControlPlaneBackend
from ferrodist.backends.native.backend import open_host_group
from ferrodist.backends.polling import wait_until
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.backends.ucc.bindings import Team, UccError, load
from ferrodist.backends.ucc.collectives import UccDataPlane, UccVerifier
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    GroupAbortedError,
    GroupClosedError,
    RendezvousError,
    ranks_text,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.rendezvous import Membership

_FIRST_NUMBER = 1 << 55
"""Numbers of the channel for collectives' data that no collective comes to."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    parts: list[bytearray]
    pending: list[Request]


class OobAllgather:
    """Exchanges over a group's messages; the ranks begin them in the same order.

    Args:
        control: The group.
        deadline: When all must have ended.
    """

    def __init__(self, control: Backend, deadline: Deadline) -> None:
        self._control = control
        self._deadline = deadline
        self._numbers = itertools.count(_FIRST_NUMBER)

    def begin(self, data: bytes) -> _UnderWay:
        """Start to give ``data`` to all ranks, each of which gives as much."""
        control = self._control
        tag = channel_tag(Channel.DATA, next(self._numbers))
        parts = [
            bytearray(data) if rank == control.rank else bytearray(len(data)) for rank in range(control.world_size)
        ]
        peers = [rank for rank in range(control.world_size) if rank != control.rank]
        pending = [control.irecv(parts[rank], rank, tag=tag) for rank in peers]
        pending += [control.isend(data, rank, tag=tag) for rank in peers]
        return _UnderWay(parts, pending)

    def is_done(self, under_way: _UnderWay) -> bool:
        """Whether all have come.

        Raises:
            RendezvousError: They have not by the deadline.
            DistributedError: A message failed, as it does when the group has.
        """
        pending = under_way.pending
        while pending and pending[-1].done():
            pending.pop().wait(0)
        if not pending:
            return True
        if self._deadline.expired:
            ranks = tuple(sorted({request.peer for request in pending}))
            for request in pending:
                request.cancel()
            raise RendezvousError(
                f"group {self._control.name!r}: {ranks_text(ranks)} did not exchange UCC's addresses within"
                f" {self._deadline.timeout:g} s. Look at what is going on there, or pass a larger timeout.",
                ranks=ranks,
            )
        return False

    def result(self, under_way: _UnderWay) -> bytes:
        """What the ranks gave, one after the other."""
        return b"".join(under_way.parts)


_CLOSE_SECONDS = 10.0
"""How long `UccBackend.close` takes at most: half of it for UCC, the rest for the control group."""

_LIBRARY, _REASON = b"+", b"-"


class UccBackend(ControlPlaneBackend):
    """A rank of a group over UCC.

    UCC moves the bytes of the group's collectives. Which call belongs to which is agreed on before, and what is reduced
    is folded here, in rank order. So errors, deadlines and bits are those of the other backends, in every dtype.
    Messages, and the collectives of sub-groups, are the control group's; so is finding the dead.

    All ranks make the group from a control group of the same ranks, which it then owns.

    Args:
        control: A group of another backend, which nothing else uses and of which nothing else is made.
        connect_timeout: Seconds for all ranks to come; None takes the group's timeout.

    Raises:
        TypeError: ``control`` is no group.
        BackendUnavailable: On all ranks, when one has no UCC, or another version; with the reason.
            Or on one, when UCC does not start there; the others raise GroupAbortedError with that reason.
        RendezvousError: UCC did not connect the ranks in time.
        DistributedTimeoutError: A rank did not make the group in time.
    """

    def __init__(self, control: Backend, *, connect_timeout: float | None = None) -> None:
        super().__init__(control)
        deadline = Deadline(control.timeout if connect_timeout is None else check_timeout(connect_timeout))
        self._closing = threading.RLock()
        _check_libraries(control, deadline)
        self.data_plane: UccDataPlane = _connect(control, deadline)
        self.verifier: UccVerifier = UccVerifier(self, self.data_plane.sequencer)
        weakref.finalize(self, self.data_plane.stop)

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of all ranks that met, over a native control group, or TCP where there is no engine.

        Raises:
            BackendUnavailable: On all ranks, when one can't use UCC; with the reason.
        """
        control = open_host_group(membership, timeout, deadline)
        try:
            return cls(control, connect_timeout=deadline.remaining())
        except BaseException:
            control.close()
            raise

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`.

        Args:
            timeout: Seconds, half of them to wait until UCC has given what this rank has sent to the network, and the
                rest for the control group; None for ten.
        """
        deadline = Deadline(_CLOSE_SECONDS if timeout is None else check_timeout(timeout))
        if self._is_closed():  # in a forked child too: UCC is its parent's, and so may the lock's holder be
            return
        with self._closing:
            if self._is_closed():
                return
            self.data_plane.leave(deadline.timeout / 2)
            self._control.close(deadline.remaining())
            self.data_plane.stop()
        self._run_close_callbacks()

    def _is_closed(self) -> bool:
        return isinstance(self._control.failure, GroupClosedError)


def _check_libraries(control: Backend, deadline: Deadline) -> None:
    """Raise the same on all ranks when one can't use UCC, or uses another one."""
    unavailable = None
    try:
        own = _LIBRARY + str(load()).encode()
    except BackendUnavailable as error:
        unavailable = error
        own = _REASON + error.message.encode()
    said = control.verifier.verify(
        CollectiveSignature(operation="is there UCC", payload=own[:MAX_PAYLOAD]), deadline.remaining()
    )
    lacking = tuple(rank for rank, payload in enumerate(said) if not payload.startswith(_LIBRARY))
    if lacking:
        reason = unavailable.message if unavailable else said[lacking[0]][1:].decode(errors="replace") + " ..."
        raise BackendUnavailable(
            f"UccBackend needs UCC on all ranks, and {ranks_text(lacking)} can't use it: {reason}", ranks=lacking
        )
    versions = {payload[1:].decode(errors="replace") for payload in said}
    if len(versions) > 1:
        raise BackendUnavailable(f"UccBackend needs the same UCC on all ranks, not {', '.join(sorted(versions))}")


def _connect(control: Backend, deadline: Deadline) -> UccDataPlane:
    """UCC's collectives among all ranks; where it fails the others learn of it."""
    try:
        team = _make_team(control, deadline)
        return _agree_on(team, control, deadline)
    except UccError as error:
        reason = f"UccBackend can't be used on rank {control.rank}: {error.message}"
        control.abort(reason)
        raise BackendUnavailable(reason, ranks=(control.rank,)) from error
    except DistributedError as error:
        control.abort(error)
        raise
    except BaseException as error:
        control.abort(f"rank {control.rank} left UCC's start by {error!r}")
        raise


def _make_team(control: Backend, deadline: Deadline) -> Team:
    team = Team(load(), control.rank, control.world_size, OobAllgather(control, deadline))
    if wait_until(team.is_ready, deadline, lambda: control.failure is not None):
        return team
    raise control.failure or RendezvousError(
        f"group {control.name!r}: UCC did not connect the ranks within {deadline.timeout:g} s. Look at UCC's and UCX's"
        " own messages on standard error, or pass a larger timeout."
    )


def _agree_on(team: Team, control: Backend, deadline: Deadline) -> UccDataPlane:
    """The team's mover, once all ranks have one: a group is made on all of them, or on none.

    The mover's thread goes on meanwhile, for the ranks that UCC has not connected yet.
    """
    sequence = control.verifier.reserve()
    mover = UccDataPlane(team, control, first=sequence + 1)
    try:
        control.verifier.verify(CollectiveSignature(operation="UCC is connected"), deadline.remaining(), sequence)
    except GroupAbortedError:
        pass  # most probably by a rank that knew of all others and went ahead: the next call says so
    except BaseException:
        mover.stop()
        raise
    return mover
