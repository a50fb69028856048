"""Traces the model once on the meta device: which tensors its blocks and other units pass to each other.

The trace is one run of the model's own code, without its parameters. Units with state run on the meta device, and their
results are replaced by zeros. A dispatch mode sees every operator between the units, and carries along from which
results, inputs and container tensors a value comes. So each stage's needs are known exactly, whatever the code between
the units does. `model_units.py` says what a unit is.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ferrodist.parallel.pipeline.model_flow import (
    NOT_RETURNED,
    NOTHING,
    WEIGHT_READ,
    Call,
    DivisionError,
    LeafShape,
    Trace,
)
from ferrodist.parallel.pipeline.model_mappings import Mappings, Outcome, Slot, is_container, leaves_in, map_tensors
from ferrodist.parallel.pipeline.model_memory import UnitMemory, memory_of, written_arguments
from ferrodist.parallel.pipeline.model_state import Snapshot, attributes_of, captured_by, changed_attributes
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modes import DispatchMode
from ferrodist.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from ferrodist.parallel.pipeline.model_flow import Source
    from ferrodist.parallel.pipeline.model_memory import ContainerTensors

_OF_SHAPE_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)  # operators whose results don't depend on the values of their arguments
_READS = frozenset({"numpy", "tolist", "__array__", "__dlpack__"})


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
        own: Container tensors.
        changed: Called with a unit's path, the copy that has run, and names of attributes, such as "gate.loss", that
            its forward has set, each with whether the former object has changed.
        before_call: Called before each unit.
    """

    def __init__(
        self,
        stateful: Sequence[str],
        shadows: Mapping[str, torch.nn.Module],
        own: ContainerTensors,
        changed: Callable[[str, torch.nn.Module, Mapping[str, bool]], None],
        before_call: Callable[[], None],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.reads = _Reads(self)
        self._stateful = stateful
        self._shadows = shadows
        self._own = own
        self._changed = changed
        self._before_call = before_call
        self._sources: dict[int, tuple[Any, frozenset[Source]]] = {}  # by storage, which is kept alive
        self._memory = UnitMemory()
        self._results: dict[int, tuple[int, int]] = {}  # the call and leaf by memory, which `_sources` keeps alive
        self._random: dict[int, Any] = {}  # memory of random numbers in whose place mappings have others
        self._inside: str | None = None  # the unit that runs
        self._is_copying = False  # arguments for a unit, which is no use of them

    def mark(self, tensor: torch.Tensor, *sources: Source) -> None:
        """Set where a tensor comes from."""
        memory = memory_of(tensor)
        self._sources[id(memory)] = memory, frozenset(sources)

    def add_read(self, value: Any) -> None:
        """Record that the code between units reads the numbers in a nested value."""
        if self._inside is None:
            self.trace.reads |= self.sources_of(value)

    def check_result(self, value: Any) -> None:
        """Raise ValueError if the model returns a tensor that stages don't have as one process would."""
        self._memory.check_use(_tensors_in(value))

    def refuse(self, memory: Any, message: str) -> None:
        """Refuse uses of tensors of this memory, with an error that says this."""
        self._memory.refuse([memory], message)

    def results_in(self, value: Any) -> list[Any]:
        """The memory of the results of units, or of what comes from them, in a nested value."""
        tensors = _tensors_in(value)
        return [memory_of(each) for each in tensors if any(kind == "call" for kind, _ in self.sources_of(each))]

    def sources_of(self, value: Any) -> frozenset[Source]:
        """The origins of the tensors in a nested value."""
        found = [self._sources.get(id(memory_of(tensor)), (None, NOTHING))[1] for tensor in _tensors_in(value)]
        return frozenset().union(*found)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; its results come from where its arguments do."""
        if self._is_copying:
            return func(*args, **(kwargs or {}))
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
            memory = memory_of(tensor)
            before = self._sources.get(id(memory), (None, NOTHING))[1]
            self._sources[id(memory)] = memory, before | sources
        return result

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a unit's call; returns zeros of its result's shapes, or the result of a call that depends on none."""
        self._check_call(path, args, kwargs)
        sources = self.sources_of((args, kwargs))
        mappings = Mappings(path, args, kwargs)
        self._before_call()
        if path in self._stateful:
            run = self._run_apart(path, args, kwargs)
        else:
            returned = self._run_between(path, args, kwargs)
            changed = returned, mappings.written(), mappings.changed_lists()
            if not any(kind == "call" for kind, _ in self.sources_of(changed)):
                self.trace.calls.append(Call(path=path, is_local=True, sources=sources, leaves=(), spec=None))
                return returned
            self._refuse_written(mappings.written_in_place(), path)
            run = _Run(self._shadows[path], mappings.outcome(returned), {}, ())
        outcome = replace(run.outcome, kept=self._kept(mappings, run.outcome))
        leaves, spec = tree_flatten((outcome.returned, outcome.written))
        call_index = len(self.trace.calls)
        shapes = tuple(map(_shape_of, leaves))
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
                self._results[id(memory_of(found[-1]))] = call_index, index
            else:
                found.append(leaf)
        self._join_memory(path, (args, kwargs), run, list(zip(leaves, found, strict=True)))
        made, written = tree_unflatten(found, spec)
        return mappings.apply(replace(outcome, returned=made, written=written))

    def _check_call(self, path: str, args: Any, kwargs: Any) -> None:
        """Raise for a call whose arguments can't go from stage to stage."""
        tensors = _tensors_in((args, kwargs))
        self._memory.check_use(tensors)
        self._own.read(tensors)
        hidden = next((each for each in leaves_in((args, kwargs)) if _holds_tensors(each)), None)
        if hidden is not None:
            raise ValueError(
                f"module {path!r} gets {type(hidden).__name__}, an object that holds tensors, which can't go from stage"
                " to stage: switch it off (use_cache=False for a cache of keys and values)"
            )
        if _is_in_reentrant_checkpoint():
            raise ValueError(
                f"the model's code calls module {path!r} in torch.utils.checkpoint with use_reentrant=True, through"
                " which no gradients go from stage to stage: pass use_reentrant=False"
            )

    def _run_between(self, path: str, args: Any, kwargs: Any) -> Any:
        """Run a unit without state, as code between units; returns its result."""
        tensors = _tensors_in((args, kwargs))
        versions = list(map(version_of, tensors))
        before, objects = attributes_of(self._shadows[path]), _objects_in((args, kwargs))
        returned = self._shadows[path](*args, **kwargs)
        self._changed(path, self._shadows[path], changed_attributes(before, self._shadows[path]))
        _refuse_changed(path, objects, (args, kwargs))
        sources = self.sources_of((args, kwargs, returned))
        if any(kind == "call" for kind, _ in sources):
            pairs = zip(tensors, versions, strict=True)
            self._refuse_written([tensor for tensor, version in pairs if version_of(tensor) != version], path)
        return returned

    def _refuse_written(self, values: Any, path: str) -> None:
        """Refuse uses of tensors to which a unit without state has written."""
        message = (
            f"module {path!r} writes in place to a tensor, and the model's code uses the tensor itself: go on with what"
            " the module returns"
        )
        self._memory.refuse(map(memory_of, _tensors_in(values)), message)

    def _join_memory(self, path: str, arguments: Any, run: _Run, results: Sequence[tuple[Any, Any]]) -> None:
        """Note which results, and their stand-ins, share memory with each other, with arguments or with buffers."""
        given = {id(memory_of(each)) for each in _tensors_in(arguments)}
        kept = {id(memory_of(each)) for each in (*run.unit.parameters(), *run.unit.buffers())}
        kept.update(id(memory_of(each)) for each in self._own.tensors.values())
        groups: dict[int, list[Any]] = {}
        for leaf, made in results:
            if isinstance(leaf, torch.Tensor):
                memory = memory_of(leaf)
                origin = run.origins.get(id(memory), memory)
                groups.setdefault(id(origin), [origin]).append(memory_of(made))
        for key, (origin, *stand_ins) in groups.items():
            if key in kept:
                self._memory.join(path, [origin, *stand_ins], is_kept=True)
            elif key in given or len(stand_ins) > 1:
                self._memory.join(path, [origin, *stand_ins], is_kept=False)

    def _kept(self, mappings: Mappings, outcome: Outcome) -> frozenset[Slot]:
        """The entries that stages keep as they are: not returned random numbers, which each stage would draw anew."""
        found = set[Slot]()
        for slot in outcome.kept:
            entry = mappings.entry(slot)
            is_random = any(kind == "random" for kind, _ in self.sources_of(entry))
            if is_random and slot[0] in outcome.aliases:
                self._random.update((id(memory_of(each)), memory_of(each)) for each in _tensors_in(entry))
            else:
                found.add(slot)
        return frozenset(found)

    def _check_use(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise for an operator between units that uses tensors that it can't have."""
        tensors = _tensors_in((args, kwargs))
        if any(tensor.is_meta for tensor in tensors):
            self._refuse_meta(args, kwargs)
        self._memory.check_use(tensors)
        written = _tensors_in(list(written_arguments(func, args, kwargs)))
        self._own.read(each for each in tensors if not any(each is one for one in written))
        for tensor in written:
            memory = id(memory_of(tensor))
            if memory in self._random:
                raise ValueError(
                    "the model's code writes in place to random numbers that are in a mapping or list which a module"
                    " has returned, which other stages would not see: write to a copy"
                )
            if memory in self._results:
                self.trace.written.add(self._results[memory])
            self._own.write(func.name().partition(".")[0], tensor)
            self._memory.write(tensor)

    def _refuse_meta(self, args: Any, kwargs: Any) -> None:
        """Raise for a tensor of a unit that the code between units uses, and that the unit didn't return."""
        found = {kind: content for kind, content in self.sources_of((args, kwargs)) if kind in {"weight", "inside"}}
        for kind, message in (("weight", WEIGHT_READ), ("inside", NOT_RETURNED)):  # views of weights are both
            if kind in found:
                raise ValueError(message.format(name=found[kind], what="the code between modules"))

    def _run_apart(self, path: str, args: Any, kwargs: Any) -> _Run:
        """Run a unit on the meta device, or with zeros as parameters where its code needs values."""
        try:
            return self._run_inside(path, self._shadows[path], lambda value: copied(value, "meta"), (args, kwargs))
        except DivisionError:
            raise
        except Exception as error:  # noqa: BLE001 - no kernel on meta, or code that decides by values
            shadow = self._with_zeros(path)
            try:
                return self._run_inside(path, shadow, _copied_without_nan, (args, kwargs))
            except Exception as second:
                raise second from error

    def _with_zeros(self, path: str) -> torch.nn.Module:
        """A copy of a unit's shadow on the CPU."""
        with self._in_unit(path):
            left = (each for part in self._shadows[path].modules() for each in _tensors_in(list(vars(part).values())))
            memo: dict[int, Any] = {id(each): each.detach() for each in left if not each.is_leaf}  # can't be copied
            shadow = copy.deepcopy(self._shadows[path], memo).to_empty(device="cpu")
            for tensor in (*shadow.parameters(), *shadow.buffers()):
                tensor.detach().zero_()
            return shadow

    def _run_inside(
        self, path: str, shadow: torch.nn.Module, copy_of: Callable[[torch.Tensor], Any], given: Any
    ) -> _Run:
        """Run a unit with state, on copies of its arguments."""
        self._is_copying = True
        try:
            arguments = map_tensors(copy_of, given)
        finally:
            self._is_copying = False
        with self._in_unit(path):
            tensors = _tensors_in(arguments)
            versions = list(map(version_of, tensors))
            before, mappings = attributes_of(shadow), Mappings(path, *arguments)
            objects = _objects_in(arguments)
            try:
                result = shadow(*arguments[0], **arguments[1])
            finally:  # also where it fails: a second run might not change them again
                self._changed(path, shadow, changed_attributes(before, shadow))
                _refuse_changed(path, objects, arguments)
        if list(map(version_of, tensors)) != versions:
            raise DivisionError(
                f"module {path!r} writes to its arguments in place, which other stages would not see: let it return"
                " what it computes"
            )
        origins = {id(memory_of(one)): memory_of(other) for one, other in zip(tensors, _tensors_in(given), strict=True)}
        return _Run(shadow, mappings.outcome(result), origins, tensors)

    @contextmanager
    def _in_unit(self, path: str) -> Iterator[None]:
        self._inside = path
        try:
            yield
        finally:
            self._inside = None


class _Run(NamedTuple):
    """A run of a unit."""

    unit: torch.nn.Module
    """The copy of the unit that has run."""
    outcome: Outcome
    origins: Mapping[int, Any]
    """The memory of the arguments by the identity of that of their copies."""
    copies: Sequence[torch.Tensor]
    """The copies, so that no other memory gets their identity."""


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor)]


