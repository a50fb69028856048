"""The seam between what users call and who moves the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ferrodist.collectives.reduce_op import Op
    from ferrodist.collectives.tensor_protocol import Recv, Send
    from ferrodist.errors import DistributedError


class CollectiveEngine(Protocol):
    """The tensor collectives of one group, as an engine does them.

    All tensors are one-dimensional, contiguous, and on the device that the engine serves, of a dtype in `DTYPES`;
    arguments have been checked. On a GPU they are read and written in the order of the caller's current stream; whether
    the host waits for it is the engine's affair.
    Every method blocks for at most ``timeout`` seconds, compares the call with the other ranks', and ends the group
    when it fails. ``sequence`` comes from `reserve`, which ranks call in the same order; the calls themselves may
    run in any. A method may write its ``out`` while it reads ``source``'s parts that it has not sent, so the two may
    only overlap where said. Both sides skip messages without elements, but for `all_to_all`.
    """

    def reserve(self) -> int:
        """Take the next position among the group's collectives."""

    def allreduce(self, out: torch.Tensor, source: torch.Tensor, op: Op, *, timeout: float, sequence: int) -> None:
        """Fold ``source`` over the ranks into every rank's ``out``, which may be ``source``."""

    def reduce(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        op: Op,
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold ``source`` over the ranks into the root's ``out``, which may be its ``source``; None elsewhere."""

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout: float, sequence: int) -> None:
        """Copy the root's ``tensor`` into every rank's."""

    def all_gather(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into every ``out``, one after the other; ``counts[r]`` is rank r's size.

        ``dim``, from 0, is the one that the users join along: ranks compare it, and it says nothing else here.
        """

    def gather(
        self,
        out: torch.Tensor | None,
        source: torch.Tensor,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy every rank's ``source`` into the root's ``out``; None elsewhere."""

    def scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor | None,
        counts: Sequence[int],
        root: int,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Copy part r of the root's ``source``, of ``counts[r]`` elements, into rank r's ``out``."""

    def reduce_scatter(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        op: Op,
        *,
        dim: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Fold part r of every rank's ``source`` into rank r's ``out``; ``dim`` is as for `all_gather`."""

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        unit: int,
        timeout: float,
        sequence: int,
    ) -> None:
        """Send part r of ``source`` to rank r, and collect what the ranks sent here in ``out``.

        ``unit`` elements are what the users count in, which ranks compare: a row, or in an even exchange a whole part.
        """


class HostEngine(CollectiveEngine, Protocol):
    """`CollectiveEngine` that may run in any thread, and what else ranks say together on the host."""

    def await_turn(self, sequence: int) -> None:
        """Return when the collective at this position may begin, or the group has ended: its time counts from then."""

    def share(self, operation: str, payload: bytes, *, timeout: float, sequence: int) -> list[bytes]:
        """Give every rank the `MAX_PAYLOAD` or fewer bytes of each, in rank order."""

    def barrier(self, *, timeout: float, sequence: int) -> None:
        """Return when all ranks have called."""


class StreamWork(Protocol):
    """Work that an engine has put on a stream of its own. The engine keeps its tensors until it is done."""

    @property
    def error(self) -> DistributedError | None:
        """Why it will not be done, or was done for nothing, as far as is known."""

    def done(self) -> bool:
        """Whether the stream has come to its end; never blocks."""

    def wait_on_stream(self) -> None:
        """Have the current stream wait for it; the host does not."""


class DeviceP2P(Protocol):
    """Tensors on GPUs from rank to rank, in one group."""

    def exchange(self, operations: Sequence[Send | Recv], *, timeout: float) -> list[int]:
        """Do all of these at the same time; returns the other rank of each.

        The tensors have any strides and are on one device, in the order of whose current stream they are read and
        written. Arguments have been checked.
        """


class StreamEngine(CollectiveEngine, Protocol):
    """`CollectiveEngine` whose methods return when the work is on a stream, without a wait for other ranks.

    What a thread calls between `begin_async` and `end_async` is not ordered before what comes after in its current
    stream. No other thread is affected, but may have to wait: ranks must enqueue in the order in which they `reserve`.
    """

    enqueue: bool
    """True. Engines without the attribute are none of these."""

    def begin_async(self) -> None:
        """Let the current stream not wait for what this thread calls, until `end_async`."""

    def end_async(self) -> StreamWork:
        """What was called since `begin_async`; it is called once after each of these, also when a call has raised."""
