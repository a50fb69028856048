"""A torch.nn.Sequential divided into the stages of a pipeline, which cost about the same."""

from __future__ import annotations

import enum
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ferrodist.collectives.objects import broadcast_object
from ferrodist.collectives.prepare import check_integer, group_and_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.pipeline.measuring import measure_times
from ferrodist.parallel.pipeline.partition import partition
from ferrodist.parallel.pipeline.stages import Stages, count_parameters
from ferrodist.parallel.same_form import compare_forms
from ferrodist.torch_private.modules import own_buffers, own_modules, own_parameters
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

    Children: TypeAlias = Sequence[tuple[str, torch.nn.Module]]
    ChildCosts: TypeAlias = Sequence[float | None]

__all__ = ["Balance", "split_sequential"]


class Balance(enum.Enum):
    """What the stages of a model have about as much of."""

    PARAMETERS = "parameters"
    """Elements of their parameters, frozen ones too. What a child shares with others counts for each of them."""

    TIMES = "measured times"
    """Seconds for a forward and a backward, measured here and now."""


def split_sequential(
    model: torch.nn.Sequential,
    num_stages: int,
    balance: Balance | Sequence[int] = Balance.PARAMETERS,
    *,
    costs: Sequence[float] | None = None,
    sample: Any = None,
    group: Backend | None = None,
    timeout: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Stages:
    """Divide a Sequential into stages, each a Sequential of successive children of it, which keep their names.

    So the keys of the stages' states are those of the model's. The children are those of the model, not copies; the
    model itself stays as it is, and so do hooks that were registered with the model rather than with its children.

    The most costly stage costs as little as it can: see `partition`, also for what is chosen where several divisions
    do. Parameters are counted on the meta device, too. Times are measured in the mode that the model is in, training
    or not, on copies of the children, one at a time: the model, the sample and the random generators stay bit for bit
    what they were. Something that forwards change outside of the model, as a hook's counter, is changed.

    Measured times differ from rank to rank, and with them what each would choose. So pass ``group``, and call this on
    all of its ranks: rank 0 measures, while the others wait, and its costs are taken everywhere. Only rank 0 needs a
    sample.

    Args:
        model: What to divide.
        num_stages: Into how many stages; at most as many as the model has children.
        balance: What to have about as much of in each stage. Or for each stage how many children it gets.
        costs: What each child costs, in any unit, instead of its parameters; none is negative.
        sample: For `Balance.TIMES`: what the model is called with, as large as a microbatch.
        group: Whose ranks divide the model together; None asks no other rank.
        timeout: Seconds for all ranks to do so, measuring included; None takes the group's.
        clock: Where measured times come from, in seconds.

    Raises:
        TypeError: The model is no Sequential, or has a forward of its own; or an argument has another type.
        ValueError: There are fewer children than stages, or an argument fits no such model; the model has parameters of
            its own; children have parameters whose shapes aren't known yet; there is no sample; or a child fails on it.
        CollectiveMismatchError: On every rank, when the ranks divide different models, or differently. The group stays
            good.
        UnsupportedOpError: On the other ranks, when rank 0 raises while it finds the costs. The group stays good.
    """
    children = _children_of(model)
    num_stages = _check_num_stages(num_stages, len(children))
    counts = None if isinstance(balance, Balance) else _check_counts(balance, num_stages, len(children))
    given = None if costs is None else _check_costs(costs, len(children))
    is_measured = balance is Balance.TIMES
    if is_measured and given is not None:
        raise ValueError("Balance.TIMES measures what costs= says: pass one of the two")
    if sample is not None and not is_measured:
        raise ValueError("sample= is for measuring: pass Balance.TIMES with it")

    def find_costs() -> ChildCosts:
        if given is not None:
            return given
        return _measure(children, sample, clock) if is_measured else _count(children, is_needed=counts is None)

    costs_name = "costs" if given is not None else (Balance.TIMES if is_measured else Balance.PARAMETERS).value
    if group is None:
        found = find_costs()
    else:
        division = f"{counted(num_stages, 'stage')}" if counts is None else f"stages of {counts} children"
        lines = [f"{division} by {costs_name}", *(f"child {name!r}, {_kind(child)}" for name, child in children)]
        found = _find_on_rank_0(find_costs, lines, group, timeout)
    if counts is None:
        counts = partition([cost for cost in found if cost is not None], num_stages)
    return _make_stages(model, children, counts, found, costs_name)


def _find_on_rank_0(
    find_costs: Callable[[], ChildCosts], lines: Sequence[str], group: Backend, timeout: float | None
) -> ChildCosts:
    """The costs that rank 0 finds, on all ranks, which divide the same model in the same way or raise."""
    group, limit = group_and_timeout(group, timeout)
    deadline = Deadline(limit)
    failure, found = None, None
    if group.rank == 0:
        try:
            found = find_costs()
        except (TypeError, ValueError) as error:
            failure = error
    refusal = None if failure is None else str(failure)
    try:
        compare_forms(lines, group, deadline, maker="split_sequential", module="Sequential", refusal=refusal)
    except UnsupportedOpError:
        if failure is not None:
            raise failure from failure.__cause__
        raise
    costs: ChildCosts = broadcast_object(found, group=group, timeout=deadline.remaining())
    return costs


def _make_stages(
    model: torch.nn.Sequential, children: Children, counts: Sequence[int], costs: ChildCosts, costs_name: str
) -> Stages:
    stages, stage_costs, start = [], [], 0
    for count in counts:
        end = start + count
        stage = torch.nn.Sequential(OrderedDict(children[start:end]))
        stage.training = model.training  # train() would change the children, which may be in another mode
        stages.append(stage)
        known = [cost for cost in costs[start:end] if cost is not None]
        stage_costs.append(math.fsum(known) if len(known) == count else None)
        start = end
    return Stages(stages, [""] * len(stages), costs=stage_costs, costs_name=costs_name)


def _count(children: Children, *, is_needed: bool) -> ChildCosts:
    counts = [count_parameters(child) for _, child in children]
    if is_needed and None in counts:
        name, child = children[counts.index(None)]
        raise ValueError(
            f"child {name!r} ({_kind(child)}) is lazy, and its parameters have no shape yet: call the model once"
            " before, or pass costs=, or for each stage how many children it gets"
        )
    return counts


def _measure(children: Children, sample: Any, clock: Callable[[], float]) -> ChildCosts:
    if sample is None:
        raise ValueError("Balance.TIMES measures: pass sample=, what the model is called with for a microbatch")
    return measure_times(children, sample, clock=clock)


def _kind(child: torch.nn.Module) -> str:
    return f"{'an' if type(child).__name__[0] in 'AEIOU' else 'a'} {type(child).__name__}"


def _children_of(model: torch.nn.Sequential) -> Children:
    if not isinstance(model, torch.nn.Sequential) or type(model).forward is not torch.nn.Sequential.forward:
        raise TypeError(
            f"split_sequential divides a torch.nn.Sequential with its own forward, not {type(model).__name__}: make"
            " Stages of the modules that are its stages"
        )
    own = [*own_parameters(model), *own_buffers(model)]
    if own:
        raise ValueError(f"{own[0]!r} is the model's own, and no child's: register it with the child that uses it")
    return list(own_modules(model).items())  # type: ignore[arg-type]


def _check_num_stages(num_stages: int, num_children: int) -> int:
    num_stages = check_integer(num_stages, "num_stages")
    if not 1 <= num_stages <= num_children:
        raise ValueError(
            f"a Sequential of {counted(num_children, 'child')} has from 1 to {counted(num_children, 'stage')},"
            f" and not {num_stages}: ask"
            " for fewer, or divide the model into more children"
        )
    return num_stages


def _check_counts(balance: Sequence[int], num_stages: int, num_children: int) -> tuple[int, ...]:
    if not isinstance(balance, Sequence) or isinstance(balance, (str, bytes)):
        raise TypeError(
            f"balance must be Balance.PARAMETERS, Balance.TIMES or for each stage how many children it gets, not"
            f" {balance!r}"
        )
    counts = tuple(check_integer(count, "a number of children") for count in balance)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_children:
        raise ValueError(
            f"{list(counts)} does not divide {counted(num_children, 'child')} into"
            f" {counted(num_stages, 'stage')}: pass a positive number"
            f" for each stage; together they must be {num_children}"
        )
    return counts


def _check_costs(costs: Sequence[float], num_children: int) -> ChildCosts:
    if not isinstance(costs, Sequence) or not all(isinstance(cost, Real) for cost in costs):
        raise TypeError(f"costs must be a list of numbers, one for each child, not {costs!r}")
    found = [float(cost) for cost in costs]
    wrong = next((cost for cost in found if not 0 <= cost < math.inf), None)  # NaN is not either
    if wrong is not None:
        raise ValueError(f"a child costs {wrong}: pass costs that are finite and not negative")
    if len(found) != num_children:
        raise ValueError(f"{counted(len(found), 'cost')} for {counted(num_children, 'child')}: pass one for each")
    return list(found)
