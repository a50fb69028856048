"""A group whose collectives UCC carries, over a control group of the same ranks, which does everything else."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from ferrodist.backends.delegating_backend import DelegatingBackend
from ferrodist.backends.native.backend import open_host_group
from ferrodist.backends.polling import wait_until
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.backends.ucc.bindings import UccError, load
from ferrodist.backends.ucc.data_plane import UccDataPlane
from ferrodist.backends.ucc.team import OobAllgather, Team
from ferrodist.backends.verification import CollectiveVerifier
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
    from ferrodist.rendezvous import Membership

_CLOSE_SECONDS = 10.0  # how long `UccBackend.close` takes at most: half of it for UCC, the rest for the control group
_LIBRARY, _REASON = b"+", b"-"


class UccBackend(DelegatingBackend):
    """A rank of a group over UCC.

    UCC moves the bytes of the group's collectives. Calls are compared before data moves, and reductions are folded
    here, in rank order. So errors, deadlines and bits are those of the other backends, in every dtype. Messages, the
    collectives of sub-groups and the detection of dead ranks are the control group's.

    All ranks make the group from a control group of the same ranks, which it then owns.

    Args:
        control: A group of another backend, used by this group only.
        connect_timeout: Seconds for all ranks to make the group; None takes the control group's timeout.

    Raises:
        TypeError: ``control`` is not a group.
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
        self.verifier = CollectiveVerifier(self, sequencer=self.data_plane.sequencer)
        weakref.finalize(self, self.data_plane.stop)

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of a rendezvous, over a native control group, or a TCP one without the native engine.

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
            timeout: Seconds, half of them for UCC to send this rank's data, and the rest for the control group; None
                for ten.
        """
        deadline = Deadline(_CLOSE_SECONDS if timeout is None else check_timeout(timeout))
        if self._is_closed():  # in a forked child too, where UCC and perhaps the lock's holder are the parent's
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
    """Raise the same error on all ranks when one can't use UCC, or has another version."""
    unavailable = None
    try:
        own = _LIBRARY + str(load()).encode()
    except BackendUnavailable as error:
        unavailable = error
        own = _REASON + error.message.encode()
    answers = control.verifier.verify(
        CollectiveSignature(operation="is there UCC", payload=own[:MAX_PAYLOAD]), deadline.remaining()
    )
    lacking = tuple(rank for rank, answer in enumerate(answers) if not answer.startswith(_LIBRARY))
    if lacking:
        reason = unavailable.message if unavailable else answers[lacking[0]][1:].decode(errors="replace") + " ..."
        raise BackendUnavailable(
            f"UccBackend needs UCC on all ranks, and {ranks_text(lacking)} can't use it: {reason}", ranks=lacking
        )
    versions = {answer[1:].decode(errors="replace") for answer in answers}
    if len(versions) > 1:
        raise BackendUnavailable(f"UccBackend needs the same UCC on all ranks, not {', '.join(sorted(versions))}")


def _connect(control: Backend, deadline: Deadline) -> UccDataPlane:
    """Connect all ranks by UCC; a failure on one aborts the control group."""
    try:
        team = _make_team(control, deadline)
        return _make_data_plane(team, control, deadline)
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


def _make_data_plane(team: Team, control: Backend, deadline: Deadline) -> UccDataPlane:
    """Make the data plane once all ranks have a team, so that the group is made on all ranks or on none.

    Its thread goes on meanwhile, for the ranks that UCC has not connected yet.
    """
    sequence = control.verifier.reserve()
    data_plane = UccDataPlane(team, control, first=sequence + 1)
    try:
        control.verifier.verify(CollectiveSignature(operation="UCC is connected"), deadline.remaining(), sequence)
    except GroupAbortedError:
        pass  # most probably by a rank that had everybody's calls and went on: the next call raises it
    except BaseException:
        data_plane.stop()
        raise
    return data_plane
