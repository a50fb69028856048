"""Notices from a control plane to a data plane: of groups that open, fail and close, and of ranks that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedError, PeerLostError

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

EndReason = Callable[[int, int], DistributedError | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerExit:
    """The reason why a rank is gone, which each of its groups reports in its own terms."""

    what: str  # follows the rank in the error's message, as "died: ..."
    kind: type[DistributedError] = PeerLostError
    relay: int | None = None  # the rank that passed on this one's messages, if that rank is gone and not this one


CLOSED = PeerExit(what="has left: it closed the group while others still needed it")


class GroupObserver:
    """Is notified of groups that open, fail and close on this rank, and carries data of them by another path.

    The control plane records each change before it notifies. The default methods do nothing.
    """

    def on_opened(self, group_id: int, members: tuple[int, ...]) -> None:
        """This rank has made a sub-group."""

    def on_failed(self, group_id: int, error: DistributedError) -> None:
        """A group has failed, and its transfers have been ended."""

    def on_peer_left(self, rank: int, peer_exit: PeerExit) -> None:
        """A rank has left a group."""

    def on_subgroup_closed(self, group_id: int) -> None:
        """This rank has closed a sub-group and notified the others."""

    def on_subgroup_forgotten(self, group_id: int) -> None:
        """No more messages come for a sub-group that this rank has closed."""

    def on_closed(self) -> None:
        """This rank has closed all groups, and is about to notify the others."""

    def on_forked(self) -> None:
        """This is a forked child: everything belongs to the parent."""

    def end_transfers(self, why: EndReason) -> None:
        """End the transfers for which ``why(group_id, peer)`` is an error."""

    def sending_groups(self) -> set[int]:
        """The groups with a message on its way out."""
        return set()

    def num_sent(self, rank: int) -> int:
        """The number of frames sent to a rank by this path, which a notice of this rank's exit may overtake."""
        del rank
        return 0

    def await_sent(self, rank: int, count: int) -> None:
        """Wait, not long, until so many frames have come from a rank."""

    def drain(self, deadline: Deadline) -> None:
        """Wait until what has been sent is out."""
