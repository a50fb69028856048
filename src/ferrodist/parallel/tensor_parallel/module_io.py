"""A module's forward with inputs and outputs that lie as declared.

[Note: plain tensors]
A layer by itself gives what it gets: of distributed tensors it makes distributed ones. Plain tensors are this rank's
parts, and then what comes out is plain too, this rank's part of it. Inside of a module that is parallel as a whole
(`ReplicatedForward`) all is distributed, and plain tensors are those that the module's code has made: whole on every
rank, which the ranks compare; `plain` says how.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.parallel.module_guard import current_backward_id
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Placement, Replicate
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK, BACKWARD_CHECKS, is_plain
from ferrodist.tensor.replica_check import ReplicaCheck
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.parallel.tensor_parallel.styles import IOPlacements


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor replaced by what ``function`` makes of it; in containers and dataclasses too.

    Containers in which nothing is replaced are those that were given, so that what a module puts into them, as into a
    cache, is where its caller looks.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _replaced(value, list(value), [map_tensors(function, one) for one in value.values()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Some are made without all of their fields.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _replaced(value, names, [map_tensors(function, getattr(value, name)) for name in names])
    if not isinstance(value, list | tuple):
        return value
    made = [map_tensors(function, one) for one in value]
    if all(one is other for one, other in zip(made, value, strict=True)):
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def _replaced(value: Any, names: Sequence[Any], made: Sequence[Any]) -> Any:
    """A mapping or a dataclass with other values, or itself where they are the same."""
    before = [value[name] if isinstance(value, Mapping) else getattr(value, name) for name in names]
    if all(one is other for one, other in zip(made, before, strict=True)):
        return value
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(dict(zip(names, made, strict=True)))  # type: ignore[call-arg]
    other = copy.copy(value)  # some can't be made of their values alone, as a defaultdict
    for name, one in zip(names, made, strict=True):
        if isinstance(value, Mapping):
            other[name] = one
        else:
            object.__setattr__(other, name, one)  # also of frozen ones
    return other


def find_dtensors(value: Any) -> list[DTensor]:
    """The distributed tensors in a value."""
    found: list[DTensor] = []
    map_tensors(lambda tensor: found.append(tensor) if isinstance(tensor, DTensor) else None, value)
    return found


def find_arguments(forward: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a forward's arguments, those that are given by position first, and whether it takes others too."""
    parameters = inspect.signature(forward).parameters.values()
    others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind not in others]
    return names, len(names) < len(parameters)


