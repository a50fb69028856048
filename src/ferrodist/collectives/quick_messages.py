"""The short way of tensors from rank to rank: from plain tensors straight into a compiled engine.

`quick.py` says what is plain. A call that does not simply come to its end goes on by the long way from where the engine
has left it, in the time that is left; which errors there are, and what they say, is the long way's. Both ways send the
same messages, so that ranks may go different ones.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.process_group import find_group
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_heads import MAX_DIMS, body_numbers, kept_heads
from ferrodist.collectives.tensor_transfers import give_up_body
from ferrodist.deadline import before_warning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

__all__ = ["NOT_BEGUN", "Progress", "quick_recv", "quick_recv_into", "quick_send", "quick_sendrecv"]


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
            give_up_body(chosen, dst, rest.number)
        raise rest.interruption
    return Progress(rest.seconds, rest.number)


def quick_recv_into(
    tensor: torch.Tensor, src: int, tag: int, group: Backend | None, timeout: float | None
) -> int | Progress:
    """`recv_into`; the rank that sent it when it is done."""
    chosen, messages = _message_path_of(group)
    if messages is None or kept_heads(chosen).may_have(tag):
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
    if messages is None or not _is_plain_description(shape, dtype) or kept_heads(chosen).may_have(tag):
        return NOT_BEGUN

    def make(place: int, sizes: tuple[int, ...]) -> torch.Tensor | None:
        found = DTYPES[place]
        if (shape is not None and sizes != tuple(shape)) or (dtype is not None and found is not dtype):
            return None
        try:
            return torch.empty(sizes, dtype=found, device="cpu")
        except Exception:  # noqa: BLE001 - the long way comes to it again, and raises it
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
        kept_heads(group).keep(channel_tag(Channel.TENSOR_HEAD, tag), rest.source, rest.head)
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
