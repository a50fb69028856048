"""The edge to NVIDIA's binding: the one module that touches `nccl4py`, behind two small protocols.

Communicators are non-blocking (``blocking=0``): no call waits for another rank. What a call has begun is under way
until `Communicator.is_ready` says otherwise, and before that nothing else may be asked of the communicator, nor put on
a stream that it was given.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    import contextlib

    import torch

__all__ = ["Communicator", "Library", "NcclError", "open_library"]

_SUCCESS, _IN_PROGRESS = 0, 7

_UINT8 = 1
"""ncclUint8: what is moved and not reduced travels as bytes, whatever it is."""


class NcclError(DistributedError):
    """NCCL refused a call, or an operation of it failed."""


class Communicator(Protocol):
    """One rank's part in a set of GPUs that NCCL connects.

    Tensors are one-dimensional, contiguous and on the communicator's GPU. ``stream`` is a ``cudaStream_t`` as an int.
    Reductions take NCCL's numbers of the dtype and of the operation.
    """

    def is_ready(self) -> bool:
        """Whether all that was begun is on its stream; raises NcclError when the communicator has failed."""

    def begin_group(self) -> None:
        """What is called from now on goes to the GPU as one, and only that may be called: all below to `recv`.

        The communicator's GPU is the current one, and the same thread calls `end_group`.
        """

    def end_group(self) -> None:
        """Have it go to the GPU."""

    def all_reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        """Fold over the ranks into every ``out``, which may be ``source``."""

    def reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, root: int, stream: int) -> None:
        """Fold over the ranks into the root's ``out``; the others' is not touched."""

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        """Fold part r of every ``source`` into rank r's ``out``, all of equal size."""

    def broadcast(self, tensor: torch.Tensor, *, root: int, stream: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, *, stream: int) -> None:
        """Copy every ``source``, of equal size, into every ``out``."""

    def send(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        """Send to a rank, which receives."""

    def recv(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        """Receive from a rank, which sends."""

    def premultiplied_sum(self, factor: torch.Tensor, dtype: int) -> int:
        """The number of a new operation: a sum of elements times this rank's ``factor``, one element on the CPU."""

    def release_operation(self, op: int) -> None:
        """Give back what `premultiplied_sum` made, once it is on the stream."""

    def finalize(self) -> None:
        """Begin to complete all that is outstanding; `is_ready` tells when."""

    def destroy(self) -> None:
        """Let go of it, when nothing is outstanding."""

    def abort(self) -> None:
        """Let go of it at once: operations that are under way end, with whatever is in their outputs."""


class Library(Protocol):
    """NCCL, as far as it is used here."""

    @property
    def version(self) -> tuple[int, int, int]:
        """Of NCCL."""

    @property
    def description(self) -> str:
        """Versions, in words."""

    def unique_id(self) -> bytes:
        """The bytes by which the ranks of a new communicator find each other."""

    def open(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        """Begin to make a communicator of all ranks that use the same ``unique_id``."""


def open_library() -> Library:
    """NCCL through the binding.

    Raises:
        ImportError: The binding is not installed.
        RuntimeError: It finds no NCCL.
    """
    return _Nccl(importlib.import_module("nccl.bindings.nccl"))


class _Nccl:
    """`Library` by nccl4py's raw bindings, which release the GIL and check every result."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        number = int(bindings.get_version())
        self.version = (number // 10000, number // 100 % 100, number % 100)
        try:
            binding = importlib.metadata.version("nccl4py")
        except importlib.metadata.PackageNotFoundError:
            binding = "of unknown version"
        self.description = f"NCCL {'.'.join(map(str, self.version))}, nccl4py {binding}"

    def unique_id(self) -> bytes:
        """See `Library`."""
        return bytes(memoryview(_call(self._bindings, "get_unique_id")))

    def open(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        """See `Library`."""
        configuration = self._bindings.Config()
        configuration.blocking = 0
        with _on(device):
            handle = _call(
                self._bindings, "comm_init_rank_config", world_size, bytearray(unique_id), rank, configuration
            )
        return _NcclCommunicator(self._bindings, handle, device)


class _NcclCommunicator:
    """`Communicator` by nccl4py's raw bindings."""

    def __init__(self, bindings: Any, handle: Any, device: torch.device) -> None:
        self._bindings = bindings
        self._handle = handle
        self._device = device

    def is_ready(self) -> bool:
        status = int(self._call("comm_get_async_error", self._handle))
        if status not in (_SUCCESS, _IN_PROGRESS):
            text = self._bindings.get_error_string(status)
            detail = self._bindings.get_last_error(self._handle)
            raise NcclError(f"NCCL failed: {text}" + (f" ({detail.strip()})" if detail and detail.strip() else ""))
        return status == _SUCCESS

    def begin_group(self) -> None:
        self._call("group_start")

    def end_group(self) -> None:
        self._call("group_end")

    def all_reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        arguments = (source.data_ptr(), out.data_ptr(), source.numel(), dtype, op)
        self._call("all_reduce", *arguments, self._handle, stream)

    def reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, root: int, stream: int) -> None:
        arguments = (source.data_ptr(), out.data_ptr(), source.numel(), dtype, op, root)
        self._call("reduce", *arguments, self._handle, stream)

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        arguments = (source.data_ptr(), out.data_ptr(), out.numel(), dtype, op)
        self._call("reduce_scatter", *arguments, self._handle, stream)

    def broadcast(self, tensor: torch.Tensor, *, root: int, stream: int) -> None:
        address = tensor.data_ptr()
        self._call("broadcast", address, address, _size(tensor), _UINT8, root, self._handle, stream)

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, *, stream: int) -> None:
        arguments = (source.data_ptr(), out.data_ptr(), _size(source), _UINT8)
        self._call("all_gather", *arguments, self._handle, stream)

    def send(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        self._call("send", tensor.data_ptr(), _size(tensor), _UINT8, peer, self._handle, stream)

    def recv(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        self._call("recv", tensor.data_ptr(), _size(tensor), _UINT8, peer, self._handle, stream)

    def premultiplied_sum(self, factor: torch.Tensor, dtype: int) -> int:
        residence = int(self._bindings.ScalarResidence.HostImmediate)
        return int(self._call("red_op_create_pre_mul_sum", factor.data_ptr(), dtype, residence, self._handle))

    def release_operation(self, op: int) -> None:
        self._call("red_op_destroy", op, self._handle)

    def finalize(self) -> None:
        with _on(self._device):
            self._call("comm_finalize", self._handle)

    def destroy(self) -> None:
        with _on(self._device):
            self._call("comm_destroy", self._handle)

    def abort(self) -> None:
        with _on(self._device):
            self._call("comm_abort", self._handle)

    def _call(self, name: str, *arguments: object) -> Any:
        return _call(self._bindings, name, *arguments)


def _call(bindings: Any, name: str, *arguments: object) -> Any:
    """Call a function of the binding, and map its errors."""
    try:
        return getattr(bindings, name)(*arguments)
    except bindings.NCCLError as error:
        raise NcclError(f"{name} of NCCL failed: {error}") from None


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    import torch  # noqa: PLC0415 - the probes of the doctor ask for versions without it

    return torch.cuda.device(device)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
