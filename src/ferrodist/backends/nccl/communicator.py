"""The edge to NVIDIA's binding: the one module that touches `nccl4py`, behind two small protocols.

Communicators are non-blocking (``blocking=0``): no call waits for another rank. What a call has begun is under way
until `Communicator.is_ready` says otherwise, and before that nothing else may be asked of the communicator, nor put on
a stream that it was given.

NCCL here, or why there is none.

A group's communicator: made by its ranks together when the first work comes, and ended once.

The bytes by which the ranks of an NCCL communicator find each other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, describe_error
from ferrodist.installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend

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


_lock = threading.Lock()


class _Found:
    """What loading gave: it is tried once a process."""

    def __init__(self) -> None:
        self.library: Library | None = None
        self.reason: str | None = None


_found = _Found()


def why_no_nccl(open_it: Callable[[], Library] = open_library) -> str | None:
    """Why NCCL can't be used in this process, in words; None when it can."""
    reason = why_no_gpu()
    if reason is not None:
        return reason
    with _lock:
        if _found.library is None and _found.reason is None:
            try:
                _found.library = open_it()
            except ModuleNotFoundError as error:
                _found.reason = f"NVIDIA's binding nccl4py is not installed ({error}): {how_to_install('nccl')}"
            except ImportError as error:
                _found.reason = (
                    f"NVIDIA's binding nccl4py can't be imported ({describe_error(error)}): install it again, with"
                    " pip install --force-reinstall nccl4py"
                )
            except Exception as error:  # noqa: BLE001 - the loader of the binding has errors of its own
                _found.reason = (
                    f"nccl4py finds no NCCL ({describe_error(error)}): install nvidia-nccl-cu13, or have libnccl.so.2"
                    " where the system's loader looks"
                )
        return _found.reason


def why_no_gpu() -> str | None:
    """Why there is no CUDA device for this process, in words; None when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build of torch with it"
    if not torch.cuda.device_count():  # which leaves CUDA alone where it can: a process that has begun it can't fork
        return "torch sees no GPU: look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES"
    return None


def is_nccl_available() -> bool:
    """Whether this process has a GPU, NVIDIA's binding `nccl4py`, and an NCCL that it can load."""
    return why_no_nccl() is None


def load_nccl() -> Library:
    """NCCL.

    Raises:
        BackendUnavailable: There is none, with the reason.
    """
    reason = why_no_nccl()
    if reason is not None:
        raise BackendUnavailable(f"NCCL can't be used here: {reason}")
    assert _found.library is not None
    return _found.library


_NUM_QUICK_LOOKS = 100
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3
_ABORT_SECONDS = 2.0
"""How long the end of a group waits for a thread that is launching, which sees the end by itself."""

_FINALIZE_SECONDS = 5.0
"""How long closing a group waits for other ranks to take what this one sends; then it lets go all the same."""


