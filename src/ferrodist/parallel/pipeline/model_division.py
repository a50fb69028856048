"""The common data of a model's stages, and the trace of the model's code that finds what they exchange."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.parallel.pipeline.measure import measure_units, preserve_random_states
from ferrodist.parallel.pipeline.model_flow import DivisionError, Flow, Trace, find_flow, is_integer
from ferrodist.parallel.pipeline.model_mappings import leaves_in
from ferrodist.parallel.pipeline.model_memory import ContainerTensors
from ferrodist.parallel.pipeline.model_skeleton import Skeleton
from ferrodist.parallel.pipeline.model_state import (
    SharedObjects,
    Snapshot,
    attributes,
    names_in_evaluation,
    set_evaluation,
)
from ferrodist.parallel.pipeline.model_tracer import Tracer, copied
from ferrodist.parallel.pipeline.model_units import ModelUnits, copy_to_host, copy_without_memory
from ferrodist.torch_private.modules import own_buffers, own_modules, own_parameters
from ferrodist.torch_private.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The model of which stages are parts, as loaders of files need it."""

    code: torch.nn.Module
    """A copy without its parameters, of the model's class and configuration."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of all parameters and buffers by name."""
    tied: Mapping[str, Sequence[str]]
    """The names of each of them that is a tensor with several."""


