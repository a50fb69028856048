"""A unit: parameters that are gathered, freed and reduced together."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from ferrodist.errors import UnsupportedOpError, add_error_context
from ferrodist.parallel.fsdp.flat_shard import Piece
from ferrodist.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.flat_param import FlatParameters
    from ferrodist.parallel.fsdp.memory import GradientBuffer

ADVICE = (
    "Every rank must call the same parts of the model in the same order, run as many forwards and backwards as the"
    " others, and use no_sync() when they do."
)

_KEPT = (
    "This rank's shards are whole, and sharded_state_dict() needs no other rank; the gradients of this step are lost,"
    " and so is what only ranks had that are gone."
)


class UnitState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    """Each rank has its shard."""
    GATHERING = "gathering"
    """They are under way; the module still has its pieces."""
    GATHERED = "gathered"
    """The module has them whole."""


class Unit:
    """Modules whose parameters are gathered together.

    Args:
        number: Its place among the model's units.
        name: Its module's name; empty for the whole model.
        module: Its module.
        flats: Its parameters, those of one dtype together.
        group: What errors name.
    """

    def __init__(
        self, number: int, name: str, module: torch.nn.Module, flats: Sequence[FlatParameters], group: Backend
    ) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.flats = tuple(flats)
        self.state = UnitState.SHARDED
        self._group = group
        self._num_gradients = 0
        self._versions: tuple[int, ...] = ()  # of the pieces, when the gathering started
        self.is_reducing = False
        self.is_shown = False
        """Whether the module has its parameters whole; else its pieces."""

    @property
    def title(self) -> str:
        """How messages call it."""
        kind = type(self.module).__name__
        return f"unit {self.name!r} ({kind})" if self.name else f"the outermost unit ({kind})"

    @property
    def is_undivided(self) -> bool:
        """Whether this rank has all of it, so that it can be whole from a forward's begin to its end."""
        return all(flat.is_alias for flat in self.flats)

    @property
    def is_trainable(self) -> bool:
        """Whether it has gradients to average."""
        return any(flat.num_trainable for flat in self.flats)

    @property
    def has_all_gradients(self) -> bool:
        """Whether this backward has brought a gradient for each of its parameters that requires one."""
        return self._num_gradients >= sum(flat.num_trainable for flat in self.flats)

    @property
    def has_gradients(self) -> bool:
        """Whether it has gradients that were not averaged yet."""
        return any(flat.gradients.are_there for flat in self.flats)

    def start_gather(self) -> None:
        """Begin to gather, unless that has begun or is done."""
        if self.state is not UnitState.SHARDED:
            return
        self._versions = self.count_changes()
        self.state = UnitState.GATHERING
        with add_error_context(lambda: self._doing("gathering"), ADVICE):
            for flat in self.flats:
                flat.start_gather()

    def finish_gather(self) -> None:
        """Have the parameters, whole.

        What has changed since the gathering began, as by an optimizer's step after a prefetch, or by a module's own
        forward, is gathered again: all ranks have changed it, in the same step of their program.

        Raises:
            DistributedError: What failed between the ranks.
        """
        if self.state is UnitState.GATHERED:
            return
        self.start_gather()
        self._finish_gather()
        if self._versions != self.count_changes():
            self.free()
            self.start_gather()
            self._finish_gather()

    def _finish_gather(self) -> None:
        with add_error_context(lambda: self._doing("gathering"), ADVICE):
            for flat in self.flats:
                flat.finish_gather()
        self.state = UnitState.GATHERED
        self.is_shown = True

    def name_pieces(self, model: object) -> None:
        """Have this rank's pieces know what they are, for who takes them for parameters while the model computes."""
        for flat in self.flats:
            for name, piece in zip(flat.names, flat.parameters, strict=True):
                if isinstance(piece, Piece):
                    piece.title, piece.model = f"parameter {name!r} of {self.title}", model

    def show(self, *, is_whole: bool) -> None:
        """Give the module, while the unit is gathered, its whole parameters or its pieces."""
        if self.state is UnitState.GATHERED:
            self.is_shown = is_whole
            for flat in self.flats:
                if is_whole:
                    flat.install_full()
                else:
                    flat.install_pieces()

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the unit's whole parameters."""
        return any(flat.holds(tensor) for flat in self.flats)

    def free(self) -> None:
        """Give up all but this rank's shard.

        Raises:
            UnsupportedOpError: Somebody has changed a whole parameter, which is thrown away here. All is freed.
        """
        if self.state is UnitState.SHARDED:
            return
        with add_error_context(lambda: self._doing("freeing"), ADVICE):
            changed = [name for flat in self.flats for name in flat.free()]
        self.state = UnitState.SHARDED
        self.is_shown = False
        if changed:
            raise UnsupportedOpError(
                f"parameter {changed[0]!r} was changed on rank {self._group.rank} of group {self._group.name!r} while"
                " it was gathered, and the change is lost: change parameters inside summon_full_params(), or change the"
                " shards as an optimizer does",
                ranks=(self._group.rank,),
            )

    def count_changes(self) -> tuple[int, ...]:
        """A number for each piece, which moves when it is changed."""
        return tuple(version_of(parameter) for flat in self.flats for parameter in flat.parameters)

    def check_unchanged(self, before: tuple[int, ...], *, until: str = "its backward") -> None:
        """Raise UnsupportedOpError if a piece was changed since the unit's forward."""
        if before != self.count_changes():
            raise UnsupportedOpError(
                f"parameters of {self.title} were changed on rank {self._group.rank} of group {self._group.name!r}"
                f" between a forward and {until}: step the optimizer after the backwards of all forwards before it, and"
                " change weights before they are used",
                ranks=(self._group.rank,),
            )

    def begin_summon(self) -> None:
        """Give the module whole parameters that may be changed."""
        with add_error_context(lambda: self._doing("summoning"), ADVICE):
            for flat in self.flats:
                flat.begin_summon()
        self._versions = self.count_changes()
        self.state = UnitState.GATHERED
        self.is_shown = True

    def end_summon(self, *, keeps: bool) -> bool:
        """Take them away; with ``keeps`` the pieces become what they have become.

        Returns:
            Whether somebody has changed the pieces meanwhile; these changes are kept.
        """
        if self.state is not UnitState.GATHERED:
            return False
        self.state = UnitState.SHARDED
        self.is_shown = False
        has_changed = self._versions != self.count_changes()
        for flat in self.flats:
            flat.end_summon(keeps=keeps and not has_changed)
        return has_changed

    def note_gradient(self) -> bool:
        """Count a gradient that autograd has accumulated; whether it was the last one."""
        self._num_gradients += 1
        return self.has_all_gradients

    def forget_gradients(self) -> None:
        """Count anew: a backward begins."""
        self._num_gradients = 0

    def start_reduce(self, buffer: GradientBuffer) -> None:
        """Begin to average its gradients; after `finish_reduce` the pieces have them."""
        self.finish_reduce()
        self.is_reducing = True
        with add_error_context(lambda: self._doing("averaging the gradients of"), ADVICE):
            for flat in self.flats:
                if flat.num_trainable or flat.gradients.are_there:
                    flat.gradients.start(buffer)

    def settle(self) -> None:
        """Take an average over ranks that divide the model on to the copies of the model, if there are any."""
        if self.is_reducing:
            with add_error_context(lambda: self._doing("averaging the gradients of"), ADVICE):
                for flat in self.flats:
                    flat.gradients.settle()

    def finish_reduce(self) -> None:
        """Wait for the averages that `start_reduce` began, if any."""
        if self.is_reducing:
            with add_error_context(lambda: self._doing("averaging the gradients of"), ADVICE):
                for flat in self.flats:
                    flat.gradients.finish()
            self.is_reducing = False

    def abandon(self) -> None:
        """After a failure of the group: shards only."""
        for flat in self.flats:
            flat.abandon()
        self.state = UnitState.SHARDED
        self.is_shown = False
        self.is_reducing = False

    def _doing(self, what: str) -> str:
        return f"Rank {self._group.rank} was {what} {self.title} of an FSDP model. {_KEPT}"
