"""Checks of wrong arguments: refused with the right error before anything is sent, so that the group goes on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

import ferrodist as fd
from ferrodist.testing.conformance.collectives.failures import SAMPLE_CALLS
from ferrodist.testing.conformance.collectives.oracle import check_bits, duplicate_group, undefined_reductions
from ferrodist.testing.conformance.harness import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

    Call = Callable[[], object]
    _Case = tuple[type[Exception], str, Call]


def _check_refused(group: Backend, kind: type[Exception], what: str, call: Call) -> str:
    """Make a wrong call on one rank, then a right one on all: the wrong call must not have sent anything."""
    said = ""
    if group.rank == group.world_size - 1:
        said = str(error_of(kind, call, what))
    total = fd.allreduce(torch.ones(2))
    check_bits(total, torch.full((2,), float(group.world_size)), f"an allreduce right after {what}")
    return said


def _check_all_refused(group: Backend, cases: list[_Case]) -> None:
    for kind, what, call in cases:
        _check_refused(group, kind, what, call)


def undefined_reductions_are_refused(group: Backend) -> None:
    """An undefined reduction raises TypeError with the reason, from every collective that reduces."""
    calls: list[Callable[[torch.Tensor, Any], object]] = [
        fd.allreduce,
        fd.async_allreduce,
        lambda tensor, op: fd.reduce(tensor, 0, op),
        fd.reduce_scatter,
        fd.async_reduce_scatter,
        lambda tensor, op: fd.reduce_scatter_tensor(torch.empty_like(tensor), tensor, op),
    ]
    for index, (dtype, op) in enumerate(undefined_reductions()):
        call = calls[index % len(calls)]
        tensor = torch.zeros(4, dtype=dtype)
        said = _check_refused(group, TypeError, f"{op} of {dtype}", partial(call, tensor, op))
        assert not said or f"{op} of {dtype} is not defined" in said, f"the refusal of {op} of {dtype} says {said!r}"


def _functions(*names: str) -> dict[str, Callable[..., object]]:
    return {name: getattr(fd, name) for name in names}


def tensors_that_cannot_travel_are_refused(group: Backend) -> None:
    """Anything but a dense CPU tensor of a known dtype raises TypeError from every collective and message."""
    p, peer = group.world_size, 0 if group.rank else group.world_size - 1
    wrong: list[Any] = [
        [1.0, 2.0],
        None,
        torch.zeros(2, dtype=torch.uint16),
        torch.zeros(2, dtype=torch.float8_e4m3fnuz),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ]
    calls = {
        **_functions("allreduce", "reduce", "broadcast", "all_gather", "all_gather_uneven", "gather", "reduce_scatter"),
        **_functions("async_allreduce", "async_broadcast", "async_all_gather", "async_reduce_scatter"),
        "scatter": lambda tensor: fd.scatter(tensor, group.rank),
        "all_to_all": lambda tensor: fd.all_to_all([tensor] * p),
        "async_all_to_all": lambda tensor: fd.async_all_to_all([tensor] * p),
        "all_to_all_single_uneven": lambda tensor: fd.all_to_all_single_uneven(tensor, [2] * p, [2] * p),
        "allreduce into it": lambda tensor: fd.allreduce(torch.zeros(2), out=tensor),
        "send": lambda tensor: fd.send(tensor, peer),
        "recv_into": lambda tensor: fd.recv_into(tensor, peer),
        "sendrecv": lambda tensor: fd.sendrecv(tensor, peer, (2,), peer),
        "batch": lambda tensor: fd.batch([fd.Send(tensor, peer)]),
    }
    for name, call in calls.items():
        for tensor in wrong:
            if tensor is None and name in {"allreduce into it", "scatter"}:
                continue  # None has a meaning there
            _check_refused(group, TypeError, f"{name} of {type(tensor).__name__}", partial(call, tensor))


def wrong_results_are_refused(group: Backend) -> None:
    """``out=`` must have the result's shape and dtype, memory of its own, and nothing to do with autograd."""
    tensor, p = torch.zeros(4, 3), group.world_size
    graded, overlapping = torch.zeros(4, 3, requires_grad=True), torch.zeros(6).as_strided((4, 3), (1, 1))
    cases: list[_Case] = [
        (ValueError, "another shape", lambda: fd.allreduce(tensor, out=torch.zeros(3, 4))),
        (ValueError, "another shape", lambda: fd.async_allreduce(tensor, out=torch.zeros(12))),
        (ValueError, "another shape", lambda: fd.all_gather(tensor, out=torch.zeros(4 * p + 1, 3))),
        (ValueError, "another shape", lambda: fd.reduce_scatter(tensor, out=torch.zeros(5, 3))),
        (TypeError, "another dtype", lambda: fd.broadcast(tensor, out=torch.zeros(4, 3, dtype=torch.float64))),
        (ValueError, "expanded", lambda: fd.allreduce(tensor, out=torch.zeros(1, 3).expand(4, 3))),
        (ValueError, "elements that overlap", lambda: fd.allreduce(tensor, out=overlapping)),
        (ValueError, "elements that overlap", lambda: fd.all_gather(tensor, out=_overlapping(4 * p, 3))),
        (RuntimeError, "an out that requires grad", lambda: fd.allreduce(tensor, out=graded)),
        (RuntimeError, "an input that requires grad", lambda: fd.allreduce(graded, out=tensor)),
        (RuntimeError, "an input that requires grad", lambda: fd.broadcast(graded, out=tensor)),
    ]
    if p > 1:
        cases.append((ValueError, "out of a rank that gets nothing", lambda: fd.reduce(tensor, 0, out=tensor)))
        cases.append((ValueError, "out of a rank that gets nothing", lambda: fd.gather(tensor, 0, out=tensor)))
    cases += _wrong_results_of_movement(group)
    _check_all_refused(group, [(kind, f"out=: {what}", call) for kind, what, call in cases])
    with torch.no_grad():
        fd.allreduce(graded, out=graded)


