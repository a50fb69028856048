"""Wrapped forwards: a module's inputs and outputs with declared placements.

[Note: plain tensors]
A single layer returns DTensors for DTensors. Plain inputs are this rank's shards, and then the outputs are this rank's
shards too, as plain tensors. Inside of a parallel module (`ReplicatedForward`) everything is distributed, and plain
tensors are those that the module's code makes: they count as replicated, and the ranks compare them; see
`tensor.plain_tensors`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, DistributedError, add_error_context
from ferrodist.parallel.backward_hooks import current_backward_id
from ferrodist.parallel.program_failures import report_failure
from ferrodist.parallel.tensor_parallel import compiled_forwards
from ferrodist.parallel.tensor_parallel.compiled_forwards import GraphPlacement, prepare_compiler
from ferrodist.parallel.tensor_parallel.forward_wrappers import ForwardWrapper
from ferrodist.parallel.tensor_parallel.local_calls import LOCAL_CALL
from ferrodist.parallel.tensor_parallel.trial_queue import Trial, TrialQueue, digest
from ferrodist.tensor.dtensor import DTensor, is_placed, reduce_grad_once
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK, BACKWARD_CHECKS, is_plain
from ferrodist.tensor.replica_check import ReplicaCheck
from ferrodist.tensor.replication_warnings import ReplicationWarnings
from ferrodist.torch_private.compilers import is_compiling
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh
    from ferrodist.parallel.tensor_parallel.styles import IOPlacements

_PLACEMENT_TYPES = (Shard, Replicate, Partial)
"""`Placement` for code that torch 2.10 compiles: its compiler can't trace isinstance with a union by name."""


