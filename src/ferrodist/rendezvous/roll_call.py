"""How the ranks of a job make sure, through a store, that every one of them is there.

Each rank claims its number, then counts itself. The count alone decides: the rank that completes it publishes
the verdict "complete"; one whose deadline passes first publishes a failure instead, unless the count is
complete. The claims only name who is missing. The verdict is written once, by compare-and-set, so all ranks
end with the same one whatever the order of their deadlines, also when the coordinator is dead.

A rank's place in a job: what it asks for, and what it has when the others are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ferrodist.deadline import Elapsed, long_wait
from ferrodist.errors import DistributedTimeoutError, RendezvousError, error_to_wire, ranks_text
from ferrodist.rendezvous.auth import JoinReply, read_verdict
from ferrodist.rendezvous.store import PrefixStore, Store
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError

_log = logging.getLogger(__name__)

_FOLDER = "ferrodist/attendance"
_CLAIMED = ""  # the first stage, for most jobs the only one
_REJECTIONS_KEPT = 32

# Rank 0's deadline has usually just passed too, so others give it this long to speak first.
_COORDINATOR_GRACE = 0.1
_PUBLISH_TIMEOUT = 0.2
_NOTE_TIMEOUT = 0.1

_NEVER = b"\0"


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Who says to be a rank.

    Args:
        host: Name of its host.
        network: See `network_id`: hosts, and containers, may have one name.
        process: Its process number there.
        token: Random, so that two claims always differ.
    """

    host: str
    network: str
    process: int
    token: str


def network_id() -> str:
    """What is equal for processes with the same loopback interface: they see this boot, in this network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - it is no path
    except OSError:
        return socket.gethostname()


_CLAIM_DECODER = msgspec.msgpack.Decoder(Claim)


def claim_rank(store: Store, *, rank: int, where: str, advice: str, deadline: Deadline) -> None:
    """Claim a rank number, which makes this process a member.

    Args:
        store: The job's store, without a prefix.
        rank: The number.
        where: Names job and address in messages.
        advice: What to check when the number is taken.
        deadline: For the whole rendezvous.

    Raises:
        RendezvousError: The number is taken, or the rendezvous has failed already.
    """
    desk = PrefixStore(store, _FOLDER)
    # Compared with what it cannot hold, a key is read without being waited for.
    _raise_failure(desk.compare_set("verdict", _NEVER, _NEVER, timeout=deadline.remaining()))
    mine = Claim(socket.gethostname(), network_id(), os.getpid(), secrets.token_hex(8))
    claim = msgspec.msgpack.encode(mine)
    current = desk.compare_set(f"rank/{rank}", b"", claim, timeout=deadline.remaining())
    if current != claim:
        first = _CLAIM_DECODER.decode(current)
        message = (
            f"{where}: rank {rank} is taken by process {first.process} on {first.host}, so process "
            f"{mine.process} on {mine.host} cannot have it too; {advice}"
        )
        note_rejection(store, message)
        raise RendezvousError(message, ranks=(rank,))


def await_all(
    store: Store, *, rank: int, world_size: int, where: str, deadline: Deadline, stage: str = _CLAIMED
) -> None:
    """Return once all ranks have come here; each member calls this once for each stage.

    Args:
        store: The job's store, without a prefix.
        rank: This rank.
        world_size: Number of ranks.
        where: Names job and address in messages.
        deadline: For the whole rendezvous.
        stage: Of the rendezvous; it has a verdict of its own.

    Raises:
        RendezvousError: Not all came, in the same words on every rank.
        DistributedTimeoutError: The store itself did not answer.
    """
    desk = PrefixStore(store, _FOLDER + stage)
    if desk.add("present", 1, timeout=deadline.remaining()) >= world_size:
        _publish(desk, JoinReply(), deadline.remaining())
    try:
        verdict = _await_verdict(store, desk, rank=rank, world_size=world_size, where=where, deadline=deadline)
    except DistributedTimeoutError as error:
        if error.ranks:  # the store's server itself is silent
            raise
        verdict = _publish(desk, _conclude(store, world_size, where, deadline, stage), _PUBLISH_TIMEOUT)
    _raise_failure(verdict)


def _await_verdict(store: Store, desk: Store, *, rank: int, world_size: int, where: str, deadline: Deadline) -> bytes:
    """Wait for the verdict; where that takes long, the first rank that waits names those that are missing."""
    grace = _COORDINATOR_GRACE if rank else 0.0
    warning = long_wait()
    if warning.remaining() < deadline.remaining():
        try:
            return desk.get("verdict", timeout=warning.remaining())
        except DistributedTimeoutError as error:
            if error.ranks:  # the store's server itself is silent
                raise
        claimed = list_claims(store, world_size)
        missing = [other for other in range(world_size) if other not in claimed]
        if missing and rank == min(claimed, default=rank):
            have_not = "has not" if len(missing) == 1 else "have not"
            turned_away = _turned_away(store)
            _log.warning(
                "%s: %s of %d %s come yet, after %s%s",
                *(where, ranks_text(missing), world_size, have_not, Elapsed.of(deadline)),
                f". Turned away: {turned_away}" if turned_away else "",
            )
    return desk.get("verdict", timeout=deadline.remaining() + grace)


def cancel_claim(store: Store, error: DistributedError, *, stage: str = _CLAIMED) -> None:
    """Have every rank's `await_all` of a stage raise ``error``; for a rank that will not come to it."""
    _publish(PrefixStore(store, _FOLDER + stage), JoinReply(error_to_wire(error)), _PUBLISH_TIMEOUT)


