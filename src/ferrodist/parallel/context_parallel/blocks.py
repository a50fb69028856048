"""The blocks of queries and keys that a rank computes with another rank's keys."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ferrodist.parallel.context_parallel.block_attention import Block
from ferrodist.parallel.context_parallel.layout import Segment, segments_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrodist.parallel.context_parallel.arguments import AttentionArguments


def blocks_with(arguments: AttentionArguments, source: int) -> list[Block]:
    """The blocks of this rank's queries with the keys of rank ``source``, none of them empty.

    Chunks and documents cut the sequence into segments. Two of them are the same or apart, so that a block is whole or,
    of the same segment, a triangle: no mask is ever made.
    """
    rank, num_ranks = arguments.group.rank, arguments.group.world_size
    if arguments.documents is None:
        num_queries, num_keys = arguments.query_lengths[rank], arguments.key_lengths[source]
        return [Block(slice(0, num_queries), slice(0, num_keys), causal=False)] if num_queries and num_keys else []
    by_document: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments_of(arguments.documents, num_ranks, source):
        by_document[segment.document].append(segment)
    whole: list[Block] = []
    triangles: list[Block] = []
    for queries in segments_of(arguments.documents, num_ranks, rank):
        for keys in by_document.get(queries.document, ()):
            same = keys.position == queries.position
            if arguments.causal and not same and keys.position > queries.position:
                continue
            is_triangle = arguments.causal and same
            block = Block(slice(queries.start, queries.stop), slice(keys.start, keys.stop), is_triangle)
            (triangles if is_triangle else whole).append(block)
    return triangles + _join_queries(_join_keys(whole))


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


def _join_queries(blocks: Iterable[Block]) -> list[Block]:
    """Join blocks of adjacent queries with the same keys."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.keys == block.keys and last.queries.stop == block.queries.start:
            joined[-1] = last._replace(queries=slice(last.queries.start, block.queries.stop))
        else:
            joined.append(block)
    return joined
