"""`ring_attention`: attention over a sequence that is sharded over ranks, whose keys and values go around a ring.

H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023
(https://arxiv.org/abs/2310.01889).

For n ranks forward takes n steps. In each a rank attends to the keys of one rank, which came from the previous rank,
and passes them on meanwhile: n - 1 messages of its keys and values. Backward takes n steps, too: keys and values go
around again, and their gradients behind them, a step later, so that each rank adds its own; after n messages of
gradients, in float32 or float64, they are home. No rank has more than two ranks' keys and values at once.
"""

from __future__ import annotations

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
from ferrodist.parallel.context_parallel.blocks import blocks_with
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
    arguments = check_attention(
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
    result: torch.Tensor = _RingAttention.apply(*arguments.inputs, arguments, overlap)  # type: ignore[no-untyped-call]
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
            for source, (keys, values) in _circulate(arguments, (key, value), exchanges, overlap=overlap):
                for block in blocks_with(arguments, source):
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


def _shapes(arguments: AttentionArguments) -> list[tuple[torch.Size, torch.Size]]:
    """The shapes of all ranks' keys and values."""
    return [
        (
            torch.Size((*arguments.key.shape[:2], length, arguments.key.shape[3])),
            torch.Size((*arguments.value.shape[:2], length, arguments.value.shape[3])),
        )
        for length in arguments.key_lengths
    ]


def _circulate(
    arguments: AttentionArguments, own: _Pair, exchanges: list[RingExchange], *, overlap: bool
) -> Iterator[tuple[int, _Pair]]:
    """Give the ranks' keys and values, with the rank that has them, own ones first; the next ones come meanwhile.

    ``exchanges`` has the messages under way.
    """
    rank, size = arguments.group.rank, arguments.group.world_size
    if size == 1:
        yield rank, own
        return
    buffers = [PairBuffer(_shapes(arguments), own[0].dtype, own[0].device) for _ in range(2)]
    for target, tensor in zip(buffers[0].pair(rank), own, strict=True):
        target.copy_(tensor)
    for step in range(size):
        current, following = buffers[step % 2], buffers[(step + 1) % 2]
        source = (rank - step) % size
        if step + 1 < size:
            target = following.flat((source - 1) % size)
            exchanges[:] = [_start(arguments, current.flat(source), target, FORWARD_TAG, overlap=overlap)]
        yield source, current.pair(source)
        if step + 1 < size and overlap:
            exchanges[0].wait()


def _circulate_gradients(
    arguments: AttentionArguments, own: _Pair, gradients: AttentionGradients, *, overlap: bool
) -> _Pair:
    """Send keys and values around, and their gradients behind them; returns those of this rank's own."""
    group, rank, size = arguments.group, arguments.group.rank, arguments.group.world_size
    dtype = accumulation_dtype(own[0].dtype)
    computing, sending, incoming = (PairBuffer(_shapes(arguments), dtype, own[0].device) for _ in range(3))
    exchanges: list[RingExchange] = []
    of_gradients: list[RingExchange] = []
    with end_group_on_error("the backward of ring attention", group, exchanges, of_gradients):
        for source, (keys, values) in _circulate(arguments, own, exchanges, overlap=overlap):
            computing.flat(source).zero_()
            for block in blocks_with(arguments, source):
                gradients.add(keys, values, block, computing.pair(source))
            if of_gradients:  # of the step before: the sum of the ranks before this one
                if overlap:
                    of_gradients[0].wait()
                computing.flat(source).add_(incoming.flat(source))
            computing, sending = sending, computing
            if size > 1:
                target = incoming.flat((source - 1) % size)
                of_gradients[:] = [_start(arguments, sending.flat(source), target, GRADIENT_TAG, overlap=overlap)]
        if of_gradients and overlap:
            of_gradients[0].wait()
    return (incoming if size > 1 else sending).pair(rank)


def _start(
    arguments: AttentionArguments, outgoing: torch.Tensor, incoming: torch.Tensor, tag: int, *, overlap: bool
) -> RingExchange:
    """Start an exchange; without ``overlap`` wait for it, too."""
    exchange = RingExchange(outgoing, incoming, group=arguments.group, tag=tag, timeout=arguments.timeout)
    if not overlap:
        exchange.wait()
    return exchange
