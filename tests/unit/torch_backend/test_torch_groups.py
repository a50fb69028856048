"""Groups of torch's, made of ours."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ferrodist.errors import DistributedError, DistributedTimeoutError, InvalidRankError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import FerrodistProcessGroup
from ferrodist.torch_backend.registration_impl import group_of

LIMIT = timedelta(seconds=20)


def run(program, size=2, **kwargs):
    """Run ``program(process_group)`` on each rank."""
    return run_ranks(lambda group: program(FerrodistProcessGroup(group)), size, timeout=60, **kwargs)


def test_torch_names_groups():
    """What torch calls a group is what it answers, to C++ too, whose property `group_name` is."""

    def program(made):
        made._set_group_name("pipeline")
        made._set_group_desc("stages")
        return made.group_name, made.group_desc

    assert run(program) == [("pipeline", "stages")] * 2


def ranked(rank):
    """Another tensor on each rank."""
    return torch.arange(2.0) + 10 * rank


def spread(tensor):
    """An equal tensor, whose elements don't lie side by side."""
    return torch.stack([tensor, torch.full_like(tensor, -1.0)], dim=-1)[..., 0]


def of_maximum():
    """Options of an allreduce."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


FORMS = {
    "allreduce": lambda group, own: (group.allreduce(own, dist.ReduceOp.MAX), own),
    "allreduce with named options": lambda group, own: (group.allreduce(own, opts=of_maximum()), own),
    "allreduce by name": lambda group, own: (group.allreduce(opts=of_maximum(), tensors=own), own),
    "allreduce of lists": lambda group, own: (group.allreduce([own], op=dist.ReduceOp.MAX, timeout=LIMIT), own),
    "broadcast": lambda group, own: (group.broadcast(own, 1), own),
    "broadcast by name": lambda group, own: (group.broadcast(own, root=1, timeout=LIMIT), own),
    "reduce": lambda group, own: (group.reduce(own, 1, dist.ReduceOp.MAX, LIMIT), own),
    "allgather": lambda group, own: made_of(own, lambda out: group.allgather(out, own, LIMIT)),
    "gather": lambda group, own: made_of(own, lambda out: group.gather(out if group.rank() else [], own, 1)),
    "scatter": lambda group, own: made_of(
        own, lambda out: group.scatter(out[0], [own, 2 * own] if group.rank() else [], 1)
    ),
    "reduce_scatter": lambda group, own: made_of(
        own, lambda out: group.reduce_scatter(out[0], [own, own], op=dist.ReduceOp.MAX)
    ),
    "alltoall": lambda group, own: made_of(own, lambda out: group.alltoall(out, [own, own], LIMIT)),
    "all_to_all_single": lambda group, own: made_of(
        own, lambda out: group.all_to_all_single(out[0], own, [], [], timeout=LIMIT)
    ),
}
"""Calls without options, and what they write to."""


def made_of(own, call):
    """What a call writes to the tensors that it gets, which lie as its own does."""
    out = [torch.zeros_like(own) if own.is_contiguous() else spread(torch.zeros_like(own)) for _ in range(2)]
    return call(out), out


FIRST, SECOND, NOTHING = [0.0, 1.0], [10.0, 11.0], [0.0, 0.0]
RESULTS = {
    "allreduce": [SECOND, SECOND],
    "allreduce with named options": [SECOND, SECOND],
    "allreduce by name": [SECOND, SECOND],
    "allreduce of lists": [SECOND, SECOND],
    "broadcast": [SECOND, SECOND],
    "broadcast by name": [SECOND, SECOND],
    "reduce": [FIRST, SECOND],
    "allgather": [[FIRST, SECOND]] * 2,
    "gather": [[NOTHING, NOTHING], [FIRST, SECOND]],
    "scatter": [[SECOND, NOTHING], [[20.0, 22.0], NOTHING]],
    "reduce_scatter": [[SECOND, NOTHING]] * 2,
    "alltoall": [[FIRST, SECOND]] * 2,
    "all_to_all_single": [[[0.0, 10.0], NOTHING], [[1.0, 11.0], NOTHING]],
}


@pytest.mark.parametrize("lie", [torch.clone, spread])
@pytest.mark.parametrize("form", FORMS)
def test_methods_take_tensors(form, lie):
    """In place of lists and options, as those of torch's own groups do; tensors that lie in any way."""

    def program(made):
        work, out = FORMS[form](made, lie(ranked(made.rank())))
        work.wait()
        return [each.tolist() for each in out] if isinstance(out, list) else out.tolist()

    assert run(program) == RESULTS[form]


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_views_that_negate_or_conjugate(backend):
    """Count as what they show, and are written so."""

    def program(made):
        rank = made.rank()
        negated = torch._neg_view(ranked(rank))
        made.allreduce(negated).wait()
        sent = torch._neg_view(ranked(rank))
        made.broadcast(sent, 1).wait()
        gathered = torch._neg_view(torch.zeros(4))
        made.all_gather_single(gathered, torch._neg_view(ranked(rank))).wait()
        folded = torch._neg_view(torch.zeros(1))
        made.reduce_scatter_single(folded, torch._neg_view(ranked(rank))).wait()
        conjugated = torch.zeros(2, dtype=torch.complex64).conj()
        made.all_gather_single(conjugated, torch.tensor([complex(rank, 1)]).conj()).wait()
        return [each.tolist() for each in (negated, sent, gathered, folded, conjugated)]

    found = [[-10.0, -12.0], [-10.0, -11.0], [0.0, -1.0, -10.0, -11.0]]
    assert run(program, backend=backend) == [[*found, [part], [-1j, 1 - 1j]] for part in (-10.0, -12.0)]


