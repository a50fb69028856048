"""Blocks of a parallel model, such as a decoder's layers, that compute on local tensors.

[Note: local blocks]
An operator on DTensors costs Python and a dispatch, and a block of a transformer has many. Most blocks need none:
their tensors are replicated outside of a pair of layers sharded by columns and by rows, and between the two each rank
has its own features or heads, on which the module's code computes as it would on all. Such a block runs on plain
tensors; its sharded layers sum what has to be summed.

That code is right for this is not assumed but tried. The first forward of a kind (`_Kind`) is on DTensors; then the
block computes random inputs with random parameters in both ways, and the ranks compare results, and gradients if there
are any, bit by bit. If all are equal on all ranks, later forwards of that kind run on local tensors, else they go on
with DTensors: code that uses the number of heads or features, parameters in between, or dropout. A trial is no proof:
it does not see what changes the code's path later, so programs ask for local blocks.

A forward without gradients may also update a key-value cache, as in decoding: a trial works on copies of the cache, and
compares what is in them afterwards (`local_caches`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import DistributedError
from ferrodist.parallel.tensor_parallel.local_caches import (
    LocalCache,
    cached_tensors,
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
    from collections.abc import Callable, Iterable, Sequence

    from ferrodist.mesh import DeviceMesh

_REPLICATED = (Replicate(),)
_SIMPLE_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
_MOST_TRIALS = 2
"""The number of shapes of inputs with which a kind of forward is tried."""
_MOST_KINDS = 8
"""The number of kinds of a block's forward that are tried; a number among the arguments may be another in each."""


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

    settings: tuple[bool, ...]
    arguments: tuple[Any, ...]


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
        """Whether the parameters are still those that `parallelize` has made: FSDP has its own."""
        self._sizes: dict[_Kind, set[Any]] = {}
        self._distributed: set[_Kind] = set()
        """The kinds that failed a trial."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        if is_compiling() or LOCAL_CALL.get() is not None or not self._is_plain_call():
            return self._forward(*args, **kwargs)
        sizes: list[Any] = []
        try:
            kind = self._find_kind(args, kwargs, sizes)
        except NotLocalError:
            return self._forward(*args, **kwargs)
        is_untried = kind not in self._sizes and len(self._sizes) >= _MOST_KINDS
        if is_untried or kind in self._distributed:
            return self._forward(*args, **kwargs)
        tried = self._sizes.setdefault(kind, set())
        key = tuple(sizes)
        if key in tried or len(tried) >= _MOST_TRIALS:
            with contextlib.suppress(NotLocalError):
                return self._compute_locally(args, kwargs)
            self._distributed.add(kind)
            return self._forward(*args, **kwargs)
        return self._try_out(kind, key, args, kwargs)

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
        self._is_whole = all(id(parameter) in found for parameter in self._parameters)
        return self._parts

    def _find_kind(self, args: Any, kwargs: Any, sizes: list[Any]) -> _Kind:
        """The kind of a forward, whose sizes are added to a list. NotLocalError: it must be on DTensors."""
        settings = (
            torch.is_grad_enabled(),
            *[one.training for one in self._modules],
            *[parameter.requires_grad for parameter in self._parameters],
        )
        positional = tuple([self._describe_argument(one, sizes) for one in args])
        named = tuple([(name, self._describe_argument(one, sizes)) for name, one in kwargs.items()])
        return _Kind(settings, (positional, named))

    def _describe_argument(self, value: Any, sizes: list[Any]) -> Any:
        if not torch.is_grad_enabled() and is_cache(value):
            return type(value)
        return self._describe(value, sizes)

    def _describe(self, value: Any, sizes: list[Any]) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) and (
                value.placements != _REPLICATED or value.mesh.identity != self._mesh.identity
            ):
                raise NotLocalError
            if value.requires_grad and not isinstance(value, DTensor):
                raise NotLocalError
            sizes.append(value.shape)
            return (isinstance(value, DTensor), value.dtype, value.dim(), value.requires_grad)
        if type(value) in _SIMPLE_TYPES:
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

    def _try_out(self, kind: _Kind, sizes: Any, args: Any, kwargs: Any) -> Any:
        """Compute a forward on DTensors, and then try out its kind; all ranks do."""
        given = find_dtensors([args, kwargs])
        before = map_caches(copy_cache, args, kwargs)
        versions = [version_of(one) for one in given if not one.is_inference()]
        attributes = [dict(one.__dict__) for one in self._modules]
        generator = torch.get_rng_state()
        result = self._forward(*args, **kwargs)
        is_pure = (
            versions == [version_of(one) for one in given if not one.is_inference()]
            and torch.equal(generator, torch.get_rng_state())
            and all(_are_same(own, one.__dict__) for own, one in zip(attributes, self._modules, strict=True))
        )
        # Ranks may differ in the first, and the second takes all of them.
        if self._agree(is_pure) and self._agree(self._are_ways_equal(*before)):
            self._sizes[kind].add(sizes)
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
                structure, expected = _structure_of(result), _values_and_grads(result, inputs)
                expected += _find_cached(own_args, own_kwargs)
                result = self._compute_locally(args, kwargs, is_trial=True)
                is_similar, found = _structure_of(result) == structure, _values_and_grads(result, inputs)
                found += _find_cached(args, kwargs)
            except DistributedError:
                raise
            except Exception:  # noqa: BLE001 - the module's code can't compute on local tensors
                return False
        return is_similar and len(expected) == len(found) and all(map(_are_equal, expected, found))


def _structure_of(result: Any) -> Any:
    """A result but for the values of its tensors. NotLocalError: it has objects of other types."""
    if isinstance(result, torch.Tensor):
        return (type(result), result.dtype, result.shape)
    if type(result) in _SIMPLE_TYPES:
        return (type(result), result)
    if isinstance(result, Mapping):
        return (type(result), *[(name, _structure_of(one)) for name, one in result.items()])
    if isinstance(result, list | tuple):
        return (type(result), *map(_structure_of, result))
    raise NotLocalError


def _values_and_grads(result: Any, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors of a result, and the gradients of inputs by random gradients of these."""
    results = find_dtensors(result)
    roots = [one for one in results if one.requires_grad]
    leaves = [one for one in inputs if one.requires_grad]
    if not roots or not torch.is_grad_enabled():
        return list(results)
    cotangents = [random_like(one.detach(), 1000 + number) for number, one in enumerate(roots)]
    return [*results, *torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)]


def _find_cached(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The keys and values in the caches among the arguments of a forward."""
    return [tensor for one in [*args, *kwargs.values()] if is_cache(one) for tensor in cached_tensors(one)]


def _are_equal(one: Any, other: Any) -> bool:
    if {type(one), type(other)} != {DTensor}:
        return one is other
    return one.placements == other.placements and torch.equal(one.detach().to_local(), other.detach().to_local())


def _are_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return len(before) == len(after) and all(after.get(name) is value for name, value in before.items())
