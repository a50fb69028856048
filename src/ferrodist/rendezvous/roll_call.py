"""The roll call: the ranks of a job make sure, through a store, that every one of them is there.

Each rank claims its number, then counts itself. The count alone decides: the rank that completes it publishes the
verdict "complete"; a rank whose deadline passes first publishes a failure instead, unless the count is complete. The
claims only name missing ranks. The verdict is written once, by compare-and-set, so all ranks end with the same one
whatever the order of their deadlines, even if rank 0 is dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ferrodist.deadline import Elapsed, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError, RendezvousError, error_to_wire, ranks_text
from ferrodist.rendezvous.auth import JOIN_REPLY_DECODER, JoinReply
from ferrodist.rendezvous.store import PrefixStore, Store, is_server_silent
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.rendezvous.membership import JoinRequest


_log = logging.getLogger(__name__)

_KEY_PREFIX = "ferrodist/attendance"
_CLAIM_STAGE = ""  # the first stage, and for most jobs the only one
_MAX_REJECTIONS = 32

# Rank 0's deadline has usually just passed too, so the others let it publish first.
_COORDINATOR_GRACE = 0.1
_PUBLISH_TIMEOUT = 0.2
_NOTE_TIMEOUT = 0.1

_NEVER = b"\0"


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A process's claim of a rank."""

    host: str
    network: str
    process: int
    token: str


