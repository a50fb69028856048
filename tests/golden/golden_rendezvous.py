"""How ranks find each other: keys and values of stores, the environment of ranks, names of places, and numbers."""

from __future__ import annotations

import ast
import hmac
import json
import os
import pwd
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import golden_names as names
import msgspec
import torch.distributed as dist
from golden_support import SECRET, TIMEOUT, Recording, SocketTap, run_ranks, split

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from golden_support import Fields

_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")


def _without_address(text: str) -> str:
    return _ADDRESS.sub("HOST:PORT", text)


# Stores.


def _value_words(key: str, value: bytes) -> str:
    """A value of a store without what is of this machine."""
    if key.endswith("tcp/address"):
        return _without_address(value.decode())
    if re.search(r"attendance/rank/\d+$", key):  # where and which process, and something random
        host, network, process, token = msgspec.msgpack.decode(value)
        is_so = host == socket.gethostname() and isinstance(network, str) and process == os.getpid()
        return f"an array of host, network, process: {'these' if is_so else 'others'}; {token!r}"
    if key.endswith("ferrodist/charter"):
        charter = msgspec.msgpack.decode(value)
        proof = hmac.digest(SECRET, b"ferrodist charter\0" + charter["nonce"], "sha256")
        charter["proof"] = "right" if charter["proof"] == proof else charter["proof"].hex()
        charter["nonce"] = f"{len(charter['nonce'])} random bytes"
        return repr(charter)
    try:
        return f"plain {msgspec.msgpack.decode(value)!r}, {value.hex()}"
    except msgspec.DecodeError:
        return value.hex()


def _read_file(path: Path) -> tuple[Fields, dict[str, bytes]]:
    data = path.read_bytes()
    fields = split(data[:26], ("magic", 18), ("generation", 8))
    values: dict[str, bytes] = msgspec.msgpack.decode(data[26:], type=dict[str, bytes])
    assert msgspec.msgpack.encode(values) == data[26:]
    return fields, values


def _record_file_store(folder: Path) -> Recording:
    store = names.file_store(folder / "store")
    store.set("key", b"value")
    store.add("count", 5)
    store.compare_set("other", b"", b"desired")
    store.delete("key")
    fields, _ = _read_file(folder / "store")
    files = [{"name": path.name, "mode": oct(path.stat().st_mode)} for path in sorted(folder.iterdir())]
    whole = (folder / "store").read_bytes()
    return {"a store in a file": {"header": [fields], "all": [{"bytes": whole.hex()}], "files": files}}


def _record_file_rendezvous(folder: Path) -> Recording:
    """The keys of a job that meets in a file, from rendezvous to the group of all ranks."""
    path = folder / "meeting"
    found: dict[str, bytes] = {}
    everyone = threading.Barrier(2)

    def member(rank: int) -> None:
        membership = names.rendezvous(
            *(f"file://{path}",), rank=rank, world_size=2, timeout=TIMEOUT, secret=SECRET, job="golden job"
        )
        group = fd.TcpBackend.from_membership(membership, TIMEOUT, names.deadline(TIMEOUT))
        everyone.wait(TIMEOUT)
        if rank == 0:
            found.update(_read_file(path)[1])
        everyone.wait(TIMEOUT)
        group.close()
        membership.close()

    run_ranks([lambda rank=rank: member(rank) for rank in range(2)], [])
    return {"a rendezvous in a file": {key: [{"value": _value_words(key, found[key])}] for key in sorted(found)}}


def _record_tcp_rendezvous() -> Recording:
    """What rank 1 asks the store of rank 0 for, whenever it comes."""
    tap = SocketTap()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    everyone = threading.Barrier(2)

    def member(rank: int) -> None:
        membership = names.rendezvous(
            f"tcp://{address}", rank=rank, world_size=2, timeout=TIMEOUT, secret=SECRET, job="golden job"
        )
        everyone.wait(TIMEOUT)
        if rank == 1:
            membership.store.set("a key of the job", b"value")
        group = fd.TcpBackend.from_membership(membership, TIMEOUT, names.deadline(TIMEOUT))
        everyone.wait(TIMEOUT)
        group.close()
        membership.close()

    with tap.attached():
        run_ranks([lambda rank=rank: member(rank) for rank in range(2)], [])
    keys: set[str] = set()
    hellos = []
    for conversation in tap.conversations(SECRET):
        hellos.append({"hello": _without_address(repr(conversation.hello))})
        if conversation.hello["purpose"] == "store":
            for _, payload in conversation.store_frames(of_client=True):
                keys.update(msgspec.msgpack.decode(payload)[1])
    hellos = [hello for place, hello in enumerate(hellos) if hello not in hellos[:place]]
    return {"a rendezvous at an address": {"keys": [{"key": key} for key in sorted(keys)], "hellos": hellos}}


