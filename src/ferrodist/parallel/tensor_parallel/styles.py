"""Parallel styles: how a plan shards a module's parameters, and the placements of its inputs and outputs.

Shapes: B batch, T sequence, C features in, O features out, p ranks. The column, row and vocabulary styles are those of
M. Shoeybi et al., "Megatron-LM", 2019, and the sequence style that of V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from typing_extensions import override

from ferrodist.arguments import check_type
from ferrodist.tensor.placement import Placement, Replicate, Shard
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IOPlacements:
    """The placements to which a module's inputs and outputs are redistributed.

    ``wanted`` is for the inputs: one placement for all, one for each argument in order, or by the names of arguments,
    however these are passed; ``outputs`` is one for all outputs, or one for each. None leaves them as they are.
    """

    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = None
    outputs: Placement | Sequence[Placement | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Replicated parameters, and inputs and outputs as declared: for modules of any class.

    Args:
        parameters: The placements of the module's own parameters, by name; those not named are replicated.
        wanted: The placements of the forward's inputs; see `IOPlacements`.
        outputs: The placements of the outputs.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = None
    outputs: Placement | Sequence[Placement | None] | None = None

    def check(self, name: str, module: nn.Module) -> None:
        """Raise unless the style fits a module.

        Args:
            name: The module's path, for the error.
            module: The module.

        Raises:
            TypeError: The module has another class than the style is for.
            ValueError: The module lacks one of the parameters, or has an option that the style can't shard.
        """
        check_type(
            self.parameters, Mapping, f"the style of module {name!r} must have parameters= of placements by name"
        )
        own = {key for key, _ in module.named_parameters(recurse=False)}
        if unknown := sorted(set(self.parameters) - own):
            raise ValueError(f"module {name!r} has no parameter {unknown[0]!r}: it has {sorted(own)}")

    def fitted(self, module: nn.Module) -> Style:
        """The style itself, or another one for the same sharding of a module whose code works otherwise."""
        del module
        return self

    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        """The placement of one of the module's parameters."""
        del parameter
        return self.parameters.get(name, Replicate())

    def preparation(self) -> IOPlacements:
        """The placements of the module's inputs and outputs."""
        return IOPlacements(wanted=self.wanted, outputs=self.outputs)


def _refuse(style: Style, *names: str) -> None:
    """Raise if a field is given that the style decides by itself."""
    defaults = {one.name: one.default for one in fields(style)} | {"parameters": {}}
    for name in names:
        if getattr(style, name) != defaults[name]:
            raise TypeError(
                f"{type(style).__name__} sets {name} by itself: leave it out, or use Style for other placements"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerStyle(Style):
    """A style of one class of layers."""

    _layer: ClassVar[type[nn.Module]] = nn.Linear

    @override
    def check(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, self._layer):
            kind = with_article(type(module).__name__)
            raise TypeError(f"{type(self).__name__} shards an nn.{self._layer.__name__}, and {name!r} is {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel(_LayerStyle):
    """A linear layer sharded by its outputs: the weight (O, C) is (O/p, C) on each rank, the output (B, T, O/p).

    Each rank needs the full input: forward gathers a sharded one, and sends nothing for a replicated one. Backward sums
    the ranks' gradients of the input by an allreduce or a reduce_scatter.

    Args:
        wanted: `Replicate`, or None for layers that share an input whose placement the enclosing module sets: their
            gradients of it are summed before they are reduced over the ranks.
        outputs: ``Shard(-1)`` leaves the output sharded, `Replicate` gathers it.
        blocks: The number of layers that are fused in this one, such as 3 for queries, keys and values: each is sharded
            by itself.
        chunks: The number of chunks in which an input is gathered that is sharded along its next to last dim: each is
            gathered while the product of the one before is computed. 1 gathers all of it first.
    """

    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = Replicate()
    outputs: Placement | Sequence[Placement | None] | None = Shard(-1)
    blocks: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        _refuse(self, "parameters")
        for name in ("blocks", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ColumnParallel takes {name} of at least 1, not {value!r}")

    @override
    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        return Shard(0, blocks=self.blocks)

    @override
    def preparation(self) -> IOPlacements:
        outputs = Shard(-1, blocks=self.blocks) if self.outputs == Shard(-1) else self.outputs
        return IOPlacements(wanted=self.wanted if self.chunks == 1 else None, outputs=outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParallel(_LayerStyle):
    """A linear layer sharded by its inputs: the weight (O, C) is (O, C/p) on each rank, the input (B, T, C/p).

    Each rank has a partial sum, which forward reduces by an allreduce or a reduce_scatter; backward sends nothing, or
    gathers. The bias is added once.

    Args:
        outputs: `Replicate`, or ``Shard(dim)`` for a sequence that is sharded between layers.
    """

    outputs: Placement | Sequence[Placement | None] | None = Replicate()

    def __post_init__(self) -> None:
        _refuse(self, "parameters", "wanted")

    @override
    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        return Shard(1) if name == "weight" else Replicate()

    @override
    def preparation(self) -> IOPlacements:
        return IOPlacements(wanted=Shard(-1), outputs=self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyParallel(_LayerStyle):
    """An embedding sharded by its vocabulary: the weight (V, C) is (V/p, C) on each rank.

    Each rank looks up the tokens of its shard, and gives zeros for the others; forward sums these by an allreduce or a
    reduce_scatter.

    Args:
        outputs: `Replicate`, or ``Shard(dim)`` for a sequence that is sharded between layers.
    """

    _layer: ClassVar[type[nn.Module]] = nn.Embedding
    outputs: Placement | Sequence[Placement | None] | None = Replicate()

    def __post_init__(self) -> None:
        _refuse(self, "parameters", "wanted")

    @override
    def check(self, name: str, module: nn.Module) -> None:
        _LayerStyle.check(self, name, module)
        for option, reason in (
            ("max_norm", "forward would change rows"),
            ("sparse", "collectives take dense gradients"),
        ):
            if getattr(module, option):
                raise ValueError(f"VocabularyParallel can't shard {name!r}, which has {option}: {reason}")

    @override
    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        return Shard(0)

    @override
    def preparation(self) -> IOPlacements:
        return IOPlacements(wanted=Replicate(), outputs=self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel(Style):
    """A norm, a dropout or the like on a sharded sequence: parameters are replicated, inputs and outputs sharded.

    Backward sums the ranks' gradients of the parameters.

    Args:
        dim: The dim of the sequence, along which inputs and outputs are sharded.
    """

    dim: int = 1

    def __post_init__(self) -> None:
        _refuse(self, "wanted", "outputs")

    @override
    def preparation(self) -> IOPlacements:
        return IOPlacements(wanted=Shard(self.dim), outputs=Shard(self.dim))