def _wrong_results_of_movement(group: Backend) -> list[_Case]:
    """Calls of gathers, scatters and exchanges with a wrong ``out`` on one rank, which must not send anything."""
    p, rank = group.world_size, group.rank
    whole, counts = torch.zeros(4 * p, 3), [4] * p
    graded = torch.zeros(4 * p, 3, requires_grad=True)
    doubles = torch.zeros(4 * p, 3, dtype=torch.float64)
    parts = list(whole.chunk(p))
    calls: dict[str, Callable[[Any], object]] = {
        "gather": lambda out: fd.gather(parts[0], rank, out=out),
        "all_gather_uneven": lambda out: fd.all_gather_uneven(parts[0], out=out),
        "all_to_all": lambda out: fd.all_to_all(whole, out=out),
        "async_all_to_all": lambda out: fd.async_all_to_all(whole, out=out),
        "all_to_all_single_uneven": lambda out: fd.all_to_all_single_uneven(whole, counts, counts, out=out),
        "scatter": lambda out: fd.scatter(torch.zeros(4 * p * p, 3), rank, out=out),
    }
    cases: list[_Case] = []
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "another dtype", doubles),
        (TypeError, "what is no tensor", [whole]),
        (ValueError, "expanded memory", whole[:1].expand(4 * p, 3)),
        (ValueError, "rows that overlap", _overlapping(4 * p, 3)),
        (RuntimeError, "what requires grad", graded),
        (ValueError, "another shape", whole[1:]),
    ]
    for name, call in calls.items():
        for kind, what, out in wrong:
            # The other ranks know the sizes of gather and all_gather_uneven.
            if what != "another shape" or name not in {"gather", "all_gather_uneven"}:
                cases.append((kind, f"{name} into {what}", partial(call, out)))
    small = [torch.zeros(4, 3) for _ in range(p)]
    lists: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "one tensor", whole),
        (TypeError, "nothing", [None] * p),
        (TypeError, "another dtype", [*small[1:], doubles[:4]]),
        (ValueError, "another shape", [*small[1:], whole[:3]]),
        (ValueError, "too few", small[1:]),
        (RuntimeError, "what requires grad", [*small[1:], graded[:4]]),
    ]
    if p > 1:
        lists.append((ValueError, "one tensor twice", [small[0]] * p))
        lists.append((ValueError, "tensors that overlap", [whole[3 * i :][:4] for i in range(p)]))
    cases += [
        (kind, f"all_to_all of tensors into {what}", partial(fd.all_to_all, parts, out=out))
        for kind, what, out in lists
    ]
    wanted = [part.clone().requires_grad_() for part in parts]
    cases.append((RuntimeError, "all_to_all of what requires grad", lambda: fd.all_to_all(wanted, out=small)))
    return cases


