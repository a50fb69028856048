"""Tensors from GPU to GPU, by NCCL.

[Note: messages of GPUs]
NCCL matches what two ranks send each other by order alone. So each send is announced by a head, a message between the
hosts with tag, dtype and shape: heads from one rank come in the order in which that rank launches its sends. A receive
takes the next head of its sender. If it has another tag, or does not fit, the elements are received all the same, into
memory of their own: kept for the receive that asks for that tag, or dropped with an error. So nothing is ever received
into the wrong tensor. A receiver's host waits for the head; a sender's host waits for its receiver before the first
message between the two, which then connect, and for nobody later.

Each pair of ranks has a communicator and a stream of its own, so that only the two need to take part, and messages of
different pairs, and collectives, don't wait for each other. Between two ranks messages of both directions do: they are
on one stream, and a send ends when it is received.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag
from ferrodist.backends.verification import left_reason
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator
    from ferrodist.backends.nccl.stream_executor import StreamContext, StreamExecutor
    from ferrodist.backends.nccl.streams import InFlightOp
    from ferrodist.backends.request import PersistentRecv

_MAX_DIMS = 12
_HEAD = struct.Struct(f"<Q16sB{_MAX_DIMS}q")  # tag, dtype, dims, shape
_TAG = channel_tag(Channel.DEVICE_HEAD, 0)
_LOOK_SECONDS = 0.05


class _Head(NamedTuple):
    """What a tensor is that is sent."""

    tag: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, tag: int) -> _Head:
        return cls(tag, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def pack(self) -> bytes:
        padding = [0] * (_MAX_DIMS - len(self.shape))
        return _HEAD.pack(self.tag, self.dtype.encode(), len(self.shape), *self.shape, *padding)

    @classmethod
    def unpack(cls, message: bytes, sender: int) -> _Head:
        tag, name, num_dims, *sizes = _HEAD.unpack(message)
        dtype = name.rstrip(b"\0").decode("ascii", "replace")
        if num_dims > _MAX_DIMS or min(sizes) < 0 or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ProtocolError(f"rank {sender} sent the head of a tensor that can't be", ranks=(sender,))
        return cls(tag, dtype, tuple(sizes[:num_dims]))

    def make(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def __str__(self) -> str:
        return f"{self.dtype} tensor of shape {self.shape}"


class _Found(NamedTuple):
    """A head that a receive takes, and where its elements are if they have come already."""

    source: int
    head: _Head
    kept: torch.Tensor | None


class NcclP2P:
    """`DeviceP2P` of a group, by NCCL; see [Note: messages of GPUs].

    Args:
        group: The group.
        launcher: Puts its work on a stream.
    """

    def __init__(self, group: Backend, launcher: StreamExecutor) -> None:
        self._group = group
        self.launcher = launcher
        self._sending = threading.Lock()  # held from the heads of an exchange to the launch of its sends
        self._inbox = _Inbox(group.world_size)
        self._receiving = self._inbox.changed  # held where heads are taken and their receives launched
        self._pairs: dict[int, Backend] = {}
        self._pairing = threading.Lock()

    def exchange(self, operations: Sequence[Any], *, timeout: float) -> list[int]:
        """Do all of these at the same time; see `DeviceP2P`."""
        deadline = Deadline(timeout)
        sends = [operation for operation in operations if hasattr(operation, "dst")]
        receives = [operation for operation in operations if not hasattr(operation, "dst")]
        if not operations:
            return []
        what = ", ".join(_describe(operation) for operation in operations)
        if not receives:
            with self._sending:
                self._announce(sends)
                self._launch(what, sends, [], deadline)
            return [send.dst for send in sends]
        self._inbox.open(self._group)
        if not sends:
            sources = self._receive(what, [], receives, deadline)
        else:
            with self._sending:
                self._announce(sends)
                sources = self._receive(what, sends, receives, deadline)
        remaining = iter(sources)
        return [operation.dst if hasattr(operation, "dst") else next(remaining) for operation in operations]

    def _announce(self, sends: Sequence[Any]) -> None:
        for send in sends:
            head = _Head.of(send.tensor, send.tag).pack()
            if not self._group.try_send(head, send.dst, tag=_TAG):
                self._group.isend(head, send.dst, tag=_TAG)

    def _receive(self, what: str, sends: Sequence[Any], receives: Sequence[Any], deadline: Deadline) -> list[int]:
        """Take a head for each receive, then launch all; returns who sent."""
        with self._receiving:
            found: list[_Found] = []
            try:
                for receive in receives:
                    found.append(self._find(what, receive, deadline))  # noqa: PERF401 - kept when a later one raises
            except BaseException as error:
                if sends:  # announced, and not to come: the receivers can't know
                    self._group.abort(left_reason(self._group.rank, what, error))
                else:
                    self._inbox.put_back(found)
                raise
            targets = [self._target(receive, one) for receive, one in zip(receives, found, strict=True)]
            incoming = [(one.source, target) for one, target in zip(found, targets, strict=True) if one.kept is None]
            self._launch(what, sends, incoming, deadline)
            for one in found:
                if one.kept is not None:  # received when another thread asked, on whose stream it was made and awaited
                    self._launcher_to(one.source)[0].take_over(one.kept)
        for receive, one, target in zip(receives, found, targets, strict=True):
            _check_fits(self._group, receive, one)
            if target is not receive.tensor:
                with torch.inference_mode() if receive.tensor.is_inference() else torch.no_grad():
                    receive.tensor.copy_(target)
            elif not target.is_inference():
                # NCCL wrote raw memory: autograd must learn that what it may have saved has changed.
                torch.autograd.graph.increment_version(target)
        return [one.source for one in found]

    def _find(self, what: str, receive: Any, deadline: Deadline) -> _Found:
        """The next head for a receive; elements that others are to have are launched into memory of their own."""
        inbox = self._inbox
        while True:
            kept = inbox.take_kept(receive.src, receive.tag)
            if kept is not None:
                return kept
            source = inbox.next_source(receive.src)
            if source is None:
                self._await_head(what, receive, deadline)
                continue
            head = _Head.unpack(inbox.heads[source].popleft(), source)
            if head.tag == receive.tag:
                return _Found(source, head, None)
            other = head.make(receive.tensor.device)
            self._launch(f"recv from rank {source} for another tag", [], [(source, other)], deadline)
            inbox.kept.append(_Found(source, head, other))

    def _await_head(self, what: str, receive: Any, deadline: Deadline) -> None:
        group = self._group
        if group.failure is not None:
            raise group.failure.fresh()
        error = self._inbox.error_of(receive.src)
        if error is not None:
            raise error.fresh()
        if deadline.expired:
            ranks = () if receive.src == ANY_SOURCE else (receive.src,)
            raise DistributedTimeoutError(
                f"{what} on group {group.name!r}: nothing came within {deadline.timeout:g} s (rank {group.rank}). The"
                " other side has not made the matching call, on a GPU tensor.",
                ranks=ranks,
            )
        self._receiving.wait(min(_LOOK_SECONDS, deadline.remaining()))

    def _target(self, receive: Any, found: _Found) -> torch.Tensor:
        """Where elements are received: the user's tensor if they fit there as they come."""
        if found.kept is not None:
            return found.kept
        tensor: torch.Tensor = receive.tensor
        fits = found.head == _Head.of(tensor, receive.tag)
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return tensor if fits and plain else found.head.make(tensor.device)

    def _launch(
        self, what: str, sends: Sequence[Any], incoming: Sequence[tuple[int, torch.Tensor]], deadline: Deadline
    ) -> None:
        moves: dict[int, _P2PTransfer] = {}
        for send in sends:
            if send.tensor.numel():
                moves.setdefault(send.dst, _P2PTransfer([], [])).sent.append(_flat(send.tensor))
        for source, tensor in incoming:
            if tensor.numel():
                moves.setdefault(source, _P2PTransfer([], [])).received.append(tensor.view(-1))
        launched: list[tuple[StreamExecutor, InFlightOp, torch.device]] = []
        try:
            # Ranks that connect pair by pair, each in an order of its own, could wait for each other in a ring.
            for peer in sorted(moves, key=lambda peer: sorted((peer, self._group.rank))):
                launcher, place = self._launcher_to(peer)
                tensors = [*moves[peer].sent, *moves[peer].received]
                work = partial(moves[peer].put, place)
                message = launcher.launch_message(what, tensors, work, timeout=deadline.timeout, peers=(place,))
                launched.append((launcher, message, tensors[0].device))
        finally:  # and not before: what goes to several ranks is under way at the same time
            for launcher, message, device in launched:
                launcher.order_after(message, device)

    def _launcher_to(self, peer: int) -> tuple[StreamExecutor, int]:
        """What launches messages with a rank, and that rank's number there."""
        with self._pairing:  # of two pairs made of the same ranks, the others would count one
            pair = self._pairs.get(peer)
            if pair is None:
                ranks = sorted((self._group.rank, peer))
                pair = self._pairs[peer] = SubBackend(
                    self._group, ranks, name=f"{self._group.name}, messages of {ranks}", label="messages of GPUs"
                )
                self._group.on_synchronize(_messages_of(pair).launcher.synchronize)
        return _messages_of(pair).launcher, 1 - pair.rank


