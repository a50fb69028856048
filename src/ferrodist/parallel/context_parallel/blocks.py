"""Pieces in which the ranks' keys and values go around the ring, and the blocks that a rank computes with each."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from ferrodist.parallel.context_parallel.block_attention import Block
from ferrodist.parallel.context_parallel.layout import Segment, num_pieces, piece_bounds, piece_runs, segments_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ferrodist.parallel.context_parallel.arguments import AttentionArguments


class KeyPieces:
    """The pieces of all ranks' keys, in a call.

    Args:
        arguments: The call.
    """

    def __init__(self, arguments: AttentionArguments) -> None:
        self._arguments = arguments
        self._rank, self._num_ranks = arguments.group.rank, arguments.group.world_size
        self.num = num_pieces(arguments.key_lengths)
        self._queries = self._segments(self._rank, arguments.query_lengths[self._rank])
        self._keys = [self._segments(rank, length) for rank, length in enumerate(arguments.key_lengths)]

    def runs(self, rank: int, piece: int) -> list[slice]:
        """The tokens of a rank's piece, in its part."""
        return piece_runs(self._arguments.key_lengths[rank], self.num, piece)

    def shapes(self, rank: int, piece: int) -> tuple[torch.Size, torch.Size]:
        """The shapes of the keys and values of a rank's piece."""
        length = sum(run.stop - run.start for run in self.runs(rank, piece))
        key, value = self._arguments.key_shape, self._arguments.value_shape
        return torch.Size((*key[:2], length, key[3])), torch.Size((*value[:2], length, value[3]))

    def blocks(self, source: int, piece: int) -> list[Block]:
        """The blocks of this rank's queries with a piece of rank ``source``, whose keys are slices of the piece.

        Chunks, documents and pieces cut the sequence into segments. Two of them are the same or apart, so that a block
        is whole or, of the same segment, a triangle: no mask is ever made. None is empty, or has more queries than a
        piece of them has.
        """
        causal = self._arguments.causal
        by_document: dict[int, list[Segment]] = defaultdict(list)
        for segment in self._in_piece(source, piece):
            by_document[segment.document].append(segment)
        whole: list[Block] = []
        triangles: list[Block] = []
        for queries in self._queries:
            for keys in by_document.get(queries.document, ()):
                same = keys.position == queries.position
                if causal and not same and keys.position > queries.position:
                    continue
                is_triangle = causal and same
                block = Block(slice(queries.start, queries.stop), slice(keys.start, keys.stop), is_triangle)
                (triangles if is_triangle else whole).append(block)
        largest = -(-self._arguments.query_lengths[self._rank] // self.num)
        return triangles + _join_queries(_join_keys(whole), largest)

    def _segments(self, rank: int, length: int) -> list[Segment]:
        """A rank's part, cut where documents, chunks and runs of pieces end."""
        documents = self._arguments.documents
        whole = [Segment(0, length, 0, 0)] if documents is None else segments_of(documents, self._num_ranks, rank)
        return list(_cut(whole, piece_bounds(length, self.num)))

    def _in_piece(self, source: int, piece: int) -> Iterator[Segment]:
        """The segments of a piece, which begin at 0 there."""
        begin = 0
        for run in self.runs(source, piece):
            for each in self._keys[source]:
                if run.start <= each.start and each.stop <= run.stop:
                    yield each._replace(start=each.start - run.start + begin, stop=each.stop - run.start + begin)
            begin += run.stop - run.start


def _cut(segments: Iterable[Segment], bounds: Iterable[int]) -> Iterator[Segment]:
    """Cut segments at bounds."""
    ends = sorted(set(bounds))
    for segment in segments:
        inner = ends[bisect_right(ends, segment.start) : bisect_left(ends, segment.stop)]
        for start, stop in itertools.pairwise([segment.start, *inner, segment.stop]):
            if start < stop:
                position = segment.position + start - segment.start
                yield Segment(start, stop, position, segment.document)


def _join_keys(blocks: Iterable[Block]) -> list[Block]:
    """Join blocks of the same queries with adjacent keys."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.queries == block.queries and last.keys.stop == block.keys.start:
            joined[-1] = last._replace(keys=slice(last.keys.start, block.keys.stop))
        else:
            joined.append(block)
    return joined


def _join_queries(blocks: Iterable[Block], largest: int) -> list[Block]:
    """Join blocks of adjacent queries with the same keys, to no more than ``largest`` queries."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.keys == block.keys
            and last.queries.stop == block.queries.start
            and block.queries.stop - last.queries.start <= largest
        ):
            joined[-1] = last._replace(queries=slice(last.queries.start, block.queries.stop))
        else:
            joined.append(block)
    return joined
