"""Joining a job: `rendezvous` waits until all ranks are authenticated members; `enter_job` does not wait for others."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from typing import TYPE_CHECKING, Any

from ferrodist.arguments import check_int
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous.auth import Hello, check_hello
from ferrodist.rendezvous.environment import Environment, read_environment
from ferrodist.rendezvous.file_store import FileStore
from ferrodist.rendezvous.listener import parse_address
from ferrodist.rendezvous.membership import JoinRequest, Membership
from ferrodist.rendezvous.roll_call import await_all, claim_rank, count_departure, note_rejection, publish_failure
from ferrodist.rendezvous.rounds import ROUND_NAME_KEY, ROUND_OVER_KEY, left_stores, wait_for_next_round
from ferrodist.rendezvous.secret import resolve_secret
from ferrodist.rendezvous.shared_store import LINGER_SECONDS, join_through_store
from ferrodist.rendezvous.sockets import format_address
from ferrodist.rendezvous.store import is_server_silent
from ferrodist.rendezvous.tcp_store import TcpStore, TcpStoreServer
from ferrodist.wording import counted

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from ferrodist.rendezvous.store import Store

_LOOPBACK_HINT = " No FERRODIST_SECRET is set here: without one, rank 0 can listen on a loopback address only."

_PREVIOUS_SERVER_TIMEOUT = 2 * LINGER_SECONDS
"""Seconds that the new rank 0 waits for the process that was rank 0 of the previous round to close its store."""


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

    ``tcp://host:port``: rank 0 serves a store there, the others connect. ``file://path``: a file that all ranks can
    reach; without a secret, rank 0 generates one and writes it to the file, which only this user can read (mode 0600).
    So other users of the machine, and hosts without that file system, can't pose as ranks; processes that can read this
    user's files can. ``env://`` or None: ``tcp://MASTER_ADDR:MASTER_PORT``. Under torchrun, whose agent occupies that
    port, ranks of one host use a file in torchrun's folder of the attempt, ranks of several hosts FERRODIST_PORT on
    MASTER_ADDR, or the port after MASTER_PORT.

    Args:
        init_method: The address or file.
        rank: This process's rank; None takes RANK.
        world_size: The number of ranks; None takes WORLD_SIZE.
        timeout: Seconds to wait for the others.
        secret: The job secret; see `resolve_secret`.
        job: The name of the job; None takes FERRODIST_JOB, else TORCHELASTIC_RUN_ID with the restart count, else
            "default".

    Raises:
        RendezvousError: Ranks are missing (named, in the same words on every rank), a rank is claimed twice, rank 0
            does not answer, a file is left over, or a launcher's variable is missing.
        AuthenticationError: The secret differs from the others', or is missing where one is needed.
        ProtocolError: Another program or version has that address.
        InvalidRankError: The rank does not fit the world size.
        InvalidWorldSizeError: The world size differs from rank 0's.
        ValueError: ``init_method`` is invalid, or the job's name is too long.
        TypeError: An argument has the wrong type.
    """
    deadline = Deadline(timeout)
    environment = read_environment()
    request = _make_request(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    scheme, where = _parse(init_method, environment)
    hint = "" if request.secret or scheme == "file" else _LOOPBACK_HINT
    with _naming_rank_0(request, f"{scheme}://{where}", hint):
        if scheme == "file":
            return _join_file(where, request)
        return _join_tcp(where, request, shared_port=environment.agent_store)


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
    """Meet the other ranks in an existing store; the caller closes it after the membership.

    Without a secret, rank 0 generates one and writes it to the store if that is private. Otherwise the ranks prove that
    they know their user's secret, which differs between hosts: jobs over several hosts need a secret.

    Args:
        store: The store; no other job has used it.
        where: The store's name in messages.
        rank: This process's rank.
        world_size: The number of ranks.
        timeout: Seconds to wait for the others.
        secret: The job secret; see `resolve_secret`.
        job: The name of the job.
        server: The name or address of the store's host, if it has one: the route to it shows the interface for other
            ranks.
        is_private: Whether only this user can read and write the store.

    Raises:
        RendezvousError, AuthenticationError, InvalidRankError, InvalidWorldSizeError, ValueError: As `rendezvous` does.
        ProtocolError: The store has data that no rank writes.
    """
    request = _make_request(
        read_environment(), Deadline(timeout), rank=rank, world_size=world_size, job=job, secret=secret
    )
    advice = "start each rank once, and give ranks that meet again a store of their own"
    named = f"job {job!r} in {where}"
    try:
        with _naming_rank_0(request, where):
            return join_through_store(
                store, request, named, advice, on_leave=lambda _: None, server=server, is_private=is_private
            )
    except ValueError as error:  # raised by decoders
        raise ProtocolError(
            f"{named}: it holds foreign data, which no rank wrote: {error}. Give the job a store of its own"
        ) from error


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
    """Join a job whose ranks come and go: waits for rank 0 to serve the store, but for no other rank.

    A restarted process may take over its rank. The store ends with rank 0's process.

    Args:
        address: "host:port" where rank 0 serves and the others connect; None takes the address that `rendezvous` takes
            for ``env://``, but never a file.
        rank: This process's rank; None takes RANK.
        world_size: The number of ranks; None takes WORLD_SIZE.
        timeout: Seconds to wait for rank 0.
        secret: The job secret; see `resolve_secret`.
        job: The name of the job; as for `rendezvous`.
        listener: For rank 0: a bound, listening socket to serve on; the membership closes it.

    Raises:
        RendezvousError, AuthenticationError, ProtocolError, InvalidRankError, InvalidWorldSizeError, ValueError,
            TypeError: As `rendezvous` does.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address must be 'host:port' or None, not {type(address).__name__}")
    deadline = Deadline(timeout)
    environment = read_environment()
    request = _make_request(environment, deadline, rank=rank, world_size=world_size, job=job, secret=secret)
    where = _address_from_environment(environment) if address is None else address
    with _naming_rank_0(request, f"tcp://{where}", "" if request.secret else _LOOPBACK_HINT):
        if request.rank:
            client = _connect(where, request)
            return request.member(client, client.local_host, client.close, request.secret)
        named = f"job {request.job!r} at tcp://{where}"
        server = _open_server(where, request, named, shared_port=environment.agent_store, sock=listener)
        return request.member(server.store, server.host, server.close, request.secret)


@contextlib.contextmanager
def _naming_rank_0(request: JoinRequest, where: str, hint: str = "") -> Iterator[None]:
    """Raise RendezvousError, about rank 0, in place of a timeout."""
    try:
        yield
    except DistributedTimeoutError as error:
        text = f"job {request.job!r} at {where}: rank 0 did not answer rank {request.rank}: {error.message}{hint}"
        raise RendezvousError(text, ranks=(0,)) from error


def _make_request(
    environment: Environment,
    deadline: Deadline,
    *,
    rank: int | None,
    world_size: int | None,
    job: str | None,
    secret: str | bytes | None,
) -> JoinRequest:
    own_rank = environment.rank if rank is None else check_int("rank", rank)
    size = environment.world_size if world_size is None else check_int("world_size", world_size)
    if job is not None and not isinstance(job, str):
        raise TypeError(f"job must be text or None, not {type(job).__name__}")
    if own_rank is None or size is None:
        raise _unset_variables_error({"RANK": own_rank, "WORLD_SIZE": size}, "pass rank and world_size")
    if size < 1:
        raise InvalidWorldSizeError(f"the world size is {size}; a job has at least 1 rank")
    if not 0 <= own_rank < size:
        raise InvalidRankError(
            f"rank {own_rank} is not in a job of {counted(size, 'rank')}; ranks go from 0 to {size - 1}",
            ranks=(own_rank,),
        )
    name = job or os.environ.get("FERRODIST_JOB")
    if not name and environment.run_id:
        name = f"{environment.run_id}.{environment.restart_count}"
    # Checked here, so that rank 0 and the ranks of a file rendezvous fail as early as the others.
    check_hello(Hello(purpose="store", job=name or "default", rank=own_rank, world_size=size, group=""))
    return JoinRequest(
        rank=own_rank,
        world_size=size,
        local_rank=environment.local_rank if environment.rank == own_rank else None,
        job=name or "default",
        secret=resolve_secret(secret),
        deadline=deadline,
    )


def _unset_variables_error(values: dict[str, Any], instead: str) -> RendezvousError:
    missing = " and ".join(name for name, value in values.items() if value is None)
    return RendezvousError(
        f"the environment does not say {missing}: start the program with torchrun, `python -m ferrodist run` or srun,"
        f" or {instead}"
    )


def _parse(init_method: str | None, environment: Environment) -> tuple[str, str]:
    """Return the scheme, "tcp" or "file", and the address or path."""
    if init_method is None or init_method == "env://":
        if environment.agent_store and environment.single_host and environment.attempt_folder:
            return "file", f"{environment.attempt_folder}/ferrodist-rendezvous"
        return "tcp", _address_from_environment(environment)
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


def _address_from_environment(environment: Environment) -> str:
    host, port = environment.master_addr, environment.master_port
    if host is None or port is None:
        raise _unset_variables_error({"MASTER_ADDR": host, "MASTER_PORT": port}, "pass init_method='tcp://host:port'")
    if environment.agent_store:
        own = os.environ.get("FERRODIST_PORT", "")
        port = parse_address(f"FERRODIST_PORT:{own}")[1] if own else port + (1 if port < 65535 else -1)
    return format_address(host, port)


def _join_tcp(address: str, request: JoinRequest, *, shared_port: bool) -> Membership:
    where = f"job {request.job!r} at tcp://{address}"
    if request.rank == 0:
        return _join_as_server(address, request, where, shared_port=shared_port)
    client, name = _connect_to_this_round(address, request, where)
    try:
        _claim_and_await(client, request, where)
    except BaseException:
        _leave(name, client.close)
        raise
    return request.member(client, client.local_host, lambda: _leave(name, client.close), request.secret)


def _leave(name: bytes, close: Callable[[], None]) -> None:
    left_stores.add(name)
    close()


def _connect_to_this_round(address: str, request: JoinRequest, where: str) -> tuple[TcpStore, bytes]:
    """Connect to a store that this process has not left, and return its name; see [Note: rounds] in `rounds.py`."""
    while True:
        client = _connect(address, request)
        try:
            name = client.get(ROUND_NAME_KEY, timeout=request.deadline.remaining())
            if name not in left_stores:
                return client, name
            try:
                client.get(ROUND_OVER_KEY, timeout=request.deadline.remaining())
            except DistributedTimeoutError as error:
                if is_server_silent(error):
                    raise
        except RendezvousError:  # it went away
            client.close()
            if not left_stores:
                raise
        except BaseException:
            client.close()
            raise
        else:
            client.close()
        wait_for_next_round(f"{where}: the store of rank 0", request.deadline)


def _connect(address: str, request: JoinRequest) -> TcpStore:
    if parse_address(address)[1] == 0:
        raise _port_0_error(f"job {request.job!r} at tcp://{address}")
    return TcpStore(
        address,
        secret=request.secret,
        job=request.job,
        rank=request.rank,
        world_size=request.world_size,
        timeout=request.deadline.timeout,
        deadline=request.deadline,
    )


def _join_as_server(address: str, request: JoinRequest, where: str, *, shared_port: bool) -> Membership:
    server = _open_server(address, request, where, shared_port=shared_port)

    def end() -> None:
        with contextlib.suppress(RendezvousError):  # it was closed before
            server.store.set(ROUND_OVER_KEY, b"1")
        server.close(linger=LINGER_SECONDS)

    try:
        server.store.set(ROUND_NAME_KEY, os.urandom(16))
        _claim_and_await(server.store, request, where)
    except DistributedError:
        end()  # the others are to read why
        raise
    except BaseException:
        server.close()
        raise
    return request.member(server.store, server.host, end, request.secret)


def _open_server(
    address: str, request: JoinRequest, where: str, *, shared_port: bool, sock: socket.socket | None = None
) -> TcpStoreServer:
    host, port = parse_address(address)
    if port == 0 and request.world_size > 1 and sock is None:
        raise _port_0_error(where)
    attempt_deadline = Deadline(min(_PREVIOUS_SERVER_TIMEOUT if left_stores else 0.0, request.deadline.remaining()))
    try:
        while True:
            try:
                return TcpStoreServer(
                    host,
                    port,
                    secret=request.secret,
                    job=request.job,
                    world_size=request.world_size,
                    sock=sock,
                    max_connections=max(4096, 8 * request.world_size),
                    on_rejection=note_rejection,
                    on_shortage=publish_failure,
                    deadline=request.deadline,
                )
            except RendezvousError as error:  # noqa: PERF203 - what ends an attempt, of a few
                if attempt_deadline.expired or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                    raise
                wait_for_next_round(f"{where}: the store of rank 0", request.deadline)
    except RendezvousError as error:
        hint = (
            "set FERRODIST_PORT to a free port on every rank (torchrun's agent has MASTER_PORT)"
            if shared_port
            else "rank 0 must run on the host that the address names, be started once, and find the port free"
        )
        raise RendezvousError(f"{where}: rank 0 {error.message}; {hint}", ranks=(0,)) from error


def _port_0_error(where: str) -> ValueError:
    return ValueError(f"{where}: port 0 is a different one on every rank; choose a free port")


def _claim_and_await(store: Store, request: JoinRequest, where: str) -> None:
    advice = "start each rank once, and give each process a rank number of its own"
    claim_rank(store, request, where, advice)
    await_all(store, request, where)


def _join_file(path: str, request: JoinRequest) -> Membership:
    advice = f"start each rank once; if {path} is left over from an earlier run, remove it"
    store = FileStore(path, timeout=request.deadline.timeout)

    @functools.cache  # closing twice must not count as two ranks
    def on_leave(timeout: float) -> None:
        # A file that could not be removed is reported by the next run that finds it; its folder may be gone.
        with contextlib.suppress(DistributedTimeoutError, RendezvousError):
            if count_departure(store, request.world_size, timeout=timeout):
                store.remove(timeout=timeout)
        store.close()

    return join_through_store(
        store, request, f"job {request.job!r} at file://{path}", advice, on_leave=on_leave, is_private=True
    )
