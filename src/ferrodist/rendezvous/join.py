"""`rendezvous`: from an address and a rank number to the proven membership of a job; `enter_job` does not wait."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import operator
import os
import socket
from typing import TYPE_CHECKING

import msgspec

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    RendezvousError,
)
from ferrodist.rendezvous.attendance import await_all, call_off, claim_rank, leave, note_rejection, roll
from ferrodist.rendezvous.environment import Environment, read_environment
from ferrodist.rendezvous.file_store import FileStore
from ferrodist.rendezvous.handshake import Hello, check_hello
from ferrodist.rendezvous.listener import format_address, parse_address
from ferrodist.rendezvous.resolution import resolve
from ferrodist.rendezvous.secret import make_secret, resolve_secret
from ferrodist.rendezvous.store import PrefixStore, Store
from ferrodist.rendezvous.tcp_store import TcpStore, TcpStoreServer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Membership", "enter_job", "rendezvous"]

_LOOPBACK = "127.0.0.1"
_LINGER = 2.0
_HASTE = 0.2
_LOOPBACK_HINT = " No FERRODIST_SECRET is set here: without one, rank 0 can listen on a loopback address only."
_INTERFACES = "/interfaces"  # the second stage of ranks of several hosts
_CHARTER_KEY = "ferrodist/charter"


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
        afterwards their calls raise. Of a file rendezvous the last rank to close removes the file. Rank 0 of
        a job that was entered stops to serve at once. More calls do nothing.
        """
        self.on_close()


