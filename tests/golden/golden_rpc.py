"""What agents say to each other: calls, results, errors, references and the end, in memory and over connections."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from golden_support import SECRET, TIMEOUT, Recording, SocketTap, Step, Tape, in_short, run_ranks, split, taped_group

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from golden_support import Fields

_FRAME_BYTES, _ROOM = 512, 496
_FAILURE, _LETTER = 2, 1
_NUM_GREETINGS = 2
"""That a rank sends to each other one."""
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def _letter_words(letter: bytes) -> Fields:
    (size,) = (int.from_bytes(letter[:8], "little"),)
    head = letter[8 : 8 + size]
    return {
        "head": repr(msgspec.msgpack.decode(head, strict=False)),
        "bytes of the head": in_short(head),
        "bytes after it": in_short(letter[8 + size :]),
        "size": str(len(letter)),
    }


def words(tag: int, data: bytes) -> Fields:
    """The fields of a message between agents."""
    if tag & (1 << 64) - 1:
        try:
            return {"message": "a letter", **_letter_words(data)}
        except Exception:
            return {"message": "bytes", "bytes": in_short(data)}
    assert len(data) == _FRAME_BYTES
    fields = split(data[:16], ("kind", 1), ("form", 1), ("flags", 2), ("size", 4), ("number", 8))
    size = int.from_bytes(data[4:8], "little")
    assert not any(data[16 + size :]), "what follows is not zero"
    content = data[16 : 16 + size] if size <= _ROOM else b""
    if data[0] == _FAILURE:  # it has words, and places in the source
        kind, type_name, *texts = msgspec.msgpack.decode(content)
        return {
            **fields,
            "size": "any",
            "why": str(kind),
            "type": type_name,
            "texts": repr([type(each) for each in texts]),
        }
    if not content:
        return fields
    if data[1] == _LETTER:
        return {**fields, **{f"letter: {name}": text for name, text in _letter_words(content).items()}}
    return {**fields, "content": in_short(content), "in words": repr(msgspec.msgpack.decode(content, strict=False))}


# What is called.


class Counter:
    """An object that is called from elsewhere."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def add(self, number: int) -> int:
        """Count on."""
        self.value += number
        return self.value


_go_on = threading.Event()


def _wait() -> int:
    _go_on.wait(TIMEOUT)
    return 1


def _fail(text: str) -> None:
    raise KeyError(text)


def _bad() -> Any:
    return {1, 2}


def _echo(*arguments: Any, **keywords: Any) -> Any:
    return [*arguments, keywords] if keywords else arguments[0]


def _pass_on(counter: Any, number: int) -> int:
    result: int = counter.rpc_sync().add(number)
    return result


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "echo": _echo,
    "wait": _wait,
    "fail": _fail,
    "bad": _bad,
    "Counter": Counter,
    "pass_on": _pass_on,
}


def _until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("it does not come to that")
        gc.collect()
        time.sleep(0.002)


def _plain(agent: Any) -> None:
    for value in (None, True, -1, (1 << 64) - 1, 0.5, "text", b"bytes", "long " * 120):
        agent.rpc_sync(1, "echo", value)
    agent.rpc_sync("worker1", "echo", 1, other="two")


def _nested(agent: Any) -> None:
    for value in ([1, (2, [3])], {"a": {1: None}, "b": ()}, np.float32(0.5), np.arange(4, dtype=np.int16), "x" * 5000):
        agent.rpc_sync(1, "echo", value)
    for dtype in _DTYPES:
        agent.rpc_sync(1, "echo", (torch.arange(3) + 1).to(dtype))
    for tensor in (
        torch.tensor(1.5),
        torch.empty(0, 2),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, requires_grad=True),
    ):
        agent.rpc_sync(1, "echo", tensor)
    twice = torch.arange(3)
    agent.rpc_sync(1, "echo", [twice, {"again": twice}, torch.arange(5, dtype=torch.uint8)], by=torch.zeros(100, 100))
    agent.rpc_sync(1, "echo", torch.arange(70_000, dtype=torch.int32), torch.arange(3), by=torch.zeros(65_000))
    for count in (240 << 10, (240 << 10) + 1):  # the most that a letter has room for, and more
        agent.rpc_sync(1, "echo", torch.zeros(count, dtype=torch.uint8))


def _wrong(agent: Any) -> None:
    for name, arguments in (("fail", ("a key",)), ("missing", ()), ("bad", ())):
        with contextlib.suppress(fd.RpcError):
            agent.rpc_sync(1, name, *arguments)


def _given_up(agent: Any) -> None:
    _go_on.clear()
    with contextlib.suppress(fd.DistributedTimeoutError):
        agent.rpc_sync(1, "wait", timeout=0.1)
    _go_on.set()
    _until(lambda: agent.statistics().late == 1)


def _references(agents: list[Any]) -> None:
    agent = agents[0]
    counter = agent.remote(1, "Counter", 5)
    counter.rpc_sync().add(3)
    total = counter.remote().add(1)
    total.to_here()
    agent.rpc_sync(2, "pass_on", counter, 10)
    agent.rpc_sync(1, "pass_on", counter, 1)
    with contextlib.suppress(ValueError):  # which is found when the owner knows of the reference
        agent.rpc_sync(2, "echo", counter, torch.zeros(1 << 20))
    batch = agent.reference(torch.ones(2))
    agent.rpc_sync(1, "echo", [batch, batch])
    _until(lambda: _num(agents[2]) == 0)
    del counter, total, batch
    _until(lambda: not any(_num(each) for each in agents))


def _num(agent: Any) -> int:
    counts = agent.num_references()
    return int(counts.for_others) + int(counts.for_itself) + int(counts.elsewhere)


