"""The zigzag layout of a sequence over ranks: `context_shard`, `context_unshard`, and what ranks have of documents.

The sequence of T tokens is divided into 2 n chunks for n ranks, as evenly as possible. Rank r has chunks r and
2 n - 1 - r, one after the other: with a causal mask a token attends to all before it, so that the pairs of an early and
a late chunk are the same work on each rank (after "zigzag" in H. Zhu's ring-flash-attention, and in Llama 3's report,
https://arxiv.org/abs/2407.21783, section 3.3.2)::

    3 ranks, 12 tokens    rank 0: 0 1 10 11    rank 1: 2 3 8 9    rank 2: 4 5 6 7
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.arguments import check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.all_gather import all_gather_uneven
from ferrodist.collectives.arguments import check_dim, check_tensor, compute_shard_sizes, offsets_of
from ferrodist.parallel.context_parallel.agreement import Call, compare_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend


MAX_PIECES = 8
"""The largest number of pieces: buffers, and the results of one block, are as large as a piece."""

MIN_PIECE = 1024
"""The fewest tokens of a piece: torch's attention on the CPU takes 256 queries and 512 keys at once."""


class Segment(NamedTuple):
    """Consecutive tokens of one document on a rank."""

    start: int  # in the rank's part
    stop: int
    position: int  # of the first token in the whole sequence
    document: int


def chunks_of(length: int, num_ranks: int, rank: int) -> list[tuple[int, int]]:
    """The first and the end of each chunk of a rank, in the whole sequence, in the order of the rank's part."""
    bounds = offsets_of(compute_shard_sizes(length, 2 * num_ranks))
    return [(bounds[chunk], bounds[chunk + 1]) for chunk in (rank, 2 * num_ranks - 1 - rank)]


def local_length(length: int, num_ranks: int, rank: int) -> int:
    """The number of a rank's tokens."""
    return sum(stop - start for start, stop in chunks_of(length, num_ranks, rank))


def num_pieces(lengths: Sequence[int]) -> int:
    """The number of pieces in which ranks send parts of these lengths, one after the other."""
    return max(1, min(MAX_PIECES, max(lengths) // MIN_PIECE))


def piece_bounds(length: int, pieces: int) -> list[int]:
    """The bounds of the runs of all pieces in a part: those in its first half, then those in its second.

    Piece i has runs i and ``pieces`` + i: the same share of both halves, which are the rank's chunks in the layout, so
    that with a causal mask all pieces are the same work.
    """
    half = (length + 1) // 2
    starts = [half * at // pieces for at in range(pieces)]
    return [*starts, *(half + (length - half) * at // pieces for at in range(pieces + 1))]


def piece_runs(length: int, pieces: int, piece: int) -> list[slice]:
    """The tokens of a piece in a part of this length: two runs."""
    bounds = piece_bounds(length, pieces)
    return [slice(bounds[at], bounds[at + 1]) for at in (piece, pieces + piece)]


def check_lengths(operation: str, lengths: Sequence[int]) -> int:
    """Return the length of the sequence; ValueError unless the ranks' parts are those of the layout."""
    total, num_ranks = sum(lengths), len(lengths)
    wanted = [local_length(total, num_ranks, rank) for rank in range(num_ranks)]
    if wanted != list(lengths):
        raise ValueError(
            f"{operation}: the ranks have {list(lengths)} tokens, and of a sequence of {total} they should have"
            f" {wanted}: divide it by context_shard"
        )
    return total


def segments_of(documents: Sequence[int], num_ranks: int, rank: int) -> list[Segment]:
    """A rank's part, cut where documents end; ``documents`` are their bounds in the whole sequence, from 0 to T."""
    segments: list[Segment] = []
    offset = document = 0
    for start, stop in chunks_of(documents[-1], num_ranks, rank):
        while document and documents[document] > start:
            document -= 1
        position = start
        while position < stop:
            while documents[document + 1] <= position:
                document += 1
            end = min(stop, documents[document + 1])
            segments.append(Segment(offset, offset + end - position, position, document))
            offset += end - position
            position = end
    return segments


def check_local(operation: str, x: object, name: str, advice: str) -> None:
    """Raise TypeError, with advice, if an argument is a DTensor."""
    if type(x).__name__ == "DTensor":  # this package's or torch's, which is not imported for it
        raise TypeError(f"{name} is a DTensor, and {operation} takes tensors of this rank: {advice}")


def context_shard(x: torch.Tensor, dim: int = 1, group: Backend | None = None) -> torch.Tensor:
    """Take this rank's part of a sequence that every rank has whole; nothing is sent.

    The first of two chunks is as far from the sequence's begin as the second from its end: see
    ``ferrodist.parallel.context_parallel.layout``. For position ids shard ``torch.arange(length)[None]`` as well.

    Args:
        x: The tensor, with T tokens along ``dim``, of any T.
        dim: The dim of the sequence.
        group: The group; None is the default group.

    Returns:
        This rank's tokens, about T / n, in memory of their own. Differentiable.

    Raises:
        IndexError, TypeError, ValueError: ``dim`` is not a dim of ``x``, or ``x`` is not a tensor or has no dims.
    """
    chosen = resolve_group(group)
    check_type(x, torch.Tensor, "x must be a torch.Tensor")
    check_local("context_shard", x, "x", "pass its full_tensor()")
    dim = check_dim(x, dim)
    chunks = chunks_of(x.shape[dim], chosen.world_size, chosen.rank)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in chunks], dim)


def context_unshard(
    x: torch.Tensor, dim: int = 1, group: Backend | None = None, *, timeout: float | None = None
) -> torch.Tensor:
    """Join the ranks' parts to the whole sequence on every rank: the inverse of `context_shard`.

    Args:
        x: This rank's part, with its tokens along ``dim``.
        dim: The dim of the sequence, the same on all ranks.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds for each of the two collectives; None takes the group's.

    Returns:
        The sequence. Differentiable: the gradient of a rank's part is the sum of all ranks' gradients of it.

    Raises:
        IndexError, TypeError, ValueError: On the rank whose arguments are wrong, as of `context_shard`. ValueError on
            all ranks: their parts are not those of the layout.
        CollectiveMismatchError: On the other ranks; or the ranks' tensors differ in dtype or other dims.
    """
    chosen = resolve_group(group)

    def describe() -> Call:
        check_local("context_unshard", x, "x", "pass its to_local()")
        check_tensor(x, "x")
        at = check_dim(x, dim)
        rest = [size for each, size in enumerate(x.shape) if each != at]
        text = f"x {x.dtype}, {x.dim()} dims, {rest} but for dim {at}, gradient {_records(x)}"
        return Call(text, (x.shape[at],))

    sizes = [each[0] for each in compare_calls("context_unshard", describe, chosen, timeout)]
    total = check_lengths("context_unshard", sizes)
    at = check_dim(x, dim)
    joined = all_gather_uneven(x, at, group=chosen, timeout=timeout)
    return in_order(joined, at, total, chosen.world_size)


def in_order(x: torch.Tensor, dim: int, length: int, num_ranks: int) -> torch.Tensor:
    """The ranks' parts, one after the other along ``dim``, as the sequence in its order."""
    placed: list[tuple[int, torch.Tensor]] = []
    offset = 0
    for rank in range(num_ranks):
        for start, stop in chunks_of(length, num_ranks, rank):
            placed.append((start, x.narrow(dim, offset, stop - start)))
            offset += stop - start
    return torch.cat([part for _, part in sorted(placed, key=lambda each: each[0])], dim)


def _records(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
