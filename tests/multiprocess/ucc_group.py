"""Ranks of UCC groups as forked processes, for `test_ucc.py`."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Any

import ferrodist as fd
from ferrodist.backends.native import NativeBackend, is_native_available
from ferrodist.backends.tcp import TcpBackend
from ferrodist.testing.process_ranks import ProcessRanks
from ferrodist.testing.supervisor import RankProgram, supervise

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

__all__ = ["CONTROLS", "UccRunner", "open_ucc"]

CONTROLS = ["tcp", "native"] if is_native_available() else ["tcp"]

_KINDS = {"tcp": TcpBackend, "native": NativeBackend}

# Loaded before the ranks are forked: their clocks run while they import.
for _name in fd.__all__:
    getattr(fd, _name)


def open_ucc(control: str) -> Any:
    """A function that makes a rank's group, with the arguments of `TcpBackend`, over a control group of `CONTROLS`."""

    def open_group(rank: int, world_size: int, address: str, **settings: Any) -> fd.UccBackend:
        return fd.UccBackend(_KINDS[control](rank, world_size, address, **settings))

    return open_group


class UccRunner:
    """Runs programs on the ranks of a UCC group; see `RankRunner`.

    Args:
        control: What its control group is, of `CONTROLS`.
        timeout: Of the group.
    """

    def __init__(self, control: str, timeout: float = 45.0) -> None:
        self._open = open_ucc(control)
        self._timeout = timeout

    def run(self, world_size: int, fn: Callable[[Backend], Any]) -> list[Any]:
        """Run ``fn(group)`` on each rank and return the results by rank."""
        secret = secrets.token_bytes(16)
        listener = socket.create_server(("127.0.0.1", 0))
        address = "{}:{}".format(*listener.getsockname())

        def open_group(rank: int) -> Any:
            own = {"listener": listener} if rank == 0 else {}
            if rank != 0:
                listener.close()
            return self._open(rank, world_size, address, secret=secret, timeout=self._timeout, **own)

        with listener:
            ranks = ProcessRanks(RankProgram(open_group=open_group, body=fn), world_size)
        return supervise(ranks, world_size, 60.0)
