"""What the ranks of a group send each other: calls that are compared, the data of collectives, tensors and objects.

On groups of two and of three ranks that are threads, by the collectives that are made of messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import TYPE_CHECKING, Any

import golden_names as names
import torch
import torch.distributed as dist
from golden_support import Recording, Step, Tape, in_short, run_ranks, split, taped_group

import ferrodist as fd

if TYPE_CHECKING:
    from golden_support import Fields

_CALL, _HEAD = 1, 4
_CALL_BYTES = 192
_IN_WORDS = ("operation", "dtype", "reduce op")
_CALL_FIELDS = (
    *(("operation", 24), ("dtype", 16), ("reduce op", 18), ("root", 4), ("dim", 2), ("count", 8), ("sequence", 8)),
    ("payload length", 4),
)


def call_words(record: bytes) -> Fields:
    """The fields of a call; what follows its payload is left out where it is zero."""
    fields = split(record.rstrip(b"\0").ljust(_CALL_BYTES - 108, b"\0"), *_CALL_FIELDS)
    for name in _IN_WORDS:
        fields[name] = repr(bytes.fromhex(fields[name]).rstrip(b"\0").decode("ascii", "replace"))
    if not fields.get("payload", "").strip("0"):
        fields.pop("payload", None)
    return {"size": str(len(record)), **fields}


_HIDDEN = {  # operations, and the part of what ranks say with them that is of the machine
    "hosts": (16, 32),
    "open messages": (32, 108),
    "open": (32, 108),
    "connect hosts": (0, 108),
}
_LENGTH_AT, _PAYLOAD_AT = 80, 84
_TAG_BYTES = 16
_ABOUT = struct.Struct("<QQQi")
_ALL = -1


def machine_words(payload: bytes, key: bytes = b"") -> Fields:
    """The calls of ranks that open a group, one of one rank or those of all, without what is of this machine.

    Args:
        payload: They.
        key: With which they are tagged, if they are.
    """
    size = _CALL_BYTES + (_TAG_BYTES if key else 0)
    fields: dict[str, str] = {"bytes of calls": str(len(payload))}
    num_calls = len(payload) // size
    for number in range(num_calls):
        record = payload[number * size :][:_CALL_BYTES]
        rank = number if num_calls > 1 else 1
        fields |= {f"{number}: {name}": text for name, text in _hidden_words(record).items()}
        if key:
            fields[f"{number}: tag"] = _tag_words(payload[number * size :][_CALL_BYTES:size], record, key, rank)
    if key and num_calls > 1:
        fields["tag of all"] = _tag_words(payload[-_TAG_BYTES:], payload[:-_TAG_BYTES], key, _ALL)
    return fields


def _tag_words(found: bytes, covered: bytes, key: bytes, rank: int) -> str:
    (sequence,) = struct.unpack_from("<Q", covered, 72)
    about = _ABOUT.pack(0, 0, sequence, rank)
    expected = hashlib.blake2b(about + covered, key=key, digest_size=_TAG_BYTES).digest()
    return "right" if found == expected else f"wrong: {found.hex()}"


def said_with(record: bytes) -> bytes:
    """What a rank says with a call."""
    length = int.from_bytes(record[_LENGTH_AT:_PAYLOAD_AT], "little")
    return record[_PAYLOAD_AT : _PAYLOAD_AT + length]


def _hidden_words(record: bytes) -> Fields:
    fields = call_words(record[:_PAYLOAD_AT].ljust(_CALL_BYTES, b"\0"))
    said = said_with(record)
    start, stop = _HIDDEN.get(record[:24].rstrip(b"\0").decode(), (0, 0))
    if (start, stop) == (0, 108):
        return {**fields, "payload length": "any"}
    hidden = b"-" * max(0, min(stop, len(said)) - start)
    return {**fields, "what is said": (said[:start] + hidden + said[start + len(hidden) :]).hex()}


def words(tag: int, data: bytes) -> Fields:
    """The fields of a message."""
    channel = tag >> 56 & 0xFF
    if channel == _CALL and len(data) % _CALL_BYTES == 0:
        if len(data) == _CALL_BYTES:
            return {"message": "a call", **call_words(data)}
        others = hashlib.sha256(data[_CALL_BYTES:]).hexdigest()[:32]
        return {
            "message": f"{len(data) // _CALL_BYTES} calls",
            **call_words(data[:_CALL_BYTES]),
            "hash of the others": others,
        }
    if channel == _HEAD:
        return {
            "message": "a tensor's head",
            **split(data, ("number", 8), ("dtype", 1), ("dims", 1), ("shape", 96), rest="elements"),
        }
    return {"message": f"on channel {channel}", "size": str(len(data)), "bytes": in_short(data)}


_OPS = [*fd.ReduceOp]
_REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_ALL_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def _elements(dtype: torch.dtype, count: int, rank: int = 0) -> torch.Tensor:
    return ((torch.arange(count) + rank) % 5 + 1).to(dtype)


def _allreduces(group: Any) -> None:
    for op in _OPS:
        for dtype in (torch.float32, torch.int64):
            if dtype.is_floating_point and op.value in ("band", "bor", "bxor"):
                continue
            if not dtype.is_floating_point and op.value == "mean":
                continue
            fd.allreduce(_elements(dtype, 3, group.rank), op, group=group)
    fd.allreduce(_elements(torch.float32, 3), fd.premultiplied_sum(0.5 + group.rank), group=group)
    for dtype in _REAL:
        fd.allreduce(_elements(dtype, 2, group.rank), group=group)
    fd.allreduce(torch.tensor([True, False, True]), fd.ReduceOp.BOR, group=group)
    fd.allreduce(torch.tensor([1 + 2j]), group=group)
    fd.allreduce(torch.tensor(3.0), group=group)
    fd.allreduce(torch.empty(0), group=group)
    fd.allreduce(_elements(torch.float32, 1000, group.rank), group=group)
    fd.async_allreduce(_elements(torch.float32, 3, group.rank), group=group).wait()


def _rooted(group: Any) -> None:
    last = group.world_size - 1
    size = group.world_size
    for root in (0, last):
        fd.reduce(_elements(torch.float32, 3, group.rank), root, fd.ReduceOp.MAX, group=group)
        fd.broadcast(_elements(torch.bfloat16, 3, group.rank), root, group=group)
        fd.gather(_elements(torch.int32, 2, group.rank), root, group=group)
        fd.gather(_elements(torch.float32, 4, group.rank).view(2, 2), root, dim=1, group=group)
        fd.scatter(_elements(torch.float32, 2 * size) if group.rank == root else None, root, group=group)
        columns = _elements(torch.int64, 2 * size).view(2, size)
        fd.scatter(columns if group.rank == root else None, root, dim=1, group=group)
    fd.broadcast(_elements(torch.float32, 5000), 0, group=group)
    fd.async_broadcast(_elements(torch.float32, 3), 0, group=group).wait()


def _gathers(group: Any) -> None:
    size = group.world_size
    fd.all_gather(_elements(torch.float32, 3, group.rank), group=group)
    fd.all_gather(_elements(torch.float32, 4, group.rank).view(2, 2), 1, group=group)
    fd.async_all_gather(_elements(torch.int16, 3, group.rank), group=group).wait()
    fd.all_gather_uneven(_elements(torch.float32, group.rank + 1), group=group)
    fd.all_gather_uneven(torch.zeros(2, group.rank, dtype=torch.int8), 1, group=group)
    fd.reduce_scatter(_elements(torch.float32, 2 * size, group.rank), group=group)
    fd.reduce_scatter(_elements(torch.int64, 2 * size).view(2, size), fd.ReduceOp.MAX, dim=1, group=group)
    fd.async_reduce_scatter(_elements(torch.float64, size), group=group).wait()
    fd.reduce_scatter_tensor(torch.empty(2), _elements(torch.float32, 2 * size), group=group)


def _exchanges(group: Any) -> None:
    size, rank = group.world_size, group.rank
    fd.all_to_all(_elements(torch.float32, 2 * size, rank), group=group)
    fd.all_to_all([_elements(torch.int64, 3, rank + peer) for peer in range(size)], group=group)
    fd.async_all_to_all(_elements(torch.float32, size), group=group).wait()
    counts = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
    sends, receives = counts[rank], [row[rank] for row in counts]
    fd.all_to_all_single_uneven(_elements(torch.float32, sum(sends), rank), sends, receives, group=group)
    fd.barrier(group)
    fd.monitored_barrier(group)
    group.barrier()


def _fusions(group: Any) -> None:
    with fd.coalesce(group):
        begun = [
            fd.async_allreduce(_elements(torch.float32, 3, group.rank), group=group),
            fd.async_allreduce(_elements(torch.float32, 4, group.rank), group=group),
            fd.async_allreduce(_elements(torch.int64, 2, group.rank), fd.ReduceOp.MAX, group=group),
            fd.async_all_gather(_elements(torch.float32, 2), group=group),
            fd.async_broadcast(_elements(torch.int64, 2), 1, group=group),
            fd.async_broadcast(_elements(torch.int64, 5), 1, group=group),
            fd.async_reduce_scatter(_elements(torch.float32, group.world_size), group=group),
        ]
    for each in begun:
        each.wait()


@dataclasses.dataclass
class _Point:
    x: int
    y: float


_OBJECTS: list[Any] = [
    *(None, True, -1, 1 << 63, 0.5, "text", b"bytes", [1, [2, (3,)]], {"a": {1: None}, (1, "b"): []}),
    *(_Point(1, 2.0), "long " * 500),
]


def _objects(group: Any) -> None:
    for value in _OBJECTS:
        fd.all_gather_object(value, group=group)
    fd.broadcast_object({"epoch": 3} if group.rank == 1 else None, 1, group=group)
    fd.gather_object([group.rank], 1, group=group)
    fd.scatter_object([{"part": rank} for rank in range(group.world_size)] if group.rank == 0 else None, group=group)
    fd.broadcast_object({1, 2} if group.rank == 0 else None, group=group, allow_pickle=True)
    if group.rank == 0:
        fd.send_object({"key": [1, 2]}, 1, tag=5, group=group)
        fd.send_object(frozenset([1]), 1, group=group, allow_pickle=True)
    elif group.rank == 1:
        fd.recv_object(0, tag=5, group=group)
        fd.recv_object(0, group=group, allow_pickle=True)


def _tensors(group: Any) -> None:
    sent = [
        *(_elements(dtype, 3) for dtype in _ALL_DTYPES),
        *(torch.tensor(1.5), torch.empty(0), torch.empty(2, 0, 3), torch.arange(6.0).view(2, 3).t()),
        *(
            torch.arange(10)[::3],
            torch.arange(70_000, dtype=torch.int32),
            torch.zeros([1] * 12),
            torch.tensor([1j]).conj(),
        ),
    ]
    for place, tensor in enumerate(sent):
        if group.rank == 0:
            fd.send(tensor, 1, tag=place, group=group)
        elif group.rank == 1:
            fd.recv(None, None, 0, tag=place, group=group)
    if group.rank < 2:
        other = 1 - group.rank
        fd.sendrecv(_elements(torch.float32, 2), other, (2,), other, tag=(1 << 56) - 1, group=group)
        into = torch.empty(2)
        fd.batch([fd.Send(_elements(torch.float32, 2), other, 3), fd.Recv(into, other, 3)], group=group)
        if group.rank == 0:
            group.send(b"plain bytes", 1, tag=9)
            group.send(b"", 1, tag=9)
            group.send(bytes(300_000), 1, tag=9)
        else:
            for size in (11, 0, 300_000):
                group.recv(bytearray(size), 0, tag=9)


def _subgroups(group: Any) -> None:
    last = group.world_size - 1
    everyone = fd.new_group(group=group)
    again = fd.new_group(list(range(group.world_size)), group=group)
    backwards = fd.new_group(list(range(group.world_size))[::-1], group=group)
    pair = fd.new_group([0, last], group=group)
    for each in (everyone, again, backwards, pair):
        if each.is_member:
            fd.allreduce(_elements(torch.float32, 2), group=each)
            fd.barrier(each)
    if pair.is_member:
        inner = fd.new_group([1, 0], group=pair)
        fd.broadcast(_elements(torch.float32, 2), 0, group=inner)
        labelled = fd.SubBackend(group, [0, last], label="a label")
        labelled.barrier()
        if group.rank == 0:
            fd.send(_elements(torch.float32, 2), 1, group=labelled)
        else:
            fd.recv(None, None, 0, group=labelled)


def _late(group: Any) -> None:
    """The last rank says to the first one that its time is over, for the others don't come."""
    sub = fd.new_group(group=group)
    if group.rank == group.world_size - 1:
        try:
            sub.barrier(0.05)
        except fd.DistributedTimeoutError:
            return
        raise AssertionError("there was nobody else")


