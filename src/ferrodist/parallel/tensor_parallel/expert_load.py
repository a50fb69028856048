"""The load of experts, and the bias that balances it without an auxiliary loss."""

from __future__ import annotations

import torch
from torch import nn

from ferrodist.arguments import check_type
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Replicate

ATTRIBUTE = "expert_load"
"""The attribute of a module of experts that has its load."""


class ExpertLoad:
    """The number of times that tokens were routed to each expert, by all ranks of the mesh, since the last `reset`.

    Each forward adds its own, in training and in evaluation; a forward that activation checkpointing computes again
    doesn't. Ranks of other axes of a larger mesh count their own tokens: ``fd.allreduce(load.counts, group=...)``.

    Attributes:
        counts: The pairs of a token and an expert, int64 of shape (experts,), the same on all ranks.
        dropped: The number of times that tokens were beyond an expert's capacity, likewise.
    """

    def __init__(self, num_experts: int) -> None:
        self.counts = torch.zeros(num_experts, dtype=torch.int64)
        self.dropped = torch.zeros(num_experts, dtype=torch.int64)

    def reset(self) -> None:
        """Begin counting anew."""
        self.counts = torch.zeros_like(self.counts)
        self.dropped = torch.zeros_like(self.dropped)

    def record(self, routed: torch.Tensor, kept: torch.Tensor) -> None:
        """Add the pairs of a forward: all, and those that were not dropped."""
        self.counts += routed
        self.dropped += routed - kept

    @property
    def imbalance(self) -> float:
        """The load of the busiest expert, as a multiple of the average: 1 is even. NaN if nothing was counted."""
        total = int(self.counts.sum())
        return int(self.counts.max()) * len(self.counts) / total if total else float("nan")

    def __repr__(self) -> str:
        dropped = f", dropped={self.dropped.tolist()}" if bool(self.dropped.any()) else ""
        return f"ExpertLoad(counts={self.counts.tolist()}{dropped})"


def expert_loads(module: nn.Module) -> dict[str, ExpertLoad]:
    """The loads of a model's parallel experts, by the paths of their modules. Nothing is sent."""
    check_type(module, nn.Module, "expert_loads takes a torch.nn.Module")
    loads = {path: getattr(one, ATTRIBUTE, None) for path, one in module.named_modules()}
    return {path: load for path, load in loads.items() if isinstance(load, ExpertLoad)}


@torch.no_grad()
def update_expert_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float = 0.001) -> None:
    """Move the bias of a router's scores against the experts' load, in place; call it once for each optimizer step.

    L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1: the bias
    of an expert grows by ``rate`` if it had less than the average load, and falls by it if it had more. The router adds
    it to the scores by which it chooses experts, and not to the weights of their outputs. Nothing is sent: counts that
    are the same on all ranks, as `ExpertLoad`'s, give the same bias.

    Args:
        bias: The bias, of shape (experts,), such as the ``e_score_correction_bias`` of DeepSeek-V3; plain, or
            replicated.
        counts: The load of each expert, of the same shape, over all ranks of the step.
        rate: The step; the paper's is 0.001.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``bias`` and ``counts`` have different shapes, ``bias`` is sharded, or ``rate`` is negative or no
            number.
    """
    check_type(bias, torch.Tensor, "bias must be a torch.Tensor")
    check_type(counts, torch.Tensor, "counts must be a torch.Tensor")
    if counts.is_complex():
        raise TypeError(f"counts must be real numbers, not {counts.dtype}")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"rate must be a number, not {type(rate).__name__}")
    if not 0 <= rate < float("inf"):
        raise ValueError(f"rate must be at least 0 and finite, not {rate}")
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"bias must be float32 or float64, not {bias.dtype}: steps as small as the rate would be lost")
    if bias.shape != counts.shape or bias.dim() != 1:
        raise ValueError(f"bias {tuple(bias.shape)} and counts {tuple(counts.shape)} need one number for each expert")
    local = _local(bias, "bias")
    load = _local(counts, "counts").double()
    local.add_(rate * torch.sign(load.mean() - load).to(local.dtype))


def _local(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor as a plain one with the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(not isinstance(one, Replicate) for one in tensor.placements):
        raise ValueError(f"{name} is placed as {list(tensor.placements)}: redistribute() it to Replicate() first")
    return tensor.to_local()
