"""Routing of tokens to the ranks that have their experts, and of the experts' outputs back.

Shapes: T tokens of this rank, k experts for each, N = T k pairs of a token and an expert, E experts of all ranks, R
rows that this rank's experts get, H features, p ranks.

[Note: the order of rows]
Pairs are numbered by token, and for one token as the router lists its experts. A rank sends its pairs sorted by expert,
those of one expert in their own order; since each rank has consecutive experts, these are consecutive rows for each
rank. What arrives is sorted by expert again, those of one expert by sender. So an expert has its rows in the order of
the ranks' tokens, whatever the number of ranks: as one process has them that has all tokens.

The exchange is that of D. Lepikhin et al., "GShard", 2020: in forward one all_gather of the counts, and an all_to_all
of rows to the experts and back; in backward these two all_to_alls the other way. In each all_to_all a rank sends
(p - 1) / p of N rows of H elements, if experts are used evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.all_gather import all_gather
from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

_HEADER = 3  # of a rank's message: whether it has an error, which gradients it will compute, and the module's index


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of this rank's tokens to experts, and of all ranks' tokens to this rank's experts.

    ``routed`` (E) is the number of pairs of all ranks for each expert, ``kept`` (E) without those that were dropped.
    """

    group: Backend
    shape: tuple[int, int]  # T, k
    order: torch.Tensor  # (N,) or fewer if pairs are dropped: the pairs in the order in which they are sent
    send_rows: list[int]
    receive_rows: list[int]
    by_expert: torch.Tensor  # (R,) the received rows in the order of the experts
    expert_ids: torch.Tensor  # (R,) each row's expert, numbered from this rank's first one
    routed: torch.Tensor
    kept: torch.Tensor

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows in the order of ``order``, and return those that arrive, by expert. Not differentiable."""
        received = all_to_all_single_uneven(rows, self.send_rows, self.receive_rows, group=self.group)
        return received.index_select(0, self.by_expert)

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of `send`."""
        arrived = torch.empty_like(rows).index_copy_(0, self.by_expert, rows)
        return all_to_all_single_uneven(arrived, self.receive_rows, self.send_rows, group=self.group)


def plan_route(
    top_k_index: torch.Tensor | None,
    num_experts: int,
    group: Backend,
    *,
    capacity_factor: float | None = None,
    gradients: int = 0,
    module_index: int = 0,
    failure: Exception | None = None,
) -> Route:
    """Exchange the numbers of rows, and plan the way of the tokens; every rank of the group calls this.

    Args:
        top_k_index: The experts of this rank's tokens, (T, k); None if there is a failure.
        num_experts: The number of experts of all ranks, the same on all.
        group: The ranks, of which each has consecutive experts, and the first ones one more if they don't divide.
        capacity_factor: At most this many times the average number of pairs go to an expert, the first ones in order
            of ranks and tokens; others are dropped. None drops none.
        gradients: The gradients that this rank will compute, as bits, the same on all ranks: 1 of the tokens, 2 of
            the experts' parameters.
        module_index: The index of the module of experts among those of the mesh, the same on all ranks.
        failure: The error of this rank's arguments: raised here, and reported on all others.

    Raises:
        UnsupportedOpError: Another rank had a failure.
        CollectiveMismatchError: On all ranks: ``gradients`` or ``module_index`` differ.
    """
    counts = torch.zeros(num_experts, dtype=torch.int64)
    if top_k_index is not None and failure is None:
        counts = torch.bincount(top_k_index.reshape(-1), minlength=num_experts)
    message = torch.cat([torch.tensor([failure is not None, gradients, module_index]), counts])
    messages = all_gather(message, group=group).view(group.world_size, -1)
    _check_messages(messages, group, failure)
    assert top_k_index is not None, "or there was a failure"
    routed = messages[:, _HEADER:]
    kept = routed if capacity_factor is None else _limit(routed, capacity_factor)
    own = expert_range(num_experts, group.world_size, group.rank)
    arriving = kept[:, own]
    # Each sender's rows come sorted by expert: a stable sort leaves those of one expert in the senders' order.
    arriving_ids = torch.arange(arriving.shape[1]).repeat(group.world_size).repeat_interleave(arriving.reshape(-1))
    expert_ids, by_expert = torch.sort(arriving_ids, stable=True)
    return Route(
        group=group,
        shape=(top_k_index.shape[0], top_k_index.shape[1]),
        order=_sending_order(top_k_index.reshape(-1), counts, kept[group.rank]),
        send_rows=[
            int(kept[group.rank, expert_range(num_experts, group.world_size, rank)].sum())
            for rank in range(group.world_size)
        ],
        receive_rows=arriving.sum(1).tolist(),
        by_expert=by_expert,
        expert_ids=expert_ids,
        routed=routed.sum(0),
        kept=kept.sum(0),
    )


