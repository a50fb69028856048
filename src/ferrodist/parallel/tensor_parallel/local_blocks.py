"""Blocks of a parallel model, such as a decoder's layers, that compute on local tensors.

[Note: local blocks]
An operator on DTensors costs Python and a dispatch, and a block of a transformer has many. Most blocks need none:
their tensors are replicated outside of a pair of layers sharded by columns and by rows, and between the two each rank
has its own features or heads, on which the module's code computes as it would on all. Such a block runs on plain
tensors; its sharded layers sum what has to be summed.

That code is right for this is not assumed but tried. The first forward of a kind (`Kind`) is on DTensors; then the
block computes random inputs with random parameters in both ways, and the ranks compare results, and gradients if there
are any, bit by bit. If all are equal on all ranks, later forwards of that kind run on local tensors, else they go on
with DTensors: code that uses the number of heads or features, parameters in between, or dropout.

A trial takes all ranks, so a rank notes that it wants one, and they agree at the beginning of the next forward
(`TrialQueue`). A rank that wants none, or wants one alone, computes on DTensors, which sends the same messages as local
tensors do.

A trial proves something only for code whose path stays the same. Attributes of the block's modules, and what is in
them, are compared in each forward (`BlockState`): if they have changed, kinds are tried anew. Sizes are tried again
when they have doubled. And a block stays on DTensors if its code reads values of tensors, takes gradients of tensors
that it does not own, or returns an input. Code can still have state that nobody sees, and a trial would change it. So
blocks of `KNOWN_PACKAGES` alone are tried, unless a program says that all may be.

A forward may also update a key-value cache: a trial works on copies of the cache, and compares what is in them
afterwards (`local_caches`).
"""

from __future__ import annotations