@pytest.mark.parametrize("lie", [torch.clone, spread])
def test_gather_into_one_tensor(lie):
    """The root's, also where what is gathered is a part of it; other ranks' is left alone."""

    def program(made):
        out = lie(torch.full((4,), -1.0))
        made.gather_single(out, lie(ranked(made.rank())), 1).wait()
        again = torch.cat([ranked(made.rank())] * 2)
        parts = again[:2], again[2:]
        made.gather_single(again, parts[made.rank()], 1).wait()
        made.gather_single(again, parts[1 - made.rank()], root=1).wait()  # where another rank's part will be
        return out.tolist(), again.tolist()

    assert run(program) == [([-1.0] * 4, [0.0, 1.0, 0.0, 1.0]), ([0.0, 1.0, 10.0, 11.0], [0.0, 1.0, 0.0, 1.0])]


def test_lists_of_tensors_by_rank():
    """As torch's functions pass them."""

    def program(made):
        own = [ranked(made.rank()), ranked(made.rank()) + 100]
        by_rank = [[torch.zeros(2) for _ in own] for _ in range(2)]
        made.allgather_coalesced(by_rank, own).wait()
        return [[each.tolist() for each in outputs] for outputs in by_rank]

    found = [[[0.0, 1.0], [100.0, 101.0]], [[10.0, 11.0], [110.0, 111.0]]]
    assert run(program) == [found, found]


def test_a_sum_with_a_factor():
    """Which torch keeps in the reduction."""

    def program(made):
        own = ranked(made.rank())
        made.allreduce(own, dist._make_nccl_premul_sum(0.5)).wait()
        return own.tolist()

    assert run(program) == [[5.0, 6.0]] * 2


