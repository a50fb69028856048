"""How the ranks of a group come to share memory, and how those of different hosts connect.

The lowest rank of each host makes a memory that has no name and listens on a Unix socket whose name only the group
learns, in an agreement over its authenticated messages, together with a nonce. The others of its host connect, show the
nonce and are given the memory's descriptor. Ranks of different hosts connect over TCP and prove that they know the job
secret, as for everything else. A last agreement says whether all have succeeded, so that all go on or none does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.backends import mailbox
from ferrodist.backends.native import fd_passing
from ferrodist.backends.native.binding import load
from ferrodist.backends.native.symmetric_memory import ContiguousSharedView
from ferrodist.backends.native.topology import (
    CpuSet,
    HostTopology,
    agree_on_topology,
    check_problems,
    connect_hosts,
    is_oversubscribed,
)
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.signature import CollectiveSignature

_NAME_BYTES = 16
_NO_NAME = bytes(_NAME_BYTES)
_CARD = struct.Struct(f"<{_NAME_BYTES}s{fd_passing.NONCE_BYTES}sI")  # name of a rank's socket, nonce, user

_SLOT_BYTES = 256 * 1024
_WIDE_SLOT_BYTES = 512 * 1024
_SPIN_MICROS = 300
_SPIN_MICROS_BETWEEN_HOSTS = 3000
"""See [Note: spinning on connections] in native/transport/fabric.cpp."""


def open_communicator(group: Backend, place: HostTopology, call: CollectiveSignature, timeout: float) -> Any:
    """Make the engine's part for this rank; called on all ranks of a group.

    Args:
        group: The group.
        place: Where its ranks are.
        call: The collective that this is for: ranks that call another one get the error they would get without.
        timeout: Seconds.

    Raises:
        BackendUnavailable: On all ranks, when some can't share memory or connect.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for any collective.
    """

    def create(processors: Sequence[bytes]) -> int:
        return int(load().create_segment(*_layout(place, group.rank, processors)))

    with _SharedMemorySetup(group, place, call, timeout) as opening:
        memory = opening.share_memory(CpuSet.of_this_process().pack(), create)
        links = connect_hosts(group, place, "collectives", opening.deadline)
        layout = _layout(place, group.rank, memory.introductions)
        engine = opening.attempt(
            lambda: load().Communicator(memory.descriptor, group.rank, place.host_numbers(), links, *layout)
        )
        opening.agree()
        return engine


def open_messages(
    group: Backend, place: HostTopology, tell: Callable[..., None], call: CollectiveSignature, timeout: float
) -> Any:
    """Make the engine's messenger for this rank; called on all ranks of a group.

    Args:
        group: The group.
        place: Where its ranks are.
        tell: Hears of what ranks do wrong: see `do_work` in native/bindings/p2p.cpp.
        call: What the ranks compare.
        timeout: Seconds.

    Raises as `open_communicator`.
    """
    local_ranks = place.neighbours(group.rank)
    local_indexes = [local_ranks.index(rank) if rank in local_ranks else -1 for rank in range(group.world_size)]

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_rings(len(local_ranks)))

    with _SharedMemorySetup(group, place, call, timeout) as opening:
        memory = opening.share_memory(CpuSet.of_this_process().pack(), create)
        sockets = connect_hosts(group, place, "messages", opening.deadline)
        messenger = opening.attempt(
            lambda: load().P2PEngine(
                rank=group.rank,
                eager_bytes=mailbox.EAGER_LIMIT,
                max_unasked_bytes=mailbox.MAX_UNEXPECTED_BYTES,
                is_crowded=_layout(place, group.rank, memory.introductions).is_crowded,
                spin_micros=_SPIN_MICROS,
                memory=memory.descriptor,
                num_local=len(local_ranks),
                local_indexes=local_indexes,
                sockets=sockets,
                tell=tell,
            )
        )
        opening.agree()
        return messenger


def open_symmetric(
    group: Backend,
    place: HostTopology,
    communicator: Any,
    call: CollectiveSignature,
    *,
    size_bytes: int,
    joined: Sequence[tuple[int, int]],
    timeout: float,
) -> tuple[Any, list[ContiguousSharedView]]:
    """Make symmetric memory of ``size_bytes`` a rank, in a group on one host.

    Returns:
        This rank's as a tensor of bytes; and for each (start, size) in ``joined``, both whole pages, a view of this
        part of all ranks' memory.

    Raises as `open_communicator`.
    """
    page_bytes = load().PAGE_BYTES
    stride = max(1, -(-size_bytes // page_bytes)) * page_bytes

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_arena(stride, group.world_size))

    with _SharedMemorySetup(group, place, call, timeout) as opening:
        memory = opening.share_memory(b"", create)
        tensor = opening.attempt(lambda: communicator.map_arena(memory.descriptor, memory.number, stride, size_bytes))
        ends = stride * group.world_size
        views = opening.attempt(
            lambda: [
                ContiguousSharedView(memory.descriptor, range(start, ends, stride), part_bytes)
                for start, part_bytes in joined
            ]
        )
        opening.agree()
        return tensor, views


class _Memory(NamedTuple):
    """What `_SharedMemorySetup.share_memory` gives."""

    descriptor: int | None  # the opening's; None on a rank that could not have it
    number: int  # not 0, the same on all ranks of the host, and no other memory's
    introductions: list[bytes]  # every rank's


class _SharedMemorySetup:
    """What the ranks of a group make together: all get it, or all the same error. A context.

    What the system refuses this rank is told to all when they next agree. Whatever else ends its part, as an
    interruption does, ends the group, since others may wait for this rank in other ways.

    Args:
        group: The group.
        place: Where its ranks are.
        call: What the ranks compare.
        timeout: Seconds for all of it.
    """

    def __init__(self, group: Backend, place: HostTopology, call: CollectiveSignature, timeout: float) -> None:
        self.deadline = Deadline(timeout)
        self._group = group
        self._place = place
        self._call = call
        self._problem = ""
        self._is_known = False  # to all ranks, what this one raises
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        if error is None or self._is_known:
            return
        if isinstance(error, DistributedError):
            self._group.abort(error)
        else:
            self._group.abort(f"rank {self._group.rank} left {self._call} by {describe_error(error)}")

    def attempt(self, part: Callable[[], Any]) -> Any:
        """Do a part of this rank's; None when the system refuses it, or has refused one before."""
        if self._problem:
            return None
        try:
            return part()
        except DistributedError:
            raise
        except (OSError, MemoryError) as error:
            # What ranks say of another one is the same, and told once.
            is_own = not isinstance(error, ConnectionError)
            reason = str(error) or type(error).__name__
            self._problem = f"rank {self._group.rank}: {reason}" if is_own else reason
            return None

    def agree(self) -> None:
        """Go on if all ranks can; called on all.

        Raises:
            BackendUnavailable: On all ranks, when some can't.
        """
        try:
            agree_on_topology(self._group, self._problem, "share memory", self.deadline)
        except BackendUnavailable:
            self._is_known = True
            raise

    def share_memory(self, introduction: bytes, create: Callable[[Sequence[bytes]], int]) -> _Memory:
        """Have the lowest rank of each host create a memory, and give every rank of the host its descriptor.

        Args:
            introduction: What this rank tells the others beforehand.
            create: Makes the memory, told every rank's introduction, and returns its descriptor.
        """
        group = self._group
        local_ranks = self._place.neighbours(group.rank)
        leader = local_ranks[0]
        name, nonce = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(fd_passing.NONCE_BYTES)
        sock: Any = None
        if len(local_ranks) > 1:  # before the others wait for it
            sock = self.attempt(lambda: fd_passing.listen(name) if group.rank == leader else fd_passing.make_socket())
        if sock is not None:
            self._stack.enter_context(sock)
        cards, introductions = self._introduce(_CARD.pack(name, nonce, os.geteuid()) + introduction)
        name, nonce, user = cards[leader]
        if group.rank == leader:
            descriptor = self.attempt(lambda: create(introductions))
        else:
            descriptor = self.attempt(
                lambda: fd_passing.recv_fd(group, sock, leader, name, nonce, user=user, deadline=self.deadline)
            )
        if descriptor is not None:
            self._stack.callback(os.close, descriptor)
            if group.rank == leader and sock is not None:
                users = {cards[rank][2] for rank in local_ranks}
                self.attempt(
                    lambda: fd_passing.send_fd(
                        group, sock, nonce, descriptor, ranks=local_ranks[1:], users=users, deadline=self.deadline
                    )
                )
        if sock is not None:
            sock.close()  # whoever still waits at it learns that nothing comes
        if self._place.num_hosts > 1:
            self.agree()
        return _Memory(descriptor, int.from_bytes(nonce[:8], "little") or 1, introductions)

    def _introduce(self, own: bytes) -> tuple[list[tuple[bytes, bytes, int]], list[bytes]]:
        """Every rank's card and the rest of what it says; BackendUnavailable on all ranks when one has a problem."""
        if self._problem:
            own = _NO_NAME + self._problem.encode()[: _CARD.size + CpuSet.size() - _NAME_BYTES]
        said = self._group.verifier.verify(self._call.with_payload(own), self.deadline.remaining())
        try:
            check_problems(
                self._group, [text[_NAME_BYTES:] for text in said if text.startswith(_NO_NAME)], "share memory"
            )
        except BackendUnavailable:
            self._is_known = True
            raise
        return [_CARD.unpack_from(text) for text in said], [text[_CARD.size :] for text in said]


class _Layout(NamedTuple):
    """The arguments of `create_segment`: see `Layout` in native/transport/shm/segment.h."""

    num_ranks: int
    group_size: int
    slot_bytes: int
    is_crowded: bool
    spin_micros: int


def _layout(place: HostTopology, rank: int, introductions: Sequence[bytes]) -> _Layout:
    """How the memory of the host of ``rank`` is laid out, from what each rank says of its processors.

    But for the number of ranks it is the same on all hosts: algorithms depend on it.
    """
    crowded = is_oversubscribed([CpuSet.unpack(text) for text in introductions], place.host_numbers())
    num_hosts = place.num_hosts
    return _Layout(
        num_ranks=len(place.neighbours(rank)),
        group_size=len(place.hosts),
        slot_bytes=_WIDE_SLOT_BYTES if crowded or num_hosts > 1 else _SLOT_BYTES,
        is_crowded=crowded,
        spin_micros=_SPIN_MICROS if crowded or num_hosts == 1 else _SPIN_MICROS_BETWEEN_HOSTS,
    )
