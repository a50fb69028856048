"""A unit: parameters that are gathered, freed and reduced together."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from ferrodist.errors import UnsupportedOpError, add_error_context
from ferrodist.parallel.fsdp.shard_tensors import FlatShardParameter
from ferrodist.torch_private.autograd import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.flat_memory import GradientBuffer
    from ferrodist.parallel.fsdp.flat_param import FlatParameters

ADVICE = (
    "Every rank must call the same parts of the model in the same order, run as many forward and backward passes as the"
    " others, and use no_sync() when they do."
)

_SHARDS_INTACT = (
    "This rank's shards are intact, and sharded_state_dict() needs no other rank; the gradients of this step are lost,"
    " and so are the shards of ranks that are gone."
)


class UnitState(enum.Enum):
    """The state of a unit's parameters."""

    SHARDED = "sharded"  # each rank has its shard
    # `start_gather` was called; the module still has its shards. In shared memory nothing moves.
    GATHERING = "gathering"
    GATHERED = "gathered"  # the full parameters are there


class Unit:
    """Modules whose parameters are gathered together."""

    def __init__(
        self, index: int, name: str, module: torch.nn.Module, flats: Sequence[FlatParameters], group: Backend
    ) -> None:
        self.index, self.name, self.module, self.flats = index, name, module, tuple(flats)
        self.state = UnitState.SHARDED
        self._group = group
        self.num_gradients = 0  # number of gradients of the present backward
        self._versions: tuple[int, ...] = ()  # of the shards, when gathering started
        self.is_reducing = False
        self.has_full_params = False  # True if the module has full parameters; otherwise it has its shards

    @property
    def is_root(self) -> bool:
        """True for the outermost unit, whose forward is the model's."""
        return self.index == 0

    @property
    def title(self) -> str:
        """The unit's name in messages."""
        kind = type(self.module).__name__
        return f"unit {self.name!r} ({kind})" if self.name else f"the outermost unit ({kind})"

    @property
    def has_all_gradients(self) -> bool:
        """True if this backward has produced a gradient for each parameter that requires one."""
        return self.num_gradients >= sum(flat.num_trainable for flat in self.flats)

    def start_gather(self) -> None:
        """Start gathering, unless that has started."""
        if self.state is not UnitState.SHARDED:
            return
        self._versions = self.shard_versions()
        self.state = UnitState.GATHERING
        self._for_each_flat("gathering", lambda flat: flat.start_gather())

    def finish_gather(self) -> None:
        """Wait for the full parameters and install them in the module.

        Shards that have changed since the gathering began, as by an optimizer's step after a prefetch, or by a module's
        own forward, are gathered again: all ranks have changed them, at the same point of their program.
        """
        if self.state is UnitState.GATHERED:
            return
        self.start_gather()
        self._finish_gather()
        if self._versions != self.shard_versions():
            self.free()
            self.start_gather()
            self._finish_gather()

    def _finish_gather(self) -> None:
        self._for_each_flat("gathering", lambda flat: flat.finish_gather())
        self.state = UnitState.GATHERED
        self.has_full_params = True

    def label_shards(self, model: object) -> None:
        """Give this rank's shards the names and the model for errors about their use as parameters."""
        for flat in self.flats:
            for name, shard in zip(flat.names, flat.parameters, strict=True):
                if isinstance(shard, FlatShardParameter):
                    shard.title, shard.model = f"parameter {name!r} of {self.title}", model

    def set_module_params(self, *, full: bool) -> None:
        """Install the full parameters or the shards in the module of a gathered unit."""
        if self.state is UnitState.GATHERED:
            self.has_full_params = full
            for flat in self.flats:
                if full:
                    flat.install_full()
                else:
                    flat.install(flat.parameters)

    def free(self) -> None:
        """Free all but this rank's shards."""
        if self.state is UnitState.SHARDED:
            return
        changed: list[str] = []
        self._for_each_flat("freeing", lambda flat: changed.extend(flat.free()))
        self.state = UnitState.SHARDED
        self.has_full_params = False
        if changed:
            raise UnsupportedOpError(
                f"parameter {changed[0]!r} was changed on rank {self._group.rank} of group {self._group.name!r} while"
                " it was gathered, and the change is lost: change parameters inside summon_full_params(), or the"
                " shards, as an optimizer does",
                ranks=(self._group.rank,),
            )

    def shard_versions(self) -> tuple[int, ...]:
        """The version counters of the local shards."""
        return tuple(version_of(parameter) for flat in self.flats for parameter in flat.parameters)

    def check_unchanged(self, before: tuple[int, ...], *, until: str = "its backward") -> None:
        """Raise UnsupportedOpError if a shard was changed since the unit's forward."""
        if before != self.shard_versions():
            raise UnsupportedOpError(
                f"parameters of {self.title} were changed on rank {self._group.rank} of group {self._group.name!r}"
                f" between a forward and {until}: step the optimizer after the backward passes of all forwards before"
                " it, and change weights before they are used",
                ranks=(self._group.rank,),
            )

    def begin_summon(self) -> None:
        """Give the module full parameters that may be changed."""
        self._for_each_flat("summoning", lambda flat: flat.begin_summon())
        self._versions = self.shard_versions()
        self.state = UnitState.GATHERED
        self.has_full_params = True

    def end_summon(self, *, writeback: bool) -> bool:
        """Give the module its shards again; return whether they were changed meanwhile, which is kept."""
        has_begun = self.state is UnitState.GATHERED  # otherwise `begin_summon` failed, maybe after some of the flats
        has_changed = has_begun and self._versions != self.shard_versions()
        self.state = UnitState.SHARDED
        self.has_full_params = False
        for flat in self.flats:
            flat.end_summon(writeback=writeback and has_begun and not has_changed)
        return has_changed

    def start_reduce(self, buffer: GradientBuffer) -> None:
        """Start averaging the gradients; after `finish_reduce` the shards have them."""
        self.finish_reduce()
        self.is_reducing = True
        self._for_each_flat("averaging the gradients of", lambda flat: flat.gradients.start(buffer))

    def continue_reduce(self) -> None:
        """Wait for the average over the ranks that shard the model, and start that over the replicas, if any."""
        if self.is_reducing:
            self._for_each_flat("averaging the gradients of", lambda flat: flat.gradients.continue_reduce())

    def finish_reduce(self) -> None:
        """Wait for the averages that `start_reduce` started, if any."""
        if self.is_reducing:
            self._for_each_flat("averaging the gradients of", lambda flat: flat.gradients.finish())
            self.is_reducing = False

    def reset_after_failure(self) -> None:
        """Return to shards only, after a failure of the group."""
        for flat in self.flats:
            flat.reset_after_failure()
        self.state = UnitState.SHARDED
        self.has_full_params = False
        self.is_reducing = False

    def _for_each_flat(self, doing: str, action: Callable[[FlatParameters], object]) -> None:
        with add_error_context(
            lambda: f"Rank {self._group.rank} was {doing} {self.title} of an FSDP model. {_SHARDS_INTACT}", ADVICE
        ):
            for flat in self.flats:
                action(flat)
