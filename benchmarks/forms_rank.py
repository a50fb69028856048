"""One rank of a library that `forms.py` measures: ``python forms_rank.py LIBRARY SOCKET RANK NUM_RANKS MEETING_FILE``.

It serves the driver's requests, one form and size at a time, and sleeps between them. MPI's ranks learn their number
from MPI.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ITEM_BYTES = 4  # float32
PERIOD = 97
OBJECT = {f"number {index}": index * 1.5 for index in range(10)}


class Sizes:
    """The elements that ranks send in a form of so many bytes a rank."""

    def __init__(self, rank: int, num_ranks: int, size_bytes: int) -> None:
        part = max(1, size_bytes // ITEM_BYTES // num_ranks)
        self.rank, self.num_ranks, self.part, self.total = rank, num_ranks, part, part * num_ranks
        # Uneven parts: three quarters and five quarters, by turns; they add up to the even ones in pairs of ranks.
        quarter = part // 4
        self.uneven = [part - quarter if index % 2 == 0 else part + quarter for index in range(num_ranks)]
        self.sent = [self.between(rank, to) for to in range(num_ranks)]
        self.received = [self.between(source, rank) for source in range(num_ranks)]

    def between(self, source: int, to: int) -> int:
        """The elements that a rank sends to another."""
        return self.uneven[(source + to) % self.num_ranks]


def values(rank: int, count: int, begin: int = 0) -> np.ndarray[Any, Any]:
    """The elements of a rank's input from one index on: small integers, which sums keep exact."""
    return ((np.arange(begin, begin + count) + 7 * rank) % PERIOD).astype(np.float32)


def expected(form: str, at: Sizes) -> Any:
    """The right result of a form on a rank; None where it has none."""
    everyone = range(at.num_ranks)
    total = sum(values(rank, at.total) for rank in everyone)
    first, last = at.rank * at.part, (at.rank + 1) * at.part
    begins = [sum(at.between(source, to) for to in range(at.rank)) for source in everyone]
    results: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: total,
        "reduce": lambda: total if at.rank == 0 else None,
        "broadcast": lambda: values(0, at.total),
        "all_gather": lambda: np.concatenate([values(rank, at.part) for rank in everyone]),
        "all_gather, uneven": lambda: np.concatenate([values(rank, at.uneven[rank]) for rank in everyone]),
        "gather": lambda: np.concatenate([values(rank, at.part) for rank in everyone]) if at.rank == 0 else None,
        "scatter": lambda: values(0, at.part, first),
        "reduce_scatter": lambda: total[first:last],
        "all_to_all": lambda: np.concatenate([values(rank, at.part, first) for rank in everyone]),
        "all_to_all, uneven": lambda: np.concatenate(
            [values(source, at.received[source], begins[source]) for source in everyone]
        ),
        "sendrecv": lambda: values((at.rank - 1) % at.num_ranks, at.total),
        "batch": lambda: values((at.rank - 1) % at.num_ranks, at.total),
        "send, recv": lambda: values(1 - at.rank, at.total) if at.rank < 2 else None,
    }
    name, _, variant = form.partition(", ")
    return results[f"{name}, {kind}" if (kind := variant.partition(", ")[0]) in ("uneven", "recv") else name]()


Call = Any  # a function without arguments that returns what the form gives on this rank


def round_trip(
    rank: int, send: Callable[..., object], receive: Callable[..., object], whole: Any, target: Any
) -> Callable[[], Any]:
    """A call in which rank 0 sends and then receives, and rank 1 the reverse."""

    def run() -> Any:
        if rank == 0:
            send(whole, 1)
            receive(target, 1)
        else:
            receive(target, 0)
            send(whole, 0)
        return target

    return run