class CommunicatorHandle:
    """What NCCL knows of a group. Who asks it for anything holds ``lock``: it bears one thread at a time.

    Making a group takes no memory of a GPU: the communicator is made by the first work, on the GPU that it is for.

    Args:
        group: The group.
        library: Gives NCCL, or raises BackendUnavailable.
    """

    def __init__(self, group: Backend, library: Callable[[], Library]) -> None:
        self._group = group
        self._library = library
        self.lock = threading.RLock()
        self.device: torch.device | None = None
        self._communicator: Communicator | None = None
        self._process = os.getpid()

    @property
    def communicator(self) -> Communicator:
        """The communicator, which has been begun."""
        assert self._communicator is not None
        return self._communicator

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, where neither NCCL nor CUDA works."""
        return self._process != os.getpid()

    def begin(self, device: torch.device, call: CollectiveSignature, deadline: Deadline) -> None:
        """Begin to make it, with the other ranks, whose ``call`` is compared with this one's first.

        Raises:
            BackendUnavailable: On all ranks, when one has no NCCL. The group stays good.
        """
        group = self._group
        library, reason, unique_id = None, "", b""
        try:
            library = self._library()
            if group.rank == 0:
                unique_id = library.unique_id()
        except DistributedError as error:
            reason = describe_error(error)
        half = MAX_PAYLOAD - 1
        head = b"\0" + reason.encode()[:half] if reason else b"\1" + unique_id[:half]
        said = self._share(call.operation, head, deadline.remaining(), what="on GPUs")
        without = [rank for rank, answer in enumerate(said) if answer[:1] != b"\1"]
        if without:
            raise BackendUnavailable(
                f"{call} on group {group.name!r}: rank {without[0]} has no NCCL:"
                f" {reason or said[without[0]][1:].decode(errors='replace')}",
                ranks=tuple(without),
            )
        rest = self._share("unique id of NCCL", unique_id[half:], deadline.remaining())
        assert library is not None
        communicator = library.open(said[0][1:] + rest[0], group.rank, group.world_size, device)
        self._communicator, self.device = communicator, device
        self._finalizer = weakref.finalize(self, _abort, communicator, self._process)
        self._finalizer.atexit = False

    def _share(self, operation: str, payload: bytes, timeout: float, *, what: str = "") -> list[bytes]:
        """Give every rank the bytes of each, by what compares the calls of the group's host."""
        engine = self._group.collectives
        if engine is None:
            return self._group.agreement.reach(
                CollectiveSignature(operation=operation, reduce_op=what, payload=payload), timeout
            )
        name = f"{operation} {what}" if what else operation
        op = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=payload, timeout=timeout)
        shared: list[bytes] = engine.run(op, engine.reserve())
        return shared

    def is_ready(self) -> bool:
        """Whether all that was begun is on its stream; never again when it was aborted.

        Raises:
            NcclError: It has failed.
        """
        communicator = self._communicator
        return communicator is not None and communicator.is_ready()

    def find_error(self) -> NcclError | None:
        """What it has failed with, as far as that can be asked now: who holds the lock asks, too."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self.is_ready()
        except NcclError as error:
            return error
        finally:
            self.lock.release()
        return None

    def abort(self) -> None:
        """Let go of it at once, so that what waits on the GPU for other ranks ends; the group has failed."""
        has_lock = self.lock.acquire(timeout=_ABORT_SECONDS)
        try:
            communicator = self._take()
            if communicator is not None:
                _abort(communicator, self._process)
        finally:
            if has_lock:
                self.lock.release()

    def release(self) -> None:
        """Let go of it when what it sends has been taken, or was not in time."""
        with self.lock:
            communicator = self._take()
            if communicator is None or self.is_of_parent:
                return
            if _finalize(communicator):
                communicator.destroy()
            else:
                _abort(communicator, self._process)

    def _take(self) -> Communicator | None:
        """The communicator, for who ends it: once."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._finalizer.detach()
        return communicator


def _abort(communicator: Communicator, process: int) -> None:
    """Abort it, but not in a child of its process, whose threads the child has not."""
    if process == os.getpid():
        with contextlib.suppress(NcclError, RuntimeError):  # of a GPU that is lost: there is nothing that could be done
            communicator.abort()


def _finalize(communicator: Communicator) -> bool:
    deadline = Deadline(_FINALIZE_SECONDS)
    try:
        communicator.finalize()
        for pause in backoff():
            if communicator.is_ready():
                return True
            if deadline.expired:
                break
            time.sleep(pause)
    except NcclError:
        pass
    return False


def backoff() -> Iterator[float]:
    """Seconds between looks at what no thread can wait for: none at first, then more and more."""
    pause = _FIRST_PAUSE_SECONDS
    for _ in range(_NUM_QUICK_LOOKS):
        yield 0.0
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


_SIZE = 128
"""NCCL_UNIQUE_ID_BYTES of nccl.h."""


@dataclass(frozen=True, slots=True)
class NcclUniqueId:
    """What NCCL's ``ncclGetUniqueId`` gives one rank, which the others need to make a communicator with it.

    Groups make and share theirs by themselves. This is for programs that make communicators of their own, with
    NVIDIA's ``nccl4py``.

    Args:
        internal: 128 bytes.

    Raises:
        ValueError: They are not 128.
    """

    internal: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.internal, bytes):
            raise TypeError(f"a unique id is made from bytes, not {type(self.internal).__name__}")
        if len(self.internal) != _SIZE:
            raise ValueError(f"a unique id of NCCL has {_SIZE} bytes, not {len(self.internal)}")

    @classmethod
    def create(cls, library: Library | None = None) -> NcclUniqueId:
        """Make a new one, on one rank.

        Raises:
            BackendUnavailable: There is no NCCL here.
        """
        return cls((library or load_nccl()).unique_id())

    def __bytes__(self) -> bytes:
        return self.internal

    def __repr__(self) -> str:
        return f"NcclUniqueId({self.internal[:4].hex()}...)"  # it lets whoever has it into the communicator
