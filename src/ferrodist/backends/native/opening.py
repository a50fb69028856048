"""How the ranks of a group come to share memory, and how those of different hosts connect.

The lowest rank of each host makes a memory that has no name and listens on a Unix socket whose name only the group
learns, in an agreement over its authenticated messages, together with a nonce. The others of its host connect, show the
nonce and are given the memory's descriptor. Ranks of different hosts connect over TCP and prove that they know the job
secret, as for everything else. A last agreement says whether all have succeeded, so that all go on or none does.
"""

from __future__ import annotations

import array
import contextlib
import functools
import operator
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.backends import mailbox
from ferrodist.backends.native.hosts import Place, agree_on, connect_hosts
from ferrodist.backends.native.library import load
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.call import Call

__all__ = ["open_communicator", "open_messages", "open_symmetric"]

_TOKEN_BYTES = 16
_PROCESSOR_BYTES = 64
_POLL_SECONDS = 0.05
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")  # nonce, rank

_PAGE_BYTES = 4096
_SLOT_BYTES = 256 * 1024
_WIDE_SLOT_BYTES = 512 * 1024
_SPIN_MICROS = 300


def open_communicator(group: Backend, place: Place, call: Call, timeout: float) -> Any:
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
    deadline = Deadline(timeout)

    def create(processors: Sequence[bytes]) -> int:
        return int(load().create_segment(*_layout(place, group.rank, processors)))

    with contextlib.ExitStack() as stack:

        def use(descriptor: int, processors: Sequence[bytes], _: int) -> tuple[int, _Layout]:
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            return kept, _layout(place, group.rank, processors)

        descriptor, layout = _share_memory(
            group, place, call, deadline, introduction=_processors(), create=create, use=use
        )
        links = connect_hosts(group, place, "collectives", deadline)
        return load().Communicator(descriptor, group.rank, place.host_numbers(), links, *layout)


def open_messages(group: Backend, place: Place, tell: Callable[..., None], call: Call, timeout: float) -> Any:
    """Make the engine's messenger for this rank; called on all ranks of a group.

    Args:
        group: The group.
        place: Where its ranks are.
        tell: Hears of what ranks do wrong: see `do_work` in native/bindings/messages.cpp.
        call: What the ranks compare.
        timeout: Seconds.

    Raises as `open_communicator`.
    """
    deadline = Deadline(timeout)
    local_ranks = place.neighbours(group.rank)
    local_indexes = [local_ranks.index(rank) if rank in local_ranks else -1 for rank in range(group.world_size)]

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_rings(len(local_ranks)))

    with contextlib.ExitStack() as stack:

        def use(descriptor: int, processors: Sequence[bytes], _: int) -> tuple[int, bool]:
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            return kept, _layout(place, group.rank, processors).is_crowded

        memory, is_crowded = _share_memory(
            group, place, call, deadline, introduction=_processors(), create=create, use=use
        )
        return load().Messenger(
            rank=group.rank,
            eager_bytes=mailbox.EAGER_LIMIT,
            max_unasked_bytes=mailbox.MAX_UNASKED_BYTES,
            is_crowded=is_crowded,
            spin_micros=_SPIN_MICROS,
            memory=memory,
            num_local=len(local_ranks),
            local_indexes=local_indexes,
            sockets=connect_hosts(group, place, "messages", deadline),
            tell=tell,
        )


