"""`ring_attention`: attention over a sequence that is sharded over ranks, whose keys and values go around a ring.

H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023
(https://arxiv.org/abs/2310.01889).

For n ranks forward takes n steps. In each a rank attends to the keys of one rank, which came from the previous rank,
and passes them on meanwhile: n - 1 messages of its keys and values. Backward takes n steps, too: keys and values go
around again, and their gradients behind them, a step later, so that each rank adds its own; after n messages of
gradients, in float32 or float64, they are home.

Long sequences go around in up to 8 pieces, one after the other, with as many times the messages. A rank has room for
two pieces of keys and values, and in backward for three of their gradients.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.errors import add_error_context
from ferrodist.parallel.context_parallel.arguments import AttentionArguments, check_attention
from ferrodist.parallel.context_parallel.block_attention import (
    AttentionGradients,
    OnlineAttention,
    accumulation_dtype,
)
from ferrodist.parallel.context_parallel.blocks import KeyPieces
from ferrodist.parallel.context_parallel.ring_messages import (
    FORWARD_TAG,
    GRADIENT_TAG,
    PairBuffer,
    RingExchange,
    end_group_on_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.backends.base import Backend

    _Pair = tuple[torch.Tensor, torch.Tensor]

_ADVICE = "Every rank must run the same forwards, and backward through as many of them, in the same order."


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Backend | None = None,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    overlap: bool = True,
    timeout: float | None = None,
) -> torch.Tensor:
    """Attention as `torch.nn.functional.scaled_dot_product_attention`, over a sequence that is sharded over ranks.

    The result is that of one process on the whole sequence, to the rounding of sums in another order: in float64 the
    outputs and gradients of the tests differ by less than 1e-13 of their largest value, in float32 by less than 2e-6.
    Memory is in proportion to the tokens of a rank: scores are never kept, and backward computes them again.

    With ``causal`` or ``cu_seqlens`` tokens are laid out as `context_shard` does, so that all ranks have the same work;
    else any numbers of tokens a rank will do, and as many keys as queries need not be.

    Args:
        q: Queries, of shape (B, H, T_local, D), in float64, float32, bfloat16 or float16. B, H and D are the same on
            all ranks.
        k: Keys, of shape (B, H, T_local, D).
        v: Values, of shape (B, H, T_local, E).
        group: The group over which the sequence is sharded, on all of whose ranks this is called; None is the default
            group.
        causal: Whether a token attends only to itself and those before it in the whole sequence.
        scale: The factor of scores; None is 1 / sqrt(D).
        cu_seqlens: Bounds of documents that are packed in a row, in the whole sequence, the same on all ranks: 0, 5, 12
            for documents of 5 and 7 tokens. A token attends only to those of its document, in every row of the batch.
            None is one document.
        enable_gqa: Whether k and v may have fewer heads, H / G: each serves G heads of q in a row. One head serves
            all without it, too.
        dropout_p: Must be 0.
        overlap: Whether messages travel while blocks are computed; False is for measurements.
        timeout: Seconds to wait for each message, in backward, too; None takes the group's.

    Returns:
        This rank's part of the output, of shape (B, H, T_local, E). Differentiable once; backward is called on all
        ranks, and gives the gradients of the sum of all ranks' losses.

    Raises:
        ValueError, TypeError: An argument is wrong: on that rank by its name, and on the others
            CollectiveMismatchError. On all ranks if their numbers of tokens are not those of `context_shard`.
        CollectiveMismatchError: The ranks' shapes or options differ, or some record a gradient and some don't.
        DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    inputs, arguments = check_attention(
        "ring_attention",
        (q, k, v),
        causal=causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        overlap=overlap,
        group=chosen,
        timeout=limit,
    )
    result: torch.Tensor = _RingAttention.apply(*inputs, arguments, overlap)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    """Ring attention on checked inputs."""

    @staticmethod
    def forward(  # noqa: PLR0917 - what autograd passes
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        arguments: AttentionArguments,
        overlap: bool,  # noqa: FBT001
    ) -> torch.Tensor:
        attention = OnlineAttention(query, value.shape[-1], arguments.scale)
        exchanges: list[RingExchange] = []
        with (
            add_error_context(lambda: "Ring attention was passing keys and values on.", _ADVICE),
            end_group_on_error("ring attention", arguments.group, exchanges),
        ):
            pieces = KeyPieces(arguments)
            for piece, source, (keys, values) in _circulate(arguments, pieces, (key, value), exchanges, overlap):
                for block in pieces.blocks(source, piece):
                    attention.add(keys, values, block)
        output, log_sum_exp = attention.finish()
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.arguments, ctx.overlap = arguments, overlap
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        arguments: AttentionArguments = ctx.arguments
        gradients = AttentionGradients(grad, query, output, log_sum_exp, arguments.scale)
        with add_error_context(lambda: "The backward of ring attention was passing gradients on.", _ADVICE):
            grad_key, grad_value = _circulate_gradients(arguments, (key, value), gradients, overlap=ctx.overlap)
        grads = (gradients.of_query, grad_key, grad_value)
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(each.to(query.dtype) if is_needed else None for each, is_needed in needed), None, None)