def _shape_of(leaf: Any) -> Any:
    """The shape of a leaf of a result; others as stages have them."""
    if isinstance(leaf, torch.Tensor):
        return LeafShape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _objects_in(arguments: Any) -> list[tuple[Any, Snapshot]]:
    """The arguments that are neither tensors nor mappings and lists, with their contents."""
    leaves = tree_leaves(arguments, is_leaf=lambda each: is_container(each) or hasattr(each, "__dict__"))
    return [(leaf, Snapshot(leaf)) for leaf in leaves if not isinstance(leaf, torch.Tensor) and not is_container(leaf)]


def _refuse_changed(path: str, before: Sequence[tuple[Any, Snapshot]], arguments: Any) -> None:
    after = _objects_in(arguments)
    if len(before) != len(after) or any(
        one is not other or state != new for (one, state), (other, new) in zip(before, after, strict=True)
    ):
        raise DivisionError(
            f"module {path!r} changes an object among its arguments, which other stages would not see: let it return"
            " what it computes"
        )


def _holds_tensors(value: Any, levels: int = 4) -> bool:
    """True for an object that has tensors, or objects with tensors, where `leaves_in` doesn't see them."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.Size, torch.dtype, type, ModuleType, str, bytes)):
        return False
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        inner = list(captured_by(value))
    elif callable(value):
        return False
    else:
        inner = gc.get_referents(value)  # of its attributes, slots, items and such
    return any(isinstance(each, torch.Tensor) or (levels > 0 and _holds_tensors(each, levels - 1)) for each in inner)


def _is_in_reentrant_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - Python's documented way to the stack
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


def copied(value: Any, device: torch.device | str | None = None) -> Any:
    """A copy of a tensor that may be written, and that requires gradients if the tensor does; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device or value.device).requires_grad_(value.requires_grad).clone()


def _copied_without_nan(value: torch.Tensor) -> torch.Tensor:
    """A copy with zeros for NaN, which inputs are in stages that don't get them, and of which code may make indices."""
    return copied(value).nan_to_num_(0) if value.is_floating_point() else copied(value)  # type: ignore[no-any-return]
