"""The native backend: a TCP control plane, and compiled engines for messages and collectives."""

from __future__ import annotations

import functools
import hmac
import logging
import os
import secrets
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer, Self, override

from ferrodist.backends.base import Backend, FastPath, NonBlockingBackend
from ferrodist.backends.delegating_backend import DelegatingBackend, delegated
from ferrodist.backends.group_observer import GroupObserver, PeerExit
from ferrodist.backends.native.binding import is_native_available, load, why_no_native
from ferrodist.backends.native.bootstrap import open_p2p_engine
from ferrodist.backends.native.engine import NativeEngine
from ferrodist.backends.native.p2p import NativeP2P
from ferrodist.backends.native.topology import HostTopology, address_of_interface, host_id
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import ANY_SOURCE, LOW_64_BITS, WORLD_GROUP_ID, group_of_tag
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.tcp.bootstrap import join_members
from ferrodist.backends.verification import CollectiveVerifier
from ferrodist.backends.weak import snapshot_weak, weak_method
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import BackendUnavailable, DistributedError, GroupAbortedError, describe_error
from ferrodist.rendezvous import Membership, rendezvous
from ferrodist.rendezvous.secret import resolve_secret, user_secret

if TYPE_CHECKING:
    import socket


_log = logging.getLogger(__name__)

# Stands in for the compiled engine if the group has failed before it was opened: nothing has a fast path.
_UNOPENED_ENGINE = SimpleNamespace(fast_send=lambda *_: None, fast_recv=lambda *_: None, try_send=lambda *_: False)
_NONCE_BYTES = 16


