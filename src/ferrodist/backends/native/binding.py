"""The compiled module, or the reason why it is missing, and its ids of dtypes, reductions and operations.

The ids are those of the enums in native/, in their order.
"""

from __future__ import annotations

import importlib
import os
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.collective_op import dtype_name
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.errors import BackendUnavailable
from ferrodist.torch_private.autograd import increment_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

_reason: str | None = None
_module: ModuleType | None = None

try:
    _module = importlib.import_module("ferrodist._native")
except ImportError as error:
    _reason = str(error)


def load() -> ModuleType:
    """Return the compiled module; raises BackendUnavailable if this installation was built without it."""
    if _module is None:
        raise BackendUnavailable(
            f"this installation of ferrodist has no native engine ({_reason}): install it with a C++ compiler and"
            " without FERRODIST_NO_NATIVE, or use the tcp backend"
        )
    return _module


_FAST_FUNCTIONS = (
    *("fast_all_gather", "fast_torch_all_gather", "fast_all_gather_uneven", "fast_all_to_all", "fast_torch_all_to_all"),
    *("fast_all_to_all_list", "fast_torch_all_to_all_single", "fast_all_to_all_single_uneven", "fast_allreduce"),
    *(
        "fast_allreduce_add",
        "fast_torch_allreduce",
        "fast_barrier",
        "fast_broadcast",
        "fast_torch_broadcast",
        "fast_gather",
    ),
    *("fast_torch_gather", "fast_gather_object", "fast_object_from_root", "fast_reduce", "fast_torch_reduce"),
    *("fast_reduce_scatter", "fast_torch_reduce_scatter", "fast_scatter", "fast_torch_scatter"),
    *("fast_batch", "fast_recv", "fast_recv_bytes", "fast_recv_into", "fast_send", "fast_send_bytes", "fast_sendrecv"),
)


def _take_general_path(*_: object) -> None:
    return None


class ReportingModule:
    """The compiled module, whose fast functions report each call, with its result or its error.

    collectives/call_log.py sets ``report``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.report: Callable[[str, tuple[Any, ...], Any], None] = lambda _name, _arguments, _result: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in _FAST_FUNCTIONS:
            return found

        def call(*arguments: Any) -> Any:
            try:
                result = found(*arguments)
            except BaseException as error:
                self.report(name, arguments, error)
                raise
            self.report(name, arguments, result)
            return result

        return call


compiled: Any = _module or SimpleNamespace(
    **dict.fromkeys((*_FAST_FUNCTIONS, "view_bytes", "eager_elements"), _take_general_path)
)
"""The compiled module; where it is missing, its fast functions alone, which leave every call to the general path.

A `ReportingModule` of it, if the environment asks for a log of calls.
"""

if os.environ.get("FERRODIST_EXPLAIN_CALLS"):
    compiled = ReportingModule(compiled)


def why_no_native() -> str | None:
    """The reason why this installation has no native engine; None if it has one."""
    return _reason


def is_native_available() -> bool:
    """Return whether this installation has the native engine."""
    return _module is not None


def enable_tensor_views() -> bool:
    """Let the compiled module look into tensors; False if it is missing, or torch lacks the interface for that."""
    if _module is None:
        return False
    return bool(_module.load_tensor_interface(torch.Tensor, torch.nn.Parameter, increment_version))


def is_gloo_available() -> bool:
    """Return whether this installation has `GlooBackend`, which is the native engine over TCP alone."""
    return is_native_available()


_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_REDUCTIONS = ("sum", "mean", "min", "max", "product", "band", "bor", "bxor", "premultiplied_sum")
_OPERATIONS = (
    *("barrier", "allreduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "share"),
)
_FOLDING = ("allreduce", "reduce", "reduce_scatter")

_LINE = struct.Struct("<BBBbiQ")  # `Call` of native/transport/shm/group_memory.h; its payload follows

SHARE_NAME_BYTES = 24  # bytes at the front of a share's payload that hold its name


def dtype_number(tensor: torch.Tensor) -> int:
    """The engine's id of a tensor's dtype."""
    return _DTYPE_NUMBERS[tensor.dtype]


_DTYPE_NAMES = tuple(map(dtype_name, _DTYPES))


def _name_of(number: int, names: Sequence[str], what: str) -> str:
    """The name with an id that another rank has sent; an id that is unknown here is shown itself."""
    return names[number] if number < len(names) else f"{what} {number}"


def signature_of_record(line: bytes, sequence: int) -> CollectiveSignature:
    """Decode a rank's call, as the engine stores it with its payload."""
    number, dtype, reduction, dim, root, count = _LINE.unpack_from(line)
    operation = _name_of(number, _OPERATIONS, "operation")
    if operation == "share":
        name = line[_LINE.size : _LINE.size + SHARE_NAME_BYTES].rstrip(b"\0").decode("ascii", "replace")
        return CollectiveSignature(operation=name, sequence=sequence)
    facts: dict[str, Any] = {} if operation == "barrier" else {"dtype": _name_of(dtype, _DTYPE_NAMES, "dtype")}
    if operation in _FOLDING:
        facts["reduce_op"] = _name_of(reduction, _REDUCTIONS, "reduction")
    return CollectiveSignature(operation=operation, root=root, dim=dim, count=count, sequence=sequence, **facts)
