"""All that the golden test imports from inside ferrodist, for which it has no public name; and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.backends.mpi.frame import Frame as MpiFrame
from ferrodist.backends.mpi.frame import Kind as MpiKind
from ferrodist.interop.process_group import FerrodistProcessGroup
from ferrodist.rendezvous.tcp_store import TcpStore, TcpStoreServer

if TYPE_CHECKING:
    import torch.distributed as dist

    import ferrodist as fd


def torch_process_group(group: fd.SubBackend | fd.NonMemberGroup) -> dist.ProcessGroup:
    """A group as torch's functions take it."""
    made: Any = FerrodistProcessGroup(group)  # type: ignore[arg-type]
    return made


store_server = TcpStoreServer
store_client = TcpStore


def mpi_frames(**fields: int) -> list[tuple[str, bytes]]:
    """A frame of each kind that MPI groups send, with its name."""
    kinds = {
        "a whole message": MpiKind.EAGER,
        "an offer": MpiKind.OFFER,
        "its grant": MpiKind.GRANT,
        "its data": MpiKind.DATA,
        "its withdrawal": MpiKind.WITHDRAW,
        "an abort": MpiKind.ABORT,
        "a goodbye": MpiKind.LEFT,
        "a question": MpiKind.PING,
        "its answer": MpiKind.PONG,
    }
    return [(name, MpiFrame(kind, **fields).pack()) for name, kind in kinds.items()]
