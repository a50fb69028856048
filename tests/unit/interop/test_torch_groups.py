"""Groups of torch's, made of ours."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ferrodist.errors import DistributedError, DistributedTimeoutError, InvalidRankError
from ferrodist.interop.process_group import FerrodistProcessGroup
from ferrodist.testing import run_ranks

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


FORMS = {
    "allreduce": lambda group, own: (group.allreduce(own, dist.ReduceOp.MAX), own),
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
    """What a call writes to the tensors that it gets."""
    out = [torch.zeros_like(own) for _ in range(2)]
    return call(out), out


FIRST, SECOND, NOTHING = [0.0, 1.0], [10.0, 11.0], [0.0, 0.0]
RESULTS = {
    "allreduce": [SECOND, SECOND],
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


@pytest.mark.parametrize("form", FORMS)
def test_methods_take_tensors(form):
    """In place of lists and options, as those of torch's own groups do."""

    def program(made):
        work, out = FORMS[form](made, ranked(made.rank()))
        work.wait()
        return [each.tolist() for each in out] if isinstance(out, list) else out.tolist()

    assert run(program) == RESULTS[form]


def test_what_methods_do_not_take():
    """Raises before anything is sent."""

    def program(made):
        own = ranked(made.rank())
        with pytest.raises(TypeError, match="allreduce takes op, timeout after its tensors"):
            made.allreduce(own, dist.ReduceOp.MAX, LIMIT, 3)
        with pytest.raises(TypeError, match="root"):
            made.allreduce(own, root=1)
        with pytest.raises(TypeError, match="op"):  # which options say
            made.allreduce(own, dist.AllreduceOptions(), op=dist.ReduceOp.MAX)
        with pytest.raises(TypeError, match="opts"):
            made.allreduce(own, dist.AllreduceOptions(), dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match="one tensor a rank, not 2"):
            made.allreduce([own, own])

    run(program)


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


def test_outputs_of_lists_are_not_kept():
    """The group keeps no work whose tensors are large, also not one of lists."""

    def program(made):
        outputs = [torch.empty(5000) for _ in range(2)]
        made.allgather([outputs], [torch.ones(5000)]).wait()
        references = [weakref.ref(each) for each in outputs]
        del outputs
        gc.collect()
        return [reference() for reference in references]

    assert run(program) == [[None, None]] * 2