def map_nested(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor in a value, its containers and dataclasses.

    Containers in which no tensor changes are returned themselves, so that a caller sees what a module puts into them,
    as into a cache.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _replace_values(value, list(value), [map_nested(function, one) for one in value.values()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Some dataclass instances lack some of their fields.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _replace_values(value, names, [map_nested(function, getattr(value, name)) for name in names])
    if not isinstance(value, list | tuple):
        return value
    made = [map_nested(function, one) for one in value]
    if all(one is other for one, other in zip(made, value, strict=True)):
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def _replace_values(value: Any, names: Sequence[Any], made: Sequence[Any]) -> Any:
    """A mapping or a dataclass with other values, or itself if they are the same."""
    before = [value[name] if isinstance(value, Mapping) else getattr(value, name) for name in names]
    if all(one is other for one, other in zip(made, before, strict=True)):
        return value
    if is_compiling():  # which has no copy.copy
        return type(value)(**dict(zip(names, made, strict=True)))
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(dict(zip(names, made, strict=True)))  # type: ignore[call-arg]
    other = copy.copy(value)  # some, as a defaultdict, can't be made of their values alone
    for name, one in zip(names, made, strict=True):
        if isinstance(value, Mapping):
            other[name] = one
        else:
            object.__setattr__(other, name, one)  # a dataclass may be frozen
    return other


def find_dtensors(value: Any) -> list[DTensor]:
    """The DTensors in a value."""
    found: list[DTensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            found.append(tensor)
        return tensor

    map_nested(collect, value)
    return found


def find_arguments(forward: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a forward's arguments in order, and whether it takes variadic ones too."""
    parameters = inspect.signature(forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind not in variadic]
    return names, len(names) < len(parameters)


class ShardedForward(ForwardWrapper):
    """A forward whose inputs and outputs get the placements of a style; see [Note: plain tensors].

    ``given`` is the placement of plain inputs, for a single layer; None inside of a parallel module.
    """

    def __init__(
        self, forward: Callable[..., Any], mesh: DeviceMesh, placements: IOPlacements, given: Placement | None = None
    ) -> None:
        functools.update_wrapper(self, forward)  # with the attributes of a wrapper inside, as `places_grads`
        super().__init__(forward)
        self._mesh, self._placements, self._given = mesh, placements, given
        self._names, _ = find_arguments(forward)
        self._places_grads = getattr(forward, "places_grads", False)
        every = {None, *_placements_in(placements.wanted), *_placements_in(placements.outputs)}
        self._graph_names = {wanted: GraphPlacement(mesh, given or Replicate(), wanted).name for wanted in every}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        if not is_compiling() and LOCAL_CALL.get() is not None:
            return self._forward(*args, **kwargs)
        is_plain = self._given is not None and not find_dtensors([args, kwargs])
        names = self._names
        args = tuple(
            self._place_input(value, self._wanted(index, names[index] if index < len(names) else ""))
            for index, value in enumerate(args)
        )
        kwargs = {
            name: self._place_input(value, self._wanted(names.index(name) if name in names else len(names), name))
            for name, value in kwargs.items()
        }
        result = self._forward(*args, **kwargs)
        return self._place_outputs(result, is_plain=is_plain)

    def _wanted(self, index: int, name: str) -> Placement | None:
        """The placement of an argument, however it is passed."""
        wanted = self._placements.wanted
        if wanted is None or isinstance(wanted, _PLACEMENT_TYPES):
            return wanted
        if isinstance(wanted, Mapping):
            return wanted.get(name)
        return wanted[index] if index < len(wanted) else None

    def _place_input(self, value: Any, wanted: Placement | None) -> Any:
        given = self._given or Replicate()
        if is_compiling() and prepare_compiler():
            name = self._graph_names[wanted]
            return map_nested(lambda tensor: compiled_forwards.place(tensor, name), value)

        def place(tensor: torch.Tensor) -> DTensor:
            if not isinstance(tensor, DTensor):
                shape = tensor.shape if isinstance(given, Replicate | Partial) else None
                check = ACTIVE_CHECK.get()
                if self._given is None and check is not None and tensor.numel():
                    check.record("the forward", tensor, self._mesh)
                tensor = DTensor.from_local(tensor, self._mesh, given, shape=shape)
            if wanted is None or not is_placed(tensor, wanted):
                return tensor if wanted is None else tensor.redistribute(wanted)
            has_placed_grads = self._places_grads and isinstance(wanted, Shard)
            if tensor.requires_grad and torch.is_grad_enabled() and not has_placed_grads:
                reduce_grad_once(tensor)  # gradients, which may be partial, get the input's placement
            return tensor

        return map_nested(place, value)

    def _place_outputs(self, result: Any, *, is_plain: bool) -> Any:
        outputs = self._placements.outputs

        def place(tensor: torch.Tensor, placement: Placement | None) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            if is_compiling() and prepare_compiler():
                placed = compiled_forwards.place(tensor, self._graph_names[placement])
                return compiled_forwards.shard(placed) if is_plain else placed
            has_placed_grads = self._places_grads and isinstance(placement, Shard) and is_placed(tensor, placement)
            if placement is not None and not has_placed_grads:
                tensor = tensor.redistribute(placement)
            return tensor.to_local() if is_plain else tensor

        if outputs is None or isinstance(outputs, _PLACEMENT_TYPES):
            return map_nested(lambda tensor: place(tensor, outputs), result)
        if not isinstance(result, list | tuple) or len(result) != len(outputs):
            has_several = isinstance(result, list | tuple)
            what = counted(len(result), "output") if has_several else with_article(type(result).__name__)
            raise ValueError(
                f"the style declares {counted(len(outputs), 'output')}, {list(outputs)}, and the module gave {what}:"
                " declare one placement for all, or as many as there are outputs"
            )
        placed = [
            map_nested(functools.partial(place, placement=placement), one)
            for one, placement in zip(result, outputs, strict=True)
        ]
        return type(result)(*placed) if hasattr(result, "_fields") else type(result)(placed)


def _placements_in(value: Any) -> list[Placement]:
    """The placements that a style declares for inputs or outputs."""
    if value is None or isinstance(value, Placement):
        return [] if value is None else [value]
    return [one for one in (value.values() if isinstance(value, Mapping) else value) if one is not None]


class ReplicatedForward(ForwardWrapper):
    """The forward of a module of a model that is parallel inside and looks unsharded from outside.

    If it is called from outside of the model, plain inputs are replicated, and results are full plain tensors, unless
    some inputs are DTensors. Everywhere in the model plain tensors that its code makes count as replicated.
    """

    def __init__(self, forward: Callable[..., Any], path: str, state: ParallelState) -> None:
        super().__init__(forward)
        functools.update_wrapper(self, forward, updated=())  # not the attributes of a wrapper inside
        self._path, self._state = path, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        state = self._state
        if is_compiling() and prepare_compiler():
            return self._call_in_graph(args, kwargs)
        if (caller := ACTIVE_CHECK.get()) is not state.forward_check:
            with state.inside(self._path, is_by_model=caller is not None):
                return self._call_from_outside(args, kwargs, is_by_model=caller is not None)
        outer, state.forward_check.path = state.forward_check.path, self._path
        try:
            return self._forward(*args, **kwargs)
        except Exception:
            if (call := LOCAL_CALL.get()) is None or not call.is_trial:
                state.failed_path = state.failed_path or self._path
            raise
        finally:
            state.forward_check.path = outer

    def _call_in_graph(self, args: Any, kwargs: Any) -> Any:
        """Compute a forward that the compiler traces; see [Note: compiled parallel modules]."""
        state = self._state
        if state.graph_depth or find_dtensors([args, kwargs]):
            return self._forward(*args, **kwargs)
        compiled_forwards.begin_model(state.model_name)
        name = state.graph_name

        def replicate(tensor: torch.Tensor) -> torch.Tensor:
            return compiled_forwards.place(tensor, name)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return compiled_forwards.whole(tensor) if isinstance(tensor, DTensor) else tensor

        args, kwargs = map_nested(replicate, args), map_nested(replicate, kwargs)
        state.graph_depth += 1
        try:
            result = self._forward(*args, **kwargs)
        finally:
            state.graph_depth -= 1
        return map_nested(gather, result) if state.gathers else result

    def _call_from_outside(self, args: Any, kwargs: Any, *, is_by_model: bool) -> Any:
        """Compute a forward that is called from outside of the model, or by its own code outside, as ``generate``."""
        gathers = self._state.gathers and not find_dtensors([args, kwargs])
        self._state.forward_check.record_call(self._describe_call)
        replicate = functools.partial(self._replicate, is_by_model=is_by_model)
        args, kwargs = map_nested(replicate, args), map_nested(replicate, kwargs)
        result = map_nested(self._record_result, self._forward(*args, **kwargs))
        return map_nested(gather, result) if gathers else result

    def _describe_call(self) -> tuple[str, str]:
        """The facts of a call that must be the same on all ranks, for `ReplicaCheck.record_call`."""
        module: Any = getattr(inspect.unwrap(self._forward), "__self__", None)
        trained = [] if module is None else [one.requires_grad for one in module.parameters()]
        words = (
            f"{'with' if torch.is_grad_enabled() else 'without'} gradients of {sum(trained)} parameters in"
            f" {'training' if module is not None and module.training else 'evaluation'}, of model"
            f" {self._state.model_index} of the mesh"
        )
        return words, bytes(trained).hex()

    def _replicate(self, tensor: torch.Tensor, *, is_by_model: bool) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        mesh = self._state.mesh
        made = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, shape=tensor.shape)
        self._state.forward_check.record("the forward", tensor, mesh, is_due=is_by_model)
        return made

    def _record_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the ranks compare a plain tensor that the model returns, which no operator may have taken."""
        if is_plain(tensor):
            self._state.forward_check.record("the result", tensor, self._state.mesh)
        return tensor


_MODEL_COUNTS = "tensor_parallel.model_counts"
"""The group attachment that has, for each mesh, the number of parallel models that were made on it."""

_DIGEST_BYTES = 16

_WITH_GRADIENTS = "tensor_parallel.with_gradients"
"""The group attachment that has the meshes on which a forward with gradients ran: ranks may be in a backward there."""


class ParallelState:
    """The state that the modules of a parallel model share; ``model_index`` counts those that were made on the mesh.

    ``gathers``: results become full plain tensors if a module is called from outside. ``checks``: ranks compare each
    plain tensor when it is used, and the inputs too. ``replicates``: operators without a rule are computed replicated.
    """

    def __init__(
        self, mesh: DeviceMesh, *, gathers: bool, checks: bool, replicates: bool, model_index: int | None = None
    ) -> None:
        models = mesh.parent.attachments.setdefault(_MODEL_COUNTS, collections.Counter())
        models[mesh.identity] += model_index is None
        # A copy, which one rank may make alone, has the original's.
        self.model_index = models[mesh.identity] if model_index is None else model_index
        self.mesh, self.gathers, self.checks, self.replicates = mesh, gathers, checks, replicates
        self.failed_path = ""  # of the innermost module whose forward raised
        self.graph_depth = 0  # more than 0 while the compiler traces the inside of a forward
        self.graph_name = GraphPlacement(mesh, Replicate(), None).name
        self.trials: TrialQueue | None = None  # a queue if the model has blocks that are tried on local tensors
        self._replication_warnings = ReplicationWarnings() if replicates else None
        self.forward_check = self.make_check()  # the check of plain tensors in forwards
        self.backward_check = self.make_check()  # the check of plain tensors in backward
        self.model_name = compiled_forwards.name_model(self.forward_check)
        self._attach_backward_check()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        """The state of a copy of the model."""
        made = memo[id(self)] = ParallelState(
            self.mesh,
            gathers=self.gathers,
            checks=self.checks,
            replicates=self.replicates,
            model_index=self.model_index,
        )
        made.trials = None if self.trials is None else TrialQueue()
        return made

    def make_check(self) -> ReplicaCheck:
        """A check of plain tensors of the model's code."""
        return ReplicaCheck(self.mesh, immediate=self.checks, replication_warnings=self._replication_warnings)

    def _attach_backward_check(self) -> None:
        """Let backwards on the mesh have this model's check: it is the model whose forward runs last."""
        self.mesh.parent.attachments.setdefault(BACKWARD_CHECKS, {})[self.mesh.identity] = self.backward_check

    @contextlib.contextmanager
    def inside(self, path: str, *, is_by_model: bool) -> Iterator[None]:
        """A block in which the forward of the module at a path runs, called from outside of the model.

        An error in it names the module, and is one on all ranks of the mesh; in a method of the model
        (``is_by_model``) the method sees to that.
        """
        self._attach_backward_check()
        is_in_backward = current_backward_id() != -1
        if not is_in_backward:
            self.backward_check.forget()  # the records of a backward that raised
        self.failed_path = ""
        try:
            trials = [] if is_in_backward else self._begin_forward(path)
            with self.checking(self.forward_check), self._naming_module(path):
                for trial in trials:
                    trial.run()
                self.forward_check.path = path
                yield
        except Exception as error:
            if not is_in_backward:  # where torch's activation checkpoints end a forward by an error
                self._report(error, self.failed_path or path, is_by_model=is_by_model)
            raise

    def _naming_module(self, path: str) -> contextlib.AbstractContextManager[None]:
        """A block whose errors between ranks name the module; with ``checks`` they name it without."""
        if self.checks:
            return contextlib.nullcontext()

        def describe() -> str:
            inner = self.failed_path or path
            where = f", in module {inner!r}" if inner else ""
            return f"Rank {self.mesh.group.rank} was in a forward of a parallelized model{where}."

        return add_error_context(
            describe,
            "Every rank must call the model with the same inputs: parallelize(..., check=True) finds the first tensor"
            " that differs.",
        )

    def _begin_forward(self, path: str) -> list[Trial]:
        """Raise CollectiveMismatchError on all ranks unless all begin a forward of one module, alike in gradients.

        Returns the trials that all ranks make now.

        Another rank may be in a backward still, of any model on the mesh, or call another model: its collectives may
        look like those of this forward, and would take their elements. All ranks call this before a forward; it is an
        exchange once a forward with gradients has run, and always if the model has blocks to try.
        """
        group, identity = self.mesh.group, self.mesh.identity
        with_gradients: set[Any] = self.mesh.parent.attachments.setdefault(_WITH_GRADIENTS, set())
        wanted = [] if self.trials is None else self.trials.take_ready()
        is_agreed = True
        # With `checks` the forward begins by an exchange anyway.
        if (identity in with_gradients or self.trials is not None) and group.world_size > 1 and not self.checks:
            gradients = "with" if torch.is_grad_enabled() else "without"
            module = f"module {path!r} of " if path else ""
            call = f"{module}model {self.model_index} of the mesh, {gradients} gradients"
            with add_error_context(
                lambda: f"Rank {group.rank} was at the beginning of a forward of a parallelized model.",
                "A rank whose backward raises must not go on: let the error end its program.",
            ):
                own = xxhash.xxh3_128_digest(call.encode())
                if self.trials is not None:
                    own += digest(wanted)
                digests = share_bytes(group, "begin forward", own, group.timeout)
            is_agreed = len(set(digests)) == 1
            if len({one[:_DIGEST_BYTES] for one in digests}) > 1:
                calls: list[str] = all_gather_object(call, group=group)
                rank = next(rank for rank, one in enumerate(calls) if one != calls[0])
                raise CollectiveMismatchError(
                    f"the ranks of group {group.name!r} begin different forwards of parallelized models: rank 0 one of"
                    f" {calls[0]}, rank {rank} one of {calls[rank]}. Call models in the same order, and use"
                    " torch.no_grad() alike, on all ranks",
                    ranks=(rank,),
                )
        if torch.is_grad_enabled():
            with_gradients.add(identity)
        if wanted and not is_agreed:
            assert self.trials is not None, "they were in it"
            self.trials.put_back()
        return wanted if is_agreed else []

    def _report(self, error: Exception, path: str, *, is_by_model: bool) -> None:
        where = f"module {path!r}" if path else "the model"
        group = self.mesh.group
        if sys.version_info >= (3, 11) and not isinstance(error, DistributedError):
            error.add_note(
                f"This was in {where} of a parallelized model, on rank {group.rank} of group {group.name!r}."
            )
        if not is_by_model:
            report_failure(group, where, error)

    @staticmethod
    @contextlib.contextmanager
    def checking(check: ReplicaCheck) -> Iterator[None]:
        """A block in which plain tensors count as replicated; the ranks compare them at its end."""
        before = ACTIVE_CHECK.set(check)
        try:
            yield
            check.compare()
        finally:
            check.forget()
            ACTIVE_CHECK.reset(before)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