class Ferrodist:
    """ferrodist's public functions."""

    def __init__(self, rank: int, num_ranks: int, meeting_file: str) -> None:
        import torch  # noqa: PLC0415 - only this library's ranks need it

        import ferrodist as fd  # noqa: PLC0415

        torch.set_num_threads(1)
        fd.init_process_group("native", rank=rank, world_size=num_ranks, init_method=f"file://{meeting_file}")
        self._fd, self._torch, self.rank, self.num_ranks = fd, torch, rank, num_ranks
        self._part = fd.new_group(list(range(num_ranks)))
        self.barrier = fd.barrier

    def calls(self, at: Sizes) -> dict[str, Call]:
        """The calls of all forms."""
        fd, rank, tensor = self._fd, self.rank, self._torch.from_numpy
        whole, part = tensor(values(rank, at.total)), tensor(values(rank, at.part))
        uneven = tensor(values(rank, at.uneven[rank]))
        target, small = tensor(np.empty(at.total, np.float32)), tensor(np.empty(at.part, np.float32))
        left, right = (rank - 1) % at.num_ranks, (rank + 1) % at.num_ranks
        parts = list(tensor(values(rank, at.total)).split(at.part))
        targets = list(tensor(np.empty(at.total, np.float32)).split(at.part))
        source_of_sent = tensor(values(rank, sum(at.sent)))
        received, joined = (tensor(np.empty(sum(each), np.float32)) for each in (at.received, at.uneven))
        root_out = target if rank == 0 else None
        data = whole if rank == 0 else target

        def batch() -> Any:
            fd.batch([fd.Send(whole, right), fd.Recv(target, left)])
            return target

        return {
            "allreduce": lambda: fd.allreduce(whole),
            "allreduce, out=": lambda: fd.allreduce(whole, out=target),
            "allreduce, timeout=": lambda: fd.allreduce(whole, timeout=60.0),
            "allreduce, sub-group": lambda: fd.allreduce(whole, group=self._part),
            "allreduce, started": lambda: fd.async_allreduce(whole).wait(),
            "allreduce, started, out=": lambda: fd.async_allreduce(whole, out=target).wait(),
            "reduce": lambda: fd.reduce(whole, 0),
            "reduce, out=": lambda: fd.reduce(whole, 0, out=root_out),
            "broadcast": lambda: fd.broadcast(whole, 0),
            "broadcast, out=": lambda: fd.broadcast(whole, 0, out=target),
            "broadcast, in place": lambda: fd.broadcast(data, 0, out=data),
            "all_gather": lambda: fd.all_gather(part),
            "all_gather, out=": lambda: fd.all_gather(part, out=target),
            "all_gather, started": lambda: fd.async_all_gather(part).wait(),
            "all_gather, started, out=": lambda: fd.async_all_gather(part, out=target).wait(),
            "all_gather, uneven": lambda: fd.all_gather_uneven(uneven),
            "all_gather, uneven, out=": lambda: fd.all_gather_uneven(uneven, out=joined),
            "gather": lambda: fd.gather(part),
            "gather, out=": lambda: fd.gather(part, out=root_out),
            "scatter": lambda: fd.scatter(whole if rank == 0 else None),
            "scatter, out=": lambda: fd.scatter(whole if rank == 0 else None, out=small),
            "reduce_scatter": lambda: fd.reduce_scatter(whole),
            "reduce_scatter, out=": lambda: fd.reduce_scatter(whole, out=small),
            "all_to_all": lambda: fd.all_to_all(whole),
            "all_to_all, out=": lambda: fd.all_to_all(whole, out=target),
            "all_to_all, list": lambda: fd.all_to_all(parts),
            "all_to_all, list, out=": lambda: fd.all_to_all(parts, out=targets),
            "all_to_all, uneven": lambda: fd.all_to_all_single_uneven(source_of_sent, at.sent, at.received),
            "all_to_all, uneven, out=": lambda: fd.all_to_all_single_uneven(
                source_of_sent, at.sent, at.received, out=received
            ),
            "sendrecv": lambda: fd.sendrecv(whole, right, None, left),
            "sendrecv, out=": lambda: fd.sendrecv(whole, right, None, left, out=target),
            "batch": batch,
            "send, recv": round_trip(rank, fd.send, fd.recv_into, whole, target),
            "objects, all_gather": lambda: fd.all_gather_object(OBJECT),
            "objects, broadcast": lambda: fd.broadcast_object(OBJECT),
        }


