"""A stage of a model that is not Sequential: the model's own code, with the units of other stages replaced.

::

    skeleton     a copy of the model without parameters, whose code a stage runs
    proxy        a unit's place in a skeleton: its attributes, and calls that go to the stage
    shadow       a unit on the meta device, which the trace runs to find the shapes of results
    stand-in     a tensor in place of one that a stage doesn't get, because its code didn't need it in the trace

No stand-in is used as long as the code does what it did in the trace. If it does something else, because of values, a
stand-in must not give a plausible result: those of floating dtypes are NaN, and integers and booleans have none, since
they are sent to all stages.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.parallel.module_init import find_initialiser, has_meta_tensors
from ferrodist.parallel.pipeline.model_flow import Flow, LeafShape, is_integer, pack_input, unpack_input
from ferrodist.parallel.pipeline.model_mappings import Mappings, Outcome, check_inputs, leaves_in
from ferrodist.parallel.pipeline.model_skeleton import allocate, dense, own_tensors
from ferrodist.parallel.pipeline.model_state import describe, set_evaluation
from ferrodist.parallel.pipeline.state_dict import ModulePart
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_buffers, own_modules, own_parameters
from ferrodist.torch_private.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.parallel.module_init import Initialiser
    from ferrodist.parallel.pipeline.model_division import ModelDivision, WholeModel
    from ferrodist.parallel.pipeline.model_skeleton import Skeleton

_MESSAGE_KEYS = {"args", "kwargs", "values", "modes"}  # of what a stage returns to the next one
_MAX_FLOWS = 256  # shapes of inputs whose flow is kept


class _StageDone(BaseException):
    """Ends the model's code in a stage that has made its last call; no code of a model catches it."""


