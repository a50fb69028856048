"""`rendezvous`: from an address and a rank number to the proven membership of a job; `enter_job` does not wait."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous import rounds
from ferrodist.rendezvous.auth import Hello, check_hello
from ferrodist.rendezvous.environment import Environment, read_environment
from ferrodist.rendezvous.file_store import FileStore
from ferrodist.rendezvous.listener import parse_address
from ferrodist.rendezvous.roll_call import JoinRequest, await_all, cancel_claim, claim_rank, leave, note_rejection
from ferrodist.rendezvous.secret import resolve_secret
from ferrodist.rendezvous.shared_store import LINGER, meet
from ferrodist.rendezvous.sockets import format_address
from ferrodist.rendezvous.tcp_store import TcpStore, TcpStoreServer
from ferrodist.wording import counted

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ferrodist.rendezvous.roll_call import Membership
    from ferrodist.rendezvous.store import Store

_LOOPBACK_HINT = " No FERRODIST_SECRET is set here: without one, rank 0 can listen on a loopback address only."

_OTHERS_END = 2 * LINGER
"""Seconds that rank 0 of a next round gives another process, which was rank 0 of the last one, to end its store."""


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
    joining = _joining(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    scheme, where = _parse(init_method, environment)
    try:
        if scheme == "file":
            return _join_file(where, joining)
        return _join_tcp(where, joining, shared_port=environment.agent_store)
    except DistributedTimeoutError as error:
        hint = "" if joining.secret or scheme == "file" else _LOOPBACK_HINT
        raise _unanswered(joining, f"{scheme}://{where}", error, hint) from error


def rendezvous_in(
    store: Store,
    where: str,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    secret: str | bytes | None,
    job: str,
    server: str | None = None,
    is_private: bool = False,
) -> Membership:
    """`rendezvous` in a store that is there already; the caller closes it, after the membership.

    Without a secret, rank 0 makes one and puts it into the store where that is private. Else the ranks prove that they
    know their user's secret, which those of other hosts don't: such jobs need a secret.

    Args:
        store: It. Nobody has met in it before.
        where: What messages call it.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.
        secret: The job secret; see `resolve_secret`.
        job: Name of the job.
        server: Name or address of the host of the store, where it has one: the way to it is the way to the others.
        is_private: Whether nobody but this user can read the store and write to it.

    Raises:
        RendezvousError, AuthenticationError, InvalidRankError, InvalidWorldSizeError, ValueError: As `rendezvous` does.
        ProtocolError: The store has what no rank writes into it.
    """
    joining = _joining(read_environment(), Deadline(timeout), rank=rank, world_size=world_size, job=job, secret=secret)
    advice = "start each rank once, and give ranks that meet again a store of their own"
    try:
        return meet(
            store,
            joining,
            f"job {job!r} in {where}",
            advice,
            depart=lambda _: None,
            server=server,
            is_private=is_private,
        )
    except DistributedTimeoutError as error:
        raise _unanswered(joining, where, error, "") from error
    except ValueError as error:  # of whatever decoder
        raise ProtocolError(f"job {job!r} in {where}: it has what no rank writes into it: {error}") from error


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
    joining = _joining(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    where = _address_from_environment(environment) if address is None else address
    try:
        if joining.rank:
            client = _dial(where, joining)
            return joining.member(client, client.local_host, client.close, joining.secret)
        named = f"job {joining.job!r} at tcp://{where}"
        server = _open_server(where, joining, named, shared_port=environment.agent_store, sock=listener)
        return joining.member(server.store, server.host, server.close, joining.secret)
    except DistributedTimeoutError as error:
        raise _unanswered(joining, f"tcp://{where}", error, "" if joining.secret else _LOOPBACK_HINT) from error


def _unanswered(joining: JoinRequest, where: str, error: DistributedError, hint: str) -> RendezvousError:
    text = f"job {joining.job!r} at {where}: rank 0 did not answer rank {joining.rank}: {error.message}{hint}"
    return RendezvousError(text, ranks=(0,))


def _joining(
    environment: Environment,
    deadline: Deadline,
    *,
    rank: int | None,
    world_size: int | None,
    job: str | None,
    secret: str | bytes | None,
) -> JoinRequest:
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
            f"rank {number} is not in a job of {counted(size, 'rank')}; ranks go from 0 to {size - 1}", ranks=(number,)
        )
    name = job or os.environ.get("FERRODIST_JOB")
    if not name and environment.run_id:
        name = f"{environment.run_id}.{environment.restart_count}"
    # Here, so that rank 0 and the ranks of a file rendezvous learn it as early as the others.
    check_hello(Hello(purpose="store", job=name or "default", rank=number, world_size=size, group=""))
    return JoinRequest(
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


def _join_tcp(address: str, joining: JoinRequest, *, shared_port: bool) -> Membership:
    where = f"job {joining.job!r} at tcp://{address}"
    if joining.rank == 0:
        return _serve(address, joining, where, shared_port=shared_port)
    client, name = _dial_this_round(address, joining, where)
    try:
        _attend(client, joining, where)
    except BaseException:
        _leave(name, client.close)
        raise
    return joining.member(client, client.local_host, lambda: _leave(name, client.close), joining.secret)


def _leave(name: bytes, close: Callable[[], None]) -> None:
    rounds.note_left(name)
    close()


def _dial_this_round(address: str, joining: JoinRequest, where: str) -> tuple[TcpStore, bytes]:
    """Connect to a store that this process has not left, and learn its name; see [Note: rounds] in `rounds.py`."""
    while True:
        client = _dial(address, joining)
        try:
            name = rounds.name_of(client, joining.deadline)
            if not rounds.has_left(name):
                return client, name
            rounds.wait_until_over(client, joining.deadline)
        except RendezvousError:  # it went away
            client.close()
            if not rounds.has_left_any():
                raise
        except BaseException:
            client.close()
            raise
        else:
            client.close()
        rounds.pause(f"{where}: the store of rank 0", joining.deadline)


def _dial(address: str, joining: JoinRequest) -> TcpStore:
    return TcpStore(
        address,
        secret=joining.secret,
        job=joining.job,
        rank=joining.rank,
        world_size=joining.world_size,
        timeout=joining.deadline.timeout,
    )


def _serve(address: str, joining: JoinRequest, where: str, *, shared_port: bool) -> Membership:
    server = _open_server(address, joining, where, shared_port=shared_port)

    def end() -> None:
        with contextlib.suppress(RendezvousError):  # it was closed before
            rounds.say_over(server.store)
        server.close(linger=LINGER)

    try:
        rounds.set_name(server.store)
        _attend(server.store, joining, where)
    except DistributedError:
        end()  # the others are to read why
        raise
    except BaseException:
        server.close()
        raise
    return joining.member(server.store, server.host, end, joining.secret)


def _open_server(
    address: str, joining: JoinRequest, where: str, *, shared_port: bool, sock: socket.socket | None = None
) -> TcpStoreServer:
    host, port = parse_address(address)
    if port == 0 and joining.world_size > 1 and sock is None:
        raise ValueError(f"{where}: port 0 is a different one on every rank; choose a free port")
    patience = Deadline(min(_OTHERS_END if rounds.has_left_any() else 0.0, joining.deadline.remaining()))
    try:
        while True:
            try:
                return TcpStoreServer(
                    host,
                    port,
                    secret=joining.secret,
                    job=joining.job,
                    world_size=joining.world_size,
                    sock=sock,
                    max_connections=max(4096, 8 * joining.world_size),
                    on_rejection=note_rejection,
                    on_shortage=cancel_claim,
                    deadline=joining.deadline,
                )
            except RendezvousError as error:  # noqa: PERF203 - what ends an attempt, of a few
                if patience.expired or not _is_taken(error):
                    raise
                rounds.pause(f"{where}: the store of rank 0", joining.deadline)
    except RendezvousError as error:
        hint = (
            "set FERRODIST_PORT to a free port on every rank (torchrun's agent has MASTER_PORT)"
            if shared_port
            else "rank 0 must run on the host that the address names, be started once, and find the port free"
        )
        raise RendezvousError(f"{where}: rank 0 {error.message}; {hint}", ranks=(0,)) from error


def _is_taken(error: RendezvousError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE


def _attend(store: Store, joining: JoinRequest, where: str) -> None:
    advice = "start each rank once, and give each process a rank number of its own"
    claim_rank(store, rank=joining.rank, where=where, advice=advice, deadline=joining.deadline)
    await_all(store, rank=joining.rank, world_size=joining.world_size, where=where, deadline=joining.deadline)


def _join_file(path: str, joining: JoinRequest) -> Membership:
    advice = f"start each rank once; if {path} is left over from an earlier run, remove it"
    store = FileStore(path, timeout=joining.deadline.timeout)

    @functools.cache  # closing twice must not count as two ranks
    def depart(patience: float) -> None:
        # A file that could not be removed is reported by the next run that finds it.
        with contextlib.suppress(DistributedTimeoutError):
            if leave(store, joining.world_size, timeout=patience):
                store.remove(timeout=patience)
        store.close()

    return meet(store, joining, f"job {joining.job!r} at file://{path}", advice, depart=depart, is_private=True)