class ModelDivision:
    """The common data of a model's stages: its units, and the flow of values between them."""

    def __init__(self, model: torch.nn.Module, units: ModelUnits, output: Callable[[Any], Any]) -> None:
        self.name = type(model).__name__
        self.units = units
        self.output = output
        self.skeleton = Skeleton(model, units)
        shadow = copy_without_memory(model, units, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._shadow = shadow
        self.shared_objects = SharedObjects(model, units)
        self._shadows = {path: shadow.get_submodule(path) for path in units.units}
        for path, unit in self._shadows.items():  # so that hooks on parts of a unit see its run
            own_modules(self.skeleton.model.get_submodule(path)).clear()
            own_modules(self.skeleton.model.get_submodule(path)).update(own_modules(unit))
        self._weights = {
            f"{path}.{name}": tensor
            for path in units.stateful
            for name, tensor in (*self._shadows[path].named_parameters(), *self._shadows[path].named_buffers())
        }
        self.own = {
            name: copy_to_host(tensor).requires_grad_(tensor.requires_grad) for name, tensor in units.own.items()
        }
        """Container tensors, and stand-ins for those of `shared`."""
        self._tied = {name for name, tensor in units.own.items() if self.shared_objects.other_user(tensor, None)}
        self.shared: dict[str, torch.nn.Parameter] = {}
        """Parameters of units that the code around them reads, which are in all stages that do."""
        self.whole_model = _describe_whole(self.skeleton.model, units)
        self.evaluating = names_in_evaluation(model)
        """The modules of the model that were in mode of evaluation."""
        self._kept: dict[int, tuple[Any, str]] = {}  # memory that a trace left in an attribute, and its name
        self.changed: dict[str, set[str]] = {}
        """The attributes of units, and of modules in them, that their forwards have set in a trace."""
        self.owners: dict[str, int] = {}
        self.num_stages = 1
        self.materialised: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Real tensors by the identity of those on the meta device, so that tied ones stay tied."""
        self._lock = threading.Lock()

    def names_after_train(self, *, mode: bool) -> frozenset[str]:
        """The modules in mode of evaluation after `train` of the whole model."""
        with self._lock:
            self._shadow.train(mode)
            return names_in_evaluation(self._shadow)

    def trace(self, args: Any, kwargs: Any, evaluating: AbstractSet[str]) -> Trace:
        """Run the model's code once without parameters, on the CPU; ValueError if that fails."""
        grad_mode = torch.is_grad_enabled()  # inference_mode(False) switches it on
        with (
            self._lock,
            preserve_random_states(),
            torch.inference_mode(False),
            torch.set_grad_enabled(grad_mode),
        ):
            for model in (self.skeleton.model, self._shadow):
                set_evaluation(model, evaluating)
            before = self._describe_shared()
            tracer = Tracer(
                self.units.stateful,
                self._shadows,
                ContainerTensors(self.own, self._tied),
                self._add_changed,
                lambda: self._check_call(before),
            )
            leaves, spec = tree_flatten((args, kwargs))
            leaves = [_copy_input(each) for each in leaves]
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    tracer.mark(leaf, ("input", index))
                    if is_integer(leaf.dtype):
                        tracer.trace.integers.add(index)
            self.skeleton.install(self.own)
            for name, tensor in self.own.items():
                tracer.mark(tensor, ("own", name))
            for name, tensor in (*self.skeleton.weights.items(), *self._weights.items()):
                tracer.mark(tensor, ("weight", name))
            for memory, name in self._kept.values():
                tracer.refuse(
                    memory,
                    f"the model's code has results of modules in {name!r} from the call before, which only some stages"
                    " have: pass them as an input",
                )
            try:
                with tracer, tracer.reads:
                    args, kwargs = tree_unflatten(leaves, spec)
                    result = self.output(self.skeleton.run(tracer.call, args, kwargs))
                    tracer.check_result(result)
                    self._check_attributes(tracer)
            except Exception as error:
                raise ValueError(
                    f"the code of {self.name} can't be divided, or fails on its inputs: {error}"
                ) from error
            tracer.trace.result = tracer.sources_of(result)
            return tracer.trace

    def _describe_shared(self) -> list[tuple[Any, Snapshot]]:
        """The objects that the code around units shares with them, and their contents."""
        values = [vars(self.skeleton.model.get_submodule(path)).get(name) for path, name in self.shared_objects.of_code]
        return [(value, Snapshot(value)) for value in values]

    def _check_call(self, before: Sequence[tuple[Any, Snapshot]]) -> None:
        """Raise if the code has changed objects of units or their hooks, before it calls one: stages have copies."""
        for (path, name), old, new in zip(self.shared_objects.of_code, before, self._describe_shared(), strict=True):
            if old[0] is not new[0] or old[1] != new[1]:
                other = self.shared_objects.other_user(vars(self.shared_objects.containers[path]).get(name), None)
                full_name = f"{path}.{name}".lstrip(".")
                raise ValueError(
                    f"the model's code changes {full_name!r}, which {other or 'a hook'} has, too, and of which stages"
                    " have copies: pass the value as an argument"
                )

    def _check_attributes(self, tracer: Tracer) -> None:
        """Raise for container tensors that the code has replaced; keep what the next call can't use."""
        for name, tensor in self.own.items():
            path, _, key = name.rpartition(".")
            if getattr(self.skeleton.model.get_submodule(path), key) is not tensor:
                raise ValueError(
                    f"the model's code sets its parameter or buffer {name!r}, and the next call would have the old one:"
                    " those of modules around the blocks must be constants"
                )
        self._kept = {
            id(memory): (memory, f"{path}.{name}".lstrip("."))
            for path in self.shared_objects.containers
            for name, value in attributes(self.skeleton.model.get_submodule(path)).items()
            for memory in tracer.results_in(value)
        }

    def trace_and_share(self, args: Any, kwargs: Any) -> Trace:
        """The trace for the sample; parameters that the code between the units reads are shared from then on.

        They are the units' own. Those of modules inside of units are refused.
        """
        trace = self.trace(args, kwargs, self.evaluating)
        sources = trace.result.union(trace.reads, *(call.sources for call in trace.calls))
        names = {content for kind, content in sources if kind == "weight"}
        known = {
            f"{path}.{key}": parameter
            for path in self.units.stateful
            for key, parameter in own_parameters(self.units.units[path]).items()
            if parameter is not None
        }
        read = {id(known[name]) for name in names if name in known}  # of a tied one that is one of its names
        for name, parameter in known.items():
            if id(parameter) in read and not is_integer(parameter.dtype):
                self.shared[name] = parameter
                zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                self.own[name] = zeros.requires_grad_(parameter.requires_grad)
        return self.trace(args, kwargs, self.evaluating) if self.shared or self._kept else trace

    def _add_changed(self, path: str, shadow: torch.nn.Module, changed: Mapping[str, bool]) -> None:
        """Note which attributes of a unit its forward has changed; raise for objects that other modules have."""
        unit, unreadable = self.units.units[path], set[str]()
        for name, is_object_changed in changed.items():
            part, _, key = name.rpartition(".")
            try:
                module = unit.get_submodule(part)
            except AttributeError:  # made by the forward
                continue
            buffer = own_buffers(module).get(key)
            other = self.shared_objects.other_user([vars(module).get(key), buffer], unit) if is_object_changed else None
            value = vars(shadow.get_submodule(part)).get(key)
            if other is None and any(
                isinstance(each, torch.Tensor) and each.requires_grad for each in leaves_in(value)
            ):
                other = self.shared_objects.other_user(module, unit)  # others are caches, such as of rotations
            if other is not None:
                raise DivisionError(
                    f"module {path!r} changes its attribute {name!r}, an object that {other} has, too, and of which"
                    " stages have copies: let it return what it computes"
                )
            if buffer is None or is_integer(buffer.dtype):  # others are weights, which no code reads
                unreadable.add(name)
        if not unreadable <= self.changed.get(path, set()):
            self.changed.setdefault(path, set()).update(unreadable)
            # Those of parts are the shadow's.
            self.skeleton.refuse_reads({path: {name for name in unreadable if "." not in name}})

    def measure(self, args: Any, kwargs: Any, *, clock: Callable[[], float]) -> dict[str, float]:
        """Measure the seconds of the forwards and backwards of each unit."""
        self.skeleton.install({**self.units.own, **self.shared})
        return measure_units(self.units.units, lambda call: self.skeleton.run(call, args, kwargs), clock=clock)

    def flow(self, args: Any, kwargs: Any, evaluating: AbstractSet[str]) -> Flow:
        """The flow of values for these inputs, with these modules in mode of evaluation."""
        return find_flow(self.trace(args, kwargs, evaluating), self.owners, self.num_stages)


def _describe_whole(code: torch.nn.Module, units: ModelUnits) -> WholeModel:
    tensors = dict(units.own)
    for path in units.units:
        unit = units.units[path]
        both = (*unit.named_parameters(path, remove_duplicate=False), *unit.named_buffers(path, remove_duplicate=False))
        tensors.update(both)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return WholeModel(
        code=code,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tied={name: names[id(tensor)] for name, tensor in tensors.items() if len(names[id(tensor)]) > 1},
    )


def _copy_input(value: Any) -> Any:
    """A copy of an input on the CPU; zeros for one on the meta device."""
    if not isinstance(value, torch.Tensor):
        return value
    return copied(torch.zeros_like(value, device="cpu") if value.is_meta else value, "cpu")
