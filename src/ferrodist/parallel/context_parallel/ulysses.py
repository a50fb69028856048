"""`ulysses_attention`: attention over a sequence that is sharded over ranks, by an exchange of heads for tokens.

S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023 (https://arxiv.org/abs/2309.14509).

For n ranks an all_to_all gives each rank the whole sequence for 1 / n of the heads, torch's own attention computes
them, and a second all_to_all brings the outputs back. Each is its own gradient. A rank sends (n - 1) / n of its
queries, keys, values and outputs, whatever n is; the ring sends n - 1 times its keys and values.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.errors import add_error_context
from ferrodist.parallel.context_parallel.arguments import AttentionArguments, check_attention
from ferrodist.parallel.context_parallel.layout import by_rank, check_lengths, in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        timeout: Seconds for each collective of the forward; the backward has the group's.

    Returns:
        This rank's part of the output, of shape (B, H, T_local, E). Differentiable.

    Raises:
        ValueError, TypeError, DistributedError: As of `ring_attention`; ValueError also if ranks can't share the heads
            of k and v evenly.
    """
    chosen, limit = group_and_timeout(group, timeout)
    arguments = check_attention(
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
    with add_error_context(lambda: "Ulysses attention was exchanging heads for tokens.", _ADVICE):
        return _attend(arguments)


def _attend(arguments: AttentionArguments) -> torch.Tensor:
    size = arguments.group.world_size
    lengths = (arguments.query_lengths, arguments.key_lengths, arguments.key_lengths)
    # A part for each rank: its heads of q, k and v, one after the other.
    parts = [torch.cat([x.chunk(size, 1)[rank].reshape(-1) for x in arguments.inputs]) for rank in range(size)]
    shapes = [(x.shape[0], x.shape[1] // size, x.shape[3]) for x in arguments.inputs]  # (B, H/n, D)
    received = _exchange(parts, [_sizes(shapes, [each[rank] for each in lengths]) for rank in range(size)], arguments)
    by_source = [_split(part, shapes, [each[rank] for each in lengths]) for rank, part in enumerate(received)]
    query, key, value = (
        in_order(torch.cat([each[i] for each in by_source], 2), 2, sum(lengths[i]), size) for i in range(3)
    )
    output = _attend_by_document(query, key, value, arguments)
    parts = [part.reshape(-1) for part in by_rank(output, 2, size)]
    shape = [(*output.shape[:2], output.shape[3])]
    own = [arguments.query_lengths[arguments.group.rank]]
    heads = _exchange(parts, [_sizes(shape, own)] * size, arguments)
    return torch.cat([_split(part, shape, own)[0] for part in heads], 1)


def _sizes(shapes: Sequence[tuple[int, int, int]], lengths: Sequence[int]) -> int:
    """The number of elements of tensors (B, H, T, D), given without T."""
    return sum(batch * heads * length * size for (batch, heads, size), length in zip(shapes, lengths, strict=True))


def _split(part: torch.Tensor, shapes: Sequence[tuple[int, int, int]], lengths: Sequence[int]) -> list[torch.Tensor]:
    """The tensors (B, H, T, D) in a flat one."""
    full = [(batch, heads, length, size) for (batch, heads, size), length in zip(shapes, lengths, strict=True)]
    return [
        piece.view(shape) for piece, shape in zip(torch.split(part, [math.prod(x) for x in full]), full, strict=True)
    ]


def _exchange(parts: list[torch.Tensor], sizes: list[int], arguments: AttentionArguments) -> list[torch.Tensor]:
    """Send a flat part to each rank, and receive one of a known size from each."""
    received = all_to_all_single_uneven(
        torch.cat(parts),
        [part.numel() for part in parts],
        sizes,
        group=arguments.group,
        timeout=arguments.timeout,
    )
    return list(torch.split(received, sizes))


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
    return torch.cat(outputs, 2)


def _zero(*inputs: torch.Tensor) -> torch.Tensor:
    """Zero with the inputs' history: a rank without a token takes part in backward."""
    total = inputs[0].new_zeros(())
    for each in inputs:
        total = total + each[:, :, :0].sum()
    return total
