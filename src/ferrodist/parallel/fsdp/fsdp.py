"""Fully sharded data parallelism: each rank holds a part of the model, and the whole only of what it computes with.

After S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020
(https://arxiv.org/abs/1910.02054), and Y. Zhao et al., "PyTorch FSDP", VLDB 2023 (https://arxiv.org/abs/2304.11277).
For a model of n elements on p ranks a step of FULL_SHARD sends 3 n (p - 1) / p elements from each rank: two all_gathers
and one reduce_scatter a unit. On one host only gradients move: ranks compute with each other's shards where they lie.

How a schedule is told of the calls of units.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from ferrodist.collectives.reduce import broadcast
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.fsdp.clip_grad import clip_gradients, unscale_gradients
from ferrodist.parallel.fsdp.config import MixedPrecision, ShardAxes, ShardingStrategy
from ferrodist.parallel.fsdp.dtensor_params import as_parts, find_groups, part_of
from ferrodist.parallel.fsdp.flat_shard import enter_forward, leave_forward
from ferrodist.parallel.fsdp.init import build_units, check_same_plan, find_device
from ferrodist.parallel.fsdp.memory import GradientBuffer
from ferrodist.parallel.fsdp.optim_state_dict import OptimizerState
from ferrodist.parallel.fsdp.scheduler import Schedule
from ferrodist.parallel.fsdp.state_dict import ModelState
from ferrodist.parallel.fsdp.wrap import plan_units
from ferrodist.parallel.module_guard import ModuleGuard
from ferrodist.parallel.wrapped_names import TransparentWrapper, WrappedModule
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.mesh import DeviceMesh
    from ferrodist.parallel.fsdp.unit import Unit

R = TypeVar("R")


def install_hooks(unit: Unit, schedule: Schedule) -> None:
    """Have the schedule told of a unit's calls, and have modules refuse to be called without their parameters."""

    def before(_module: torch.nn.Module, _args: object) -> None:
        schedule.before_call(unit)

    def after(_module: torch.nn.Module, _args: object, output: Any) -> None:
        schedule.after_call(unit, output, succeeded=output is not None or sys.exc_info()[0] is None)

    def check(module: torch.nn.Module, _args: object) -> None:
        if not unit.is_shown:
            raise RuntimeError(
                f"{with_article(type(module).__name__)} of {unit.title} was called where its parameters are not"
                " gathered: call the"
                " FSDP, or use summon_full_params()"
            )

    owners = {module for flat in unit.flats for places in flat.places for module, _ in places}
    for module in owners:
        module.register_forward_pre_hook(outside_of_compiler(check), prepend=True)
    if unit.number:
        unit.module.register_forward_pre_hook(outside_of_compiler(before), prepend=True)
        unit.module.register_forward_hook(outside_of_compiler(after), always_call=True)


def outside_of_compiler(function: Callable[..., R]) -> Callable[..., R]:
    """The same function, into which torch.compile of a module around it does not look.

    The compiler is slow to load, and asked only where somebody else has loaded it.
    """

    @wraps(function)
    def apart(*arguments: Any, **keywords: Any) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        disabled: Callable[..., R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments, **keywords)

    return apart


_wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that belong to an FSDP: their parameters are pieces."""


class FSDP(TransparentWrapper, Generic[WrappedModule]):
    """Train one module on several ranks, each of which holds a part of it; a drop-in for the module.

    Making it is a collective: every rank of the group gives the same module, whose parameters take rank 0's values. The
    module's `Parameter` objects become this rank's *pieces*: parts of as many dims, but other shapes, some of them
    empty. Optimizers step on these, made before or after. Inside forward and backward the module has its parameters
    whole, unit by unit; what is written to them there is lost, and an error where torch counts it. Buffers are each
    rank's own; batch norm over all ranks' batches is `convert_sync_batchnorm`.

    When ``backward()`` returns, each piece has its part of the mean of all ranks' gradients. When each rank's loss is
    the mean over a batch of equal size, a step is that of one process with all ranks' batches joined. A parameter that
    has no gradient on this rank counts as zeros; one that has none on any rank keeps None. Gradients of several
    backwards add up; inside `no_sync` they stay with the rank, whole, until a backward outside of it averages them.

    torch's norms and totals of pieces and of their gradients are those of the whole tensors, so
    `torch.nn.utils.clip_grad_norm_` and ``GradScaler.step`` are right: every rank must call them, and each tensor costs
    a small message (`clip_grad_norm_` of the FSDP sends one for all). What needs rows or columns of a gradient is an
    error. So optimizers that need whole matrices (Muon, Shampoo, Adafactor) or all parameters at once (LBFGS) don't
    work on pieces; nor do those that take norms of what they have computed from pieces (LAMB, LARS), whose numbers
    would be this rank's. Hooks on parameters are refused when FSDP is made; those registered on pieces afterwards are
    never called in backward, for it sees other parameters. A module that uses the parameters of a child without calling
    it must be in one unit with the child.

    Parameters may be DTensors, as `parallelize` makes them, over another axis of a mesh than that of FSDP, whose ranks
    all have the same parts. These are what FSDP divides; inside forward and backward the module has DTensors. Pieces
    are plain tensors, and other `Parameter` objects than the module had: make optimizers after FSDP, as for parameters
    on the meta device. Norms for clipping and whole states are those of the undivided model; every rank of the whole
    mesh calls what collects them, and each group's rank 0 gives what is loaded on rank 0 alone::

        mesh = fd.DeviceMesh(None, (2, 4), ("data", "tensor"))
        fd.parallelize(model, mesh["tensor"], plan)
        fsdp = fd.FSDP(model, mesh["data"], wrap=Block)

    All ranks call the same units in the same order, else they get `CollectiveMismatchError`. When something fails
    between the ranks all of them raise; the shards are whole then, and `sharded_state_dict` still works.

    Args:
        module: It is changed in place. Parameters may be on the meta device: then no rank ever holds more than its
            shards and one unit.
        group: All ranks; None is the default group. Or a `DeviceMesh` of one axis; or of two: along the first are
            copies of the model, along the second the ranks that divide each.
        strategy: What is divided.
        wrap: What is gathered together: a module class, several of them, or a function of a module's name and the
            module, such as `by_size` makes. The rest is one unit; None puts all into it.
        mixed_precision: Dtypes of computing and sending; the shards keep the parameters' own.
        cpu_offload: Keep shards, gradients and optimizer state on the CPU, where those of CPU modules are anyway.
            Refused for modules on a GPU.
        forward_prefetch: How many units to gather before forward needs them, from the second forward on.
        backward_prefetch: How many units to gather before backward needs them.
        reshard_after_forward: False keeps units whole from forward to backward, as SHARD_GRAD_OP does.
        init: ``init(module)`` gives a module's own parameters and buffers their values where they were on the meta
            device; None calls ``module.reset_parameters()``. Every rank calls it; rank 0's values count.
        device: Where parameters and buffers get memory that are on the meta device; None is where the others are, or
            the CPU.

    Raises:
        CollectiveMismatchError: On every rank, when the ranks' modules or settings differ, naming the first difference.
        UnsupportedOpError: On every rank, naming it: a parameter or buffer that collectives can't carry or nobody can
            write to, or a parameter with hooks or of another FSDP or DDP.
        DistributedTimeoutError: Some rank did not come.
        TypeError, ValueError: An argument is wrong; on every rank, when they have different parts of a DTensor.
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
        init: Callable[[torch.nn.Module], object] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(module, strategy, mixed_precision, init)
        for name, count in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} must be a number of units from 0, not {count!r}")
        for name, switch in (("cpu_offload", cpu_offload), ("reshard_after_forward", reshard_after_forward)):
            if not isinstance(switch, bool):
                raise TypeError(f"{name} must be True or False, not {type(switch).__name__}")
        self.strategy = strategy
        """What is divided over the ranks."""
        self._precision = mixed_precision or MixedPrecision()
        self._axes = ShardAxes.of(group, strategy)
        if any(each in _wrapped for each in module.modules()):
            raise ValueError("the module belongs to an FSDP already, and its parameters are pieces: build it anew")
        plans = plan_units(module, wrap)
        reshards = strategy.reshards_after_forward and reshard_after_forward
        settings = f"{strategy.name}, {self._precision}, {forward_prefetch}, {backward_prefetch}, {reshards}"
        self._device = _choose_device(find_device(plans, module, device), cpu_offload=cpu_offload)
        check_same_plan(plans, module, self._axes, settings, device=self._device)
        self.module = module
        with as_parts(plans) as layouts:
            self._axes = replace(self._axes, others=find_groups(layouts.values()))
            self._units = build_units(plans, self._axes, self._precision, init, layouts=layouts, device=self._device)
            self._precision.convert_buffers(module)
            self._give_buffers()
            self._schedule = Schedule(
                self._units,
                self._axes,
                GradientBuffer(_row_bytes(self._units), self._axes.shard or self._axes.replicate, self._device),
                prefetch=(forward_prefetch, backward_prefetch),
                reshards_after_forward=reshards,
            )
        _wrapped.update(module.modules())
        self._key = object()  # pieces know their model by it, and don't keep the model
        self._model_state = ModelState(module, self._units, self._axes)
        self._optimizer_state = OptimizerState(self._units, self._axes)
        for unit in self._units:
            install_hooks(unit, self._schedule)
            unit.name_pieces(self._key)
        self._guard = ModuleGuard(module, "FSDP", exchanges_parameters=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; every rank must."""
        root = self._units[0]
        self._guard.check_unchanged(type(self.module).__name__)
        args, kwargs = self._precision.cast((args, kwargs))
        outside_of_compiler(self._schedule.before_call)(root)
        output, succeeded = None, False
        outside_of_compiler(enter_forward)(self._key)
        try:
            output = self.module(*args, **kwargs)
            succeeded = True
        finally:
            outside_of_compiler(leave_forward)(self._key)
            outside_of_compiler(self._schedule.after_call)(root, output, succeeded=succeeded)
        return output

    # Gradients.

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside the block leave their gradients with this rank; all ranks alike.

        The next backward outside, or `sync_gradients`, averages them with its own. Until then ranks hold them whole,
        and the optimizer's ``zero_grad()`` doesn't know them: `zero_grad` of the FSDP drops them.
        """
        before, self._schedule.is_syncing = self._schedule.is_syncing, False
        try:
            yield
        finally:
            self._schedule.is_syncing = before

    def sync_gradients(self) -> None:
        """Average the gradients that backwards inside `no_sync` left on the ranks; every rank must call.

        Backwards outside of it have averaged theirs by themselves; when no rank has others, nothing is sent.

        Raises:
            DistributedError: What failed between the ranks. The group has failed.
        """
        if self._schedule.has_unsynced:
            self._schedule.reduce_all()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole model's is at most ``max_norm``; every rank must call.

        Args:
            max_norm: The limit.
            norm_type: Which p-norm; ``math.inf`` for the largest element.
            error_if_nonfinite: Raise RuntimeError, on all ranks, when the norm is not finite, and change nothing.

        Returns:
            The norm before, the same on all ranks: that of `torch.nn.utils.clip_grad_norm_` on the whole model.
        """
        flats = [flat for unit in self._units for flat in unit.flats]
        return clip_gradients(flats, self._axes, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.unscale_(optimizer)`` for gradients that are divided; every rank must call, before ``scaler.step``.

        A gradient may be infinite in one rank's piece only: all ranks find it, as ``scaler.step`` does by itself.
        """
        unscale_gradients(scaler, optimizer, self._axes, self._device)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop all gradients, also those that `no_sync` left with this rank; all ranks alike."""
        super().zero_grad(set_to_none)
        self._schedule.drop_unsynced()

    # Parameters.

    def prefetch_forward_params(self) -> None:
        """Begin to gather what the next forward needs first, as while a batch is loaded; every rank must call.

        After ``optimizer.step()``, not before: forward gathers again what has changed since.
        """
        self._schedule.prefetch_forward()

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether units are being gathered that nobody waits for yet."""
        return self._schedule.has_pending_prefetch

    @torch.no_grad()
    def broadcast_updated_params(self) -> None:
        """Give all copies of the model the values of the first; every rank must call.

        Ranks that divide the only copy send nothing: forward gathers what optimizers have updated. Copies stay equal by
        themselves as long as their optimizers do the same.
        """
        self._schedule.recover()
        for unit in self._units:
            for flat in unit.flats:
                flat.share_with_copies()

    @torch.no_grad()
    def update_shards(self, pieces: Sequence[torch.Tensor] | torch.Tensor) -> None:
        """Overwrite this rank's pieces, in the order of ``parameters()``.

        Args:
            pieces: One for each parameter, with as many elements and the dtype of this rank's piece. Or all of them
                end to end, in a tensor of one dim.

        Raises:
            ValueError, TypeError: One doesn't fit; nothing was written.
        """
        own = list(self.named_parameters())
        if isinstance(pieces, torch.Tensor):
            sizes = [parameter.numel() for _, parameter in own]
            if pieces.shape != (sum(sizes),):
                raise ValueError(
                    f"rank {self._axes.whole.rank}'s pieces have {sum(sizes)} elements in all, and update_shards got a"
                    f" tensor of shape {tuple(pieces.shape)}"
                )
            pieces = torch.split(pieces, sizes)
        values = list(pieces)
        if len(values) != len(own):
            has, got = counted(len(own), "parameter"), counted(len(values), "piece")
            raise ValueError(f"this model has {has}, and update_shards got {got}")
        for (name, parameter), value in zip(own, values, strict=True):
            if not isinstance(value, torch.Tensor) or value.dtype is not parameter.dtype:
                raise TypeError(f"the piece of {name!r} must be a tensor of {parameter.dtype}")
            if value.numel() != parameter.numel():
                raise ValueError(
                    f"rank {self._axes.whole.rank}'s piece of {name!r} has {counted(parameter.numel(), 'element')}, not"
                    f" {value.numel()}"
                )
        self._schedule.recover()
        for (_, parameter), value in zip(own, values, strict=True):
            parameter.copy_(value.reshape(parameter.shape))

    @contextlib.contextmanager
    def summon_full_params(self, *, writeback: bool = True) -> Iterator[None]:
        """Have all parameters whole inside the block, on every rank; every rank must enter.

        Args:
            writeback: Take each rank's pieces from what is in the parameters at the end; ranks that change them make
                the same changes. Not when the block raises. False drops changes.

        Raises:
            RuntimeError: This is inside of a forward or backward.
        """
        self._schedule.recover()
        self._schedule.is_summoned = True
        keeps = False
        try:
            for unit in self._units:
                unit.begin_summon()
            yield
            keeps = writeback
        finally:
            self._schedule.is_summoned = False
            changed = [unit for unit in self._units if unit.end_summon(keeps=keeps)]
        if changed:
            raise RuntimeError(
                f"this rank's pieces of {changed[0].title} were changed inside summon_full_params(), as by an"
                " optimizer's step: step outside of the block. Its whole parameters were not written back."
            )

    # States.

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The module's state dict with whole parameters, as one process has it; every rank must call.

        Args:
            rank0_only: Other ranks of the group get an empty dict, and need the memory of one unit only.
        """
        self._schedule.recover()
        return self._model_state.full(rank0_only=rank0_only)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Take parameters and buffers from a state dict with whole parameters; every rank must call.

        Args:
            state: The same on all ranks, or on rank 0, and None on all others.

        Raises:
            ValueError: On every rank: names or shapes differ from the module's, or rank 0 alone has extra state that
                can't be sent. Nothing was written.
        """
        self._schedule.recover()
        self._model_state.load_full(state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, without a message to any other rank; also after the group has failed.

        Returns:
            ``parameters``: for each name its ``piece`` (flat), where it starts (``start``) and the whole ``shape``;
            ``buffers``; ``extra_state``; ``rank`` and ``world_size``; of DTensors ``parts``, a text for each that says
            which part this is, and as ``shape`` that of the part. All tensors are copies.
        """
        return self._model_state.sharded()

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state, of a model divided in the same way.

        Raises:
            ValueError: It is of another rank, division or module. Nothing was written.
        """
        self._schedule.recover()
        self._model_state.load_sharded(state)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state with whole tensors, by parameter names; every rank must call."""
        return self._optimizer_state.full(optimizer)

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take what `full_optimizer_state_dict` gave, for any number of ranks; every rank must call.

        Raises:
            ValueError: On every rank: it is of other parameters or shapes. Nothing was loaded.
        """
        self._optimizer_state.load_full(optimizer, state)

    def sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state, by parameter names, without a message to any other rank."""
        return self._optimizer_state.sharded(optimizer)

    def load_sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take what `sharded_optimizer_state_dict` gave on this rank.

        Raises:
            ValueError: It is of another rank, division or parameters. Nothing was written.
        """
        self._optimizer_state.load_sharded(optimizer, state)

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that `save_distributed` saves when it is given this; its parameters are this rank's pieces."""
        self._schedule.recover()
        return self.module

    def inner_module(self) -> torch.nn.Module:
        """The module, as it is now: in the midst of a step too."""
        return self.module

    @property
    def saves_buffers(self) -> bool:
        """Whether it is this rank whose buffers are saved."""
        return self._axes.whole.rank == 0

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: say whether you want the whole or this rank's part."""
        raise TypeError(
            "each rank of an FSDP has a part of the state: call full_state_dict() on every rank, or"
            " sharded_state_dict(). checkpoint.save_distributed takes the FSDP itself, and no module that has it inside"
        )

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: say whether it is the whole or this rank's part."""
        raise TypeError(
            "each rank of an FSDP has a part of the state: call load_full_state_dict() on every rank, or"
            " load_sharded_state_dict()"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an FSDP belongs to its group and can't be copied or pickled: save full_state_dict() or"
            " sharded_state_dict()"
        )

    @torch.no_grad()
    def _give_buffers(self) -> None:
        if self._axes.whole.world_size > 1:
            for buffer in map(part_of, self.module.buffers()):
                broadcast(buffer, 0, group=self._axes.whole, out=buffer)


def _check_arguments(module: object, strategy: object, mixed_precision: object, init: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"FSDP wraps a torch.nn.Module, not {type(module).__name__}")
    if any(isinstance(each, FSDP) for each in module.modules()):
        raise ValueError("the module has an FSDP inside: wrap once, from outside, and let wrap= say what the units are")
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(f"strategy must be a ShardingStrategy, not {type(strategy).__name__}")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(f"mixed_precision must be a MixedPrecision or None, not {type(mixed_precision).__name__}")
    if init is not None and not callable(init):
        raise TypeError(f"init must be a function of a module or None, not {type(init).__name__}")


def _choose_device(device: torch.device, *, cpu_offload: bool) -> torch.device:
    """Where shards, gradients and whole parameters are."""
    if cpu_offload and device.type != "cpu":
        raise UnsupportedOpError(
            f"cpu_offload=True keeps a model on the CPU, and computes there; this one is on {device}: leave it out, or"
            " move the module with cpu()"
        )
    return device


def _row_bytes(units: Sequence[Unit]) -> int:
    """What the rows of the largest unit take."""
    return max(
        (flat.gradients.size_bytes for unit in units for flat in unit.flats if flat.num_trainable),
        default=0,
    )
