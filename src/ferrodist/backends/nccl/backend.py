"""NCCL as a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.nccl.group import NcclGroup
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ferrodist.backends.request import Request

__all__ = ["NcclBackend"]


class NcclBackend(NcclGroup):
    """A rank of a group that carries tensors on GPUs by NCCL, and no bytes.

    `send` and `recv` raise UnsupportedOpError; so do their other forms. All else is as in a `HybridBackend`: barriers,
    objects and tensors on the CPU, which `DDP`, `FSDP`, `Pipeline` and checkpoints use for what ranks tell each other,
    go by the control group.

    Args:
        control: A group of the same ranks, of any backend but this; this one closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.

    Raises:
        BackendUnavailable: This process has no NCCL, or no GPU.
        TypeError: ``stream`` is no stream, or ``control`` no group.
    """

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Refused; tensors' heads are not."""
        self._check_tag(tag)
        super().send(data, dst, tag=tag, timeout=timeout)

    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().recv(buffer, src, tag=tag, timeout=timeout)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().isend(data, dst, tag=tag)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Refused, as `send`."""
        self._check_tag(tag)
        return super().irecv(buffer, src, tag=tag)

    def _check_tag(self, tag: int) -> None:
        if channel_of_tag(tag) == Channel.BYTES:
            raise UnsupportedOpError(
                f"group {self.name!r} is NCCL's, which carries tensors and no bytes: make it with backend 'hybrid', or"
                " call ferrodist.send with a tensor"
            )
