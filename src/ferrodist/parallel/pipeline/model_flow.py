"""The flow of values between the stages of a model: which results and inputs each stage gets from earlier ones.

A trace of the model's code (`model_tracer.py`) says where the arguments of each call come from; from that and from the
units' stages follows what goes from stage to stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ferrodist.parallel.pipeline.model_mappings import Slot

Source: TypeAlias = "tuple[str, Any]"
"""Where a value comes from: ("call", (index of the call, leaf)), ("input", leaf), ("own", name), ("weight", name),
("inside", unit), ("random", operator)."""

NOTHING: frozenset[Source] = frozenset()
WEIGHT_READ = (
    "the model's code reads the parameter or buffer {name!r} outside of its module's call, for {what}, and only one"
    " stage has it: call the module, or pass the input that it is the default of, such as token_type_ids"
)
NOT_RETURNED = (
    "{what} gets a tensor that module {name!r} made, but didn't return; only results go from stage to stage: switch off"
    " what collects it (output_attentions, output_router_logits, use_cache)"
)


_SHAPE = "ferrodist.shape"  # the key of an input that travels as its shape


class DivisionError(ValueError):
    """State that stages would have apart, which a second run with other values might not find any more."""


class LeafShape(NamedTuple):
    """A tensor in the result of a unit."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self, value: float, device: torch.device | str) -> torch.Tensor:
        """A tensor of this shape, of this value if that is possible, and of zeros otherwise.

        It may be written, also where it requires gradients.
        """
        fill = torch.full((), 0 if is_integer(self.dtype) else value, dtype=self.dtype, device=device)
        return fill.requires_grad_(self.requires_grad).expand(self.shape).clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a unit."""

    path: str
    """The unit's name in the model."""
    is_local: bool
    """True if every stage makes it, because it depends on no other unit's result."""
    sources: frozenset[Source]
    """Where its arguments come from."""
    leaves: tuple[Any, ...]
    """The leaves of its result and of what it writes to mappings: a `LeafShape` for each tensor, others as they are."""
    spec: Any
    """The structure of these two."""
    aliases: tuple[int, ...] = ()
    """Which mappings and lists in these two are the same object: see `Outcome`."""
    kept: frozenset[Slot] = frozenset()
    """Which entries of mappings and lists it leaves as they are."""


@dataclass(slots=True)
class Trace:
    """A run of a model's code."""

    calls: list[Call] = field(default_factory=list)
    result: frozenset[Source] = NOTHING
    """Where the model's result comes from."""
    reads: set[Source] = field(default_factory=set)
    """Where values come from that the code reads as numbers, or that decide about shapes: every stage does that."""
    written: set[tuple[int, int]] = field(default_factory=set)
    """The results of units that the code writes in place: (index of the call, leaf)."""
    integers: set[int] = field(default_factory=set)
    """The leaves of the model's inputs that have integers or booleans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The values that go from stage to stage."""

    calls: tuple[Call, ...]
    owners: tuple[int | None, ...]
    """The stage of each call; None for those that every stage makes."""
    last_calls: tuple[int, ...]
    """For each stage the index of its last call, -1 without one."""
    sent: tuple[tuple[tuple[int, int], ...], ...]
    """For each stage but the last the results that the next one gets: (index of the call, leaf)."""
    inputs_sent: tuple[frozenset[int], ...]
    """For each stage but the last the leaves of the model's inputs whose values later stages need."""
    written: frozenset[tuple[int, int]]
    """The results that the code of each stage writes in place, so that their values before that are sent."""
    own_uses: Mapping[str, tuple[int, ...]]
    """For each container tensor that is used the stages that do."""


def find_flow(trace: Trace, owners: Mapping[str, int], num_stages: int) -> Flow:
    """Find what each stage needs from earlier ones.

    Args:
        trace: A run of the model.
        owners: The stage of each unit with state.
        num_stages: Number of stages.

    Raises:
        ValueError: A stage needs what a later one computes, or what doesn't go from stage to stage.
    """
    needs = _Needs(trace.calls, num_stages)
    for call in trace.calls:
        stage: int | None = None
        if not call.is_local:
            before = [needs.stages[content[0]] or 0 for kind, content in call.sources if kind == "call"]
            stage = owners[call.path] if call.path in owners else max(before, default=0)
            needs.add(call.sources, stage, f"module {call.path!r}")
        needs.stages.append(stage)
    needs.add(trace.result, num_stages - 1, "the model's result")
    needs.add_integers(trace.integers)
    last_calls = needs.last_calls()
    for stage, last in enumerate(last_calls):
        read = {
            (kind, content)
            for kind, content in trace.reads
            if kind in {"input", "own", "weight", "inside"} or (kind == "call" and content[0] < last)
        }
        needs.add(read, stage, f"a value that the model's code reads in stage {stage}")
    return _make_flow(trace, needs, last_calls)


