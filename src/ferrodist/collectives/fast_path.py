"""The short way of a call: from plain tensors straight into a compiled engine.

Contiguous tensors of the CPU that need no gradient, in a call with the group's own timeout outside of `coalesce`, need
none of what the long way does, and the engine looks at them itself. All other calls, and all that will raise an error
for their arguments, go the long way. Both ways meet in the engine: ranks may go different ones.

Each function takes what its public namesake takes and returns the result, or None before anything has happened. Those
that block are in native/bindings/fast_path.cpp whole. `quick_barrier` returns whether it is done, and so does
`quick_allreduce_data`, which is in place and which autograd knows nothing of.

The short way of tensors from rank to rank: from plain tensors straight into a compiled engine.

`fast_path.py` says what is plain. A call that does not simply come to its end goes on by the long way from where the
engine has left it, in the time that is left; which errors there are, and what they say, is the long way's. Both ways
send the same messages, so that ranks may go different ones.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends import process_group
from ferrodist.backends.native.binding import is_native_available, load
from ferrodist.backends.process_group import find_group
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_protocol import MAX_DIMS, body_numbers, cancel_payload, unclaimed_headers
from ferrodist.collectives.work import PendingCollective, collector
from ferrodist.deadline import before_warning, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend


def start_allreduce(tensor: torch.Tensor, op: Any, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_allreduce`."""
    way = _way_of(group)
    target = _same(tensor) if out is None else out
    if way is None or target is None:
        return None
    started = way.communicator.start_allreduce(tensor, target, getattr(op, "number", -1), way.timeout)
    return started and _NativeWork("allreduce", way.engine, started, tensor, target, op=op)


