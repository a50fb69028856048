"""Division of a model that is not Sequential into stages: transformers' decoders, encoders, and both in one model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.arguments import check_int, check_type
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.parameter_claims import describe_claim
from ferrodist.parallel.pipeline.model_division import ModelDivision
from ferrodist.parallel.pipeline.model_flow import Trace, find_flow
from ferrodist.parallel.pipeline.model_mappings import check_inputs
from ferrodist.parallel.pipeline.model_skeleton import Skeleton
from ferrodist.parallel.pipeline.model_stage import ModelStage
from ferrodist.parallel.pipeline.model_units import ModelUnits, find_units
from ferrodist.parallel.pipeline.split import (
    Balance,
    Stages,
    check_costs,
    check_counts,
    find_shared,
    find_together,
    partition,
)
from ferrodist.tensor.dtensor import DTensor
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend


def split_model(
    model: torch.nn.Module,
    num_stages: int,
    mesh_or_group: DeviceMesh | Backend | None = None,
    balance: Balance | Sequence[int] = Balance.PARAMETERS,
    *,
    costs: Sequence[float] | None = None,
    sample: Any = None,
    output: str | Callable[[Any], Any] | None = None,
    blocks: Sequence[str] | None = None,
    timeout: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Stages:
    """Divide a model with lists of blocks into stages, each a `ModelStage`, whose parameters keep the model's names.

    Each stage runs the model's own code (a copy of it without parameters), up to its last call of a module of its own.
    Where the code calls a module of an earlier stage, it gets the result that this stage sent. Which results these are
    is found with ``sample``, before, and again for inputs of other shapes: a run without parameters follows each value
    through the code between the modules. So decoders send their hidden states alone, and make masks and positions on
    each stage anew, while stages of a decoder with an encoder also pass the encoder's result on. The model's inputs
    travel with them, as far as later stages read them.

    The model is divided between its parts: blocks, and what comes before, between and after lists of blocks
    (embeddings; norms and heads). Parameters stay the model's objects, not copies. The model may be on the meta device:
    `ModelStage.materialise` makes the tensors of one stage real.

    What is asked of a model:

    - Modules exchange values as arguments and results, nested as torch's pytrees, or write them to dicts that they get,
      not by attributes and caches, nor by objects that several modules have. Tensors that are arguments are not
      written in place.
    - The code outside of blocks doesn't read parameters of modules in them. One that it reads of another module that it
      calls, or could call, such as a table of an embedding, is in all stages that do, as a shared parameter.
    - Which modules are called, and in which order, depends on the shapes of inputs alone (no ``layerdrop``).
    - Parameters and buffers of the containers themselves, such as a table of positions, are in all stages that use
      them; as other shared parameters their gradients are added up. Buffers are constants, and attributes keep no
      results from call to call.
    - The code between the modules does the same for all values of inputs. Where a value decides, a stage may need what
      it didn't get: results of a branch that the run didn't take are NaN then, not plausible numbers. A comparison with
      NaN is False, so keep such decisions in modules.

    Forward hooks of containers run in each stage that comes to them, those of blocks in their own. Configurations of
    Hugging Face are copied with ``use_cache=False``. Stages don't follow later changes of the model: convert its dtype,
    and change its attributes and configuration, before.

    A model that averages its loss over labels that aren't padding (-100) does so in each microbatch, and the average of
    these is another loss if they have different numbers of labels. For Hugging Face's loss pass their number in the
    whole batch to each step, as a tensor "num_items_in_batch", to a pipeline with `LossReduction.SUM`.

    Args:
        model: The model.
        num_stages: Number of stages, at most the number of parts.
        mesh_or_group: The ranks that divide the model together, or a mesh of one axis; None means this rank alone.
            With it this is a collective: ranks compare their divisions.
        balance: The balanced quantity, or the number of parts of each stage. Times are measured by rank 0, on copies of
            the modules.
        costs: Cost of each part, in any unit, from 0, instead of its number of parameters.
        sample: An input of the model: a tensor, a tuple of arguments, or a mapping of keyword arguments. Any batch
            size; as large as a microbatch for `Balance.TIMES`. By default the model's ``dummy_inputs``, which models of
            Hugging Face have.
        output: The part of the model's result that the last stage returns: the name of an item, such as "logits", or
            a function of the result. By default the item "loss", if there is one, or the whole result.
        blocks: Names of the lists whose children are the blocks. By default the outermost ModuleLists and Sequentials
            of several modules of one class are found.
        timeout: Seconds for the whole call; None uses the group's.
        clock: Function that returns the time in seconds.

    Returns:
        The stages. A stage is called as the model is, but that a mapping is its keyword arguments, so that
        ``pipeline.step({"input_ids": ..., "labels": ...})`` is a step.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are fewer parts than stages, or no lists of blocks; an argument doesn't fit the model; or the
            model's code can't be divided, with the module and the reason.
        CollectiveMismatchError: On every rank, when the ranks divide different models, or differently. The group stays
            usable.
        UnsupportedOpError: On the other ranks, when one rank raises. The group stays usable.
    """
    group = _group_of(mesh_or_group)
    found: dict[str, Any] = {}

    def find_costs() -> Sequence[float | None]:
        _check_arguments(model, num_stages, balance, costs)
        select = _selector(output)
        units = find_units(model, blocks)
        args, kwargs = _sample_of(model, sample)
        check_inputs(args, kwargs)
        division = ModelDivision(model, units, select)
        trace = division.trace_and_share(args, kwargs)
        parts = _find_parts(units, trace)
        if num_stages > len(parts):
            raise ValueError(
                f"{with_article(type(model).__name__)} of {counted(len(parts), 'part')} makes from 1 to {len(parts)}"
                f" stages, not {num_stages}: pass fewer"
            )
        found.update(units=units, division=division, trace=trace, parts=parts)
        if not isinstance(balance, Balance):
            found["counts"] = check_counts(balance, num_stages, len(parts), "part")
        if costs is not None:
            return check_costs(costs, len(parts), "part")
        if balance is Balance.TIMES and (group is None or group.rank == 0):
            times = division.measure(args, kwargs, clock=clock)
            return [math.fsum(times.get(path, 0) for path in part) for part in parts]
        return [_count(units, part) for part in parts]

    def describe() -> list[str]:
        division = list(found["counts"]) if "counts" in found else balance
        if not found:  # this rank's error is what ranks learn
            return []
        return [
            f"{counted(num_stages, 'stage')} of {with_article(type(model).__name__)} by {division}",
            *(f"the part {', '.join(part)}" for part in found.get("parts", ())),
        ]

    if group is None:
        part_costs = find_costs()
    else:
        part_costs = find_together(find_costs, describe, group, timeout, maker="split_model", module="model")
    counts = found.get("counts")
    if counts is None:
        counts = partition([cost or 0 for cost in part_costs], num_stages)
    stages = _make_stages(model, found["division"], found["trace"], found["parts"], counts)
    ends = [sum(counts[: index + 1]) for index in range(num_stages)]
    stage_costs = [
        math.fsum(cost or 0 for cost in part_costs[end - count : end]) for end, count in zip(ends, counts, strict=True)
    ]
    name = "costs" if costs is not None else (balance if isinstance(balance, Balance) else Balance.PARAMETERS).value
    return Stages(stages, [""] * num_stages, costs=stage_costs, costs_name=name, shared=find_shared(stages))


def _check_arguments(model: torch.nn.Module, num_stages: int, balance: object, costs: object) -> None:
    """Raise unless a model is a module that no wrapper has changed, and the other arguments fit."""
    check_type(model, torch.nn.Module, "model must be a torch.nn.Module")
    check_int("num_stages", num_stages, min=1)
    if costs is not None and balance is Balance.TIMES:
        raise ValueError("Balance.TIMES measures the costs: pass it or costs=, not both")
    sharded = [f"parameter {name!r}" for name, one in model.named_parameters() if isinstance(one, DTensor)]
    reason = describe_claim(model.named_parameters()) or (f"{sharded[0]} is distributed" if sharded else None)
    if reason is not None:
        raise ValueError(f"{reason}: split the model before; its stages may be wrapped in DDP or FSDP")


def _group_of(mesh_or_group: Any) -> Backend | None:
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ValueError(
                f"split_model can't take a mesh of {counted(mesh_or_group.ndim, 'axis')} {mesh_or_group.axis_names}:"
                " pass a slice of one axis, such as mesh['pipeline']"
            )
        return mesh_or_group.group
    return mesh_or_group  # type: ignore[no-any-return]


def _selector(output: Any) -> Callable[[Any], Any]:
    """The function that selects what the last stage returns."""
    if callable(output):
        return output  # type: ignore[no-any-return]
    if output is not None and not isinstance(output, str):
        raise TypeError(f"output must be the name of an item of the model's result, a function or None, not {output!r}")

    def select(result: Any) -> Any:
        if output is not None:
            try:
                value = result[output] if isinstance(result, Mapping) else getattr(result, output)
            except (KeyError, AttributeError):
                raise ValueError(f"the model's result has no item {output!r}, which output= names") from None
            if value is None:
                raise ValueError(f"{output!r} of the model's result is None, and output= names it")
            return value
        if isinstance(result, Mapping):
            return result["loss"] if result.get("loss") is not None else dict(result)
        return result

    return select


def _sample_of(model: torch.nn.Module, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if sample is None:
        sample = getattr(model, "dummy_inputs", None)
    if sample is None:
        raise ValueError("sample= is needed, an input of the model with which split_model finds what stages exchange")
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def _find_parts(units: ModelUnits, trace: Trace) -> list[list[str]]:
    """The parts between which a model can be divided, in the order of their first calls."""
    called = list(dict.fromkeys(call.path for call in trace.calls if call.path in units.stateful))
    order = _with_uncalled(units, called)
    parts: list[list[str]] = []
    for index, path in enumerate(order):
        if path in units.blocks or not parts or parts[-1][0] in units.blocks:
            parts.append([path])
            continue
        after = next((each for each in order[index:] if each in units.blocks), None)
        before = next((each for each in reversed(order[:index]) if each in units.blocks), None)
        belongs_to_next = (
            after is not None and before is not None and _common_depth(path, after) > _common_depth(path, before)
        )
        was_next = (
            after is not None
            and before is not None
            and _common_depth(parts[-1][0], after) > _common_depth(parts[-1][0], before)
        )
        if belongs_to_next and not was_next:
            parts.append([path])
        else:
            parts[-1].append(path)
    return parts


def _with_uncalled(units: ModelUnits, called: Sequence[str]) -> list[str]:
    """The called units in order; any other one comes behind a name of the same module, its list, or all."""
    order = list(called)
    known = {id(units.units[path]): path for path in reversed(order)}
    for path in units.units:
        if path in units.stateful and path not in order:
            twin = known.get(id(units.units[path]))
            siblings = [each for each in order if each.rpartition(".")[0] == path.rpartition(".")[0]]
            anchor = twin or (siblings[-1] if path in units.blocks and siblings else None)
            order.insert(len(order) if anchor is None else order.index(anchor) + 1, path)
    return order


def _common_depth(one: str, other: str) -> int:
    depth = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        depth += 1
    return depth


def _count(units: ModelUnits, part: Sequence[str]) -> int:
    parameters = {id(each): each for path in part for each in units.units[path].parameters()}
    return sum(each.numel() for each in parameters.values())


def _make_stages(
    model: torch.nn.Module, division: ModelDivision, trace: Trace, parts: Sequence[Sequence[str]], counts: Sequence[int]
) -> list[ModelStage]:
    units, start = division.units, 0
    division.num_stages = len(counts)
    for index, count in enumerate(counts):
        division.owners.update({path: index for part in parts[start : start + count] for path in part})
        start += count
    uses = find_flow(trace, division.owners, len(counts)).own_uses
    stages = []
    for index in range(len(counts)):
        stage = ModelStage(division, index, Skeleton(model, units))
        own_units = [path for path, owner in division.owners.items() if owner == index]
        more = "" if len(own_units) == 1 else f" to {own_units[-1]} ({len(own_units)})"
        stage.contents = own_units[0] + more
        for path, unit in units.units.items():
            if path not in units.stateful:
                stage.add_unit(path, unit, is_replicated=True)
            elif division.owners[path] == index:
                stage.add_unit(path, unit)
        for name in units.own:
            users = uses.get(name) or (0,)
            if index in users:
                container = model.get_submodule(name.rpartition(".")[0])
                stage.add_own(name, container, is_replicated=len(users) > 1)
        _add_shared(stage, index, division, uses)
        stages.append(stage)
    return stages


def _add_shared(stage: ModelStage, index: int, division: ModelDivision, uses: Mapping[str, Sequence[int]]) -> None:
    """Add to a stage the parameters of other stages' units that its code reads."""
    for name in division.shared:
        path = name.rpartition(".")[0]
        owner, users = division.owners[path], uses.get(name, ())
        if index == owner and set(users) - {owner}:
            stage.replicated_names |= {name}
        elif index in users and index != owner:
            stage.add_own(name, division.units.units[path], is_replicated=True)
