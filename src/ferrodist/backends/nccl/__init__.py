"""NCCL: collectives and messages of tensors on GPUs.

::

    backend.py            groups over a control group; `NcclBackend`, `HybridBackend`
    engine.py             the collectives            p2p.py          messages of tensors
    reductions.py         reductions NCCL lacks      verification.py calls and split sizes compared
    stream_executor.py    enqueues a group's work    in_flight.py    operations on a stream
    watchdog.py           deadlines, late ranks      communicator.py the binding to NCCL
"""

from ferrodist.backends.nccl.backend import NcclBackend
from ferrodist.backends.nccl.communicator import NcclUniqueId, is_nccl_available, why_no_nccl
from ferrodist.backends.nccl.reductions import reduce_op_to_nccl

__all__ = ["NcclBackend", "NcclUniqueId", "is_nccl_available", "reduce_op_to_nccl", "why_no_nccl"]


def __dir__() -> list[str]:
    return sorted(__all__)
