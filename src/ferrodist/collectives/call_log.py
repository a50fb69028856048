"""The log of calls, with FERRODIST_EXPLAIN_CALLS=1: which path each call took, and why not the fast one.

Each call that differs from those before, in its name, tensors or reason, is one line of the logger "ferrodist.calls"::

    allreduce(float32[1024]): fast path
    all_gather(float32[8, 4]): general path: a tensor is not contiguous

At the end of the process the lines come once more with how often, if there were several.
"""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.base import Backend
from ferrodist.backends.collective_op import dtype_name
from ferrodist.backends.native.binding import ReportingModule, compiled, is_native_available
from ferrodist.backends.process_group import find_group
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.collectives.work import collector
from ferrodist.torch_private.compilers import outside_of_compiler
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINES = 1000
"""How many lines that differ are logged."""

_FAST_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool),
}

_log = logging.getLogger("ferrodist.calls")
_counts: Counter[str] = Counter()


def start_log() -> None:
    """Log the calls of the compiled module from now on, if the environment asked for it; to stderr by default."""
    if not isinstance(compiled, ReportingModule):
        return
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.DEBUG)
    compiled.report = report
    atexit.register(_log_counts)


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a fast path that is written in Python from compilation; log its calls, if the environment asks for it."""
    function = outside_of_compiler(function)
    if not isinstance(compiled, ReportingModule):
        return function

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            report(function.__name__, (*arguments, *options.values()), error)
            raise
        report(function.__name__, (*arguments, *options.values()), result)
        return result

    return outside_of_compiler(call)


_SHARING = {"fast_all_gather_uneven", "fast_gather", "fast_scatter", "fast_gather_object", "fast_object_from_root"}
"""Functions that return a list where the general path goes on."""


_POINT_TO_POINT = {"fast_send", "fast_recv", "fast_recv_into", "fast_sendrecv", "fast_batch"}
"""Functions that return an ``Unfinished`` where the general path goes on; they need no open engine of collectives."""


_WITH_SMALL_MPI_CALLS = {"fast_allreduce", "fast_broadcast", "fast_all_gather", "all_gather_along", "fast_barrier"}
"""Functions that leave calls of groups over MPI to those of `mpi_small_calls`."""


def report(name: str, arguments: tuple[Any, ...], result: Any) -> None:
    """Log a call of a fast path; ``result`` is its result or its error."""
    is_of_mpi = _takes_mpi_small_calls(arguments)
    if is_of_mpi if name in _WITH_SMALL_MPI_CALLS else name.startswith("small_mpi_") and not is_of_mpi:
        return  # the other function reports the call
    is_general = result is None or result is False or (type(result) is list and name in _SHARING)
    tensors = ", ".join(f"{dtype_name(each.dtype)}{list(each.shape)}" for each in _tensors_in(arguments[:1]))
    if isinstance(arguments[0], bytearray):
        tensors = counted(len(arguments[0]), "byte")
    line = f"{_public_name(name, arguments)}({tensors}): "
    if isinstance(result, BaseException):
        line += f"fast path, raised {type(result).__name__}"
    elif hasattr(result, "interruption"):
        line += "fast path, then the general path, which goes on with it"
    else:
        line += f"general path: {_why_general(name, arguments)}" if is_general else "fast path"
    _counts[line] += 1
    if _counts[line] == 1 and len(_counts) <= _LINES:
        _log.debug("%s", line)


def _public_name(name: str, arguments: tuple[Any, ...]) -> str:
    """The name of the call that a function is the fast path of."""
    if name == "fast_gather_object":
        return "all_gather_object" if arguments[1] is None else "gather_object"
    if name == "fast_object_from_root":
        return "scatter_object" if arguments[2] else "broadcast_object"
    name = (
        name.removeprefix("small_mpi_")
        .removeprefix("fast_")
        .removeprefix("torch_")
        .removesuffix("_list")
        .removesuffix("_along")
    )
    return name.replace("start_", "async_")


def _why_general(name: str, arguments: tuple[Any, ...]) -> str:
    """Why the fast path has left a call to the general one, as far as that can be seen from outside."""
    if not is_native_available():
        return "this installation has no native engine"
    if collector.get() is not None and name not in _POINT_TO_POINT:
        return "it is inside coalesce()"
    group = _group_among(arguments)
    if group is None:
        return "there is no group"
    path = getattr(group, "fast_path", None)
    if path is None and not _takes_mpi_small_calls(arguments):
        return f"group {group.name!r}, {with_article(type(group).__name__)}, has no compiled engine, or has ended"
    if path is not None and path.communicator is None and name not in _POINT_TO_POINT:
        return "it is the group's first collective, which opens the engine"
    ignores_gradients = name.startswith("fast_torch_")
    reasons = (_why_not_plain(tensor, ignores_gradients=ignores_gradients) for tensor in _tensors_in(arguments))
    reason = next(filter(None, reasons), None)
    if path is None and any(tensor.nbytes > MAX_PAYLOAD for tensor in _tensors_in(arguments[:1])):
        reason = f"has more than {MAX_PAYLOAD} bytes, which is what the fast path over MPI takes"
    return f"a tensor {reason}" if reason else "its arguments have no fast path (dims, sizes, overlaps), or are wrong"


def _group_among(arguments: tuple[Any, ...]) -> Any:
    """The group of a call's arguments, or the default group."""
    given = next((each for each in arguments if isinstance(each, Backend)), None)
    return find_group(None) if given is None else given


def _takes_mpi_small_calls(arguments: tuple[Any, ...]) -> bool:
    return getattr(_group_among(arguments), "takes_mpi_small_calls", False)


def _why_not_plain(tensor: torch.Tensor, *, ignores_gradients: bool) -> str | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is {with_article(type(tensor).__name__)}"
    reasons = (
        (tensor.device.type != "cpu", f"is on {tensor.device}"),
        (tensor.layout is not torch.strided or tensor.is_nested, f"has layout {tensor.layout}"),
        (tensor.dtype not in _FAST_DTYPES, f"is {dtype_name(tensor.dtype)}"),
        (tensor.requires_grad and not ignores_gradients, "requires grad"),
        (tensor.layout is torch.strided and not tensor.is_contiguous(), "is not contiguous"),
        (tensor.is_neg(), "is lazily negated"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _tensors_in(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            parts = (getattr(part, "tensor", part) for part in each)  # of a `Send` or `Recv`, or the part itself
            yield from (part for part in parts if isinstance(part, torch.Tensor))


def _log_counts() -> None:
    if sum(_counts.values()) > len(_counts):
        for line, count in _counts.most_common(_LINES):
            _log.debug("%d times %s", count, line)