def start_broadcast(tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_broadcast`, in place."""
    way = _way_of(group)
    if way is None or out is not tensor or type(root) is not int:
        return None
    started = way.communicator.start_broadcast(tensor, tensor, root, way.timeout)
    return started and _NativeWork("broadcast", way.engine, started, tensor, tensor, root=root)


def start_all_gather(tensor: torch.Tensor, dim: int, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_gather` along dim 0."""
    way = _way_of(group)
    if way is None or dim != 0:
        return None
    target = _joined(tensor, way.engine.num_ranks) if out is None else out
    if target is None:
        return None
    started = way.communicator.start_all_gather(tensor, target, way.timeout)
    return started and _NativeWork("all_gather", way.engine, started, tensor, target, dim=0)


def start_reduce_scatter(
    tensor: torch.Tensor, op: Any, dim: int, group: Backend | None, out: torch.Tensor | None
) -> Any:
    """`async_reduce_scatter` into even parts of dim 0."""
    way = _way_of(group)
    if way is None or dim != 0:
        return None
    target = _part(tensor, way.engine.num_ranks) if out is None else out
    if target is None:
        return None
    started = way.communicator.start_reduce_scatter(tensor, target, getattr(op, "number", -1), way.timeout)
    return started and _NativeWork("reduce_scatter", way.engine, started, tensor, target, op=op, dim=0)


def start_all_to_all(tensor: torch.Tensor, group: Backend | None, out: torch.Tensor | None) -> Any:
    """`async_all_to_all` of one tensor in even parts of dim 0."""
    way = _way_of(group)
    target = _same(tensor) if out is None else out
    if way is None or target is None:
        return None
    started = way.communicator.start_all_to_all(tensor, target, way.timeout)
    return started and _NativeWork("all_to_all", way.engine, started, tensor, target)


def _way_of(group: Backend | None) -> Any:
    if collector.get() is not None:
        return None
    chosen = process_group.find_group(None) if group is None else group
    return getattr(chosen, "quick", None)


def _same(tensor: torch.Tensor, _num_ranks: int = 0) -> torch.Tensor | None:
    return torch.empty_like(tensor) if _is_plain(tensor) else None


def _joined(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim():
        return None
    return tensor.new_empty((num_ranks * tensor.shape[0], *tensor.shape[1:]))


def _part(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor | None:
    if not _is_plain(tensor) or not tensor.dim() or tensor.shape[0] % num_ranks:
        return None
    return tensor.new_empty((tensor.shape[0] // num_ranks, *tensor.shape[1:]))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.is_cpu and not tensor.requires_grad


class _NativeWork(PendingCollective[torch.Tensor]):
    """A collective that the engine runs, in its own thread or in one that waits for it.

    ``started`` keeps the tensors, whose addresses the engine has, until it has ended.
    """

    def __init__(
        self,
        op_name: str,
        engine: Any,
        started: Any,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        op: Any = "",
        root: int = -1,
        dim: int = -1,
    ) -> None:
        super().__init__(op_name, engine.group_name)
        self._engine = engine
        self._started = started
        self._tensor = tensor
        self._out = out
        self._op = op
        self._root = root
        self._dim = dim
        self._has_result = False

    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` then returns or raises at once."""
        return bool(self._started.is_done())

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Block until it has ended and return its result; see `PendingCollective.wait`."""
        self._check_process()
        out = self._out
        try:
            has_ended = self._started.wait(math.inf if timeout is None else check_timeout(timeout))
        except BaseException as failure:
            if not self._engine.has_left(failure):  # an interruption, while another thread runs it: it goes on
                raise
            facts = {"op": self._op, "root": self._root, "dim": self._dim}
            raise self._engine.call_error(failure, self.op_name, self._tensor, out, **facts) from None
        if not has_ended:
            raise self._still_under_way(timeout or 0.0)
        if not self._has_result:
            self._has_result = True
            if not out.is_inference():  # the engine wrote raw memory: something may have saved it for a backward
                torch.autograd.graph.increment_version(out)
        return out


def _never(*_: object) -> None:
    """Go the long way."""


if is_native_available():
    _native = load()
    _native.load_short_ways(collector, *process_group.default_holders(), _same, _joined, _part)
    quick_all_gather: Callable[..., Any] = _native.quick_all_gather
    quick_all_to_all: Callable[..., Any] = _native.quick_all_to_all
    quick_allreduce: Callable[..., Any] = _native.quick_allreduce
    quick_allreduce_data: Callable[..., Any] = _native.quick_allreduce_data
    quick_barrier: Callable[..., Any] = _native.quick_barrier
    quick_broadcast: Callable[..., Any] = _native.quick_broadcast
    quick_reduce_scatter: Callable[..., Any] = _native.quick_reduce_scatter
else:
    quick_all_gather = quick_all_to_all = quick_allreduce = quick_allreduce_data = _never
    quick_barrier = quick_broadcast = quick_reduce_scatter = _never


class Progress(NamedTuple):
    """How far a call has got.

    Args:
        seconds: That it took.
        number: Of a send: the number of the elements, when they have yet to follow a head that has gone.
        is_sent: Whether the send of a `sendrecv` is done.
    """

    seconds: float = 0.0
    number: int | None = None
    is_sent: bool = False


NOT_BEGUN = Progress()


def quick_send(
    tensor: torch.Tensor, dst: int, tag: int, group: Backend | None, timeout: float | None
) -> Progress | None:
    """`send`; None when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None:
        return NOT_BEGUN
    # The engine waits no longer than until a warning is due, which the long way gives.
    rest = messages.send(
        tensor, dst, tag, before_warning(chosen.timeout if timeout is None else timeout), body_numbers(chosen)
    )
    if rest is None:
        return None
    if rest.interruption is not None:
        if rest.number is not None:
            cancel_payload(chosen, dst, rest.number)
        raise rest.interruption
    return Progress(rest.seconds, rest.number)


def quick_recv_into(
    tensor: torch.Tensor, src: int, tag: int, group: Backend | None, timeout: float | None
) -> int | Progress:
    """`recv_into`; the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or unclaimed_headers(chosen).may_have(tag):
        return NOT_BEGUN
    result = messages.receive_into(tensor, src, tag, before_warning(chosen.timeout if timeout is None else timeout))
    return result if type(result) is int else _left_behind(chosen, tag, result)


def quick_recv(
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
    if messages is None or not _is_plain_description(shape, dtype) or unclaimed_headers(chosen).may_have(tag):
        return NOT_BEGUN

    def make(place: int, sizes: tuple[int, ...]) -> torch.Tensor | None:
        found = DTYPES[place]
        if (shape is not None and sizes != tuple(shape)) or (dtype is not None and found is not dtype):
            return None
        try:
            return torch.empty(sizes, dtype=found, device="cpu")
        except Exception:  # the long way comes to it again, and raises it
            return None

    result = messages.receive_new(src, tag, before_warning(chosen.timeout if timeout is None else timeout), make)
    return result if type(result) is tuple else _left_behind(chosen, tag, result)


def quick_sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int,
    group: Backend | None,
    timeout: float | None,
) -> tuple[torch.Tensor, int] | Progress:
    """`sendrecv` of a small tensor; the other tensor and the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or not messages.can_exchange(tensor, src) or not _is_plain_description(shape, None):
        return NOT_BEGUN
    started = time.monotonic()
    rest = quick_send(tensor, dst, tag, chosen, timeout)
    if rest is not None:
        return rest
    limit = chosen.timeout if timeout is None else timeout
    left = max(0.0, limit - (time.monotonic() - started))
    result = quick_recv(shape, tensor.dtype, src, tag=tag, group=chosen, timeout=left)
    return Progress(time.monotonic() - started, is_sent=True) if isinstance(result, Progress) else result


def _message_path_of(group: Backend | None) -> tuple[Any, Any]:
    """The group of a call, and its short way or None."""
    chosen = find_group(None) if group is None else group
    return chosen, getattr(chosen, "tensor_messages", None)


def _left_behind(group: Backend, tag: int, rest: Any) -> Progress:
    """Keep the head of a tensor whose elements were not taken, for the long way to take them."""
    if rest.head is not None:
        unclaimed_headers(group).keep(channel_tag(Channel.TENSOR_HEAD, tag), rest.source, rest.head)
    if rest.interruption is not None:
        raise rest.interruption
    return Progress(rest.seconds)


def _is_plain_description(shape: Sequence[int] | None, dtype: torch.dtype | None) -> bool:
    """Whether the long way has nothing to say against these."""
    if dtype is not None and dtype not in DTYPES:
        return False
    if shape is None:
        return True
    if type(shape) not in (tuple, list, torch.Size) or len(shape) > MAX_DIMS:
        return False
    return all(type(size) is int and size >= 0 for size in shape)
