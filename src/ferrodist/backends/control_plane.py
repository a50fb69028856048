"""Groups over a control group: another backend's group of the same ranks.

The control group connects the ranks, detects failures, carries bytes, verifies collective calls, and has the
sub-groups. The group over it has a data plane of its own. A failure of the one is a failure of the other.
"""

from __future__ import annotations

from typing import Any

from ferrodist.backends.base import Backend, NonBlockingBackend
from ferrodist.backends.non_member import NonMemberGroup, check_group


class _FromControlGroup:
    """An attribute whose value, or bound method, is the control group's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: ControlPlaneBackend | None, owner: type) -> Any:
        return self if group is None else getattr(group._control, self._name)  # noqa: SLF001 - one mechanism


class ControlPlaneBackend(NonBlockingBackend):
    """A group over a control group of another backend, which it closes with itself and which has no other user."""

    failure: Any = _FromControlGroup()
    abort: Any = _FromControlGroup()
    find_stragglers: Any = _FromControlGroup()

    # Bytes.
    send: Any = _FromControlGroup()
    recv: Any = _FromControlGroup()
    isend: Any = _FromControlGroup()
    irecv: Any = _FromControlGroup()
    try_send: Any = _FromControlGroup()
    listen: Any = _FromControlGroup()
    signal: Any = _FromControlGroup()

    # Sub-groups.
    abort_subgroup: Any = _FromControlGroup()
    subgroup_failure: Any = _FromControlGroup()
    fail_with: Any = _FromControlGroup()
    open_subgroup: Any = _FromControlGroup()
    close_subgroup: Any = _FromControlGroup()
    equip_subgroup: Any = _FromControlGroup()

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
