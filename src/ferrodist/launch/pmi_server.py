"""`PmiServer`: the launcher as the process manager of MPICH's ranks, for ``ferrodist run --mpi pmi``.

MPICH's ranks get their ranks and exchange addresses through a process manager that speaks PMI-1: lines of ``key=value``
over a stream. Each rank inherits one end of a socket pair (`PMI_FD`), so that nothing listens and nobody else can
connect.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

_MAX_VALUE = 4096
_MAX_KEYS = 1 << 20
_RECEIVE_BYTES = 1 << 16


class PmiServer:
    """The PMI-1 server of one attempt's ranks; it serves within a ``with`` block."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # Must be unique on the host: MPICH derives the name of its shared memory from it.
        self._name = f"ferrodist-{secrets.token_hex(8)}"
        self._pairs = [socket.socketpair() for _ in range(world_size)]
        # All ranks share host 0; without it MPICH takes each rank for a host of its own.
        self._values: dict[str, str] = {"PMI_process_mapping": f"(vector,(0,1,{world_size}))"}
        self._in_barrier: set[int] = set()
        self._partial_lines = [b""] * world_size
        self._selector = selectors.DefaultSelector()
        self._wakeup_writer, self._wakeup_reader = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="ferrodist-pmi", daemon=True)
        self._commands: dict[str, Callable[[int, Mapping[str, str]], str | None]] = {
            "init": lambda *_: "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda *_: f"cmd=maxes kvsname_max=64 keylen_max=256 vallen_max={_MAX_VALUE}",
            "get_appnum": lambda *_: "cmd=appnum appnum=0",
            "get_universe_size": lambda *_: f"cmd=universe_size size={world_size}",
            "get_my_kvsname": lambda *_: f"cmd=my_kvsname kvsname={self._name}",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._enter_barrier,
            "finalize": lambda *_: "cmd=finalize_ack",
            "abort": lambda *_: None,  # the rank exits by itself, which the launcher notices
        }

    def __enter__(self) -> Self:
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ, None)
        for rank, (own, _) in enumerate(self._pairs):
            self._selector.register(own, selectors.EVENT_READ, rank)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._wakeup_writer.close()  # which the thread reads as an end
        self._thread.join()
        self._selector.close()
        self._wakeup_reader.close()
        for end in chain(*self._pairs):
            end.close()

    def descriptor(self, rank: int) -> int:
        """Return the descriptor that a rank's process inherits."""
        return self._pairs[rank][1].fileno()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables by which a rank finds the server."""
        return {"PMI_FD": str(self.descriptor(rank)), "PMI_RANK": str(rank), "PMI_SIZE": str(self._world_size)}

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._read(key.data)

    def _read(self, rank: int) -> None:
        connection = self._pairs[rank][0]
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            return
        *lines, self._partial_lines[rank] = (self._partial_lines[rank] + data).split(b"\n")
        for line in lines:
            fields = _parse(line.decode("ascii", "replace"))
            command = fields.get("cmd", "")
            handler = self._commands.get(command)
            answer = f"cmd={command}_result rc=-1 msg=unknown_command" if handler is None else handler(rank, fields)
            if answer is not None:
                self._send(rank, answer)

    def _send(self, rank: int, answer: str) -> None:
        with contextlib.suppress(OSError):  # the rank has exited, which the launcher notices
            self._pairs[rank][0].sendall(answer.encode() + b"\n")

    def _put(self, _rank: int, fields: Mapping[str, str]) -> str:
        if len(self._values) >= _MAX_KEYS:
            return "cmd=put_result rc=-1 msg=too_many_keys"
        self._values[fields.get("key", "")] = fields.get("value", "")
        return "cmd=put_result rc=0 msg=success"

    def _get(self, _rank: int, fields: Mapping[str, str]) -> str:
        value = self._values.get(fields.get("key", ""))
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _enter_barrier(self, rank: int, _fields: Mapping[str, str]) -> None:
        self._in_barrier.add(rank)
        if len(self._in_barrier) == self._world_size:
            self._in_barrier.clear()
            for other in range(self._world_size):
                self._send(other, "cmd=barrier_out")


def _parse(line: str) -> dict[str, str]:
    """Parse a line's keys and values; ``value`` extends to the end of the line, the others to the next space."""
    keys, separator, value = line.partition(" value=")
    fields = dict(word.split("=", 1) for word in keys.split() if "=" in word)
    if separator:
        fields["value"] = value
    return fields
