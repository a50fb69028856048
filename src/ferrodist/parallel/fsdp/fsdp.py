"""Fully sharded data parallelism: each rank stores a shard of the model, and gathers the unit that it computes with.

After S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020
(https://arxiv.org/abs/1910.02054), and Y. Zhao et al., "PyTorch FSDP", VLDB 2023 (https://arxiv.org/abs/2304.11277).
For a model of n elements on p ranks a step of FULL_SHARD sends 3 n (p - 1) / p elements from each rank: two all_gathers
and one reduce_scatter for each unit. On one host ranks compute with each other's large shards in shared memory
(`flat_memory.py`): only gradients move, and these all_gathers become tokens of a few bytes.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import torch

from ferrodist.arguments import check_bool, check_type
from ferrodist.parallel.fsdp.clip_grad import clip_gradients, unscale_gradients
from ferrodist.parallel.fsdp.config import MixedPrecision, ShardAxes, ShardingStrategy, check_prefetch
from ferrodist.parallel.fsdp.dtensor_params import mesh_groups, use_local_params
from ferrodist.parallel.fsdp.init import (
    broadcast_buffers,
    build_units,
    choose_device,
    describe_empty,
    find_device,
    verify_units,
)
from ferrodist.parallel.fsdp.optim_state_dict import OptimizerStateDict
from ferrodist.parallel.fsdp.scheduler import UnitScheduler
from ferrodist.parallel.fsdp.shard_tensors import allow_shards, forbid_shards
from ferrodist.parallel.fsdp.state_dict import ModelStateDict
from ferrodist.parallel.fsdp.unit import UnitState
from ferrodist.parallel.fsdp.wrap import find_units
from ferrodist.parallel.module_guard import ModuleGuard
from ferrodist.parallel.module_init import resolve_initialiser
from ferrodist.parallel.transparent_wrapper import TransparentWrapper, WrappedModule
from ferrodist.torch_private.compilers import outside_of_compiler
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.mesh import DeviceMesh


# The modules whose parameters are shards, with their FSDP.
_fsdp_modules: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[FSDP[Any]]] = weakref.WeakKeyDictionary()


class FSDP(TransparentWrapper, Generic[WrappedModule]):
    """Train one module on several ranks, each of which stores a shard of it; a drop-in for the module.

    Construction is a collective: every rank of the group passes the same module, whose parameters take rank 0's values.
    The module's `Parameter` objects become this rank's *local shards*: parts with as many dims, but other shapes, some
    of them empty. Optimizers step on these, whether they were made before or after. Inside forward and backward the
    module has its full parameters, unit by unit; writes to them there are lost, and an error where torch counts them.
    Buffers are each rank's own; batch norm over all ranks' batches is `convert_sync_batchnorm`.

    When ``backward()`` returns, each local shard has its share of the mean of all ranks' gradients. When each rank's
    loss is the mean over a batch of equal size, a step is that of one process with all ranks' batches joined. A
    parameter that has no gradient on this rank counts as zeros; one that has none on any rank keeps None. Gradients of
    several backward passes add up; inside `no_sync` they stay on the rank, unsharded, until a backward outside averages
    them.

    torch's norms and totals of shards and of their gradients are those of the full tensors, so
    `torch.nn.utils.clip_grad_norm_` and ``GradScaler.step`` are right: every rank must call them, and each tensor costs
    a small message (`clip_grad_norm_` of the FSDP sends one for all). Functions that need rows or columns of a gradient
    raise an error. So optimizers that need whole matrices (Muon, Shampoo, Adafactor) or all parameters at once (LBFGS)
    don't work on shards; nor do those that take norms of their own intermediate results (LAMB, LARS), which would be
    this rank's. Hooks on parameters are refused when FSDP is made; those registered on shards afterwards are never
    called in backward, which sees other parameters. A module that uses the parameters of a child without calling it
    must be in one unit with the child.

    Parameters may be DTensors, as `parallelize` makes them, over another axis of a mesh than that of FSDP, whose ranks
    all have the same local tensors. FSDP shards these local tensors; inside forward and backward the module has
    DTensors. Shards are plain tensors, and other `Parameter` objects than the module had: make optimizers after FSDP,
    as for parameters on the meta device. Norms for clipping and full states are those of the undivided model; every
    rank of the whole mesh calls the collecting methods, and each group's rank 0 passes a state that is loaded on rank 0
    alone::

        mesh = fd.DeviceMesh(None, (2, 4), ("data", "tensor"))
        fd.parallelize(model, mesh["tensor"], plan)
        fsdp = fd.FSDP(model, mesh["data"], wrap=Block)

    All ranks call the same units in the same order, otherwise they get `CollectiveMismatchError`; if only some fail in
    a forward, the others get `RankFailedError`. When communication between the ranks fails all of them raise; the
    shards are intact then, and `sharded_state_dict` still works.

    Args:
        module: The module, changed in place. Parameters may be on the meta device: then no rank ever holds more than
            its shards and one unit.
        group: All ranks; None is the default group. Or a `DeviceMesh` of one axis; or of two: replicas of the model
            along the first, the ranks that shard each along the second.
        strategy: The tensors that are sharded.
        wrap: The units, which are gathered together: a module class, several of them, or a function of a module's name
            and the module, such as `by_size` makes. The rest is one unit; None puts all into it.
        mixed_precision: Dtypes of computation and communication; the shards keep the parameters' own.
        cpu_offload: Keep shards, gradients and optimizer state on the CPU, where those of CPU modules are anyway.
            Refused for modules on a GPU.
        forward_prefetch: Number of units to gather before forward needs them, from the second forward on.
        backward_prefetch: Number of units to gather before backward needs them.
        reshard_after_forward: False keeps units gathered from forward to backward, as SHARD_GRAD_OP does.
        init: ``init(module)`` initialises a module's own parameters and buffers that were on the meta device; None
            calls ``module.reset_parameters()``, or in a transformers model its ``_init_weights(module)``. Every rank
            calls it; rank 0's values are taken. "empty" fills such parameters with NaN, for a load that follows: a rank
            then allocates its shards alone, and nothing is sent. Buffers are initialised as by None.
        device: The device for parameters and buffers that are on the meta device; None is that of the others, or the
            CPU.

    Raises:
        CollectiveMismatchError: On every rank, when the ranks' modules or settings differ, naming the first difference.
        UnsupportedOpError: On every rank, naming it: a parameter or buffer that collectives can't send or that can't be
            written to, or a parameter with hooks or of another FSDP or DDP.
        DistributedTimeoutError: A rank did not call in time.
        TypeError, ValueError: An argument is wrong; on every rank, when they have different local tensors of a DTensor.
    """

    module: WrappedModule

    def __init__(
        self,
        module: WrappedModule,
        group: Backend | DeviceMesh | None = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        wrap: object = None,
        mixed_precision: MixedPrecision | None = None,
        cpu_offload: bool = False,
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        reshard_after_forward: bool = True,
        init: Callable[[torch.nn.Module], object] | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(module, strategy, mixed_precision)
        check_prefetch(forward_prefetch=forward_prefetch, backward_prefetch=backward_prefetch)
        check_bool("cpu_offload", cpu_offload)
        check_bool("reshard_after_forward", reshard_after_forward)
        self.strategy = strategy
        """The sharding strategy."""
        self._precision = mixed_precision or MixedPrecision()
        self._axes = ShardAxes.make(group, strategy)
        initialise = resolve_initialiser(init, module)
        specs = find_units(module, wrap)
        reshards = strategy.reshards_after_forward and reshard_after_forward
        settings = f"{strategy.name}, {self._precision}, {forward_prefetch}, {backward_prefetch}, {reshards}"
        settings += describe_empty(specs, initialise)
        self._device = choose_device(find_device(specs, module, device), cpu_offload=cpu_offload)
        verify_units(specs, module, self._axes, settings, device=self._device)
        self.module = module
        with torch.inference_mode(mode=False), use_local_params(specs) as dtensor_specs:
            self._axes = replace(self._axes, other_groups=mesh_groups(dtensor_specs.values()))
            self._units = build_units(
                specs, self._axes, self._precision, initialise, dtensor_specs=dtensor_specs, device=self._device
            )
            self._flats = [flat for unit in self._units for flat in unit.flats]
            self._precision.convert_buffers(module)
            broadcast_buffers(module, self._axes.world)
            self._scheduler = UnitScheduler(
                self._units,
                self._axes,
                device=self._device,
                prefetch=(forward_prefetch, backward_prefetch),
                reshards_after_forward=reshards,
            )
        _fsdp_modules.update(dict.fromkeys(module.modules(), weakref.ref(self)))
        self._key = object()  # identifies the model to its shards, which don't hold it
        self._model_state = ModelStateDict(module, self._flats, self._axes)
        self._optimizer_state = OptimizerStateDict(self._flats, self._axes)
        for unit in self._units:
            unit.label_shards(self._key)
        self._guard = ModuleGuard(module, "FSDP", exchanges_parameters=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; every rank must."""
        args, kwargs = self._begin_forward(args, kwargs)
        if self._scheduler.is_in_method:
            return self.module(*args, **kwargs)
        output, succeeded = None, False
        try:
            output = self.module(*args, **kwargs)
            succeeded = True
        finally:
            self._end_forward(output, succeeded=succeeded)
        return output

    @outside_of_compiler
    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the outermost unit; returns the arguments in the dtype of computation."""
        self._guard.check_unchanged(type(self.module).__name__)
        args, kwargs = self._precision.cast(args, kwargs)
        if not self._scheduler.is_in_method:
            self._scheduler.pre_forward(self._units[0])
            forbid_shards(self._key)
        return args, kwargs

    @outside_of_compiler
    def _end_forward(self, output: Any, *, succeeded: bool) -> None:
        error = sys.exc_info()[1]
        allow_shards(self._key)
        self._scheduler.post_forward(self._units[0], output, succeeded=succeeded)
        if not succeeded and isinstance(error, Exception):
            self._axes.report_failure(f"the forward of an FSDP of {with_article(type(self.module).__name__)}", error)

    def _run_method(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of the model that `register_forward_method` has registered; every rank must."""
        scheduler = self._scheduler
        if scheduler.is_in_call:  # of the model's own code, or with full parameters
            return method(*args, **kwargs)
        self._guard.check_unchanged(type(self.module).__name__)
        args, kwargs = self._precision.cast(args, kwargs)
        scheduler.begin_method(name)
        forbid_shards(self._key)
        try:
            output = method(*args, **kwargs)
        except BaseException as error:
            allow_shards(self._key)
            scheduler.end_method(None, error)
            raise
        allow_shards(self._key)
        scheduler.end_method(output)
        return output

    # Gradients.

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside the block on this rank; all ranks alike.

        The next backward outside, or `sync_gradients`, averages them with its own. Until then ranks hold them
        unsharded, and the optimizer's ``zero_grad()`` doesn't know them: `zero_grad` of the FSDP drops them.
        """
        before, self._scheduler.is_syncing = self._scheduler.is_syncing, False
        try:
            yield
        finally:
            self._scheduler.is_syncing = before

    def sync_gradients(self) -> None:
        """Average the gradients that backward passes inside `no_sync` left on the ranks; every rank must call this.

        Backwards outside of it have averaged theirs; when no rank has others, nothing is sent.

        Raises:
            DistributedError: Communication between the ranks failed. The group has failed.
        """
        self._scheduler.reduce_all()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that the norm of the full model's is at most ``max_norm``; every rank must call this.

        Args:
            max_norm: The limit.
            norm_type: The p of the p-norm; ``math.inf`` for the largest element.
            error_if_nonfinite: Raise RuntimeError, on all ranks, when the norm is not finite, and change nothing.

        Returns:
            The norm before scaling, the same on all ranks: that of `torch.nn.utils.clip_grad_norm_` on the undivided
            model.
        """
        return clip_gradients(self._flats, self._axes, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.unscale_(optimizer)`` for sharded gradients; every rank must call, before ``scaler.step``.

        A gradient may be infinite in one rank's shard only: all ranks find it, as ``scaler.step`` does by itself.
        """
        unscale_gradients(scaler, optimizer, self._axes, self._device)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop all gradients, also those that `no_sync` left on this rank; all ranks alike."""
        super().zero_grad(set_to_none)
        self._scheduler.drop_unsynced()

    # Parameters.

    def prefetch_forward_params(self) -> None:
        """Start gathering the first units of the next forward, as while a batch is loaded; every rank must call this.

        After ``optimizer.step()``, not before: forward gathers again any unit that has changed since.
        """
        self._scheduler.prefetch_forward()

    @property
    def has_pending_prefetch(self) -> bool:
        """True if units are being gathered that no forward waits for yet."""
        return any(unit.state is UnitState.GATHERING for unit in self._units)

    @torch.no_grad()
    def broadcast_updated_params(self) -> None:
        """Broadcast the values of the first replica to all; every rank must call this.

        Ranks that shard the only replica send nothing: forward gathers updated values. Replicas stay equal by
        themselves as long as their optimizers do the same.
        """
        self._scheduler.recover()
        for flat in self._flats:
            flat.broadcast_to_replicas()

    @torch.no_grad()
    def update_shards(self, pieces: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Overwrite this rank's local shards, in the order of ``parameters()``.

        Args:
            pieces: One tensor for each parameter, with as many elements and the dtype of this rank's shard. Or all of
                them end to end, in a tensor of one dim.

        Raises:
            ValueError, TypeError: A tensor doesn't fit; nothing was written.
        """
        own = list(self.named_parameters())
        if isinstance(pieces, torch.Tensor):
            sizes = [parameter.numel() for _, parameter in own]
            if pieces.shape != (sum(sizes),):
                raise ValueError(
                    f"rank {self._axes.world.rank}'s shards have {sum(sizes)} elements in all, and update_shards got a"
                    f" tensor of shape {tuple(pieces.shape)}"
                )
            pieces = torch.split(pieces, sizes)
        values = list(pieces)
        if len(values) != len(own):
            has, got = counted(len(own), "parameter"), counted(len(values), "shard")
            raise ValueError(f"this model has {has}, and update_shards got {got}")
        for (name, parameter), value in zip(own, values, strict=True):
            if not isinstance(value, torch.Tensor) or value.dtype is not parameter.dtype:
                raise TypeError(f"the shard of {name!r} must be a tensor of {parameter.dtype}")
            if value.numel() != parameter.numel():
                raise ValueError(
                    f"rank {self._axes.world.rank}'s shard of {name!r} has {counted(parameter.numel(), 'element')}, not"
                    f" {value.numel()}"
                )
        self._scheduler.recover()
        for (_, parameter), value in zip(own, values, strict=True):
            parameter.copy_(value.reshape(parameter.shape))

    @contextlib.contextmanager
    def summon_full_params(self, *, writeback: bool = True) -> Iterator[None]:
        """Give the module full parameters inside the block, on every rank; every rank must enter.

        Args:
            writeback: Take each rank's shards from the parameters' values at the end; ranks that change them make the
                same changes. Not when the block raises. False drops changes.

        Raises:
            RuntimeError: The call is inside of a forward or backward.
        """
        self._scheduler.recover()
        self._scheduler.is_summoned = True
        succeeded = False
        try:
            for unit in self._units:
                unit.begin_summon()
            yield
            succeeded = True
        finally:
            self._scheduler.is_summoned = False
            changed = [unit for unit in self._units if unit.end_summon(writeback=writeback and succeeded)]
        if changed:
            raise RuntimeError(
                f"this rank's shards of {changed[0].title} were changed inside summon_full_params(), as by an"
                " optimizer's step: step outside of the block. Its full parameters were not written back."
            )

    # State dicts.

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The module's state dict with full parameters, as in one process; every rank must call this.

        Args:
            rank0_only: Other ranks of the group get an empty dict, and need the memory of one unit only.
        """
        self._scheduler.recover()
        return self._model_state.full(rank0_only=rank0_only)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Load parameters and buffers from a state dict with full parameters; every rank must call this.

        Args:
            state: The state dict, the same on all ranks; or on rank 0, and None on all others.

        Raises:
            ValueError: On every rank: names or shapes differ from the module's, or rank 0 alone has extra state that
                can't be sent. Nothing was written.
        """
        self._scheduler.recover()
        self._model_state.load_full(state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, without communication; it also works after the group has failed.

        Returns:
            ``parameters``: for each name the local shard (``piece``, flat), its first element (``start``) and the full
            ``shape``; ``buffers``; ``extra_state``; ``rank`` and ``world_size``; for DTensors ``parts``, a text for
            each that identifies this rank's local tensor, whose shape is ``shape``. All tensors are copies.
        """
        return self._model_state.sharded()

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shard of the state, of a model that was sharded in the same way.

        Raises:
            ValueError: The state is of another rank, sharding or module. Nothing was written.
        """
        self._scheduler.recover()
        self._model_state.load_sharded(state)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state with full tensors, by parameter names; every rank must call this."""
        return self._optimizer_state.full(optimizer)

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a result of `full_optimizer_state_dict`, for any number of ranks; every rank must call this.

        Raises:
            ValueError: On every rank: the state has other parameters or shapes. Nothing was loaded.
        """
        self._optimizer_state.load_full(optimizer, state)

    def sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's shard of an optimizer's state, by parameter names, without communication."""
        return self._optimizer_state.sharded(optimizer)

    def load_sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a result of `sharded_optimizer_state_dict` of this rank.

        Raises:
            ValueError: The state is of another rank, sharding or parameters. Nothing was written.
        """
        self._optimizer_state.load_sharded(optimizer, state)

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that `save_distributed` saves for this wrapper; its parameters are this rank's shards."""
        self._scheduler.recover()
        return self.module

    def inner_module(self) -> torch.nn.Module:
        """The module, also in the middle of a step."""
        return self.module

    @property
    def saves_buffers(self) -> bool:
        """True if this rank's buffers are saved."""
        return self._axes.world.rank == 0

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise TypeError: call the method for the full or for the sharded state."""
        raise TypeError(
            "each rank of an FSDP has a shard of the state: call full_state_dict() on every rank, or"
            " sharded_state_dict(). checkpoint.save_distributed takes the FSDP itself, not a module that contains it"
        )

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise TypeError: call the method for the full or for the sharded state."""
        raise TypeError(
            "each rank of an FSDP has a shard of the state: call load_full_state_dict() on every rank, or"
            " load_sharded_state_dict()"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an FSDP belongs to its group and can't be copied or pickled: save full_state_dict() or"
            " sharded_state_dict()"
        )


def fsdp_of(module: torch.nn.Module) -> FSDP | None:
    """The FSDP that a module is, or to which it belongs; None if there is none.

    Raises:
        ValueError: The module's parameters are shards of an FSDP that exists no more.
    """
    if isinstance(module, FSDP):
        return module
    reference = _fsdp_modules.get(module)
    fsdp = None if reference is None else reference()
    if reference is not None and fsdp is None:
        raise ValueError(
            f"{with_article(type(module).__name__)} belongs to an FSDP that exists no more: keep the FSDP as long as"
            " its model"
        )
    return fsdp


def _check_arguments(module: torch.nn.Module, strategy: object, mixed_precision: object) -> None:
    check_type(module, torch.nn.Module, "FSDP wraps a torch.nn.Module")
    if any(isinstance(each, FSDP) for each in module.modules()):
        raise ValueError("the module contains an FSDP: wrap once, from outside, and choose the units by wrap=")
    if any(each in _fsdp_modules for each in module.modules()):
        raise ValueError("the module belongs to an FSDP already, and its parameters are shards: build it anew")
    check_type(strategy, ShardingStrategy, "strategy must be a ShardingStrategy")
    check_type(mixed_precision, (MixedPrecision, NoneType), "mixed_precision must be a MixedPrecision or None")
