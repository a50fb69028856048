"""Groups over a control group: another backend's group of the same ranks.

The control group connects the ranks, detects failures, carries bytes, verifies collective calls, and has the
sub-groups. The group over it has a data plane of its own. A failure of the one is a failure of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ferrodist.backends.base import Backend, NonBlockingBackend
from ferrodist.backends.non_member import NonMemberGroup, check_group

Method = TypeVar("Method", bound=Callable[..., Any])


class Delegated:
    """An attribute of a group that is that of its control group, or of the object that ``owner`` names.

    A method is the other object's bound method itself, so that a call has no layer more. On the class it is a function
    with the signature and docstring of ``method``.
    """

    def __init__(self, owner: str = "_control", method: Callable[..., Any] | None = None) -> None:
        def call(group: DelegatingBackend, /, *args: Any, **kwargs: Any) -> Any:
            return self.__get__(group, type(group))(*args, **kwargs)

        self._owner = owner
        self._on_class: Any = self if method is None else functools.wraps(method, updated=())(call)

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, group: DelegatingBackend | None, _: type) -> Any:
        return self._on_class if group is None else getattr(getattr(group, self._owner), self._name)


def delegated(method: Method, owner: str = "_control") -> Method:
    """Make a `Delegated` method, for type checkers one of ``method``'s type."""
    return cast("Method", Delegated(owner, method))


class DelegatingBackend(NonBlockingBackend):
    """A group over a control group of another backend, which it closes with itself and which has no other user."""

    failure: Any = Delegated()
    abort = delegated(Backend.abort)
    find_stragglers = delegated(Backend.find_stragglers)

    # Bytes.
    send = delegated(Backend.send)
    recv = delegated(Backend.recv)
    isend = delegated(Backend.isend)
    irecv = delegated(Backend.irecv)
    inline_limit: Any = Delegated()
    irecv_up_to = delegated(Backend.irecv_up_to)
    try_send = delegated(Backend.try_send)
    post_persistent_recv = delegated(Backend.post_persistent_recv)
    make_wait_event = delegated(Backend.make_wait_event)

    # Sub-groups.
    abort_subgroup = delegated(Backend.abort_subgroup)
    subgroup_failure = delegated(Backend.subgroup_failure)
    fail_with = delegated(Backend.fail_with)
    open_subgroup = delegated(Backend.open_subgroup)
    close_subgroup = delegated(Backend.close_subgroup)
    equip_subgroup = delegated(Backend.equip_subgroup)

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

    @property
    def timeout(self) -> float:
        """Seconds a blocking call may take when it names no timeout itself, here and in the control group."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        Backend.timeout.fset(self, seconds)  # type: ignore[attr-defined] # a property, for type checkers a method
        self._control.timeout = self._timeout
