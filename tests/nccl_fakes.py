"""Fakes of NCCL's library and communicators and of a GPU's streams, for tests without a GPU.

They work on CPU tensors, with ranks as threads, and record calls. They behave like NCCL: match operations by order
alone, drop NaN in minima and maxima, and multiply by a mean's factor first. With ``is_lazy`` an operation is on its
stream at once, and done when all ranks have called it; without, it is on its stream only then.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.nccl.backend import HybridBackend
from ferrodist.backends.nccl.communicator import NcclError
from ferrodist.backends.nccl.reductions import NCCL_DTYPES
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.collectives import p2p
from ferrodist.collectives import work as operation
from ferrodist.collectives.engines import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STEPS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    0: torch.add,
    1: torch.mul,
    2: lambda a, b: torch.fmax(a, b) if a.dtype.is_floating_point else torch.maximum(a, b),
    3: lambda a, b: torch.fmin(a, b) if a.dtype.is_floating_point else torch.minimum(a, b),
    4: torch.add,
}
_FIRST_MADE_OPERATION = 100


class FakeWork:
    """One operation of one rank: done when all ranks that it needs have called it."""

    def __init__(self, kind: str, facts: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], factor: float) -> None:
        self.kind = kind
        self.facts = facts
        self.tensors = tensors
        self.factor = factor
        self.is_done = False
        self.was_aborted = False


class FakeEvent:
    """The end of the work that a stream had then."""

    def __init__(self, works: list[FakeWork]) -> None:
        self.works = works


_stream_numbers = itertools.count(1)
_streams_by_number: dict[int, FakeStream] = {}


class FakeStream:
    """A stream and the work that fake communicators enqueued on it."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.device = torch.device("cpu")
        self.cuda_stream = next(_stream_numbers)
        self.works: list[FakeWork] = []
        self.waited_for: list[FakeEvent] = []
        _streams_by_number[self.cuda_stream] = self


