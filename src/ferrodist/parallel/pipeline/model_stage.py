"""A stage of a model that is not Sequential: the model's own code, with the units of other stages replaced."""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.parallel.module_init import find_initialiser, has_meta_tensors
from ferrodist.parallel.pipeline.measure import measure_units, preserve_random_states
from ferrodist.parallel.pipeline.model_flow import Flow, LeafShape, Trace, Tracer, find_flow
from ferrodist.parallel.pipeline.model_units import ModelUnits, copy_to_host, copy_without_memory
from ferrodist.parallel.pipeline.state_dict import ModulePart
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import clear_hooks, own_buffers, own_modules, own_parameters
from ferrodist.torch_private.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.parallel.module_init import Initialiser

_SHAPE = "ferrodist.shape"  # the key of an input that travels as its shape
_MAX_FLOWS = 256  # shapes of inputs whose flow is kept


class _StageDone(BaseException):
    """Ends the model's code in a stage that has made its last call; no code of a model catches it."""


class _Switch(threading.local):
    """The handler of calls of a skeleton's units, in this thread: (path, args, kwargs) to the result."""

    call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None


class Skeleton:
    """A copy of a model without parameters, whose units pass their calls on to a `_Switch`."""

    def __init__(self, model: torch.nn.Module, units: ModelUnits) -> None:
        self.switch = _Switch()
        self._paths = tuple(units.units)
        self._own = tuple(units.own)
        self._lock = threading.Lock()
        # Views of one element have shape, dtype and device for code that asks for them.
        self.model = copy_without_memory(
            model, units, lambda tensor: torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        )
        self._device = torch.device("cpu")
        faces = {path: self.model.get_submodule(path) for path in self._paths}
        self._weights = {
            f"{path}.{name}": tensor
            for path in units.stateful
            for name, tensor in (*faces[path].named_parameters(), *faces[path].named_buffers())
        }
        proxies = {path: _make_proxy(face, path, self.switch) for path, face in faces.items()}
        memo: dict[int, Any] = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        memo.update({id(face): proxies[path] for path, face in reversed(faces.items())})
        self.model = copy.deepcopy(self.model, memo)
        for path, proxy in proxies.items():  # a module with two names has two proxies
            parent, _, name = path.rpartition(".")
            own_modules(self.model.get_submodule(parent))[name] = proxy

    def install(self, own: Mapping[str, torch.Tensor]) -> None:
        """Put tensors in the place of the model's own parameters and buffers."""
        for name, tensor in own.items():
            parent, _, key = name.rpartition(".")
            container = self.model.get_submodule(parent)
            tables: list[dict[str, Any]] = [own_parameters(container), own_buffers(container)]
            next(table for table in tables if key in table)[key] = tensor

    def move_to(self, device: torch.device) -> None:
        """Give the units' stand-ins for parameters the device of the real ones."""
        if device == self._device:
            return
        for module in self.model.modules():
            tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        moved = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        table[name] = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        self._device = device

    def run(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Run the model's code, with ``call`` for each call of a unit."""
        before, self.switch.call = self.switch.call, call
        try:
            return self.model(*args, **kwargs)
        finally:
            self.switch.call = before

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The stand-ins for the units' parameters and buffers."""
        return self._weights


@functools.cache
def _proxy_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_ferrodist_forward"](args, kwargs)

    contents = {"__call__": torch.nn.Module.__call__, "forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), contents)


def _make_proxy(face: torch.nn.Module, path: str, switch: _Switch) -> torch.nn.Module:
    """A module with all attributes of a unit, whose calls go to the switch."""

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if switch.call is None:
            raise RuntimeError(
                f"module {path!r} was called outside of the forward of its stage: call the stage instead"
            )
        return switch.call(path, args, kwargs)

    kind: type[torch.nn.Module] = _proxy_class(type(face))  # type: ignore[arg-type] # any class has a hash
    proxy = kind.__new__(kind)
    vars(proxy).update(vars(face))
    vars(proxy).pop("forward", None)  # modules may have one of their own
    clear_hooks(proxy)
    vars(proxy)["_ferrodist_forward"] = forward
    return proxy


class ModelDivision:
    """The common data of a model's stages: its units, and the flow of values between them."""

    def __init__(self, model: torch.nn.Module, units: ModelUnits, output: Callable[[Any], Any]) -> None:
        self.name = type(model).__name__
        self.units = units
        self.output = output
        self.skeleton = Skeleton(model, units)
        shadow = copy_without_memory(model, units, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._shadows = {path: shadow.get_submodule(path) for path in units.units}
        for path, unit in self._shadows.items():  # so that hooks on parts of a unit see its run
            own_modules(self.skeleton.model.get_submodule(path)).clear()
            own_modules(self.skeleton.model.get_submodule(path)).update(own_modules(unit))
        self._weights = {
            f"{path}.{name}": tensor
            for path in units.stateful
            for name, tensor in (*self._shadows[path].named_parameters(), *self._shadows[path].named_buffers())
        }
        self.own = {name: copy_to_host(tensor) for name, tensor in units.own.items()}
        self.owners: dict[str, int] = {}
        self.num_stages = 1
        self.materialised: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Real tensors by the identity of those on the meta device, so that tied ones stay tied."""
        self._lock = threading.Lock()

    def trace(self, args: Any, kwargs: Any, *, is_training: bool) -> Trace:
        """Run the model's code once without parameters, on the CPU; ValueError if that fails."""
        with self._lock, preserve_random_states(), torch.inference_mode(False), torch.no_grad():
            self.skeleton.model.train(is_training)
            for shadow in self._shadows.values():
                shadow.train(is_training)
            tracer = Tracer(self.units.stateful, self._shadows)
            leaves, spec = tree_flatten((args, kwargs))
            leaves = [copy_to_host(each) if isinstance(each, torch.Tensor) else each for each in leaves]
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    tracer.mark(leaf, ("input", index))
            self.skeleton.install(self.own)
            for name, tensor in self.own.items():
                tracer.mark(tensor, ("own", name))
            for name, tensor in (*self.skeleton.weights.items(), *self._weights.items()):
                tracer.mark(tensor, ("weight", name))
            try:
                with tracer:
                    args, kwargs = tree_unflatten(leaves, spec)
                    result = self.output(self.skeleton.run(tracer.call, args, kwargs))
            except Exception as error:
                raise ValueError(
                    f"the code of {self.name} can't be divided, or fails on its inputs: {error}"
                ) from error
            tracer.trace.result = tracer.sources_of(result)
            return tracer.trace

    def measure(self, args: Any, kwargs: Any, *, clock: Callable[[], float]) -> dict[str, float]:
        """Measure the seconds of the forwards and backwards of each unit."""
        self.skeleton.install(self.units.own)
        return measure_units(self.units.units, lambda call: self.skeleton.run(call, args, kwargs), clock=clock)

    def flow(self, args: Any, kwargs: Any, *, is_training: bool) -> Flow:
        """The flow of values for these inputs."""
        return find_flow(self.trace(args, kwargs, is_training=is_training), self.owners, self.num_stages)


class ModelStage(ModulePart):
    """A stage of a model, made by `split_model`: its units, and the model's own code that calls them.

    The first stage is called as the model is, but that a mapping is several keyword arguments; every other one with
    what the previous stage returned. The last one returns the model's result.
    """

    def __init__(self, division: ModelDivision, index: int, skeleton: Skeleton, *, is_training: bool) -> None:
        super().__init__()
        self.training = is_training
        self._division, self._index, self._skeleton = division, index, skeleton
        self._flows: OrderedDict[str, Flow] = OrderedDict()

    def materialise(self, init: Initialiser | None = None, device: torch.device | str = "cpu") -> None:
        """Allocate and initialise this stage's tensors that are on the meta device; others keep their values.

        Tied tensors stay tied, in other stages on this rank, too.

        Args:
            init: Called with each module that has such tensors; initialises its own parameters and buffers. None calls
                its ``reset_parameters()``. For a model of Hugging Face it is ``model._init_weights``.
            device: The device of the real tensors.

        Raises:
            UnsupportedOpError: A module has no ``reset_parameters()``, and ``init`` is None.
        """
        modules = [(name, module) for name, module in self.named_modules() if has_meta_tensors(module)]
        initialisers = [find_initialiser(name, module, init) for name, module in modules]
        made = self._division.materialised
        for (_, module), initialise in zip(modules, initialisers, strict=True):
            tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
            real_ones = [each for table in tables for each in table.values() if each is not None and not each.is_meta]
            kept = [(each, each.detach().clone()) for each in real_ones]
            is_new = False
            for table in tables:
                for key, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        real: torch.Tensor = torch.empty_like(tensor, device=device)
                        if isinstance(tensor, torch.nn.Parameter):
                            real = torch.nn.Parameter(real, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = tensor, real
                        is_new = True
                    table[key] = made[id(tensor)][1]
            if is_new:
                initialise(module)
            with torch.no_grad():
                for tensor, values in kept:
                    tensor.copy_(values)

    def train(self, mode: bool = True) -> ModelStage:  # noqa: FBT001, FBT002 - torch's signature
        """Set training mode, or evaluation; see `torch.nn.Module.train`."""
        super().train(mode)
        self._skeleton.model.train(mode)
        return self

    def forward(self, *inputs: Any) -> Any:
        """Run this stage; see the class."""
        args, kwargs, values = self._unpack(inputs)
        flow = self._flow_of(args, kwargs)
        run = _StageRun(self, flow, self._index, values)
        skeleton = self._prepare_skeleton(flow)
        if flow.last_calls[self._index] < 0 and self._index < self._division.num_stages - 1:
            return run.message(args, kwargs)
        try:
            result = skeleton.run(run.call, args, kwargs)
        except _StageDone:
            return run.message(args, kwargs)
        run.check_end()
        return self._division.output(result)

    def unit(self, path: str) -> torch.nn.Module:
        """The module of this stage with a name in the whole model."""
        module: Any = self
        for name in path.split("."):
            module = own_modules(module)[name]
        return module  # type: ignore[no-any-return]

    def add_unit(self, path: str, unit: torch.nn.Module, *, is_replicated: bool = False) -> None:
        """Add a module under its name in the whole model; ``is_replicated`` if other stages have it, too."""
        parent, _, name = path.rpartition(".")
        self._container(parent).add_module(name, unit)
        if is_replicated:
            tensors = (*unit.named_parameters(prefix=path), *unit.named_buffers(prefix=path))
            self.replicated_names |= {name for name, _ in tensors}

    def add_own(self, name: str, container: torch.nn.Module, *, is_replicated: bool) -> None:
        """Add a container's own parameter or buffer."""
        parent, _, key = name.rpartition(".")
        part = self._container(parent)
        if key in own_parameters(container):
            part.register_parameter(key, own_parameters(container)[key])
        else:
            is_persistent = key in container.state_dict(keep_vars=True)
            part.register_buffer(key, own_buffers(container)[key], persistent=is_persistent)
        if is_replicated:
            self.replicated_names |= {name}

    def _container(self, path: str) -> torch.nn.Module:
        module: torch.nn.Module = self
        for name in path.split(".") if path else ():
            if name not in own_modules(module):
                part = ModulePart()
                part.training = module.training
                module.add_module(name, part)
            module = module.get_submodule(name)
        return module

    def _unpack(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        if self._index:
            message = inputs[0]
            kwargs = {name: _unpack_input(each) for name, each in message["kwargs"].items()}
            return tuple(map(_unpack_input, message["args"])), kwargs, message["values"]
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return (), dict(inputs[0]), []
        return inputs, {}, []

    def _flow_of(self, args: Any, kwargs: Any) -> Flow:
        """The flow for the inputs' shapes, which all stages find alike."""
        leaves, spec = tree_flatten((args, kwargs))
        kinds = [(each.shape, each.dtype) if isinstance(each, torch.Tensor) else repr(each) for each in leaves]
        key = repr((spec, kinds, self.training))
        flows = self._flows
        if key not in flows:
            flows[key] = self._division.flow(args, kwargs, is_training=self.training)
            if len(flows) > _MAX_FLOWS:
                flows.popitem(last=False)
        flows.move_to_end(key)
        return flows[key]

    def _prepare_skeleton(self, flow: Flow) -> Skeleton:
        """The skeleton, with this stage's own tensors in it."""
        skeleton = self._skeleton
        skeleton.move_to(self.device)
        own: dict[str, torch.Tensor] = {}
        for name in self._division.own:
            parent, _, key = name.rpartition(".")
            try:
                own[name] = getattr(self.get_submodule(parent), key)
            except AttributeError:
                if self._index in flow.own_uses.get(name, ()):
                    raise ValueError(
                        f"stage {self._index} needs {name!r} for these inputs, but not for the sample with which the"
                        " model was split: pass a sample like the batches"
                    ) from None
        skeleton.install(own)
        return skeleton

    @property
    def device(self) -> torch.device:
        """The device of the stage's tensors; the CPU without any."""
        tensors = (*self.parameters(), *self.buffers())
        return tensors[0].device if tensors else torch.device("cpu")


class _StageRun:
    """One forward of a stage."""

    def __init__(self, stage: ModelStage, flow: Flow, index: int, values: Sequence[torch.Tensor]) -> None:
        self._stage, self._flow, self._index = stage, flow, index
        self._received = dict(zip(flow.sent[index - 1], values, strict=False)) if index else {}
        if len(self._received) != len(values):
            raise RuntimeError(
                f"stage {index} expects {len(self._received)} values of earlier stages, and got {len(values)}: the"
                " stages were not split from the same model, or are not in the same mode of training"
            )
        self._next = 0
        self._wanted = set(flow.sent[index]) if index < len(flow.sent) else set()
        self._computed: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit, or return what its stage has sent."""
        number = self._next
        if number >= len(self._flow.calls) or self._flow.calls[number].path != path:
            raise self._deviation(f"calls {path!r}")
        self._next += 1
        call, owner = self._flow.calls[number], self._flow.owners[number]
        if owner is not None and owner != self._index:
            return self._stand_in(number, (args, kwargs))
        result = self._stage.unit(path)(*args, **kwargs)
        if owner is None:
            return result
        leaves, _ = tree_flatten(result)
        if len(leaves) != len(call.leaves):
            raise self._deviation(f"gets another result of {path!r}")
        for leaf, value in enumerate(leaves):
            if (number, leaf) in self._wanted:
                self._computed[number, leaf] = value, version_of(value)
        if number == self._flow.last_calls[self._index] and self._index < len(self._flow.sent):
            raise _StageDone
        return result

    def check_end(self) -> None:
        """Raise if the model's code has made fewer calls than expected."""
        if self._next != len(self._flow.calls):
            raise self._deviation("ends")

    def message(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The values for the next stage."""
        values = []
        for key in self._flow.sent[self._index]:
            if key in self._received:
                values.append(self._received[key])
                continue
            value, version = self._computed[key]
            if version_of(value) != version:
                raise ValueError(
                    f"the result of module {self._flow.calls[key[0]].path!r} is written in place after its call, and a"
                    " later stage gets it: write to a copy"
                )
            values.append(value)
        leaves, spec = tree_flatten((args, kwargs))
        needed = self._flow.inputs_sent[self._index]
        packed = [leaf if index in needed else _pack_input(leaf) for index, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(packed, spec)
        return {"args": args, "kwargs": kwargs, "values": values}

    def _stand_in(self, number: int, arguments: Any) -> Any:
        """A result of another stage: the received tensors, and zeros in place of those that are not read any more."""
        call = self._flow.calls[number]
        given = [each for each in tree_flatten(arguments)[0] if isinstance(each, torch.Tensor)]
        device = given[0].device if given else self._stage.device
        leaves = [
            self._received[number, leaf]
            if (number, leaf) in self._received
            else torch.zeros(shape.shape, dtype=shape.dtype, device=device)
            if isinstance(shape, LeafShape)
            else shape
            for leaf, shape in enumerate(call.leaves)
        ]
        return tree_unflatten(leaves, call.spec)

    def _deviation(self, what: str) -> RuntimeError:
        expected = self._flow.calls[self._next].path if self._next < len(self._flow.calls) else "the end"
        return RuntimeError(
            f"the model's code {what} where it came to {expected!r} with inputs of the same shapes before: what a stage"
            " calls must not depend on values or random numbers (switch layerdrop off)"
        )


def _pack_input(leaf: Any) -> Any:
    """An input whose values no later stage needs, as its shape and dtype; other leaves as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return {_SHAPE: list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch."), "device": leaf.device.type}


def _unpack_input(value: Any) -> Any:
    """An input with zeros for those that `_pack_input` packed."""
    if isinstance(value, Mapping):
        if _SHAPE in value:
            return torch.zeros(value[_SHAPE], dtype=getattr(torch, value["dtype"]), device=value["device"])
        return {name: _unpack_input(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_unpack_input, value))
    return value