def _torch_calls(group: Any) -> None:
    """What a process group of torch makes of torch's calls."""
    pg = names.torch_process_group(fd.new_group(group=group))
    size, rank = group.world_size, group.rank

    def options(kind: Any, **values: Any) -> Any:
        made = kind()
        for name, value in values.items():
            setattr(made, name, value)
        return made

    def tensor(count: int = 2) -> torch.Tensor:
        return _elements(torch.float32, count, rank)

    def several(count: int = 2) -> list[torch.Tensor]:
        return [tensor(count) for _ in range(size)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        pg.allreduce([tensor()], options(dist.AllreduceOptions, reduceOp=op)).wait()
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        pg.allreduce([torch.tensor([rank])], options(dist.AllreduceOptions, reduceOp=op)).wait()
    pg.broadcast([tensor()], options(dist.BroadcastOptions, rootRank=1, rootTensor=0)).wait()
    pg.reduce([tensor()], options(dist.ReduceOptions, rootRank=1)).wait()
    pg.allgather([several()], [tensor()]).wait()
    pg._allgather_base(tensor(2 * size), tensor()).wait()
    pg.gather([several()] if rank == 0 else [], [tensor()], options(dist.GatherOptions, rootRank=0)).wait()
    pg.scatter([tensor()], [several()] if rank == 0 else [], options(dist.ScatterOptions, rootRank=0)).wait()
    pg.reduce_scatter([tensor()], [several()], options(dist.ReduceScatterOptions)).wait()
    pg._reduce_scatter_base(tensor(), tensor(2 * size), options(dist.ReduceScatterOptions)).wait()
    pg.alltoall_base(tensor(2 * size), tensor(2 * size), [], [], options(dist.AllToAllOptions)).wait()
    pg.alltoall(several(), several(), options(dist.AllToAllOptions)).wait()
    pg.barrier(options(dist.BarrierOptions)).wait()
    if rank == 0:
        pg.send([tensor()], 1, 7).wait()
    elif rank == 1:
        pg.recv([tensor()], 0, 7).wait()


_STEPS = [
    Step("allreduce", _allreduces),
    Step("collectives with a root", _rooted),
    Step("all_gather and reduce_scatter", _gathers),
    Step("all_to_all and barriers", _exchanges),
    Step("coalesced collectives", _fusions),
    Step("objects", _objects),
    Step("tensors and bytes from rank to rank", _tensors),
    Step("sub-groups", _subgroups),
    Step("a process group of torch", _torch_calls),
    Step("a rank that is late", _late),
]


def record() -> Recording:
    """Run all of it."""
    found: Recording = {}
    for world_size in (2, 3):
        tape = Tape()
        groups = taped_group(world_size, tape)
        run_ranks([lambda group=group: group for group in groups], _STEPS, tape.begin)
        for group in groups:
            group.close()
        for step, streams in tape.recording(words).items():
            if step:
                found[f"{step}, {world_size} ranks"] = streams
    return found
