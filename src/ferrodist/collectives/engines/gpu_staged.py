"""Collectives and point-to-point of tensors on GPUs, staged through the host's memory and the group's host engine.

[Note: two groups]
A collective that fits into one segment is one call of the group's host engine, with its reserved sequence number. A
larger one is several calls, whose number is not known when it reserves. The first, with the reserved sequence number,
compares the whole collective, so that errors name it and not a segment. The segments run in a group of their own with
the same ranks, in which only the collective whose turn it is reserves.

The bits are those of a single call: every reduction folds element by element, in rank order.
"""

from __future__ import annotations

import contextlib
import math
import struct
import weakref
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import streams_of
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import flatten, writing_to
from ferrodist.collectives.engines.gpu_staged_plan import StagedOp
from ferrodist.collectives.engines.host import attached_to, host_engine_of
from ferrodist.collectives.host_p2p import Recv, Send, batch_on_host
from ferrodist.collectives.host_staging import SEGMENT_BYTES, CopyPipeline, NotReachedError, wait_until_passed
from ferrodist.collectives.payloads import dtype_text, unpack_payloads
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp
from ferrodist.collectives.symmetric_memory import empty_symmetric
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import BackendUnavailable, DistributedError, DistributedTimeoutError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.cuda_streams import Streams

_KEY = "collectives.staged"

# A large collective: dtype's index in DTYPES, index of the reduction or -1, root, dim, count; and the number of
# elements of the rank's largest part.
_SIGNATURE = struct.Struct("<Bbihqq")
_NUM_COMPARED = 5

_CLOSE_SECONDS = 1.0  # how long closing a group waits for copies to a device