def expert_range(num_experts: int, num_ranks: int, rank: int) -> slice:
    """The experts that a rank has, as ``Shard(0)`` places them."""
    sizes = compute_shard_sizes(num_experts, num_ranks)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def _check_messages(messages: torch.Tensor, group: Backend, failure: Exception | None) -> None:
    """Raise on all ranks if one has a failure, or will compute other gradients than the others."""
    if bool(messages[:, 0].any()):
        reasons: Sequence[str | None] = all_gather_object(None if failure is None else str(failure), group=group)
        if failure is not None:
            raise failure
        ranks = tuple(rank for rank, reason in enumerate(reasons) if reason is not None)
        raise UnsupportedOpError(f"rank {ranks[0]} can't send its tokens to experts: {reasons[ranks[0]]}", ranks=ranks)
    others = tuple(torch.nonzero(messages[:, 2] != messages[0, 2]).flatten().tolist())
    if others:
        rank = others[0]
        raise CollectiveMismatchError(
            f"the ranks of group {group.name!r} call different modules of experts: rank 0 the {int(messages[0, 2])}. of"
            f" those that were made parallel on the mesh, rank {rank} the {int(messages[rank, 2])}. Call them in the"
            " same order on all ranks",
            ranks=others,
        )
    differing = tuple(torch.nonzero(messages[:, 1] != messages[0, 1]).flatten().tolist())
    if differing:
        rank = differing[0]
        raise CollectiveMismatchError(
            f"the ranks of group {group.name!r} will compute gradients of different tensors of experts: rank 0 of"
            f" {describe_gradients(int(messages[0, 1]))}, rank {rank} of {describe_gradients(int(messages[rank, 1]))}."
            " Set requires_grad and torch.no_grad() alike on all ranks, or backward would wait for rows that are never"
            " sent",
            ranks=differing,
        )


def describe_gradients(gradients: int) -> str:
    """The tensors that the ``gradients`` of `plan_route` stand for, in words."""
    names = [name for bit, name in ((1, "tokens"), (2, "parameters")) if gradients & bit]
    return " and ".join(names) or "none"


def _limit(routed: torch.Tensor, capacity_factor: float) -> torch.Tensor:
    """The pairs (ranks, E) that are within the experts' capacity, those of the first ranks first.

    W. Fedus et al., "Switch Transformers", 2021, section 2.2; here over all ranks' tokens.
    """
    capacity = math.ceil(capacity_factor * int(routed.sum()) / routed.shape[1])
    before = routed.cumsum(0) - routed
    return torch.minimum(routed, (capacity - before).clamp(min=0))


def _sending_order(experts: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The pairs, of which ``experts`` (N) is each one's expert, sorted by expert, the first ``kept`` of each."""
    order = torch.argsort(experts, stable=True)
    if torch.equal(counts, kept):
        return order
    position = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[position < kept.repeat_interleave(counts)]


class _Spread(torch.autograd.Function):
    """Tokens (T, H) become a row for each pair, in the order of sending."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return tokens.index_select(0, route.order // max(route.shape[1], 1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collect(grads[0], ctx.route).sum(1), None  # much faster than adding up rows by index


class _Collect(torch.autograd.Function):
    """Rows in the order of sending become (N, H), in the order of tokens; dropped ones are zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        num_pairs = route.shape[0] * route.shape[1]
        make = torch.empty if len(route.order) == num_pairs else torch.zeros
        return make((num_pairs, rows.shape[1]), dtype=rows.dtype).index_copy_(0, route.order, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.route.order), None


class _Travel(torch.autograd.Function):
    """Rows travel to the ranks of their experts, or back; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route, is_return: bool) -> torch.Tensor:  # noqa: FBT001 - apply
        ctx.route, ctx.is_return = route, is_return
        return route.send_back(rows) if is_return else route.send(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        made: torch.Tensor = _Travel.apply(grads[0].contiguous(), ctx.route, not ctx.is_return)  # type: ignore[no-untyped-call]
        return made, None, None


def dispatch(tokens: torch.Tensor, route: Route) -> torch.Tensor:
    """Send this rank's tokens (T, H) to the ranks of their experts; all ranks call this. Differentiable.

    Returns:
        The rows (R, H) for this rank's experts, sorted by expert; see [Note: the order of rows].
    """
    rows: torch.Tensor = _Spread.apply(tokens, route)  # type: ignore[no-untyped-call]
    arrived: torch.Tensor = _Travel.apply(rows, route, False)  # type: ignore[no-untyped-call]
    return arrived


def combine(rows: torch.Tensor, weights: torch.Tensor, route: Route) -> torch.Tensor:
    """Send experts' outputs (R, H) back, and add those of each token up with weights (T, k). Differentiable.

    Returns:
        (T, H), in the dtype of ``rows``. Products and sums are of the wider one of the two dtypes.
    """
    returned: torch.Tensor = _Travel.apply(rows, route, True)  # type: ignore[no-untyped-call]
    outputs = collect(returned, route)
    dtype = torch.promote_types(outputs.dtype, weights.dtype)
    # A product of matrices: outputs (T, k, H) times weights would be as large again.
    total = torch.bmm(weights.to(dtype).unsqueeze(1), outputs.to(dtype)).squeeze(1)
    return total.to(rows.dtype)


def collect(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Rows in the order of sending as (T, k, H), zeros for dropped pairs. Differentiable."""
    pairs: torch.Tensor = _Collect.apply(rows, route)  # type: ignore[no-untyped-call]
    return pairs.view(*route.shape, rows.shape[1])
