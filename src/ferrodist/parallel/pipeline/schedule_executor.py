"""Execution of a schedule's actions on one rank, and the transfer of values between stages.

`schedule/build.py` makes the actions, and `schedule/lowering.py` adds those that send and receive:

    RF2.5 prepares a receive    F2.5 waits for it, calls stage 2, and stores the output     SF2.5 sends the output
    RB2.5 prepares a receive    B2.5 waits for it, runs backward, and stores the gradients  SB2.5 sends the gradients

A receive starts when it is prepared if the last value from there was large, otherwise when it is waited for.
Nothing is sent between two stages of one rank. Schedules don't list skips: they are sent as soon as they are computed,
and received when they are needed.

A value travels encoded, with its small tensors in-band, and large tensors out-of-band behind it, all under one tag;
see [Note: in-band and out-of-band] in `collectives/serialization.py`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.request import Request, wait_all
from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.p2p import recv, start_checked_send
from ferrodist.collectives.serialization import PackedValue, decode_value, encode_value
from ferrodist.collectives.tensor_protocol import TensorReceive, start_send
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError
from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind
from ferrodist.parallel.pipeline.stage import MAIN, Edge, EdgeGradients, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.pipeline.microbatch import Outputs

_HOST = torch.device("cpu")


def send_value(packed: PackedValue, dst: int, tag: int, group: Backend) -> list[Request]:
    """Start sending a value, whose tensors must not change until the requests are done."""
    for tensor in packed.tensors:
        if tensor.is_cuda:
            engine_of(group, tensor.device)  # an error if the group can't move it
    encoded, out_of_band = encode_value(packed, "a value between stages")
    requests = start_checked_send(torch.frombuffer(encoded, dtype=torch.uint8), dst, tag=tag, group=group)
    for tensor in out_of_band:
        requests += start_send(group, tensor, dst, tag)
    return requests


class PendingRecv:
    """A value under way to this rank.

    With ``prefetch`` receiving starts at once, which pays for large values: small ones arrive anyway. ``device`` gets
    the tensors that the sender has on a GPU.
    """

    def __init__(self, src: int, tag: int, group: Backend, *, prefetch: bool, device: torch.device = _HOST) -> None:
        self._src, self._tag, self._group, self._device = src, tag, group, device
        self._lock = threading.Lock()
        self._packed: PackedValue | None = None
        self._error: Exception | None = None
        self._out_of_band: list[tuple[int, TensorReceive]] = []  # receives of out-of-band tensors, with their indices
        self._is_cancelled = False
        self._message: TensorReceive | None = None
        if prefetch:
            self._message = TensorReceive(group, src, tag, shape=None, dtype=torch.uint8)
            self._message.add_done_callback(self._decode_once)

    def wait(self, deadline: Deadline) -> PackedValue:
        """Wait for all of the value."""
        if self._message is not None:
            wait_all([self._message], deadline)
            self._decode_once()
        else:
            message = recv(None, torch.uint8, self._src, tag=self._tag, group=self._group, timeout=deadline.remaining())
            self._decode(message)
        if self._error is not None:
            raise self._error
        assert self._packed is not None, "it was decoded"
        wait_all([receive for _, receive in self._out_of_band], deadline)
        for index, receive in self._out_of_band:
            self._packed.tensors[index] = receive.finish()
        for index, is_on_gpu in enumerate(self._packed.is_on_gpu):
            if is_on_gpu:
                self._packed.tensors[index] = self._packed.tensors[index].to(self._device)
        return self._packed

    @property
    def has_out_of_band(self) -> bool:
        """True if some tensors came out-of-band."""
        return bool(self._out_of_band)

    def cancel(self) -> None:
        """Cancel the receives."""
        with self._lock:
            self._is_cancelled = True
        if self._message is not None:
            self._message.cancel()
        for _, receive in self._out_of_band:
            receive.cancel()

    def _decode_once(self) -> None:
        """Decode the message, in the first thread that comes: the waiting one or the one that completes the receive."""
        with self._lock:
            is_read = self._packed is not None or self._error is not None
            if self._message is not None and not (is_read or self._is_cancelled or self._message.error):
                self._decode(self._message.finish())

    def _decode(self, message: torch.Tensor) -> None:
        """Decode the message, and start receiving its out-of-band tensors."""
        try:
            self._packed, out_of_band_specs = decode_value(bytes_of(message))
            for each in out_of_band_specs:
                receive = TensorReceive(self._group, self._src, self._tag, shape=each.shape, dtype=each.dtype)
                self._out_of_band.append((each.index, receive))
        except DistributedError as error:  # the group failed when the receives started
            self._error = error
        except Exception as error:  # noqa: BLE001 - a message may be wrong in any way, and callbacks must not raise
            text = (
                f"rank {self._src} of group {self._group.name!r} sent a message that is not a pipeline value: {error}"
            )
            self._error = ProtocolError(text, ranks=(self._src,))


class _TransferKey(NamedTuple):
    """A value of a microbatch on an edge, or its gradients on the way back."""

    edge: Edge
    microbatch: int
    is_gradient: bool


class StepData(NamedTuple):
    """The data of a step: inputs of the first stage, gradients of the last; empty on other ranks.

    ``on_output`` is called with a microbatch's index and the last stage's result, and returns the tensors from which
    its backward begins; in a step it also adds their gradients to ``gradients``, which is empty at its start.
    """

    microbatches: Sequence[Any]
    on_output: Callable[[int, Any], list[torch.Tensor]]
    gradients: Mapping[int, list[torch.Tensor | None]]


_NO_DATA = StepData([], lambda *_: [], {})


class ScheduleExecutor:
    """Execute a rank's actions."""

    def __init__(
        self, stages: Mapping[int, Stage], stage_ranks: Sequence[int], edges: Sequence[Edge], num_microbatches: int
    ) -> None:
        self._stages = stages
        self._stage_ranks = stage_ranks
        self._tags = {edge: index * num_microbatches for index, edge in enumerate(edges)}
        self._incoming = {stage: [edge for edge in edges if edge.target == stage] for stage in stages}
        # Farthest first: in one process the gradients of a value of several stages come from the last of them first.
        farthest_first = sorted(edges, key=lambda edge: -edge.target)
        self._outgoing = {stage: [edge for edge in farthest_first if edge.source == stage] for stage in stages}
        self._packed_values: dict[_TransferKey, PackedValue] = {}  # until they are sent or used on this rank
        self._pending_recvs: dict[_TransferKey, PendingRecv] = {}
        self._large_transfers: set[tuple[Edge, bool]] = set()  # directions whose last value had out-of-band tensors
        self._sends: list[Request] = []
        self._data = _NO_DATA
        self.current_action: Action | None = None  # the last action that was started
        self.outputs_for_backward: Outputs | None = None  # of a forward that waits for its backward
        self.peak_in_flight = 0  # largest number of microbatches between forward and backward, in all stages together

    def run(self, actions: Iterable[Action], data: StepData, group: Backend, timeout: float) -> None:
        """Execute this rank's actions, and return when all sends are done."""
        self._data, self._group, self._timeout = data, group, timeout
        self.peak_in_flight = 0
        for action in actions:
            self.current_action = action
            self._execute(action)
        self.current_action = None
        wait_all(self._sends, Deadline(timeout))
        self._sends.clear()
        self._data = _NO_DATA  # a batch may be large

    def reset(self) -> None:
        """Cancel everything under way."""
        self.current_action = None
        self.outputs_for_backward = None
        self._data = _NO_DATA
        for pending in self._pending_recvs.values():
            pending.cancel()
        for request in self._sends:
            request.cancel()
        self._pending_recvs.clear()
        self._sends.clear()
        self._packed_values.clear()
        for stage in self._stages.values():
            stage.reset()

    def drop_unsynced(self) -> None:
        """Drop gradients of a failed step that were to be averaged later."""
        for stage in self._stages.values():
            stage.drop_unsynced()

    def _execute(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(stage, microbatch)
            case ActionKind.BACKWARD:
                self._backward(stage, microbatch, is_whole=True)
            case ActionKind.BACKWARD_INPUT:
                self._backward(stage, microbatch, is_whole=False)
            case ActionKind.BACKWARD_WEIGHT:
                self._stages[stage].backward_weight(microbatch)
            case ActionKind.SEND_FORWARD:
                self._send(_TransferKey(_main(self._outgoing[stage]), microbatch, is_gradient=False))
            case ActionKind.SEND_BACKWARD:
                self._send(_TransferKey(_main(self._incoming[stage]), microbatch, is_gradient=True))
            case ActionKind.RECV_FORWARD:
                self._prepare_recv(_TransferKey(_main(self._incoming[stage]), microbatch, is_gradient=False))
            case ActionKind.RECV_BACKWARD:
                self._prepare_recv(_TransferKey(_main(self._outgoing[stage]), microbatch, is_gradient=True))

    def _forward(self, index: int, microbatch: int) -> None:
        stage = self._stages[index]
        keys = [_TransferKey(edge, microbatch, is_gradient=False) for edge in self._incoming[index]]
        received = {key.edge.name: self._receive(key) for key in keys}
        output = stage.forward(microbatch, received, self._data.microbatches[microbatch] if index == 0 else None)
        if index == len(self._stage_ranks) - 1:
            stage.retain_outputs(microbatch, MAIN, self._data.on_output(microbatch, output.value))
        wanted = {edge.name for edge in self._outgoing[index]} - {MAIN}
        if output.skips.keys() != wanted:
            raise ValueError(
                f"stage {index} returns the skips {sorted(output.skips)}, and the pipeline was made with"
                f" {sorted(wanted)} from there: return PipelineOutput(value, name=...) for each"
            )
        for edge in self._outgoing[index]:
            value = output.value if edge.name == MAIN else output.skips[edge.name]
            packed = PackedValue.of(value, f"the output of stage {index}")
            requiring_grad = [
                tensor for tensor, needs_grad in zip(packed.tensors, packed.wants_gradient, strict=True) if needs_grad
            ]
            stage.retain_outputs(microbatch, edge.name, requiring_grad)
            if self._is_written_locally(edge) or stage.includes_buffers(packed.tensors):
                packed = packed.copy()
            self._store_or_send(_TransferKey(edge, microbatch, is_gradient=False), packed)
        self.peak_in_flight = max(self.peak_in_flight, sum(each.num_in_flight for each in self._stages.values()))

    def _is_written_locally(self, edge: Edge) -> bool:
        """True if another stage of this rank gets the same value, and may write to it while it is being sent."""
        here = self._group.rank
        others = (other for other in self._outgoing[edge.source] if other.target < edge.target)
        return self._stage_ranks[edge.target] != here and any(
            self._stage_ranks[other.target] == here for other in others
        )

    def _backward(self, index: int, microbatch: int, *, is_whole: bool) -> None:
        stage = self._stages[index]
        keys = [_TransferKey(edge, microbatch, is_gradient=True) for edge in self._outgoing[index]]
        gradients: EdgeGradients = {key.edge.name: self._receive(key).open() for key in keys}
        if index == len(self._stage_ranks) - 1:
            gradients[MAIN] = self._data.gradients[microbatch]
        found = (stage.backward if is_whole else stage.backward_input)(microbatch, gradients)
        for edge in self._incoming[index]:
            packed = PackedValue.of(found[edge.name], "gradients")
            self._store_or_send(_TransferKey(edge, microbatch, is_gradient=True), packed)

    def _receive(self, key: _TransferKey) -> PackedValue:
        """Return the value of another stage, waiting for it if that is on another rank."""
        if key in self._packed_values:
            return self._packed_values.pop(key)
        if key not in self._pending_recvs:
            self._prepare_recv(key)
        try:
            packed = self._pending_recvs[key].wait(Deadline(self._timeout))
        except DistributedTimeoutError as error:
            if self._group.failure is not None:
                raise
            what, stage = ("gradients", key.edge.target) if key.is_gradient else ("outputs", key.edge.source)
            raise DistributedTimeoutError(
                f"rank {self._group.rank} waited {self._timeout:g} s for the {what} of stage {stage} for microbatch"
                f" {key.microbatch}, which come from rank {self._source_rank(key)}. Is it slow, or does it not call"
                " the same method? Pass a longer timeout, or call step() on all ranks",
                ranks=error.ranks,
            ) from None
        pending = self._pending_recvs.pop(key)
        (self._large_transfers.add if pending.has_out_of_band else self._large_transfers.discard)(
            (key.edge, key.is_gradient)
        )
        return packed

    def _store_or_send(self, key: _TransferKey, packed: PackedValue) -> None:
        """Store a value until the schedule sends it, or another stage of this rank uses it; send skips at once."""
        self._packed_values[key] = packed
        if key.edge.name != MAIN and self._dest_rank(key) != self._group.rank:
            self._send(key)

    def _send(self, key: _TransferKey) -> None:
        self._sends = [request for request in self._sends if not request.done()]
        self._sends += send_value(self._packed_values.pop(key), self._dest_rank(key), self._tag(key), self._group)

    def _prepare_recv(self, key: _TransferKey) -> None:
        prefetch = (key.edge, key.is_gradient) in self._large_transfers
        stage = self._stages[key.edge.source if key.is_gradient else key.edge.target]
        self._pending_recvs[key] = PendingRecv(
            self._source_rank(key), self._tag(key), self._group, prefetch=prefetch, device=stage.device
        )

    def _source_rank(self, key: _TransferKey) -> int:
        return self._stage_ranks[key.edge.target if key.is_gradient else key.edge.source]

    def _dest_rank(self, key: _TransferKey) -> int:
        return self._stage_ranks[key.edge.source if key.is_gradient else key.edge.target]

    def _tag(self, key: _TransferKey) -> int:
        """The tag of a value among those of its source rank; its gradients come from another rank."""
        return self._tags[key.edge] + key.microbatch


def _main(edges: Iterable[Edge]) -> Edge:
    return next(edge for edge in edges if edge.name == MAIN)
