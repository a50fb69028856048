"""Groups over a control group: another backend's group of the same ranks.

The control group connects the ranks, finds the dead, carries bytes, compares calls, and has the sub-groups. Whoever is
over it moves tensors in its own way. A failure of the one is a failure of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.base import Backend, NonBlockingBackend
from ferrodist.backends.non_member import NonMemberGroup, check_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from ferrodist.backends.request import PersistentRecv, Request, Stragglers, WaitEvent
    from ferrodist.errors import DistributedError


class ControlPlaneBackend(NonBlockingBackend):
    """A group over a control group, which it closes with itself.

    Args:
        control: A group of another backend, of which nothing else is made.

    Raises:
        TypeError: It is no group.
    """

    def __init__(self, control: Backend) -> None:
        if not isinstance(control, Backend | NonMemberGroup):
            raise TypeError(
                f"{type(self).__name__} takes a group of the same ranks, such as a TcpBackend, not {control!r}"
            )
        check_group(control)
        super().__init__(control.rank, control.world_size, timeout=control.timeout, name=control.name)
        self._control = control
        self.verification_key = control.verification_key  # for the control group carries the messages of agreements
        self.subgroups = control.subgroups  # which tells the control group of those that are dropped

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self._control.failure

    def abort(self, reason: str | DistributedError) -> None:
        """End the group on all ranks; see `Backend.abort`."""
        self._control.abort(reason)

    # Bytes.

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; see `Backend.send`."""
        self._control.send(data, dst, tag=tag, timeout=timeout)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive bytes; see `Backend.recv`."""
        return self._control.recv(buffer, src, tag=tag, timeout=timeout)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once."""
        return self._control.isend(data, dst, tag=tag)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return at once."""
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
    ) -> PersistentRecv:
        """See `Backend.listen`."""
        return self._control.listen(src, size_bytes, heard, ended, tag=tag)

    def signal(self) -> WaitEvent:
        """See `Backend.signal`."""
        return self._control.signal()

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """See `Backend.find_stragglers`."""
        return self._control.find_stragglers(peers, within)

    # Sub-groups.

    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """End one sub-group on all its members; see `Backend.abort_subgroup`."""
        self._control.abort_subgroup(group_id, members, error)

    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        """Why a sub-group can't be used any more, or None."""
        return self._control.subgroup_failure(group_id, members)

    def fail_with(self, group_id: int, leader_id: int) -> None:
        """See `Backend.fail_with`."""
        self._control.fail_with(group_id, leader_id)

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        """See `Backend.open_subgroup`."""
        self._control.open_subgroup(group_id, members, name)

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """See `Backend.close_subgroup`."""
        self._control.close_subgroup(group_id, members)

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        self._control.equip_subgroup(subgroup)