def _record_torch_store() -> Recording:
    """What a process group of torch leaves in torch's store."""
    store = dist.HashStore()
    dist.init_process_group("ferrodist", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
    streams: dict[str, list[Fields]] = {}
    for key in sorted(store.list_keys()):
        _, found, own = key.partition("ferrodist/")  # what is before it is torch's
        if found:  # the charter is proven by the user's secret, which is another one elsewhere
            is_proven = "charter" in key
            streams[found + own] = [] if is_proven else [{"value": _value_words(key, bytes(store.get(key)))}]
    return {"torch's store": streams}


# The launcher.

_PROGRAM = """
import json, os, pathlib
pathlib.Path(os.environ["GOLDEN_FOLDER"], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
_HIDDEN = {"MASTER_PORT", "FERRODIST_SECRET", "PYTHONPATH", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}


def _record_launcher(folder: Path) -> Recording:
    """The environment that the launcher gives to ranks, beside its own."""
    program = folder / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    base = {"PATH": os.environ["PATH"], "HOME": str(folder), "GOLDEN_FOLDER": str(folder)}
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(program)]
    subprocess.run(command, env=base, check=True, capture_output=True, timeout=TIMEOUT)
    streams: dict[str, list[Fields]] = {}
    for rank in range(2):
        found = json.loads((folder / str(rank)).read_text(encoding="utf-8"))
        own = {name: value for name, value in found.items() if base.get(name) != value and name != "LC_CTYPE"}
        streams[f"rank {rank}"] = [
            {"name": name, "value": "any" if name in _HIDDEN else value} for name, value in sorted(own.items())
        ]
    return {"the environment of a rank": streams}


_VARIABLE = re.compile(
    r"(FERRODIST|MASTER|TORCHELASTIC|GROUP|ROLE|LOCAL|OMPI|PRTE|PMIX?|SLURM|MV2|OMP|UCC|NCCL)_[A-Z0-9_]*|RANK|WORLD_SIZE"
)


def _record_variables() -> Recording:
    """The names of variables of the environment that the source has, wherever in it."""
    found: set[str] = set()
    exported: set[str] = set()  # names of Python objects, which may look the same
    for path in Path(fd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exported.update(str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
                found.add(node.value)
    return {
        "variables of the environment": {
            "those that the source names": [{"name": name} for name in sorted(found - exported)]
        }
    }


# Names and numbers.


def _record_numbers() -> Recording:
    numbers: dict[str, Mapping[str, Any]] = {**names.NUMBERS, "secrets of users": _secret_places()}
    errors = [getattr(fd, name) for name in dir(fd)]
    wire_names = sorted(
        each.__name__
        for each in errors
        if isinstance(each, type) and issubclass(each, (fd.DistributedError, fd.ReduceOp))
    )
    return {
        "numbers and names": {
            **{what: [{name: str(number)} for name, number in those.items()] for what, those in numbers.items()},
            "errors, which travel by their names": [{"name": name} for name in wire_names],
            "reductions": [{"name": op.name, "value": op.value, "number": str(op.number)} for op in fd.ReduceOp],
        }
    }


def _secret_places() -> dict[str, str]:
    user = str(os.geteuid())
    home = pwd.getpwuid(os.geteuid()).pw_dir
    places = [str(path) for path in names.secret_places()]
    return {
        f"place {number}": place.replace(f"-{user}", "-USER").replace(home, "HOME", 1)
        for number, place in enumerate(places)
    }


def record() -> Recording:
    """All of these."""
    with tempfile.TemporaryDirectory(prefix="ferrodist-golden-") as name:
        folder = Path(name)
        parts = [folder / part for part in ("store", "rendezvous", "launcher")]
        for part in parts:
            part.mkdir()
        return {
            **_record_file_store(parts[0]),
            **_record_file_rendezvous(parts[1]),
            **_record_tcp_rendezvous(),
            **_record_torch_store(),
            **_record_launcher(parts[2]),
            **_record_variables(),
            **_record_numbers(),
        }
