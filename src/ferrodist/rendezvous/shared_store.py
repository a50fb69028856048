"""Meeting in a store that every rank opens by itself, and none serves: a file, or one that others have made."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import msgspec

from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    InvalidWorldSizeError,
    RendezvousError,
)
from ferrodist.rendezvous import rounds
from ferrodist.rendezvous.environment import read_environment
from ferrodist.rendezvous.roll_call import await_all, cancel_claim, claim_rank, list_claims, network_id, note_rejection
from ferrodist.rendezvous.secret import make_secret, secret_or_users
from ferrodist.rendezvous.sockets import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.roll_call import JoinRequest, Membership
    from ferrodist.rendezvous.store import Store

LINGER = 2.0
"""Seconds that a rank which leaves gives the store."""

_HASTE = 0.2
_LOOPBACK = "127.0.0.1"
_INTERFACES = "/interfaces"  # the second stage of ranks of several hosts
_CHARTER_KEY = "ferrodist/charter"


class _JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 writes into a store before all else."""

    job: str
    world_size: int
    made_secret: bytes
    nonce: bytes
    proof: bytes

    def __repr__(self) -> str:  # without the secret
        return f"_Charter(job={self.job!r}, world_size={self.world_size})"


def meet(
    store: Store,
    joining: JoinRequest,
    where: str,
    advice: str,
    *,
    depart: Callable[[float], None],
    server: str | None = None,
    is_private: bool,
) -> Membership:
    """Meet the other ranks in a store; every rank calls this, and all of them return or all raise.

    Args:
        store: It; nobody has met there before.
        joining: What this rank asks for.
        where: Names job and place in messages.
        advice: What to check when somebody has met there before, or a rank was started twice.
        depart: Called once, by the rank when it is done with the store or at once if not all have come, with the
            seconds it may take.
        server: Name or address of a host that all ranks have reached; None where they know of none.
        is_private: Whether nobody but this user can read the store and write to it. Then rank 0 of ranks without a
            secret makes one and puts it there; else they prove that they know their user's secret.

    Raises:
        RendezvousError, AuthenticationError, InvalidWorldSizeError: As `rendezvous` does.
    """
    secret, name = (_found if joining.rank == 0 else _check)(store, joining, where, advice, is_private=is_private)

    def leave(patience: float) -> None:
        rounds.note_left(name)
        depart(patience)

    claim_rank(store, rank=joining.rank, where=where, advice=advice, deadline=joining.deadline)
    try:
        await_all(store, rank=joining.rank, world_size=joining.world_size, where=where, deadline=joining.deadline)
        host = _agree_on_interfaces(store, joining, where, server)
    except BaseException:
        leave(_HASTE)
        raise
    return joining.member(store, host, lambda: leave(LINGER), secret)


def _found(store: Store, joining: JoinRequest, where: str, advice: str, *, is_private: bool) -> tuple[bytes, bytes]:
    """Write the charter as rank 0, and return the job secret and the store's name."""
    made = make_secret().encode() if is_private and not joining.secret else b""
    secret, nonce = joining.secret or made, os.urandom(32)
    charter = msgspec.msgpack.encode(
        _JobInfo(
            job=joining.job,
            world_size=joining.world_size,
            made_secret=made,
            nonce=nonce,
            proof=_file_proof(secret_or_users(secret), nonce),
        )
    )
    while True:
        current = store.compare_set(_CHARTER_KEY, b"", charter, timeout=joining.deadline.remaining())
        if current == charter:
            return secret, nonce
        if rounds.has_left(_read_charter(current).nonce) and not joining.deadline.expired:
            rounds.pause(where, joining.deadline)
            continue
        message = f"{where}: another rank 0 has begun a rendezvous there; {advice}"
        note_rejection(store, message)
        raise RendezvousError(message, ranks=(0,))


