"""Groups over a control group: another backend's group of the same ranks.

The control group connects the ranks, detects failures, carries bytes, verifies collective calls, and has the
sub-groups. The group over it has a data plane of its own. A failure of the one is a failure of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.base import Backend, NonBlockingBackend
from ferrodist.backends.non_member import NonMemberGroup, check_group

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ferrodist.backends.request import (
        OnEnd,
        OnMessages,
        PersistentRecv,
        Request,
        SizedRequest,
        Stragglers,
        WaitEvent,
    )
    from ferrodist.errors import DistributedError


class ControlPlaneBackend(NonBlockingBackend):
    """A group over a control group of another backend, which it closes with itself and which has no other user."""

    def __init__(self, control: Backend) -> None:
        if not isinstance(control, Backend | NonMemberGroup):
            raise TypeError(
                f"{type(self).__name__} takes a group of the same ranks, such as a TcpBackend, not {control!r}"
            )
        check_group(control)
        super().__init__(control.rank, control.world_size, timeout=control.timeout, name=control.name)
        self._control = control
        self.verification_key = control.verification_key  # the control group carries the messages that it authenticates
        self.subgroups = control.subgroups  # so that the control group learns of dropped ones

    @override
    @property
    def failure(self) -> DistributedError | None:
        return self._control.failure

    @override
    def abort(self, reason: str | DistributedError) -> None:
        self._control.abort(reason)

    # Bytes.

    @override
    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        self._control.send(data, dst, tag=tag, timeout=timeout)

    @override
    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        return self._control.recv(buffer, src, tag=tag, timeout=timeout)

    @override
    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        return self._control.isend(data, dst, tag=tag)

    @override
    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        return self._control.irecv(buffer, src, tag=tag)

    @override
    @property
    def inline_limit(self) -> int:
        return self._control.inline_limit

    @override
    def irecv_up_to(self, buffer: Buffer, src: int, *, tag: int = 0) -> SizedRequest:
        return self._control.irecv_up_to(buffer, src, tag=tag)

    @override
    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        return self._control.try_send(data, dst, tag=tag)

    @override
    def listen(self, src: int, size_bytes: int, heard: OnMessages, ended: OnEnd, *, tag: int = 0) -> PersistentRecv:
        return self._control.listen(src, size_bytes, heard, ended, tag=tag)

    @override
    def signal(self) -> WaitEvent:
        return self._control.signal()

    @override
    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        return self._control.find_stragglers(peers, within)

    # Sub-groups.

    @override
    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        self._control.abort_subgroup(group_id, members, error)

    @override
    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        return self._control.subgroup_failure(group_id, members)

    @override
    def fail_with(self, group_id: int, leader_id: int) -> None:
        self._control.fail_with(group_id, leader_id)

    @override
    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> None:
        self._control.open_subgroup(group_id, members, name)

    @override
    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        self._control.close_subgroup(group_id, members)

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        self._control.equip_subgroup(subgroup)
