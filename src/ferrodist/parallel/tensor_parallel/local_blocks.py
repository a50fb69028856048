"""Blocks of a parallel model, such as a decoder's layers, that compute on local tensors.

[Note: local blocks]
An operator on DTensors costs Python and a dispatch, and a block of a transformer has many. Most blocks need none:
their tensors are replicated outside of a pair of layers sharded by columns and by rows, and between the two each rank
has its own features or heads, on which the module's code computes as it would on all. Such a block runs on plain
tensors; its sharded layers sum what has to be summed.

That code is right for this is not assumed but tried. The first forward of a kind (`_Kind`) is on DTensors; then the
block computes random inputs with random parameters in both ways, and the ranks compare results, and gradients if there
are any, bit by bit. If all are equal on all ranks, later forwards of that kind run on local tensors, else they go on
with DTensors: code that uses the number of heads or features, parameters in between, or dropout.

What may change the code's path later makes a forward one of another kind, which is tried anew: attributes of the
block's modules and what is in them, such as a configuration (`BlockState`), arguments, and sizes that are two times as
large. A block stays on DTensors if its code reads values of tensors, has state from forward to forward, takes gradients
of tensors that it does not own, or returns an input. A trial does not see what the code reads elsewhere: variables of
its module, or counters behind a function.

A forward without gradients may also update a key-value cache, as in decoding: a trial works on copies of the cache, and
compares what is in them afterwards (`local_caches`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import DistributedError
from ferrodist.parallel.tensor_parallel.block_state import BlockState
from ferrodist.parallel.tensor_parallel.block_trials import (
    SIMPLE_TYPES,
    RefuseReads,
    are_equal,
    find_cached,
    generator_states,
    share_memory,
    structure_of,
    values_and_grads,
)
from ferrodist.parallel.tensor_parallel.local_caches import (
    LocalCache,
    copy_cache,
    is_cache,
    map_caches,
)
from ferrodist.parallel.tensor_parallel.local_calls import LOCAL_CALL, LocalCall, NotLocalError
from ferrodist.parallel.tensor_parallel.local_forwards import LinearForward, NormForward
from ferrodist.parallel.tensor_parallel.local_modules import LocalModules
from ferrodist.parallel.tensor_parallel.styles import ColumnParallel, RowParallel, Style
from ferrodist.parallel.tensor_parallel.wrapped_forwards import find_dtensors, map_nested
from ferrodist.tensor.dtensor import DTensor, wrap_local
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK
from ferrodist.tensor.redistribute import unrecorded
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.tensor.trial_values import random_like, with_random_values
from ferrodist.torch_private.autograd import has_saved_tensor_hooks, version_of
from ferrodist.torch_private.compilers import is_compiling
from ferrodist.torch_private.modes import num_dispatch_modes, num_function_modes
from ferrodist.torch_private.modules import (
    has_global_hooks,
    has_hooks,
    is_compiled,
    own_buffers,
    own_modules,
    own_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh

_REPLICATED = (Replicate(),)
_LEAST_TRIALS = 2
"""The number of shapes of inputs with which a kind of forward is tried, even if they are about as large."""
_MOST_KINDS = 8
"""The number of kinds of a block's forward that are tried; a number among the arguments may be another in each."""
_MOST_STATES = 8
"""The number of states of a block's modules that are told apart; an attribute may be another in each forward."""


def find_local_blocks(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, nn.Module]:
    """The modules by their paths that may compute on local tensors, of a model whose forwards are wrapped.

    The largest ones, but for those with several blocks of a class: a trial takes memory for a block's parameters.
    """
    blocks = {
        path: one
        for path, one in module.named_modules()
        if type(one).forward is not nn.Module.forward and _is_block(path, one, styles)
    }
    found: dict[str, nn.Module] = {}
    for path, one in blocks.items():
        if not _is_inside_of_any(path, found) and not _has_repeated(path, blocks):
            found[path] = one
    return found


def _is_inside_of_any(path: str, outer: Iterable[str]) -> bool:
    return any(not one or path.startswith(f"{one}.") for one in outer if one != path)