def _circulate(
    arguments: AttentionArguments,
    pieces: KeyPieces,
    own: _Pair,
    exchanges: list[RingExchange],
    overlap: bool,  # noqa: FBT001
) -> Iterator[tuple[int, int, _Pair]]:
    """Give each piece of the ranks' keys and values, with its index and rank, own ones first in each turn.

    The next piece comes meanwhile; ``exchanges`` has the messages under way.
    """
    rank, size = arguments.group.rank, arguments.group.world_size
    current, following = (PairBuffer(own[0].dtype, own[0].device, _max_numel(pieces, size)) for _ in range(2))
    for piece in range(pieces.num):
        for target, tensor in zip(current.pair(pieces.shapes(rank, piece)), own, strict=True):
            torch.cat([tensor[:, :, run] for run in pieces.runs(rank, piece)], 2, out=target)
        for step in range(size):
            source, next_source = (rank - step) % size, (rank - step - 1) % size
            shapes = pieces.shapes(source, piece)
            has_next = step + 1 < size
            if has_next:
                target = following.flat(pieces.shapes(next_source, piece))
                exchanges[:] = [_start(arguments, current.flat(shapes), target, FORWARD_TAG, overlap=overlap)]
            yield piece, source, current.pair(shapes)
            if has_next:
                if overlap:
                    exchanges[0].wait()
                current, following = following, current


def _circulate_gradients(
    arguments: AttentionArguments, own: _Pair, gradients: AttentionGradients, *, overlap: bool
) -> _Pair:
    """Send keys and values around, and their gradients behind them; returns those of this rank's own."""
    pieces = KeyPieces(arguments)
    behind = _GradientsBehind(arguments, pieces, own, overlap=overlap)
    exchanges: list[RingExchange] = []
    with end_group_on_error("the backward of ring attention", arguments.group, exchanges, behind.exchanges):
        for piece, source, (keys, values) in _circulate(arguments, pieces, own, exchanges, overlap):
            grads = behind.zeros(source, piece)
            for block in pieces.blocks(source, piece):
                gradients.add(keys, values, block, grads)
            behind.pass_on(source, piece)
        return behind.finish()


class _GradientsBehind:
    """The gradients of keys and values, which go around the ring a step behind these.

    Args:
        arguments: The call.
        pieces: The pieces of all ranks' keys.
        own: This rank's keys and values.
        overlap: As of `ring_attention`.
    """

    def __init__(self, arguments: AttentionArguments, pieces: KeyPieces, own: _Pair, *, overlap: bool) -> None:
        self._arguments, self._pieces, self._overlap = arguments, pieces, overlap
        self._rank, self._size = arguments.group.rank, arguments.group.world_size
        dtype, numel = accumulation_dtype(own[0].dtype), _max_numel(pieces, self._size)
        self._computing, self._sending, self._incoming = (PairBuffer(dtype, own[0].device, numel) for _ in range(3))
        self._home = (torch.empty_like(own[0]), torch.empty_like(own[1]))
        self.exchanges: list[RingExchange] = []  # the one under way

    def zeros(self, source: int, piece: int) -> _Pair:
        """Zeros, to which the gradients of a piece of rank ``source`` are to be added, by this rank's queries."""
        shapes = self._pieces.shapes(source, piece)
        self._computing.flat(shapes).zero_()
        return self._computing.pair(shapes)

    def pass_on(self, source: int, piece: int) -> None:
        """Add what has come from the ranks before this one, and send the sum to the next."""
        shapes = self._pieces.shapes(source, piece)
        if self._size == 1:
            self._take_home(piece, self._computing)
            return
        if self.exchanges:
            self._wait()
            if source == self._rank:  # what has come is the piece before, from all ranks
                self._take_home(piece - 1, self._incoming)
            else:
                self._computing.flat(shapes).add_(self._incoming.flat(shapes))
        self._computing, self._sending = self._sending, self._computing
        target = self._incoming.flat(self._pieces.shapes((source - 1) % self._size, piece))
        outgoing = self._sending.flat(shapes)
        self.exchanges[:] = [_start(self._arguments, outgoing, target, GRADIENT_TAG, overlap=self._overlap)]

    def finish(self) -> _Pair:
        """Wait for the last piece, and return the gradients of this rank's keys and values."""
        if self.exchanges:
            self._wait()
            self._take_home(self._pieces.num - 1, self._incoming)
        return self._home

    def _wait(self) -> None:
        if self._overlap:
            self.exchanges[0].wait()

    def _take_home(self, piece: int, grads: PairBuffer) -> None:
        runs = self._pieces.runs(self._rank, piece)
        for target, tensor in zip(self._home, grads.pair(self._pieces.shapes(self._rank, piece)), strict=True):
            for run, part in zip(runs, torch.split(tensor, [run.stop - run.start for run in runs], 2), strict=True):
                target[:, :, run] = part


def _max_numel(pieces: KeyPieces, num_ranks: int) -> int:
    """The largest number of elements of a piece of keys and values."""
    every = itertools.product(range(num_ranks), range(pieces.num))
    return max(sum(shape.numel() for shape in pieces.shapes(rank, piece)) for rank, piece in every)


def _start(
    arguments: AttentionArguments, outgoing: torch.Tensor, incoming: torch.Tensor, tag: int, *, overlap: bool
) -> RingExchange:
    """Start an exchange; without ``overlap`` wait for it, too."""
    exchange = RingExchange(outgoing, incoming, group=arguments.group, tag=tag, timeout=arguments.timeout)
    if not overlap:
        exchange.wait()
    return exchange
