"""Checks of the forms of a collective call: layouts, ``out=``, asynchronous, from several threads, coalesced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.subgroup import SubBackend
from ferrodist.testing.conformance.collectives.oracle import (
    ONE_STEP_BYTES,
    check_bits,
    check_fold,
    check_gathered,
    check_into,
    duplicate_group,
    elements,
    rank_factor,
    rank_inputs,
    raw_bytes,
)
from ferrodist.testing.conformance.harness import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[1::2, ::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "reversed dims": lambda t: t.view(2, 3, -1).permute(2, 1, 0),
    "without elements": lambda t: t[:, :0].t(),
    "conjugated": lambda t: t.conj(),
    "negated": lambda t: t.conj().imag,
    "negated, contiguous": lambda t: t.conj().imag.as_strided(t.shape, (t.shape[1], 1)),
    "imaginary part": lambda t: t.imag,
}

_OUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "another": lambda rows: torch.empty(rows, 4),
    "transposed": lambda rows: torch.empty(4, rows).t(),
    "sliced": lambda rows: torch.empty(2 * rows, 9)[::2, 1::2],
    "negated": lambda rows: torch.empty(rows, 4, dtype=torch.complex64).conj().imag,
    "negated, contiguous": lambda rows: _OUTS["negated"](rows).as_strided((rows, 4), (4, 1)),
}


def inputs_of_any_layout(group: Backend) -> None:
    """Transposed, sliced, expanded, conjugated and negated tensors count by their elements, and are not changed."""
    p, last = group.world_size, group.world_size - 1
    for name, view in _LAYOUTS.items():
        for columns in (2, 30, 3000):
            seeded = [torch.Generator().manual_seed(rank) for rank in range(p)]
            wholes = [torch.randn(6, 3 * columns, dtype=torch.complex64, generator=source) for source in seeded]
            if name not in {"conjugated", "negated", "negated, contiguous", "imaginary part"}:
                wholes = [whole.real.contiguous() for whole in wholes]
            views = [view(whole) for whole in wholes]
            plain = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in views]
            before, mine, what = raw_bytes(wholes[group.rank]).clone(), views[group.rank], f"{name}, {columns} columns"
            flat = [tensor.view(-1) for tensor in plain]
            total = fd.allreduce(mine)
            assert total.shape == mine.shape, f"allreduce of a tensor that is {name} has shape {tuple(total.shape)}"
            check_fold(group, total, fd.ReduceOp.SUM, flat, f"allreduce ({what})")
            check_fold(group, fd.reduce(mine, last), fd.ReduceOp.SUM, flat, f"reduce ({what})", root=last)
            check_bits(fd.broadcast(mine, last), plain[last], f"broadcast ({what})")
            check_bits(fd.all_gather(mine), torch.cat(plain), f"all_gather ({what})")
            check_bits(fd.all_gather(mine, 1), torch.cat(plain, 1), f"all_gather along 1 ({what})")
            check_gathered(group, last, fd.gather(mine, last), torch.cat(plain), f"gather ({what})")
            sizes = fd.compute_shard_sizes(mine.shape[0], p)
            scattered = fd.scatter(mine if group.rank == last else None, last)
            check_bits(scattered, plain[last].split_with_sizes(sizes)[group.rank], f"scatter ({what})")
            expected = fd.allreduce(plain[group.rank]).split_with_sizes(sizes)[group.rank]
            check_bits(fd.reduce_scatter(mine), expected, f"reduce_scatter ({what})")
            received = fd.all_to_all([mine] * p)
            for rank in range(p):
                check_bits(received[rank], plain[rank], f"all_to_all ({what})")
            check_bits(raw_bytes(wholes[group.rank]), before, f"the input after all of it ({what})")


def ranks_of_different_layouts(group: Backend) -> None:
    """One rank in turn has a strided tensor, which goes another way through the library: all get the same results."""
    p = group.world_size
    for rows in (1, 2, 6, 500):
        inputs = [elements(torch.float64, rows * 2, rank, seed=rows).view(rows, 2) for rank in range(p)]
        flat = [tensor.view(-1) for tensor in inputs]
        for strided in range(-1, p):
            mine = inputs[group.rank]
            if strided in (-1, group.rank):  # -1: all of them
                mine = mine.t().contiguous().t()
            what = f"{rows} rows, strided on rank {strided}"
            check_fold(group, fd.allreduce(mine), fd.ReduceOp.SUM, flat, f"allreduce of {what}")
            check_bits(fd.broadcast(mine, p - 1), inputs[-1], f"broadcast of {what}")
            check_bits(fd.all_gather(mine), torch.cat(inputs), f"all_gather of {what}")
            fd.barrier()


def results_into_given_tensors(group: Backend) -> None:
    """``out=`` receives the result and is returned: another tensor, the input itself, or a strided one."""
    p, last = group.world_size, group.world_size - 1
    for rows in (2, 20, 6000):
        inputs = [elements(torch.float32, rows * 4, rank, seed=rows).view(rows, 4) for rank in range(p)]
        total = [tensor.view(-1) for tensor in inputs]
        for name, make_out in _OUTS.items():
            make = partial(make_out, rows)
            mine, out, what = inputs[group.rank], make(), f"{rows} rows into a tensor that is {name}"
            assert fd.allreduce(mine, out=out) is out, "allreduce returned another tensor than out="
            check_fold(group, out, fd.ReduceOp.SUM, total, f"allreduce of {what}")
            assert fd.async_allreduce(mine, out=make()).wait().shape == out.shape, "async_allreduce lost its shape"
            out = make()
            reduced = fd.reduce(mine, last, out=out if group.rank == last else None)
            assert group.rank != last or reduced is out, "reduce returned another tensor than out="
            check_fold(group, reduced, fd.ReduceOp.SUM, total, f"reduce of {what}", root=last)
            out = make()
            check_into(out, fd.broadcast(mine, last, out=out), inputs[last], f"broadcast of {what}")
        _in_place(group, inputs)
        _joined_and_divided(group, inputs)
        _gathered_and_scattered(group, inputs)
        _exchanged(group, inputs)


def _in_place(group: Backend, inputs: list[torch.Tensor]) -> None:
    last, flat = group.world_size - 1, [tensor.view(-1) for tensor in inputs]
    for strided in (False, True):
        mine = torch.empty(4, len(inputs[0])).t() if strided else torch.empty_like(inputs[0])
        mine.copy_(inputs[group.rank])
        fd.allreduce(mine, out=mine)
        check_fold(group, mine, fd.ReduceOp.SUM, flat, "allreduce in place")
        mine.copy_(inputs[group.rank])
        fd.reduce(mine, last, out=mine if group.rank == last else None)
        if group.rank == last:
            check_fold(group, mine, fd.ReduceOp.SUM, flat, "reduce in place")
        else:
            check_bits(mine, inputs[group.rank], "the input of a reduce to another rank")
        mine.copy_(inputs[group.rank])
        fd.broadcast(mine, last, out=mine)
        check_bits(mine, inputs[last], "broadcast in place")


def _joined_and_divided(group: Backend, inputs: list[torch.Tensor]) -> None:
    p, rank = group.world_size, group.rank
    joined = torch.cat(inputs)
    rows = len(inputs[0])
    out = torch.empty(4, p * rows).t()
    check_into(out, fd.all_gather(inputs[rank], out=out), joined, "all_gather into a transposed tensor")
    out = torch.empty(rows, 4 * p)
    check_bits(fd.all_gather(inputs[rank], 1, out=out), torch.cat(inputs, 1), "all_gather along 1 with out=")
    buffer = torch.zeros(p * rows, 4)
    fd.all_gather(buffer.chunk(p)[rank].copy_(inputs[rank]), out=buffer)
    check_bits(buffer, joined, "all_gather of a part of out=")
    sizes = fd.compute_shard_sizes(rows, p)
    plain = fd.reduce_scatter(inputs[rank])
    out = torch.empty(sizes[rank], 4)
    check_into(out, fd.reduce_scatter_tensor(out, inputs[rank]), plain, "reduce_scatter_tensor")
    out = torch.empty(4, sizes[rank]).t()
    check_bits(fd.reduce_scatter(inputs[rank], out=out), plain, "reduce_scatter into a transposed tensor")
    mine = inputs[rank].clone()
    part = mine.split_with_sizes(sizes)[rank]
    fd.reduce_scatter(mine, out=part)
    check_bits(part, plain, "reduce_scatter into its part of the input")


def _gathered_and_scattered(group: Backend, inputs: list[torch.Tensor]) -> None:
    p, rank, last = group.world_size, group.rank, group.world_size - 1
    rows = len(inputs[0])
    for dim in (0, 1):
        joined = torch.cat(inputs, dim)
        for out in (torch.empty(joined.shape), torch.empty(joined.t().shape).t(), torch.empty(2 * p * rows, 4 * p)):
            whole = out[: len(joined), : joined.shape[1]]
            gathered = fd.gather(inputs[rank], last, dim=dim, out=whole if rank == last else None)
            if rank == last:
                check_into(whole, gathered, joined, f"gather along {dim} with out=")
            part = torch.empty(inputs[0].shape) if out.is_contiguous() else torch.empty(4, rows).t()
            scattered = fd.scatter(joined if rank == last else None, last, dim=dim, out=part)
            check_into(part, scattered, inputs[rank], f"scatter along {dim} with out=")
        sizes = [rank % 2 + 1 for rank in range(p)]
        parts = [tensor.narrow(dim, 0, size) for tensor, size in zip(inputs, sizes, strict=True)]
        uneven = torch.cat(parts, dim)
        for whole in (torch.empty(uneven.shape), torch.empty(uneven.t().shape).t()):
            joined = fd.all_gather_uneven(parts[rank], dim, out=whole)
            check_into(whole, joined, uneven, f"all_gather_uneven along {dim} with out=")
    buffer = torch.cat(inputs)
    mine = buffer.chunk(p)[rank]
    fd.scatter(buffer if rank == last else None, last, out=mine)
    check_bits(mine, inputs[rank], "scatter into a part of the input")
    buffer.zero_()
    mine.copy_(inputs[rank])
    fd.gather(mine, last, out=buffer if rank == last else None)
    if rank == last:
        check_bits(buffer, torch.cat(inputs), "gather of a part of out=")


def _exchanged(group: Backend, inputs: list[torch.Tensor]) -> None:
    p, rank = group.world_size, group.rank
    rows = len(inputs[0])
    sent = [[tensor + 7 * dst for dst in range(p)] for tensor in inputs]
    expected = [sent[src][rank] for src in range(p)]
    counts = [rows] * p
    for out in (torch.empty(p * rows, 4), torch.empty(4, p * rows).t()):
        check_into(out, fd.all_to_all(torch.cat(sent[rank]), out=out), torch.cat(expected), "all_to_all with out=")
        out.zero_()
        back = fd.all_to_all_single_uneven(torch.cat(sent[rank]), counts, counts, out=out)
        check_into(out, back, torch.cat(expected), "all_to_all_single_uneven with out=")
        out.copy_(torch.cat(sent[rank]))
        check_into(out, fd.async_all_to_all(out, out=out).wait(), torch.cat(expected), "async_all_to_all in place")
        out.copy_(torch.cat(sent[rank]))
        fd.all_to_all_single_uneven(out, counts, counts, out=out)
        check_bits(out, torch.cat(expected), "all_to_all_single_uneven in place")
    mine = [tensor.clone() for tensor in sent[rank]]
    columns = torch.empty(rows, 4, p).unbind(-1)
    for outs in (columns, [torch.empty(rows, 4) for _ in range(p)], mine):
        received = fd.all_to_all(mine, out=outs)
        assert all(one is other for one, other in zip(received, outs, strict=True)), "all_to_all returned others"
        for src in range(p):
            check_bits(outs[src], expected[src], f"all_to_all of tensors with out=, from rank {src}")


def inputs_and_outputs_that_overlap(group: Backend) -> None:
    """When ``out`` overlaps the input's memory, shifted by an element, the result is the same as without overlap."""
    for count in (3, 1000, ONE_STEP_BYTES):
        inputs = rank_inputs(group, torch.float32, count, seed=count)
        for shift in (1, -1):
            memory = torch.zeros(count + 2)
            memory[1 : count + 1] = inputs[group.rank]
            out = memory[1 + shift : count + 1 + shift]
            fd.allreduce(memory[1 : count + 1], out=out)
            check_fold(group, out, fd.ReduceOp.SUM, inputs, f"allreduce shifted by {shift}")
            memory[1 : count + 1] = inputs[group.rank]
            fd.broadcast(memory[1 : count + 1], out=out)
            check_bits(out, inputs[0], f"broadcast shifted by {shift}")


