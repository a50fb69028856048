"""Sockets that belong to one process: a forked child drops its copies of them."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import socket

__all__ = ["close_in_child"]

_OWNED: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked = False

_Socket = TypeVar("_Socket", bound="socket.socket")


def close_in_child(sock: _Socket) -> _Socket:
    """Have ``sock`` closed in every child that this process forks from now on; returns ``sock``.

    The child closes its descriptors only: the connections of the parent stay open. A socket whose descriptor
    was detached (handed to someone else) is left alone.
    """
    global _hooked  # noqa: PLW0603 - a process can never unregister a fork hook, so it is registered once
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop)
        _hooked = True
    _OWNED.add(sock)
    return sock


def _drop() -> None:
    for sock in list(_OWNED):
        sock.close()
    _OWNED.clear()
