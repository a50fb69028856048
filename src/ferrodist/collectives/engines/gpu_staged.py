"""The collectives of tensors on GPUs over the group's own engine on the host.

[Note: two groups]
An operation that fits into one segment is one call of the group's own engine, at the place that was reserved for it. A
larger one is many calls, and nobody knew how many when places were reserved. The first of them, at its place, says what
the whole operation is, so that ranks which disagree are told of that and not of segments. The segments go over a group
of their own with the same ranks, whose places are taken only by the operation whose turn it is.

The bits are those of the whole in one call: every reduction folds element by element, in rank order.

Tensors on GPUs from rank to rank, through the host's memory.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda import streams_of
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import writing_to
from ferrodist.collectives.cuda import SEGMENT_BYTES, CopyPipeline, NotReachedError, wait_until_passed
from ferrodist.collectives.engines.gpu_staged_plan import StagedOp
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.payloads import dtype_text, unpack_payloads
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp
from ferrodist.collectives.symmetric_memory import empty_symmetric
from ferrodist.collectives.tensor_protocol import Recv, Send, batch_on_host
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import BackendUnavailable, DistributedError, DistributedTimeoutError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.cuda import Streams

_KEY = "collectives.staged"

# What ranks say of a large operation: dtype's place in DTYPES, number of the reduction or -1, root, dim, count; and
# elements of their own largest part.
_HEAD = struct.Struct("<Bbihqq")
_NUM_COMPARED = 5

_CLOSE_SECONDS = 1.0
"""How long closing a group waits for copies to a device."""


class HostStagedEngine:
    """`HostEngine` of tensors on GPUs, each of which returns when the host has done its part.

    Args:
        group: Any backend whose engine carries tensors on the CPU.
        find_streams: The streams of a device.
        segment_bytes: How much is worked on at once, at most; the same on all ranks.
    """

    def __init__(
        self,
        group: Backend,
        find_streams: Callable[[torch.device], Streams] = streams_of,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._group = group
        self._find_streams = find_streams
        self._segment_bytes = segment_bytes
        self._sequencer = Sequencer(lambda: group.failure is not None)
        self._lanes: dict[torch.device, CopyPipeline] = {}
        self._inner: SubBackend | None = None
        self._has_shared = False
        group.on_synchronize(self._synchronize)
        group.on_close(self._drop_lanes)

    def reserve(self) -> int:
        """Take the next position among the group's collectives."""
        return self._sequencer.reserve(host_engine_of(self._group).reserve)

    def await_turn(self, sequence: int) -> None:
        """Return when all before have ended, or the group has."""
        if not self._sequencer.wait(sequence, math.inf):
            return  # the group has failed: the operation raises it
        host_engine_of(self._group).await_turn(sequence)

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective; what fails in the middle ends the group, for its ranks are out of step then."""
        if op.device is None:
            with self._sequencer.releasing(sequence):
                return host_engine_of(self._group).run(op, sequence)
        group, deadline = self._group, Deadline(op.timeout)
        try:
            with self._sequencer.releasing(sequence):
                self._run_segments(StagedOp(op, group.rank), op.device, deadline, sequence)
        except GroupClosedError:
            raise
        except NotReachedError:
            late = self._late(op, deadline, "the GPU is still busy with what came before it in the current stream")
            group.abort(late)
            raise (group.failure or late).fresh() from None
        except DistributedError as error:
            group.abort(error)
            raise (group.failure or error).fresh() from None
        except BaseException as failure:
            group.abort(left_reason(group.rank, op.signature(), failure))
            raise
        return None

    def _run_segments(self, staged: StagedOp, device: torch.device, deadline: Deadline, sequence: int) -> None:
        op = staged.op
        self._check_alive()
        if not self._sequencer.wait(sequence, deadline.remaining()):
            self._check_alive()
            raise self._late(op, deadline, "what this rank started before it has not ended")
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = CopyPipeline(self._find_streams(device), self._segment_bytes)
        engine = host_engine_of(self._group)
        windows = staged.windows(staged.largest, self._segment_bytes)
        # Ranks may differ in the parts of an all_to_all, and so in the number of segments.
        if len(windows) == 1 and op.kind is not CollectiveKind.ALL_TO_ALL:
            only = staged.segment(windows[0], engine, lambda: (deadline.remaining(), sequence))
            lane.run([only], op.tensor.dtype, deadline, self._check_alive)
            return
        windows = staged.windows(self._agree(staged, deadline, sequence), self._segment_bytes)
        inner = self._inner_group()
        if not self._has_shared:
            self._share_memory(inner, lane, deadline)
        engine = host_engine_of(inner)
        segments = [
            staged.segment(window, engine, lambda: (deadline.remaining(), engine.reserve())) for window in windows
        ]
        lane.run(segments, op.tensor.dtype, deadline, self._check_alive)

    def _check_alive(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure.fresh()

    def _agree(self, staged: StagedOp, deadline: Deadline, sequence: int) -> int:
        """Compare the operation with the other ranks'; returns the elements of the largest part on any."""
        op = staged.op
        number = -1 if op.op is None else op.op.number
        head = _HEAD.pack(DTYPES.index(op.tensor.dtype), number, op.root, op.dim, op.signature().count, staged.largest)
        name = f"{op.kind} on GPUs"
        share = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=head, timeout=deadline.remaining())
        payloads = host_engine_of(self._group).run(share, sequence) or []
        heads = unpack_payloads(_HEAD, payloads, self._group, name)
        if len({said[:_NUM_COMPARED] for said in heads}) > 1:
            raise self._group.verifier.mismatch_error(
                [_call_of(op.kind.value, said[:_NUM_COMPARED], sequence) for said in heads]
            )
        return int(max(said[_NUM_COMPARED] for said in heads))

    def _inner_group(self) -> SubBackend:
        """The group of the segments; see [Note: two groups]."""
        if self._inner is None:
            group = self._group
            inner = self._inner = SubBackend(
                group, range(group.world_size), name=group.name, label="staged", ends_with_parent=True
            )
            group.on_close(inner.close)
        return self._inner

    def _share_memory(self, inner: SubBackend, lane: CopyPipeline, deadline: Deadline) -> None:
        """Have the first device's slots in symmetric memory, where there is any: then nothing is copied aside.

        All ranks come to this in the same operation. Where a rank's other devices take turns with the first, the engine
        copies aside.
        """
        self._has_shared = True
        if inner.engine("cpu") is None:
            return
        try:
            memory = empty_symmetric((lane.shared_bytes,), torch.uint8, group=inner, timeout=deadline.remaining())
        except BackendUnavailable:  # on all ranks
            return
        release = lane.share(memory)
        if release is not None:
            # It may be collected without being closed; and at exit the driver goes by itself.
            weakref.finalize(lane, release).atexit = False

    def _late(self, op: CollectiveOp, deadline: Deadline, why: str) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"{op.signature()} on group {self._group.name!r}: {why}, after {Elapsed.of(deadline)}."
            f" Pass a larger timeout. Reported by rank {self._group.rank}.",
            ranks=(self._group.rank,),
        )

    def _synchronize(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        try:
            self._wait_until_idle(deadline)
            for lane in list(self._lanes.values()):
                lane.synchronize(deadline)
        except (NotReachedError, TimeoutError) as error:
            if isinstance(error, DistributedError):  # the group's failure
                raise
            raise DistributedTimeoutError(
                f"what was started on GPUs in group {self._group.name!r} is not done after {Elapsed.of(deadline)} (rank"
                f" {self._group.rank}): call synchronize() again"
            ) from None

    def _wait_until_idle(self, deadline: Deadline) -> None:
        if not self._sequencer.wait_until_idle(deadline.remaining()):
            self._check_alive()
            raise TimeoutError

    def _drop_lanes(self) -> None:
        """Free their memory, unless a device that does not come to its end may still copy from it."""
        for device, lane in list(self._lanes.items()):
            with contextlib.suppress(Exception):  # of a device that has failed, too
                lane.synchronize(Deadline(_CLOSE_SECONDS))
                del self._lanes[device]


_making = threading.Lock()


def host_staged_engine_of(group: Backend) -> HostStagedEngine:
    """The staged collectives of a group, made when first needed."""
    found = group.attachments.get(_KEY)
    if found is None:
        with _making:
            found = group.attachments.get(_KEY)
            if found is None:
                found = group.attachments[_KEY] = HostStagedEngine(group)
    assert isinstance(found, HostStagedEngine)
    return found


def _call_of(operation: str, said: tuple[int, ...], sequence: int) -> CollectiveSignature:
    """What a rank said of its operation, in words."""
    place, number, root, dim, count = said
    ops = [*map(str, ReduceOp), "premultiplied_sum"]
    return CollectiveSignature(
        operation=operation,
        dtype=dtype_text(place),
        reduce_op="" if number < 0 else ops[number] if number < len(ops) else f"reduction {number}",
        root=root,
        dim=dim,
        count=count,
        sequence=sequence,
    )


class HostStagedP2P:
    """`DeviceP2P` over a group's own messages: tensors are on their way when the device has come to them.

    Args:
        group: Any backend whose messages carry tensors on the CPU.
        find_streams: The streams of a device.
    """

    def __init__(self, group: Backend, find_streams: Callable[[torch.device], Streams] = streams_of) -> None:
        self._group = group
        self._find_streams = find_streams

    def exchange(self, operations: Sequence[Send | Recv], *, timeout: float) -> list[int]:
        """Do all of these at the same time; returns the other rank of each."""
        deadline = Deadline(timeout)
        streams = self._find_streams(operations[0].tensor.device)
        # Fresh memory each time: messages may stay in it when the call has raised.
        on_host = [_Pinned(streams, operation.tensor) for operation in operations]
        self._fill(
            [pair for pair in zip(operations, on_host, strict=True) if isinstance(pair[0], Send)], deadline, timeout
        )
        peers = batch_on_host(
            [
                Send(pinned.shaped, operation.dst, operation.tag)
                if isinstance(operation, Send)
                else Recv(pinned.shaped, operation.src, operation.tag)
                for operation, pinned in zip(operations, on_host, strict=True)
            ],
            self._group,
            deadline.remaining(),
        )
        for operation, pinned in zip(operations, on_host, strict=True):
            if isinstance(operation, Recv):
                with writing_to(operation.tensor):
                    streams.copy(operation.tensor.detach(), pinned.shaped, streams.current())
        return peers

    def on_host(self, tensor: torch.Tensor, *, timeout: float) -> torch.Tensor:
        """A copy of a tensor's elements, flat; waits for the device as `exchange` does, and raises the same."""
        pinned = _Pinned(self._find_streams(tensor.device), tensor)
        self._fill([(Send(tensor, 0), pinned)], Deadline(timeout), timeout)
        return pinned.flat

    def _fill(self, sends: Sequence[tuple[Send | Recv, _Pinned]], deadline: Deadline, timeout: float) -> None:
        if not sends:
            return
        streams = self._find_streams(sends[0][0].tensor.device)
        stream = streams.current()
        for operation, pinned in sends:
            streams.copy(pinned.flat, _dense(operation.tensor), stream)
        try:
            wait_until_passed(streams, streams.record(stream), deadline, self._check_alive)
        except NotReachedError:
            raise DistributedTimeoutError(
                f"messages on group {self._group.name!r}: the GPU is still busy with what came before them in the"
                f" current stream, after {timeout:g} s. The group is still good: the call may be made again.",
                ranks=(self._group.rank,),
            ) from None

    def _check_alive(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure.fresh()


class _Pinned:
    """Host memory for the elements of a tensor: ``flat``, and in the tensor's shape."""

    def __init__(self, streams: Streams, like: torch.Tensor) -> None:
        memory = streams.pinned(like.nbytes) if like.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
        self.flat = memory.view(like.dtype)
        self.shaped = self.flat.view(like.shape)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
