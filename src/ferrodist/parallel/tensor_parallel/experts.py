"""Parallel styles for MoE layers with stacked expert weights: expert parallel and tensor parallel.

Shapes: E experts, I features inside, H features in and out, p ranks. Such modules have parameters with the experts
along dim 0, such as ``gate_up_proj`` (E, 2 I, H) and ``down_proj`` (E, H, I), and are called with ``hidden_states``
(tokens, H), ``top_k_index`` (tokens, k) and ``top_k_weights`` (tokens, k): those of Hugging Face's transformers from
version 5 (Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3 and others), and any that are written like them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.parallel.tensor_parallel.expert_forwards import (
    ARGUMENTS,
    ExpertForward,
    ExpertParallelForward,
    TensorParallelExpertsForward,
)
from ferrodist.parallel.tensor_parallel.styles import IOPlacements, Style
from ferrodist.parallel.tensor_parallel.token_routing import expert_range
from ferrodist.parallel.tensor_parallel.wrapped_forwards import find_arguments
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from ferrodist.mesh import DeviceMesh

_ADDED_ONCE = frozenset({"down_proj_bias"})
"""Replicated biases of the experts' outputs, which are sums over the ranks: one rank adds them."""


def takes_routing(module: nn.Module) -> bool:
    """Return whether a module is called with tokens, their experts' indices, and weights."""
    return len(find_arguments(module.forward)[0]) == len(ARGUMENTS)


