"""Point-to-point messages of GPU tensors, by NCCL.

[Note: messages of GPUs]
NCCL matches what two ranks send each other by order alone. So each send is announced by a header, a message between the
ranks' CPUs with tag, dtype and shape: headers from one rank come in the order in which that rank launches its sends. A
receive takes the next header of its sender. If that has another tag, or does not fit, the elements are received all the
same, into memory of their own: kept until a receive asks for that tag, or dropped with an error. So nothing is ever
received into the wrong tensor. A receiver's host waits for the header. A sender's host waits for its receiver before
the first message between the two, which then connect, and never later.

Each pair of ranks has a communicator and a stream of its own, so that only the two need to take part, and messages of
different pairs, and collectives, don't wait for each other. Between two ranks messages of both directions do: they are
on one stream, and a send ends when it is received.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.collective_op import dtype_name
from ferrodist.backends.nccl.control_messages import post_persistent_recvs, send_without_waiting
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import ANY_SOURCE, Channel, channel_tag
from ferrodist.backends.verification import left_reason
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator
    from ferrodist.backends.nccl.in_flight import InFlightOp
    from ferrodist.backends.nccl.stream_executor import StreamContext, StreamExecutor
    from ferrodist.backends.persistent_recv import PersistentRecv

_MAX_DIMS = 12
_HEADER = struct.Struct(f"<Q16sB{_MAX_DIMS}q")  # tag, dtype, number of dims, shape
_TAG = channel_tag(Channel.DEVICE_HEAD, 0)
_POLL_INTERVAL_SECONDS = 0.05


class _Header(NamedTuple):
    """The tag, dtype and shape of a sent tensor."""

    tag: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, tag: int) -> _Header:
        return cls(tag, dtype_name(tensor.dtype), tuple(tensor.shape))

    def pack(self) -> bytes:
        padding = [0] * (_MAX_DIMS - len(self.shape))
        return _HEADER.pack(self.tag, self.dtype.encode(), len(self.shape), *self.shape, *padding)

    @classmethod
    def unpack(cls, message: bytes, sender: int) -> _Header:
        tag, name, num_dims, *sizes = _HEADER.unpack(message)
        dtype = name.rstrip(b"\0").decode("ascii", "replace")
        if num_dims > _MAX_DIMS or min(sizes) < 0 or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ProtocolError(f"rank {sender} sent the header of an impossible tensor", ranks=(sender,))
        return cls(tag, dtype, tuple(sizes[:num_dims]))

    def allocate(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def __str__(self) -> str:
        return f"{self.dtype} tensor of shape {self.shape}"


class _Match(NamedTuple):
    """A header that matches a receive, and the elements if they have been received already."""

    source: int
    header: _Header
    received: torch.Tensor | None


class NcclP2P:
    """`DeviceP2P` of a group, by NCCL; see [Note: messages of GPUs]. Its executor is used if the group is a pair."""

    def __init__(self, group: Backend, executor: StreamExecutor) -> None:
        self._group = group
        self.executor = executor
        self._sending = threading.Lock()  # held from an exchange's headers until its sends are launched
        self._inbox = _Inbox(group.world_size)
        self._receiving = self._inbox.changed  # held while headers are taken and their receives launched
        self._pairs: dict[int, Backend] = {}
        self._pairing = threading.Lock()

    def exchange(self, operations: Sequence[Any], *, timeout: float) -> list[int]:
        """Do several sends and receives at the same time; see `DeviceP2P`."""
        deadline = Deadline(timeout)
        sends = [operation for operation in operations if hasattr(operation, "dst")]
        receives = [operation for operation in operations if not hasattr(operation, "dst")]
        if not operations:
            return []
        what = ", ".join(_describe(operation) for operation in operations)
        sources: Iterable[int] = ()
        if receives:
            self._inbox.open(self._group)
        with self._sending if sends else contextlib.nullcontext():
            for index, send in enumerate(sends):
                header = _Header.from_tensor(send.tensor, send.tag).pack()
                try:
                    send_without_waiting(self._group, header, send.dst, _TAG)
                except BaseException as error:
                    self._end_pairs({earlier.dst for earlier in sends[:index]} - {send.dst}, what, error)
                    raise
            if receives:
                sources = self._receive(what, sends, receives, deadline)
            else:
                self._launch(what, sends, [], deadline)
        remaining = iter(sources)
        return [operation.dst if hasattr(operation, "dst") else next(remaining) for operation in operations]

    def _receive(self, what: str, sends: Sequence[Any], receives: Sequence[Any], deadline: Deadline) -> list[int]:
        """Match each receive with a header, then launch all; returns the senders."""
        with self._receiving:
            matches: list[_Match] = []
            try:
                for receive in receives:
                    matches.append(self._match(what, receive, deadline))  # noqa: PERF401 - needed if a later one raises
            except BaseException as error:
                if sends:  # their headers are out, and the receivers can't know that nothing follows
                    self._group.abort(left_reason(self._group.rank, what, error))
                else:
                    self._inbox.put_back(matches)
                raise
            targets = [self._target(receive, match) for receive, match in zip(receives, matches, strict=True)]
            incoming = [
                (match.source, target) for match, target in zip(matches, targets, strict=True) if match.received is None
            ]
            self._launch(what, sends, incoming, deadline)
            for match in matches:
                if match.received is not None:  # by another thread, on whose stream it was allocated
                    self._executor_to(match.source)[0].take_over(match.received)
        for receive, match, target in zip(receives, matches, targets, strict=True):
            _check_fits(self._group, receive, match)
            if target is not receive.tensor:
                with torch.inference_mode() if receive.tensor.is_inference() else torch.no_grad():
                    receive.tensor.copy_(target)
            elif not target.is_inference():
                # NCCL wrote raw memory: autograd must learn that a tensor it may have saved has changed.
                torch.autograd.graph.increment_version(target)
        return [match.source for match in matches]

    def _match(self, what: str, receive: Any, deadline: Deadline) -> _Match:
        """The next header for a receive; elements for other tags are received into memory of their own."""
        inbox = self._inbox
        while True:
            unclaimed = inbox.take_unclaimed(receive.src, receive.tag)
            if unclaimed is not None:
                return unclaimed
            source = inbox.next_source(receive.src)
            if source is None:
                self._await_header(what, receive, deadline)
                continue
            header = _Header.unpack(inbox.headers[source].popleft(), source)
            if header.tag == receive.tag:
                return _Match(source, header, None)
            other = header.allocate(receive.tensor.device)
            self._launch(f"recv from rank {source} for another tag", [], [(source, other)], deadline)
            inbox.unclaimed.append(_Match(source, header, other))

    def _await_header(self, what: str, receive: Any, deadline: Deadline) -> None:
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
                " other side has not made the matching call, on a GPU tensor: check tags and order, or pass a larger"
                " timeout.",
                ranks=ranks,
            )
        self._receiving.wait(min(_POLL_INTERVAL_SECONDS, deadline.remaining()))

    def _target(self, receive: Any, match: _Match) -> torch.Tensor:
        """The tensor that NCCL receives into: the user's if the elements fit there as they are."""
        if match.received is not None:
            return match.received
        tensor: torch.Tensor = receive.tensor
        fits = match.header == _Header.from_tensor(tensor, receive.tag)
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return tensor if fits and is_plain else match.header.allocate(tensor.device)

    def _launch(
        self, what: str, sends: Sequence[Any], incoming: Sequence[tuple[int, torch.Tensor]], deadline: Deadline
    ) -> None:
        transfers: dict[int, _P2PTransfer] = {}
        for send in sends:
            if send.tensor.numel():
                transfers.setdefault(send.dst, _P2PTransfer([], [])).sent.append(_flat(send.tensor))
        for source, tensor in incoming:
            if tensor.numel():
                transfers.setdefault(source, _P2PTransfer([], [])).received.append(tensor.view(-1))
        launched: list[tuple[StreamExecutor, InFlightOp, torch.device]] = []
        # All ranks connect their pairs in one order, or they could wait for each other in a ring.
        peers = sorted(transfers, key=lambda peer: sorted((peer, self._group.rank)))
        try:
            for peer in peers:
                executor, rank_in_pair = self._executor_to(peer)
                tensors = [*transfers[peer].sent, *transfers[peer].received]
                work = partial(transfers[peer].enqueue, rank_in_pair)
                message = executor.launch_message(what, tensors, work, timeout=deadline.timeout, peers=(rank_in_pair,))
                launched.append((executor, message, tensors[0].device))
        except BaseException as error:  # of one pair, which has ended
            self._end_pairs(peers[len(launched) + 1 :], what, error)
            raise
        finally:  # only now, so that messages with several ranks overlap
            for executor, message, device in launched:
                executor.order_after(message, device)

    def _end_pairs(self, peers: Iterable[int], what: str, error: BaseException) -> None:
        """End the messages with ranks whose headers were sent or taken and whose elements won't follow.

        NCCL would put the elements of a later message in their place.
        """
        for peer in peers:
            executor, _ = self._executor_to(peer)
            self._pairs[peer].abort(left_reason(self._group.rank, what, error))
            executor.abort()

    def _executor_to(self, peer: int) -> tuple[StreamExecutor, int]:
        """The executor of messages with a rank, and that rank's number in the pair."""
        with self._pairing:  # two pairs of the same ranks would differ in the number of groups made
            pair = self._pairs.get(peer)
            if pair is None:
                ranks = sorted((self._group.rank, peer))
                pair = self._pairs[peer] = SubBackend(
                    self._group, ranks, name=f"{self._group.name}, messages of {ranks}", label="messages of GPUs"
                )
                self._group.on_synchronize(_executor_of(pair).synchronize)
        return _executor_of(pair), 1 - pair.rank