def test_several_calls_as_one():
    """Their work has ended when all have, and is none of later calls."""

    def program(made):
        cpu = torch.device("cpu")
        options = dist.AllreduceOptions()
        options.asyncOp = True
        tensors = [ranked(made.rank()) for _ in range(3)]
        made._start_coalescing(cpu)
        for tensor in tensors:
            made.allreduce([tensor], options)
        work = made._end_coalescing(cpu)
        work.wait()
        assert [each.tolist() for each in tensors] == [[10.0, 12.0]] * 3
        later = made.recv([torch.zeros(1)], 1 - made.rank())
        assert work.is_completed()
        made.send([torch.zeros(1)], 1 - made.rank())
        later.wait()
        made._start_coalescing(cpu)
        made._end_coalescing(cpu).wait()  # of none

    run(program)


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_collectives_of_one_tensor_by_all_their_names(backend):
    """The names of today and of before give the same: torch's releases, and programs, call either."""

    def program(made):
        rank, own = made.rank(), torch.arange(2.0) + 10 * made.rank()
        found = {}
        for name in ("all_gather_single", "_allgather_base"):
            getattr(made, name)(out := torch.zeros(4), own).wait()
            found[name] = out.tolist()
        for name in ("reduce_scatter_single", "_reduce_scatter_base"):
            getattr(made, name)(out := torch.zeros(1), own).wait()
            found[name] = out.tolist()
        for name in ("all_to_all_single", "alltoall_base"):
            getattr(made, name)(out := torch.zeros(2), own, [], []).wait()
            found[name] = out.tolist()
        for name in ("gather_single", "gather_into_tensor"):
            options = dist.GatherOptions()
            options.rootRank = 1
            getattr(made, name)(out := torch.zeros(4), own, options).wait()
            found[name] = out.tolist()
        made.scatter_single(out := torch.zeros(2), torch.arange(4.0) if rank == 1 else torch.zeros(0), 1).wait()
        found["scatter_single"] = out.tolist()
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
            getattr(made, name)(outs := [torch.zeros(4), torch.zeros(2)], [own, own[:1]]).wait()
            found[name] = [out.tolist() for out in outs]
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
            getattr(made, name)(outs := [torch.zeros(1), torch.zeros(1)], [own, 2 * own]).wait()
            found[name] = [out.tolist() for out in outs]
        return found

    def expected(rank):
        gathered, reduced = [0.0, 1.0, 10.0, 11.0], 10.0 + 2 * rank
        by_names = [
            (("all_gather_single", "_allgather_base"), gathered),
            (("reduce_scatter_single", "_reduce_scatter_base"), [reduced]),
            (("all_to_all_single", "alltoall_base"), [0.0 + rank, 10.0 + rank]),
            (("gather_single", "gather_into_tensor"), gathered if rank == 1 else [0.0] * 4),
            (("scatter_single",), [2.0 * rank, 2.0 * rank + 1]),
            (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), [gathered, [0.0, 10.0]]),
            (("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), [[reduced], [2 * reduced]]),
        ]
        return {name: value for names, value in by_names for name in names}

    assert run(program, backend=backend) == [expected(0), expected(1)]


def test_a_scatter_of_one_tensor_of_another_size():
    """The root is told how much it must be."""

    def program(made):
        with pytest.raises(ValueError, match="the output's 2 elements for each of 1 rank, not 3"):
            made.scatter_single(torch.zeros(2), torch.zeros(3), 0)

    run(program, 1)


def test_groups_of_some_ranks():
    """With a name and a limit of their own; None where this rank is none of them."""

    def program(made):
        pair = made.split_group([0, 2], timeout=timedelta(seconds=7), group_name="pair", group_desc="ends")
        if made.rank() == 1:
            return pair
        own = ranked(made.rank())
        pair.allreduce(own).wait()
        return pair.group.timeout, pair.group_name, pair.group_desc, own.tolist()

    pair = (7.0, "pair", "ends", [20.0, 22.0])
    assert run(program, 3) == [pair, None, pair]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "all_gather_single", "reduce_scatter_single", "barrier"])
def test_options_limit_a_call(name, is_async):
    """Which ends with its group when that has passed, also on the engine's short way."""
    kind, tensors = {
        "allreduce": (dist.AllreduceOptions, lambda: [[torch.zeros(2)]]),
        "broadcast": (dist.BroadcastOptions, lambda: [[torch.zeros(2)]]),
        "all_gather_single": (AllgatherOptions, lambda: [torch.zeros(4), torch.zeros(2)]),
        "reduce_scatter_single": (dist.ReduceScatterOptions, lambda: [torch.zeros(2), torch.zeros(4)]),
        "barrier": (dist.BarrierOptions, list),
    }[name]

    def program(made):
        if made.rank() != 1:  # the root of a broadcast needs to wait for nobody
            return
        options = kind()
        options.asyncOp, options.timeout = is_async, timedelta(milliseconds=50)
        with pytest.raises(DistributedTimeoutError):
            getattr(made, name)(*tensors(), options).wait()

    run(program, backend="native-threads")


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_an_asynchronous_barrier(backend):
    """Returns before the others have come to it."""

    def program(made):
        options = dist.BarrierOptions()
        options.asyncOp = True
        if made.rank() == 0:
            work = made.barrier(options)
            assert not work.is_completed()
            made.send([torch.zeros(1)], 1).wait()
            work.wait()
            return
        made.recv([torch.zeros(1)], 0).wait()
        made.barrier().wait()

    run(program, backend=backend)


