"""Point-to-point operations on tensors: send, recv, recv_into, sendrecv, batch.

Calls take the compiled fast path where they can (`fast_p2p.py`), or the engine's of the tensor's device, else the
protocol of `tensor_protocol.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ferrodist.arguments import check_int
from ferrodist.backends.base import check_peer
from ferrodist.backends.native.binding import compiled
from ferrodist.backends.tags import check_user_tag
from ferrodist.collectives.arguments import check_out, check_tensor, elements_overlap, group_and_timeout
from ferrodist.collectives.engines.select import device_p2p_of
from ferrodist.collectives.fast_p2p import batch_progress, is_received, progress_of
from ferrodist.collectives.host_p2p import Recv, Send, batch_on_host, continue_send, peer_name, receive_into, wait_for
from ferrodist.collectives.profiling import is_recorded, record
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.tensor_protocol import MAX_DIMS, TensorReceive
from ferrodist.deadline import Deadline
from ferrodist.torch_private.profiling import is_profiling
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request

_HOST = torch.device("cpu")


def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> None:
    """Send a tensor to one rank, which calls `recv`, `recv_into`, `sendrecv` or `batch`.

    Args:
        tensor: The tensor, of at most 12 dims and any strides. It may be changed when the call returns. The received
            tensor has no autograd history.
        dst: The receiving rank.
        tag: A number from 0 to 2**56-1; only a receive with the same tag matches.
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        TypeError: ``tensor`` can't be sent: it is not a dense tensor of a supported dtype, or on a GPU without an
            engine in this group.
        ValueError: ``tensor`` has more than 12 dims, or ``tag`` is out of range.
        SelfSendError, InvalidRankError: ``dst`` is this rank, or not in the group.
        DistributedTimeoutError: A large tensor was not received in time; the send is cancelled.
        PeerLostError: ``dst`` died or left.
    """
    if is_profiling() and not is_recorded():
        record(send, tensor, dst, tag=tag, group=group, timeout=timeout)
        return
    found = compiled.fast_send(tensor, dst, tag, group, timeout)
    if found is True:
        return
    chosen, limit = group_and_timeout(group, timeout)
    progress = progress_of(found, chosen, tag=tag, dst=dst)
    _check(Send(tensor, dst, tag), chosen)
    device_p2p = device_p2p_of(chosen, tensor.device)
    if device_p2p is not None:
        device_p2p.exchange([Send(tensor, dst, tag)], timeout=limit)
        return
    requests = continue_send(chosen, Send(tensor, dst, tag), progress)
    wait_for(requests, Deadline(limit, elapsed=progress.seconds), chosen, f"send to {peer_name(dst)}")


@overload
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    device: torch.device | str | None = None,
    return_source: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    device: torch.device | str | None = None,
    return_source: Literal[True],
) -> tuple[torch.Tensor, int]: ...
def recv(
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    device: torch.device | str | None = None,
    return_source: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Receive a tensor.

    Args:
        shape: The expected shape; None accepts any.
        dtype: The expected dtype; None accepts any.
        src: The sending rank, or `ANY_SOURCE`.
        tag: The tag that the tensor is sent with.
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.
        device: The device of the tensor, of the same kind as the sender's; on a GPU, shape and dtype must be given.
            None is the CPU.
        return_source: Whether to return the sending rank, too, for `ANY_SOURCE`.

    Returns:
        The tensor; with ``return_source`` a tuple of the tensor and the sending rank.

    Raises:
        SizeMismatchError: A tensor of another shape or dtype came, and is lost.
        DistributedTimeoutError: No tensor came in time. The call may be made again.
        ProtocolError: The message is not a tensor.
        TypeError: ``shape`` is not a sequence of integers, or ``dtype`` is not supported.
        ValueError: ``shape`` has a size below 0 or more than 12 dims, or ``tag`` is out of range.
        SelfSendError, InvalidRankError, PeerLostError: As for `send`.
    """
    if is_profiling() and not is_recorded():
        options = {"tag": tag, "group": group, "timeout": timeout, "return_source": return_source}
        return record(recv, shape, dtype, src, device=device, **options)
    target_device = _HOST if device is None else torch.device(device)
    found: Any = None
    if target_device.type == "cpu":
        found = compiled.fast_recv(shape, dtype, src, tag, group, timeout, return_source)
        if is_received(found):
            return found
    chosen, limit = group_and_timeout(group, timeout)
    progress = progress_of(found, chosen, tag=tag)
    if dtype is not None:
        check_dtype(dtype)
    shape = None if shape is None else _check_shape(shape)
    device_p2p = device_p2p_of(chosen, target_device)
    if device_p2p is not None:
        incoming = _recv_on(target_device, shape, dtype, src, tag)
        _check(incoming, chosen)
        (peer,) = device_p2p.exchange([incoming], timeout=limit)
        return (incoming.tensor, peer) if return_source else incoming.tensor
    receive = TensorReceive(chosen, src, tag, shape=shape, dtype=dtype)
    wait_for([receive], Deadline(limit, elapsed=progress.seconds), chosen, f"recv from {peer_name(src)}")
    return (receive.finish(), receive.peer) if return_source else receive.finish()