import contextlib
import functools
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import DistributedError
from ferrodist.parallel.tensor_parallel.block_state import BlockState, UnknownStateError
from ferrodist.parallel.tensor_parallel.block_trials import (
    SIMPLE_TYPES,
    Kind,
    Trials,
    are_equal,
    find_cached,
    generator_states,
    random_plain,
    refuse_reads,
    share_memory,
    structure_of,
    values_and_grads,
)
from ferrodist.parallel.tensor_parallel.forward_wrappers import ForwardWrapper, find_forward, has_own_forward
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
from ferrodist.tensor.dtensor import DTensor, is_grad_placement_hook, wrap_local
from ferrodist.tensor.op_strategy import find_all
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK
from ferrodist.tensor.redistribute import unrecorded
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.tensor.trial_values import random_like, with_random_values, without_values
from ferrodist.torch_private.autograd import backward_hooks, has_saved_tensor_hooks, version_of
from ferrodist.torch_private.compilers import is_compiling
from ferrodist.torch_private.modes import num_dispatch_modes, num_function_modes
from ferrodist.torch_private.modules import (
    has_global_hooks,
    has_hooks,
    is_compiled,
    own_buffers,
    own_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ferrodist.parallel.tensor_parallel.wrapped_forwards import ParallelState

_REPLICATED = (Replicate(),)
_MOST_KINDS = 8
"""The number of kinds of a block's forward that are tried; a number among the arguments may be another in each."""
_MOST_WANTED = 4
"""The number of trials of a kind that wait for other ranks."""
_MOST_STATES = 4
"""The number of states of a block's modules in which its forwards are tried."""

_ATTENTIONS = (None, "eager", "sdpa")
"""The attentions that a configuration of transformers may name: others are functions that programs register."""

KNOWN_PACKAGES = ("torch", "transformers", "peft")
"""The packages whose modules keep no state from forward to forward that `BlockState` does not see."""


def find_local_blocks(module: nn.Module, styles: Mapping[str, Style], *, takes_all: bool) -> dict[str, nn.Module]:
    """The modules by their paths that may compute on local tensors, of a model whose forwards are wrapped.

    The largest ones, but for those with several blocks of a class: a trial takes memory for a block's parameters.
    Unless ``takes_all``, only those of `KNOWN_PACKAGES`.
    """
    blocks = {
        path: one
        for path, one in module.named_modules()
        if type(one).forward is not nn.Module.forward
        and _is_block(path, one, styles)
        and (takes_all or all(map(_is_known, one.modules())))
    }
    found: dict[str, nn.Module] = {}
    for path, one in blocks.items():
        if not _is_inside_of_any(path, found) and not _has_repeated(path, blocks):
            found[path] = one
    return found


def _is_known(module: nn.Module) -> bool:
    """Return whether a module's class and functions among its attributes are of `KNOWN_PACKAGES`.

    Its forward is the class's: one that a program has put around it may have the name of that.
    """
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    functions = [one for one in vars(module).values() if isinstance(one, FunctionType | MethodType)]
    sources = [type(module), *functions]
    packages = {str(getattr(one, "__module__", "")).partition(".")[0] for one in sources}
    return packages <= set(KNOWN_PACKAGES) and attention in _ATTENTIONS and has_own_forward(module)


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
        forward = find_forward(one, LinearForward, NormForward)
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


class _BlockTrial:
    """A trial of a block with inputs of some sizes; see `Trial`."""

    def __init__(self, block: LocalBlock, kind: Kind, sizes: tuple[torch.Size, ...], args: Any, kwargs: Any) -> None:
        self._block, self._kind, self._sizes = block, kind, sizes
        self._args, self._kwargs = args, kwargs
        self._trials, self._state = block.trials[kind], block.state
        self.description = f"{block.name} {kind} {sizes}"

    def is_obsolete(self) -> bool:
        """Return whether the modules' state was taken anew since the trial was wanted."""
        return self._block.state is not self._state

    def is_ready(self) -> bool:
        """Return whether the block is as it was when the trial was wanted."""
        block, settings = self._block, self._kind.settings
        return (
            self._state is not None
            and self._state.is_current()
            and block.find_settings() == settings
            and not (torch.is_inference_mode_enabled() and torch.is_grad_enabled())
            and block.is_plain_call()
            and not any(map(_has_own_hooks, block.find_parameters()))
        )

    def run(self) -> None:
        """Compute random inputs in both ways."""
        group = self._block.mesh.group
        verdict = bytes([self._block.are_ways_equal(self._args, self._kwargs)])
        self._trials.wanted.discard(self._sizes)
        if set(share_bytes(group, "local block", verdict, group.timeout)) == {b"\1"}:
            self._trials.add(self._sizes)
            self._block.note_success()
        else:
            self._trials.has_failed = True

    def give_up(self) -> None:
        """Leave the kind on DTensors."""
        self._trials.has_failed = True


class LocalBlock(ForwardWrapper):
    """The forward of a block, on local tensors where that was tried with success; see [Note: local blocks].

    Args:
        module: The block, whose forward this becomes.
        model: The state of the model.
        name: The block's name, the same on all ranks.
    """

    def __init__(self, module: nn.Module, model: ParallelState, name: str) -> None:
        super().__init__(module.forward)
        functools.update_wrapper(self, self._forward, updated=())
        self._model, self.mesh, self.name = model, model.mesh, name
        self._module, self._modules = module, list(module.modules())
        self._local_modules: LocalModules | None = None
        self._placements = self._find_placements()
        """Those of the parameters that `parallelize` has made: FSDP's have others."""
        self.state: BlockState | None = None
        """The state of the modules for which `trials` are; None before the first forward, and if none is compared."""
        self._num_states = 0
        self._has_been_local = False
        """Whether a trial has succeeded, of this block or of the one that it is a copy of."""
        self.trials: dict[Kind, Trials] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of copies, whose modules are others and tried anew."""
        return {**self.__dict__, "_local_modules": None, "state": None, "_num_states": 0, "trials": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        check = ACTIVE_CHECK.get()
        if is_compiling() or LOCAL_CALL.get() is not None or check is None or check.is_immediate:
            return self._forward(*args, **kwargs)
        for one in find_all(torch.Tensor, [*args, *kwargs.values()]):
            if not isinstance(one, DTensor):
                check.record("the forward", one, self.mesh)
        # If other ranks may compute on local tensors, which record nothing more, this one doesn't either.
        with check.paused() if self._has_been_local else contextlib.nullcontext():
            return self._compute(args, kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        found: list[torch.Size] = []
        kind = self._find_kind(args, kwargs, found)
        trials = None if kind is None else self._find_trials(kind)
        if kind is None or trials is None:
            return self._forward(*args, **kwargs)
        sizes = tuple(found)
        if not trials.has_seen(sizes):
            if sizes in trials.wanted or len(trials.wanted) >= _MOST_WANTED:
                return self._forward(*args, **kwargs)
            return self._want_trial(kind, sizes, args, kwargs)
        with contextlib.suppress(NotLocalError):
            return self._compute_locally(args, kwargs)
        trials.has_failed = True
        return self._forward(*args, **kwargs)

    def _find_trials(self, kind: Kind) -> Trials | None:
        """The trials of a kind; None if its forwards are on DTensors."""
        if not (self.is_plain_call() and self._has_known_state()):
            return None
        if kind not in self.trials and len(self.trials) >= _MOST_KINDS:
            return None
        trials = self.trials.setdefault(kind, Trials())
        return None if trials.has_failed else trials

    def note_success(self) -> None:
        """Note that a trial has succeeded."""
        self._has_been_local = True

    def is_plain_call(self) -> bool:
        """Return whether nothing looks into the forward or changes what operators do."""
        return (
            not torch.is_autocast_enabled("cpu")
            and not num_function_modes()
            and not num_dispatch_modes()
            and not has_saved_tensor_hooks()
            and not any(map(has_hooks, self._modules[1:]))
            and not has_global_hooks()
            and not any(map(is_compiled, self._modules))
            and self._find_placements() == self._placements
        )

    def _has_known_state(self) -> bool:
        return (self.state is not None and self.state.is_current()) or self._take_state()

    def _take_state(self) -> bool:
        """Take the modules' state anew, for which nothing has been tried; return whether it can be compared."""
        self.state, self.trials, self._local_modules = None, {}, None
        if self._num_states < _MOST_STATES and list(map(id, self._module.modules())) == list(map(id, self._modules)):
            self._num_states += 1
            with contextlib.suppress(UnknownStateError):
                self.state = BlockState(self._modules)
        return self.state is not None

    def find_parameters(self) -> list[torch.Tensor]:
        """The block's parameters now."""
        return [one for module in self._modules for one in own_parameters(module).values() if one is not None]

    def _find_placements(self) -> list[Any]:
        return [getattr(one, "placements", None) for one in self.find_parameters()]

    def find_settings(self) -> tuple[bool, ...]:
        """The modes that decide the code's path, besides arguments and state."""
        return (
            torch.is_grad_enabled(),
            *[one.training for one in self._modules],
            *[one.requires_grad for one in self.find_parameters()],
        )

    def _find_kind(self, args: Any, kwargs: Any, sizes: list[torch.Size]) -> Kind | None:
        """The kind of a forward, whose sizes are added to a list; None if it must be on DTensors."""
        seen: set[int] = set()
        try:
            positional = tuple([self._describe_argument(one, sizes, seen) for one in args])
            named = tuple([(name, self._describe_argument(one, sizes, seen)) for name, one in kwargs.items()])
        except NotLocalError:
            return None
        return Kind(self.find_settings(), (positional, named))

    def _describe_argument(self, value: Any, sizes: list[torch.Size], seen: set[int]) -> Any:
        if is_cache(value):
            return type(value)
        return self._describe(value, sizes, seen)

    def _describe(self, value: Any, sizes: list[torch.Size], seen: set[int]) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor) and (
                value.placements != _REPLICATED or value.mesh.identity != self.mesh.identity
            ):
                raise NotLocalError
            if (value.requires_grad and not isinstance(value, DTensor)) or id(value) in seen:
                raise NotLocalError  # code may ask whether two are the same, and on local tensors they are not
            seen.add(id(value))
            sizes.append(value.shape)
            return (isinstance(value, DTensor), value.dtype, value.dim(), value.requires_grad)
        if type(value) in SIMPLE_TYPES:
            return (type(value), value)
        if type(value) is tuple:
            return tuple([self._describe(one, sizes, seen) for one in value])
        raise NotLocalError  # a list or a mapping may be written to

    def _compute_locally(self, args: Any, kwargs: Any, *, is_trial: bool = False) -> Any:
        mesh = self.mesh
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
                *[map_nested(_localize, one) for one in args],
                **{name: map_nested(_localize, one) for name, one in kwargs.items()},
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
            self._local_modules = LocalModules(self._module, self.mesh)
        return self._local_modules

    def _want_trial(self, kind: Kind, sizes: tuple[torch.Size, ...], args: Any, kwargs: Any) -> Any:
        """Compute a forward on DTensors, and want a trial of its kind unless it has other effects than its result."""
        trials, state = self.trials[kind], self.state
        given = find_dtensors([args, kwargs])
        before = map_caches(copy_cache, args, kwargs)
        versions = [version_of(one) for one in given if not one.is_inference()]
        generators = generator_states()
        result = self._forward(*args, **kwargs)
        is_pure = (
            versions == [version_of(one) for one in given if not one.is_inference()]
            and generators == generator_states()
            and state is not None
            and state.is_current()
        )
        if is_pure and self._model.trials is not None:
            trials.wanted.add(sizes)
            hollow = [map_nested(without_values, one) for one in before]
            self._model.trials.add(_BlockTrial(self, kind, sizes, *hollow))
        else:
            trials.has_failed = True
        return result

    def are_ways_equal(self, args: Any, kwargs: Any) -> bool:
        """Return whether random inputs give the same in both ways, with random parameters."""
        parameters, check = self.find_parameters(), ACTIVE_CHECK.get()
        assert check is not None, "in a forward of the model"
        numbers = iter(range(1 << 30))

        def draw(tensor: torch.Tensor) -> torch.Tensor:
            make = random_like if isinstance(tensor, DTensor) else random_plain
            return make(tensor, next(numbers))

        args, kwargs = map_nested(draw, args), map_nested(draw, kwargs)
        inputs = [*find_dtensors([args, kwargs]), *parameters]
        with with_random_values(parameters), unrecorded(), check.paused():
            try:
                own_args, own_kwargs = map_caches(copy_cache, args, kwargs)
                # First, for it may end before the code has an effect.
                with refuse_reads():
                    result = self._compute_locally(own_args, own_kwargs, is_trial=True)
                structure, is_apart = structure_of(result), not share_memory(result, inputs)
                found = values_and_grads([result, find_cached(own_args, own_kwargs)], inputs)
                result = self._forward(*args, **kwargs)
                is_similar = is_apart and structure_of(result) == structure
                expected = values_and_grads([result, find_cached(args, kwargs)], inputs)
                if any(
                    is_grad_placement_hook(hook)
                    for one in find_dtensors([args, kwargs])
                    for hook in backward_hooks(one).values()
                ):
                    return False  # its gradient is summed over ranks where all users of the input have added theirs
            except DistributedError:
                raise
            except Exception:  # noqa: BLE001 - the module's code can't compute on local tensors
                return False
        return is_similar and len(expected) == len(found) and all(map(are_equal, expected, found))


def _localize(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_own_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has hooks on gradients that a program registered, which a trial would call."""
    return not all(map(is_grad_placement_hook, backward_hooks(parameter).values()))
