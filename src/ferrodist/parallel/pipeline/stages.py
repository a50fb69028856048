"""The stages of a model, what each of them holds, and the parameters that several of them have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ferrodist.parallel.pipeline.whole_model import unwrap
from ferrodist.torch_private.modules import own_modules
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Shared: TypeAlias = tuple[tuple[int, str], ...]

__all__ = ["Shared", "Stages", "count_parameters", "find_shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What a stage had when it was made: its modules, in words, and its parameters' elements, where they are known."""

    modules: str
    num_parameters: int | None


class Stages(list["torch.nn.Module | None"]):
    """All stages of a model, in order; it keeps its length.

    A rank that needs only some of them may replace the others by None, which frees their memory; `describe` still
    knows what they were.

    Args:
        stages: The modules; None for a stage that is elsewhere.
        prefixes: For each stage what the names of its parameters begin with in the whole model, as ``"blocks.0."``, or
            nothing. None takes the names of ``torch.nn.Sequential(*stages)``: ``"0."``, ``"1."``, ...
        costs: What each stage costs, in any unit; None where it isn't known. Without, its number of parameters.
        costs_name: What the costs are, as "measured times".

    Raises:
        TypeError: A stage is no module.
        ValueError: There are none, or not as many prefixes or costs as stages; a prefix is no module's; or parameters
            or buffers of two stages have one name in the whole model, or they have parts of one module.
    """

    def __init__(
        self,
        stages: Iterable[torch.nn.Module | None],
        prefixes: Sequence[str] | None = None,
        *,
        costs: Sequence[float | None] | None = None,
        costs_name: str = "parameters",
    ) -> None:
        super().__init__(stages)
        for number, stage in enumerate(self):
            if stage is not None and not isinstance(stage, torch.nn.Module):
                raise TypeError(f"stage {number} must be a torch.nn.Module, or None, not {type(stage).__name__}")
        self.prefixes = tuple(prefixes) if prefixes is not None else tuple(f"{each}." for each in range(len(self)))
        """For each stage what the names of its parameters begin with in the whole model."""
        self._contents = tuple(_describe(stage) for stage in self)
        self.costs = tuple(costs) if costs is not None else tuple(each.num_parameters for each in self._contents)
        """What each stage costs; None where it isn't known."""
        if not self or not len(self) == len(self.prefixes) == len(self.costs):
            raise ValueError(
                f"{counted(len(self), 'stage')}, {counted(len(self.prefixes), 'prefix')} and"
                f" {counted(len(self.costs), 'cost')}: pass at least one stage, and a prefix and a cost for each"
            )
        self._costs_name = costs_name
        _check_prefixes(self, self.prefixes)
        _check_modules(self, self.prefixes)

    @property
    def imbalance(self) -> float:
        """What the largest stage costs, over the mean of all whose costs are known: 1 is even.

        A pipeline is as slow as its slowest stage, so the others wait for all above 1.
        """
        known = [cost for cost in self.costs if cost is not None]
        return max(known) * len(known) / sum(known) if any(known) else 1.0

    def describe(self) -> str:
        """A table of the stages, a line each: modules, parameters, and its share of the costs; then the imbalance."""
        total = sum(cost for cost in self.costs if cost is not None)
        rows = [("stage", "modules", "parameters", f"share of {self._costs_name}")]
        for number, (contents, cost) in enumerate(zip(self._contents, self.costs, strict=True)):
            size = "unknown" if contents.num_parameters is None else f"{contents.num_parameters:,}"
            share = "unknown" if cost is None else f"{cost / total if total else 1 / len(self):.1%}"
            rows.append((str(number), contents.modules, size, share))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "".join(f"{line}\n" for line in [*lines, f"The largest stage has {self.imbalance:.2f} times the mean."])


def find_shared(stages: Sequence[torch.nn.Module | None]) -> list[Shared]:
    """Find the parameters that several stages have, as tied embeddings are, whose gradients belong together.

    Call it while all stages are in one process: copies that were made since are not seen to be the same.

    Args:
        stages: All stages of a model; None is passed over.

    Returns:
        For each such parameter its places: (stage, name in that stage), one a stage, where it has several names there
        the first. Both are in the order of stages and of their ``named_parameters``.
    """
    places: dict[torch.nn.Parameter, list[tuple[int, str]]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters() if stage is not None else ():
            places.setdefault(parameter, []).append((number, name))
    return [tuple(found) for found in places.values() if len(found) > 1]


def count_parameters(module: torch.nn.Module) -> int | None:
    """The elements of a module's parameters, each once; None when some of them have no shape yet."""
    parameters = list(module.parameters())
    if any(torch.nn.parameter.is_lazy(each) for each in parameters):
        return None
    return sum(each.numel() for each in parameters)


def _describe(stage: torch.nn.Module | None) -> _Contents:
    if stage is None:
        return _Contents(modules="elsewhere", num_parameters=None)
    modules = type(stage).__name__
    if isinstance(stage, torch.nn.Sequential) and len(stage):
        names = list(own_modules(stage))
        modules = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
    return _Contents(modules=modules, num_parameters=count_parameters(stage))


def _check_prefixes(stages: Sequence[torch.nn.Module | None], prefixes: Sequence[str]) -> None:
    found: dict[str, int] = {}
    for number, (stage, prefix) in enumerate(zip(stages, prefixes, strict=True)):
        if prefix and not prefix.endswith("."):
            raise ValueError(
                f"the prefix of stage {number} is {prefix!r}: end it with a dot, so that a parameter of it is"
                f" {prefix + '.weight'!r} in the whole model"
            )
        if stage is None:
            continue
        module, place = unwrap(stage), prefix.removesuffix(".")
        for name in (
            *(name for name, _ in module.named_parameters(prefix=place, remove_duplicate=False)),
            *(name for name, _ in module.named_buffers(prefix=place, remove_duplicate=False)),
        ):
            if found.setdefault(name, number) != number:
                raise ValueError(
                    f"stages {found[name]} and {number} both have {name!r} in the whole model: give them prefixes that"
                    " differ"
                )


def _check_modules(stages: Sequence[torch.nn.Module | None], prefixes: Sequence[str]) -> None:
    """No module of the whole model has parts in several stages, for then it would be several modules."""
    owners: dict[str, int] = {}
    places: list[list[str]] = []
    for number, (stage, prefix) in enumerate(zip(stages, prefixes, strict=True)):
        children = unwrap(stage).named_children() if stage is not None else ()
        found = [f"{prefix}{name}." for name, child in children if _holds_tensors(child)]
        owners.update(dict.fromkeys(found, number))
        places.append([prefix, *found])
    for number, own in enumerate(places):
        for place, owner in owners.items():
            if owner != number and any(each.startswith(place) for each in own):
                raise ValueError(
                    f"stages {min(owner, number)} and {max(owner, number)} both have parts of {place[:-1]!r} in the"
                    " whole model: give them other prefixes, or divide the model between modules"
                )


def _holds_tensors(module: torch.nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