def results_that_other_ranks_show_to_be_wrong(group: Backend) -> None:
    """An ``out`` whose shape others know to be wrong is refused too: they get their results, and the group goes on."""
    p, rank = group.world_size, group.rank
    part, whole = torch.full((2, 3), float(rank)), torch.cat([torch.full((2, 3), float(r)) for r in range(p)])
    odd, what = rank == p - 1, "a result whose shape others know"
    calls: list[Callable[[torch.Tensor | None], torch.Tensor]] = [
        lambda out: fd.all_gather_uneven(part, out=out),
        lambda out: fd.gather(part, p - 1, out=out if odd else None),
        lambda out: fd.all_gather_uneven(part.t(), 1, out=out).t(),
    ]
    for call in calls:
        if odd:
            assert "shape" in str(error_of(ValueError, partial(call, torch.zeros(1, 3)), what))
        else:
            result = call(None)
            check_bits(result, whole if result.numel() else torch.empty(0), "the result of another rank")
    wrong: list[tuple[type[Exception], torch.Tensor, torch.Tensor]] = [
        (ValueError, whole, torch.zeros(3, 3)),
        (TypeError, whole, torch.zeros(2, 3, dtype=torch.float64)),
        (RuntimeError, whole.clone().requires_grad_(), torch.zeros(2, 3)),
    ]
    for kind, source, out in wrong * (p > 1):
        scatter = partial(fd.scatter, source if rank == 0 else None)
        if odd:
            error_of(kind, partial(scatter, out=out), what)
        else:
            check_bits(scatter(), part, "the part of another rank")
    check_bits(fd.allreduce(torch.ones(2)), torch.full((2,), float(p)), "an allreduce after all of it")


def _overlapping(rows: int, columns: int) -> torch.Tensor:
    """A tensor in which each row begins with the end of the one before."""
    return torch.zeros(rows * columns).as_strided((rows, columns), (columns - 1, 1))


