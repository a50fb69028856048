"""Doing what a schedule says, on one rank.

    RF2.5 begins a receive    F2.5 waits for it, calls stage 2, and puts what it returns aside    SF2.5 sends that
    RB2.5 begins a receive    B2.5 waits for it, goes backward, and puts the gradients aside      SB2.5 sends them

Between two stages of one rank nothing is sent. Nor do schedules speak of skips: they are sent as soon as they are made,
and received when they are needed.

Values on their way from stage to stage: a letter, and the tensors that come apart from it.

See [Note: letter] in `collectives/serialization.py`. All of it goes under one tag, in this order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.request import wait_all
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.p2p import begin_send, recv
from ferrodist.collectives.serialization import PackedValue, decode_value, encode_value
from ferrodist.collectives.tensor_protocol import TensorReceive, start_send
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError
from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind
from ferrodist.parallel.pipeline.stage import MAIN, Edge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.parallel.pipeline.microbatch import Outputs
    from ferrodist.parallel.pipeline.stage import Gradients, PipelineOutput, Stage

_HOST = torch.device("cpu")


def send_parcel(parcel: PackedValue, dst: int, tag: int, group: Backend) -> list[Request]:
    """Start to send a value; its tensors are not to be changed until the requests are done.

    Raises:
        TypeError: A tensor can't travel.
        UnsupportedOpError: It is on a GPU, and the group carries none there.
    """
    for tensor in parcel.tensors:
        if tensor.is_cuda:
            engine_of(group, tensor.device)
    letter, apart = encode_value(parcel, "what goes from stage to stage")
    requests = begin_send(letter, dst, tag=tag, group=group)
    for tensor in apart:
        requests += start_send(group, tensor, dst, tag)
    return requests


class PendingRecv:
    """A value that is on its way to this rank: the receive of its letter has begun.

    Args:
        src: The rank that sends it.
        tag: Under which.
        group: The group.
        is_ahead: Whether to begin at once, which is worth it for what is large. Else what is small comes by itself, and
            taking it when it is needed costs a fraction.
        device: Where tensors are put that the sender has on a GPU.
    """

    def __init__(self, src: int, tag: int, group: Backend, *, is_ahead: bool, device: torch.device = _HOST) -> None:
        self._group = group
        self._device = device
        self._src = src
        self._tag = tag
        self._lock = threading.Lock()
        self._parcel: PackedValue | None = None
        self._error: Exception | None = None
        self._bodies: list[tuple[int, TensorReceive]] = []
        """Of the tensors that come by themselves, with their numbers."""
        self._is_given_up = False
        self._letter: TensorReceive | None = None
        if is_ahead:
            self._letter = TensorReceive(group, src, tag, shape=None, dtype=torch.uint8)
            self._letter.add_done_callback(self._read_ahead)

    def wait(self, deadline: Deadline) -> PackedValue:
        """Wait until all of it is there.

        Raises:
            ProtocolError: It is no letter.
            DistributedError: A rank is late, or was lost.
        """
        if self._letter is not None:
            wait_all([self._letter], deadline)
            self._read_ahead()
        else:
            letter = recv(None, torch.uint8, self._src, tag=self._tag, group=self._group, timeout=deadline.remaining())
            self._read(letter)
        if self._error is not None:
            raise self._error
        assert self._parcel is not None, "it was read"
        wait_all([body for _, body in self._bodies], deadline)
        for number, body in self._bodies:
            self._parcel.tensors[number] = body.finish()
        for number, is_on_gpu in enumerate(self._parcel.is_on_gpu):
            if is_on_gpu:
                self._parcel.tensors[number] = self._parcel.tensors[number].to(self._device)
        return self._parcel

    @property
    def has_bodies(self) -> bool:
        """Whether some of it came apart from the letter."""
        return bool(self._bodies)

    def cancel(self) -> None:
        """Give it up."""
        with self._lock:
            self._is_given_up = True
        if self._letter is not None:
            self._letter.cancel()
        for _, body in self._bodies:
            body.cancel()

    def _read_ahead(self) -> None:
        """Read the letter once, whoever is first: who waits for it, or who brings it."""
        with self._lock:
            is_read = self._parcel is not None or self._error is not None
            if self._letter is not None and not (is_read or self._is_given_up or self._letter.error):
                self._read(self._letter.finish())

    def _read(self, letter: torch.Tensor) -> None:
        """Read the letter, and begin to receive what comes apart from it."""
        try:
            self._parcel, apart = decode_value(letter)
            for each in apart:
                body = TensorReceive(self._group, self._src, self._tag, shape=each.shape, dtype=each.dtype)
                self._bodies.append((each.index, body))
        except DistributedError as error:  # of the group, in which the receives begin
            self._error = error
        except Exception as error:  # noqa: BLE001 - a letter may be wrong in any way, and callbacks must not raise
            text = f"rank {self._src} of group {self._group.name!r} sent what is no value of a pipeline: {error}"
            self._error = ProtocolError(text, ranks=(self._src,))


class _Key(NamedTuple):
    """One value on its way: of a microbatch along an edge, or its gradients on the way back."""

    edge: Edge
    microbatch: int
    is_gradient: bool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the ends of the pipeline are given for each microbatch; nothing elsewhere.

    Args:
        inputs: For the first stage.
        take: Called with the number of a microbatch and what the last stage returns; gives the tensors from which its
            backward begins.
        gradients: For each microbatch the gradients of those; they may be there when it goes backward, not before.
    """

    inputs: Sequence[Any]
    take: Callable[[int, Any], list[torch.Tensor]]
    gradients: Mapping[int, list[torch.Tensor | None]]


