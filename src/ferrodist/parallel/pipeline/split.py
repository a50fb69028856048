"""Division of a torch.nn.Sequential into stages of about the same cost, and the `Stages` of a model."""

from __future__ import annotations

import enum
import math
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ferrodist.arguments import check_int, check_type
from ferrodist.collectives.arguments import group_and_timeout
from ferrodist.collectives.objects import broadcast_object
from ferrodist.deadline import Deadline
from ferrodist.parallel.module_init import verify_across_ranks
from ferrodist.parallel.pipeline.measure import measure_times
from ferrodist.parallel.pipeline.state_dict import ModulePart, unwrap
from ferrodist.torch_private.modules import own_buffers, own_modules, own_parameters
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

    Shared: TypeAlias = tuple[tuple[int, str], ...]
    Children: TypeAlias = Sequence[tuple[str, torch.nn.Module]]
    ChildCosts: TypeAlias = Sequence[float | None]


class Stages(list["torch.nn.Module | None"]):
    """All stages of a model, in order; a list of fixed length.

    A rank that needs only some of them may replace the others by None, which frees their memory; `describe` still knows
    their contents.

    Args:
        stages: The modules; None for a stage that is elsewhere.
        prefixes: For each stage the prefix of its parameters' names in the whole model, such as ``"blocks.0."``, or
            nothing. None takes the names of ``torch.nn.Sequential(*stages)``: ``"0."``, ``"1."``, ...
        costs: Cost of each stage, in any unit; None where unknown. By default its number of parameters.
        costs_name: Name of the costs, such as "measured times".
        shared: Parameters that several stages share, as `Pipeline` takes them; None leaves it to the pipeline.

    Raises:
        TypeError: A stage is not a module.
        ValueError: There are no stages, or another number of prefixes or costs; a prefix is not a module's; or
            parameters or buffers of two stages have one name in the whole model, or they have parts of one module.
    """

    def __init__(
        self,
        stages: Iterable[torch.nn.Module | None],
        prefixes: Sequence[str] | None = None,
        *,
        costs: Sequence[float | None] | None = None,
        costs_name: str = "parameters",
        shared: Sequence[Shared] | None = None,
    ) -> None:
        super().__init__(stages)
        for index, stage in enumerate(self):
            check_type(stage, (torch.nn.Module, NoneType), f"stage {index} must be a torch.nn.Module, or None")
        self.prefixes = tuple(prefixes) if prefixes is not None else tuple(f"{each}." for each in range(len(self)))
        """For each stage the prefix of its parameters' names in the whole model."""
        self._contents = [
            ("elsewhere", None) if stage is None else (_describe_stage(stage), count_parameters(stage))
            for stage in self
        ]
        self.costs = tuple(costs) if costs is not None else tuple(size for _, size in self._contents)
        """Cost of each stage; None where unknown."""
        if not self or not len(self) == len(self.prefixes) == len(self.costs):
            raise ValueError(
                f"{counted(len(self), 'stage')}, {counted(len(self.prefixes), 'prefix')} and"
                f" {counted(len(self.costs), 'cost')}: pass at least one stage, and a prefix and a cost for each"
            )
        self._costs_name = costs_name
        self.shared = shared
        """Parameters that several stages share, if they are known: what `find_shared` returns."""
        _check_prefixes(self, self.prefixes)
        _check_modules(self, self.prefixes)

    @property
    def imbalance(self) -> float:
        """The largest stage's cost, divided by the mean of all known costs: 1 is even.

        A pipeline is as slow as its slowest stage, so the others idle for all above 1.
        """
        known = [cost for cost in self.costs if cost is not None]
        return max(known) * len(known) / sum(known) if any(known) else 1.0

    def describe(self) -> str:
        """A table of the stages with modules, parameters, and share of the costs; then the imbalance."""
        total = sum(cost for cost in self.costs if cost is not None)
        rows = [("stage", "modules", "parameters", f"share of {self._costs_name}")]
        for index, ((modules, num_parameters), cost) in enumerate(zip(self._contents, self.costs, strict=True)):
            size = "unknown" if num_parameters is None else f"{num_parameters:,}"
            share = "unknown" if cost is None else f"{cost / total if total else 1 / len(self):.1%}"
            rows.append((str(index), modules, size, share))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "".join(f"{line}\n" for line in [*lines, f"The largest stage has {self.imbalance:.2f} times the mean."])