class Mpi:
    """mpi4py's upper-case calls, by default settings."""

    def __init__(self, *_: object) -> None:
        from mpi4py import MPI  # noqa: PLC0415 - starts MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.num_ranks = self._world.Get_rank(), self._world.Get_size()
        self.barrier = self._world.Barrier

    def calls(self, at: Sizes) -> dict[str, Call]:
        """The calls of the forms that MPI has."""
        world, rank = self._world, self.rank
        whole, part, uneven = values(rank, at.total), values(rank, at.part), values(rank, at.uneven[rank])
        target, small = np.empty(at.total, np.float32), np.empty(at.part, np.float32)
        gathered = np.empty(sum(at.uneven), np.float32)
        source_of_sent, received = values(rank, sum(at.sent)), np.empty(sum(at.received), np.float32)
        left, right = (rank - 1) % at.num_ranks, (rank + 1) % at.num_ranks
        at_root = target if rank == 0 else None
        copy = values(0, at.total) if rank == 0 else target

        def returning(result: Any, call: Callable[..., object], *arguments: Any) -> Call:
            def run() -> Any:
                call(*arguments)
                return result

            return run

        def started(call: Callable[..., Any], source: Any) -> Call:
            def run() -> Any:
                call(source, target).Wait()
                return target

            return run

        def sendrecv() -> Any:
            world.Sendrecv(whole, right, recvbuf=target, source=left)
            return target

        def batch() -> Any:
            self._mpi.Request.Waitall([world.Isend(whole, right), world.Irecv(target, left)])
            return target

        return {
            "allreduce": returning(target, world.Allreduce, whole, target),
            "allreduce, started": started(world.Iallreduce, whole),
            "reduce": returning(at_root, world.Reduce, whole, at_root),
            "broadcast": returning(copy, world.Bcast, copy),
            "all_gather": returning(target, world.Allgather, part, target),
            "all_gather, started": started(world.Iallgather, part),
            "all_gather, uneven": returning(gathered, world.Allgatherv, uneven, (gathered, at.uneven)),
            "gather": returning(at_root, world.Gather, part, at_root),
            "scatter": returning(small, world.Scatter, whole if rank == 0 else None, small),
            "reduce_scatter": returning(small, world.Reduce_scatter_block, whole, small),
            "all_to_all": returning(target, world.Alltoall, whole, target),
            "all_to_all, uneven": returning(
                received, world.Alltoallv, (source_of_sent, at.sent), (received, at.received)
            ),
            "sendrecv": sendrecv,
            "batch": batch,
            "send, recv": round_trip(rank, world.Send, world.Recv, whole, target),
            "objects, all_gather": lambda: world.allgather(OBJECT),
            "objects, broadcast": lambda: world.bcast(OBJECT),
        }


