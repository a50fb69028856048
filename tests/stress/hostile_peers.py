"""Peers that mean no good: processes of another user, who stands between two ranks, and strangers by the hundred.

Run by hand, as root for the first part: ``python tests/stress/hostile_peers.py [rounds]``. Each line that it prints
counts what happened; it ends with status 1 when one of these numbers is not what it should be.
``tests/faults/test_hostile_peers.py`` runs the parts with few rounds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import multiprocessing
import os
import random
import re
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ferrodist as fd
from ferrodist import rpc
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Hello, Listener, MemoryStore, connect, rendezvous_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

NOBODY = 65534

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "FERRODIST_")
_FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Another user of this host, and a job that was started without any setting.


def _meet(backend: str, method: str, rank: int, seconds: float) -> None:
    fd.init_process_group(backend, rank=rank, world_size=2, init_method=method, timeout=seconds)
    fd.barrier(timeout=seconds)


def _meet_by_variables(address: str, rank: int, seconds: float, attempt: Path | None = None) -> None:
    """Over env://, as under a launcher, or as under torchrun, which has made a folder for the attempt."""
    host, port = address.split(":")
    found = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    if attempt is not None:
        attempt.mkdir(exist_ok=True)
        found |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        found |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_ERROR_FILE": str(attempt / str(rank) / "error.json")}
    os.environ.update(found)
    fd.init_process_group("tcp", timeout=seconds)
    fd.barrier(timeout=seconds)


def _construct(kind: Any, address: str, rank: int, seconds: float) -> None:
    kind(rank, 2, address, timeout=seconds).barrier(timeout=seconds)


def _call(address: str, rank: int, seconds: float) -> None:
    agent = rpc.RpcAgent(rpc.TcpRpcBackend(rank, 2, address, timeout=seconds))
    agent.wait_for_rank(1 - rank, timeout=seconds)
    time.sleep(0.5)  # the other one is to see this one, too


def _meet_in_torch(make_store: Callable[[int], Any], rank: int, seconds: float) -> None:
    import ferrodist.torch_backend.registration  # noqa: F401, PLC0415

    limit = dt.timedelta(seconds=seconds)
    dist.init_process_group("ferrodist", store=make_store(rank), rank=rank, world_size=2, timeout=limit)
    dist.barrier()


def _tcp_store(port: int, seconds: float, rank: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=dt.timedelta(seconds=seconds))


def ways_to_start(folder: Path, seconds: float) -> dict[str, Callable[[int], None]]:
    """Each way in which two ranks can meet on one host with no setting, by name: a function of the rank."""
    address = f"127.0.0.1:{free_port()}"
    port = free_port()
    return {
        "tcp over tcp://": lambda rank: _meet("tcp", f"tcp://{address}", rank, seconds),
        "native over tcp://": lambda rank: _meet("native", f"tcp://{address}", rank, seconds),
        "gloo over tcp://": lambda rank: _meet("gloo", f"tcp://{address}", rank, seconds),
        "tcp over env://": lambda rank: _meet_by_variables(address, rank, seconds),
        "tcp under torchrun": lambda rank: _meet_by_variables(address, rank, seconds, folder / "attempt"),
        "native over file://": lambda rank: _meet("native", f"file://{folder}/meet", rank, seconds),
        "TcpBackend": lambda rank: _construct(fd.TcpBackend, address, rank, seconds),
        "NativeBackend": lambda rank: _construct(fd.NativeBackend, address, rank, seconds),
        "GlooBackend": lambda rank: _construct(fd.GlooBackend, address, rank, seconds),
        "TcpRpcBackend": lambda rank: _call(address, rank, seconds),
        "torch's TCPStore": lambda rank: _meet_in_torch(partial(_tcp_store, port, seconds), rank, seconds),
        "torch's FileStore": lambda rank: _meet_in_torch(
            lambda _: dist.FileStore(str(folder / "torch-store"), 2), rank, seconds
        ),
    }


