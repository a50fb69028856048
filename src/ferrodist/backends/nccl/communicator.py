"""NCCL's library and communicators, through NVIDIA's binding: the one module that uses `nccl4py`.

Communicators are non-blocking (``blocking=0``): no call waits for another rank. What a call has begun is in progress
until `Communicator.is_ready` returns True; until then nothing else may be asked of the communicator, nor enqueued on a
stream that it was given. Tests replace `Library` and `Communicator` by fakes with the same methods.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.polling import wait_until
from ferrodist.backends.signature import MAX_PAYLOAD, CollectiveSignature
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, GroupClosedError, describe_error
from ferrodist.installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1  # ncclUint8: data that is moved and not reduced travels as bytes, whatever its dtype


class NcclError(DistributedError):
    """NCCL refused a call, or an operation of it failed."""


class Library:
    """NCCL, through nccl4py's raw bindings (``nccl.bindings.nccl``), which release the GIL and check every result."""

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
        """Make the id by which the ranks of a new communicator find each other."""
        return bytes(memoryview(_call(self._bindings, "get_unique_id")))

    def open(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        """Begin to make a communicator of all ranks that pass the same ``unique_id``."""
        configuration = self._bindings.Config()
        configuration.blocking = 0
        with torch.cuda.device(device):
            handle = _call(
                self._bindings, "comm_init_rank_config", world_size, bytearray(unique_id), rank, configuration
            )
        return Communicator(self._bindings, handle, device)


class Communicator:
    """One rank's NCCL communicator.

    Tensors are one-dimensional, contiguous and on the communicator's GPU. ``stream`` is a ``cudaStream_t`` as an int.
    Reductions take the numbers of ncclDataType_t and ncclRedOp_t.
    """

    def __init__(self, bindings: Any, handle: Any, device: torch.device) -> None:
        self._bindings = bindings
        self._handle = handle
        self._device = device

    def is_ready(self) -> bool:
        """Return whether everything begun is on its stream; raises NcclError when the communicator has failed."""
        status = int(self._call("comm_get_async_error", self._handle))
        if status not in (_SUCCESS, _IN_PROGRESS):
            text = self._bindings.get_error_string(status)
            detail = self._bindings.get_last_error(self._handle)
            raise NcclError(f"NCCL failed: {text}" + (f" ({detail.strip()})" if detail and detail.strip() else ""))
        return status == _SUCCESS

    def begin_group(self) -> None:
        """Begin a group of calls that go to the GPU as one; only the methods from here to `recv` may be called in it.

        The communicator's GPU is the current one, and the same thread calls `end_group`.
        """
        self._call("group_start")

    def end_group(self) -> None:
        """End the group, which launches it."""
        self._call("group_end")

    def all_reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        """Reduce ``source`` over the ranks into every ``out``, which may be ``source``."""
        self._call("all_reduce", source.data_ptr(), out.data_ptr(), source.numel(), dtype, op, self._handle, stream)

    def reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, root: int, stream: int) -> None:
        """Reduce ``source`` over the ranks into the root's ``out``; the others' is not touched."""
        self._call("reduce", source.data_ptr(), out.data_ptr(), source.numel(), dtype, op, root, self._handle, stream)

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        """Reduce shard r of every ``source`` into rank r's ``out``; shards have equal sizes."""
        self._call("reduce_scatter", source.data_ptr(), out.data_ptr(), out.numel(), dtype, op, self._handle, stream)

    def broadcast(self, tensor: torch.Tensor, *, root: int, stream: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""
        address = tensor.data_ptr()
        self._call("broadcast", address, address, tensor.nbytes, _UINT8, root, self._handle, stream)

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, *, stream: int) -> None:
        """Copy every ``source``, of equal sizes, into every ``out``."""
        self._call("all_gather", source.data_ptr(), out.data_ptr(), source.nbytes, _UINT8, self._handle, stream)

    def send(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        """Send to a rank that receives."""
        self._call("send", tensor.data_ptr(), tensor.nbytes, _UINT8, peer, self._handle, stream)

    def recv(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        """Receive from a rank that sends."""
        self._call("recv", tensor.data_ptr(), tensor.nbytes, _UINT8, peer, self._handle, stream)

    def premultiplied_sum(self, factor: torch.Tensor, dtype: int) -> int:
        """Make an operation: a sum of elements times this rank's ``factor``, one element on the CPU."""
        residence = int(self._bindings.ScalarResidence.HostImmediate)
        return int(self._call("red_op_create_pre_mul_sum", factor.data_ptr(), dtype, residence, self._handle))

    def release_operation(self, op: int) -> None:
        """Release an operation made by `premultiplied_sum`, once its use is on the stream."""
        self._call("red_op_destroy", op, self._handle)

    def finalize(self) -> None:
        """Begin to complete everything outstanding, until `is_ready`."""
        with torch.cuda.device(self._device):
            self._call("comm_finalize", self._handle)

    def destroy(self) -> None:
        """Free the communicator, when nothing is outstanding."""
        with torch.cuda.device(self._device):
            self._call("comm_destroy", self._handle)

    def abort(self) -> None:
        """Free the communicator at once: outstanding operations end, with undefined outputs."""
        with torch.cuda.device(self._device):
            self._call("comm_abort", self._handle)

    def _call(self, name: str, *arguments: object) -> Any:
        return _call(self._bindings, name, *arguments)


def _call(bindings: Any, name: str, *arguments: object) -> Any:
    """Call a function of the binding, and map its errors."""
    try:
        return getattr(bindings, name)(*arguments)
    except bindings.NCCLError as error:
        raise NcclError(f"{name} of NCCL failed: {error}") from None


def open_library() -> Library:
    """Load NCCL through the binding: ImportError if that is not installed, RuntimeError if it finds no NCCL."""
    return Library(importlib.import_module("nccl.bindings.nccl"))


_lock = threading.Lock()
_loaded: Library | str | None = None
"""The library, or the reason why it can't be loaded; loading is tried once per process."""


def why_no_nccl(open_it: Callable[[], Library] = open_library) -> str | None:
    """The reason why NCCL can't be used in this process, or None if it can."""
    global _loaded  # noqa: PLW0603 - a process has one NCCL
    reason = why_no_gpu()
    if reason is not None:
        return reason
    with _lock:
        if _loaded is None:
            try:
                _loaded = open_it()
            except ModuleNotFoundError as error:
                _loaded = f"NVIDIA's binding nccl4py is not installed ({error}): {how_to_install('nccl')}"
            except ImportError as error:
                _loaded = (
                    f"NVIDIA's binding nccl4py can't be imported ({describe_error(error)}): install it again, with"
                    " pip install --force-reinstall nccl4py"
                )
            except Exception as error:  # noqa: BLE001 - the binding's loader has errors of its own
                _loaded = (
                    f"nccl4py finds no NCCL ({describe_error(error)}): install nvidia-nccl-cu13, or have libnccl.so.2"
                    " where the system's loader looks"
                )
        return _loaded if isinstance(_loaded, str) else None


def why_no_gpu() -> str | None:
    """The reason why this process has no CUDA device, or None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build of torch with it"
    if not torch.cuda.device_count():  # does not initialize CUDA where it can avoid it, so the process can still fork
        return "torch sees no GPU: look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES"
    return None


def is_nccl_available() -> bool:
    """Return whether this process has a GPU, NVIDIA's binding `nccl4py`, and an NCCL that it can load."""
    return why_no_nccl() is None


def load_nccl() -> Library:
    """NCCL; raises BackendUnavailable, with the reason, if it can't be used here."""
    reason = why_no_nccl()
    if reason is not None:
        raise BackendUnavailable(f"NCCL can't be used here: {reason}")
    assert _loaded is not None
    assert not isinstance(_loaded, str)
    return _loaded


_ABORT_SECONDS = 2.0  # how long an abort waits for a thread that is launching, which notices the abort by itself

_FINALIZE_SECONDS = 5.0
"""How long closing a group waits for other ranks to receive what this one sends, before it aborts instead."""


class GroupCommunicator:
    """A group's communicator: made by its ranks together for the first operation, and freed once.

    Making a group takes no GPU memory: the communicator is made by the first operation, on that operation's GPU. NCCL
    allows one thread at a time, so callers hold ``lock``. ``library()`` may raise BackendUnavailable.
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
        """The communicator, after `begin`; raises GroupClosedError once it is freed."""
        communicator = self._communicator
        if communicator is None:  # freed by another thread since the group was found usable
            raise GroupClosedError(f"group {self._group.name!r} is being closed on this rank ({self._group.rank})")
        return communicator

    @property
    def is_of_parent(self) -> bool:
        """True if this is a forked child, where neither NCCL nor CUDA works."""
        return self._process != os.getpid()

    def begin(self, device: torch.device, call: CollectiveSignature, deadline: Deadline) -> None:
        """Begin to make the communicator with the other ranks, after comparing their ``call`` with this one's.

        Raises BackendUnavailable on all ranks when one has no NCCL; the group stays usable.
        """
        group = self._group
        library, reason, unique_id = None, "", b""
        try:
            library = self._library()
            if group.rank == 0:
                unique_id = library.unique_id()
        except DistributedError as error:
            reason = describe_error(error)
        # A payload is too small for a unique id, so it is sent in two.
        half = MAX_PAYLOAD - 1
        first = b"\0" + reason.encode()[:half] if reason else b"\1" + unique_id[:half]
        answers = self._share(call.operation, first, deadline.remaining(), what="on GPUs")
        without = [rank for rank, answer in enumerate(answers) if answer[:1] != b"\1"]
        if without:
            raise BackendUnavailable(
                f"{call} on group {group.name!r}: rank {without[0]} has no NCCL:"
                f" {reason or answers[without[0]][1:].decode(errors='replace')}",
                ranks=tuple(without),
            )
        second = self._share("unique id of NCCL", unique_id[half:], deadline.remaining())
        assert library is not None
        communicator = library.open(answers[0][1:] + second[0], group.rank, group.world_size, device)
        self._communicator, self.device = communicator, device
        self._finalizer = weakref.finalize(self, _abort, communicator, self._process)
        self._finalizer.atexit = False

    def _share(self, operation: str, payload: bytes, timeout: float, *, what: str = "") -> list[bytes]:
        """Exchange payloads through the group's verification of calls on the host."""
        engine = self._group.engine("cpu")
        if engine is None:
            return self._group.verifier.verify(
                CollectiveSignature(operation=operation, reduce_op=what, payload=payload), timeout
            )
        name = f"{operation} {what}" if what else operation
        op = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=payload, timeout=timeout)
        payloads = engine.run(op, engine.reserve())
        assert payloads is not None
        return payloads

    def is_ready(self) -> bool:
        """Return whether everything begun is on its stream; False once aborted. Raises NcclError if it has failed."""
        communicator = self._communicator
        return communicator is not None and communicator.is_ready()

    def find_error(self) -> NcclError | None:
        """The communicator's error; None also while another thread holds the lock, which checks for itself."""
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
        """Free the communicator at once, which ends kernels that wait for other ranks; the group has failed."""
        has_lock = self.lock.acquire(timeout=_ABORT_SECONDS)
        try:
            communicator = self._take()
            if communicator is not None:
                _abort(communicator, self._process)
        finally:
            if has_lock:
                self.lock.release()

    def release(self) -> None:
        """Free the communicator once what it sends has been received, or after a time limit."""
        with self.lock:
            communicator = self._take()
            if communicator is None or self.is_of_parent:
                return
            if _finalize(communicator):
                communicator.destroy()
            else:
                _abort(communicator, self._process)

    def _take(self) -> Communicator | None:
        """The communicator, for the caller to free: once."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._finalizer.detach()
        return communicator


def _abort(communicator: Communicator, process: int) -> None:
    """Abort a communicator, unless in a forked child, which lacks NCCL's threads."""
    if process == os.getpid():
        with contextlib.suppress(NcclError, RuntimeError):  # the GPU is lost, and nothing can be done about it
            communicator.abort()


def _finalize(communicator: Communicator) -> bool:
    """Complete everything outstanding; whether that succeeded in time."""
    try:
        communicator.finalize()
        return wait_until(communicator.is_ready, Deadline(_FINALIZE_SECONDS))
    except NcclError:
        return False


_UNIQUE_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h


@dataclass(frozen=True, slots=True)
class NcclUniqueId:
    """The id that NCCL's ``ncclGetUniqueId`` gives one rank, which the others need to make a communicator with it.

    Groups make and share theirs by themselves. This is for programs that make communicators of their own, with
    NVIDIA's ``nccl4py``.

    Args:
        internal: 128 bytes.

    Raises:
        ValueError: ``internal`` has another length.
    """

    internal: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.internal, bytes):
            raise TypeError(f"a unique id is made from bytes, not {type(self.internal).__name__}")
        if len(self.internal) != _UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id of NCCL has {_UNIQUE_ID_BYTES} bytes, not {len(self.internal)}")

    @classmethod
    def create(cls, library: Library | None = None) -> NcclUniqueId:
        """Make a new id, on one rank.

        Raises:
            BackendUnavailable: NCCL can't be used here.
        """
        return cls((library or load_nccl()).unique_id())

    def __bytes__(self) -> bytes:
        return self.internal

    def __repr__(self) -> str:
        return f"NcclUniqueId({self.internal[:4].hex()}...)"  # the whole id admits its holder to the communicator