def many_outstanding_operations(group: Backend) -> None:
    """Any number of operations of all kinds may be in flight, and be waited for in any order and more than once."""
    p, rank = group.world_size, group.rank
    pending: list[tuple[fd.PendingCollective[Any], torch.Tensor]] = []
    for round_number in range(12):
        for count in (1, 700, ONE_STEP_BYTES // 4 + 1 if round_number == 0 else 11):
            inputs = [torch.full((count,), float(r + round_number)) for r in range(p)]
            total = torch.full((count,), float(sum(range(p)) + p * round_number))
            root = round_number % p
            sizes = fd.compute_shard_sizes(count, p)
            pending += [
                (fd.async_allreduce(inputs[rank]), total),
                (fd.async_broadcast(inputs[rank], root), inputs[root]),
                (fd.async_all_gather(inputs[rank]), torch.cat(inputs)),
                (fd.async_reduce_scatter(inputs[rank]), total.split_with_sizes(sizes)[rank]),
                (fd.async_all_to_all(torch.cat([inputs[rank]] * p)), torch.cat(inputs)),
            ]
    for handle, expected in reversed(pending):
        check_bits(handle.wait(), expected, f"one of many: {handle.op_name}")
        assert handle.done(), f"{handle!r} has been waited for and is not done"
        assert handle.wait(0) is handle.wait(), "a second wait gave another result"


def blocking_among_started_operations(group: Backend) -> None:
    """Blocking calls may be made while others, started before on all ranks, are under way."""
    p = group.world_size
    for count in (2, 5000):
        started = [fd.async_allreduce(torch.full((count,), float(i))) for i in range(5)]
        check_bits(fd.allreduce(torch.ones(count)), torch.full((count,), float(p)), "a blocking call among others")
        for i, handle in enumerate(started):
            check_bits(handle.wait(), torch.full((count,), float(i * p)), "a call around a blocking one")


def threads_with_groups_of_their_own(group: Backend) -> None:
    """Several threads of each rank use one sub-group each at the same time, for started and blocking operations."""
    p = group.world_size
    members = [list(range(p)), list(range(p)), list(reversed(range(p))), list(range(0, p, 2)), [0, p - 1][: min(p, 2)]]
    groups = {i: SubBackend(group, ranks) for i, ranks in enumerate(members) if group.rank in ranks}

    def work(mine: SubBackend, seed: int) -> None:
        try:
            for count in (3, 900, ONE_STEP_BYTES // 4 + 5):
                inputs = [torch.full((count,), float(seed + 10 * rank)) for rank in mine.members]
                total = torch.stack(inputs).sum(0)
                handles = [fd.async_allreduce(inputs[mine.rank], group=mine) for _ in range(4)]
                check_bits(fd.allreduce(inputs[mine.rank], group=mine), total, "a blocking call in a thread")
                for handle in handles:
                    check_bits(handle.wait(), total, "a started call in a thread")
                check_bits(fd.all_gather(inputs[mine.rank], group=mine), torch.cat(inputs), "an all_gather in a thread")
        except BaseException as error:
            mine.abort(f"a thread failed: {error!r}")
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        running = [pool.submit(work, mine, seed) for seed, mine in groups.items()]
    for mine in groups.values():
        mine.close()
    for thread in running:
        thread.result()
    fd.barrier()


def coalesced_operations(group: Backend) -> None:
    """Operations in a coalesce block give the same bits as outside, whatever their kinds, dtypes and sizes."""
    p, rank = group.world_size, group.rank
    with fd.coalesce():
        pass
    checks: list[tuple[fd.PendingCollective[torch.Tensor], torch.Tensor]] = []
    sizes = (0, 1, 2, 57, ONE_STEP_BYTES // 8)
    inputs = [rank_inputs(group, dtype, n, seed=n) for dtype in (torch.float32, torch.int16) for n in sizes]
    plain = [fd.allreduce(tensors[rank]) for tensors in inputs]
    op = fd.premultiplied_sum(rank_factor(rank))
    scaled = fd.allreduce(inputs[1][rank], op)
    in_place = inputs[2][rank].clone()
    with fd.coalesce(group):
        for tensors, expected in zip(inputs, plain, strict=True):
            checks.append((fd.async_allreduce(tensors[rank]), expected))
            checks.append((fd.async_broadcast(tensors[rank], p - 1), tensors[p - 1]))
        checks += [(fd.async_allreduce(inputs[1][rank], op), scaled)]
        # Factors that are equal on one rank and not on others: these can't be joined.
        twice = [fd.premultiplied_sum(1.0), fd.premultiplied_sum(1.0 if rank == 0 else 2.0)]
        ones = [fd.async_allreduce(torch.ones(3), each) for each in twice]
        checks += [(ones[0], torch.full((3,), float(p))), (ones[1], torch.full((3,), 2.0 * p - 1))]
        checks += [(fd.async_all_gather(inputs[3][rank]), torch.cat(inputs[3]))]
        checks += [(fd.async_allreduce(in_place, out=in_place), plain[2])]
        assert not any(handle.done() for handle, _ in checks), "an operation ended before its coalesce block"
    for handle, expected in checks:
        check_bits(handle.wait(), expected, f"coalesced {handle.op_name}")
    check_bits(in_place, plain[2], "a coalesced allreduce in place")


def coalesce_blocks_that_fail(group: Backend) -> None:
    """When a coalesce block raises, nothing is sent, and its operations fail with that error."""
    pending: list[fd.PendingCollective[torch.Tensor]] = []

    def block(then: Callable[[], object]) -> None:
        with fd.coalesce(group):
            pending.append(fd.async_allreduce(torch.ones(4)))
            then()

    other = duplicate_group(group)
    wrong: list[Callable[[], object]] = [
        lambda: fd.allreduce(torch.ones(4)),
        lambda: fd.async_allreduce(torch.ones(4), group=other),
        lambda: block(bool),
    ]
    for then in wrong:
        error = error_of(RuntimeError, partial(block, then), "a wrong call in a coalesce block")
        assert error_of(RuntimeError, pending[-1].wait, "an operation of a failed block") is error
    total = torch.full((4,), float(group.world_size))
    check_bits(fd.allreduce(torch.ones(4)), total, "an allreduce after failed blocks")
    other.abort("to see what coalesce does with a group that has failed")
    with fd.coalesce(other):
        handles = [fd.async_allreduce(torch.ones(4), group=other), fd.async_broadcast(torch.ones(4), group=other)]
    for handle in handles:
        error_of(fd.GroupAbortedError, partial(handle.wait, 0), "a coalesced call on a failed group")
    other.close()