class HostStagedEngine:
    """A `HostEngine` of tensors on GPUs, whose calls return when the host has done its part.

    It is for groups of any backend. The maximum size of a segment is the same on all ranks.
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
        self._pipelines: dict[torch.device, CopyPipeline] = {}
        self._inner: SubBackend | None = None
        self._has_shared = False
        group.on_synchronize(self._synchronize)
        group.on_close(self._free_pipelines)

    def reserve(self) -> int:
        """Take the next sequence number of the group's collectives."""
        return self._sequencer.reserve(host_engine_of(self._group).reserve)

    def await_turn(self, sequence: int) -> None:
        """Return when all earlier collectives have ended, or the group has failed."""
        if not self._sequencer.wait(sequence, math.inf):
            return  # the group has failed: the collective raises it
        host_engine_of(self._group).await_turn(sequence)

    def run(self, op: CollectiveOp, sequence: int) -> list[bytes] | None:
        """Run a collective; an error in the middle ends the group, whose ranks are out of step then."""
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
            error = self._timeout_error(
                op, deadline, "the GPU is still busy with what came before it in the current stream"
            )
            group.abort(error)
            raise (group.failure or error).fresh() from None
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
            raise self._timeout_error(op, deadline, "the operations that this rank started before it have not ended")
        pipeline = self._pipelines.get(device)
        if pipeline is None:
            pipeline = self._pipelines[device] = CopyPipeline(self._find_streams(device), self._segment_bytes)
        engine = host_engine_of(self._group)
        windows = staged.windows(staged.largest, self._segment_bytes)
        # Ranks may differ in the parts of an all_to_all, and so in the number of segments.
        if len(windows) == 1 and op.kind is not CollectiveKind.ALL_TO_ALL:
            only = staged.segment(windows[0], engine, lambda: (deadline.remaining(), sequence))
            pipeline.run([only], op.tensor.dtype, deadline, self._check_alive)
            return
        windows = staged.windows(self._verify(staged, deadline, sequence), self._segment_bytes)
        inner = self._inner_group()
        if not self._has_shared:
            self._share_memory(inner, pipeline, deadline)
        engine = host_engine_of(inner)
        segments = [
            staged.segment(window, engine, lambda: (deadline.remaining(), engine.reserve())) for window in windows
        ]
        pipeline.run(segments, op.tensor.dtype, deadline, self._check_alive)

    def _check_alive(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure.fresh()

    def _verify(self, staged: StagedOp, deadline: Deadline, sequence: int) -> int:
        """Compare a large collective; returns the number of elements of the largest part on any rank."""
        op = staged.op
        number = -1 if op.reduction is None else op.reduction.number
        payload = _SIGNATURE.pack(
            DTYPES.index(op.tensor.dtype), number, op.root, op.dim, op.signature().count, staged.largest
        )
        name = f"{op.kind} on GPUs"
        share = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=payload, timeout=deadline.remaining())
        payloads = host_engine_of(self._group).run(share, sequence) or []
        signatures = unpack_payloads(_SIGNATURE, payloads, self._group, name)
        if len({each[:_NUM_COMPARED] for each in signatures}) > 1:
            raise self._group.verifier.mismatch_error(
                [_decode_signature(op.kind.value, each[:_NUM_COMPARED], sequence) for each in signatures]
            )
        return int(max(each[_NUM_COMPARED] for each in signatures))

    def _inner_group(self) -> SubBackend:
        """The group of the segments: [Note: two groups]."""
        if self._inner is None:
            group = self._group
            inner = self._inner = SubBackend(
                group, range(group.world_size), name=group.name, label="staged", ends_with_parent=True
            )
            group.on_close(inner.close)
        return self._inner

    def _share_memory(self, inner: SubBackend, pipeline: CopyPipeline, deadline: Deadline) -> None:
        """Put the first device's slots into symmetric memory, if there is any, so that the host engine copies nothing.

        This is itself a collective. For a rank's other devices the host engine copies as usual.
        """
        self._has_shared = True
        if inner.engine("cpu") is None:
            return
        try:
            memory = empty_symmetric((pipeline.shared_bytes,), torch.uint8, group=inner, timeout=deadline.remaining())
        except BackendUnavailable:  # on all ranks
            return
        release = pipeline.share(memory)
        if release is not None:
            # The engine may be collected without being closed; at exit the driver frees the memory itself.
            weakref.finalize(pipeline, release).atexit = False

    def _timeout_error(self, op: CollectiveOp, deadline: Deadline, why: str) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"{op.signature()} on group {self._group.name!r}: {why}, after {Elapsed.of(deadline)}."
            f" Pass a larger timeout. Reported by rank {self._group.rank}.",
            ranks=(self._group.rank,),
        )

    def _synchronize(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        try:
            self._wait_until_idle(deadline)
            for pipeline in list(self._pipelines.values()):
                pipeline.synchronize(deadline)
        except NotReachedError:
            raise DistributedTimeoutError(
                f"the operations on GPUs in group {self._group.name!r} are not done after {Elapsed.of(deadline)} (rank"
                f" {self._group.rank}): call synchronize() again"
            ) from None

    def _wait_until_idle(self, deadline: Deadline) -> None:
        if not self._sequencer.wait_until_idle(deadline.remaining()):
            self._check_alive()
            raise NotReachedError

    def _free_pipelines(self) -> None:
        """Free the slots' memory, unless a device that hangs may still copy from it."""
        for device, pipeline in list(self._pipelines.items()):
            with contextlib.suppress(Exception):  # also of a device that has failed
                pipeline.synchronize(Deadline(_CLOSE_SECONDS))
                del self._pipelines[device]


def host_staged_engine_of(group: Backend) -> HostStagedEngine:
    """The staged engine of a group, made when first needed."""
    return attached_to(group, _KEY, HostStagedEngine)


def _decode_signature(operation: str, fields: tuple[int, ...], sequence: int) -> CollectiveSignature:
    """The signature of a rank's large collective, for the error."""
    dtype_index, number, root, dim, count = fields
    ops = [*map(str, ReduceOp), "premultiplied_sum"]
    return CollectiveSignature(
        operation=operation,
        dtype=dtype_text(dtype_index),
        reduce_op="" if number < 0 else ops[number] if number < len(ops) else f"reduction {number}",
        root=root,
        dim=dim,
        count=count,
        sequence=sequence,
    )


class HostStagedP2P:
    """A `DeviceP2P` over the group's own messages, which are sent once the device has written the tensors."""

    def __init__(self, group: Backend, find_streams: Callable[[torch.device], Streams] = streams_of) -> None:
        self._group = group
        self._find_streams = find_streams

    def exchange(self, operations: Sequence[Send | Recv], *, timeout: float) -> list[int]:
        """Run all sends and receives at the same time; returns the peer of each."""
        deadline = Deadline(timeout)
        streams = self._find_streams(operations[0].tensor.device)
        # Fresh memory each time: messages may still use it after the call has raised.
        on_host = [_Pinned(streams, operation.tensor) for operation in operations]
        self._copy_to_host(
            [
                (operation.tensor, pinned)
                for operation, pinned in zip(operations, on_host, strict=True)
                if isinstance(operation, Send)
            ],
            deadline,
        )
        peers = batch_on_host(
            [
                Send(pinned.shaped, operation.dst, operation.tag)
                if isinstance(operation, Send)
                else Recv(pinned.shaped, operation.src, operation.tag)
                for operation, pinned in zip(operations, on_host, strict=True)
            ],
            self._group,
            Deadline(deadline.remaining()),
        )
        for operation, pinned in zip(operations, on_host, strict=True):
            if isinstance(operation, Recv):
                with writing_to(operation.tensor):
                    streams.copy(operation.tensor.detach(), pinned.shaped, streams.current())
        return peers

    def on_host(self, tensor: torch.Tensor, *, timeout: float) -> torch.Tensor:
        """A flat copy of a tensor on the host; waits for the device as `exchange` does."""
        pinned = _Pinned(self._find_streams(tensor.device), tensor)
        self._copy_to_host([(tensor, pinned)], Deadline(timeout))
        return pinned.flat

    def _copy_to_host(self, copies: Sequence[tuple[torch.Tensor, _Pinned]], deadline: Deadline) -> None:
        if not copies:
            return
        streams = self._find_streams(copies[0][0].device)
        stream = streams.current()
        for tensor, pinned in copies:
            streams.copy(pinned.flat, flatten(tensor), stream)
        try:
            wait_until_passed(streams, streams.record(stream), deadline, self._check_alive)
        except NotReachedError:
            raise DistributedTimeoutError(
                f"messages on group {self._group.name!r}: the GPU is still busy with what came before them in the"
                f" current stream, after {deadline.timeout:g} s. The group is still good: the call may be made again.",
                ranks=(self._group.rank,),
            ) from None

    def _check_alive(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure.fresh()


class _Pinned:
    """Pinned memory for the elements of a tensor: ``flat``, and ``shaped`` as the tensor."""

    def __init__(self, streams: Streams, like: torch.Tensor) -> None:
        memory = streams.pinned(like.nbytes) if like.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
        self.flat = memory.view(like.dtype)
        self.shaped = self.flat.view(like.shape)
