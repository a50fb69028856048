"""Traces the model once on the meta device: which tensors its blocks and other units pass to each other.

The trace is one run of the model's own code, without its parameters. Units with state run on the meta device, and their
results are replaced by zeros. A dispatch mode sees every operator between the units, and carries along from which
results, inputs and container tensors a value comes. So each stage's needs are known exactly, whatever the code between
the units does. `model_units.py` says what a unit is.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ferrodist.parallel.pipeline.model_flow import (
    NOT_RETURNED,
    NOTHING,
    WEIGHT_READ,
    Call,
    LeafShape,
    Trace,
    is_integer,
)
from ferrodist.parallel.pipeline.model_mappings import Mappings, Outcome, Slot, leaves_in, map_tensors
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modes import DispatchMode
from ferrodist.torch_private.modules import own_buffers
from ferrodist.torch_private.operators import schema_of
from ferrodist.torch_private.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.parallel.pipeline.model_flow import Source

_OF_SHAPE_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)  # operators whose results don't depend on the values of their arguments
_READS = frozenset({"numpy", "tolist", "__array__", "__dlpack__"})
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes that all modules have


class _Reads(TorchFunctionMode):
    """Tells a tracer of reads that aren't operators."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._tracer.add_read(args)
        return func(*args, **(kwargs or {}))


