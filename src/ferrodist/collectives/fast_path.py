"""The fast path of plain calls: from the user's function straight into the compiled engine.

A call is plain if its tensors are contiguous, on the CPU and need no gradient, and it is outside of `coalesce`. The
engine checks such tensors itself. All other calls, and all whose arguments are wrong, take the general path. Both paths
meet in the engine, so different ranks may take different ones. Started calls are plain with the group's own timeout.

A collective's function takes the arguments of its public namesake and returns the result, or None before anything has
happened. Those that block are C++, in native/bindings/fast_path.cpp, and called as ``compiled.fast_allreduce``;
`fast_barrier` returns whether it is done, and so do those of ``torch.distributed``, in fast_data.cpp, which take
tensors to write into and are invisible to autograd; they start calls, too. Those in which ranks share their sizes,
in fast_sized.cpp, may return a list: the payloads that the ranks have shared, where the general path is to go
on. Those that start other collectives, and point-to-point, are here.

A point-to-point function returns a `Progress` when the call did not simply complete. The general path then continues
where the engine stopped, in the time that is left, and raises what errors there are.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from ferrodist.backends import process_group
from ferrodist.backends.native.binding import compiled, is_native_available
from ferrodist.backends.process_group import find_group
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.call_log import reported, start_log
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_protocol import MAX_DIMS, cancel_payload, payload_ids, unclaimed_tensors
from ferrodist.collectives.work import PendingCollective, collector
from ferrodist.deadline import before_warning, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend


@reported
def start_allreduce(tensor: torch.Tensor, op: Any, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_allreduce`."""
    path = _path_of(group)
    target = _like(tensor) if out is None else out
    if path is None or target is None:
        return None
    started = path.communicator.start_allreduce(tensor, target, getattr(op, "number", -1), path.timeout)
    return started and _NativeWork("allreduce", path.engine, started, tensor, target, {"op": op})


