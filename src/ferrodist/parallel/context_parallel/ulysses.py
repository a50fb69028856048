"""`ulysses_attention`: attention over a sequence that is sharded over ranks, by an exchange of heads for tokens.

S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023 (https://arxiv.org/abs/2309.14509).

For n ranks an all_to_all gives each rank the whole sequence for 1 / n of the heads, torch's own attention computes
them, and a second all_to_all brings the outputs back. Each is the other's gradient. A rank sends (n - 1) / n of its
queries, keys, values and outputs, whatever n is; the ring sends n - 1 times its keys and values. Long sequences are
exchanged in up to 8 pieces, so that buffers are small.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.errors import add_error_context
from ferrodist.parallel.context_parallel.arguments import AttentionArguments, check_attention
from ferrodist.parallel.context_parallel.block_attention import empty_by_tokens
from ferrodist.parallel.context_parallel.layout import check_lengths, chunks_of, num_pieces, piece_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.backends.base import Backend

_ADVICE = "Every rank must run the same forwards, and backward through as many of them, in the same order."


def ulysses_attention(
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
    timeout: float | None = None,
) -> torch.Tensor:
    """`ring_attention` by two all_to_alls, in which ranks exchange heads for tokens.

    The number of heads of k and v must be a multiple of the number of ranks, and tokens are always laid out as
    `context_shard` does. Each rank computes the whole sequence for its heads.

    Args:
        q: Queries, of shape (B, H, T_local, D).
        k: Keys, of shape (B, H, T_local, D).
        v: Values, of shape (B, H, T_local, E).
        group: As of `ring_attention`, as all that follow.
        causal: Whether a token attends only to itself and those before it.
        scale: The factor of scores.
        cu_seqlens: Bounds of documents.
        enable_gqa: Whether k and v may have fewer heads.
        dropout_p: Must be 0.
        timeout: Seconds for each collective, in backward, too.

    Returns:
        This rank's part of the output, of shape (B, H, T_local, E). Differentiable.

    Raises:
        ValueError, TypeError, DistributedError: As of `ring_attention`; ValueError also if ranks can't share the heads
            of k and v evenly.
    """
    chosen, limit = group_and_timeout(group, timeout)
    inputs, arguments = check_attention(
        "ulysses_attention",
        (q, k, v),
        causal=causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        group=chosen,
        timeout=limit,
        num_head_shards=chosen.world_size,
    )
    check_lengths("ulysses_attention", arguments.query_lengths)
    check_lengths("ulysses_attention", arguments.key_lengths)
    query, key, value = _exchange(inputs, arguments, to_heads=True)
    output = _attend_by_document(query, key, value, arguments)
    return _exchange((output,), arguments, to_heads=False)[0]


def _exchange(
    tensors: tuple[torch.Tensor, ...], arguments: AttentionArguments, *, to_heads: bool
) -> tuple[torch.Tensor, ...]:
    """Give each rank its heads (B, H/n, T, D) of the ranks' tokens (B, H, T_local, D), or the other way round.

    The tensors are query, key and value, or the output.
    """
    exchanged: tuple[torch.Tensor, ...] = _Exchange.apply(arguments, to_heads, *tensors)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """An exchange of heads for tokens, or of tokens for heads; each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any,
        arguments: AttentionArguments,
        to_heads: bool,  # noqa: FBT001
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments, ctx.to_heads = arguments, to_heads
        with add_error_context(lambda: "Ulysses attention was exchanging heads for tokens.", _ADVICE):
            return _exchange_pieces(arguments, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_exchange(grads, ctx.arguments, to_heads=not ctx.to_heads)


def _exchange_pieces(
    arguments: AttentionArguments,
    to_heads: bool,  # noqa: FBT001
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """`_exchange` in pieces, by buffers of the size of one."""
    size, rank = arguments.group.world_size, arguments.group.rank
    lengths = (arguments.query_lengths, arguments.key_lengths, arguments.key_lengths)[: len(tensors)]
    outputs = tuple(_empty(x, each, rank, to_heads=to_heads) for x, each in zip(tensors, lengths, strict=True))
    by_tokens, by_heads = (tensors, outputs) if to_heads else (outputs, tensors)
    pieces = num_pieces([*arguments.query_lengths, *arguments.key_lengths])
    buffers = [tensors[0].new_empty(0) for _ in range(2)]
    for piece in range(pieces):
        # What goes between this rank and each other: its heads of this rank's tokens, and this rank's of its tokens.
        of_tokens = [
            [
                x[:, :, run]
                for x, each in zip(shares, lengths, strict=True)
                for run in piece_runs(each[rank], pieces, piece)
            ]
            for shares in zip(*(x.chunk(size, 1) for x in by_tokens), strict=True)
        ]
        of_heads = [
            [
                x[:, :, run]
                for x, each in zip(by_heads, lengths, strict=True)
                for run in _runs(each, peer, pieces, piece)
            ]
            for peer in range(size)
        ]
        sources, targets = (of_tokens, of_heads) if to_heads else (of_heads, of_tokens)
        _send_and_receive(sources, targets, buffers, arguments)
    return outputs


def _empty(x: torch.Tensor, lengths: Sequence[int], rank: int, *, to_heads: bool) -> torch.Tensor:
    """A tensor for the result of an exchange of ``x``."""
    size = len(lengths)
    tokens, heads = (sum(lengths), x.shape[1] // size) if to_heads else (lengths[rank], x.shape[1] * size)
    return empty_by_tokens((x.shape[0], heads, tokens, x.shape[3]), x.dtype, x.device)


def _runs(lengths: Sequence[int], rank: int, pieces: int, piece: int) -> list[slice]:
    """The tokens of a rank's piece, in the whole sequence."""
    (first, end), (second, _) = chunks_of(sum(lengths), len(lengths), rank)
    early, late = piece_runs(lengths[rank], pieces, piece)
    offset = second - (end - first)
    return [slice(first + early.start, first + early.stop), slice(offset + late.start, offset + late.stop)]


def _send_and_receive(
    sources: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Sequence[torch.Tensor]],
    buffers: list[torch.Tensor],
    arguments: AttentionArguments,
) -> None:
    """Send tensors to each rank in one message, and receive others from each; two buffers grow to their sizes."""
    counts = [[sum(x.numel() for x in parts) for parts in each] for each in (sources, targets)]
    for i, each in enumerate(counts):
        if buffers[i].numel() < sum(each):
            buffers[i] = buffers[i].new_empty(sum(each))
    outgoing, incoming = (buffer[: sum(each)] for buffer, each in zip(buffers, counts, strict=True))
    for x, flat in _with_memory(sources, outgoing):
        flat.copy_(x)
    all_to_all_single_uneven(outgoing, *counts, group=arguments.group, out=incoming, timeout=arguments.timeout)
    for x, flat in _with_memory(targets, incoming):
        x.copy_(flat)


def _with_memory(
    tensors: Sequence[Sequence[torch.Tensor]], message: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor, and its elements in a message."""
    flat = [x for each in tensors for x in each]
    for x, part in zip(flat, torch.split(message, [x.numel() for x in flat]), strict=True):
        yield x, part.view(x.shape)


def _attend_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: AttentionArguments
) -> torch.Tensor:
    """Torch's attention of each document by itself."""
    pieces: list[tuple[torch.Tensor, ...]] = [(query, key, value)]
    if arguments.documents:
        # Not slices: in backward each of them would fill a gradient of the whole sequence.
        sizes = [stop - start for start, stop in itertools.pairwise(arguments.documents)]
        pieces = list(zip(*(torch.split(x, sizes, 2) for x in (query, key, value)), strict=True))
    outputs = []
    for queries, keys, values in pieces:
        if not queries.shape[2] or not keys.shape[2]:
            zeros = value.new_zeros(*query.shape[:2], queries.shape[2], value.shape[3])
            outputs.append(zeros + _zero(queries, keys, values))
            continue
        outputs.append(
            scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=arguments.causal,
                scale=arguments.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _zero(*inputs: torch.Tensor) -> torch.Tensor:
    """Zero with the inputs' history: a rank without a token takes part in backward."""
    total = inputs[0].new_zeros(())
    for each in inputs:
        total = total + each[:, :, :0].sum()
    return total