class FakeStreams:
    """The streams of a GPU, with a log of what was asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: list[FakeStream] = []
        self.kept: list[tuple[int, FakeStream]] = []
        self._local = threading.local()

    def make(self, priority: int = 0) -> FakeStream:
        self.made.append(FakeStream(f"own {len(self.made)}", self.log))
        return self.made[-1]

    def current(self) -> FakeStream:
        if not hasattr(self._local, "current"):
            self._local.current = FakeStream("the caller's", self.log)
        return self._local.current

    def record(self, stream: FakeStream) -> FakeEvent:
        self.log.append(f"record {stream.name}")
        return FakeEvent(list(stream.works))

    def order(self, stream: FakeStream, event: FakeEvent) -> None:
        self.log.append(f"{stream.name} waits")
        stream.waited_for.append(event)

    def has_passed(self, event: FakeEvent) -> bool:
        return all(work.is_done for work in event.works)

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.kept.append((tensor.data_ptr(), stream))

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self._local.current = stream
        try:
            yield
        finally:
            self._local.current = before


@dataclass
class _Channel:
    """The calls of the ranks of one communicator."""

    world_size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    joined: set[int] = field(default_factory=set)
    collectives: dict[int, dict[int, FakeWork]] = field(default_factory=lambda: defaultdict(dict))
    messages: dict[tuple[int, int, str], deque[FakeWork]] = field(default_factory=lambda: defaultdict(deque))


class FakeNccl:
    """The NCCL library of a process whose ranks are threads; shared by all of them."""

    version = (9, 9, 9)
    description = "a fake of NCCL"

    def __init__(self, *, is_lazy: bool = False) -> None:
        self.is_lazy = is_lazy
        self.opened: list[FakeCommunicator] = []
        self.refusal: str | None = None
        self._ids = itertools.count(1)
        self._channels: dict[bytes, _Channel] = {}
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return next(self._ids).to_bytes(128, "big")

    def open(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> FakeCommunicator:
        if self.refusal is not None:
            raise NcclError(self.refusal)
        assert len(unique_id) == 128
        with self._lock:
            channel = self._channels.setdefault(unique_id, _Channel(world_size))
            communicator = FakeCommunicator(self, channel, rank)
            self.opened.append(communicator)
        channel.joined.add(rank)
        return communicator


class FakeCommunicator:
    """One rank's communicator; for one thread at a time, except for abort."""

    def __init__(self, nccl: FakeNccl, channel: _Channel, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []
        self.is_aborted = self.is_destroyed = self.is_finalizing = False
        self.failure: str | None = None
        self.refuses_to_finalize = False
        self.operations: dict[int, float] = {}
        self._made = itertools.count()
        self._nccl = nccl
        self._channel = channel
        self._num_collectives = 0
        self._grouped: list[tuple[FakeWork, FakeStream]] | None = None
        self._grouping_thread = 0
        self._asking = threading.Lock()
        self.begun: list[FakeWork] = []

    def is_ready(self) -> bool:
        assert not self.is_aborted, "asked of a communicator that was aborted"
        assert not self.is_destroyed, "asked of a communicator that is gone"
        assert self._asking.acquire(blocking=False), "asked by two threads at a time"
        try:
            if self.failure is not None:
                raise NcclError(self.failure)
            if self.is_finalizing and self.refuses_to_finalize:
                return False
            if self._nccl.is_lazy:
                return True
            return len(self._channel.joined) == self._channel.world_size and all(work.is_done for work in self.begun)
        finally:
            self._asking.release()

    def begin_group(self) -> None:
        assert self._grouped is None
        assert self.is_ready(), "asked for more before the last was on its stream"
        assert self._asking.acquire(blocking=False), "asked by two threads at a time"
        self.begun = []
        self._grouped = []
        self._grouping_thread = threading.get_ident()

    def end_group(self) -> None:
        assert self._grouping_thread == threading.get_ident(), "groups are their threads'"
        assert self._grouped is not None
        grouped, self._grouped = self._grouped, None
        for work, stream in grouped:
            stream.works.append(work)
            self.begun.append(work)
        self._asking.release()
        for work, _ in grouped:
            self._begin(work)

    def all_reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        self._check_reduced(dtype, out, source)
        self._add("all_reduce", (source.numel(), dtype), (out, source), stream, op)

    def reduce(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, root: int, stream: int) -> None:
        self._check_reduced(dtype, source)
        self._add("reduce", (root, source.numel(), dtype), (out, source), stream, op, rank=root)

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, dtype: int, op: int, *, stream: int) -> None:
        self._check_reduced(dtype, out, source)
        assert source.numel() == out.numel() * self._channel.world_size
        self._add("reduce_scatter", (source.numel(), dtype), (out, source), stream, op)

    def broadcast(self, tensor: torch.Tensor, *, root: int, stream: int) -> None:
        self._add("broadcast", (root,), (tensor,), stream, rank=root)

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, *, stream: int) -> None:
        assert out.numel() == source.numel() * self._channel.world_size
        self._add("all_gather", (), (out, source), stream)

    def send(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        self._add("send", (peer,), (tensor,), stream, rank=peer)

    def recv(self, tensor: torch.Tensor, peer: int, *, stream: int) -> None:
        self._add("recv", (peer,), (tensor,), stream, rank=peer)

    def premultiplied_sum(self, factor: torch.Tensor, dtype: int) -> int:
        assert self.is_ready(), "asked for more before the last was on its stream"
        assert NCCL_DTYPES[factor.dtype] == dtype
        assert factor.shape == (1,)
        assert factor.device.type == "cpu"
        op = _FIRST_MADE_OPERATION + next(self._made)
        self.operations[op] = float(factor)
        return op

    def release_operation(self, op: int) -> None:
        assert self.is_ready(), "asked for more before the last was on its stream"
        del self.operations[op]

    def finalize(self) -> None:
        self.log.append("finalize")
        self.is_finalizing = True

    def destroy(self) -> None:
        assert not self.is_aborted
        self.log.append("destroy")
        self.is_destroyed = True

    def abort(self) -> None:
        assert not self.is_destroyed
        self.log.append("abort")
        self.is_aborted = True
        with self._channel.lock:
            for works in self._channel.collectives.values():
                if self.rank in works:
                    _abandon(works[self.rank])
            for works_of_pair in self._channel.messages.values():
                for work in works_of_pair:
                    _abandon(work)

    def _check_reduced(self, dtype: int, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            assert NCCL_DTYPES[tensor.dtype] == dtype, f"{tensor.dtype} is not NCCL's number {dtype}"

    def _add(
        self,
        kind: str,
        facts: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        stream: int,
        op: int | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        assert self._grouped is not None, f"{kind} outside of a group"
        for tensor in tensors:
            assert tensor.dim() == 1
            assert tensor.is_contiguous()
            assert tensor.numel(), f"{kind} of nothing"
        assert op is None or op in _STEPS or op in self.operations, f"{op} is no operation"
        assert rank is None or 0 <= rank < self._channel.world_size, f"{rank} is no rank"
        self.log.append(kind)
        factor = 1.0 if op is None else self.operations.get(op, 1.0)
        kind_of_op = 0 if op is not None and op >= _FIRST_MADE_OPERATION else op
        work = FakeWork(kind, facts if op is None else (*facts, kind_of_op), tensors, factor)
        self._grouped.append((work, _streams_by_number[stream]))

    def _begin(self, work: FakeWork) -> None:
        if work.kind in ("send", "recv"):
            self._begin_message(work)
            return
        channel, number = self._channel, self._num_collectives
        self._num_collectives += 1
        with channel.lock:
            works = channel.collectives[number]
            works[self.rank] = work
            if len(works) == channel.world_size:
                del channel.collectives[number]
                _do([works[rank] for rank in range(channel.world_size)])

    def _begin_message(self, work: FakeWork) -> None:
        (peer,) = work.facts
        sender, receiver = (self.rank, peer) if work.kind == "send" else (peer, self.rank)
        other_kind = "recv" if work.kind == "send" else "send"
        with self._channel.lock:
            waiting = self._channel.messages[sender, receiver, other_kind]
            if not waiting:
                self._channel.messages[sender, receiver, work.kind].append(work)
                return
            other = waiting.popleft()
            source, target = (work, other) if work.kind == "send" else (other, work)
            if (
                source.tensors[0].numel() == target.tensors[0].numel()
                and source.tensors[0].dtype == target.tensors[0].dtype
            ):
                _write(target, source.tensors[0])
                source.is_done = target.is_done = True
            # else both wait for ever, as NCCL would


def _abandon(work: FakeWork) -> None:
    work.was_aborted = work.is_done = True


def _do(works: list[FakeWork]) -> None:
    """Do the ranks' operation; nothing if their calls differ."""
    first = works[0]
    if all(work.kind == first.kind and work.facts == first.facts for work in works):
        _DOERS[first.kind](works)
    for work in works:
        work.is_done = True


def _write(work: FakeWork, value: torch.Tensor) -> None:
    """Write to memory, unseen by autograd."""
    work.tensors[0].data.copy_(value)


def _folded(works: list[FakeWork]) -> torch.Tensor:
    op = works[0].facts[-1]
    inputs = [work.tensors[1].clone() for work in works]
    if op == 4:
        inputs = [tensor * torch.tensor(1 / len(works), dtype=tensor.dtype) for tensor in inputs]
    inputs = [
        tensor if work.factor == 1.0 else tensor * torch.tensor(work.factor, dtype=tensor.dtype)
        for tensor, work in zip(inputs, works, strict=True)
    ]
    return reduce(_STEPS[op], inputs)


def _do_all_reduce(works: list[FakeWork]) -> None:
    result = _folded(works)
    for work in works:
        _write(work, result)


def _do_reduce(works: list[FakeWork]) -> None:
    _write(works[works[0].facts[0]], _folded(works))


def _do_reduce_scatter(works: list[FakeWork]) -> None:
    for work, part in zip(works, _folded(works).chunk(len(works)), strict=True):
        _write(work, part)


def _do_broadcast(works: list[FakeWork]) -> None:
    whole = works[works[0].facts[0]].tensors[0].clone()
    for work in works:
        _write(work, whole)


def _do_all_gather(works: list[FakeWork]) -> None:
    whole = torch.cat([work.tensors[1] for work in works])
    for work in works:
        _write(work, whole)


_DOERS = {
    "all_reduce": _do_all_reduce,
    "reduce": _do_reduce,
    "reduce_scatter": _do_reduce_scatter,
    "broadcast": _do_broadcast,
    "all_gather": _do_all_gather,
}


def fake_groups(
    world_size: int, *, nccl: FakeNccl | None = None, kind: Any = None, timeout: float = 60.0, control: Any = None
) -> list[Any]:
    """Groups over a fake of NCCL, for `run_ranks`: by default `HybridBackend` over groups of threads."""
    shared = FakeNccl() if nccl is None else nccl
    controls = control(world_size) if control else SimulatedBackend.create_group(world_size, timeout=timeout)
    groups = []
    for one in controls:
        streams = FakeStreams()
        groups.append((kind or HybridBackend)(one, library=lambda: shared, streams=lambda _, streams=streams: streams))
        groups[-1].shared, groups[-1].fake_streams = shared, streams
    return groups


def send_cpu_tensors_to_nccl(monkeypatch: Any) -> None:
    """Have collectives and messages treat CPU tensors as GPU tensors, in groups with NCCL."""
    monkeypatch.setattr(select, "host_engine_of", lambda group: group.engine("cuda") or operation.host_engine_of(group))
    monkeypatch.setattr(p2p, "device_p2p_of", lambda group, device: group.p2p("cuda"))