def _executor_of(pair: Backend) -> StreamExecutor:
    p2p = pair.p2p("cuda")
    assert isinstance(p2p, NcclP2P)
    return p2p.executor


class _P2PTransfer(NamedTuple):
    """The elements that one rank sends another and receives from it."""

    sent: list[torch.Tensor]
    received: list[torch.Tensor]

    def enqueue(self, peer: int, context: StreamContext) -> None:
        """Enqueue all as one NCCL group."""

        def transfer(nccl: Communicator, stream: int) -> None:
            for flat in self.sent:
                nccl.send(flat, peer, stream=stream)
            for flat in self.received:
                nccl.recv(flat, peer, stream=stream)

        context.grouped(transfer)


class _Inbox:
    """Headers that have come, and elements received before anybody asked for them."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.headers: list[deque[bytes]] = [deque() for _ in range(world_size)]
        self.unclaimed: list[_Match] = []
        self._errors: dict[int, DistributedError] = {}
        self._listeners: list[PersistentRecv] | None = None

    def open(self, group: Backend) -> None:
        """Begin to listen to all others."""
        with self.changed:
            if self._listeners is None:
                others = [rank for rank in range(group.world_size) if rank != group.rank]
                self._listeners = post_persistent_recvs(
                    group, others, self._on_headers, self._on_end, tag=_TAG, size_bytes=_HEADER.size
                )

    def take_unclaimed(self, source: int, tag: int) -> _Match | None:
        """The first unclaimed elements for a receive."""
        for match in self.unclaimed:
            if match.header.tag == tag and source in (match.source, ANY_SOURCE):
                self.unclaimed.remove(match)
                return match
        return None

    def next_source(self, source: int) -> int | None:
        """A rank whose header has come."""
        ranks = range(len(self.headers)) if source == ANY_SOURCE else (source,)
        return next((rank for rank in ranks if self.headers[rank]), None)

    def put_back(self, matches: Sequence[_Match]) -> None:
        """Return matches that were not launched, for other receives."""
        for match in reversed(matches):
            if match.received is not None:
                self.unclaimed.insert(0, match)
            else:
                self.headers[match.source].appendleft(match.header.pack())

    def error_of(self, source: int) -> DistributedError | None:
        """The error because of which nothing more comes from a rank, or from any."""
        if source != ANY_SOURCE:
            return self._errors.get(source)
        have_all_ended = len(self._errors) >= len(self.headers) - 1
        return next(iter(self._errors.values()), None) if have_all_ended else None

    def _on_headers(self, rank: int, messages: list[bytes]) -> None:
        with self.changed:
            self.headers[rank].extend(messages)
            self.changed.notify_all()

    def _on_end(self, rank: int, error: DistributedError) -> None:
        with self.changed:
            self._errors[rank] = error
            self.changed.notify_all()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _check_fits(group: Backend, receive: Any, match: _Match) -> None:
    expected = _Header.from_tensor(receive.tensor, receive.tag)
    if match.header != expected:
        raise SizeMismatchError(
            f"rank {match.source} of group {group.name!r} sent a {match.header}; rank {group.rank} expected a"
            f" {expected}. It is lost.",
            ranks=(match.source,),
        )


def _describe(operation: Any) -> str:
    if hasattr(operation, "dst"):
        return f"send to rank {operation.dst}"
    return "recv from any rank" if operation.src == ANY_SOURCE else f"recv from rank {operation.src}"