def list_claims(store: Store, world_size: int) -> dict[int, Claim]:
    """Return the claims there are now, by rank."""
    desk = PrefixStore(store, _FOLDER)
    claims = {}
    for rank in range(world_size):
        data = _peek(desk, f"rank/{rank}")
        if data:
            claims[rank] = _CLAIM_DECODER.decode(data)
    return claims


def leave(store: Store, world_size: int, *, timeout: float) -> bool:
    """Say that a member is done with the store; returns whether it was the last one."""
    num_members = len(list_claims(store, world_size))  # before the last one may remove the store
    return PrefixStore(store, _FOLDER).add("left", 1, timeout=timeout) >= num_members


def note_rejection(store: Store, reason: str) -> None:
    """Keep the reason why a process was turned away, for the message about the rank that will be missing."""
    desk = PrefixStore(store, _FOLDER)
    with contextlib.suppress(DistributedTimeoutError):
        number = desk.add("rejections", 1, timeout=_NOTE_TIMEOUT)
        desk.set(
            f"rejection/{number % _REJECTIONS_KEPT}", reason.encode("utf-8", "backslashreplace"), timeout=_NOTE_TIMEOUT
        )


def _turned_away(store: Store) -> str:
    """Which processes were turned away, and why."""
    desk = PrefixStore(store, _FOLDER)
    rejections = [_peek(desk, f"rejection/{slot}").decode() for slot in range(_REJECTIONS_KEPT)]
    return "; ".join(sorted(set(filter(None, rejections))))


def _conclude(store: Store, world_size: int, where: str, deadline: Deadline, stage: str) -> JoinReply:
    num_present = int(_peek(PrefixStore(store, _FOLDER + stage), "present") or b"0")
    if num_present >= world_size:
        return JoinReply()
    claimed = list_claims(store, world_size)
    missing = tuple(rank for rank in range(world_size) if rank not in claimed)
    turned_away = _turned_away(store)
    if missing:
        who = f"{ranks_text(missing)} of {world_size}"
    else:  # ended or stopped between claiming and counting itself: which of them is not known
        who = f"{world_size - num_present} of {counted(world_size, 'rank')}, after claiming a number,"
    message = (
        f"{where}: {who} did not come within {deadline.elapsed():.1f} s (limit "
        f"{deadline.timeout:.1f} s). "
        + (f"Turned away: {turned_away}. " if turned_away else "No process was turned away. ")
        + "Check that each of them was started, and with the same address, world size, job and secret."
    )
    return JoinReply(error_to_wire(RendezvousError(message, ranks=missing)))


def _publish(desk: Store, verdict: JoinReply, timeout: float) -> bytes:
    """Write the verdict if there is none yet; returns the one that counts."""
    return desk.compare_set("verdict", b"", msgspec.msgpack.encode(verdict), timeout=timeout)


def _raise_failure(verdict: bytes) -> None:
    if verdict:
        read_verdict(verdict).check()


def _peek(store: Store, key: str) -> bytes:
    """Return the value of a key, or nothing if it does not exist now."""
    try:
        return store.get(key, timeout=0)
    except DistributedTimeoutError as error:
        if error.ranks:
            raise
        return b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's place in a job: of `rendezvous` when all ranks have met, of `enter_job` before.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        local_rank: Its number on its host, where the launcher said so.
        job: Name of the job.
        secret: The job secret; may be empty when all ranks share a host.
        store: The job's store; other jobs in the same place do not see its keys.
        host: The address on which this rank's own listeners should bind, so that the other ranks can reach
            them.
        on_close: What `close` does; the rendezvous fills it in.
    """

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes = dataclasses.field(repr=False)
    store: Store
    host: str
    on_close: Callable[[], None] = dataclasses.field(repr=False)

    def close(self) -> None:
        """Let go of the store.

        Rank 0 of a TCP rendezvous serves on for up to 2 s, or until the other ranks have closed theirs;
        afterwards their calls raise. Of a file rendezvous the last rank to close removes the file. A store that
        was there before stays as it is. Rank 0 of a job that was entered stops to serve at once. More calls do
        nothing.
        """
        self.on_close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Which rank asks to join which job."""

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes = dataclasses.field(repr=False)
    deadline: Deadline

    def member(self, store: Store, host: str, on_close: Callable[[], None], secret: bytes) -> Membership:
        """What the rank is then."""
        process = os.getpid()

        def close() -> None:
            if os.getpid() == process:  # a forked child is no rank
                on_close()

        return Membership(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            job=self.job,
            secret=secret,
            store=PrefixStore(store, f"job/{self.job}"),
            host=host,
            on_close=close,
        )