def recv_into(
    tensor: torch.Tensor,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> int:
    """Receive a tensor into one of the same shape and dtype; returns the rank that sent it.

    ``tensor`` may have any strides and at most 12 dims; its elements must not share memory. Otherwise as `recv`.
    """
    if is_profiling() and not is_recorded():
        return record(recv_into, tensor, src, tag=tag, group=group, timeout=timeout)
    found = compiled.fast_recv_into(tensor, src, tag, group, timeout)
    if type(found) is int:
        return found
    chosen, limit = group_and_timeout(group, timeout)
    progress = progress_of(found, chosen, tag=tag)
    incoming = Recv(tensor, src, tag)
    _check(incoming, chosen)
    device_p2p = device_p2p_of(chosen, tensor.device)
    if device_p2p is not None:
        return device_p2p.exchange([incoming], timeout=limit)[0]
    receive = receive_into(chosen, incoming)
    wait_for([receive], Deadline(limit, elapsed=progress.seconds), chosen, f"recv_into from {peer_name(src)}")
    receive.finish()
    return receive.peer


@overload
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    out: torch.Tensor | None = None,
    return_source: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    out: torch.Tensor | None = None,
    return_source: Literal[True],
) -> tuple[torch.Tensor, int]: ...
def sendrecv(
    tensor: torch.Tensor,
    dst: int,
    shape: Sequence[int] | None,
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
    out: torch.Tensor | None = None,
    return_source: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Send a tensor to ``dst`` and receive one from ``src`` at the same time, so that rings of ranks don't block.

    Args:
        tensor: The tensor to send.
        dst: The receiving rank.
        shape: The shape of the other tensor, which has ``tensor``'s dtype; None accepts any.
        src: The rank to receive from, or `ANY_SOURCE`.
        tag: The tag of both.
        group: The group; None is the default group.
        timeout: Seconds for both together; None takes the group's.
        out: A tensor for the received elements, of ``tensor``'s dtype and device, and of ``shape`` unless that is None;
            any strides. It shares no memory with ``tensor``. None makes a fresh one.
        return_source: Whether to return the sending rank, too, for `ANY_SOURCE`.

    Returns:
        ``out``, or a fresh tensor; with ``return_source`` a tuple of the tensor and the sending rank.

    Raises:
        ValueError, TypeError: ``out`` is not such a tensor; raised before anything is sent.
        As `send` and `recv`.
    """
    if is_profiling() and not is_recorded():
        options = {"tag": tag, "group": group, "timeout": timeout, "out": out, "return_source": return_source}
        return record(sendrecv, tensor, dst, shape, src, **options)
    found = compiled.fast_sendrecv(tensor, dst, shape, src, tag, group, timeout, return_source, out)
    if is_received(found):
        return found
    chosen, limit = group_and_timeout(group, timeout)
    progress = progress_of(found, chosen, tag=tag, dst=dst)
    outgoing = Send(tensor, dst, tag)
    _check(outgoing, chosen)
    shape = None if shape is None else _check_shape(shape)
    if out is not None:
        _check_received_into(out, tensor, shape)
        _check(Recv(out, src, tag), chosen)
    device_p2p = device_p2p_of(chosen, tensor.device)
    if device_p2p is not None:
        incoming = _recv_on(tensor.device, shape, tensor.dtype, src, tag) if out is None else Recv(out, src, tag)
        _check(incoming, chosen)
        _, peer = device_p2p.exchange([outgoing, incoming], timeout=limit)
        return (incoming.tensor, peer) if return_source else incoming.tensor
    deadline = Deadline(limit, elapsed=progress.seconds)
    what = f"sendrecv with {peer_name(dst)} and {peer_name(src)}"
    if progress.received is not None:
        wait_for(continue_send(chosen, outgoing, progress), deadline, chosen, what)
        received: tuple[torch.Tensor, int] = progress.received
        return received if return_source else received[0]
    if out is None:
        receive = TensorReceive(chosen, src, tag, shape=shape, dtype=tensor.dtype)
    else:
        receive = receive_into(chosen, Recv(out, src, tag))
    requests: list[Request] = [receive]
    try:
        requests.extend(continue_send(chosen, outgoing, progress))
    except BaseException:
        receive.cancel()
        raise
    wait_for(requests, deadline, chosen, what)
    return (receive.finish(), receive.peer) if return_source else receive.finish()


def batch(
    operations: Iterable[Send | Recv], *, group: Backend | None = None, timeout: float | None = None
) -> list[int]:
    """Run several sends and receives at the same time; returns when all are done.

    Args:
        operations: `Send` and `Recv` values, in any order; those with the same peer and tag stay in order.
        group: The group; None is the default group.
        timeout: Seconds for all together; None takes the group's.

    Returns:
        The peer of each operation, in order: the receiver, or the sender.

    Raises:
        TypeError: A member is not a Send or Recv, or its tensor can't be sent.
        As `send` and `recv_into`; when one operation fails the others are cancelled.
    """
    if is_profiling() and not is_recorded():
        return record(batch, operations, group=group, timeout=timeout)
    operations = list(operations)
    found = compiled.fast_batch(operations, group, timeout)
    if type(found) is list:
        return found
    chosen, limit = group_and_timeout(group, timeout)
    seconds, progress = batch_progress(found, chosen, operations)
    for operation in operations:
        _check(operation, chosen)
        if operation.tensor.device != operations[0].tensor.device:
            raise ValueError(
                f"batch has tensors on {operations[0].tensor.device} and on {operation.tensor.device}: pass tensors of"
                " one device"
            )
    device_p2p = device_p2p_of(chosen, operations[0].tensor.device if operations else _HOST)
    if device_p2p is not None:
        return device_p2p.exchange(operations, timeout=limit)
    return batch_on_host(operations, chosen, Deadline(limit, elapsed=seconds), progress)


def _recv_on(
    device: torch.device, shape: tuple[int, ...] | None, dtype: torch.dtype | None, src: int, tag: int
) -> Recv:
    """A receive of a fresh tensor on a GPU."""
    if shape is None or dtype is None:
        raise ValueError(f"a tensor that is received on {device} must be of known shape and dtype: pass both")
    return Recv(torch.empty(shape, dtype=dtype, device=device), src, tag)


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of ints."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers or None, not {shape!r}") from None
    checked = tuple(check_int(f"shape[{dim}]", size) for dim, size in enumerate(sizes))
    if any(size < 0 for size in checked):
        raise ValueError(f"shape has a size below 0: {checked}; pass None to accept any")
    if len(checked) > MAX_DIMS:
        raise ValueError(f"shape has {counted(len(checked), 'dim')}, a tensor that is sent has at most {MAX_DIMS}")
    return checked


def _check_received_into(out: torch.Tensor, tensor: torch.Tensor, shape: tuple[int, ...] | None) -> None:
    """Raise TypeError or ValueError unless `sendrecv` of a checked tensor may receive into ``out``."""
    with torch.no_grad():
        check_out(out)
    if out.dtype is not tensor.dtype:
        raise TypeError(f"out is {out.dtype}, and the tensor that is sent {tensor.dtype}: both have one dtype")
    if out.device != tensor.device:
        raise ValueError(f"out is on {out.device}, the tensor on {tensor.device}: pass tensors of one device")
    if shape is not None and tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, and shape is {shape}: pass None, which takes out's")
    if elements_overlap(tensor, out):
        raise ValueError("out shares memory with the tensor that is sent: pass a tensor of its own memory")


def _check(operation: Send | Recv, group: Backend) -> None:
    """Raise for an invalid send or receive, before anything is sent."""
    if not isinstance(operation, (Send, Recv)):
        raise TypeError(f"batch takes Send(...) and Recv(...), not {type(operation).__name__}")
    tensor = operation.tensor
    check_tensor(tensor)
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"messages carry tensors of at most {MAX_DIMS} dims, not {tensor.dim()}: reshape it")
    check_user_tag(operation.tag)
    if isinstance(operation, Send):
        check_peer(group, operation.dst)
    else:
        check_peer(group, operation.src, any_source=True)
        with torch.no_grad():
            check_out(tensor)


def start_checked_send(tensor: torch.Tensor, dst: int, *, tag: int = 0, group: Backend) -> list[Request]:
    """Start `send` of a checked tensor, which must not change until the requests, often none, are done."""
    found = compiled.fast_send(tensor, dst, tag, group, 0.0)  # doesn't wait; `continue_send` starts the rest
    if found is True:
        return []
    return continue_send(group, Send(tensor, dst, tag), progress_of(found, group, tag=tag, dst=dst))