class NativeBackend(DelegatingBackend):
    """A rank of a group whose collectives and messages are the native engine's.

    Ranks of one host share memory: groups and sub-groups of them touch the network for no collective and no message.
    Ranks of different hosts are connected each to each, on the interface that leads to rank 0 or the one that the
    environment's FERRODIST_SOCKET_IFNAME names. The ends of groups and ranks are announced over TCP through rank 0, as
    in `TcpBackend`, whose arguments and errors these are.

    Args:
        shares_memory: Whether ranks of one host share memory; if not, all are connected by TCP.

    Raises:
        BackendUnavailable: This installation has no native engine, or the ranks of a host can't share memory.
        ValueError: FERRODIST_SOCKET_IFNAME names no interface here; the others raise BackendUnavailable with that.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: str | bytes | None = None,
        timeout: float | None = None,
        name: str = "world",
        job: str = "default",
        listener: socket.socket | None = None,
        connect_timeout: float | None = None,
        socket_buffer_bytes: int | None = None,
        shares_memory: bool = True,
    ) -> None:
        load()
        deadline = Deadline(resolve_timeout(timeout if connect_timeout is None else connect_timeout))
        control = TcpBackend(
            rank,
            world_size,
            address,
            secret=secret,
            timeout=timeout,
            name=name,
            job=job,
            listener=listener,
            connect_timeout=connect_timeout,
            socket_buffer_bytes=socket_buffer_bytes,
        )
        super().__init__(control)
        self._control: TcpBackend = control
        control.on_close(self._run_close_callbacks)  # at exit, the interpreter closes the control group
        self._p2p_engine: Any = _UNOPENED_ENGINE
        self._messages: TcpBackend | NativeP2P = control
        try:
            self._open(resolve_secret(secret), job, deadline, shares_memory=shares_memory)
        except GroupAbortedError:
            pass  # by a rank that had opened all and went ahead: the next call raises it
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, DistributedError):  # the others have not seen it
                reason = f"rank {rank} of group {name!r} can't open the native engine: {describe_error(error)}"
                control.abort(BackendUnavailable(reason, ranks=(rank,)))
            self.close()
            raise

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of all ranks that met; see `TcpBackend.from_membership`."""
        return join_members(cls, membership, timeout, deadline)

    def _open(self, secret: bytes, job: str, deadline: Deadline, *, shares_memory: bool) -> None:
        """Open the data plane, with the other ranks."""
        control = self._control
        self._engines = _NativeEngines(control)
        own_host = host_id() if shares_memory else self.rank.to_bytes(8, "little")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        payloads = control.verifier.verify(
            CollectiveSignature(operation="hosts", payload=nonce + own_host), deadline.remaining()
        )
        hosts = tuple(payload[_NONCE_BYTES:] for payload in payloads)
        interface = os.environ.get("FERRODIST_SOCKET_IFNAME")
        address = address_of_interface(interface) if interface else control.local_host()
        self._topology = HostTopology(hosts=hosts, address=address, secret=secret, job=job)
        p2p = NativeP2P(control)
        call = CollectiveSignature(operation="open messages")
        engine = open_p2p_engine(control, self._topology, weak_method(p2p.on_peer_event), call, deadline.remaining())
        p2p.open(engine)
        control.add_observer(self._engines)
        control.relays_messages = False
        self._p2p, self._messages, self._p2p_engine = p2p, p2p, engine
        self.verifier = CollectiveVerifier(self, first=control.verifier.reserve())
        if self._topology.num_hosts > 1:  # messages between hosts are not authenticated
            known = secret or user_secret()
            self.verification_key = hmac.digest(known, b"agreement\0" + b"".join(payloads), "sha256")
        self._equip(self, tuple(range(self.world_size))).open(
            CollectiveSignature(operation="open"), deadline.remaining()
        )

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        assert isinstance(subgroup, SubBackend)
        if isinstance(self._messages, NativeP2P):
            self._equip(subgroup, subgroup.root_ranks)

    def _equip(self, group: Backend, members: tuple[int, ...]) -> NativeEngine:
        """Give a group of these members its engine and its fast path."""
        topology = replace(self._topology, hosts=tuple(self._topology.hosts[member] for member in members))
        engine = NativeEngine(group, topology)
        self._engines.by_group[group.group_id] = engine
        group.use_engine("cpu", engine)
        p2p = self._p2p.tensor_p2p(group.group_id, group.rank, members)
        group.fast_path = FastPath(None, group.timeout, engine, p2p)
        return engine

    @property
    def failure(self) -> DistributedError | None:
        """Why the group can't be used any more, or None while it can."""
        return self._control.failure_of(WORLD_GROUP_ID)

    @override
    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        return self._control.failure_of(group_id)

    @override
    def close(self, timeout: float | None = None) -> None:
        self._control.close(timeout)

    @override
    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        self._engines.leave_subgroup(group_id)
        self._control.close_subgroup(group_id, members)

    # Messages. The compiled engine is called without a layer between; see docs/decisions/0059.

    @override
    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        ending = self._p2p_engine.fast_send(data, dst, tag, limit)
        if ending is not True:
            if ending is None:
                NonBlockingBackend.send(self, data, dst, tag=tag, timeout=timeout)
            else:
                self._p2p.raise_ending(ending, f"send to rank {dst}: it did not receive the message", dst, limit, 0)

    @override
    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        limit = self._timeout if timeout is None else timeout
        ending = self._p2p_engine.fast_recv(buffer, src, tag, limit)
        if type(ending) is int:
            return ending
        if ending is None:
            return NonBlockingBackend.recv(self, buffer, src, tag=tag, timeout=timeout)
        peer = "any rank" if src == ANY_SOURCE else f"rank {src}"
        size_bytes = memoryview(buffer).nbytes
        return self._p2p.raise_ending(ending, f"recv from {peer}: nothing came", src, limit, size_bytes)

    isend = delegated(Backend.isend, "_messages")
    irecv = delegated(Backend.irecv, "_messages")
    irecv_up_to = delegated(Backend.irecv_up_to, "_messages")
    post_persistent_recv = delegated(Backend.post_persistent_recv, "_messages")
    make_wait_event = delegated(Backend.make_wait_event, "_messages")

    @override
    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        return bool(self._p2p_engine.try_send(data, dst, group_of_tag(tag), tag & LOW_64_BITS))


