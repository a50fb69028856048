"""Flat parameters: parameters of one dtype, stored as shards and used in full, and their gradients.

    shard --all_gather--> full ==forward, backward==> full.grad
    full.grad --fill rows--> buffer --reduce_scatter--> this rank's row --replicas' allreduce--> shard.grad

A *shard* is a rank's equal part of the flat tensor in which all parameters lie end to end; see [Note: flat units] in
`flat_layout.py`. The buffer, which units take in turns, has a *row* for each of the ranks that shard the unit: the
gradients of that rank's shard, and behind them a gradient mask with one element for each parameter, 1 from a rank that
has a gradient for it, else 0.

[Note: two parameters for one]
The module's own `Parameter` objects live on as the local shards: their data becomes a part of this rank's flat shard,
and optimizers that hold them stay right, also those made before. While a unit is gathered, the module has other
`Parameter` objects in their place, the *full* ones, which share one flat memory. Autograd may hold them, and views of
them, from forward to backward. So the full ones are made once and keep their storage. There are three kinds of it:
- *copied*: it is emptied when the unit is freed, and filled again with the same values when it is gathered again.
  Filling uses a tensor with a version counter of its own, since nothing that autograd saved has changed;
- *shared*: a contiguous view of all ranks' shards, in memory that the ranks of one host share. There is no all_gather,
  since nothing has to move: `start_gather` does nothing, and `finish_gather` exchanges a token, before which each rank
  makes its last change to its shard. `flat_memory.py` says which shards; see [Note: shared shards] in `scheduler.py`;
- *alias*: the shard itself, when no other rank shards the unit.

If the version counter of a full one moves, but for an alias's, somebody has changed values in vain, which is an error.

Where parameters are this rank's local tensors of DTensors, the full ones are DTensors: see [Note: sharded DTensors] in
`dtensor_params.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from ferrodist.collectives.all_gather import all_gather, async_all_gather, async_reduce_scatter
from ferrodist.collectives.gather import scatter
from ferrodist.collectives.reduce import async_allreduce, broadcast
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.backward_hooks import check_dense
from ferrodist.parallel.fsdp.dtensor_params import local_tensor, same_placements, slice_local, wrap_detached
from ferrodist.parallel.fsdp.flat_memory import FlatMemory, alias_memory
from ferrodist.parallel.fsdp.shard_tensors import convert_to_shard, shard_groups_of
from ferrodist.tensor.dtensor import keep_grad_placements
from ferrodist.tensor.local_shards import FlatShard, annotate_flat_shard
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_parameters
from ferrodist.torch_private.tensors import plain_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_layout import FlatLayout
    from ferrodist.parallel.fsdp.flat_memory import GradientBuffer
    from ferrodist.parallel.fsdp.wrap import UnitSpec
    from ferrodist.tensor.spec import DTensorSpec


@dataclass(slots=True, kw_only=True)
class FlatGradients:
    """The gradients of `FlatParameters`."""

    names: Sequence[str]
    full_params: Sequence[torch.nn.Parameter]
    shards: Sequence[torch.nn.Parameter]
    layout: FlatLayout
    axes: ShardAxes
    # Over the ranks that shard; if none do, over the replicas:
    _first_reduction: PendingCollective[torch.Tensor] | None = None
    _replica_reduction: PendingCollective[torch.Tensor] | None = None
    _own_row: torch.Tensor | None = None

    @property
    def exist(self) -> bool:
        """True if a full parameter has a gradient that is not averaged yet."""
        return any(full.grad is not None for full in self.full_params)

    def drop(self) -> None:
        """Drop gradients that are not averaged."""
        for full in self.full_params:
            full.grad = None

    def reset_after_failure(self) -> None:
        """Forget running collectives, after a failure of the group."""
        self._first_reduction = self._replica_reduction = self._own_row = None
        self.drop()

    @torch.no_grad()
    def start(self, buffer: GradientBuffer) -> None:
        """Start averaging the full parameters' gradients, if there may be any, over the ranks, and drop them."""
        if not (self.exist or any(shard.requires_grad for shard in self.shards)):
            return
        check_dense(self.names, self.full_params, self.axes.world, wrapper="FSDP")
        axes, layout = self.axes, self.layout
        rows = buffer.acquire_after_previous(
            layout.num_shards * layout.row_size, layout.reduce_dtype, release=self.continue_reduce
        )
        self._fill(rows)
        self._own_row = rows.new_empty(layout.row_size)
        if axes.shard is not None:
            self._first_reduction = async_reduce_scatter(rows, ReduceOp.MEAN, group=axes.shard, out=self._own_row)
        elif axes.replicate is not None:
            self._first_reduction = async_allreduce(rows, ReduceOp.MEAN, group=axes.replicate, out=self._own_row)
        else:
            self._own_row.copy_(rows)

    def continue_reduce(self) -> None:
        """Wait for the average that `start` started, which frees the buffer, and start that over the replicas.

        The second is started only for a model that is sharded and replicated.
        """
        pending, self._first_reduction = self._first_reduction, None
        if pending is None:
            return
        row = pending.wait()
        if self.axes.shard is not None and self.axes.replicate is not None:
            self._replica_reduction = async_allreduce(row, ReduceOp.MEAN, group=self.axes.replicate, out=row)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the averages and add them to the gradients of the shards."""
        self.continue_reduce()
        if self._replica_reduction is not None:
            self._replica_reduction.wait()
            self._replica_reduction = None
        row, self._own_row = self._own_row, None
        if row is None:
            return
        layout = self.layout
        present = (row[layout.shard_size :][: len(self.shards)] != 0).tolist()
        for group in (self.axes.shard, self.axes.replicate):
            if group is not None and group.failure is not None:  # on a GPU wait() may return before the work has ended
                raise group.failure.fresh()
        means = row[: layout.shard_size]
        for index, parameter in enumerate(self.shards):
            if not present[index]:
                continue
            shard_range = layout.shard_range(index, self.axes.shard_rank)
            mean = layout.shape_shard(index, means[shard_range.offset :][: shard_range.size]).to(parameter.dtype).data
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.add_(mean)

    def _fill(self, rows: torch.Tensor) -> None:
        """Copy gradients and gradient mask to the rows, and drop the gradients."""
        layout = self.layout
        presence = rows.view(layout.num_shards, layout.row_size)[:, layout.shard_size :]
        presence.fill_(1)
        for index, full in enumerate(self.full_params):
            gradient, full.grad = full.grad, None
            if gradient is None:
                presence[:, index] = 0
            else:
                assert same_placements(gradient, full), "keep_grad_placements sees to it"
                gradient = layout.flatten(index, local_tensor(gradient))
            for shard_range in layout.shard_ranges(index):
                start = shard_range.rank * layout.row_size + shard_range.offset
                target = rows[start : start + shard_range.size]
                if gradient is None:
                    target.zero_()
                else:
                    target.copy_(gradient[shard_range.start :][: shard_range.size])


class FlatParameters:
    """The parameters of a unit that have one dtype; see [Note: two parameters for one], and `flat_layout.py`.

    ``parameters`` are the module's own, which become this rank's local shards; ``registrations`` the (module,
    attribute) pairs where each is registered; ``dtensor_specs`` are those of parameters that are local tensors of
    DTensors. ``memory`` is from `allocate_shards`, with zeros for the shard.
    """

    def __init__(
        self,
        names: Sequence[str],
        unit: UnitSpec,
        *,
        layout: FlatLayout,
        axes: ShardAxes,
        memory: FlatMemory,
        dtensor_specs: Mapping[str, DTensorSpec],
    ) -> None:
        self.names = tuple(names)
        self.parameters = [unit.parameters[name] for name in names]
        self.registrations = [unit.registrations[name] for name in names]
        self.layout = layout
        self.dtensor_specs = tuple(map(dtensor_specs.get, names))
        self._axes = axes
        self.shard, self._cast_buffer, self._shared_view = memory.shard, memory.cast_buffer, memory.shared_view
        self.is_alias = layout.num_shards == 1 and layout.param_dtype is layout.shard_dtype
        """True if the full parameters are the shard itself."""
        self.uses_shared_view = self._shared_view is not None  # other ranks compute with this rank's shard
        self._is_copied = not self.is_alias and not self.uses_shared_view
        self._full = self._allocate_full()
        self.full_params = [
            self._as_parameter(index, layout.unflatten(index, self._full[offset : offset + numel]).data)
            for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True))
        ]
        pairs = list(zip(self.names, self.full_params, strict=True))
        # Writes to to_local() of a DTensor move the version counter of its local tensor.
        local_tensors = [(name, local_tensor(full)) for name, full in pairs if name in dtensor_specs]
        self._versioned: list[tuple[str, torch.Tensor]] = [*pairs, *local_tensors]
        self._versions: list[int] = []
        self._hooked: set[int] = set()
        self._summoned: list[torch.nn.Parameter] = []
        self._addresses: list[int] = []  # of the local shards
        self.on_gradient: Callable[[], None] | None = None  # called when a full parameter has a new gradient
        self._gathering: PendingCollective[torch.Tensor] | None = None
        # The token's number of elements is the layout's own; see [Note: ids of layouts] in `layout_ids.py`.
        self._token = torch.zeros(layout.index + 1, dtype=torch.uint8, device=self.shard.device)
        self._tokens = self._token.new_empty(layout.num_shards * self._token.numel())
        self.gradients = FlatGradients(
            names=self.names, full_params=self.full_params, shards=self.parameters, layout=layout, axes=axes
        )
        self._empty()

    def _allocate_full(self) -> torch.Tensor:
        """The memory of the full parameters, of one of the three kinds of [Note: two parameters for one]."""
        if self.is_alias:
            return self.shard.data
        if self._shared_view is not None:
            return self._shared_view.tensor.view(self.layout.param_dtype)
        return torch.empty(self.layout.total_size, dtype=self.layout.param_dtype, device=self.shard.device)

    # Gathering.

    @torch.inference_mode(mode=False)
    def start_gather(self) -> None:
        """Start filling the full parameters, if they are copied; see [Note: two parameters for one]."""
        self._check_installed()
        if not self._is_copied:
            return
        self._full.untyped_storage().resize_(self._full.numel() * self._full.itemsize)
        source = self.shard
        if self._cast_buffer is not None:
            source = self._cast_buffer.copy_(self.shard)
        if self._axes.shard is None:
            self._full.copy_(source)
        else:
            dim = self.layout.dim
            shape = [1] * dim + [-1]
            out = alias_memory(self._full).view(shape)
            self._gathering = async_all_gather(source.view(shape), dim, group=self._axes.shard, out=out)

    @torch.inference_mode(mode=False)
    def finish_gather(self) -> None:
        """Wait for the full parameters, and install them."""
        self._wait_for_gather()
        if self.uses_shared_view:
            self._await_last_writes()
        elif self.layout.needs_disambiguation_token and self._axes.shard is not None:
            self._check_same_layout()
        self.install_full()

    def _await_last_writes(self) -> None:
        """Wait until all ranks have made their last change to the shards that this rank is about to read.

        It checks that they use the same layout, too.
        """
        self._exchange_tokens()

    def _check_same_layout(self) -> None:
        """Check that no rank has gathered another layout, where the gather itself would not have shown it."""
        self._exchange_tokens()

    def _exchange_tokens(self) -> None:
        all_gather(self._token, group=self._axes.shard, out=self._tokens)

    def _wait_for_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def install_full(self) -> None:
        """Install the full parameters in the module, with the shards' ``requires_grad``."""
        on_gradient = self.on_gradient  # hooks must not hold this object
        for index, (full, shard) in enumerate(zip(self.full_params, self.parameters, strict=True)):
            if full.requires_grad != shard.requires_grad:
                full.requires_grad_(shard.requires_grad)
            if full.requires_grad and on_gradient is not None and index not in self._hooked:
                self._hooked.add(index)
                if self.dtensor_specs[index] is not None:
                    keep_grad_placements(full)
                full.register_post_accumulate_grad_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]
        if not self._versions:
            self._versions = [version_of(tensor) for _, tensor in self._versioned]
        self.install(self.full_params)

    def free(self) -> list[str]:
        """Install the shards, and empty the full parameters; return names of those whose changes are lost."""
        self._wait_for_gather()  # it was prefetched, if it is not needed in the end
        self.install(self.parameters)
        versions, self._versions = self._versions, []
        if self.is_alias:
            return []
        self._empty()
        changed = [
            name
            for (name, tensor), before in zip(self._versioned, versions, strict=False)
            if version_of(tensor) != before
        ]
        if self._shared_view is not None and self._shared_view.has_own_pages:  # also after changes that no counter sees
            self._shared_view.restore()
        return changed

    def reset_after_failure(self) -> None:
        """Install the shards again after a failure of the group, and leave running collectives alone."""
        was_gathering, self._gathering = self._gathering is not None, None
        self.install(self.parameters)
        self.gradients.reset_after_failure()
        if not was_gathering:  # otherwise the engine may still use its address
            self._empty()

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """True if a tensor shares memory with the full parameters."""
        return local_tensor(tensor).untyped_storage().data_ptr() == self._full.untyped_storage().data_ptr()

    @property
    def num_trainable(self) -> int:
        """Number of the parameters that require grad."""
        return sum(parameter.requires_grad for parameter in self.parameters)

    # Values.

    def full_shape(self, index: int) -> tuple[int, ...]:
        """A parameter's full shape; for a local tensor of a DTensor that of the DTensor."""
        spec = self.dtensor_specs[index]
        return tuple(self.layout.shapes[index]) if spec is None else spec.shape

    def slice_local(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """The slice of a tensor of `full_shape` that this rank's shard group has together."""
        return slice_local(value, self.dtensor_specs[index])

    def gather_full(self) -> list[torch.Tensor]:
        """Copies of the full (local) parameters, in the dtype of the shards; every rank that shards them calls this."""
        joined = self.shard.clone() if self._axes.shard is None else all_gather(self.shard, group=self._axes.shard)
        layout = self.layout
        return [
            layout.unflatten(index, joined[offset : offset + numel])
            for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True))
        ]

    def scatter_from_rank0(self, values: Sequence[torch.Tensor] | None) -> None:
        """Fill the shards of all ranks from rank 0's full parameters; every rank calls this."""
        axes = self._axes
        if axes.shard is None:
            if values is not None:
                self.shard.copy_(self._pack(values))
        else:
            packed = self._pack(values or []) if axes.shard.rank == 0 else None
            scatter(packed, 0, group=axes.shard, out=self.shard)
        self.broadcast_to_replicas()

    def fill(self, value: float) -> None:
        """Fill this rank's shards with one number; padding stays zero."""
        for index in range(len(self.parameters)):
            owned = self.layout.shard_range(index, self._axes.shard_rank)
            self.shard[owned.offset :][: owned.size].fill_(value)

    def broadcast_to_replicas(self) -> None:
        """Broadcast the shards of the first replica to all; every rank calls this."""
        increment_version(self.parameters)  # the collectives write to the shards' memory without them
        if self._axes.replicate is not None:
            broadcast(self.shard, 0, group=self._axes.replicate, out=self.shard)

    def _pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay full parameters out in a flat tensor, in the dtype of the shard."""
        flat = torch.zeros(self.layout.total_size, dtype=self.shard.dtype, device=self.shard.device)
        for index, value in enumerate(values):
            offset = self.layout.offsets[index]
            flat[offset : offset + value.numel()].copy_(self.layout.flatten(index, value.detach()))
        return flat

    @torch.no_grad()
    def adopt_shards(self) -> None:
        """Make the module's own parameters this rank's local shards, also for checkpoints and for torch's functions."""
        layout, replicate = self.layout, self._axes.replicate
        for index, (parameter, spec) in enumerate(zip(self.parameters, self.dtensor_specs, strict=True)):
            owned = layout.shard_range(index, self._axes.shard_rank)
            local = layout.shape_shard(index, self.shard[owned.offset :][: owned.size]).data
            if parameter.device.type == "meta":
                self.parameters[index] = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
            else:
                parameter.data = local
            shard = FlatShard(
                shape=tuple(layout.shapes[index]),
                start=owned.start,
                spec=spec,
                num_shards=layout.num_shards,
                num_copies=1 if replicate is None else replicate.world_size,
                order=layout.dim_orders[index],
            )
            annotate_flat_shard(self.parameters[index], shard)
            groups = shard_groups_of(self._axes, spec)
            if groups is not None:
                convert_to_shard(self.parameters[index], groups)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.install(self.parameters)

    def shard_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor of the full (local) parameter's shape."""
        owned = self.layout.shard_range(index, self._axes.shard_rank)
        return self.layout.shape_shard(index, self.layout.flatten(index, value)[owned.start :][: owned.size])

    @torch.no_grad()
    def load(self, index: int, value: torch.Tensor) -> None:
        """Copy this rank's shard from a full (local) parameter."""
        self.parameters[index].copy_(self.shard_of(index, value.detach()))

    def begin_summon(self) -> None:
        """Give the module full parameters that may be changed, which are not those that forward uses."""
        self._summoned = [self._as_parameter(index, value) for index, value in enumerate(self.gather_full())]
        for each in self._summoned:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(_refuse_backward)  # type: ignore[no-untyped-call]
        self.install(self._summoned)

    def end_summon(self, *, writeback: bool) -> None:
        """Give the module its shards again, with the values of the full parameters if ``writeback``."""
        summoned, self._summoned = self._summoned, []
        self.install(self.parameters)
        if writeback:
            for index, value in enumerate(summoned):
                self.load(index, local_tensor(value))

    def _as_parameter(self, index: int, value: torch.Tensor) -> torch.nn.Parameter:
        """Wrap memory with a full local tensor as the module's kind of parameter."""
        spec = self.dtensor_specs[index]
        full = value if spec is None else wrap_detached(value, spec)
        return torch.nn.Parameter(full, requires_grad=self.parameters[index].requires_grad)

    def _empty(self) -> None:
        if self._is_copied:
            self._full.untyped_storage().resize_(0)

    def _check_installed(self) -> None:
        for name, parameter, registrations in zip(self.names, self.parameters, self.registrations, strict=True):
            for module, attribute in registrations:
                if own_parameters(module).get(attribute) is not parameter:
                    raise UnsupportedOpError(
                        f"parameter {name!r} was replaced by another after FSDP was made of the module: to change"
                        " values, use summon_full_params() or load_full_state_dict() (and not load_state_dict with"
                        " assign=True); change the module before FSDP"
                    )

        with plain_functions():
            moved = [
                name
                for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True)
                if parameter.dtype is not self.shard.dtype or (parameter.numel() and parameter.data_ptr() != address)
            ]
        if moved:
            raise UnsupportedOpError(
                f"this rank's shard of {moved[0]!r} was moved to other memory, as by module.to(dtype) or parameter.data"
                " = ..., and FSDP gathers the old one: change the module before FSDP, and values in place"
            )

    def install(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Install the full parameters or the shards in the module."""
        for parameter, registrations in zip(parameters, self.registrations, strict=True):
            for module, attribute in registrations:
                if type(module).__setattr__ is torch.nn.Module.__setattr__:
                    own_parameters(module)[attribute] = parameter  # setattr takes ten times as long
                else:  # recurrent layers have lists of their own
                    setattr(module, attribute, parameter)


def _refuse_backward(_: torch.Tensor) -> None:
    raise RuntimeError("a backward inside summon_full_params() makes gradients of parameters that exist in it only")
