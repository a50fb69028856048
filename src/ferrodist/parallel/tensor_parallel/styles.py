"""What a plan says of a module: how its parameters are divided, and how its inputs and outputs lie.

Shapes: B batch, T sequence, C features in, O features out, p ranks. The ways are those of M. Shoeybi et al.,
"Megatron-LM", 2019 (columns, rows, vocabulary) and V. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022 (sequence).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from torch import nn

from ferrodist.tensor.placement import Placement, Replicate, Shard
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IOPlacements:
    """How a module's tensors lie around its forward.

    Args:
        wanted: How inputs shall lie in the forward: one placement for all, one for each argument in their order, or by
            the names of arguments, however these are passed; None leaves them.
        outputs: How outputs shall lie: one placement for all, or one for each; None leaves them.
    """

    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = None
    outputs: Placement | Sequence[Placement | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Parameters whole on every rank, and inputs and outputs as declared: for modules of any class.

    Args:
        parameters: How the module's own parameters lie, by name; those not named are whole on every rank.
        wanted: How inputs shall lie in the forward; see `IOPlacements`.
        outputs: How outputs shall lie.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = None
    outputs: Placement | Sequence[Placement | None] | None = None

    def check(self, name: str, module: nn.Module) -> None:
        """Return if the style fits a module.

        Args:
            name: The module's path, for the error.
            module: The module.

        Raises:
            TypeError: It is of another class than the style is for.
            ValueError: It has no such parameter.
        """
        own = {key for key, _ in module.named_parameters(recurse=False)}
        if unknown := sorted(set(self.parameters) - own):
            raise ValueError(f"module {name!r} has no parameter {unknown[0]!r}: it has {sorted(own)}")

    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        """How one of the module's parameters lies."""
        del parameter
        return self.parameters.get(name, Replicate())

    def preparation(self) -> IOPlacements:
        """How its tensors lie."""
        return IOPlacements(wanted=self.wanted, outputs=self.outputs)


def _refuse(style: Style, *names: str) -> None:
    """Raise if one of the fields is given that a style decides by itself."""
    defaults = {one.name: one.default for one in fields(style)} | {"parameters": {}}
    for name in names:
        if getattr(style, name) != defaults[name]:
            raise TypeError(f"{type(style).__name__} decides by itself what {name} are: use Style for other ways")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearStyle(Style):
    def check(self, name: str, module: nn.Module) -> None:
        """Raise unless it is a linear layer."""
        if not isinstance(module, nn.Linear):
            kind = with_article(type(module).__name__)
            raise TypeError(f"{type(self).__name__} divides an nn.Linear, and {name!r} is {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel(_LinearStyle):
    """A linear layer divided by its outputs: the weight (O, C) is (O/p, C) on each rank, the output (B, T, O/p).

    The input is whole on each rank: forward sends nothing where it comes so, and gathers it where it comes in parts;
    backward adds the ranks' gradients of it, by an allreduce or a reduce_scatter.

    Args:
        wanted: `Replicate`, or None for layers that share an input which the module around them prepares: their
            gradients of it are added up before they are folded.
        outputs: ``Shard(-1)`` leaves the output divided, `Replicate` gathers it.
        blocks: Outputs are this many layers in one, as 3 for queries, keys and values: each is divided by itself.
        chunks: Gather an input that comes divided along its next to last dim in so many pieces, each while the product
            of the one before is computed. 1 gathers it first.
    """

    wanted: Placement | Sequence[Placement | None] | Mapping[str, Placement] | None = Replicate()
    outputs: Placement | Sequence[Placement | None] | None = Shard(-1)
    blocks: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        _refuse(self, "parameters")
        for name in ("blocks", "chunks"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"ColumnParallel takes {name} of at least 1, not {number!r}")

    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        """How weight and bias lie."""
        del name, parameter
        return Shard(0, blocks=self.blocks)

    def preparation(self) -> IOPlacements:
        """How its tensors lie."""
        outputs = Shard(-1, blocks=self.blocks) if self.outputs == Shard(-1) else self.outputs
        return IOPlacements(wanted=self.wanted if self.chunks == 1 else None, outputs=outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParallel(_LinearStyle):
    """A linear layer divided by its inputs: the weight (O, C) is (O, C/p) on each rank, so is the input (B, T, C/p).

    Each rank has a part of a sum, which forward folds by one allreduce, or one reduce_scatter; backward sends nothing,
    or gathers. The bias is added once.

    Args:
        outputs: `Replicate`, or ``Shard(dim)`` for a sequence that is divided between layers.
    """

    outputs: Placement | Sequence[Placement | None] | None = Replicate()

    def __post_init__(self) -> None:
        _refuse(self, "parameters", "wanted")

    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        """How weight and bias lie."""
        del parameter
        return Shard(1) if name == "weight" else Replicate()

    def preparation(self) -> IOPlacements:
        """How its tensors lie."""
        return IOPlacements(wanted=Shard(-1), outputs=self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyParallel(Style):
    """An embedding divided by its vocabulary: the weight (V, C) is (V/p, C) on each rank.

    Each rank looks up the tokens that it has, and gives zeros for the others; forward adds these by one allreduce, or
    one reduce_scatter.

    Args:
        outputs: `Replicate`, or ``Shard(dim)`` for a sequence that is divided between layers.
    """

    outputs: Placement | Sequence[Placement | None] | None = Replicate()

    def __post_init__(self) -> None:
        _refuse(self, "parameters", "wanted")

    def check(self, name: str, module: nn.Module) -> None:
        """Raise unless it is an embedding."""
        if not isinstance(module, nn.Embedding):
            kind = with_article(type(module).__name__)
            raise TypeError(f"VocabularyParallel divides an nn.Embedding, and {name!r} is {kind}")

    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        """How the weight lies."""
        del name, parameter
        return Shard(0)

    def preparation(self) -> IOPlacements:
        """How its tensors lie."""
        return IOPlacements(wanted=Replicate(), outputs=self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel(Style):
    """A norm, a dropout or the like on a sequence that is divided: parameters are whole, inputs and outputs in parts.

    The ranks' gradients of the parameters are added in backward.

    Args:
        dim: The dim of the sequence, along which inputs and outputs are divided.
    """

    dim: int = 1

    def __post_init__(self) -> None:
        _refuse(self, "wanted", "outputs")

    def preparation(self) -> IOPlacements:
        """How its tensors lie."""
        return IOPlacements(wanted=Shard(self.dim), outputs=Shard(self.dim))
