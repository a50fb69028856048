"""The native engine as a backend."""

from __future__ import annotations

import hmac
import os
import secrets
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.backends.engine import FastPath
from ferrodist.backends.lifecycle import snapshot_weak
from ferrodist.backends.mailbox_backend import CLOSED, PeerExit
from ferrodist.backends.native.binding import load
from ferrodist.backends.native.bootstrap import open_messages
from ferrodist.backends.native.collectives import NativeEngine
from ferrodist.backends.native.p2p import MessagesBackend
from ferrodist.backends.native.topology import HostTopology, address_of_interface, host_id
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import GroupAbortedError
from ferrodist.rendezvous import rendezvous
from ferrodist.rendezvous.secret import resolve_secret, secret_or_user_secret

if TYPE_CHECKING:
    import socket

    from ferrodist.backends.base import Backend
    from ferrodist.errors import DistributedError

_NONCE_BYTES = 16


class NativeBackend(MessagesBackend):
    """A rank of a group whose collectives and messages are the native engine's.

    Ranks of one host share memory: groups and sub-groups of them touch the network for no collective and no message.
    Ranks of different hosts are connected each to each, on the interface that leads to rank 0 or the one that the
    environment's FERRODIST_SOCKET_IFNAME names. The news of groups and ranks that end goes over TCP through rank 0, as
    in `TcpBackend`, whose arguments and errors these are.

    Args:
        shares_memory: Whether ranks of one host share memory; if not, all are connected by TCP.

    Raises:
        BackendUnavailable: This installation has no native engine, or the ranks of a host can't share memory.
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
        self._engines_by_group: weakref.WeakValueDictionary[int, NativeEngine] = (
            weakref.WeakValueDictionary()
        )  # by group
        self._hosts: tuple[bytes, ...] = ()
        super().__init__(
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
        try:
            own_host = host_id() if shares_memory else rank.to_bytes(8, "little")
            nonce = secrets.token_bytes(_NONCE_BYTES)
            said = self.agreement.reach(
                CollectiveSignature(operation="hosts", payload=nonce + own_host), deadline.remaining()
            )
            self._hosts = tuple(payload[_NONCE_BYTES:] for payload in said)
            self._place = HostTopology(
                hosts=self._hosts, address=self._own_address(), secret=resolve_secret(secret), job=job
            )
            call = CollectiveSignature(operation="open messages")
            self.use_messenger(open_messages(self, self._place, self.weak_blame(), call, deadline.remaining()))
            if self._place.num_hosts > 1:  # messages between them go over connections that nothing protects
                known = secret_or_user_secret(self._place.secret)
                self.agreement_key = hmac.digest(known, b"agreement\0" + b"".join(said), "sha256")
            self._equip(self, self.rank, tuple(range(world_size))).open(
                CollectiveSignature(operation="open"), deadline.remaining()
            )
        except GroupAbortedError:
            pass  # by a rank that had all it needed and went ahead: the next call says so
        except BaseException:
            self.close()
            raise

    @override
    def equip_subgroup(self, subgroup: Backend) -> None:
        assert isinstance(subgroup, SubBackend)
        self._equip(subgroup, subgroup.rank, subgroup.root_ranks)

    def _equip(self, group: Backend, rank: int, members: tuple[int, ...]) -> NativeEngine:
        """Give a group of these members its engine and its fast path."""
        place = replace(self._place, hosts=tuple(self._hosts[member] for member in members))
        engine = self._engines_by_group[group.group_id] = NativeEngine(group, place)
        group.use_engine("cpu", engine)
        group.fast_path = FastPath(None, group.timeout, engine, self.make_tensor_p2p(group.group_id, rank, members))
        return engine

    def _own_address(self) -> str:
        """Where other hosts reach this rank: on the interface that leads to rank 0, unless the user names one."""
        interface = os.environ.get("FERRODIST_SOCKET_IFNAME")
        if interface:
            return address_of_interface(interface)
        for link in self._links.values():
            return str(link.sock.getsockname()[0])
        return "127.0.0.1"

    # The ends of groups reach their engines.

    def _fail_group(self, group_id: int, error: DistributedError) -> bool:
        is_first = super()._fail_group(group_id, error)
        engine = self._engines_by_group.get(group_id)
        if engine is not None and is_first:
            engine.abort(error)
        return is_first

    def _peer_left(self, group_id: int, rank: int, departure: PeerExit = CLOSED) -> None:
        super()._peer_left(group_id, rank, departure)
        if departure.relay is None:
            return
        for opening, engine in snapshot_weak(
            self._engines_by_group.items
        ):  # their ranks wait in memory for who may have given up
            if engine.is_opening and rank != self.rank and rank in self._members.get(opening, ()):
                self._fail_group(opening, self._told(opening, rank, departure))

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:
        """Leave a sub-group, and its engine."""
        engine = self._engines_by_group.pop(group_id, None)
        if engine is not None:
            engine.leave()
        super().close_subgroup(group_id, members)

    def _close_groups(self) -> bool:
        is_first = super()._close_groups()
        if is_first:
            for engine in snapshot_weak(self._engines_by_group.values):
                engine.leave()
        return is_first

    def _forget_in_child(self) -> None:
        super()._forget_in_child()
        for engine in snapshot_weak(self._engines_by_group.values):
            engine.stop()


class GlooBackend(NativeBackend):
    """The native engine over TCP alone, as gloo is: for hosts that can't share memory, and to compare.

    Arguments and errors are those of `NativeBackend`.
    """

    def __init__(self, rank: int, world_size: int, address: str, **settings: Any) -> None:
        super().__init__(rank, world_size, address, **{**settings, "shares_memory": False})

    @classmethod
    def from_env(cls, *, timeout: float | None = None, secret: str | bytes | None = None) -> GlooBackend:
        """Meet the other ranks as the environment says (torchrun's variables), and make a group of them.

        Args:
            timeout: Seconds for all ranks to meet, and the group's default for blocking calls.
            secret: The job secret; None takes FERRODIST_SECRET.

        Raises:
            ValueError: The environment lacks a variable.
            RendezvousError: On every rank, when some did not come.
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
