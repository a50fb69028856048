"""The opening of the native engine by the ranks of a group: shared memory on each host, and connections between hosts.

The lowest rank of each host creates an anonymous memory and listens on a Unix socket. It announces the socket's name
and a nonce to the group, in a collective call over the group's authenticated messages. The other ranks of its host
connect, present the nonce and receive the memory's descriptor. Ranks of different hosts connect over TCP and prove that
they know the job secret. In a last collective call all learn whether all have succeeded: all go on, or none does.
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
from ferrodist.backends.native.host_connections import connect_hosts
from ferrodist.backends.native.problems import check_problems, raise_if_any_failed
from ferrodist.backends.native.shared_view import ContiguousSharedView
from ferrodist.backends.native.topology import CpuSet, HostTopology, is_oversubscribed
from ferrodist.backends.verification import left_reason
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.backends.signature import CollectiveSignature

_NAME_BYTES = 16
_NO_NAME = bytes(_NAME_BYTES)
_HELLO = struct.Struct(f"<{_NAME_BYTES}s{fd_passing.NONCE_BYTES}sI")  # name of the rank's socket, nonce, user id

_SLOT_BYTES = 256 * 1024
_WIDE_SLOT_BYTES = 512 * 1024
_SPIN_MICROS = 300
_SPIN_MICROS_BETWEEN_HOSTS = 3000  # see [Note: spinning on connections] in native/transport/fabric.cpp


def open_communicator(group: Backend, topology: HostTopology, call: CollectiveSignature, timeout: float) -> Any:
    """Open this rank's compiled communicator; all ranks of a group call it.

    Ranks that make another collective than ``call`` get the same error as without this step. Raises BackendUnavailable
    on all ranks if some can't share memory or connect.
    """

    def create(processors: Sequence[bytes]) -> int:
        return int(load().create_segment(*_layout(topology, group.rank, processors)))

    with _SharedMemorySetup(group, topology, call, timeout) as setup:
        memory = setup.share_memory(CpuSet.of_this_process().pack(), create)
        links = connect_hosts(group, topology, "collectives", setup.deadline)
        layout = _layout(topology, group.rank, memory.introductions)
        engine = setup.attempt(
            lambda: load().Communicator(memory.descriptor, group.rank, topology.host_leaders(), links, *layout)
        )
        setup.agree()
        return engine


def open_p2p_engine(
    group: Backend,
    topology: HostTopology,
    on_peer_event: Callable[..., None],
    call: CollectiveSignature,
    timeout: float,
) -> Any:
    """Open this rank's compiled p2p engine; all ranks of a group call it, with errors as in `open_communicator`.

    ``on_peer_event`` is called when ranks misbehave: see `do_work` in native/bindings/p2p.cpp.
    """
    local_ranks = topology.local_ranks(group.rank)
    local_indexes = [local_ranks.index(rank) if rank in local_ranks else -1 for rank in range(group.world_size)]

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_rings(len(local_ranks)))

    with _SharedMemorySetup(group, topology, call, timeout) as setup:
        memory = setup.share_memory(CpuSet.of_this_process().pack(), create)
        sockets = connect_hosts(group, topology, "messages", setup.deadline)
        engine = setup.attempt(
            lambda: load().P2PEngine(
                rank=group.rank,
                eager_bytes=mailbox.EAGER_LIMIT,
                max_unexpected_bytes=mailbox.MAX_UNEXPECTED_BYTES,
                is_oversubscribed=_layout(topology, group.rank, memory.introductions).is_oversubscribed,
                spin_micros=_SPIN_MICROS,
                memory=memory.descriptor,
                num_local=len(local_ranks),
                local_indexes=local_indexes,
                sockets=sockets,
                on_event=on_peer_event,
            )
        )
        setup.agree()
        return engine


def open_symmetric(
    group: Backend,
    topology: HostTopology,
    communicator: Any,
    call: CollectiveSignature,
    *,
    size_bytes: int,
    joined: Sequence[tuple[int, int]],
    timeout: float,
) -> tuple[Any, list[ContiguousSharedView]]:
    """Allocate symmetric memory on each rank, in a group on one host; errors as in `open_communicator`.

    Returns this rank's ``size_bytes`` as a tensor of bytes, and for each part in ``joined`` (start and size, in whole
    pages) a view of this part of all ranks' memory.
    """
    page_bytes = load().PAGE_BYTES
    stride = max(1, -(-size_bytes // page_bytes)) * page_bytes

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_arena(stride, group.world_size))

    with _SharedMemorySetup(group, topology, call, timeout) as setup:
        memory = setup.share_memory(b"", create)
        tensor = setup.attempt(lambda: communicator.map_arena(memory.descriptor, memory.memory_id, stride, size_bytes))
        ends = stride * group.world_size
        views = setup.attempt(
            lambda: [
                ContiguousSharedView(memory.descriptor, range(start, ends, stride), part_bytes)
                for start, part_bytes in joined
            ]
        )
        setup.agree()
        return tensor, views


class _Memory(NamedTuple):
    """The result of `_SharedMemorySetup.share_memory`."""

    descriptor: int | None  # owned by the setup; None on a rank that could not get it
    memory_id: int  # an id other than 0, the same on all ranks of the host
    introductions: list[bytes]  # by rank


class _SharedMemorySetup:
    """Steps that the ranks of a group take together: all succeed, or all raise the same error. A context manager.

    Errors of the system on this rank are reported to all in the next collective call. Any other exception, such as an
    interruption, ends the group, since others may wait for this rank elsewhere. ``timeout`` is for all steps, in
    seconds.
    """

    def __init__(self, group: Backend, topology: HostTopology, call: CollectiveSignature, timeout: float) -> None:
        self.deadline = Deadline(timeout)
        self._group = group
        self._topology = topology
        self._call = call
        self._problem = ""
        self._all_ranks_raise = False  # whether the other ranks raise the error of this one, too
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        if error is None or self._all_ranks_raise:
            return
        if isinstance(error, DistributedError):
            self._group.abort(error)
        else:
            self._group.abort(left_reason(self._group.rank, self._call, error))

    def attempt(self, step: Callable[[], Any]) -> Any:
        """Take a step of this rank alone; None if the system refuses it, or refused an earlier one."""
        if self._problem:
            return None
        try:
            return step()
        except DistributedError:
            raise
        except (OSError, MemoryError) as error:
            # Ranks report a failure of another one in the same words, which appear once.
            is_own = not isinstance(error, ConnectionError)
            reason = str(error) or type(error).__name__
            self._problem = f"rank {self._group.rank}: {reason}" if is_own else reason
            return None

    def agree(self) -> None:
        """Return if all ranks have succeeded so far, else raise BackendUnavailable on all; all call it."""
        try:
            raise_if_any_failed(self._group, self._problem, "share memory", self.deadline)
        except BackendUnavailable:
            self._all_ranks_raise = True
            raise

    def share_memory(self, introduction: bytes, create: Callable[[Sequence[bytes]], int]) -> _Memory:
        """Have the lowest rank of each host create a memory, and pass its descriptor to every rank of the host.

        Every rank sends its ``introduction`` to all beforehand; ``create`` is given them and returns the descriptor.
        """
        group = self._group
        local_ranks = self._topology.local_ranks(group.rank)
        leader = local_ranks[0]
        name, nonce = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(fd_passing.NONCE_BYTES)
        sock: Any = None
        if len(local_ranks) > 1:  # before the others connect
            sock = self.attempt(lambda: fd_passing.listen(name) if group.rank == leader else fd_passing.make_socket())
        if sock is not None:
            self._stack.enter_context(sock)
        hellos, introductions = self._introduce(_HELLO.pack(name, nonce, os.geteuid()) + introduction)
        name, nonce, user = hellos[leader]
        if group.rank == leader:
            descriptor = self.attempt(lambda: create(introductions))
        else:
            descriptor = self.attempt(
                lambda: fd_passing.recv_fd(group, sock, leader, name, nonce, user=user, deadline=self.deadline)
            )
        if descriptor is not None:
            self._stack.callback(os.close, descriptor)
            if group.rank == leader and sock is not None:
                users = {hellos[rank][2] for rank in local_ranks}
                self.attempt(
                    lambda: fd_passing.send_fd(
                        group, sock, nonce, descriptor, ranks=local_ranks[1:], users=users, deadline=self.deadline
                    )
                )
        if sock is not None:
            sock.close()  # a rank that still waits learns that nothing comes
        if self._topology.num_hosts > 1:
            self.agree()
        return _Memory(descriptor, int.from_bytes(nonce[:8], "little") or 1, introductions)

    def _introduce(self, own: bytes) -> tuple[list[tuple[bytes, bytes, int]], list[bytes]]:
        """Exchange hellos and introductions; BackendUnavailable on all ranks if one has a problem."""
        if self._problem:
            own = _NO_NAME + self._problem.encode()[: _HELLO.size + CpuSet.size() - _NAME_BYTES]
        answers = self._group.verifier.verify(self._call.with_payload(own), self.deadline.remaining())
        try:
            check_problems(
                self._group, [text[_NAME_BYTES:] for text in answers if text.startswith(_NO_NAME)], "share memory"
            )
        except BackendUnavailable:
            self._all_ranks_raise = True
            raise
        return [_HELLO.unpack_from(text) for text in answers], [text[_HELLO.size :] for text in answers]


class _Layout(NamedTuple):
    """The arguments of `create_segment`: see `Layout` in native/transport/shm/group_memory.h."""

    num_ranks: int
    group_size: int
    slot_bytes: int
    is_oversubscribed: bool
    spin_micros: int


def _layout(topology: HostTopology, rank: int, introductions: Sequence[bytes]) -> _Layout:
    """The layout of the memory of the host of ``rank``, given each rank's CPU set.

    Except for the number of ranks it is the same on all hosts: algorithms depend on it.
    """
    oversubscribed = is_oversubscribed([CpuSet.unpack(text) for text in introductions], topology.host_leaders())
    num_hosts = topology.num_hosts
    return _Layout(
        num_ranks=len(topology.local_ranks(rank)),
        group_size=len(topology.hosts),
        slot_bytes=_WIDE_SLOT_BYTES if oversubscribed or num_hosts > 1 else _SLOT_BYTES,
        is_oversubscribed=oversubscribed,
        spin_micros=_SPIN_MICROS if oversubscribed or num_hosts == 1 else _SPIN_MICROS_BETWEEN_HOSTS,
    )