def open_symmetric(
    group: Backend, place: Place, communicator: Any, call: Call, *, size_bytes: int, timeout: float
) -> Any:
    """Make symmetric memory of ``size_bytes`` a rank, in a group on one host; returns this rank's as a tensor of bytes.

    Raises as `open_communicator`.
    """
    stride = max(1, -(-size_bytes // _PAGE_BYTES)) * _PAGE_BYTES

    def create(_: Sequence[bytes]) -> int:
        return int(load().create_arena(stride, group.world_size))

    def use(descriptor: int, _: Sequence[bytes], number: int) -> Any:
        return communicator.map_arena(descriptor, number, stride, size_bytes)

    return _share_memory(group, place, call, Deadline(timeout), introduction=b"", create=create, use=use)


def _share_memory(
    group: Backend,
    place: Place,
    call: Call,
    deadline: Deadline,
    *,
    introduction: bytes,
    create: Callable[[Sequence[bytes]], int],
    use: Callable[[int, Sequence[bytes], int], Any],
) -> Any:
    """Have the lowest rank of each host create a memory, and every rank of the host use it.

    Args:
        group: The group.
        place: Where its ranks are.
        call: What the ranks compare.
        deadline: For all of it.
        introduction: What this rank tells the others beforehand.
        create: Makes the memory, told every rank's introduction, and returns its descriptor.
        use: Maps it, told its descriptor, the introductions, and a number that only this memory has.
    """
    local_ranks = place.neighbours(group.rank)
    leader = local_ranks[0]
    name, nonce = secrets.token_bytes(_TOKEN_BYTES), secrets.token_bytes(_TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        is_leader = group.rank == leader
        listener = stack.enter_context(_listen(name)) if is_leader and len(local_ranks) > 1 else None
        said = group.agreement.reach(call.with_payload(name + nonce + introduction), deadline.remaining())
        name, nonce = said[leader][:_TOKEN_BYTES], said[leader][_TOKEN_BYTES : 2 * _TOKEN_BYTES]
        introductions = [payload[2 * _TOKEN_BYTES :] for payload in said]
        result, problem = None, ""
        try:
            if is_leader:
                descriptor = create(introductions)
                stack.callback(os.close, descriptor)
                if listener is not None:
                    _hand_out(group, listener, nonce, descriptor, local_ranks[1:], deadline=deadline)
            else:
                descriptor = _fetch(group, leader, name, nonce, deadline)
                stack.callback(os.close, descriptor)
            result = use(descriptor, introductions, int.from_bytes(nonce[:8], "little") or 1)
        except DistributedError as error:
            group.abort(error)
            raise
        except OSError as error:
            problem = f"rank {group.rank}: {error}"
    agree_on(group, problem, "share memory", deadline)
    return result


class _Layout(NamedTuple):
    """The arguments of `create_segment`: see `Layout` in native/transport/shm/segment.h."""

    num_ranks: int
    group_size: int
    slot_bytes: int
    is_crowded: bool
    spin_micros: int


def _layout(place: Place, rank: int, processors: Sequence[bytes]) -> _Layout:
    """How the memory of the host of ``rank`` is laid out, from the processors that each rank may use.

    But for the number of ranks it is the same on all hosts: algorithms depend on it.
    """
    is_crowded = False
    for host in set(place.hosts):
        local_ranks = [other for other, its_host in enumerate(place.hosts) if its_host == host]
        union = functools.reduce(operator.or_, (int.from_bytes(processors[other], "little") for other in local_ranks))
        is_crowded = is_crowded or len(local_ranks) > max(1, union.bit_count())
    is_wide = is_crowded or place.num_hosts > 1
    return _Layout(
        num_ranks=len(place.neighbours(rank)),
        group_size=len(place.hosts),
        slot_bytes=_WIDE_SLOT_BYTES if is_wide else _SLOT_BYTES,
        is_crowded=is_crowded,
        spin_micros=_SPIN_MICROS,
    )


def _processors() -> bytes:
    """The processors this process may use, as a mask; a quota of the control group cuts it."""
    usable = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        usable = usable[: max(1, int(quota) // int(period))]
    mask = 0
    for processor in usable:
        mask |= 1 << processor % (8 * _PROCESSOR_BYTES)
    return mask.to_bytes(_PROCESSOR_BYTES, "little")


def _address(name: bytes) -> bytes:
    return b"\0ferrodist-" + name.hex().encode()


def _listen(name: bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(name))
    listener.listen(128)
    return listener


def _hand_out(
    group: Backend,
    listener: socket.socket,
    nonce: bytes,
    descriptor: int,
    ranks: Sequence[int],
    *,
    deadline: Deadline,
) -> None:
    """The lowest rank of a host: give the memory to the others."""
    missing = set(ranks)
    while missing:
        listener.settimeout(min(_POLL_SECONDS, deadline.remaining()))
        try:
            sock = listener.accept()[0]
        except TimeoutError:
            if group.failure is not None:
                raise group.failure.fresh() from None
            if deadline.expired:
                raise _late(group, tuple(sorted(missing)), deadline) from None
            continue
        with sock:
            sock.settimeout(deadline.remaining())
            greeting = sock.recv(_GREETING.size)
            if len(greeting) != _GREETING.size:
                continue
            shown, rank = _GREETING.unpack(greeting)
            if not secrets.compare_digest(shown, nonce) or rank not in missing:
                continue
            sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
            missing.discard(rank)


def _fetch(group: Backend, leader: int, name: bytes, nonce: bytes, deadline: Deadline) -> int:
    """Every other rank: get the memory's descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(deadline.remaining())
        sock.connect(_address(name))
        sock.sendall(_GREETING.pack(nonce, group.rank))
        while True:
            sock.settimeout(min(_POLL_SECONDS, deadline.remaining()))
            try:
                _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            except TimeoutError:
                if group.failure is not None:
                    raise group.failure.fresh() from None
                if deadline.expired:
                    raise _late(group, (leader,), deadline) from None
                continue
            if not descriptors:
                raise ConnectionError(f"rank {leader} closed its socket without handing out the memory")
            os.set_inheritable(descriptors[0], False)
            return descriptors[0]


def _late(group: Backend, ranks: tuple[int, ...], deadline: Deadline) -> DistributedTimeoutError:
    names = ", ".join(map(str, ranks))
    return DistributedTimeoutError(
        f"sharing memory in group {group.name!r}: rank {names} did not come for it within {deadline.timeout:g} s",
        ranks=ranks,
    )