def _all(agent: Any) -> None:
    agent.broadcast_call("echo", 3)


def _without_rounds(streams: dict[str, list[Fields]]) -> dict[str, list[Fields]]:
    """The end of all agents, in which rank 0 asks again and again: without numbers, each message once."""
    found: dict[str, list[Fields]] = {}
    for name, messages in streams.items():
        kept: list[Fields] = []
        for message in messages:
            plain = {**message, "number": "any"}
            if plain not in kept:
                kept.append(plain)
        found[name] = kept
    return found


def _record_agents() -> Recording:
    tape = Tape()
    groups = taped_group(3, tape)
    agents: list[Any] = [None] * 3

    def meet(group: Any) -> None:
        agent = fd.rpc.RpcAgent(group, _FUNCTIONS, name=f"worker{group.rank}", message_limit=1 << 20)
        agents[group.rank] = agent
        _until(lambda: tape.num_messages() == _NUM_GREETINGS * 3 * 2)

    def by_first(run: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda group: run(agents[0]) if group.rank == 0 else None

    def leave(group: Any) -> None:
        agents[group.rank].drain(TIMEOUT)

    def lose(group: Any) -> None:
        """Rank 0 tells of the end of rank 2, to which it has sent references."""
        if group.rank == 2:
            agents[2].close()
        _until(lambda: tape.num_messages("a rank that is lost") == 1)

    steps = [
        Step("agents meet", meet),
        Step("plain calls", by_first(_plain)),
        Step("calls with other values", by_first(_nested)),
        Step("errors", by_first(_wrong)),
        Step("a call that is given up", by_first(_given_up)),
        Step("references", by_first(lambda _: _references(agents))),
        Step("a call to all", by_first(_all)),
        Step("the end", leave),
        Step("a rank that is lost", lose),
        Step("closed", lambda group: agents[group.rank].close()),
    ]
    run_ranks([lambda group=group: group for group in groups], steps, tape.begin)
    for group in groups:
        group.close()
    found = {name: streams for name, streams in tape.recording(words).items() if name not in ("", "closed")}
    for messages in found["agents meet"].values():
        messages.sort(key=str)  # they are said in any order
    found["the end"] = _without_rounds(found["the end"])
    return found


def _record_pickles() -> Recording:
    """Calls of agents that let pickles travel."""
    tape = Tape()
    groups = taped_group(2, tape)
    agents: list[Any] = [None] * 2

    def meet(group: Any) -> None:
        agents[group.rank] = fd.rpc.RpcAgent(group, {"echo": _echo}, allow_pickle=True)
        _until(lambda: tape.num_messages() == _NUM_GREETINGS * 2)

    steps = [
        Step("agents meet", meet),
        Step("a call with a pickle", lambda group: group.rank or agents[0].rpc_sync(1, "echo", frozenset([1]))),
        Step("closed", lambda group: agents[group.rank].close()),
    ]
    run_ranks([lambda group=group: group for group in groups], steps, tape.begin)
    for group in groups:
        group.close()
    return {"a call with a pickle": tape.recording(words)["a call with a pickle"]}


def _record_connections() -> Recording:
    """What an agent of a TCP backend says when it connects to another one; of the store only the keys."""
    tap = SocketTap()
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname()[:2])
    agents: list[Any] = [None] * 2

    def member(rank: int) -> Any:
        backend = fd.rpc.TcpRpcBackend(
            *(rank, 2, address),
            secret=SECRET,
            timeout=TIMEOUT,
            job="golden job",
            listener=listener if rank == 0 else None,
        )
        agents[rank] = fd.rpc.RpcAgent(backend, _FUNCTIONS)
        return rank

    def call(rank: int) -> None:
        if rank == 1:
            agents[1].rpc_sync(0, "echo", 1)

    def start_again(rank: int) -> None:
        if rank == 1:
            agents[1].close()
            member(1)

    with tap.attached():
        steps = [Step("a call", call), Step("another process", start_again), Step("its call", call)]
        run_ranks([lambda rank=rank: member(rank) for rank in range(2)], steps)
        for agent in reversed(agents):
            agent.close()
    found: Recording = {}
    requests: set[str] = set()  # over several connections
    for conversation in tap.conversations(SECRET):
        handshake = [
            {name: text.replace(_address_of(conversation.hello), "HOST:PORT") for name, text in message.items()}
            for message in conversation.handshake
        ]
        if conversation.hello["purpose"] == "store":
            requests |= {_request_words(payload) for _, payload in conversation.store_frames(of_client=True)}
            found["the store of agents"] = {"handshake": handshake}
        else:
            number = sum("connect" in name for name in found) + 1
            found[f"agents that connect, process {number}"] = {"handshake": handshake}
    found["the store of agents"]["requests"] = [{"all": each} for each in sorted(requests)]
    return found


def _request_words(payload: bytes) -> str:
    """A request to a store without its time and this machine's addresses, but with the plain values in it."""
    operation, keys, _, value, expected, amount = msgspec.msgpack.decode(payload)
    shown = []
    for data in (value, expected):
        try:
            shown.append(repr(msgspec.msgpack.decode(data)))
        except msgspec.DecodeError:
            shown.append(repr(data))
    return _ADDRESS.sub(
        "HOST:PORT", f"operation {operation} of {keys}: {shown[0]}, expected {shown[1]}, amount {amount}"
    )


_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")


def _address_of(hello: dict[str, Any]) -> str:
    return hello["address"] or "no address"


def record() -> Recording:
    """All of these."""
    return {**_record_agents(), **_record_pickles(), **_record_connections()}