def at_once(kind):
    """Options of a call that waits."""
    options = kind()
    options.asyncOp = False
    return options


LATE_CALLS = {
    "an allreduce": lambda made: made.allreduce([torch.zeros(2)], at_once(dist.AllreduceOptions)),
    "a collective that was started": lambda made: made.allreduce([torch.zeros(2)]).wait(),
    "a collective of another way": lambda made: made.gather([], [torch.zeros(2)]).wait(),
    "a barrier": lambda made: made.barrier(at_once(dist.BarrierOptions)),
    "a message": lambda made: made.recv([torch.zeros(2)], 0).wait(),
    "a callback's collective": lambda made: (
        made.split_group([1], group_name="one")
        .allreduce([torch.zeros(2)])
        .get_future()
        .then(lambda _: made.allreduce([torch.zeros(2)]).wait())
        .wait()
    ),
}


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("call", LATE_CALLS)
def test_a_timeout_that_is_set_is_that_of_later_calls(call, backend):
    """`torch.distributed.set_timeout` works after calls by every way, or a program waits for the timeout of before."""

    def program(made):
        for _ in range(3):  # the engine's short way is known only then
            made.allreduce([torch.zeros(2)]).wait()
        if made.rank() != 1:
            return
        made.set_timeout(timedelta(milliseconds=50))
        assert made.options._timeout == timedelta(milliseconds=50)
        with pytest.raises(DistributedTimeoutError, match=r"0\.0[45]"):
            LATE_CALLS[call](made)

    run(program, backend=backend)


def test_a_timeout_that_is_none():
    """What is no time is refused, and the one of before stays."""

    def program(made):
        before = made.group.timeout
        with pytest.raises(ValueError, match="timeout"):
            made.set_timeout(timedelta(seconds=-1))
        assert made.group.timeout == before

    run(program, 1)


def test_the_group_behind_one_of_torch_s():
    """Others have none."""

    def program(made):
        assert group_of(made) is made.group

    run(program, 1)
    for other in (None, dist.ProcessGroup(0, 1)):
        with pytest.raises(TypeError, match="is no group of ferrodist's"):
            group_of(other)


def test_a_group_that_is_left_is_let_go():
    """Nothing keeps it until the program ends."""

    def program(made):
        made.shutdown()
        return weakref.ref(made)

    references = run(program)
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_what_methods_do_not_take():
    """Raises before anything is sent."""

    def program(made):
        own = ranked(made.rank())
        with pytest.raises(TypeError, match=r"allreduce takes op, timeout after its tensors, not .*, 3$"):
            made.allreduce(own, dist.ReduceOp.MAX, LIMIT, 3)
        with pytest.raises(TypeError, match="allreduce takes op, timeout after its tensors, not root"):
            made.allreduce(own, root=1)
        for options in ({"op": dist.ReduceOp.MAX}, {"root": 1}):
            with pytest.raises(TypeError, match="allreduce takes opts, or op, timeout, not both"):
                made.allreduce(own, dist.AllreduceOptions(), **options)
        with pytest.raises(TypeError, match="allreduce takes opts, or op, timeout, not both"):
            made.allreduce(own, dist.AllreduceOptions(), dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match="one tensor a rank, not 2"):
            made.allreduce([own, own])

    run(program)


def test_none_is_what_options_say():
    """As if it had been left out."""

    def program(made):
        own = ranked(made.rank())
        made.allreduce(own, None).wait()
        made.allreduce(own, op=None, timeout=None).wait()
        made.broadcast([own], opts=None).wait()
        return own.tolist()

    assert run(program) == [[20.0, 24.0]] * 2