def _check(store: Store, joining: JoinRequest, where: str, advice: str, *, is_private: bool) -> tuple[bytes, bytes]:
    """Compare this rank with the charter, and return the job secret and the store's name."""
    while True:
        charter = _read_charter(store.get(_CHARTER_KEY, timeout=joining.deadline.remaining()))
        if not rounds.has_left(charter.nonce):
            break
        rounds.pause(where, joining.deadline)
    who = f"{where}: rank {joining.rank}"
    secret = joining.secret or (charter.made_secret if is_private else b"")
    refusal: DistributedError | None = None
    if not hmac.compare_digest(charter.proof, _file_proof(secret_or_users(secret), charter.nonce)):
        refusal = AuthenticationError(
            f"{who} has another job secret than rank 0, or only one of them has any, or none is set and they are "
            "processes of different users or hosts; set FERRODIST_SECRET to the same value on every rank "
            f"(`python -m ferrodist secret` prints a new one); {advice}",
            ranks=(joining.rank,),
        )
    elif charter.job != joining.job:
        refusal = RendezvousError(f"{who}: it belongs to job {charter.job!r}; {advice}", ranks=(joining.rank,))
    elif charter.world_size != joining.world_size:
        refusal = InvalidWorldSizeError(
            f"{who} was started with world size {joining.world_size}, rank 0 with {charter.world_size}; {advice}",
            ranks=(joining.rank,),
        )
    if refusal is not None:
        note_rejection(store, refusal.message)
        raise refusal
    return secret, charter.nonce


def _read_charter(data: bytes) -> _JobInfo:
    return msgspec.msgpack.decode(data, type=_JobInfo)


def _file_proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"ferrodist charter\0" + nonce, "sha256")


def _agree_on_interfaces(store: Store, joining: JoinRequest, where: str, server: str | None) -> str:
    """Return this rank's `_interface` when every rank has found one; raise on all ranks when some rank has not."""
    if len({claim.network for claim in list_claims(store, joining.world_size).values()}) == 1:
        return _LOOPBACK  # all ranks see the same claims, so none of them waits below
    try:
        host = _interface(store, joining.world_size, joining.deadline, server)
    except RendezvousError as error:
        told = RendezvousError(f"{where}: rank {joining.rank}: {error.message}", ranks=(joining.rank,))
        with contextlib.suppress(DistributedTimeoutError):
            cancel_claim(store, told, stage=_INTERFACES)
        raise told from error
    await_all(
        store,
        rank=joining.rank,
        world_size=joining.world_size,
        where=where,
        deadline=joining.deadline,
        stage=_INTERFACES,
    )
    return host


def _interface(store: Store, world_size: int, deadline: Deadline, server: str | None = None) -> str:
    """Return the address on which the other ranks' hosts can reach this one; loopback if all are this one."""
    own = network_id()
    others = sorted({claim.host for claim in list_claims(store, world_size).values() if claim.network != own})
    if not others:
        return _LOOPBACK
    for known in (read_environment().master_addr, server):  # to all hosts, more surely than each other's names
        if known is not None:
            with contextlib.suppress(OSError):
                host = _interface_to(known, deadline)
                if not ipaddress.ip_address(host).is_loopback:
                    return host
    if others[0] == socket.gethostname():
        raise RendezvousError(
            f"another host has this one's name, {others[0]}, so it can't be found by it; set MASTER_ADDR to rank 0's"
            " address, or use init_method='tcp://host:port'"
        )
    try:
        return _interface_to(others[0], deadline)
    except OSError as error:
        raise RendezvousError(
            f"this host finds no way to host {others[0]} ({error}); set MASTER_ADDR to rank 0's address, or use"
            " init_method='tcp://host:port'"
        ) from error


def _interface_to(host: str, deadline: Deadline) -> str:
    family, kind, protocol, _, address = resolve(host, 9, deadline, kind=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it picks the route, and with it the interface
        return str(probe.getsockname()[0])