class _Needs:
    """The needs of each stage, added use by use."""

    def __init__(self, calls: Sequence[Call], num_stages: int) -> None:
        self._calls = calls
        self.stages: list[int | None] = []
        """The stage of each call so far."""
        self.results: list[set[tuple[int, int]]] = [set() for _ in range(num_stages)]
        self.inputs: list[set[int]] = [set() for _ in range(num_stages)]
        self.own: dict[str, set[int]] = {}
        self._draws: dict[str, set[int]] = {}

    def add(self, sources: Iterable[Source], stage: int, what: str) -> None:
        """Add that something in a stage uses values from these sources; ``what`` names it in errors."""
        for kind, content in sources:
            match kind:
                case "call":
                    self._add_result(content, stage, what)
                case "input":
                    self.inputs[stage].add(content)
                case "own":
                    self.own.setdefault(content, set()).add(stage)
                case "random":
                    users = self._draws.setdefault(content, set())
                    users.add(stage)
                    if len(users) > 1:
                        raise ValueError(
                            f"{what} gets random numbers of {content}, which the model's code draws outside of its"
                            " blocks and which another stage uses, too: each would draw others; make a module of that"
                            " code"
                        )
                case "weight":
                    raise ValueError(WEIGHT_READ.format(name=content, what=what))
                case _:
                    raise ValueError(NOT_RETURNED.format(name=content, what=what))

    def add_integers(self, inputs: Iterable[int]) -> None:
        """Add that all stages need all integers and booleans: they are small, and have no NaN for what isn't sent."""
        for stage in range(1, len(self.results)):
            self.inputs[stage].update(inputs)
            self.results[stage].update(
                (index, leaf)
                for index, (call, before) in enumerate(zip(self._calls, self.stages, strict=True))
                for leaf, shape in enumerate(call.leaves)
                if isinstance(shape, LeafShape) and is_integer(shape.dtype) and before is not None and before < stage
            )

    def last_calls(self) -> list[int]:
        """For each stage the index of its last call, -1 without one."""
        return [
            max((index for index, each in enumerate(self.stages) if each == stage), default=-1)
            for stage in range(len(self.results))
        ]

    def _add_result(self, key: tuple[int, int], stage: int, what: str) -> None:
        before = self.stages[key[0]]
        assert before is not None, "results of local calls come from no call"
        if before > stage:
            raise ValueError(
                f"{what} is in stage {stage}, and gets a result of {self._calls[key[0]].path!r}, which is in the later"
                f" stage {before}: divide the model elsewhere, or into fewer stages"
            )
        if before < stage:
            self.results[stage].add(key)


def _make_flow(trace: Trace, needs: _Needs, last_calls: Sequence[int]) -> Flow:
    sent, inputs_sent = [], []
    for stage in range(len(last_calls) - 1):
        later = set().union(*needs.results[stage + 1 :])
        sent.append(tuple(sorted(key for key in later if (needs.stages[key[0]] or 0) <= stage)))
        inputs_sent.append(frozenset[int]().union(*needs.inputs[stage + 1 :]))
    return Flow(
        calls=tuple(trace.calls),
        owners=tuple(needs.stages),
        last_calls=tuple(last_calls),
        sent=tuple(sent),
        inputs_sent=tuple(inputs_sent),
        written=frozenset(trace.written),
        own_uses={name: tuple(sorted(users)) for name, users in needs.own.items()},
    )


def is_integer(dtype: torch.dtype) -> bool:
    """True for integers and booleans, which have no NaN."""
    return not (dtype.is_floating_point or dtype.is_complex)


def pack_input(leaf: Any) -> Any:
    """An input whose values no later stage needs, as its shape and dtype; other leaves as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return {
        _SHAPE: list(leaf.shape),
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "device": leaf.device.type,
        "requires_grad": leaf.requires_grad,
    }


def unpack_input(value: Any) -> Any:
    """An input with stand-ins for those that `pack_input` packed."""
    if isinstance(value, Mapping):
        if _SHAPE in value:
            shape = LeafShape(tuple(value[_SHAPE]), getattr(torch, value["dtype"]), value["requires_grad"])
            return shape.make(torch.nan, value["device"])
        return {name: unpack_input(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(unpack_input, value))
    return value