def _has_repeated(path: str, blocks: Mapping[str, nn.Module]) -> bool:
    """Return whether a module has several of the blocks that are of one class."""
    inner = [one for one in blocks if _is_inside_of_any(one, [path])]
    kinds = [type(blocks[one]) for one in inner if not _is_inside_of_any(one, inner)]
    return len(set(kinds)) < len(kinds)


def _is_block(path: str, module: nn.Module, styles: Mapping[str, Style]) -> bool:
    """Return whether a module's parameters are those of linear layers and norms, sharded by columns and by rows."""
    found: set[type[Style]] = set()
    for inner, one in module.named_modules():
        style = styles.get(f"{path}.{inner}".strip("."))
        parameters = [each for each in own_parameters(one).values() if each is not None]
        if any(each is not None for each in own_buffers(one).values()):
            return False
        if style is None and not parameters:
            continue
        forward = _innermost(one.forward)
        if style is None or type(style) is Style:
            if _moves(style) or not isinstance(forward, LinearForward | NormForward):
                return False
            continue
        if not isinstance(forward, LinearForward) or not _is_even(style, parameters):
            return False
        found.add(type(style))
    return {ColumnParallel, RowParallel} <= found


def _moves(style: Style | None) -> bool:
    """Return whether a style shards parameters, or moves inputs or outputs."""
    return style is not None and bool(style.parameters or style.wanted is not None or style.outputs is not None)


def _innermost(forward: Any) -> Any:
    """The forward that a `ShardedForward` wraps, or the forward itself."""
    while not isinstance(forward, LinearForward | NormForward) and hasattr(forward, "__wrapped__"):
        inner = getattr(forward, "_forward", None)
        if inner is None:
            return forward
        forward = inner
    return forward