def _become(user: int) -> None:
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def _run_rank(way: Callable[[int], None], rank: int, user: int, report: Any) -> None:
    for name in list(os.environ):
        if name.startswith(_VARIABLES):
            del os.environ[name]
    _become(user)
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    try:
        way(rank)
        report.send("joined")
    except BaseException as error:
        report.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def start_two(way: Callable[[int], None], users: tuple[int, int], limit: float) -> tuple[str, str]:
    """Run ranks 0 and 1 as these users; returns what became of each."""
    ends, processes = [], []
    for rank in range(2):
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_run_rank, args=(way, rank, users[rank], theirs))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        said = [end.recv() if end.poll(limit) else "never ended" for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return said[0], said[1]


def other_users(
    user: int = NOBODY, seconds: float = 3.0, only: tuple[str, ...] = (), as_rank: int = 1
) -> dict[str, tuple[str, str]]:
    """What became of ranks 0 and 1, of which one is another user's, for each way to start."""
    users = (os.geteuid(), user) if as_rank == 1 else (user, os.geteuid())
    for codec in ("idna", "ascii", "latin_1"):  # whose modules the other user may not be able to read
        importlib.import_module(f"encodings.{codec}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name, way in ways_to_start(Path(folder), seconds).items():
            if not only or name in only:
                found[name] = start_two(way, users, 4 * seconds + 10)
    return found


def _read_along(path: Path, opened: Any, done: Any, report: Any) -> None:
    """Another user: open a file as soon as it is there, and look for a secret in it."""
    _become(NOBODY)
    found = b""
    with contextlib.ExitStack() as stack:
        file: Any = None
        while not done.is_set():
            with contextlib.suppress(OSError):
                file = file or stack.enter_context(path.open("rb"))
            if file is not None:
                opened.set()
                file.seek(0)
                found += b"".join(re.findall(rb"made_secret\xc4[^\0]", file.read()))
            time.sleep(0.001)
    report.send("never opened" if file is None else "a secret was read" if found else "none was read")


def read_along(rounds: int, seconds: float = 10.0) -> Counter[str]:
    """What another user, which opens the file of torch's FileStore at once, reads of jobs that meet in it."""
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            path, opened, done = Path(folder) / "store", _FORK.Event(), _FORK.Event()
            ours, theirs = _FORK.Pipe()
            reader = _FORK.Process(target=_read_along, args=(path, opened, done, theirs))
            reader.start()

            def way(rank: int, path: Path = path, opened: Any = opened) -> None:
                store = dist.FileStore(str(path), 2)
                opened.wait(seconds)
                _meet_in_torch(lambda _: store, rank, seconds)

            said = start_two(way, (os.geteuid(), os.geteuid()), 4 * seconds)
            done.set()
            counts[f"{ours.recv()}, {' and '.join(said)}"] += 1
            reader.join()
    return counts


# Who stands between two ranks.


class Relay:
    """Passes on the connections to an address, and may change what passes; a context.

    Args:
        target: The address.
        change: Given the direction ("up" is to the target), the number of the connection, how many bytes have passed
            and the next ones; returns those to pass on. None passes on what comes.
        delay: Seconds that each byte takes longer.
    """

    def __init__(
        self,
        target: tuple[str, int],
        change: Callable[[str, int, int, bytes], bytes] | None = None,
        *,
        delay: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._target = target
        self._change = change
        self._delay = delay
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, port), family=family)
        self.port = self._server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = [self._server]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                number, self.num_connections = self.num_connections, self.num_connections + 1
                for direction, source, sink in (("up", near, far), ("down", far, near)):
                    thread = threading.Thread(target=self._pass, args=(direction, number, source, sink), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, direction: str, number: int, source: socket.socket, sink: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._delay:
                    time.sleep(self._delay)
                sink.sendall(data if self._change is None else self._change(direction, number, passed, data))
                passed += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, run at the same time."""
    results: list[Any] = [None] * len(calls)

    def body(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=body, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _sum_of_two(rank: int, address: str, seconds: float) -> list[float]:
    """Two ranks over `rendezvous`: a store, a hub, and sums of few and of many elements."""
    membership = fd.rendezvous.rendezvous(
        f"tcp://{address}", rank=rank, world_size=2, timeout=seconds, secret="of this trial"
    )
    try:
        with contextlib.closing(fd.TcpBackend.from_membership(membership, seconds, Deadline(seconds))) as group:
            sums = [fd.allreduce(torch.full((1,), 111.0), group=group).item() for _ in range(3)]
            group.barrier()
            return sums
    finally:
        membership.close()


def _hub_of_two(rank: int, address: str, seconds: float) -> list[float]:
    """Two ranks whose rank 1 dials rank 0 at an address that the user has given."""
    with contextlib.closing(fd.TcpBackend(rank, 2, address, secret="of this trial", timeout=seconds)) as group:
        sums = [fd.allreduce(torch.full((1,), 111.0), group=group).item() for _ in range(3)]
        group.barrier()
        return sums


_PROGRAMS = {"store": _sum_of_two, "hub": _hub_of_two}
_RIGHT = [222.0] * 3


def through_relay(
    program: str, change: Callable[[str, int, int, bytes], bytes] | None, seconds: float = 4.0
) -> list[Any]:
    """What the two ranks of a program say when rank 1 dials a relay."""
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    with Relay((host, int(port)), change) as relay:
        run = _PROGRAMS[program]
        return in_threads(lambda: run(0, address, seconds), lambda: run(1, relay.address, seconds))


class AddressChange:
    """Puts another port in the place of rank 0's, wherever the store's answers have its address."""

    def __init__(self) -> None:
        self.num_changed = 0

    def __call__(self, direction: str, number: int, passed: int, data: bytes) -> bytes:
        """See `Relay`."""
        del number, passed
        start = data.find(b"127.0.0.1:") if direction == "down" else -1
        if start < 0:
            return data
        self.num_changed += 1
        end = start + len(b"127.0.0.1:")
        length = len(data[end:]) - len(data[end:].lstrip(b"0123456789"))
        return data[:end] + b"9" * length + data[end + length :]


def other_hub(seconds: float = 2.0) -> list[Any]:
    """What two ranks say when the store, to which others may write, sends rank 1 to a relay in the place of rank 0."""
    store = MemoryStore()

    def rank(number: int) -> object:
        membership = rendezvous_in(
            store, "a store", rank=number, world_size=2, timeout=seconds, secret="s", job="j", is_private=True
        )
        with contextlib.ExitStack() as stack:
            if number == 1:
                host, port = membership.store.get("tcp/address", timeout=seconds).decode().split(":")
                relay = stack.enter_context(Relay((host, int(port))))
                membership.store.set("tcp/address", relay.address.encode())
            with contextlib.closing(fd.TcpBackend.from_membership(membership, seconds, Deadline(seconds))) as group:
                return fd.allreduce(torch.full((100_000,), 111.0), group=group)[0].item()

    return in_threads(lambda: rank(0), lambda: rank(1))


class Tampering:
    """One change of what passes: a bit, or a piece that is dropped, repeated or sent back to nobody.

    Args:
        generator: Says which, and where.
    """

    def __init__(self, generator: random.Random) -> None:
        self._kind = generator.choice(("flip", "drop", "repeat", "insert"))
        self._direction = generator.choice(("up", "down"))
        self._where = generator.randrange(200, 900)
        self._bit = 1 << generator.randrange(8)
        self.is_done = False

    def __call__(self, direction: str, number: int, passed: int, data: bytes) -> bytes:
        """See `Relay`."""
        del number
        at = self._where - passed
        if self.is_done or direction != self._direction or not 0 <= at < len(data):
            return data
        self.is_done = True
        if self._kind == "flip":
            return data[:at] + bytes([data[at] ^ self._bit]) + data[at + 1 :]
        if self._kind == "drop":
            return data[:at]
        return data[:at] + (data if self._kind == "repeat" else os.urandom(40)) + data[at:]


def classify(said: list[Any]) -> str:
    """What two ranks said, in a word."""
    if any(not isinstance(one, Exception) and one != _RIGHT for one in said):
        return "a wrong number"
    if any(isinstance(one, Exception) and not isinstance(one, (fd.DistributedError, OSError)) for one in said):
        return "another error"
    return "an error" if any(isinstance(one, Exception) for one in said) else "right"


def tampered(program: str, rounds: int, seed: int = 0, seconds: float = 4.0) -> Counter[str]:
    """How often ranks between which something is changed say what."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        change = Tampering(generator)
        outcome = classify(through_relay(program, change, seconds))
        counts[outcome if change.is_done else f"{outcome}, unchanged"] += 1
    return counts


# Frames of a rank that knows the secret.


def fuzzed_frames(rounds: int, seed: int = 0) -> Counter[str]:
    """How often a group, whose rank 1 sends frames of random headers, names whom."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            counts[_fuzz_group(listener.dup(), port, generator)] += 1
    return counts


def _fuzz_group(listener: socket.socket, port: int, generator: random.Random) -> str:
    address = f"127.0.0.1:{port}"

    def rank(number: int) -> str:
        own = {"listener": listener} if number == 0 else {}
        with contextlib.closing(fd.TcpBackend(number, 3, address, secret="s", timeout=5, **own)) as group:
            group.barrier()
        return "no error"

    def hostile() -> str:
        hello = Hello(purpose="group", job="default", rank=1, world_size=3, group="world")
        with connect("127.0.0.1", port, secret=b"s", hello=hello, deadline=Deadline(5)) as sock:
            for _ in range(20):
                payload = generator.randbytes(generator.choice((0, 0, 5, 192)))
                kind = generator.randrange(13)
                numbers = [generator.choice((0, 1, 2, 192, 1 << 31, (1 << 32) - 1)) for _ in range(2)]
                longs = [generator.choice((0, 1, 192, 300_000, 1 << 47, (1 << 64) - 1)) for _ in range(5)]
                header = struct.pack("<2sBBIIIIQQQQQ", b"fd", 2, kind, 0, len(payload), 1, *numbers, *longs[1:])
                tag = sock.session.outgoing.tag(header, payload)
                sock.session.outgoing.advance()
                with contextlib.suppress(OSError):
                    sock.sendall(header + tag + payload)
            select.select([sock], [], [], 5)
        return ""

    errors = [said for said in in_threads(lambda: rank(0), lambda: rank(2), hostile) if isinstance(said, Exception)]
    if any(not isinstance(error, fd.DistributedError) for error in errors):
        return f"another error: {errors}"
    blamed = {error.ranks for error in errors if isinstance(error, fd.DistributedError)}
    return "rank 1 is named" if blamed == {(1,)} else f"{sorted(blamed)} are named"


# A rank that is some way off, and strangers that are near.


@contextlib.contextmanager
def strangers(address: tuple[str, int], rate: float, says: bytes = b"") -> Iterator[Counter[str]]:
    """Open ``rate`` connections a second and keep them."""
    counts: Counter[str] = Counter()
    done = threading.Event()

    def open_many() -> None:
        kept = []
        start = time.monotonic()
        while not done.is_set():
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect(address)
            kept.append(sock)
            counts["opened"] += 1
            if says and len(kept) > 20:
                with contextlib.suppress(OSError):
                    kept[-20].send(says)
            if len(kept) > 1000:
                kept.pop(0).close()
            done.wait(max(0.0, start + counts["opened"] / rate - time.monotonic()))
        for sock in kept:
            sock.close()

    thread = threading.Thread(target=open_many)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()


def slow_peer(round_trip: float = 0.3, rate: float = 400.0, *, says: bytes = b"", limit: float = 20.0) -> float:
    """Seconds until a rank that is so far away is let in, beside so many strangers a second; infinite if it is not."""
    server = Listener("127.0.0.1", 0, secret=b"s")
    server.serve(lambda hello: None, lambda sock, hello: sock.close())
    hello = Hello(purpose="group", job="j", rank=1, world_size=2, group="g")
    try:
        with (
            strangers((server.host, server.port), rate, says) as counts,
            Relay((server.host, server.port), delay=round_trip / 2) as relay,
        ):
            while counts["opened"] < 200:
                time.sleep(0.01)
            start = time.monotonic()
            try:
                connect("127.0.0.1", relay.port, secret=b"s", hello=hello, deadline=Deadline(limit)).close()
            except fd.DistributedError:
                return float("inf")
            return time.monotonic() - start
    finally:
        server.close()


def main() -> int:
    """Run all parts; returns 1 if a number is not what it should be."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    is_bad = False

    def report(what: str, found: object, is_right: bool) -> None:
        nonlocal is_bad
        is_bad |= not is_right
        print(f"{'ok ' if is_right else 'BAD'} {what}: {found}", flush=True)

    if os.geteuid() == 0:
        for as_rank in (1, 0):
            for name, said in other_users(as_rank=as_rank).items():
                texts = "; ".join(one[:100] for one in said)
                report(f"another user as rank {as_rank}, {name}", texts, "joined" not in said)
        for name, said in other_users(0).items():
            report(f"the same user, {name}", said, said == ("joined", "joined"))
        counts = read_along(5)
        report("another user who reads torch's file", dict(counts), set(counts) == {"none was read, joined and joined"})
    for program in _PROGRAMS:
        said = through_relay(program, None)
        report(f"a faithful relay to the {program}", said, classify(said) == "right")
        counts = tampered(program, rounds)
        report(
            f"a relay to the {program} that changes something",
            dict(counts),
            set(counts) <= {"an error", "right, unchanged"},
        )
    change = AddressChange()
    said = through_relay("store", change)
    report(
        f"a changed address ({change.num_changed} times)",
        said,
        bool(change.num_changed) and classify(said) == "an error",
    )
    said = other_hub()
    report("another address in a store that others write to", said, classify(said) == "an error")
    counts = fuzzed_frames(rounds)
    report("frames of random headers", dict(counts), set(counts) == {"rank 1 is named"})
    intro = b"ferrodistC" + (2).to_bytes(2, "big")
    for name, says in (("say nothing", b""), ("speak", intro)):
        seconds = slow_peer(says=says)
        report(f"a rank 0.3 s away beside 400 strangers a second that {name}", f"{seconds:.1f} s", seconds < 10)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
