"""Rendezvous in a shared store that no rank serves: a file, or a store made by others."""

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
from ferrodist.rendezvous.environment import read_environment
from ferrodist.rendezvous.roll_call import (
    await_all,
    claim_rank,
    list_claims,
    network_id,
    note_rejection,
    publish_failure,
)
from ferrodist.rendezvous.rounds import left_stores, wait_for_next_round
from ferrodist.rendezvous.secret import make_secret, user_secret
from ferrodist.rendezvous.sockets import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.membership import JoinRequest, Membership
    from ferrodist.rendezvous.store import Store

LINGER_SECONDS = 2.0  # seconds that a leaving rank gives the store
_ABORT_LINGER_SECONDS = 0.2
_LOOPBACK = "127.0.0.1"
_INTERFACES = "/interfaces"  # the second stage of ranks of several hosts
_JOB_INFO_KEY = "ferrodist/charter"
_ANY_PORT = 9  # nothing is sent to it


class _JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The job's description, which rank 0 writes first."""

    job: str
    world_size: int
    made_secret: bytes
    nonce: bytes
    proof: bytes

    def __repr__(self) -> str:  # without the secret
        return f"_JobInfo(job={self.job!r}, world_size={self.world_size})"


def join_through_store(
    store: Store,
    request: JoinRequest,
    where: str,
    advice: str,
    *,
    on_leave: Callable[[float], None],
    server: str | None = None,
    is_private: bool,
) -> Membership:
    """Meet the other ranks in a store that no other job has used; all ranks call this, and all return or all raise.

    Errors are those of `rendezvous`. ``where`` and ``advice`` (for a store used before, a rank started twice) are for
    messages. ``on_leave(seconds)`` is called once, with how long the store should still be served: when this rank
    leaves it, or at once if ranks are missing. ``server`` is a host that all ranks have reached, if known.
    ``is_private`` says whether only this user can access the store. If it is, and no secret is set, rank 0 writes a new
    one there; if it is not, ranks without a secret prove that they know the secret of their user.
    """
    secret, name = (_create_job if request.rank == 0 else _join_job)(
        store, request, where, advice, is_private=is_private
    )

    def leave(linger: float) -> None:
        left_stores.add(name)
        on_leave(linger)

    claim_rank(store, request, where, advice)
    try:
        await_all(store, request, where)
        host = _agree_on_interfaces(store, request, where, server)
    except BaseException:
        leave(_ABORT_LINGER_SECONDS)
        raise
    return request.member(store, host, lambda: leave(LINGER_SECONDS), secret)


def _create_job(
    store: Store, request: JoinRequest, where: str, advice: str, *, is_private: bool
) -> tuple[bytes, bytes]:
    """Write the job's description as rank 0, and return the job secret and the store's name."""
    made_secret = make_secret().encode() if is_private and not request.secret else b""
    secret, nonce = request.secret or made_secret, os.urandom(32)
    info = msgspec.msgpack.encode(
        _JobInfo(
            job=request.job,
            world_size=request.world_size,
            made_secret=made_secret,
            nonce=nonce,
            proof=_secret_proof(secret or user_secret(), nonce),
        )
    )
    while True:
        current = store.compare_set(_JOB_INFO_KEY, b"", info, timeout=request.deadline.remaining())
        if current == info:
            return secret, nonce
        if _decode_job_info(current).nonce in left_stores:
            wait_for_next_round(where, request.deadline)
            continue
        message = f"{where}: another rank 0 has begun a rendezvous there; {advice}"
        note_rejection(store, message)
        raise RendezvousError(message, ranks=(0,))


def _join_job(store: Store, request: JoinRequest, where: str, advice: str, *, is_private: bool) -> tuple[bytes, bytes]:
    """Check this rank's request against the job's description, and return the job secret and the store's name."""
    while True:
        info = _decode_job_info(store.get(_JOB_INFO_KEY, timeout=request.deadline.remaining()))
        if info.nonce not in left_stores:
            break
        wait_for_next_round(where, request.deadline)
    who = f"{where}: rank {request.rank}"
    secret = request.secret or (info.made_secret if is_private else b"")
    refusal: DistributedError | None = None
    if not hmac.compare_digest(info.proof, _secret_proof(secret or user_secret(), info.nonce)):
        refusal = AuthenticationError(
            f"{who} has another job secret than rank 0, or only one of them has any, or none is set and they are "
            "processes of different users or hosts; set FERRODIST_SECRET to the same value on every rank "
            f"(`python -m ferrodist secret` prints a new one); {advice}",
            ranks=(request.rank,),
        )
    elif info.job != request.job:
        refusal = RendezvousError(
            f"{who} asked for job {request.job!r}, and rank 0 for job {info.job!r}: pass the same one on every rank;"
            f" {advice}",
            ranks=(request.rank,),
        )
    elif info.world_size != request.world_size:
        refusal = InvalidWorldSizeError(
            f"{who} was started with world size {request.world_size}, rank 0 with {info.world_size}; {advice}",
            ranks=(request.rank,),
        )
    if refusal is not None:
        note_rejection(store, refusal.message)
        raise refusal
    return secret, info.nonce


def _decode_job_info(data: bytes) -> _JobInfo:
    return msgspec.msgpack.decode(data, type=_JobInfo)


def _secret_proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"ferrodist charter\0" + nonce, "sha256")


def _agree_on_interfaces(store: Store, request: JoinRequest, where: str, server: str | None) -> str:
    """Return this rank's interface once every rank has found one; raise on all ranks if one has not."""
    if len({claim.network for claim in list_claims(store, request.world_size).values()}) == 1:
        return _LOOPBACK  # all ranks see the same claims, so none waits below
    try:
        host = _find_interface(store, request.world_size, request.deadline, server)
    except RendezvousError as error:
        refusal = RendezvousError(f"{where}: rank {request.rank}: {error.message}", ranks=(request.rank,))
        with contextlib.suppress(DistributedTimeoutError):
            publish_failure(store, refusal, stage=_INTERFACES)
        raise refusal from error
    await_all(store, request, where, stage=_INTERFACES)
    return host


def _find_interface(store: Store, world_size: int, deadline: Deadline, server: str | None = None) -> str:
    """Return the address at which the other ranks' hosts can reach this one; loopback if all are on this host."""
    own = network_id()
    others = sorted({claim.host for claim in list_claims(store, world_size).values() if claim.network != own})
    if not others:
        return _LOOPBACK
    for known in (read_environment().master_addr, server):  # more reliable than the hosts' names
        if known is not None:
            with contextlib.suppress(OSError):
                host = _route_interface(known, deadline)
                if not ipaddress.ip_address(host).is_loopback:
                    return host
    other = next((name for name in others if name != socket.gethostname()), None)
    if other is None:
        raise RendezvousError(
            f"another host has this one's name, {others[0]}, so it can't be found by it; set MASTER_ADDR to rank 0's"
            " address, or use init_method='tcp://host:port'"
        )
    try:
        return _route_interface(other, deadline)
    except OSError as error:
        raise RendezvousError(
            f"this host finds no way to host {other} ({error}); set MASTER_ADDR to rank 0's address, or use"
            " init_method='tcp://host:port'"
        ) from error


def _route_interface(host: str, deadline: Deadline) -> str:
    family, kind, protocol, _, address = resolve(host, _ANY_PORT, deadline, kind=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, but selects the route and the interface
        return str(probe.getsockname()[0])