@reported
def start_broadcast(tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_broadcast`, in place."""
    path = _path_of(group)
    if path is None or out is not tensor or type(root) is not int:
        return None
    started = path.communicator.start_broadcast(tensor, tensor, root, path.timeout)
    return started and _NativeWork("broadcast", path.engine, started, tensor, tensor, {"root": root})


@reported
def start_all_gather(tensor: torch.Tensor, dim: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_gather` along dim 0."""
    path = _path_of(group)
    if path is None or dim != 0:
        return None
    target = _gathered(tensor, path.engine.num_ranks) if out is None else out
    if target is None:
        return None
    started = path.communicator.start_all_gather(tensor, target, path.timeout)
    return started and _NativeWork("all_gather", path.engine, started, tensor, target, {"dim": 0})


@reported
def start_reduce_scatter(
    tensor: torch.Tensor, op: Any, dim: int, group: Backend | None, out: torch.Tensor | None
) -> Any:
    """`async_reduce_scatter` into even parts of dim 0."""
    path = _path_of(group)
    if path is None or dim != 0:
        return None
    target = _scattered(tensor, path.engine.num_ranks) if out is None else out
    if target is None:
        return None
    started = path.communicator.start_reduce_scatter(tensor, target, getattr(op, "number", -1), path.timeout)
    return started and _NativeWork("reduce_scatter", path.engine, started, tensor, target, {"op": op, "dim": 0})


@reported
def start_all_to_all(tensor: torch.Tensor, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_to_all` of one tensor in even parts of dim 0."""
    path = _path_of(group)
    target = _like(tensor) if out is None else out
    if path is None or target is None:
        return None
    started = path.communicator.start_all_to_all(tensor, target, path.timeout)
    return started and _NativeWork("all_to_all", path.engine, started, tensor, target)


def start_data(function: Callable[..., Any], *arguments: Any, group: Backend) -> PendingCollective[Any] | None:
    """Start a call of ``torch.distributed`` by one of the functions of native/bindings/fast_data.cpp."""
    path = _path_of(group)
    started = path is not None and function(*arguments, group, True)
    if not started:
        return None
    work, operation, tensor, facts = started
    return _NativeWork(operation, path.engine, work, tensor, None, facts)


def _path_of(group: Backend | None) -> Any:
    """The group's fast path, once its engine is open; None inside `coalesce`."""
    if collector.get() is not None:
        return None
    chosen = process_group.find_group(None) if group is None else group
    path = getattr(chosen, "fast_path", None)
    return None if path is None or path.communicator is None else path


def _like(tensor: torch.Tensor, _num_ranks: int = 0) -> torch.Tensor | None:
    """Make the output of a collective whose result has the input's shape; None for tensors that are not plain."""
    return torch.empty_like(tensor) if _is_plain(tensor) else None


def _gathered(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim():
        return None
    return tensor.new_empty((num_ranks * tensor.shape[0], *tensor.shape[1:]))


def _scattered(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim() or tensor.shape[0] % num_ranks:
        return None
    return tensor.new_empty((tensor.shape[0] // num_ranks, *tensor.shape[1:]))


def _new(dtype_index: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES[dtype_index], device="cpu")  # torch takes a tuple more slowly


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.is_cpu and not tensor.requires_grad


class _NativeWork(PendingCollective[Any]):
    """A collective that the compiled engine runs; keeps alive the tensors, whose addresses the engine has.

    ``out`` is the result, or None for a call of ``torch.distributed``, whose caller has the tensors.
    """

    def __init__(  # noqa: PLR0917 - positional arguments are faster
        self,
        op_name: str,
        engine: Any,
        started: Any,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(op_name, engine.group_name)
        self._engine = engine
        self._started = started
        self._tensor = tensor
        self._out = out
        self._facts = facts  # for errors: the call's other fields of a `CollectiveOp`
        self._has_result = False

    @override
    def done(self) -> bool:
        return bool(self._started.is_done())

    @override
    def wait(self, timeout: float | None = None) -> torch.Tensor | None:
        self._check_process()
        out = self._out
        try:
            has_ended = self._started.wait(math.inf if timeout is None else check_timeout(timeout))
        except BaseException as failure:
            if not self._engine.has_left(failure):  # an interruption, while another thread runs it: it goes on
                raise
            raise self._engine.call_error(failure, self._op_name, self._tensor, out, **self._facts or {}) from None
        if not has_ended:
            raise self._still_running(timeout or 0.0)
        if not self._has_result:
            self._has_result = True
            if (
                out is not None and not out.is_inference()
            ):  # the engine wrote raw memory: something may have saved it for a backward
                torch.autograd.graph.increment_version(out)
        return out


if is_native_available():
    start_log()
    compiled.load_fast_paths(collector, *process_group.default_holders(), torch.empty_like, _new)


class Progress(NamedTuple):
    """The progress of a point-to-point call on the fast path."""

    seconds: float = 0.0  # elapsed time
    payload_id: int | None = None  # of a send: the payload's, if the header was sent and the payload was not
    is_sent: bool = False  # of a `sendrecv`: whether all was sent
    received: tuple[torch.Tensor, int] | None = None  # of a `sendrecv`: what it has received


NOT_STARTED = Progress()


def fast_send(
    tensor: torch.Tensor, dst: int, tag: int, group: Backend | None, timeout: float | None
) -> Progress | None:
    """`send`; None when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None:
        return NOT_STARTED
    # The engine waits until a warning is due at most; the general path gives it.
    rest = messages.send(
        tensor, dst, tag, before_warning(chosen.timeout if timeout is None else timeout), payload_ids(chosen)
    )
    if rest is None:
        return None
    if rest.interruption is not None:
        if rest.payload_id is not None:
            cancel_payload(chosen, dst, rest.payload_id)
        raise rest.interruption
    return Progress(rest.seconds, rest.payload_id)


def fast_recv_into(
    tensor: torch.Tensor, src: int, tag: int, group: Backend | None, timeout: float | None
) -> int | Progress:
    """`recv_into`; the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or unclaimed_tensors(chosen).may_contain(tag):
        return NOT_STARTED
    result = messages.receive_into(tensor, src, tag, before_warning(chosen.timeout if timeout is None else timeout))
    return result if type(result) is int else _unfinished(chosen, tag, result)


def fast_recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int,
    group: Backend | None,
    timeout: float | None,
) -> tuple[torch.Tensor, int] | Progress:
    """`recv`; the tensor and the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or not _is_plain_description(shape, dtype) or unclaimed_tensors(chosen).may_contain(tag):
        return NOT_STARTED

    limit = before_warning(chosen.timeout if timeout is None else timeout)
    result = messages.receive_new(src, tag, limit, _maker(shape, dtype))
    return result if type(result) is tuple else _unfinished(chosen, tag, result)


def fast_sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int,
    group: Backend | None,
    timeout: float | None,
) -> tuple[torch.Tensor, int] | Progress:
    """`sendrecv`; the other tensor and the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or not isinstance(tensor, torch.Tensor) or not _is_plain_description(shape, None):
        return NOT_STARTED
    limit = chosen.timeout if timeout is None else timeout
    if messages.can_exchange(tensor, src):
        started = time.monotonic()
        rest = fast_send(tensor, dst, tag, chosen, timeout)
        if rest is not None:
            return rest
        left = max(0.0, limit - (time.monotonic() - started))
        result = fast_recv(shape, tensor.dtype, src, tag=tag, group=chosen, timeout=left)
        return Progress(time.monotonic() - started, is_sent=True) if isinstance(result, Progress) else result
    if unclaimed_tensors(chosen).may_contain(tag):
        return NOT_STARTED
    make = _maker(shape, tensor.dtype)
    result = messages.exchange(tensor, dst, src, tag, before_warning(limit), payload_ids(chosen), make)
    if type(result) is tuple:
        return result
    if result.interruption is not None and result.payload_id is not None:
        cancel_payload(chosen, dst, result.payload_id)
    return _unfinished(chosen, tag, result)


def _maker(shape: Sequence[int] | None, dtype: torch.dtype | None) -> Callable[[int, tuple[int, ...]], Any]:
    """Return a function that allocates the tensor to receive into, from the dtype and sizes of a received header."""

    def make(dtype_index: int, sizes: tuple[int, ...]) -> torch.Tensor | None:
        found = DTYPES[dtype_index]
        if (shape is not None and sizes != tuple(shape)) or (dtype is not None and found is not dtype):
            return None
        try:
            return torch.empty(sizes, dtype=found, device="cpu")
        except (RuntimeError, MemoryError):  # the general path raises it
            return None

    return make


def _message_path_of(group: Backend | None) -> tuple[Any, Any]:
    """The group of a call, and its compiled point-to-point engine or None."""
    chosen = find_group(None) if group is None else group
    path = getattr(chosen, "fast_path", None)
    return chosen, None if path is None else path.p2p


def _unfinished(group: Backend, tag: int, rest: Any) -> Progress:
    """Keep the first message of a tensor that was not received, for the general path to receive it."""
    if rest.message is not None:
        unclaimed_tensors(group).keep(channel_tag(Channel.TENSOR, tag), rest.source, rest.message)
    if rest.interruption is not None:
        raise rest.interruption
    return Progress(rest.seconds, rest.payload_id, rest.is_sent, rest.received)


def _is_plain_description(shape: Sequence[int] | None, dtype: torch.dtype | None) -> bool:
    """Return whether these are certainly valid."""
    if dtype is not None and dtype not in DTYPES:
        return False
    if shape is None:
        return True
    if type(shape) not in (tuple, list, torch.Size) or len(shape) > MAX_DIMS:
        return False
    return all(type(size) is int and size >= 0 for size in shape)