class ModelStage(ModulePart):
    """A stage of a model, made by `split_model`: its units, and the model's own code that calls them.

    The first stage is called as the model is, but that a mapping is several keyword arguments; every other one with
    what the previous stage returned. The last one returns the model's result.
    """

    def __init__(self, division: ModelDivision, index: int, skeleton: Skeleton) -> None:
        super().__init__()
        self._evaluating = division.evaluating
        self.modes = _hash_of(self._evaluating)
        """A hash of the modes of training of the whole model's modules."""
        self.training = "" not in self._evaluating
        self._division, self._index, self._skeleton = division, index, skeleton
        skeleton.own_unit = lambda path: self.find_unit(path) if self.calls_unit(path) else None
        self._flows: OrderedDict[Any, Flow] = OrderedDict()
        self._absent: dict[str, torch.Tensor] = {}

    def materialise(self, init: Initialiser | None = None, device: torch.device | str = "cpu") -> None:
        """Allocate and initialise this stage's tensors that are on the meta device; others keep their values.

        Tied tensors stay tied, in other stages on this rank, too.

        Args:
            init: Called with each module that has such tensors; initialises its own parameters and buffers. None calls
                its ``reset_parameters()``. For a model of Hugging Face it is ``model._init_weights``. A container, a
                module around lists of blocks, is given as a copy with stand-ins for its units. What isn't initialised
                is NaN, or 0 for integers.
            device: The device of the real tensors.

        Raises:
            UnsupportedOpError: A module has no ``reset_parameters()``, and ``init`` is None.
        """
        modules = [(name, module) for name, module in self.named_modules() if has_meta_tensors(module)]
        originals = [
            self._skeleton.model.get_submodule(name) if isinstance(module, ModulePart) else module
            for name, module in modules
        ]
        initialisers = [
            find_initialiser(name, original, init) for (name, _), original in zip(modules, originals, strict=True)
        ]
        made = self._division.materialised
        for (name, module), original, initialise in zip(modules, originals, initialisers, strict=True):
            tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
            real_ones = [each for table in tables for each in table.values() if each is not None and not each.is_meta]
            kept = [(each, each.detach().clone()) for each in real_ones]
            is_new = False
            for table in tables:
                for key, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, allocate(tensor, device)
                        is_new = True
                    table[key] = made[id(tensor)][1]
            if is_new and original is module:
                initialise(module)
            elif is_new:
                self._initialise_container(name, module, original, initialise)
            with torch.no_grad():
                for tensor, values in kept:
                    tensor.copy_(values)

    def _initialise_container(
        self, path: str, part: torch.nn.Module, original: torch.nn.Module, initialise: Initialiser
    ) -> None:
        """Initialise a container's tensors, of which ``part`` has some, in the copy of the container itself."""
        tensors = {name: each for name, each in own_tensors(part).items() if each is not None}
        self._skeleton.install({f"{path}.{name}".lstrip("."): each for name, each in tensors.items()})
        with dense(original, tensors):
            initialise(original)
        found = own_tensors(original)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if found[name] is not tensor:  # set, not written
                    tensor.copy_(found[name])  # type: ignore[arg-type] # None isn't there

    def train(self, mode: bool = True) -> ModelStage:  # noqa: FBT001, FBT002 - torch's signature
        """Set training mode, or evaluation; see `torch.nn.Module.train`."""
        super().train(mode)
        self._evaluating = self._division.names_after_train(mode=mode)
        self.modes = _hash_of(self._evaluating)
        set_evaluation(self._skeleton.model, self._evaluating)
        for path, part in self._parts():
            part.training = path not in self._evaluating
        return self

    def _parts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The parts of containers of the whole model in this stage, by name."""
        found: list[tuple[str, torch.nn.Module]] = [("", self)]
        for path, part in found:
            yield path, part
            for name, child in own_modules(part).items():
                if isinstance(child, ModulePart):
                    found.append((f"{path}.{name}".lstrip("."), child))

    def forward(self, *inputs: Any) -> Any:
        """Run this stage; see the class."""
        if torch.is_inference_mode_enabled():  # where writes in place can't be seen
            with torch.inference_mode(mode=False), torch.no_grad():
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        self._check_modes()
        args, kwargs, values = self._unpack(inputs)
        flow = self._flow_of(args, kwargs)
        run = _StageRun(self, flow, self._index, (args, kwargs), values)
        skeleton = self._prepare_skeleton(flow)
        if flow.last_calls[self._index] < 0 and self._index < self._division.num_stages - 1:
            return run.message()
        try:
            result = skeleton.run(run.call, args, kwargs)
        except _StageDone:
            return run.message()
        run.check_end()
        return self._division.output(result)

    def find_unit(self, path: str) -> torch.nn.Module:
        """The module of this stage with a name in the whole model."""
        module: Any = self
        for name in path.split("."):
            module = own_modules(module)[name]
        return module  # type: ignore[no-any-return]

    def call_unit(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit; ValueError if its hooks change objects of other modules, of which stages have copies."""
        unit, captured = self.find_unit(path), self._division.shared_objects.of_hooks.get(path)
        if not captured:
            return unit(*args, **kwargs)
        before = describe(captured)
        result = unit(*args, **kwargs)
        if describe(captured) != before:
            raise ValueError(
                f"a hook of module {path!r} changes an object that other modules have, too, and of which stages have"
                " copies: remove the hook, and register one on the stage that has the module"
            )
        return result

    def calls_unit(self, path: str) -> bool:
        """True for a unit that this stage calls."""
        division = self._division
        return path in division.units.units and division.owners.get(path, self._index) == self._index

    def has_state(self, path: str) -> bool:
        """True for a unit with parameters or persistent buffers."""
        return path in self._division.units.stateful

    def add_unit(self, path: str, unit: torch.nn.Module, *, is_replicated: bool = False) -> None:
        """Add a module under its name in the whole model; ``is_replicated`` if other stages have it, too."""
        parent, _, name = path.rpartition(".")
        container = self._container(parent)
        _check_name(container, name)
        container.add_module(name, unit)
        if is_replicated:
            tensors = (*unit.named_parameters(prefix=path), *unit.named_buffers(prefix=path))
            self.replicated_names |= {name for name, _ in tensors}

    def add_own(self, name: str, container: torch.nn.Module, *, is_replicated: bool) -> None:
        """Add a container's own parameter or buffer."""
        parent, _, key = name.rpartition(".")
        part = self._container(parent)
        _check_name(part, key)
        if key in own_parameters(container):
            part.register_parameter(key, own_parameters(container)[key])
        else:
            is_persistent = key in container.state_dict(keep_vars=True)
            part.register_buffer(key, own_buffers(container)[key], persistent=is_persistent)
        if is_replicated:
            self.replicated_names |= {name}

    def _container(self, path: str) -> torch.nn.Module:
        module: torch.nn.Module = self
        names = path.split(".") if path else []
        for depth, name in enumerate(names, 1):
            if name not in own_modules(module):
                _check_name(module, name)
                part = ModulePart()
                part.training = ".".join(names[:depth]) not in self._evaluating
                module.add_module(name, part)
            module = module.get_submodule(name)
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a stage can't be copied or pickled, as its tied parameters are other stages', too."""
        raise TypeError(
            "a stage of split_model shares its model's code with other stages, and can't be copied or pickled: save"
            " its state_dict(), or split a copy of the model"
        )

    def _unpack(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        if self._index:
            if len(inputs) != 1 or not isinstance(inputs[0], Mapping) or not inputs[0].keys() >= _MESSAGE_KEYS:
                kinds = ", ".join(type(each).__name__ for each in inputs) or "nothing"
                raise TypeError(
                    f"stage {self._index} of a divided model takes what stage {self._index - 1} returned, not {kinds}"
                )
            message = inputs[0]
            if message["modes"] != self.modes:
                raise ValueError(
                    f"stage {self._index} and the stage before it are in different modes of training: call train() or"
                    " eval() of all stages"
                )
            kwargs = {name: unpack_input(each) for name, each in message["kwargs"].items()}
            return tuple(map(unpack_input, message["args"])), kwargs, message["values"]
        args, kwargs = ((), dict(inputs[0])) if len(inputs) == 1 and isinstance(inputs[0], Mapping) else (inputs, {})
        check_inputs(args, kwargs)
        return args, kwargs, []

    def _check_modes(self) -> None:
        """Raise ValueError if a part of the stage has another mode than the whole model's code would have."""
        for path, part in self._parts():
            if part.training is (path in self._evaluating):
                mode = "training" if part.training else "evaluation"
                raise ValueError(
                    f"{path!r} in stage {self._index} was set to mode of {mode} by itself, which other stages don't"
                    " know: set the mode of whole stages, or that of parts before split_model, or give the class a"
                    " method train that keeps it"
                )

    def _flow_of(self, args: Any, kwargs: Any) -> Flow:
        """The flow for the inputs' shapes, which all stages find alike."""
        if self.device.type == "meta":
            raise ValueError(
                f"stage {self._index} is on the meta device: call materialise(), or load_hugging_face, before"
            )
        leaves, spec = tree_flatten((args, kwargs))
        kinds = [
            (each.shape, each.dtype, each.requires_grad) if isinstance(each, torch.Tensor) else repr(each)
            for each in leaves
        ]
        modes = self._evaluating, torch.is_grad_enabled(), torch.is_autocast_enabled(self.device.type)
        key = repr((spec, kinds)), modes
        flows = self._flows
        if key not in flows:
            flows[key] = self._division.flow(args, kwargs, self._evaluating)
            if len(flows) > _MAX_FLOWS:
                flows.popitem(last=False)
        flows.move_to_end(key)
        return flows[key]

    def _prepare_skeleton(self, flow: Flow) -> Skeleton:
        """The skeleton, with this stage's container tensors in it."""
        skeleton = self._skeleton
        skeleton.move_to(self.device)
        skeleton.refuse_reads(self._division.changed)
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
                own[name] = self._absent_own(name)
        skeleton.install(own)
        return skeleton

    def _absent_own(self, name: str) -> torch.Tensor:
        """The stand-in for a container's tensor that this stage doesn't have."""
        known = self._absent.get(name)
        if known is None or known.device != self.device:
            original = self._division.own[name]
            if name in self._division.shared:  # which may be large, and which no code writes
                known = torch.full((), torch.nan, dtype=original.dtype, device=self.device).expand(original.shape)
            else:
                known = original.detach().to(self.device, copy=True)
                if not is_integer(known.dtype):
                    known.fill_(torch.nan)
            self._absent[name] = known.requires_grad_(original.requires_grad)
        return self._absent[name]

    @property
    def whole_model(self) -> WholeModel:
        """The whole model's code, and its tensors' names and shapes."""
        return self._division.whole_model

    @property
    def model_name(self) -> str:
        """The class of the whole model."""
        return self._division.name

    @property
    def device(self) -> torch.device:
        """The device of the stage's tensors; the CPU without any."""
        tensors = (*self.parameters(), *self.buffers())
        return tensors[0].device if tensors else torch.device("cpu")


