"""Groups over a control group: another backend's group of the same ranks.

The control group connects the ranks, detects failures, carries bytes, verifies collective calls, and has the
sub-groups. The group over it has a data plane of its own. A failure of the one is a failure of the other.
"""

from __future__ import annotations

from typing import Any

from ferrodist.backends.base import Backend, NonBlockingBackend
from ferrodist.backends.non_member import NonMemberGroup, check_group


class Delegated:
    """An attribute of a group that is that of another object, the control group unless ``owner`` names another."""

    def __init__(self, owner: str = "_control") -> None:
        self._owner = owner

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, group: DelegatingBackend | None, _: type) -> Any:
        return self if group is None else getattr(getattr(group, self._owner), self._name)


class DelegatingBackend(NonBlockingBackend):
    """A group over a control group of another backend, which it closes with itself and which has no other user."""

    failure: Any = Delegated()
    abort: Any = Delegated()
    find_stragglers: Any = Delegated()

    # Bytes.
    send: Any = Delegated()
    recv: Any = Delegated()
    isend: Any = Delegated()
    irecv: Any = Delegated()
    inline_limit: Any = Delegated()
    irecv_up_to: Any = Delegated()
    try_send: Any = Delegated()
    listen: Any = Delegated()
    signal: Any = Delegated()

    # Sub-groups.
    abort_subgroup: Any = Delegated()
    subgroup_failure: Any = Delegated()
    fail_with: Any = Delegated()
    open_subgroup: Any = Delegated()
    close_subgroup: Any = Delegated()
    equip_subgroup: Any = Delegated()

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