def _is_even(style: Style, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a layer's inputs, outputs and shards are those of a block, of equal size on all ranks."""
    if isinstance(style, ColumnParallel):
        fits = style.chunks == 1 and style.outputs == Shard(-1) and style.wanted in (None, Replicate())
    else:
        fits = isinstance(style, RowParallel) and style.outputs == Replicate()
    return fits and all(
        isinstance(one, DTensor)
        and not any(
            isinstance(placed, Shard) and one.shape[placed.dim] % (one.mesh.size * placed.blocks)
            for placed in one.placements
        )
        for one in parameters
    )


class _Kind(NamedTuple):
    """A kind of forwards that all run in the same way: what decides the code's path, but for sizes."""

    state: int
    settings: tuple[bool, ...]
    arguments: tuple[Any, ...]


class _Trials:
    """The sizes of inputs with which a kind of forwards was tried."""

    def __init__(self) -> None:
        self.sizes: set[tuple[torch.Size, ...]] = set()
        self._magnitudes: set[tuple[int, ...]] = set()

    def has_seen(self, sizes: tuple[torch.Size, ...]) -> bool:
        """Return whether inputs of these sizes need no trial."""
        is_new = len(self.sizes) < _LEAST_TRIALS and sizes not in self.sizes
        return not is_new and _magnitudes(sizes) in self._magnitudes

    def add(self, sizes: tuple[torch.Size, ...]) -> None:
        """Add the sizes of a trial that succeeded."""
        self.sizes.add(sizes)
        self._magnitudes.add(_magnitudes(sizes))


def _magnitudes(sizes: tuple[torch.Size, ...]) -> tuple[int, ...]:
    """For each dim the number of bits of its size."""
    return tuple([dim.bit_length() for size in sizes for dim in size])


class LocalBlock:
    """The forward of a block, on local tensors where that was tried with success; see [Note: local blocks]."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self._forward)
        self._mesh = mesh
        self._module, self._modules = module, list(module.modules())
        self._local_modules: LocalModules | None = None
        self._parameters = [
            parameter for one in self._modules for parameter in own_parameters(one).values() if parameter is not None
        ]
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        """The parameters, children and forwards inside of the block, each as a dictionary's entry."""
        self._numbers: list[tuple[dict[str, Any], int]] = []
        """The dictionaries of parameters and children, and the numbers of their entries."""
        self._is_whole = True
        """Whether modules and parameters are still those that `parallelize` has made: FSDP has its own."""
        self._states: list[BlockState] = []
        self._state = 0
        """The number of the last forward's state."""
        self._trials: dict[_Kind, _Trials] = {}
        self._distributed: set[_Kind] = set()
        """The kinds that failed a trial."""

    def __getstate__(self) -> dict[str, Any]:
        """What copies have: they find their own parts and states, and are tried anew."""
        state = dict(self.__dict__)
        state |= {"_local_modules": None, "_parts": [], "_numbers": [], "_states": [], "_state": 0, "_is_whole": True}
        return state | {"_trials": {}, "_distributed": set()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        if is_compiling() or LOCAL_CALL.get() is not None or not self._is_plain_call():
            return self._forward(*args, **kwargs)
        found: list[torch.Size] = []
        try:
            kind = self._find_kind(args, kwargs, found)
        except NotLocalError:
            return self._forward(*args, **kwargs)
        is_untried = kind not in self._trials and len(self._trials) >= _MOST_KINDS
        if is_untried or kind in self._distributed:
            return self._forward(*args, **kwargs)
        sizes = tuple(found)
        if self._trials.setdefault(kind, _Trials()).has_seen(sizes):
            with contextlib.suppress(NotLocalError):
                return self._compute_locally(args, kwargs)
            self._distributed.add(kind)
            return self._forward(*args, **kwargs)
        return self._try_out(kind, sizes, args, kwargs)

    def _is_plain_call(self) -> bool:
        """Return whether nothing looks into the forward or changes what operators do."""
        check = ACTIVE_CHECK.get()
        return (
            check is not None
            and not check.is_immediate
            and not torch.is_autocast_enabled("cpu")
            and not num_function_modes()
            and not num_dispatch_modes()
            and not has_saved_tensor_hooks()
            and not any(map(has_hooks, self._modules[1:]))
            and not has_global_hooks()
            and not any(map(is_compiled, self._modules))
            and all(owner.get(name) is part for owner, name, part in self._parts or self._find_parts())
            and all(len(owner) == number for owner, number in self._numbers)
            and self._is_whole
        )

    def _find_parts(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Find the parts, in the first forward, when the forwards inside have their wrappers."""
        for one in self._modules:
            for owner in (own_parameters(one), own_modules(one)):
                self._parts += [(owner, name, part) for name, part in owner.items()]
                self._numbers.append((owner, len(owner)))
            if "forward" in one.__dict__:
                self._parts.append((one.__dict__, "forward", one.__dict__["forward"]))
        found = {id(part) for _, _, part in self._parts}
        has_same_modules = list(map(id, self._module.modules())) == list(map(id, self._modules))
        self._is_whole = has_same_modules and all(id(parameter) in found for parameter in self._parameters)
        return self._parts

    def _find_state(self) -> int:
        """The number of the modules' state. NotLocalError: there were too many."""
        states = self._states
        if not states or not states[self._state].is_current():
            numbers = (number for number, one in enumerate(states) if one.is_current())
            self._state = next(numbers, len(states))
            if self._state == _MOST_STATES:
                self._is_whole, self._states = False, []  # which keep what attributes had
                raise NotLocalError
            if self._state == len(states):
                states.append(BlockState(self._modules))
        return self._state

    def _find_kind(self, args: Any, kwargs: Any, sizes: list[torch.Size]) -> _Kind:
        """The kind of a forward, whose sizes are added to a list. NotLocalError: it must be on DTensors."""
        settings = (torch.is_grad_enabled(), *[parameter.requires_grad for parameter in self._parameters])
        positional = tuple([self._describe_argument(one, sizes) for one in args])
        named = tuple([(name, self._describe_argument(one, sizes)) for name, one in kwargs.items()])
        return _Kind(self._find_state(), settings, (positional, named))

    def _describe_argument(self, value: Any, sizes: list[torch.Size]) -> Any:
        if not torch.is_grad_enabled() and is_cache(value):
            return type(value)
        return self._describe(value, sizes)

    def _describe(self, value: Any, sizes: list[torch.Size]) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) and (
                value.placements != _REPLICATED or value.mesh.identity != self._mesh.identity
            ):
                raise NotLocalError
            if value.requires_grad and not isinstance(value, DTensor):
                raise NotLocalError
            sizes.append(value.shape)
            return (isinstance(value, DTensor), value.dtype, value.dim(), value.requires_grad)
        if type(value) in SIMPLE_TYPES:
            return (type(value), value)
        if type(value) is tuple:
            return tuple([self._describe(one, sizes) for one in value])
        raise NotLocalError  # a list or a mapping may be written to

    def _compute_locally(self, args: Any, kwargs: Any, *, is_trial: bool = False) -> Any:
        mesh = self._mesh
        caches: list[LocalCache] = []

        def localize_cache(cache: Any) -> LocalCache:
            caches.append(LocalCache(cache, mesh))
            return caches[-1]

        def distribute(one: torch.Tensor) -> torch.Tensor:
            if isinstance(one, DTensor):
                raise NotLocalError
            return wrap_local(one, DTensorSpec.make(mesh, _REPLICATED, one.shape, one.dtype))

        args, kwargs = map_caches(localize_cache, args, kwargs)
        token = LOCAL_CALL.set(LocalCall(mesh, is_trial=is_trial))
        try:
            forward = self._forward if torch.is_grad_enabled() else self._find_local_modules().run
            result = forward(
                *[map_nested(self._localize, one) for one in args],
                **{name: map_nested(self._localize, one) for name, one in kwargs.items()},
            )
            return map_nested(distribute, result)
        except NotLocalError:
            for cache in caches:
                cache.undo()
            raise
        finally:
            LOCAL_CALL.reset(token)

    def _find_local_modules(self) -> LocalModules:
        if self._local_modules is None:
            self._local_modules = LocalModules(self._module, self._mesh)
        return self._local_modules

    def _localize(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        if (check := ACTIVE_CHECK.get()) is not None and tensor.numel():
            check.record("the forward", tensor, self._mesh)
        return tensor

    def _try_out(self, kind: _Kind, sizes: tuple[torch.Size, ...], args: Any, kwargs: Any) -> Any:
        """Compute a forward on DTensors, and then try out its kind; all ranks do."""
        given = find_dtensors([args, kwargs])
        before = map_caches(copy_cache, args, kwargs)
        versions = [version_of(one) for one in given if not one.is_inference()]
        generators = generator_states()
        result = self._forward(*args, **kwargs)
        is_pure = (
            versions == [version_of(one) for one in given if not one.is_inference()]
            and generators == generator_states()
            and self._states[kind.state].is_current()
        )
        # Ranks may differ in the first, and the second takes all of them.
        if self._agree(is_pure) and self._agree(self._are_ways_equal(*before)):
            self._trials[kind].add(sizes)
        else:
            self._distributed.add(kind)
        return result

    def _agree(self, verdict: bool) -> bool:  # noqa: FBT001 - what is agreed on
        group = self._mesh.group
        return all(one == b"\1" for one in share_bytes(group, "local block", bytes([verdict]), group.timeout))

    def _are_ways_equal(self, args: Any, kwargs: Any) -> bool:
        """Return whether random inputs give the same in both ways, with random parameters."""
        parameters = self._parameters
        numbers = iter(range(1 << 30))

        def draw(tensor: torch.Tensor) -> torch.Tensor:
            return random_like(tensor, next(numbers)) if isinstance(tensor, DTensor) else tensor

        args, kwargs = map_nested(draw, args), map_nested(draw, kwargs)
        inputs = [*find_dtensors([args, kwargs]), *parameters]
        with with_random_values(parameters), unrecorded():
            try:
                own_args, own_kwargs = map_caches(copy_cache, args, kwargs)
                result = self._forward(*own_args, **own_kwargs)
                structure, expected = structure_of(result), values_and_grads(result, inputs)
                expected += find_cached(own_args, own_kwargs)
                with RefuseReads():
                    result = self._compute_locally(args, kwargs, is_trial=True)
                is_similar = structure_of(result) == structure and not share_memory(result, inputs)
                found = values_and_grads(result, inputs)
                found += find_cached(args, kwargs)
            except DistributedError:
                raise
            except Exception:  # noqa: BLE001 - the module's code can't compute on local tensors
                return False
        return is_similar and len(expected) == len(found) and all(map(are_equal, expected, found))