class _StageRun:
    """One forward of a stage."""

    def __init__(self, stage: ModelStage, flow: Flow, index: int, inputs: Any, values: Sequence[torch.Tensor]) -> None:
        self._stage, self._flow, self._index = stage, flow, index
        self._inputs, self._spec = tree_flatten(inputs)
        self._versions = [_version_of_input(each) for each in self._inputs] if index < len(flow.sent) else []
        self._received = dict(zip(flow.sent[index - 1], values, strict=False)) if index else {}
        self._to_send = dict(self._received)
        for key, value in self._received.items():
            if key in flow.written or value.is_inference():  # which only code under inference_mode may write
                self._received[key] = value.clone()
        self._versions_to_send = {key: _version_of_input(value) for key, value in self._to_send.items()}
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
        call_index = self._next
        if call_index >= len(self._flow.calls) or self._flow.calls[call_index].path != path:
            raise self._deviation(f"calls {path!r}")
        self._next += 1
        owner = self._flow.owners[call_index]
        if owner is None or (owner == self._index and self._index == len(self._flow.sent)):
            return self._stage.call_unit(path, args, kwargs)
        mappings = Mappings(path, args, kwargs)
        if owner != self._index:
            return mappings.apply(self._stand_in(call_index, (args, kwargs)))
        tensors = [each for each in leaves_in((args, kwargs)) if isinstance(each, torch.Tensor)]
        versions = list(map(_version_of_input, tensors))
        result = self._stage.call_unit(path, args, kwargs)
        if self._stage.has_state(path) and list(map(_version_of_input, tensors)) != versions:
            raise ValueError(
                f"module {path!r} writes to its arguments in place, which other stages would not see, and which it did"
                " not do in a run with zeros as values: let it return what it computes"
            )
        self._keep(call_index, mappings.outcome(result))
        if call_index == self._flow.last_calls[self._index]:
            raise _StageDone
        return result

    def _keep(self, call_index: int, outcome: Outcome) -> None:
        """Keep what later stages get of a unit's call, and check that the rest is as they expect."""
        call = self._flow.calls[call_index]
        leaves, spec = tree_flatten((outcome.returned, outcome.written))
        if len(leaves) != len(call.leaves) or spec != call.spec or outcome.aliases != call.aliases:
            raise self._other_result(call.path, "another structure and not the one")
        if not call.kept <= outcome.kept:
            raise ValueError(
                f"module {call.path!r} writes to a tensor in a mapping among its arguments, which other stages would"
                " not see, and which it did not do in a run with zeros as values: let it return what it computes"
            )
        for leaf, (value, expected) in enumerate(zip(leaves, call.leaves, strict=True)):
            if isinstance(value, torch.Tensor) and isinstance(expected, LeafShape):
                if tuple(value.shape) != expected.shape:
                    raise self._other_result(
                        call.path, f"a tensor of shape {tuple(value.shape)} and not {expected.shape}"
                    )
                if (call_index, leaf) in self._wanted:
                    kept = value.clone() if (call_index, leaf) in self._flow.written else value
                    self._computed[call_index, leaf] = kept, _version_of_input(kept)
            elif not _is_same(value, expected):
                raise self._other_result(call.path, f"{value!r} and not {expected!r}")

    def _other_result(self, path: str, what: str) -> ValueError:
        return ValueError(
            f"module {path!r} returned {what}, as other stages expect after a run with zeros as values: only tensors go"
            " from stage to stage, so return a tensor in place of what depends on values, of a shape that doesn't"
        )

    def check_end(self) -> None:
        """Raise if the model's code has made fewer calls than expected."""
        if self._next != len(self._flow.calls):
            raise self._deviation("ends")

    def message(self) -> dict[str, Any]:
        """The values for the next stage."""
        values = []
        for key in self._flow.sent[self._index]:
            value, version = (
                (self._to_send[key], self._versions_to_send[key]) if key in self._received else self._computed[key]
            )
            if _version_of_input(value) != version:
                raise ValueError(
                    f"the result of module {self._flow.calls[key[0]].path!r} is written in place after its call, and a"
                    " later stage gets it: write to a copy"
                )
            values.append(value)
        needed = self._flow.inputs_sent[self._index]
        for index, (leaf, before) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if index in needed and _version_of_input(leaf) != before:
                raise ValueError(
                    f"input {index} of {self._stage.model_name} is written in place by its code, and later stages, that"
                    " get it, would write it again: write to a copy"
                )
        packed = [leaf if index in needed else pack_input(leaf) for index, leaf in enumerate(self._inputs)]
        args, kwargs = tree_unflatten(packed, self._spec)
        return {"args": args, "kwargs": kwargs, "values": values, "modes": self._stage.modes}

    def _stand_in(self, call_index: int, arguments: Any) -> Outcome:
        """The outcome of another stage's unit: received tensors, and stand-ins for those that are not read any more."""
        call = self._flow.calls[call_index]
        given = [each for each in tree_flatten(arguments)[0] if isinstance(each, torch.Tensor)]
        device = given[0].device if given else self._stage.device
        leaves = [
            self._received[call_index, leaf]
            if (call_index, leaf) in self._received
            else shape.make(torch.nan, device)
            if isinstance(shape, LeafShape)
            else shape
            for leaf, shape in enumerate(call.leaves)
        ]
        returned, written = tree_unflatten(leaves, call.spec)
        return Outcome(returned=returned, written=written, aliases=call.aliases, kept=call.kept)

    def _deviation(self, what: str) -> RuntimeError:
        expected = self._flow.calls[self._next].path if self._next < len(self._flow.calls) else "the end"
        return RuntimeError(
            f"the model's code {what} where it came to {expected!r} with inputs of the same shapes before: what a stage"
            " calls must not depend on values or random numbers (switch layerdrop off)"
        )


def _check_name(part: torch.nn.Module, name: str) -> None:
    """Raise ValueError if a name of the whole model is that of an attribute of a stage or of its parts."""
    if hasattr(part, name):
        raise ValueError(f"{name!r} in the model has the name of an attribute of stages: give it another name")


def _hash_of(names: AbstractSet[str]) -> int:
    return zlib.crc32(repr(sorted(names)).encode())


def _version_of_input(leaf: Any) -> int:
    """The number of writes to an input; 0 for what can't be written, such as tensors made under inference_mode."""
    return version_of(leaf) if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0


def _is_same(value: Any, expected: Any) -> bool:
    """True if a part of a result that is no tensor is as expected."""
    if isinstance(value, torch.Tensor) or type(value) is not type(expected):
        return False
    try:
        return bool(value == expected) or (value != value and expected != expected)  # noqa: PLR0124 - NaN
    except (TypeError, ValueError, RuntimeError):  # such as an array of numpy
        return False