_NO_FEED = StepInputs([], lambda *_: [], {})


class Executor:
    """Runs actions.

    Args:
        stages: Those of this rank, by their numbers.
        stage_ranks: The rank of each stage.
        edges: All ways between stages.
        num_microbatches: Of a step.
    """

    def __init__(
        self, stages: Mapping[int, Stage], stage_ranks: Sequence[int], edges: Sequence[Edge], num_microbatches: int
    ) -> None:
        self._stages = stages
        self._ranks = stage_ranks
        self._tags = {edge: number * num_microbatches for number, edge in enumerate(edges)}
        self._incoming = {stage: [edge for edge in edges if edge.target == stage] for stage in stages}
        # Farthest first: in one process the gradients of what several stages take come from the last of them first.
        farthest_first = sorted(edges, key=lambda edge: -edge.target)
        self._outgoing = {stage: [edge for edge in farthest_first if edge.source == stage] for stage in stages}
        self._aside: dict[_Key, PackedValue] = {}
        """What is to be sent, or taken by another stage of this rank."""
        self._receipts: dict[_Key, PendingRecv] = {}
        self._large: set[tuple[Edge, bool]] = set()
        """Edges and directions in which something large came last."""
        self._sends: list[Request] = []
        self._feed = _NO_FEED
        self.doing: Action | None = None
        """What was begun last."""
        self.outputs: Outputs | None = None
        """What the program was given by a forward that waits for its backward."""
        self.peak_live = 0
        """The most microbatches that were between forward and backward at a time, in all stages together."""

    def run(self, actions: Iterable[Action], feed: StepInputs, group: Backend, timeout: float) -> None:
        """Do all of them, and return when what was sent has gone.

        Args:
            actions: This rank's.
            feed: What the ends have.
            group: The ranks of the pipeline.
            timeout: Seconds to wait for one message.
        """
        self._feed, self._group, self._timeout = feed, group, timeout
        self.peak_live = 0
        for action in actions:
            self.doing = action
            self._do(action)
        self.doing = None
        wait_all(self._sends, Deadline(timeout))
        self._sends.clear()
        self._feed = _NO_FEED  # a batch may be large

    @property
    def has_live(self) -> bool:
        """Whether a microbatch has gone forward, and not backward."""
        return any(stage.num_live for stage in self._stages.values())

    def forget(self) -> None:
        """Give up all that is under way."""
        self.doing = None
        self.outputs = None
        self._feed = _NO_FEED
        for receipt in self._receipts.values():
            receipt.cancel()
        for request in self._sends:
            request.cancel()
        self._receipts.clear()
        self._sends.clear()
        self._aside.clear()
        for stage in self._stages.values():
            stage.forget()

    def drop_unsynced(self) -> None:
        """Drop the gradients that a failed step has left where they are averaged later."""
        for stage in self._stages.values():
            stage.drop_unsynced()

    def _do(self, action: Action) -> None:
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
                self._send(_Key(_main(self._outgoing[stage]), microbatch, is_gradient=False))
            case ActionKind.SEND_BACKWARD:
                self._send(_Key(_main(self._incoming[stage]), microbatch, is_gradient=True))
            case ActionKind.RECV_FORWARD:
                self._begin_receive(_Key(_main(self._incoming[stage]), microbatch, is_gradient=False))
            case ActionKind.RECV_BACKWARD:
                self._begin_receive(_Key(_main(self._outgoing[stage]), microbatch, is_gradient=True))

    def _forward(self, number: int, microbatch: int) -> None:
        stage = self._stages[number]
        keys = [_Key(edge, microbatch, is_gradient=False) for edge in self._incoming[number]]
        received = {key.edge.name: self._take(key) for key in keys}
        output = stage.forward(microbatch, received, self._feed.inputs[microbatch] if number == 0 else None)
        if number == len(self._ranks) - 1:
            stage.hold(microbatch, MAIN, self._feed.take(microbatch, output.value))
        self._check_skips(number, output)
        for edge in self._outgoing[number]:
            value = output.value if edge.name == MAIN else output.skips[edge.name]
            parcel = PackedValue.of(value, f"what stage {number} returns")
            wanting = [tensor for tensor, wants in zip(parcel.tensors, parcel.wants_gradient, strict=True) if wants]
            stage.hold(microbatch, edge.name, wanting)
            if self._may_change(edge) or stage.has_buffers(parcel.tensors):
                parcel = parcel.copy()
            self._put(_Key(edge, microbatch, is_gradient=False), parcel)
        self.peak_live = max(self.peak_live, sum(each.num_live for each in self._stages.values()))

    def _may_change(self, edge: Edge) -> bool:
        """Whether another stage of this rank has a value, and may write to it, while it goes along an edge."""
        here = self._group.rank
        others = (other for other in self._outgoing[edge.source] if other.target < edge.target)
        return self._ranks[edge.target] != here and any(self._ranks[other.target] == here for other in others)

    def _check_skips(self, number: int, output: PipelineOutput) -> None:
        wanted = {edge.name for edge in self._outgoing[number]} - {MAIN}
        if output.skips.keys() != wanted:
            raise ValueError(
                f"stage {number} returns the skips {sorted(output.skips)}, and the pipeline was made with"
                f" {sorted(wanted)} from there: return PipelineOutput(value, name=...) for each"
            )

    def _backward(self, number: int, microbatch: int, *, is_whole: bool) -> None:
        stage = self._stages[number]
        keys = [_Key(edge, microbatch, is_gradient=True) for edge in self._outgoing[number]]
        gradients: Gradients = {key.edge.name: self._take(key).open() for key in keys}
        if number == len(self._ranks) - 1:
            gradients[MAIN] = self._feed.gradients[microbatch]
        found = (stage.backward if is_whole else stage.backward_input)(microbatch, gradients)
        for edge in self._incoming[number]:
            parcel = PackedValue.of(found[edge.name], "gradients")
            self._put(_Key(edge, microbatch, is_gradient=True), parcel)

    def _take(self, key: _Key) -> PackedValue:
        """What another stage gives; waits for it if that is on another rank."""
        if key in self._aside:
            return self._aside.pop(key)
        if key not in self._receipts:
            self._begin_receive(key)
        try:
            parcel = self._receipts[key].wait(Deadline(self._timeout))
        except DistributedTimeoutError as error:
            if self._group.failure is not None:
                raise
            what, stage = ("gradients", key.edge.target) if key.is_gradient else ("outputs", key.edge.source)
            raise DistributedTimeoutError(
                f"rank {self._group.rank} waited {self._timeout:g} s for the {what} of stage {stage} for microbatch"
                f" {key.microbatch}, which come from rank {self._giver(key)}. Is it slow, or does it not call the same?"
                " Give a longer timeout, or call step() on all ranks",
                ranks=error.ranks,
            ) from None
        receipt = self._receipts.pop(key)
        (self._large.add if receipt.has_bodies else self._large.discard)((key.edge, key.is_gradient))
        return parcel

    def _put(self, key: _Key, parcel: PackedValue) -> None:
        """Keep what a stage has made until the schedule has it sent, or the other stage takes it; send skips."""
        self._aside[key] = parcel
        if key.edge.name != MAIN and self._taker(key) != self._group.rank:
            self._send(key)

    def _send(self, key: _Key) -> None:
        self._sends = [request for request in self._sends if not request.done()]
        self._sends += send_parcel(self._aside.pop(key), self._taker(key), self._tag(key), self._group)

    def _begin_receive(self, key: _Key) -> None:
        is_ahead = (key.edge, key.is_gradient) in self._large
        taker = self._stages[key.edge.source if key.is_gradient else key.edge.target]
        self._receipts[key] = PendingRecv(
            self._giver(key), self._tag(key), self._group, is_ahead=is_ahead, device=taker.device
        )

    def _giver(self, key: _Key) -> int:
        """The rank that a value comes from."""
        return self._ranks[key.edge.target if key.is_gradient else key.edge.source]

    def _taker(self, key: _Key) -> int:
        """The rank that it goes to."""
        return self._ranks[key.edge.source if key.is_gradient else key.edge.target]

    def _tag(self, key: _Key) -> int:
        """Tells a value from others of the same rank; its gradients come from another."""
        return self._tags[key.edge] + key.microbatch


def _main(edges: Iterable[Edge]) -> Edge:
    return next(edge for edge in edges if edge.name == MAIN)