def wrong_places_are_refused(group: Backend) -> None:
    """Roots outside the group, dims that a tensor doesn't have, and objects that are not groups are refused."""
    p = group.world_size
    tensor, number = torch.zeros(4, 3), torch.tensor(1.0)
    cases: list[_Case] = []
    rooted = _functions("reduce", "broadcast", "gather", "scatter")
    for root in (p, -1, cast("int", True), cast("int", 0.0), cast("int", "0")):
        refused = fd.InvalidRankError
        cases += [(refused, f"{name} with root {root!r}", partial(call, tensor, root)) for name, call in rooted.items()]
        cases.append((refused, f"broadcast_object from {root!r}", partial(fd.broadcast_object, 1, root)))
    along = _functions("all_gather", "all_gather_uneven", "gather", "reduce_scatter")
    along["scatter"] = partial(fd.scatter, src=group.rank)
    wrong_dims: list[Any] = [2, -3, 0.5, "0", None]
    for dim in wrong_dims:
        kind: type[Exception] = IndexError if isinstance(dim, int) else TypeError
        cases += [(kind, f"{name} along {dim!r}", partial(call, tensor, dim=dim)) for name, call in along.items()]
    for dim in (12, -13, 2**40, -(2**40)):
        for src in range(p):
            scatter = partial(fd.scatter, tensor if src == group.rank else None, src, dim=dim)
            cases.append((IndexError, f"scatter from {src} along {dim}", scatter))
    cases += [
        (ValueError, "reduce_scatter of a number", lambda: fd.reduce_scatter(number)),
        (ValueError, "scatter of a number", lambda: fd.scatter(number, group.rank)),
        (ValueError, "all_to_all of a number", lambda: fd.all_to_all(number)),
        (ValueError, "scatter of nothing", lambda: fd.scatter(None, group.rank)),
        (TypeError, "a group that is none", lambda: fd.allreduce(tensor, group=cast("Backend", "world"))),
    ]
    if p > 1:
        cases.append((ValueError, "scatter of another rank's tensor", lambda: fd.scatter(tensor, 0)))
    _check_all_refused(group, cases)


def wrong_exchanges_are_refused(group: Backend) -> None:
    """all_to_all needs one tensor for each rank, of equal shape and dtype, and matching counts."""
    p = group.world_size
    tensor = torch.zeros(p, 2)
    unlike = [torch.zeros(2)] * p
    unlike[-1] = torch.zeros(2, dtype=torch.float64) if p > 1 else torch.zeros(2, dtype=torch.uint32)
    ones = [1] * p
    cases: list[_Case] = [
        (ValueError, "too few tensors", lambda: fd.all_to_all([torch.zeros(2)] * (p - 1))),
        (ValueError, "too many tensors", lambda: fd.all_to_all([torch.zeros(2)] * (p + 1))),
        ((TypeError if p == 1 else ValueError), "tensors of several dtypes", lambda: fd.all_to_all(unlike)),
        (ValueError, "too few counts", lambda: fd.all_to_all_single_uneven(tensor, ones[1:], ones)),
        (ValueError, "counts below 0", lambda: fd.all_to_all_single_uneven(tensor, ones, [-1, *ones[1:]])),
        (ValueError, "counts beside the rows", lambda: fd.all_to_all_single_uneven(tensor[1:], ones, ones)),
    ]
    if p > 1:
        cases.append((ValueError, "rows that can't be shared", lambda: fd.all_to_all(torch.zeros(p + 1))))
        receive = [2 if rank == group.rank else 1 for rank in range(p)]
        cases.append((ValueError, "other rows for itself", lambda: fd.all_to_all_single_uneven(tensor, ones, receive)))
    _check_all_refused(group, cases)