def _messages_of(pair: Backend) -> NcclP2P:
    messages: NcclP2P = pair.p2p("cuda")
    return messages


class _P2PTransfer(NamedTuple):
    """Elements that one rank sends another, and receives from it."""

    sent: list[torch.Tensor]
    received: list[torch.Tensor]

    def put(self, peer: int, lane: StreamContext) -> None:
        """Put them on a stream as one."""

        def move(nccl: Communicator, stream: int) -> None:
            for flat in self.sent:
                nccl.send(flat, peer, stream=stream)
            for flat in self.received:
                nccl.recv(flat, peer, stream=stream)

        lane.grouped(move)


class _Inbox:
    """Heads that have come, and elements that nobody has asked for yet."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.heads: list[deque[bytes]] = [deque() for _ in range(world_size)]
        self.kept: list[_Found] = []
        self._errors: dict[int, DistributedError] = {}
        self._listeners: list[PersistentRecv] | None = None

    def open(self, group: Backend) -> None:
        """Begin to listen to all others."""
        with self.changed:
            if self._listeners is None:
                self._listeners = [
                    group.listen(rank, _HEAD.size, partial(self._hear, rank), partial(self._end, rank), tag=_TAG)
                    for rank in range(group.world_size)
                    if rank != group.rank
                ]

    def take_kept(self, source: int, tag: int) -> _Found | None:
        """The first that was kept for such a receive."""
        for found in self.kept:
            if found.head.tag == tag and source in (found.source, ANY_SOURCE):
                self.kept.remove(found)
                return found
        return None

    def next_source(self, source: int) -> int | None:
        """A rank whose head is there."""
        ranks = range(len(self.heads)) if source == ANY_SOURCE else (source,)
        return next((rank for rank in ranks if self.heads[rank]), None)

    def put_back(self, found: Sequence[_Found]) -> None:
        """Let other receives have what was taken, and not launched."""
        for one in reversed(found):
            if one.kept is not None:
                self.kept.insert(0, one)
            else:
                self.heads[one.source].appendleft(one.head.pack())

    def error_of(self, source: int) -> DistributedError | None:
        """Why nothing more comes from a rank, or from all."""
        if source != ANY_SOURCE:
            return self._errors.get(source)
        everyone = len(self._errors) >= len(self.heads) - 1
        return next(iter(self._errors.values()), None) if everyone else None

    def _hear(self, rank: int, messages: list[bytes]) -> None:
        with self.changed:
            self.heads[rank].extend(messages)
            self.changed.notify_all()

    def _end(self, rank: int, error: DistributedError) -> None:
        with self.changed:
            self._errors[rank] = error
            self.changed.notify_all()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _check_fits(group: Backend, receive: Any, found: _Found) -> None:
    expected = _Head.of(receive.tensor, receive.tag)
    if found.head != expected:
        raise SizeMismatchError(
            f"rank {found.source} of group {group.name!r} sent a {found.head}; rank {group.rank} expected a {expected}."
            " It is lost.",
            ranks=(found.source,),
        )


def _describe(operation: Any) -> str:
    if hasattr(operation, "dst"):
        return f"send to rank {operation.dst}"
    return "recv from any rank" if operation.src == ANY_SOURCE else f"recv from rank {operation.src}"