class Torch:
    """torch.distributed over gloo, or over ferrodist's backend."""

    def __init__(self, backend: str, rank: int, num_ranks: int, meeting_file: str) -> None:
        import torch  # noqa: PLC0415 - only this library's ranks need it
        import torch.distributed as dist  # noqa: PLC0415

        torch.set_num_threads(1)
        dist.init_process_group(backend, rank=rank, world_size=num_ranks, init_method=f"file://{meeting_file}")
        self._dist, self._torch, self.rank, self.num_ranks = dist, torch, rank, num_ranks
        self.barrier = dist.barrier

    def calls(self, at: Sizes) -> dict[str, Call]:
        """The calls of the forms that torch.distributed has."""
        dist, rank, tensor = self._dist, self.rank, self._torch.from_numpy
        whole, part = tensor(values(rank, at.total)), tensor(values(rank, at.part))
        target, small = tensor(np.empty(at.total, np.float32)), tensor(np.empty(at.part, np.float32))
        parts, targets = list(whole.clone().split(at.part)), list(target.clone().split(at.part))
        source_of_sent, received = tensor(values(rank, sum(at.sent))), self._torch.empty(sum(at.received))
        copy = tensor(values(0, at.total)) if rank == 0 else target.clone()
        left, right = (rank - 1) % at.num_ranks, (rank + 1) % at.num_ranks
        # Torch renamed both in 2.13.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        targets_of_root = targets if rank == 0 else None
        parts_of_root = parts if rank == 0 else None

        def returning(result: Any, call: Callable[..., object], *arguments: Any, **options: Any) -> Call:
            def run() -> Any:
                call(*arguments, **options)
                return result

            return run

        def in_place(call: Callable[..., object], **options: Any) -> Call:
            def run() -> Any:  # the copy is part of the time: the call overwrites its input
                target.copy_(whole)
                call(target, **options)
                return target if "dst" not in options or rank == 0 else None

            return run

        def sendrecv() -> Any:
            work = dist.isend(whole, right)
            dist.recv(target, left)
            work.wait()
            return target

        def batch() -> Any:
            operations = [dist.P2POp(dist.isend, whole, right), dist.P2POp(dist.irecv, target, left)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return target

        def objects() -> Any:
            found = [None] * at.num_ranks
            dist.all_gather_object(found, OBJECT)
            return found

        def one_object() -> Any:
            found = [OBJECT if rank == 0 else None]
            dist.broadcast_object_list(found)
            return found[0]

        return {
            "allreduce": in_place(dist.all_reduce),
            "allreduce, started": in_place(lambda one: dist.all_reduce(one, async_op=True).wait()),
            "reduce": in_place(dist.reduce, dst=0),
            "broadcast": returning(copy, dist.broadcast, copy, 0),
            "all_gather": returning(target, gather, target, part),
            "gather": returning(targets_of_root, dist.gather, part, targets_of_root),
            "scatter": returning(small, dist.scatter, small, parts_of_root),
            "all_gather, list": returning(targets, dist.all_gather, targets, part),
            "reduce_scatter": returning(small, scatter, small, whole),
            "reduce_scatter, list": returning(small, dist.reduce_scatter, small, parts),
            "all_to_all": returning(target, dist.all_to_all_single, target, whole),
            "all_to_all, list": returning(targets, dist.all_to_all, targets, parts),
            "all_to_all, uneven": returning(
                received, dist.all_to_all_single, received, source_of_sent, at.received, at.sent
            ),
            "sendrecv": sendrecv,
            "batch": batch,
            "send, recv": round_trip(rank, dist.send, dist.recv, whole, target),
            "objects, all_gather": objects,
            "objects, broadcast": one_object,
        }


LIBRARIES: Mapping[str, Callable[..., Any]] = {
    "ferrodist": Ferrodist,
    "mpich": Mpi,
    "openmpi": Mpi,
    "torch over ferrodist": partial(Torch, "ferrodist"),
    "torch over gloo": partial(Torch, "gloo"),
}


def check(form: str, result: Any, at: Sizes) -> None:
    """Raise unless a form gave the right result."""
    if form.startswith("objects"):
        right: Any = [OBJECT] * at.num_ranks if "gather" in form else OBJECT
        if result != right:
            raise RuntimeError(f"{form} gave {result}")
        return
    right = expected(form, at)
    if right is None:
        return
    given = np.concatenate([np.asarray(one) for one in result]) if isinstance(result, list) else np.asarray(result)
    if not np.array_equal(given, right):
        raise RuntimeError(f"{form} of {at.total} elements gave {given[:4]}..., not {right[:4]}...")


def time_batch(call: Call, num_calls: int) -> float:
    """Seconds for a call."""
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began) / num_calls


def main() -> None:
    """Join the group, and serve the driver until it ends."""
    name, socket, rank, num_ranks, meeting_file = sys.argv[1:]
    library = LIBRARIES[name](int(rank), int(num_ranks), meeting_file)
    sizes: Sizes | None = None
    calls: dict[str, Call] = {}
    with Client(socket) as driver:
        driver.send(library.rank)
        while (request := driver.recv()) is not None:
            size, form, num_calls = request
            if sizes is None or sizes.total != Sizes(library.rank, library.num_ranks, size).total:
                sizes = Sizes(library.rank, library.num_ranks, size)
                calls = library.calls(sizes)
            if form not in calls:
                driver.send(None)
                continue
            library.barrier()
            check(form, calls[form](), sizes)
            library.barrier()
            seconds = time_batch(calls[form], num_calls)
            library.barrier()
            driver.send(seconds / 2 if form == "send, recv" else seconds)


if __name__ == "__main__":
    main()
