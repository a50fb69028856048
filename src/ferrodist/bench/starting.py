"""The commands that start a peer's ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.environments import EnvironmentUnavailableError, obtain_environment
from ferrodist.bench.hosts import NUM_HOSTS, host_of
from ferrodist.bench.peers import MpiLibrary, Peer
from ferrodist.errors import BackendUnavailable
from ferrodist.launch.mpi import find_mpiexec, is_open_mpi, mpiexec_options
from ferrodist.rendezvous.secret import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.bench.hosts import EmulatedHosts

_FOREIGN = Path(__file__).with_name("foreign.py")
# From a launcher or another run, these would place our ranks in a job that is not theirs.
_FOREIGN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "PMI", "OMPI_", "PRTE_")


def start_commands(
    peer: Peer,
    num_ranks: int,
    *,
    socket_path: Path,
    folder: Path,
    tell: Callable[[str], None],
    hosts: EmulatedHosts | None = None,
) -> list[list[str]]:
    """The commands that start a peer's ranks: one for each, or one that starts all.

    Args:
        peer: Whose.
        num_ranks: How many ranks.
        socket_path: Where the driver listens.
        folder: Where the ranks may meet.
        tell: Called with what is done, when it takes long.
        hosts: Over which the ranks are spread, the first of them on the first; None is this one.

    Raises:
        EnvironmentUnavailableError: An MPI, or its launcher, can't be had.
    """
    options = ["--socket", str(socket_path), "--folder", str(folder), "--peer", peer.value, "--ranks", str(num_ranks)]
    library = peer.mpi_library
    if library is None:
        if hosts is not None:
            options += ["--address", hosts.meeting_of(peer)]
        module = [sys.executable, "-m", "ferrodist.bench.worker", *options]
        if peer.uses_own_mpi:
            return [[*_own_mpiexec(num_ranks), *module]]
        prefixes = [[] if hosts is None else hosts.prefix(host_of(rank, num_ranks)) for rank in range(num_ranks)]
        return [[*prefix, *module, "--rank", str(rank)] for rank, prefix in enumerate(prefixes)]
    environment = obtain_environment(library, tell)
    command = _mpiexec(str(environment.mpiexec), num_ranks, for_open_mpi=library is MpiLibrary.OPENMPI)
    if hosts is not None:
        agent = folder / "agent"
        hosts.write_agent(agent)
        command = [*hosts.prefix(0), *command, *_host_options(hosts, num_ranks, agent)]
    return [[*command, str(environment.python), str(_FOREIGN), "worker", *options]]


def _own_mpiexec(num_ranks: int) -> list[str]:
    """What starts ranks in this interpreter, over the MPI that its mpi4py loads."""
    try:
        mpiexec = find_mpiexec()
        return _mpiexec(mpiexec, num_ranks, for_open_mpi=is_open_mpi(mpiexec))
    except BackendUnavailable as error:
        raise EnvironmentUnavailableError(str(error)) from None


def _mpiexec(mpiexec: str, num_ranks: int, *, for_open_mpi: bool) -> list[str]:
    options = mpiexec_options(for_open_mpi=for_open_mpi, is_root=os.geteuid() == 0)
    return [mpiexec, *options, "-n", str(num_ranks)]


def rank_environment(environment: Mapping[str, str], peer: Peer, hosts: EmulatedHosts | None = None) -> dict[str, str]:
    """The variables that a peer's ranks get, from our own."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_FOREIGN_VARIABLES)}
    kept["OMP_NUM_THREADS"] = "1"  # what a rank has to itself on a full host
    kept["NUMPY_MADVISE_HUGEPAGE"] = "0"  # NumPy would ask for huge pages, and torch does not: all get the same memory
    if peer.mpi_library is not None:
        for name in ("PYTHONPATH", "PYTHONHOME"):  # they name packages of this interpreter
            kept.pop(name, None)
    if hosts is not None:
        kept["GLOO_SOCKET_IFNAME"] = hosts.device  # it would look its host's name up, which is that of all
        kept[SECRET_VARIABLE] = hosts.secret
    return kept


def _host_options(hosts: EmulatedHosts, num_ranks: int, agent: Path) -> Sequence[str]:
    """Open MPI's options for ranks of two hosts, which reach each other over TCP alone."""
    places_of_ranks = [host_of(rank, num_ranks) for rank in range(num_ranks)]
    slots = [places_of_ranks.count(host) for host in range(NUM_HOSTS)]
    places = ",".join(f"{address}:{count}" for address, count in zip(hosts.addresses, slots, strict=True))
    return (
        *("--host", places, "--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", hosts.device),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", hosts.device),
    )