def computes_all_experts(module: nn.Module) -> bool:
    """Return whether a module is called with tokens alone, which are sorted by experts, and computes all experts.

    Such are Llama 4's: a product of stacked weights computes each expert for every token, weighted before.
    """
    sizes = {
        one.shape[0] if one.dim() > 2 and "." not in key else -1  # not a layer that has its router and experts
        for key, one in module.named_parameters()
    }
    return find_arguments(module.forward) == (["hidden_states"], False) and sizes == {
        getattr(module, "num_experts", None)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStyle(Style):
    """A style of modules of stacked experts, whose code runs on local tensors."""

    @override
    def check(self, name: str, module: nn.Module) -> None:
        Style.check(self, name, module)
        if self.wanted is not None:
            raise TypeError(f"{type(self).__name__} sets wanted by itself: leave it out")
        if not (self.outputs is None or isinstance(self.outputs, Placement)):
            raise TypeError(f"{type(self).__name__} takes one placement of the output, not {self.outputs!r}")
        if not takes_routing(module):
            names, _ = find_arguments(module.forward)
            raise TypeError(
                f"{type(self).__name__} shards modules whose forward takes {', '.join(ARGUMENTS)}, and"
                f" {name!r} ({type(module).__name__}) takes {', '.join(names) or 'nothing'}"
            )
        self.count_experts(name, module)

    def count_experts(self, name: str, module: nn.Module) -> int:
        """The size of dim 0 of the module's sharded parameters."""
        sizes = {
            key: one.shape[0] if one.dim() else 0
            for key, one in module.named_parameters(recurse=False)
            if self.placement_of(key, one) != Replicate() or key in _ADDED_ONCE
        }
        if not sizes:
            inner = next((f", but in its modules, as {key!r}" for key, _ in module.named_parameters()), "")
            raise ValueError(
                f"module {name!r} has no parameters of its own with the experts along dim 0, which"
                f" {type(self).__name__} shards{inner}: leave it out of the plan, or give the path of the module that"
                " has them, if that takes the routing"
            )
        if not self.sizes_fit(set(sizes.values())):
            raise ValueError(
                f"the parameters of module {name!r} have different sizes of dim 0, {sizes}, and should have the"
                " experts there: give others as parameters={name: Replicate()}; or, if the last experts have no"
                " parameters, use TensorParallelExperts"
            )
        return max(sizes.values())

    def sizes_fit(self, sizes: set[int]) -> bool:
        """Return whether parameters may have these sizes of dim 0."""
        return len(sizes) == 1 and 0 not in sizes

    @override
    def preparation(self) -> IOPlacements:
        return IOPlacements()

    def make_forward(
        self, module: nn.Module, mesh: DeviceMesh, *, takes_own_tokens: bool = False, grad_scale: float = 1.0
    ) -> ExpertForward:
        """The forward of a module whose parameters have been sharded."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(ExpertStyle):
    """Experts sharded over the ranks: each has E/p of them, the first ranks one more if they don't divide.

    Each token travels to the ranks of its k experts, and their outputs travel back. Each rank sends its share of
    replicated tokens, and its own of sharded ones, such as a sequence sharded between layers. Outputs and gradients are
    those of one process but for the order in which a token's k outputs are added. A forward takes an all_gather of the
    counts and two all_to_alls, and an all_gather of the outputs of replicated tokens. No token is dropped, unless a
    ``capacity_factor`` says so. (D. Lepikhin et al., "GShard", 2020.)

    Experts that compute all tokens, and have no routing to travel by, as Llama 4's, are sharded likewise, and no token
    travels: each rank computes its experts, and an all_gather brings the outputs together.

    The module's own code runs on the rows for this rank's experts, with ``num_experts`` set to their number,
    ``top_k_index`` counted from the first of them, and weights of 1. Random numbers in it, as a dropout's, are drawn by
    each rank for itself.

    Args:
        parameters: The placements of parameters without experts: ``{"scale": Replicate()}``. All others of the
            module's own are sharded along dim 0; sub-modules are replicated.
        outputs: The placement of the output; None is that of the tokens.
        capacity_factor: At most this many times the average number of tokens go to one expert, the first ones of all
            ranks' tokens; what others would have got of it is zero (W. Fedus et al., "Switch Transformers", 2021).
            `expert_loads` has the number of those. None drops none.
    """

    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        factor = self.capacity_factor
        if factor is None:
            return
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"capacity_factor must be a number or None, not {factor!r}")
        if not 0 < factor < math.inf:
            raise ValueError(f"capacity_factor must be more than 0 and finite, not {factor!r}")

    @override
    def fitted(self, module: nn.Module) -> Style:
        is_plain = not self.parameters and self.wanted is None and self.capacity_factor is None
        if not computes_all_experts(module) or not is_plain:
            return self
        placements = {key: self.placement_of(key, one) for key, one in module.named_parameters(recurse=False)}
        return Style(parameters=placements, outputs=self.outputs or Replicate())

    @override
    def check(self, name: str, module: nn.Module) -> None:
        ExpertStyle.check(self, name, module)
        for key, placement in self.parameters.items():
            if isinstance(placement, Shard | Partial) and placement != Shard(0):
                raise ValueError(
                    f"ExpertParallel can't have parameter {key!r} of module {name!r} as {placement}: it shards experts,"
                    " along dim 0. Give Replicate() for a parameter without experts, or use TensorParallelExperts"
                )

    @override
    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        return self.parameters.get(name, Shard(0))

    @override
    def make_forward(
        self, module: nn.Module, mesh: DeviceMesh, *, takes_own_tokens: bool = False, grad_scale: float = 1.0
    ) -> ExpertForward:
        num_experts = self.count_experts(type(module).__name__, module)
        assert self.outputs is None or isinstance(self.outputs, Placement), "`check` has seen it"
        own = expert_range(num_experts, mesh.size, mesh.group.rank)
        return ExpertParallelForward(
            module,
            mesh,
            num_experts,
            own.stop - own.start,
            capacity_factor=self.capacity_factor,
            outputs=self.outputs,
            takes_own_tokens=takes_own_tokens,
            grad_scale=grad_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelExperts(ExpertStyle):
    """Every expert sharded over the ranks by its inner features: each rank has I/p of all E experts.

    Each rank computes a part of the sum that is an expert's output, for all tokens; forward reduces the sum of all
    experts by one allreduce or reduce_scatter, backward the gradients of tokens and weights by an allreduce each.

    ``gate_up_proj`` (E, 2 I, H) is sharded along its dim 1, gates and ups each by themselves, ``down_proj`` (E, H, I)
    along its dim 2. ``up_proj``, ``gate_proj`` and biases go with them; ``down_proj_bias`` is replicated, and added by
    one rank.

    Args:
        parameters: The placements of parameters with other names, or of weights that lie otherwise: those of a module
            whose ``is_transposed`` is true, or ``is_concatenated`` false, must be given.
        outputs: The placement of the output, `Replicate`, or ``Shard(dim)`` for a sequence that is sharded between
            layers; None is `Replicate`.
    """

    @override
    def check(self, name: str, module: nn.Module) -> None:
        ExpertStyle.check(self, name, module)
        unknown = [
            key for key, _ in module.named_parameters(recurse=False) if key not in self.parameters and key not in _KNOWN
        ]
        if unknown:
            raise ValueError(
                f"TensorParallelExperts doesn't know how to shard {unknown[0]!r} of module {name!r}: it knows"
                f" {', '.join(_KNOWN)}; give the placement as parameters={{{unknown[0]!r}: Shard(...)}}"
            )
        has_other_layout = getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True)
        if has_other_layout and not self.parameters:
            raise ValueError(
                f"the weights of module {name!r} are transposed, or gates and ups alternate: give their placements, as"
                " parameters={'gate_up_proj': Shard(2, blocks=2), 'down_proj': Shard(1)}"
            )

    @override
    def placement_of(self, name: str, parameter: torch.Tensor) -> Placement:
        return self.parameters.get(name, _KNOWN.get(name, Replicate()))

    @override
    def sizes_fit(self, sizes: set[int]) -> bool:
        return 0 not in sizes  # experts without parameters, as LongCat has them, come last

    @override
    def make_forward(
        self, module: nn.Module, mesh: DeviceMesh, *, takes_own_tokens: bool = False, grad_scale: float = 1.0
    ) -> ExpertForward:
        del takes_own_tokens, grad_scale
        num_experts = self.count_experts(type(module).__name__, module)
        assert self.outputs is None or isinstance(self.outputs, Placement), "`check` has seen it"
        outputs = self.outputs or Replicate()
        return TensorParallelExpertsForward(module, mesh, num_experts, outputs=outputs, added_once=_ADDED_ONCE)


class IdentityExpert(Style):
    """The expert that returns its tokens, in experts whose ranks' outputs are summed: each rank gives its part.

    Such a module, LongCat's ``identity_expert``, is called by the code of `TensorParallelExperts`.
    """

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
        """The forward of the expert."""
        return functools.partial(_divide_result, module.forward, mesh.size)


def _divide_result(forward: Callable[..., torch.Tensor], num_ranks: int, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    result = forward(*args, **kwargs)
    return result if isinstance(result, DTensor) else result / num_ranks


_KNOWN: dict[str, Placement] = {
    "gate_up_proj": Shard(1, blocks=2),
    "gate_up_proj_bias": Shard(1, blocks=2),
    "gate_proj": Shard(1),
    "gate_proj_bias": Shard(1),
    "up_proj": Shard(1),
    "up_proj_bias": Shard(1),
    "down_proj": Shard(2),
    "down_proj_bias": Replicate(),
}
