"""Both kinds of tensors in one group: a host's backend for the CPU, NCCL for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.controlled import control_of
from ferrodist.backends.nccl.backend import NcclBackend
from ferrodist.backends.nccl.group import NcclGroup, reasons_without_nccl

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
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

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is no stream, or ``control`` no group.
    """

    _nccl: NcclBackend | None = None

    @property
    def tcp(self) -> Backend:
        """The group of the host: what carries bytes and tensors on the CPU. Its order of calls is this group's."""
        return self._control

    @property
    def nccl(self) -> NcclBackend:
        """This group as an `NcclBackend`, which carries no bytes. Its order of calls is this group's."""
        if self._nccl is None:
            self._nccl = NcclBackend.__new__(NcclBackend)
            self._nccl.__dict__ = self.__dict__  # one group under two classes: what is known of either is of both
        return self._nccl

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
