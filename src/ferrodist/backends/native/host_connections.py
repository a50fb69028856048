"""TCP connections between ranks of different hosts, each to each."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ferrodist.backends.native.problems import MAX_TEXT_BYTES, check_problems
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.tcp.connection import tune
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, RendezvousError, ranks_text
from ferrodist.rendezvous.auth import Hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address

if TYPE_CHECKING:
    import socket

    from ferrodist.backends.base import Backend
    from ferrodist.backends.native.topology import HostTopology

_PROBLEM = "!"  # begins an error that is sent in place of an address
_POLL_INTERVAL_SECONDS = 0.05
_NOTICE_SECONDS = 1.0  # how long the notice of a rank's end may take to come after its connections have ended


def connect_hosts(group: Backend, topology: HostTopology, purpose: str, deadline: Deadline) -> list[int]:
    """Connect to every rank of other hosts that calls with the same ``purpose``.

    All ranks call it, and agree afterwards on whether all succeeded. Returns a descriptor for each rank, which the
    caller owns; -1 for ranks of this host. Raises BackendUnavailable on all ranks if one can't listen, and on this rank
    if it can't connect or be connected to; DistributedTimeoutError if another did not connect to it in time; or the
    group's failure. A rank that gets an error of its own ends the group.
    """
    if topology.num_hosts == 1:
        return [-1] * group.world_size
    connector = _Connector(group, topology, purpose)
    server: Listener | None = None
    try:
        try:
            server = Listener(topology.address, 0, secret=topology.secret, deadline=deadline)
            server.serve(connector.admit, connector.take)
            address = server.address
        except (DistributedError, OSError, RuntimeError) as error:  # RuntimeError: a thread can't be started
            address = f"{_PROBLEM}rank {group.rank}: {error}"
        call = CollectiveSignature(operation="connect hosts", payload=address.encode()[:MAX_TEXT_BYTES])
        addresses = [address.decode(errors="replace") for address in group.verifier.verify(call, deadline.remaining())]
        problems = [address[1:].encode() for address in addresses if address.startswith(_PROBLEM)]
        check_problems(group, problems, "connect hosts")
        assert server is not None
        connector.dial(addresses, deadline)
        connector.await_others(server, deadline)
        return connector.release()
    finally:
        if server is not None:
            server.close()
        connector.close()


class _Connector:
    """The connections of one rank as they are made: it dials lower ranks, and higher ones dial it."""

    def __init__(self, group: Backend, topology: HostTopology, purpose: str) -> None:
        self._group = group
        self._topology = topology
        self._purpose = purpose
        self._name = f"{group.name[:100]}:{group.group_id:x}"
        self._remote = sorted(set(range(group.world_size)) - set(topology.local_ranks(group.rank)))
        self._sockets: dict[int, socket.socket] = {}
        self._changed = threading.Condition()

    def admit(self, hello: Hello) -> None:
        """Raise unless ``hello`` is from a rank that this one waits for."""
        expected = (self._purpose, self._topology.job, self._name)
        if (hello.purpose, hello.job, hello.group) != expected or hello.rank not in self._remote:
            raise RendezvousError(
                f"rank {hello.rank} came for {hello.purpose} {hello.group!r} of job {hello.job!r}, but this is rank"
                f" {self._group.rank} of group {self._name!r} of job {self._topology.job!r}"
            )

    def take(self, sock: socket.socket, hello: Hello) -> None:
        """Add a connection."""
        with self._changed:
            if hello.rank in self._sockets:
                sock.close()
                return
            self._sockets[hello.rank] = sock
            self._changed.notify()

    def dial(self, addresses: list[str], deadline: Deadline) -> None:
        """Connect to the ranks before this one."""
        group, topology = self._group, self._topology
        for rank in self._remote:
            if rank < group.rank:
                host, port = parse_address(addresses[rank])
                hello = Hello(
                    purpose=self._purpose,
                    job=topology.job,
                    rank=group.rank,
                    world_size=group.world_size,
                    group=self._name,
                    address=addresses[rank],
                )
                try:
                    # It listened before it sent its address: if it refuses, it is gone.
                    sock = connect(
                        host, port, secret=topology.secret, hello=hello, deadline=deadline, retry_refused=False
                    )
                except (DistributedError, OSError) as error:
                    self._raise_failure(_NOTICE_SECONDS if isinstance(error.__cause__, ConnectionError) else 0.0)
                    check_problems(
                        group, [f"rank {group.rank}: connecting to rank {rank}: {error}".encode()], "connect hosts"
                    )
                with self._changed:
                    self._sockets[rank] = sock

    def await_others(self, server: Listener, deadline: Deadline) -> None:
        """Wait for the ranks after this one to connect to ``server``."""
        while True:
            with self._changed:
                seconds = min(_POLL_INTERVAL_SECONDS, deadline.remaining())
                self._changed.wait_for(lambda: len(self._sockets) == len(self._remote), seconds)
                missing = tuple(rank for rank in self._remote if rank not in self._sockets)
            if not missing:
                return
            self._raise_failure(0.0)
            if server.exhaustion is not None:
                check_problems(self._group, [f"rank {self._group.rank}: {server.exhaustion}".encode()], "connect hosts")
            if deadline.expired:
                raise DistributedTimeoutError(
                    f"connecting hosts in group {self._group.name!r}: {ranks_text(missing)} did not connect to rank"
                    f" {self._group.rank} within {deadline.timeout:g} s. Look at what is going on there, or pass a"
                    f" larger timeout. Reported by rank {self._group.rank}.",
                    ranks=missing,
                )

    def _raise_failure(self, patience: float) -> None:
        """Raise the group's failure, if it has failed, or does within so many seconds."""
        deadline = Deadline(patience)
        while self._group.failure is None and not deadline.expired:
            time.sleep(_NOTICE_SECONDS / 100)
        if self._group.failure is not None:
            raise self._group.failure.fresh()

    def release(self) -> list[int]:
        """Return the descriptors, which the caller owns from now on."""
        links = [-1] * self._group.world_size
        for rank, sock in self._sockets.items():
            tune(sock, self._group.timeout, None)
            links[rank] = sock.detach()
        return links

    def close(self) -> None:
        """Close the connections that were not released."""
        for sock in self._sockets.values():
            sock.close()
