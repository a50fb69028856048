"""What carries a group's data: engines and point-to-point by type of device, a data plane, a compiled fast path.

A group is a control plane, that is the methods of `Backend`: liveness, abort, bytes from rank to rank, sub-groups. A
backend may add any of the objects that are described here. Where it adds none, the group's bytes carry everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.sequencer import Sequencer
    from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    Block = tuple[int, int]
    """Offset and size of one rank's part of a buffer, in bytes."""


class DataPlane(Protocol):
    """Starts operations of all ranks on bytes, and waits for them.

    Buffers are flat, sizes are in bytes and by rank. Ranks start the same operations in the same order.
    """

    sequencer: Sequencer
    """The order of the group's collectives."""

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


class FastPath(NamedTuple):
    """The compiled objects that take a group's plain calls without the Python layers between.

    native/bindings/fast_path.cpp and `ferrodist.collectives.fast_path` read it.

    Args:
        communicator: The compiled communicator; None until the ranks have opened it, at the group's first collective.
        timeout: The group's timeout in seconds.
        engine: The engine of the communicator, which makes errors of its failures.
        p2p: The compiled point-to-point transfer of tensors.
    """

    communicator: Any
    timeout: float
    engine: Any
    p2p: Any