class Tracer(DispatchMode):  # type: ignore[misc]
    """Records a `Trace` while it is active; `call` takes the place of each unit's forward.

    Args:
        stateful: Paths of units with state.
        shadows: Copies of the units on the meta device.
        changed: Called with a unit's path and names of attributes, such as "gate.loss", that its forward has set.
    """

    def __init__(
        self,
        stateful: Sequence[str],
        shadows: Mapping[str, torch.nn.Module],
        changed: Callable[[str, set[str]], None],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.reads = _Reads(self)
        self._stateful = stateful
        self._shadows = shadows
        self._changed = changed
        self._sources: dict[int, tuple[Any, frozenset[Source]]] = {}  # by storage, which is kept alive
        self._replaced: dict[int, tuple[Any, str]] = {}  # memory that a unit has written to in a mapping or list
        self._random: dict[int, Any] = {}  # memory of random numbers in whose place mappings have others
        self._inside: str | None = None  # the unit that runs

    def mark(self, tensor: torch.Tensor, *sources: Source) -> None:
        """Set where a tensor comes from."""
        memory = _memory_of(tensor)
        self._sources[id(memory)] = memory, frozenset(sources)

    def add_read(self, value: Any) -> None:
        """Record that the code between units reads the numbers in a nested value."""
        if self._inside is None:
            self.trace.reads |= self.sources_of(value)

    def sources_of(self, value: Any) -> frozenset[Source]:
        """The origins of the tensors in a nested value."""
        found = [self._sources.get(id(_memory_of(tensor)), (None, NOTHING))[1] for tensor in _tensors_in(value)]
        return frozenset().union(*found)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; its results come from where its arguments do."""
        if self._inside is None:
            self._check_use(func, args, kwargs)
            if str((kwargs or {}).get("device")) == "meta":  # code that asks for the device of its parameters
                kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in _OF_SHAPE_ALONE and self._inside is None:
            return result
        sources = self.sources_of((args, kwargs))
        if self._inside is not None:
            sources = frozenset(each for each in sources if each[0] != "weight") | {("inside", self._inside)}
        elif torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {("random", name)}
        if not sources:
            return result
        outputs = list(_tensors_in(result))
        is_read = torch.Tag.dynamic_output_shape in func.tags or not (outputs or name.endswith("_"))
        if is_read and self._inside is None:
            self.trace.reads |= sources
        for tensor in outputs or _tensors_in((args, kwargs)):
            memory = _memory_of(tensor)
            before = self._sources.get(id(memory), (None, NOTHING))[1]
            self._sources[id(memory)] = memory, before | sources
        return result

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a unit's call; returns zeros of its result's shapes, or the result of a call that depends on none."""
        sources = self.sources_of((args, kwargs))
        self._refuse_replaced(args, kwargs, is_write=False)
        hidden = next((each for each in leaves_in((args, kwargs)) if _holds_tensors(each)), None)
        if hidden is not None:
            raise ValueError(
                f"module {path!r} gets {type(hidden).__name__}, an object that holds tensors, which can't go from stage"
                " to stage: switch it off (use_cache=False for a cache of keys and values)"
            )
        mappings = Mappings(path, args, kwargs)
        if path not in self._stateful:
            before = attributes_of(self._shadows[path])
            returned = self._shadows[path](*args, **kwargs)
            self._changed(path, changed_attributes(before, self._shadows[path]))
            changed = returned, mappings.written(), mappings.changed_lists()
            if not any(kind == "call" for kind, _ in self.sources_of(changed)):
                self.trace.calls.append(Call(path=path, is_local=True, sources=sources, leaves=(), spec=None))
                return returned
            for each in _tensors_in(mappings.written_in_place()):
                self._replaced[id(_memory_of(each))] = _memory_of(each), path
            outcome = mappings.outcome(returned)
        else:
            outcome = self._run_on_meta(path, args, kwargs)
        outcome = replace(outcome, kept=self._kept(mappings, outcome))
        leaves, spec = tree_flatten((outcome.returned, outcome.written))
        call_index = len(self.trace.calls)
        shapes = tuple(
            LeafShape(tuple(each.shape), each.dtype, each.requires_grad) if isinstance(each, torch.Tensor) else each
            for each in leaves
        )
        self.trace.calls.append(
            Call(
                path=path,
                is_local=False,
                sources=sources,
                leaves=shapes,
                spec=spec,
                aliases=outcome.aliases,
                kept=outcome.kept,
            )
        )
        found = []
        for index, leaf in enumerate(shapes):
            if isinstance(leaf, LeafShape):
                found.append(leaf.make(0, "cpu"))
                self.mark(found[-1], ("call", (call_index, index)))
            else:
                found.append(leaf)
        made, written = tree_unflatten(found, spec)
        return mappings.apply(replace(outcome, returned=made, written=written))

    def _kept(self, mappings: Mappings, outcome: Outcome) -> frozenset[Slot]:
        """The entries that stages keep as they are: not returned random numbers, which each stage would draw anew."""
        found = set[Slot]()
        for slot in outcome.kept:
            entry = mappings.entry(slot)
            is_random = any(kind == "random" for kind, _ in self.sources_of(entry))
            if is_random and slot[0] in outcome.aliases:
                self._random.update((id(_memory_of(each)), _memory_of(each)) for each in _tensors_in(entry))
            else:
                found.add(slot)
        return frozenset(found)

    def _refuse_replaced(self, args: Any, kwargs: Any, *, is_write: bool) -> None:
        """Raise for tensors in whose place mappings have others, in which later stages would miss what is written."""
        for tensor in _tensors_in((args, kwargs)):
            memory = id(_memory_of(tensor))
            if memory in self._replaced:
                raise ValueError(
                    f"module {self._replaced[memory][1]!r} writes in place to a tensor in a mapping or list, and the"
                    " model's code uses the tensor itself: go on with the mapping or list that the module returns"
                )
            if is_write and memory in self._random:
                raise ValueError(
                    "the model's code writes in place to random numbers that are in a mapping or list which a module"
                    " has returned, which other stages would not see: write to a copy"
                )

    def _check_use(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise for an operator between units that uses tensors that it can't have."""
        if any(tensor.is_meta for tensor in _tensors_in((args, kwargs))):
            self._refuse_meta(args, kwargs)
        if self._replaced or self._random:
            self._refuse_replaced(args, kwargs, is_write=schema_of(func).is_mutable)

    def _refuse_meta(self, args: Any, kwargs: Any) -> None:
        """Raise for a tensor of a unit that the code between units uses, and that the unit didn't return."""
        found = {kind: content for kind, content in self.sources_of((args, kwargs)) if kind in {"weight", "inside"}}
        for kind, message in (("weight", WEIGHT_READ), ("inside", NOT_RETURNED)):  # views of weights are both
            if kind in found:
                raise ValueError(message.format(name=found[kind], what="the code between modules"))

    def _run_on_meta(self, path: str, args: Any, kwargs: Any) -> Outcome:
        """The outcome of a unit on the meta device, or with zeros as parameters where its code needs values."""
        shadow = self._shadows[path]
        try:
            given = map_tensors(lambda value: copied(value, "meta"), (args, kwargs))
            return self._run_inside(path, shadow, given)
        except Exception:  # noqa: BLE001 - no kernel on meta, or code that decides by values
            shadow = self._with_zeros(path)
            return self._run_inside(path, shadow, map_tensors(_copied_without_nan, (args, kwargs)))

    def _with_zeros(self, path: str) -> torch.nn.Module:
        """A copy of a unit's shadow on the CPU."""
        self._inside = path
        try:
            left = (each for part in self._shadows[path].modules() for each in _tensors_in(list(vars(part).values())))
            memo: dict[int, Any] = {id(each): each.detach() for each in left if not each.is_leaf}  # can't be copied
            shadow = copy.deepcopy(self._shadows[path], memo).to_empty(device="cpu")
            for tensor in (*shadow.parameters(), *shadow.buffers()):
                tensor.detach().zero_()
            return shadow
        finally:
            self._inside = None

    def _run_inside(self, path: str, shadow: torch.nn.Module, arguments: Any) -> Outcome:
        self._inside = path
        before, mappings = attributes_of(shadow), Mappings(path, *arguments)
        tensors = _tensors_in(arguments)
        versions = list(map(version_of, tensors))
        try:
            result = shadow(*arguments[0], **arguments[1])
        finally:
            self._inside = None
            self._changed(path, changed_attributes(before, shadow))
        if list(map(version_of, tensors)) != versions:
            raise ValueError(
                f"module {path!r} writes to its arguments in place, which other stages would not see: let it return"
                " what it computes"
            )
        return mappings.outcome(result)


def _memory_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor, which its views share; the tensor itself if it has none."""
    return tensor.untyped_storage() if tensor.layout is torch.strided and not tensor.is_nested else tensor


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor)]


def _holds_tensors(value: Any, levels: int = 3) -> bool:
    """True for an object with tensors in its attributes, which `leaves_in` doesn't see."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return False
    inner = leaves_in(list(vars(value).values()))
    return any(isinstance(each, torch.Tensor) or (levels > 0 and _holds_tensors(each, levels - 1)) for each in inner)


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_integer(value.dtype)


def copied(value: Any, device: torch.device | str | None = None) -> Any:
    """A copy of a tensor that may be written, and that requires gradients if the tensor does; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device or value.device).requires_grad_(value.requires_grad).clone()


def _copied_without_nan(value: torch.Tensor) -> torch.Tensor:
    """A copy with zeros for NaN, which inputs are in stages that don't get them, and of which code may make indices."""
    return copied(value).nan_to_num_(0) if value.is_floating_point() else copied(value)  # type: ignore[no-any-return]


def attributes_of(module: torch.nn.Module) -> dict[str, tuple[Any, int]]:
    """The attributes of a module and of the modules in it, with sizes of collections, and writes to tensors.

    Of their buffers it has those of integers, which may be constants; see `find_constants`.
    """
    return {
        f"{path}.{name}".lstrip("."): (value, _count_of(value))
        for path, part in module.named_modules()
        for name, value in (*vars(part).items(), *own_buffers(part).items())
        if name not in _OF_MODULES and not (name in own_buffers(part) and not _is_of_integers(value))
    }


def changed_attributes(before: Mapping[str, tuple[Any, int]], module: torch.nn.Module) -> set[str]:
    """The names of attributes that have been set since `attributes_of`."""
    missing = (before, -1)  # equal to nothing
    after = attributes_of(module)
    found = ((name, before.get(name, missing), after.get(name, missing)) for name in {**before, **after})
    return {name for name, (old, size), (new, new_size) in found if new is not old or size != new_size}


def _count_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return version_of(value)
    return len(value) if isinstance(value, (list, dict, set, deque)) else 0