def wrong_numbers_are_refused(group: Backend) -> None:
    """Factors, timeouts and tags are checked when they are given."""
    tensor = torch.zeros(2)
    peer = 0 if group.rank else group.world_size - 1
    cases: list[_Case] = [
        (TypeError, "a factor that is complex", lambda: fd.premultiplied_sum(cast("float", 1j))),
        (TypeError, "a factor that is a bool", lambda: fd.premultiplied_sum(factor=True)),
        (ValueError, "an infinite factor", lambda: fd.premultiplied_sum(float("inf"))),
        (ValueError, "a factor that is NaN", lambda: fd.premultiplied_sum(float("nan"))),
        (TypeError, "an operation that is a string", lambda: fd.allreduce(tensor, cast("fd.ReduceOp", "sum"))),
        (ValueError, "a timeout below 0", lambda: fd.allreduce(tensor, timeout=-1)),
        (ValueError, "a timeout that is NaN", lambda: fd.async_broadcast(tensor, timeout=float("nan"))),
        (TypeError, "a timeout that is a string", lambda: fd.barrier(timeout=cast("float", "1"))),
        (TypeError, "a timeout that is a bool", lambda: fd.all_gather_object(1, timeout=True)),
    ]
    if group.world_size > 1:
        deep = torch.zeros([1] * 13)
        cases += [
            (ValueError, "a tag below 0", lambda: fd.send(tensor, peer, tag=-1)),
            (ValueError, "a tag too large", lambda: fd.recv((2,), None, peer, tag=2**56)),
            (fd.SelfSendError, "a send to itself", lambda: fd.send(tensor, group.rank)),
            (fd.SelfSendError, "a recv from itself", lambda: fd.recv(None, None, group.rank)),
            (fd.InvalidRankError, "a send to nobody", lambda: fd.send(tensor, group.world_size)),
            (fd.InvalidRankError, "a send to any", lambda: fd.send(tensor, fd.ANY_SOURCE)),
            (fd.InvalidRankError, "sendrecv with nobody", lambda: fd.sendrecv(tensor, -2, (2,), peer)),
            (ValueError, "a send of 13 dims", lambda: fd.send(deep, peer)),
            (TypeError, "a batch of tensors", lambda: fd.batch([cast("fd.Send", tensor)])),
            (TypeError, "recv of an unknown dtype", lambda: fd.recv((2,), torch.uint16, peer)),
        ]
    cases.append((ValueError, "a scatter of 13 dims", lambda: fd.scatter(torch.zeros([1] * 13), group.rank)))
    _check_all_refused(group, cases)


def objects_that_cannot_travel_are_refused(group: Backend) -> None:
    """An object that msgpack can't encode raises TypeError, which names allow_pickle, before anything is sent."""
    peer = 0 if group.rank else group.world_size - 1
    values: list[Any] = [1j, object(), {"deep": [torch.zeros(1)]}, 2**70, lambda: None]
    for value in values:
        for name, call in _object_calls(group, peer).items():
            said = _check_refused(group, TypeError, f"{name} of a {type(value).__name__}", partial(call, value))
            assert not said or "allow_pickle" in said, f"{name} does not say what to do: {said!r}"
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    for pickled in (False, True):
        for name, call in _object_calls(group, peer).items():
            what = f"{name} of what is nested too deeply"
            said = _check_refused(group, ValueError, what, partial(call, deep, allow_pickle=pickled))
            assert not said or "nested too deeply" in said, f"{name} does not say why: {said!r}"
    objects = [1] * (group.world_size + 1)
    _check_refused(group, ValueError, "too many objects", lambda: fd.scatter_object(objects, group.rank))


def _object_calls(group: Backend, peer: int) -> dict[str, Callable[..., object]]:
    p = group.world_size
    calls: dict[str, Callable[..., object]] = {
        "all_gather_object": fd.all_gather_object,
        "gather_object": fd.gather_object,
        "broadcast_object": partial(fd.broadcast_object, root=group.rank),
        "scatter_object": lambda value, **options: fd.scatter_object([value] * p, group.rank, **options),
    }
    return calls if p == 1 else calls | {"send_object": partial(fd.send_object, dst=peer)}


def groups_that_were_closed_are_refused(group: Backend) -> None:
    """After a group was closed every collective, message and object call on it raises GroupClosedError at once."""
    gone = duplicate_group(group)
    fd.barrier(gone)
    gone.close()
    tensor, peer = torch.ones(2), 0 if group.rank else group.world_size - 1
    calls: dict[str, Call] = {name: partial(call, group=gone) for name, call in SAMPLE_CALLS.items()}
    calls["async_allreduce"] = lambda: fd.async_allreduce(tensor, group=gone).wait(0)
    calls["all_gather_object"] = lambda: fd.all_gather_object(1, group=gone)
    if group.world_size > 1:
        calls["send"] = lambda: fd.send(tensor, peer, group=gone)
        calls["recv"] = lambda: fd.recv(None, None, peer, group=gone)
    for name, call in calls.items():
        error_of(fd.GroupClosedError, call, f"{name} on a closed group")
    fd.barrier()