class _NativeEngines(GroupObserver):
    """The engines of a group and its sub-groups, which learn from the control plane that their group has ended."""

    def __init__(self, control: TcpBackend) -> None:
        self._control = control
        self.by_group: weakref.WeakValueDictionary[int, NativeEngine] = weakref.WeakValueDictionary()

    def leave_subgroup(self, group_id: int) -> None:
        """Leave a sub-group."""
        engine = self.by_group.pop(group_id, None)
        if engine is not None:
            self._leave(group_id, engine)

    def _leave(self, group_id: int, engine: NativeEngine) -> None:
        failure = self._control.failures.get(group_id)
        if failure is not None:
            # The thread that found it may not be in `on_failed` yet: other ranks would take this one for the cause.
            engine.abort(failure)
        engine.leave()

    @override
    def on_failed(self, group_id: int, error: DistributedError) -> None:
        engine = self.by_group.get(group_id)
        if engine is not None:
            engine.abort(error)

    @override
    def on_peer_left(self, rank: int, peer_exit: PeerExit) -> None:
        if peer_exit.relay is None or rank == self._control.rank:
            return
        # The ranks of an engine that is being opened wait in shared memory for ranks that may have given up.
        for group_id, engine in snapshot_weak(self.by_group.items):
            if engine.is_opening and rank in self._control.members_of(group_id):
                self._control.fail_group(group_id, self._control.exit_error(group_id, rank, peer_exit))

    @override
    def on_closed(self) -> None:
        for group_id, engine in snapshot_weak(self.by_group.items):
            self._leave(group_id, engine)

    @override
    def on_forked(self) -> None:
        for engine in snapshot_weak(self.by_group.values):
            engine.stop()


class GlooBackend(NativeBackend):
    """The native engine over TCP alone, as gloo is: for hosts that can't share memory, and to compare.

    Arguments and errors are those of `NativeBackend`.
    """

    def __init__(self, rank: int, world_size: int, address: str, **settings: Any) -> None:
        super().__init__(rank, world_size, address, **{**settings, "shares_memory": False})

    @classmethod
    def from_env(cls, *, timeout: float | None = None, secret: str | bytes | None = None) -> GlooBackend:
        """Meet the other ranks by the environment's variables (torchrun's), and make a group of them.

        Args:
            timeout: Seconds for all ranks to meet, and the group's default for blocking calls.
            secret: The job secret; None takes FERRODIST_SECRET.

        Raises:
            RendezvousError: The environment lacks a variable; or, on every rank, some ranks did not come.
        """
        limit = resolve_timeout(timeout)
        deadline = Deadline(limit)
        membership = rendezvous(None, rank=None, world_size=None, timeout=deadline.remaining(), secret=secret)
        try:
            group = cls.from_membership(membership, limit, deadline)
        except BaseException:
            membership.close()
            raise
        group.on_close(membership.close)
        return group


def open_host_group(membership: Membership, timeout: float, deadline: Deadline) -> Backend:
    """Make the group of all ranks that met, for tensors on the host: native where it is installed, else TCP."""
    if not is_native_available() and membership.rank == 0 and membership.world_size > 1:
        _warn_of_slow_collectives()
    kind: type[NativeBackend | TcpBackend] = NativeBackend if is_native_available() else TcpBackend
    return kind.from_membership(membership, timeout, deadline)


@functools.cache
def _warn_of_slow_collectives() -> None:
    """Warn, once, of the cost of having no native engine."""
    _log.warning(
        "this installation of ferrodist has no native engine (%s): all messages go through rank 0 over TCP, and"
        " a small allreduce takes hundreds of times as long. With a C++ compiler, install it again without"
        " FERRODIST_NO_NATIVE; init_process_group('tcp') asks for this without the warning",
        why_no_native(),
    )
