"""Both kinds of tensors in one group: a host's backend for the CPU, NCCL for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.controlled import control_of
from ferrodist.backends.nccl.group import NcclGroup, reasons_without_nccl

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.collectives import NcclCollectives
    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous import Membership

__all__ = ["HybridBackend", "best_backend"]


class HybridBackend(NcclGroup):
    """A rank of a group that carries bytes and tensors on the CPU by one backend, and tensors on GPUs by NCCL.

    The communicators of NCCL are made when the first collective or message on a GPU comes.

    Args:
        control: A group of the same ranks, a `NativeBackend` or `TcpBackend`; this one closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.
    """

    def tcp(self) -> Backend:
        """The group of the host: what carries bytes and tensors on the CPU."""
        return self._control

    def nccl(self) -> NcclCollectives:
        """The engine of tensors on GPUs."""
        engine: NcclCollectives = self.device_collectives
        return engine

    def synchronize_nccl(self, timeout: float | None = None) -> None:
        """Wait on the host until NCCL has done what this rank has launched in this group: `synchronize`."""
        self.synchronize(timeout)


def best_backend(membership: Membership, timeout: float, deadline: Deadline) -> Backend:
    """What ``init_process_group(None)`` makes: a hybrid group where all ranks have NCCL and a GPU, else the host's."""
    control = control_of(membership, timeout, deadline)
    try:
        return control if reasons_without_nccl(control, deadline) else HybridBackend(control)
    except BaseException:
        control.close()
        raise
