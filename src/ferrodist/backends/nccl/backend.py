"""NCCL as a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.nccl.controlled import ControlledBackend
from ferrodist.backends.nccl.library import load_nccl
from ferrodist.backends.nccl.refusing import HostAgreement
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Library
    from ferrodist.backends.nccl.streams import Stream, Streams

__all__ = ["NcclBackend"]

_OF_TENSORS = (Channel.BYTES, Channel.TENSOR_HEAD, Channel.TENSOR_BODY, Channel.DATA)


class NcclBackend(ControlledBackend):
    """A rank of a group that carries tensors on GPUs, by NCCL, and nothing else.

    Bytes and tensors on the CPU raise UnsupportedOpError: `HybridBackend` carries them, too. Barriers are those of the
    control group.

    Args:
        control: A group of the same ranks, of any backend but this; this one closes it.
        stream: A `torch.cuda.Stream` for all of the group's work on the GPU; None makes one for each group.
        library: Gives NCCL, or raises BackendUnavailable; for tests.
        streams: CUDA's; for tests.
    """

    carries_cpu_tensors = False

    def __init__(
        self,
        control: Backend,
        *,
        stream: Stream | None = None,
        library: Callable[[], Library] = load_nccl,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(control, stream=stream, library=library, streams=streams)
        self.collectives = HostAgreement(self, control.collectives)

    def _check_tag(self, tag: int) -> None:
        if channel_of_tag(tag) in _OF_TENSORS:
            raise UnsupportedOpError(
                f"group {self.name!r} is NCCL's, which carries tensors on GPUs and no bytes: make it with backend"
                " 'hybrid', or call ferrodist.send with a tensor on a GPU"
            )

    def subgroup_collectives(self, subgroup: Backend) -> HostAgreement:
        """The same for a sub-group."""
        return HostAgreement(subgroup, super().subgroup_collectives(subgroup))

    def subgroup_tensor_messages(self, subgroup: Backend) -> None:
        """There are none."""
        del subgroup
