"""NCCL: collectives and messages of tensors on GPUs.

::

    library.py        is there an NCCL here?           communicator.py   the edge to the binding
    unique_id.py      how ranks of NCCL meet           dtypes.py         what NCCL can reduce, and the rest
    streams.py        the edge to CUDA                 connection.py     one group's communicator
    launcher.py       one group's work                 launched.py       what is on a stream
    places.py         in which order                   watch.py          deadlines of it
    call_ring.py      calls compared                   count_comparison.py   counts compared
    progress.py       who is late                      collectives.py, messages.py   the operations
    group.py          groups over a control group      backend.py        `NcclBackend`
"""

from ferrodist.backends.nccl.backend import NcclBackend
from ferrodist.backends.nccl.communicator import NcclUniqueId, is_nccl_available, why_no_nccl
from ferrodist.backends.nccl.reductions import reduce_op_to_nccl

__all__ = ["NcclBackend", "NcclUniqueId", "is_nccl_available", "reduce_op_to_nccl", "why_no_nccl"]


def __dir__() -> list[str]:
    return sorted(__all__)
