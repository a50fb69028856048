"""Checks of collectives that only move elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.testing.conformance.collectives.oracle import (
    ONE_STEP_BYTES,
    SEGMENT_BYTES,
    check_bits,
    check_gathered,
    counts_around_thresholds,
    elements,
    rank_inputs,
)

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


def _move_with_root(group: Backend, dtype: torch.dtype, count: int, root: int) -> None:
    """Do each collective that has a root once with ``count`` elements of ``dtype`` a rank, and an all_gather."""
    inputs = rank_inputs(group, dtype, count, seed=count)
    mine, joined = inputs[group.rank], torch.cat(inputs)
    what = f"of {count} {dtype}, root {root}"
    check_bits(fd.broadcast(mine, root), inputs[root], f"broadcast {what}")
    check_bits(fd.all_gather(mine), joined, f"all_gather {what}")
    check_gathered(group, root, fd.gather(mine, root), joined, f"gather {what}")
    check_bits(fd.scatter(joined if group.rank == root else None, root), mine, f"scatter {what}")


def _move(group: Backend, dtype: torch.dtype, count: int, root: int) -> None:
    """Do each collective once with ``count`` elements of ``dtype`` a rank."""
    _move_with_root(group, dtype, count, root)
    what = f"of {count} {dtype}"
    sent = [
        [elements(dtype, count, src, seed=dst) for dst in range(group.world_size)] for src in range(group.world_size)
    ]
    for src, tensor in enumerate(fd.all_to_all(sent[group.rank])):
        check_bits(tensor, sent[src][group.rank], f"all_to_all {what}, from rank {src}")
    exchanged = fd.all_to_all(torch.cat(sent[group.rank]))
    check_bits(exchanged, torch.cat([row[group.rank] for row in sent]), f"all_to_all of one tensor {what}")


def movement_of_every_dtype(group: Backend) -> None:
    """Elements of every dtype arrive with the same bits, NaN payloads and -0.0 included."""
    for index, dtype in enumerate(DTYPES):
        for count in (5, 203):
            _move(group, dtype, count, root=index % group.world_size)


def movement_of_every_size(group: Backend) -> None:
    """Sizes 0, 1, odd ones, and one below, at and above each threshold arrive whole."""
    for dtype in (torch.int32, torch.uint8):
        for count in counts_around_thresholds(dtype):
            _move(group, dtype, count, root=count % group.world_size)


def movement_from_every_root(group: Backend) -> None:
    """Each rank may be the root, for every algorithm a broadcast may choose."""
    for root in range(group.world_size):
        for count in (7, 500, ONE_STEP_BYTES // 4 + 3):
            _move_with_root(group, torch.float32, count, root)


def movement_of_large_tensors(group: Backend) -> None:
    """Tensors that no transport sends at once arrive whole."""
    count = SEGMENT_BYTES // 4 + 7
    mine = torch.arange(count, dtype=torch.int32).mul_(group.rank + 1)
    last = group.world_size - 1
    check_bits(fd.broadcast(mine, last), torch.arange(count, dtype=torch.int32).mul_(last + 1), "a large broadcast")
    joined = fd.all_gather(mine)
    for rank, part in enumerate(joined.chunk(group.world_size)):
        check_bits(part, torch.arange(count, dtype=torch.int32).mul_(rank + 1), f"rank {rank}'s in a large all_gather")
    check_bits(fd.scatter(joined if group.rank == last else None, last), mine, "a large scatter")
    exchanged = fd.all_to_all(joined)
    for part in exchanged.chunk(group.world_size):
        check_bits(part, mine, "a large all_to_all")


def dims_other_than_the_first(group: Backend) -> None:
    """Collectives concatenate and split along any dim, counted from either end."""
    p, rank = group.world_size, group.rank
    for dim in (0, 1, 2, -1, -2, -3):
        shape = [2, 3, 4]
        shape[dim] *= p
        whole = torch.arange(24 * p, dtype=torch.float32).view(shape)
        part = whole.chunk(p, dim)[rank]
        check_bits(fd.all_gather(part, dim), whole, f"all_gather along {dim}")
        check_bits(fd.async_all_gather(part, dim).wait(), whole, f"async_all_gather along {dim}")
        check_gathered(group, p - 1, fd.gather(part, p - 1, dim=dim), whole, f"gather along {dim}")
        check_bits(fd.scatter(whole if rank == 0 else None, dim=dim), part, f"scatter along {dim}")
        check_bits(fd.reduce_scatter(whole, dim=dim), part * p, f"reduce_scatter along {dim}")
        check_bits(fd.async_reduce_scatter(whole, dim=dim).wait(), part * p, f"async_reduce_scatter along {dim}")


def uneven_sizes(group: Backend) -> None:
    """Sizes may differ between ranks, and be 0."""
    p, rank = group.world_size, group.rank
    for sizes in ([rank + 2 for rank in range(p)], [rank % 2 * 3 for rank in range(p)], [0] * (p - 1) + [5], [0] * p):
        for dim in (0, 1):
            shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
            whole = torch.arange(3 * sum(sizes), dtype=torch.float64).view(shape)
            part = whole.split_with_sizes(sizes, dim)[rank]
            check_bits(fd.all_gather_uneven(part, dim), whole, f"all_gather_uneven of {sizes} along {dim}")
            gathered = fd.gather(part, p // 2, dim=dim)
            check_gathered(group, p // 2, gathered, whole, f"gather of {sizes} along {dim}")
    for total in (0, 1, p - 1, p + 1, 2 * p - 1):
        for dim in (0, 1):
            shape = (total, 3) if dim == 0 else (3, total)
            whole = torch.arange(3 * total, dtype=torch.int16).view(shape)
            part = whole.split_with_sizes(fd.compute_shard_sizes(total, p), dim)[rank]
            scattered = fd.scatter(whole if rank == p - 1 else None, p - 1, dim=dim)
            check_bits(scattered, part, f"scatter of {total} along {dim}")
            check_bits(fd.reduce_scatter(whole, dim=dim), part * p, f"reduce_scatter of {total} along {dim}")


def uneven_exchange(group: Backend) -> None:
    """all_to_all_single_uneven moves as many rows between two ranks as their counts say: none, few and many."""
    p, rank = group.world_size, group.rank

    def rows(src: int, dst: int, unit: int) -> int:
        return (src * 3 + dst * 5) % 4 * unit

    for unit in (1, 40_000):
        counts = [[rows(src, dst, unit) for dst in range(p)] for src in range(p)]
        sent = [torch.arange(2 * sum(counts[src]), dtype=torch.int32).view(-1, 2) + 1000 * src for src in range(p)]
        receive_counts = [counts[src][rank] for src in range(p)]
        result = fd.all_to_all_single_uneven(sent[rank], counts[rank], receive_counts)
        expected = torch.cat([sent[src].split_with_sizes(counts[src])[rank] for src in range(p)])
        check_bits(result, expected, f"all_to_all_single_uneven with unit {unit}")
    empty = fd.all_to_all_single_uneven(torch.empty(0, 3), [0] * p, [0] * p)
    assert empty.shape == (0, 3), f"an exchange of nothing has shape {tuple(empty.shape)}"


def even_meets_uneven(group: Backend) -> None:
    """all_to_all on one rank meets all_to_all_single_uneven on others, where what the two move between them agrees."""
    p, rank = group.world_size, group.rank
    for scale in (1, 50_000):
        counts = [[1 if 0 in (src, dst) else src * dst * scale for dst in range(p)] for src in range(p)]
        sent = [torch.arange(sum(counts[src]), dtype=torch.int64) + 1_000_000 * src for src in range(p)]
        expected = torch.cat([sent[src].split_with_sizes(counts[src])[rank] for src in range(p)])
        if rank == 0:
            result = fd.all_to_all(sent[0])
        else:
            result = fd.all_to_all_single_uneven(sent[rank], counts[rank], [counts[src][rank] for src in range(p)])
        check_bits(result, expected, f"all_to_all on rank 0 alone, the others' parts times {scale}")


def zero_dimensional_tensors(group: Backend) -> None:
    """A 0-dimensional tensor can be reduced, broadcast and gathered."""
    p, rank = group.world_size, group.rank
    mine = torch.tensor(float(rank + 1))
    total = torch.tensor(p * (p + 1) / 2)
    check_bits(fd.allreduce(mine), total, "an allreduce of a number")
    check_bits(fd.async_allreduce(mine).wait(), total, "an async_allreduce of a number")
    check_gathered(group, p - 1, fd.reduce(mine, p - 1), total, "a reduce of a number")
    check_bits(fd.broadcast(mine, p - 1), torch.tensor(float(p)), "a broadcast of a number")
    everyone = torch.arange(1.0, p + 1)
    check_bits(fd.all_gather(mine), everyone, "an all_gather of numbers")
    check_bits(fd.all_gather_uneven(mine), everyone, "an all_gather_uneven of numbers")
    check_gathered(group, 0, fd.gather(mine, 0), everyone, "a gather of numbers")
    for dst, number in enumerate(fd.all_to_all([torch.tensor(10 * rank + dst) for dst in range(p)])):
        check_bits(number, torch.tensor(10 * dst + rank), "an all_to_all of numbers")


def barriers_wait_for_all(group: Backend) -> None:
    """No rank leaves a barrier before all have entered it."""
    for root in range(group.world_size):
        if group.rank == root:
            for peer in range(group.world_size):
                if peer != root:
                    group.send(b"x", peer, tag=root)
            fd.barrier()
            continue
        early = bytearray(1)
        request = group.irecv(early, root, tag=root)
        (fd.barrier if root % 2 else fd.monitored_barrier)()
        request.wait(group.timeout)
        assert early == b"x", "a message sent before a barrier did not come"