def network_id() -> str:
    """Return an id of this boot and network namespace: equal for processes with the same loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - it is no path
    except OSError:
        return socket.gethostname()


_CLAIM_DECODER = msgspec.msgpack.Decoder(Claim)


def claim_rank(store: Store, request: JoinRequest, where: str, advice: str) -> None:
    """Claim a rank, which makes this process a member."""
    view = PrefixStore(store, _KEY_PREFIX)
    # Compared with an impossible value, a key is read without waiting for it.
    _raise_failure(view.compare_set("verdict", _NEVER, _NEVER, timeout=request.deadline.remaining()))
    own = Claim(socket.gethostname(), network_id(), os.getpid(), secrets.token_hex(8))
    claim = msgspec.msgpack.encode(own)
    stored = view.compare_set(f"rank/{request.rank}", b"", claim, timeout=request.deadline.remaining())
    if stored != claim:
        first = _CLAIM_DECODER.decode(stored)
        message = (
            f"{where}: rank {request.rank} is taken by process {first.process} on {first.host}, so process "
            f"{own.process} on {own.host} cannot have it too; {advice}"
        )
        note_rejection(store, message)
        raise RendezvousError(message, ranks=(request.rank,))


def await_all(store: Store, request: JoinRequest, where: str, *, stage: str = _CLAIM_STAGE) -> None:
    """Wait until all ranks have reached a stage; each member calls this once per stage."""
    view = PrefixStore(store, _KEY_PREFIX + stage)
    if view.add("present", 1, timeout=request.deadline.remaining()) >= request.world_size:
        _publish(view, JoinReply(), request.deadline.remaining())
    try:
        verdict = _await_verdict(store, view, request, where)
    except DistributedTimeoutError as error:
        if is_server_silent(error):
            raise
        verdict = _publish(view, _decide(store, request, where, stage), _PUBLISH_TIMEOUT)
    _raise_failure(verdict)


def _await_verdict(store: Store, view: Store, request: JoinRequest, where: str) -> bytes:
    """Wait for the verdict; if that takes long, the first waiting rank logs the missing ones."""
    world_size, deadline = request.world_size, request.deadline
    grace = _COORDINATOR_GRACE if request.rank else 0.0
    warning = long_wait()
    if warning.remaining() < deadline.remaining():
        try:
            return view.get("verdict", timeout=warning.remaining())
        except DistributedTimeoutError as error:
            if is_server_silent(error):
                raise
        claimed = list_claims(store, world_size)
        missing = [other for other in range(world_size) if other not in claimed]
        if request.rank == min(claimed, default=request.rank):
            have_not = "has not" if len(missing) == 1 else "have not"
            absent = f"{ranks_text(missing)} of {world_size} {have_not} come yet"
            if not missing:
                absent = f"all {world_size} ranks have claimed their numbers, and not all of them went on"
            rejections = _list_rejections(store)
            turned_away = f". Turned away: {rejections}" if rejections else ""
            _log.warning("%s: %s, after %s%s", where, absent, Elapsed.of(deadline), turned_away)
    return view.get("verdict", timeout=deadline.remaining() + grace)


def publish_failure(store: Store, error: DistributedError, *, stage: str = _CLAIM_STAGE) -> None:
    """Make every rank's `await_all` of a stage raise ``error``, for a rank that won't reach it."""
    _publish(PrefixStore(store, _KEY_PREFIX + stage), JoinReply(error_to_wire(error)), _PUBLISH_TIMEOUT)


def list_claims(store: Store, world_size: int) -> dict[int, Claim]:
    """Return the present claims, by rank."""
    view = PrefixStore(store, _KEY_PREFIX)
    claims = {}
    for rank in range(world_size):
        data = _get_if_present(view, f"rank/{rank}")
        if data:
            claims[rank] = _CLAIM_DECODER.decode(data)
    return claims


def count_departure(store: Store, world_size: int, *, timeout: float) -> bool:
    """Count a member that has left the store; return whether it was the last one."""
    num_members = len(list_claims(store, world_size))  # before the last one may remove the store
    return PrefixStore(store, _KEY_PREFIX).add("left", 1, timeout=timeout) >= num_members


def note_rejection(store: Store, reason: str) -> None:
    """Record why a process was rejected, for the message about the missing rank."""
    view = PrefixStore(store, _KEY_PREFIX)
    with contextlib.suppress(DistributedTimeoutError):
        index = view.add("rejections", 1, timeout=_NOTE_TIMEOUT)
        view.set(
            f"rejection/{index % _MAX_REJECTIONS}", reason.encode("utf-8", "backslashreplace"), timeout=_NOTE_TIMEOUT
        )


def _list_rejections(store: Store) -> str:
    """Return the rejected processes and reasons, as text."""
    view = PrefixStore(store, _KEY_PREFIX)
    rejections = [_get_if_present(view, f"rejection/{slot}").decode() for slot in range(_MAX_REJECTIONS)]
    return "; ".join(sorted(set(filter(None, rejections))))


def _decide(store: Store, request: JoinRequest, where: str, stage: str) -> JoinReply:
    world_size, deadline = request.world_size, request.deadline
    num_present = int(_get_if_present(PrefixStore(store, _KEY_PREFIX + stage), "present") or b"0")
    if num_present >= world_size:
        return JoinReply()
    claimed = list_claims(store, world_size)
    missing = tuple(rank for rank in range(world_size) if rank not in claimed)
    rejections = _list_rejections(store)
    if missing:
        absent = f"{ranks_text(missing)} of {world_size}"
        advice = "Check that each of them was started, and with the same address, world size, job and secret."
    else:  # ended or stopped between claiming and counting itself: which of them is not known
        absent = f"{world_size - num_present} of {counted(world_size, 'rank')}, after claiming a number,"
        advice = "Look at the logs of all ranks for one that ended or hangs."
    message = (
        f"{where}: {absent} did not come within {deadline.elapsed():.1f} s (limit {deadline.timeout:.1f} s). "
        + (f"Turned away: {rejections}. " if rejections else "No process was turned away. ")
        + advice
    )
    return JoinReply(error_to_wire(RendezvousError(message, ranks=missing)))


def _publish(view: Store, verdict: JoinReply, timeout: float) -> bytes:
    """Write the verdict unless one exists; return the effective one."""
    return view.compare_set("verdict", b"", msgspec.msgpack.encode(verdict), timeout=timeout)


def _raise_failure(verdict: bytes) -> None:
    if verdict:
        JOIN_REPLY_DECODER.decode(verdict).check()


def _get_if_present(store: Store, key: str) -> bytes:
    """Return the value of a key, or nothing if it does not exist now."""
    try:
        return store.get(key, timeout=0)
    except DistributedTimeoutError as error:
        if is_server_silent(error):
            raise
        return b""