def find_shared(stages: Sequence[torch.nn.Module | None]) -> list[Shared]:
    """Find the parameters that several stages share, such as tied embeddings, whose gradients are added up.

    Call it while all stages are in one process: copies made since are not recognised.

    Args:
        stages: All stages of a model; None is skipped.

    Returns:
        For each such parameter its (stage, name in that stage) pairs, one for each stage, with the first of several
        names. Both are in the order of stages and of their ``named_parameters``.
    """
    locations: dict[torch.nn.Parameter, list[tuple[int, str]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters() if stage is not None else ():
            locations.setdefault(parameter, []).append((index, name))
    return [tuple(found) for found in locations.values() if len(found) > 1]


def count_parameters(module: torch.nn.Module) -> int | None:
    """Number of elements of a module's parameters, each once; None if some have no shape yet."""
    parameters = list(module.parameters())
    is_known = not any(map(torch.nn.parameter.is_lazy, parameters))
    return sum(each.numel() for each in parameters) if is_known else None


def _describe_stage(stage: torch.nn.Module) -> str:
    if isinstance(stage, ModulePart):
        return stage.contents
    if not isinstance(stage, torch.nn.Sequential) or not len(stage):
        return type(stage).__name__
    names = list(own_modules(stage))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _check_prefixes(stages: Sequence[torch.nn.Module | None], prefixes: Sequence[str]) -> None:
    found: dict[str, int] = {}
    for index, (stage, prefix) in enumerate(zip(stages, prefixes, strict=True)):
        if prefix and not prefix.endswith("."):
            raise ValueError(
                f"the prefix of stage {index} is {prefix!r}: end it with a dot, so that a parameter of it is"
                f" {prefix + '.weight'!r} in the whole model"
            )
        if stage is None:
            continue
        module, path = unwrap(stage), prefix.removesuffix(".")
        parameters = module.named_parameters(prefix=path, remove_duplicate=False)
        replicated = module.replicated_names if isinstance(module, ModulePart) else frozenset()
        for name, _ in (*parameters, *module.named_buffers(prefix=path, remove_duplicate=False)):
            if name in replicated:
                continue
            if found.setdefault(name, index) != index:
                raise ValueError(
                    f"stages {found[name]} and {index} both have {name!r} in the whole model: give them prefixes that"
                    " differ"
                )


def _check_modules(stages: Sequence[torch.nn.Module | None], prefixes: Sequence[str]) -> None:
    """Raise for a module of the whole model with parts in several stages, where it would be several modules."""
    owners: dict[str, int] = {}
    module_prefixes: list[list[str]] = []
    for index, (stage, prefix) in enumerate(zip(stages, prefixes, strict=True)):
        module = None if stage is None else unwrap(stage)
        if module is None or isinstance(module, ModulePart):  # of several such stages `StateDictMapper` joins the parts
            module_prefixes.append([])
            continue
        found = [
            f"{prefix}{name}."
            for name, child in module.named_children()
            if any(True for _ in (*child.parameters(), *child.buffers()))
        ]
        owners.update(dict.fromkeys(found, index))
        module_prefixes.append([prefix, *found])
    for index, own in enumerate(module_prefixes):
        for child, owner in owners.items():
            if owner != index and any(each.startswith(child) for each in own):
                raise ValueError(
                    f"stages {min(owner, index)} and {max(owner, index)} both have parts of {child[:-1]!r} in the"
                    " whole model: give them other prefixes, or divide the model between modules"
                )


def partition(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Divide finite costs from 0 into non-empty parts, whose numbers are returned; the largest costs least.

    Exact, in integers: first the least limit that ``num_parts`` parts can keep, by bisection, then the best parts
    within that limit, by dynamic programming from the end, in O(n log(total)) and O(num_parts n w) steps for n costs,
    of which at most w are in a part. Of several divisions it takes the most even one, which has the least sum of
    squares. Of several of these each part, from the first on, costs as little as possible, since the first stages of a
    pipeline hold the most microbatches, and is then as long as possible, so that an element of no cost joins the part
    before. If all costs are 0, they are taken as equal.
    """
    ratios = [cost.as_integer_ratio() for cost in (costs if any(costs) else [1] * len(costs))]
    unit = math.lcm(*(denominator for _, denominator in ratios))  # every float is an integer over a power of two
    whole = [numerator * (unit // denominator) for numerator, denominator in ratios]
    sums = [0, *accumulate(whole)]
    limit = _least_limit(sums, max(whole), num_parts)
    least = _least_squares(sums, limit, num_parts)
    cuts = [0]
    for after in reversed(range(num_parts)):  # parts that follow the one whose end is chosen
        start = cuts[-1]
        ends = [
            end
            for end in _ends(sums, start, limit)
            if end in least[after] and (sums[end] - sums[start]) ** 2 + least[after][end] == least[after + 1][start]
        ]
        cuts.append(min(ends, key=lambda end: (sums[end], -end)))
    return tuple(end - start for start, end in pairwise(cuts))


def _least_limit(sums: Sequence[int], largest: int, num_parts: int) -> int:
    """The least possible cost of the largest part. Fewer parts within it do as well: cutting them makes none larger."""
    low, high = max(largest, -(-sums[-1] // num_parts)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _count_parts(sums, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _count_parts(sums: Sequence[int], limit: int) -> int:
    """The least number of parts within a limit: each takes as much as it can."""
    start = count = 0
    while start < len(sums) - 1:
        start = bisect_right(sums, sums[start] + limit) - 1
        count += 1
    return count


def _least_squares(sums: Sequence[int], limit: int, num_parts: int) -> list[dict[int, int]]:
    """For each number of parts the starts from which so many reach the end, with their least sum of squares."""
    last = len(sums) - 1
    least = [{last: 0}]
    for parts in range(1, num_parts + 1):
        after = least[-1]
        found: dict[int, int] = {}
        for start in range(num_parts - parts, last - parts + 1):
            squares = [(sums[end] - sums[start]) ** 2 + after[end] for end in _ends(sums, start, limit) if end in after]
            if squares:
                found[start] = min(squares)
        least.append(found)
    return least


def _ends(sums: Sequence[int], start: int, limit: int) -> range:
    """The possible ends of a part that begins at ``start``."""
    return range(start + 1, bisect_right(sums, sums[start] + limit))


class Balance(enum.Enum):
    """The quantity that is balanced between the stages of a model."""

    PARAMETERS = "parameters"
    """Elements of their parameters, also of frozen ones. Shared parameters count for each child that has them."""
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
    """Divide a Sequential into stages, each a Sequential of successive children, which keep their names.

    So the keys of the stages' states are those of the model's. The children are the model's, not copies; the model
    itself stays unchanged, and so do hooks that were registered with the model rather than with its children.

    The most costly stage costs as little as possible: see `partition`, also for ties. Parameters are counted on the
    meta device, too. Times are measured in the model's mode, training or not, on copies of the children, one at a time:
    the model, the sample and the random generators stay bit for bit the same. Side effects of forwards outside the
    model, such as a hook's counter, remain.

    Measured times differ from rank to rank, and with them the division. So pass ``group``, and call this on all of its
    ranks: rank 0 measures, while the others wait, and all take its costs. Only rank 0 needs a sample.

    Args:
        model: The model.
        num_stages: Number of stages, at most the model's number of children.
        balance: The balanced quantity, or the number of children of each stage.
        costs: Cost of each child, in any unit, from 0, instead of its number of parameters.
        sample: For `Balance.TIMES`: an input of the model, as large as a microbatch.
        group: The ranks that divide the model together; None means this rank alone.
        timeout: Seconds for the whole call, measurement included; None uses the group's.
        clock: Function that returns the time in seconds.

    Raises:
        TypeError: The model is not a Sequential, or has a forward of its own; or an argument has another type.
        ValueError: There are fewer children than stages, or an argument doesn't fit the model; the model has parameters
            of its own; children have parameters without a shape yet; there is no sample; or a child fails on it.
        CollectiveMismatchError: On every rank, when the ranks divide different models, or differently. The group stays
            usable.
        UnsupportedOpError: On the other ranks, when rank 0 raises while it finds the costs. The group stays usable.
    """
    children = _children_of(model)
    num_stages = check_int("num_stages", num_stages)
    if not 1 <= num_stages <= len(children):
        raise ValueError(
            f"a Sequential of {counted(len(children), 'child')} makes from 1 to {counted(len(children), 'stage')}, not"
            f" {num_stages}: pass fewer, or divide the model into more children"
        )
    counts = None if isinstance(balance, Balance) else check_counts(balance, num_stages, len(children))
    given = None if costs is None else check_costs(costs, len(children))
    is_measured = balance is Balance.TIMES
    if is_measured and given is not None:
        raise ValueError("Balance.TIMES measures the costs: pass it or costs=, not both")
    if sample is not None and not is_measured:
        raise ValueError("sample= is for measurement: pass Balance.TIMES with it")

    def find_costs() -> ChildCosts:
        if given is not None:
            return given
        if not is_measured:
            return _count(children, is_needed=counts is None)
        if sample is None:
            raise ValueError("Balance.TIMES needs sample=, the model's input for a microbatch")
        return measure_times(children, sample, clock=clock)

    costs_name = "costs" if given is not None else (Balance.TIMES if is_measured else Balance.PARAMETERS).value
    if group is None:
        found = find_costs()
    else:
        division = f"{counted(num_stages, 'stage')}" if counts is None else f"stages of {counts} children"
        lines = [
            f"{division} by {costs_name}",
            *(f"child {name!r}, {with_article(type(child).__name__)}" for name, child in children),
        ]
        found = find_together(
            lambda: find_costs() if group.rank == 0 else [],
            lambda: lines,
            group,
            timeout,
            maker="split_sequential",
            module="Sequential",
        )
    if counts is None:
        counts = partition([cost for cost in found if cost is not None], num_stages)
    return _make_stages(model, children, counts, found, costs_name)


def find_together(
    find_costs: Callable[[], ChildCosts],
    describe: Callable[[], Sequence[str]],
    group: Backend,
    timeout: float | None,
    *,
    maker: str,
    module: str,
) -> ChildCosts:
    """The costs of rank 0, on all ranks, which divide the same model in the same way or raise.

    Any error of ``find_costs`` on a rank is raised there, and is an UnsupportedOpError on the others. ``describe``
    gives the lines that ranks compare, after it; ``maker`` and ``module`` are for messages.
    """
    group, limit = group_and_timeout(group, timeout)
    deadline = Deadline(limit)
    failure: Exception | None = None
    found: ChildCosts = []
    try:
        found = find_costs()
    except Exception as error:  # noqa: BLE001 - raised below, together with the others
        failure = error
    verify_across_ranks(describe(), group, deadline, maker=maker, module=module, failure=failure)
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
            f"child {name!r} ({with_article(type(child).__name__)}) is lazy, and its parameters have no shape yet:"
            " call the model once before, or pass costs=, or the number of children of each stage"
        )
    return counts


def _children_of(model: torch.nn.Sequential) -> Children:
    if not isinstance(model, torch.nn.Sequential) or type(model).forward is not torch.nn.Sequential.forward:
        raise TypeError(
            f"split_sequential divides a torch.nn.Sequential with its own forward, not {type(model).__name__}: make"
            " Stages of the modules that are its stages"
        )
    own = [*own_parameters(model), *own_buffers(model)]
    if own:
        raise ValueError(f"{own[0]!r} is the model's own, not a child's: register it with the child that uses it")
    return list(own_modules(model).items())  # type: ignore[arg-type]


def check_counts(balance: Sequence[int], num_stages: int, num_children: int, noun: str = "child") -> tuple[int, ...]:
    """Return the number of children (``noun``) of each stage; TypeError or ValueError if they don't divide them."""
    if not isinstance(balance, Sequence) or isinstance(balance, (str, bytes)):
        raise TypeError(
            f"balance must be Balance.PARAMETERS, Balance.TIMES or the number of {counted(2, noun)[2:]} of each stage,"
            f" not {balance!r}"
        )
    counts = tuple(check_int(f"a number of {counted(2, noun)[2:]}", count) for count in balance)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_children:
        raise ValueError(
            f"{list(counts)} does not divide {counted(num_children, noun)} into {counted(num_stages, 'stage')}:"
            f" pass a positive number for each stage; their sum must be {num_children}"
        )
    return counts


def check_costs(costs: Sequence[float], num_children: int, noun: str = "child") -> ChildCosts:
    """Return the cost of each child (``noun``); TypeError or ValueError if they are not finite numbers from 0."""
    if not isinstance(costs, Sequence) or not all(isinstance(cost, Real) for cost in costs):
        raise TypeError(f"costs must be a list of numbers, one for each {noun}, not {costs!r}")
    found = [float(cost) for cost in costs]
    wrong = next((cost for cost in found if not 0 <= cost < math.inf), None)  # NaN is not either
    if wrong is not None:
        raise ValueError(f"a {noun} costs {wrong}: pass costs that are finite and not negative")
    if len(found) != num_children:
        raise ValueError(f"{counted(len(found), 'cost')} for {counted(num_children, noun)}: pass one for each")
    return list(found)
