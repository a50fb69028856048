"""Interfaces of the objects that carry a group's data: engines and point-to-point by type of device, a data plane.

A group is a control plane, that is the methods of `Backend`: liveness, abort, bytes from rank to rank, sub-groups. A
backend may add any of the objects that are described here. If it adds none, the group's bytes carry everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.sequencer import Sequencer
    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError

Block = tuple[int, int]  # offset and size of one rank's part of a buffer, in bytes


class CollectiveEngine(Protocol):
    """Runs the collectives of one group on tensors of one kind of device.

    On a GPU, tensors are read and written in the order of the caller's current stream; whether the host waits for the
    device is up to the engine.
    """

    def reserve(self) -> int:
        """Take the next position among the group's collectives. All ranks reserve in the same order."""

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective with checked arguments; blocks for at most ``op.timeout`` seconds.

        Compares the call with the other ranks' (`CollectiveOp.signature`), and aborts the group when it fails.
        ``sequence`` is from `reserve`; calls may run in any order. Returns the ranks' payloads of a `share`; None for
        all other kinds.
        """


class HostEngine(CollectiveEngine, Protocol):
    """A `CollectiveEngine` of tensors on the host, which may run in any thread."""

    @property
    def share_room(self) -> int:
        """The most bytes that a rank may give to a `share`."""

    def await_turn(self, sequence: int) -> None:
        """Return when the collective at this position may begin, or the group has ended: its time counts from then."""


class StreamWork(Protocol):
    """Work that an engine has put on a stream of its own. The engine keeps the tensors alive until it is done."""

    @property
    def error(self) -> DistributedError | None:
        """Why the work will not complete, or has completed in vain, as far as is known."""

    def done(self) -> bool:
        """Return whether the stream has passed the end of the work; never blocks."""

    def wait_on_stream(self) -> None:
        """Make the current stream wait for the work; the host does not wait."""


class DeviceP2P(Protocol):
    """Point-to-point transfer of tensors on GPUs in one group."""

    def exchange(self, operations: Sequence[Any], *, timeout: float) -> list[int]:
        """Run all `Send` and `Recv` operations at the same time; returns the peer of each.

        The tensors have any strides and are on one device; they are read and written in the order of that device's
        current stream. Arguments have been checked.
        """


class StreamEngine(CollectiveEngine, Protocol):
    """A `CollectiveEngine` that returns when the work is on a stream, without waiting for other ranks.

    The current stream is not ordered after what a thread runs between `begin_async` and `end_async`. Other threads are
    not affected, but may have to wait: ranks must enqueue in the order in which they `reserve`.
    """

    enqueue: bool  # true; other engines don't have the attribute

    def begin_async(self) -> None:
        """Stop ordering the current stream after what this thread runs, until `end_async`."""

    def end_async(self) -> StreamWork:
        """Return the work since `begin_async`. Called once after each `begin_async`, also when a call has raised."""


class DataPlane(Protocol):
    """Starts operations of all ranks on bytes, and waits for them.

    Buffers are flat, sizes are in bytes and by rank. Ranks start the same operations in the same order.
    """

    sequencer: Sequencer  # the order of the group's collectives

    def all_gather(self, out: memoryview, sizes: Sequence[int]) -> list[Any]:
        """Start an all-gather into ``out``, of ``sizes[rank]`` bytes from each rank."""

    def all_to_all(
        self, out: memoryview, incoming: Sequence[Block], source: memoryview, outgoing: Sequence[Block]
    ) -> list[Any]:
        """Start an all-to-all between blocks of ``source`` and blocks of ``out``, one for each rank."""

    def broadcast(self, data: memoryview, root: int) -> list[Any]:
        """Start a broadcast from ``root``."""

    def gather(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        """Start a gather on ``root`` of ``sizes[rank]`` bytes from each rank."""

    def scatter(self, data: memoryview, sizes: Sequence[int], root: int) -> list[Any]:
        """Start a scatter from ``root`` of ``sizes[rank]`` bytes to each rank."""

    def wait_for(self, requests: list[Any], deadline: Deadline) -> bool:
        """Wait for requests; False when some were not done in time, or the group has ended."""

    def abandon(self, requests: list[Any]) -> None:
        """Give up requests: the group has ended."""