class ShardedForward:
    """A forward around which inputs and outputs lie as a style says; see [Note: plain tensors].

    Args:
        forward: The module's own.
        mesh: Over which its parameters lie; of one axis.
        preparation: How tensors lie.
        given: How a plain input lies, for a layer by itself; None inside of a module that is parallel as a whole.
    """

    def __init__(
        self, forward: Callable[..., Any], mesh: DeviceMesh, preparation: IOPlacements, given: Placement | None = None
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._mesh, self._preparation, self._given = forward, mesh, preparation, given
        self._names, _ = find_arguments(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        is_plain = self._given is not None and not find_dtensors([args, kwargs])
        names = self._names
        args = tuple(
            self._prepare(value, self._wanted(place, names[place] if place < len(names) else ""))
            for place, value in enumerate(args)
        )
        kwargs = {
            name: self._prepare(value, self._wanted(names.index(name) if name in names else len(names), name))
            for name, value in kwargs.items()
        }
        result = self._forward(*args, **kwargs)
        return self._finish(result, is_plain=is_plain)

    def _wanted(self, place: int, name: str) -> Placement | None:
        """How an argument shall lie, however it is passed."""
        wanted = self._preparation.wanted
        if wanted is None or isinstance(wanted, Placement):
            return wanted
        if isinstance(wanted, Mapping):
            return wanted.get(name)
        return wanted[place] if place < len(wanted) else None

    def _prepare(self, value: Any, wanted: Placement | None) -> Any:
        given = self._given or Replicate()

        def prepare(tensor: torch.Tensor) -> DTensor:
            if not isinstance(tensor, DTensor):
                shape = tensor.shape if isinstance(given, Replicate | Partial) else None
                inside = ACTIVE_CHECK.get()
                if self._given is None and inside is not None and tensor.numel():
                    inside.record("the forward", tensor, self._mesh)
                tensor = DTensor.from_local(tensor, self._mesh, given, shape=shape)
            # Also where nothing moves: then gradients, which may be partial, are brought to lie as the input here.
            return tensor if wanted is None else tensor.redistribute(wanted)

        return map_tensors(prepare, value)

    def _finish(self, result: Any, *, is_plain: bool) -> Any:
        outputs = self._preparation.outputs

        def finish(tensor: torch.Tensor, placement: Placement | None) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            placed = tensor if placement is None else tensor.redistribute(placement)
            return placed.to_local() if is_plain else placed

        if outputs is None or isinstance(outputs, Placement):
            return map_tensors(lambda tensor: finish(tensor, outputs), result)
        if not isinstance(result, list | tuple) or len(result) != len(outputs):
            is_several = isinstance(result, list | tuple)
            what = counted(len(result), "output") if is_several else with_article(type(result).__name__)
            raise ValueError(
                f"the style declares {counted(len(outputs), 'output')}, {list(outputs)}, and the module gave {what}:"
                " declare one placement for all, or as many as there are outputs"
            )
        parts = [
            map_tensors(functools.partial(finish, placement=placement), one)
            for one, placement in zip(result, outputs, strict=True)
        ]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


class ReplicatedForward:
    """The forward of one of the modules of a model that is parallel inside and looks undivided from outside.

    Where it is called from outside of all others, plain tensors that come in are whole, the same on all ranks, and so
    are the results, unless some inputs are distributed. Everywhere in the model plain tensors that its code makes count
    as whole.

    Args:
        forward: The module's own, which may be prepared.
        path: The module's in the model.
        model: What the model's modules have in common.
    """

    def __init__(self, forward: Callable[..., Any], path: str, model: ParallelModel) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._path, self._model = forward, path, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        model = self._model
        if (caller := ACTIVE_CHECK.get()) is not model.plain:
            with model.inside(self._path):
                return self._compute_from_outside(args, kwargs, is_of_code=caller is not None)
        outer, model.plain.path = model.plain.path, self._path
        try:
            return self._forward(*args, **kwargs)
        finally:
            model.plain.path = outer

    def _compute_from_outside(self, args: Any, kwargs: Any, *, is_of_code: bool) -> Any:
        """Compute what is called from outside of all others, or by the model's own code, as `generate` is."""
        gathers = self._model.gathers and not find_dtensors([args, kwargs])
        spread = functools.partial(self._spread, is_of_code=is_of_code)
        args, kwargs = map_tensors(spread, args), map_tensors(spread, kwargs)
        result = map_tensors(self._note_result, self._forward(*args, **kwargs))
        return map_tensors(_gather, result) if gathers else result

    def _spread(self, tensor: torch.Tensor, *, is_of_code: bool) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        mesh = self._model.mesh
        made = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, shape=tensor.shape)
        self._model.plain.record("the forward", tensor, mesh, is_due=is_of_code)
        return made

    def _note_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have the ranks compare what the model's code made and returns plain: perhaps no operator has taken it."""
        if is_plain(tensor):
            self._model.plain.record("the result", tensor, self._model.mesh)
        return tensor


class ParallelModel:
    """What the modules of a model that is parallel as a whole have in common.

    Args:
        mesh: Over which its parameters lie.
        gathers: Whether results become plain where a module is called from outside.
        checks: Whether the ranks compare each plain tensor when it is used, and those that come in, too.
    """

    def __init__(self, mesh: DeviceMesh, *, gathers: bool, checks: bool) -> None:
        self.mesh, self.gathers, self.checks = mesh, gathers, checks
        self.plain = ReplicaCheck(mesh, immediate=checks)
        """The plain tensors that modules' forwards make."""
        self.backward = ReplicaCheck(mesh, immediate=checks)
        """Those that gradients take."""
        mesh.parent.attachments.setdefault(BACKWARD_CHECKS, {})[mesh.identity] = self.backward

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        """The same for a copy of the model."""
        made = memo[id(self)] = ParallelModel(self.mesh, gathers=self.gathers, checks=self.checks)
        return made

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Inside, the forward of the module of that path runs."""
        if current_backward_id() == -1:
            self.backward.forget()  # of a backward that raised
        with self._counting(self.plain):
            self.plain.path = path
            yield

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Inside, a method runs that calls forwards from outside of all others."""
        with self._counting(ReplicaCheck(self.mesh, immediate=self.checks)):
            yield

    @staticmethod
    @contextlib.contextmanager
    def _counting(plain: ReplicaCheck) -> Iterator[None]:
        """Inside, plain tensors count as whole, and the ranks compare them at the end."""
        before = ACTIVE_CHECK.set(plain)
        try:
            yield
            plain.compare()
        finally:
            plain.forget()
            ACTIVE_CHECK.reset(before)


class GatheredMethod:
    """A method of a model that calls its forwards and works on what they keep, as caches are: ``generate``.

    Args:
        method: The model's own.
        model: What the model's modules have in common.
    """

    def __init__(self, method: Callable[..., Any], model: ParallelModel) -> None:
        functools.update_wrapper(self, method)
        self._method, self._model = method, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; what it returns is plain."""
        with self._model.around():
            return map_tensors(_gather, self._method(*args, **kwargs))


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
