"""Parameters of one dtype, kept as shards and used whole: one parameter's way through FSDP.

    shard --gather--> full ==forward, backward==> full.grad --fill rows, average--> grad of the piece --> optimizer

[Note: two parameters for one]
The module's own `Parameter` objects live on as the pieces: their data becomes a part of this rank's shard, and what an
optimizer holds stays right, also one that was made before. While a unit is gathered, the module has other `Parameter`
objects in their places, the *full* ones, which share one flat memory. Autograd may keep them, and views of them, from
forward to backward. So the full ones are made once and keep their storage. There are three kinds of it:
- *copied*: it is emptied when the unit is freed, and filled again with the same values when it is gathered again.
  Filling goes through a tensor with a version counter of its own, for nothing that autograd saved has changed;
- *joined*: a view of all ranks' shards, side by side, in memory that the ranks share; nothing moves. See [Note: joined
  shards] in `scheduler.py`;
- *alias*: the shard itself, for nobody else divides the unit.

If a full one's counter moves, but for an alias's, somebody has changed what is thrown away, and that is an error.

Where parameters are this rank's parts of distributed ones, the full ones are distributed: see [Note: parts] in
`dtensor_params.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from ferrodist.collectives.all_gather import all_gather, async_all_gather
from ferrodist.collectives.gather import scatter
from ferrodist.collectives.reduce import broadcast
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.fsdp.dtensor_params import cut_part, part_of, wrap_part
from ferrodist.parallel.fsdp.flat_grad import FlatGradients
from ferrodist.parallel.fsdp.flat_shard import as_piece, division_of
from ferrodist.parallel.fsdp.memory import same_memory
from ferrodist.tensor.dtensor import keep_grad_placements
from ferrodist.tensor.local_shards import FlatShard, annotate_flat_shard
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_parameters
from ferrodist.torch_private.tensors import plain_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.collectives.work import PendingCollective
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.flat_layout import FlatLayout
    from ferrodist.parallel.fsdp.memory import FlatMemory
    from ferrodist.tensor.spec import DTensorSpec


class FlatParameters:
    """Some parameters of a unit, of one dtype; see [Note: two parameters for one] and [Note: flat units].

    Args:
        names: The parameters' names in the model.
        parameters: The module's own; they become this rank's pieces.
        places: Where each is registered: (module, attribute).
        layout: Where their elements lie.
        axes: Who divides and who averages.
        dtypes: In which they are gathered, and their gradients averaged.
        memory: Zeros for the shard, and what goes with it.
        distributed: How the tensors lie of which the parameters are this rank's parts; None for other parameters.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        places: Sequence[Sequence[tuple[torch.nn.Module, str]]],
        *,
        layout: FlatLayout,
        axes: ShardAxes,
        dtypes: tuple[torch.dtype, torch.dtype],
        memory: FlatMemory,
        distributed: Sequence[DTensorSpec | None],
    ) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        self.places = [list(each) for each in places]
        self.layout = layout
        self.distributed = tuple(distributed)
        self._axes = axes
        self._computed = dtypes[0]
        self.shard, self._traveller, self._joined = memory.shard, memory.traveller, memory.joined
        self._is_alias = layout.num_shards == 1 and self._computed is self.shard.dtype
        self._is_copied = not self._is_alias and self._joined is None
        self._full = self._make_memory()
        size = layout.number + 1
        self._token = torch.empty(size, dtype=torch.uint8, device=self.shard.device)
        self._tokens = torch.empty(layout.num_shards * size, dtype=torch.uint8, device=self.shard.device)
        self.fulls = [self._make_full(place) for place in range(len(self.parameters))]
        # What is written to a distributed tensor's part, as to_local() gives it, moves the part's counter.
        parts = [(name, part_of(full)) for name, full in zip(self.names, self.fulls, strict=True)]
        lying = [part for part, layout in zip(parts, self.distributed, strict=True) if layout is not None]
        self._counted = [*zip(self.names, self.fulls, strict=True), *lying]
        self._versions: list[int] = []
        self._hooked: set[int] = set()
        self._summoned: list[torch.nn.Parameter] = []
        self._addresses: list[int] = []  # of the pieces
        self._on_gradient: Callable[[], None] | None = None
        self._gathering: PendingCollective[torch.Tensor] | None = None
        self.gradients = FlatGradients(self.names, self.fulls, self.parameters, layout, axes=axes, dtype=dtypes[1])
        self._empty()

    # Gathering.

    @torch.inference_mode(mode=False)
    def start_gather(self) -> None:
        """Begin to fill the full parameters, where they don't lie in the shards.

        Raises:
            UnsupportedOpError: The program has put another parameter in the place of one.
        """
        self._check_installed()
        if not self._is_copied:
            return
        self._full.untyped_storage().resize_(self._full.numel() * self._full.itemsize)
        source = self.shard
        if self._traveller is not None:
            source = self._traveller.copy_(self.shard)
        if self._axes.shard is None:
            self._full.copy_(source)
        else:
            dim = self.layout.dim
            along = [1] * dim + [-1]
            out = same_memory(self._full).view(along)
            self._gathering = async_all_gather(source.view(along), dim, group=self._axes.shard, out=out)

    @torch.inference_mode(mode=False)
    def finish_gather(self) -> None:
        """Wait until the full parameters are there, and give them to the module."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._joined is not None or (self.layout.shares_dim and self._axes.shard is not None):
            all_gather(self._token, group=self._axes.shard, out=self._tokens)
        self.install_full()

    def install_full(self) -> None:
        """Put the full parameters where the module looks for them, with the pieces' ``requires_grad``."""
        for place, (full, piece) in enumerate(zip(self.fulls, self.parameters, strict=True)):
            if full.requires_grad != piece.requires_grad:
                full.requires_grad_(piece.requires_grad)
            if full.requires_grad and self._on_gradient is not None and place not in self._hooked:
                self._hooked.add(place)
                if self.distributed[place] is not None:
                    keep_grad_placements(full)
                _watch(full, self._on_gradient)
        if not self._versions:
            self._versions = [version_of(full) for _, full in self._counted]
        self._install(self.fulls)

    def install_pieces(self) -> None:
        """Give the module its pieces, though the full parameters are there."""
        self._install(self.parameters)

    def free(self) -> list[str]:
        """Give the module its pieces again and empty the full parameters.

        Returns:
            Names of parameters that were changed since they were gathered; those changes are lost.
        """
        if self._gathering is not None:  # started, and not wanted in the end
            self._gathering.wait()
            self._gathering = None
        self._install(self.parameters)
        versions, self._versions = self._versions, []
        if self._is_alias:
            return []
        self._empty()
        after = [version_of(full) for _, full in self._counted]
        if self._joined is not None and self._joined.has_own_pages:  # also of changes that no counter sees
            self._joined.restore()
        names = [name for name, _ in self._counted]
        return [name for name, old, new in zip(names, versions, after, strict=False) if old != new]

    def abandon(self) -> None:
        """After a failure of the group: the pieces come back, and what was under way is left alone."""
        was_gathering, self._gathering = self._gathering is not None, None
        self._install(self.parameters)
        self.gradients.abandon()
        if not was_gathering:  # else the engine may still have its address
            self._empty()

    @property
    def is_alias(self) -> bool:
        """Whether the full parameters lie in the shard itself, for it is all there is."""
        return self._is_alias

    @property
    def is_joined(self) -> bool:
        """Whether other ranks compute with this rank's shard as it lies, and may not find it changed meanwhile."""
        return self._joined is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the full parameters."""
        return part_of(tensor).untyped_storage().data_ptr() == self._full.untyped_storage().data_ptr()

    @property
    def num_trainable(self) -> int:
        """How many of the parameters require grad."""
        return sum(parameter.requires_grad for parameter in self.parameters)

    def watch(self, on_gradient: Callable[[], None]) -> None:
        """Have ``on_gradient()`` called for each full parameter's gradient, as autograd accumulates it."""
        self._on_gradient = on_gradient

    # Values.

    def whole_shape(self, place: int) -> tuple[int, ...]:
        """A parameter's shape; of a distributed one, of which this rank has a part, that of the whole tensor."""
        layout = self.distributed[place]
        return tuple(self.layout.shapes[place]) if layout is None else layout.shape

    def cut(self, place: int, value: torch.Tensor) -> torch.Tensor:
        """What of a tensor of `whole_shape` this rank and those that divide it with this one have together."""
        return cut_part(value, self.distributed[place])

    def gather_values(self) -> list[torch.Tensor]:
        """Copies of the parameters, of which ranks have pieces, in the dtype of the shards.

        Every rank that divides them calls this. Of distributed parameters they are this rank's parts.
        """
        joined = self.shard.clone() if self._axes.shard is None else all_gather(self.shard, group=self._axes.shard)
        layout = self.layout
        return [
            layout.unflatten(place, joined[offset : offset + numel])
            for place, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True))
        ]

    def take_values(self, values: Sequence[torch.Tensor] | None) -> None:
        """Fill the shards of all ranks from rank 0's whole parameters; every rank calls this.

        Args:
            values: The parameters; read on the first rank of each row, and of those only rank 0's count.
        """
        axes = self._axes
        if axes.shard is None:
            if values is not None:
                self.shard.copy_(self._pack(values))
        else:
            packed = self._pack(values or []) if axes.shard.rank == 0 else None
            scatter(packed, 0, group=axes.shard, out=self.shard)
        self.share_with_copies()

    def share_with_copies(self) -> None:
        """Give all copies of the model the shards of the first; every rank calls this."""
        increment_version(self.parameters)  # of the shards' memory, which is written without them
        if self._axes.replicate is not None:
            broadcast(self.shard, 0, group=self._axes.replicate, out=self.shard)

    def _pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay whole parameters out as they are when gathered, in the dtype of the shard."""
        flat = torch.zeros(self.layout.total_size, dtype=self.shard.dtype, device=self.shard.device)
        for place, value in enumerate(values):
            offset = self.layout.offsets[place]
            flat[offset : offset + value.numel()].copy_(self.layout.flatten(place, value.detach()))
        return flat

    def adopt_pieces(self) -> None:
        """Make the module's own parameters this rank's pieces."""
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters):
                part = self.piece_of_shard(place)
                if parameter.device.type == "meta":
                    replacement = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
                    self.parameters[place] = replacement
                else:
                    parameter.data = part
                self._mark(place)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._install(self.parameters)

    def _mark(self, place: int) -> None:
        """Let checkpoints know what the module's parameter is now."""
        copies = self._axes.replicate
        piece = FlatShard(
            shape=tuple(self.layout.shapes[place]),
            start=self.layout.piece(place, self._axes.shard_rank).start,
            spec=self.distributed[place],
            num_shards=self.layout.num_shards,
            num_copies=1 if copies is None else copies.world_size,
            order=self.layout.orders[place],
        )
        annotate_flat_shard(self.parameters[place], piece)
        division = division_of(self._axes, self.distributed[place])
        if division is not None:
            as_piece(self.parameters[place], division)

    def piece_of_shard(self, place: int) -> torch.Tensor:
        """The memory of this rank's piece of a parameter, in the shape that optimizers see."""
        piece = self.layout.piece(place, self._axes.shard_rank)
        return self.layout.shape_piece(place, self.shard[piece.offset :][: piece.size]).data

    @torch.no_grad()
    def load(self, place: int, value: torch.Tensor) -> None:
        """Take this rank's piece from a whole parameter."""
        piece = self.layout.piece(place, self._axes.shard_rank)
        part = self.layout.flatten(place, value.detach())[piece.start :][: piece.size]
        self.parameters[place].copy_(self.layout.shape_piece(place, part))

    def begin_summon(self) -> None:
        """Give the module whole parameters that may be changed, which are not those that forward uses."""
        self._summoned = [self._as_parameter(place, value) for place, value in enumerate(self.gather_values())]
        for each in self._summoned:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(_refuse_backward)  # type: ignore[no-untyped-call]
        self._install(self._summoned)

    def end_summon(self, *, keeps: bool) -> None:
        """Give the module its pieces again; with ``keeps``, of what the whole parameters have become."""
        summoned, self._summoned = self._summoned, []
        self._install(self.parameters)
        if keeps:
            for place, value in enumerate(summoned):
                self.load(place, part_of(value))

    def _make_full(self, place: int) -> torch.nn.Parameter:
        offset, numel = self.layout.offsets[place], self.layout.numels[place]
        view = self.layout.unflatten(place, self._full[offset : offset + numel])
        return self._as_parameter(place, view.data)

    def _as_parameter(self, place: int, value: torch.Tensor) -> torch.nn.Parameter:
        """A parameter as the module knows it, of memory that holds this rank's part of it."""
        layout = self.distributed[place]
        made = value if layout is None else wrap_part(value, layout)
        return torch.nn.Parameter(made, requires_grad=self.parameters[place].requires_grad)

    def _make_memory(self) -> torch.Tensor:
        """Where the full parameters lie."""
        if self._is_alias:
            return self.shard.data
        if self._joined is not None:
            return self._joined.tensor.view(self._computed)
        return torch.empty(self.layout.total_size, dtype=self._computed, device=self.shard.device)

    def _empty(self) -> None:
        if self._is_copied:
            self._full.untyped_storage().resize_(0)

    def _check_installed(self) -> None:
        for name, parameter, places in zip(self.names, self.parameters, self.places, strict=True):
            for module, attribute in places:
                if own_parameters(module).get(attribute) is not parameter:
                    raise UnsupportedOpError(
                        f"parameter {name!r} was replaced by another after FSDP was made, which divides those that it"
                        " was made with: to change values, use summon_full_params() or load_full_state_dict() (and not"
                        " load_state_dict with assign=True); to change the module, do it before"
                    )

        with plain_functions():
            moved = [
                name
                for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True)
                if parameter.dtype is not self.shard.dtype or (parameter.numel() and parameter.data_ptr() != address)
            ]
        if moved:
            raise UnsupportedOpError(
                f"this rank's piece of {moved[0]!r} was given other memory, as by module.to(dtype) or parameter.data ="
                " ..., and what FSDP gathers is not there: change the module before FSDP, and values in place"
            )

    def _install(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self.places, strict=True):
            for module, attribute in places:
                if type(module).__setattr__ is torch.nn.Module.__setattr__:
                    own_parameters(module)[attribute] = parameter  # setattr takes ten times as long
                else:  # recurrent layers keep lists of their own
                    setattr(module, attribute, parameter)


def _refuse_backward(_: torch.Tensor) -> None:
    raise RuntimeError("a backward inside summon_full_params() makes gradients of parameters that end with the block")


def _watch(full: torch.nn.Parameter, on_gradient: Callable[[], None]) -> None:
    full.register_post_accumulate_grad_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]