@pytest.mark.parametrize("lie", [torch.clone, spread])
def test_autograd_sees_nothing(lie):
    """What is written is not counted, and leaves may be written to."""

    def program(made):
        peer = 1 - made.rank()
        leaves = [lie(ranked(made.rank())).requires_grad_() for _ in range(5)]
        versions = [leaf._version for leaf in leaves]
        made.allreduce(leaves[0]).wait()
        made.broadcast(leaves[1], 1).wait()
        made.all_gather_single(leaves[2], leaves[1][:1]).wait()
        made.send([leaves[1]], peer)
        made.recv([leaves[3]], peer).wait()
        made.reduce_scatter_single(leaves[4][:1], leaves[1]).wait()
        assert [leaf._version for leaf in leaves] == versions
        return [leaf.tolist() for leaf in leaves]

    assert run(program) == [
        [[10.0, 12.0], SECOND, [10.0, 10.0], SECOND, [part, rest]] for part, rest in ((20.0, 1.0), (22.0, 11.0))
    ]


def test_a_timeout_among_the_arguments():
    """Is the limit of that call: of a barrier, which ends with the group, also 0 seconds."""

    def late(made):
        with pytest.raises(DistributedTimeoutError, match="rank 1 has not called it"):
            made.barrier(timeout=timedelta(milliseconds=50)).wait()

    def at_once(made):
        with pytest.raises(DistributedError):
            made.monitored_barrier(timedelta(0))

    for program in (late, at_once):
        run(lambda made, program=program: program(made) if made.rank() == 0 else None)


@pytest.mark.parametrize("is_async", [False, True])
def test_several_tensors_at_once(is_async):
    """Each is folded, as the options of such calls say, which are of a class of their own."""

    def program(made):
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.asyncOp = is_async
        tensors = [ranked(made.rank()), ranked(-made.rank())]
        made.allreduce_coalesced(tensors, options).wait()
        return [each.tolist() for each in tensors]

    assert run(program) == [[SECOND, FIRST]] * 2


def test_a_root_that_is_no_rank_is_refused():
    """On each rank, before anything is written; the group goes on."""

    def program(made):
        own = ranked(made.rank())
        for call in (
            lambda: made.broadcast(own, 7),
            lambda: made.reduce(own, 7),
            lambda: made.gather([own, own.clone()], own, 7),
            lambda: made.scatter(own, [own, own.clone()], 7),
        ):
            with pytest.raises(InvalidRankError, match="root=7 is not in"):
                call()
        assert torch.equal(own, ranked(made.rank()))
        made.allreduce(own).wait()
        return own.tolist()

    assert run(program) == [[10.0, 12.0]] * 2


def test_tensors_without_dims_are_not_divided():
    """They are no rows."""

    def program(made):
        with pytest.raises(ValueError, match="which one of no dims lacks"):
            made.all_to_all_single(torch.tensor(0.0), torch.tensor(1.0), [], [])

    run(program)


def test_the_future_of_what_has_ended_is_done():
    """At once: torch's reducer looks into it after a wait."""

    def program(made):
        for _ in range(100):
            work = made.allreduce(ranked(made.rank()))
            work.wait()
            future = work.get_future()
            assert future.done()
            assert future.value()[0].tolist() == [10.0, 12.0]

    run(program, backend="native-threads")


@pytest.mark.parametrize("is_async", [False, True])
def test_outputs_are_not_kept(is_async):
    """The group keeps no work whose tensors are large, also not one of lists."""

    def program(made):
        outputs = [torch.empty(5000) for _ in range(3)]
        gathering, folding = AllgatherOptions(), dist.AllreduceOptions()
        gathering.asyncOp = folding.asyncOp = is_async
        made.allgather([outputs[:2]], [torch.ones(5000)], gathering).wait()
        made.allreduce([outputs[2]], folding).wait()
        references = [weakref.ref(each) for each in outputs]
        del outputs
        end = time.monotonic() + 10  # the thread that ran them drops its own references when it gets its turn
        while any(reference() is not None for reference in references) and time.monotonic() < end:
            time.sleep(0.01)
            gc.collect()
        return [reference() for reference in references]

    assert run(program) == [[None] * 3] * 2