class _Charter(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 writes into a store file before all else."""

    job: str
    world_size: int
    made_secret: bytes
    nonce: bytes
    proof: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Which rank asks to join which job."""

    rank: int
    world_size: int
    local_rank: int | None
    job: str
    secret: bytes
    deadline: Deadline

    def member(self, store: Store, host: str, on_close: Callable[[], None], secret: bytes) -> Membership:
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


def rendezvous(
    init_method: str | None,
    *,
    rank: int | None,
    world_size: int | None,
    timeout: float,
    secret: str | bytes | None,
    job: str | None = None,
) -> Membership:
    """Meet the other ranks of the job; every rank calls this, and all of them return or all raise.

    ``tcp://host:port``: rank 0 serves a store there, the others connect. ``file://path``: a file that all
    ranks can reach; without a secret, rank 0 makes one and puts it into the file, which only this user can
    read (mode 0600). So other users of the machine, and other hosts that the file system is not shared with,
    cannot pose as ranks; who can read this user's files can. ``env://`` or None:
    ``tcp://MASTER_ADDR:MASTER_PORT``. Under torchrun, whose agent occupies that port, ranks of one host use a
    file in the folder that torchrun makes for the attempt, ranks of several hosts FERRODIST_PORT on
    MASTER_ADDR, or the port after MASTER_PORT.

    Args:
        init_method: Where to meet.
        rank: This process's rank; None takes RANK.
        world_size: Number of ranks; None takes WORLD_SIZE.
        timeout: Seconds to wait for the others.
        secret: The job secret; see `resolve_secret`.
        job: Name of the job; None takes FERRODIST_JOB, else TORCHELASTIC_RUN_ID with the restart count, else
            "default".

    Raises:
        RendezvousError: Ranks are missing (named, in the same words on every rank), a rank number is claimed
            twice, rank 0 does not answer, a file is left over, or a launcher's variable is missing.
        AuthenticationError: Another secret than the others', or none where one is needed.
        ProtocolError: Something else is at that address, or another version.
        InvalidRankError: The rank does not fit the world size.
        InvalidWorldSizeError: It differs from rank 0's.
        ValueError: ``init_method`` cannot be read, or the job's name is too long.
        TypeError: An argument is of another type than it says here.
    """
    deadline = Deadline(timeout)
    environment = read_environment()
    place = _place(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    scheme, where = _parse(init_method, environment)
    try:
        if scheme == "file":
            return _join_file(where, place)
        return _join_tcp(where, place, shared_port=environment.agent_store)
    except DistributedTimeoutError as error:
        hint = "" if place.secret or scheme == "file" else _LOOPBACK_HINT
        raise _unanswered(place, f"{scheme}://{where}", error, hint) from error


def enter_job(
    address: str | None,
    *,
    rank: int | None,
    world_size: int | None,
    timeout: float,
    secret: str | bytes | None,
    job: str | None = None,
    listener: socket.socket | None = None,
) -> Membership:
    """Take a place in a job whose ranks come and go: waits for rank 0 to serve the store, and for no other rank.

    A process that is started again may take the place of the one before. The store ends with rank 0's process.

    Args:
        address: "host:port" where rank 0 serves and the others dial; None takes what `rendezvous` would under
            ``env://``, but never a file.
        rank: As for `rendezvous`, and so are ``world_size``, ``secret`` and ``job``.
        world_size: Number of ranks.
        timeout: Seconds to wait for rank 0.
        secret: The job secret.
        job: Name of the job.
        listener: For rank 0: a bound, listening socket to serve on; the membership closes it.

    Raises:
        RendezvousError, AuthenticationError, ProtocolError, InvalidRankError, InvalidWorldSizeError, ValueError,
            TypeError: As `rendezvous` does.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address must be 'host:port' or None, not {type(address).__name__}")
    deadline = Deadline(timeout)
    environment = read_environment()
    place = _place(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    where = _address_from_environment(environment) if address is None else address
    try:
        if place.rank:
            client = _dial(where, place)
            return place.member(client, client.local_host, client.close, place.secret)
        named = f"job {place.job!r} at tcp://{where}"
        server = _open_server(where, place, named, shared_port=environment.agent_store, sock=listener)
        return place.member(server.store, server.host, server.close, place.secret)
    except DistributedTimeoutError as error:
        raise _unanswered(place, f"tcp://{where}", error, "" if place.secret else _LOOPBACK_HINT) from error


def _unanswered(place: _Place, where: str, error: DistributedError, hint: str) -> RendezvousError:
    text = f"job {place.job!r} at {where}: rank 0 did not answer rank {place.rank}: {error.message}{hint}"
    return RendezvousError(text, ranks=(0,))


def _place(
    environment: Environment,
    deadline: Deadline,
    *,
    rank: int | None,
    world_size: int | None,
    job: str | None,
    secret: str | bytes | None,
) -> _Place:
    number = environment.rank if rank is None else _whole("rank", rank)
    size = environment.world_size if world_size is None else _whole("world_size", world_size)
    if job is not None and not isinstance(job, str):
        raise TypeError(f"job must be text or None, not {type(job).__name__}")
    if number is None or size is None:
        absent = " and ".join(name for name, value in (("RANK", number), ("WORLD_SIZE", size)) if value is None)
        raise RendezvousError(
            f"the environment does not say {absent}: start the program with torchrun or `python -m ferrodist "
            "run`, or pass rank and world_size"
        )
    if size < 1:
        raise InvalidWorldSizeError(f"the world size is {size}; a job has at least 1 rank")
    if not 0 <= number < size:
        raise InvalidRankError(
            f"rank {number} is not in a job of {size} ranks; ranks go from 0 to {size - 1}", ranks=(number,)
        )
    name = job or os.environ.get("FERRODIST_JOB")
    if not name and environment.run_id:
        name = f"{environment.run_id}.{environment.restart_count}"
    # Here, so that rank 0 and the ranks of a file rendezvous learn it as early as the others.
    check_hello(Hello(purpose="store", job=name or "default", rank=number, world_size=size, group=""))
    return _Place(
        rank=number,
        world_size=size,
        local_rank=environment.local_rank if environment.rank == number else None,
        job=name or "default",
        secret=resolve_secret(secret),
        deadline=deadline,
    )


def _whole(name: str, value: int) -> int:
    """Return the argument as a plain int, whatever kind of whole number it is."""
    if not isinstance(value, bool):  # True would pass for rank 1
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be a whole number or None, not {value!r} of type {type(value).__name__}")


def _parse(init_method: str | None, environment: Environment) -> tuple[str, str]:
    """Return the scheme, "tcp" or "file", and the address or path."""
    if init_method is None or init_method == "env://":
        return _from_environment(environment)
    if not isinstance(init_method, str):
        raise TypeError(
            f"init_method must be text (env://, tcp://host:port or file:///path) or None, not "
            f"{type(init_method).__name__}"
        )
    scheme, _, where = init_method.partition("://")
    if scheme == "file" and where:
        return scheme, where
    if scheme == "tcp":
        parse_address(where)
        return scheme, where
    raise ValueError(f"init_method={init_method!r}: write env://, tcp://host:port or file:///path")


def _from_environment(environment: Environment) -> tuple[str, str]:
    if environment.agent_store and environment.single_host and environment.attempt_folder:
        return "file", f"{environment.attempt_folder}/ferrodist-rendezvous"
    return "tcp", _address_from_environment(environment)


def _address_from_environment(environment: Environment) -> str:
    host, port = environment.master_addr, environment.master_port
    if host is None or port is None:
        absent = " and ".join(name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None)
        raise RendezvousError(
            f"the environment does not say {absent}: start the program with torchrun or `python -m ferrodist "
            "run`, or pass init_method='tcp://host:port'"
        )
    if environment.agent_store:
        own = os.environ.get("FERRODIST_PORT", "")
        port = parse_address(f"FERRODIST_PORT:{own}")[1] if own else port + (1 if port < 65535 else -1)
    return format_address(host, port)


def _join_tcp(address: str, place: _Place, *, shared_port: bool) -> Membership:
    where = f"job {place.job!r} at tcp://{address}"
    if place.rank == 0:
        return _serve(address, place, where, shared_port=shared_port)
    client = _dial(address, place)
    try:
        _attend(client, place, where)
    except BaseException:
        client.close()
        raise
    return place.member(client, client.local_host, client.close, place.secret)


def _dial(address: str, place: _Place) -> TcpStore:
    return TcpStore(
        address,
        secret=place.secret,
        job=place.job,
        rank=place.rank,
        world_size=place.world_size,
        timeout=place.deadline.timeout,
    )


def _serve(address: str, place: _Place, where: str, *, shared_port: bool) -> Membership:
    server = _open_server(address, place, where, shared_port=shared_port)
    try:
        _attend(server.store, place, where)
    except DistributedError:
        server.close(linger=_LINGER)  # the others are to read why
        raise
    except BaseException:
        server.close()
        raise
    return place.member(server.store, server.host, lambda: server.close(linger=_LINGER), place.secret)


def _open_server(
    address: str, place: _Place, where: str, *, shared_port: bool, sock: socket.socket | None = None
) -> TcpStoreServer:
    host, port = parse_address(address)
    if port == 0 and place.world_size > 1 and sock is None:
        raise ValueError(f"{where}: port 0 is a different one on every rank; choose a free port")
    try:
        return TcpStoreServer(
            host,
            port,
            secret=place.secret,
            job=place.job,
            world_size=place.world_size,
            sock=sock,
            max_connections=max(4096, 8 * place.world_size),
            on_rejection=note_rejection,
            deadline=place.deadline,
        )
    except RendezvousError as error:
        hint = (
            "set FERRODIST_PORT to a free port on every rank (torchrun's agent has MASTER_PORT)"
            if shared_port
            else "rank 0 must run on the host that the address names, be started once, and find the port free"
        )
        raise RendezvousError(f"{where}: rank 0 {error.message}; {hint}", ranks=(0,)) from error


def _attend(store: Store, place: _Place, where: str) -> None:
    advice = "start each rank once, and give each process a rank number of its own"
    claim_rank(store, rank=place.rank, where=where, advice=advice, deadline=place.deadline)
    await_all(store, rank=place.rank, world_size=place.world_size, where=where, deadline=place.deadline)


def _join_file(path: str, place: _Place) -> Membership:
    where = f"job {place.job!r} at file://{path}"
    advice = f"start each rank once; if {path} is left over from an earlier run, remove it"
    store = FileStore(path, timeout=place.deadline.timeout)
    secret = (_found if place.rank == 0 else _check)(store, place, where, advice)
    claim_rank(store, rank=place.rank, where=where, advice=advice, deadline=place.deadline)

    @functools.cache  # closing twice must not count as two ranks
    def depart(patience: float = _LINGER) -> None:
        # A file that could not be removed is reported by the next run that finds it.
        with contextlib.suppress(DistributedTimeoutError):
            if leave(store, place.world_size, timeout=patience):
                store.remove(timeout=patience)
        store.close()

    try:
        await_all(store, rank=place.rank, world_size=place.world_size, where=where, deadline=place.deadline)
        host = _agree_on_interfaces(store, place, where)
    except BaseException:
        depart(_HASTE)
        raise
    return place.member(store, host, depart, secret)


def _found(store: FileStore, place: _Place, where: str, advice: str) -> bytes:
    """Write the charter as rank 0, and return the job secret."""
    made = b"" if place.secret else make_secret().encode()
    secret, nonce = place.secret or made, os.urandom(32)
    charter = msgspec.msgpack.encode(
        _Charter(
            job=place.job,
            world_size=place.world_size,
            made_secret=made,
            nonce=nonce,
            proof=_file_proof(secret, nonce),
        )
    )
    if store.compare_set(_CHARTER_KEY, b"", charter, timeout=place.deadline.remaining()) != charter:
        message = f"{where}: another rank 0 has begun a rendezvous there; {advice}"
        note_rejection(store, message)
        raise RendezvousError(message, ranks=(0,))
    return secret


def _check(store: FileStore, place: _Place, where: str, advice: str) -> bytes:
    """Compare this rank with the charter, and return the job secret."""
    data = store.get(_CHARTER_KEY, timeout=place.deadline.remaining())
    charter = msgspec.msgpack.decode(data, type=_Charter)
    who = f"{where}: rank {place.rank}"
    secret = place.secret or charter.made_secret
    refusal: DistributedError | None = None
    if not hmac.compare_digest(charter.proof, _file_proof(secret, charter.nonce)):
        refusal = AuthenticationError(
            f"{who} has another job secret than rank 0, or only one of them has any; set FERRODIST_SECRET to "
            f"the same value on every rank, or on none; {advice}",
            ranks=(place.rank,),
        )
    elif charter.job != place.job:
        refusal = RendezvousError(f"{who}: the file belongs to job {charter.job!r}; {advice}", ranks=(place.rank,))
    elif charter.world_size != place.world_size:
        refusal = InvalidWorldSizeError(
            f"{who} was started with world size {place.world_size}, rank 0 with {charter.world_size}; {advice}",
            ranks=(place.rank,),
        )
    if refusal is not None:
        note_rejection(store, refusal.message)
        raise refusal
    return secret


def _file_proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"ferrodist charter\0" + nonce, "sha256")


def _agree_on_interfaces(store: FileStore, place: _Place, where: str) -> str:
    """Return this rank's `_interface` when every rank has found one; raise on all ranks when some rank has not."""
    if len({claim.host for claim in roll(store, place.world_size).values()}) == 1:
        return _LOOPBACK  # all ranks see the same claims, so none of them waits below
    try:
        host = _interface(store, place.world_size, place.deadline)
    except RendezvousError as error:
        told = RendezvousError(f"{where}: rank {place.rank}: {error.message}", ranks=(place.rank,))
        with contextlib.suppress(DistributedTimeoutError):
            call_off(store, told, stage=_INTERFACES)
        raise told from error
    await_all(
        store,
        rank=place.rank,
        world_size=place.world_size,
        where=where,
        deadline=place.deadline,
        stage=_INTERFACES,
    )
    return host


def _interface(store: FileStore, world_size: int, deadline: Deadline) -> str:
    """Return the address on which the other ranks' hosts can reach this one; loopback if all are this one."""
    others = sorted({claim.host for claim in roll(store, world_size).values()} - {socket.gethostname()})
    if not others:
        return _LOOPBACK
    try:
        family, kind, protocol, _, address = resolve(others[0], 9, deadline, kind=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it picks the route, and with it the interface
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"this host finds no way to host {others[0]} ({error}); use init_method='tcp://host:port'"
        ) from error
