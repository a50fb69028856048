"""A mixture of experts over ranks, beside the same exchange by torch's ``all_to_all_single``.

    python benchmarks/experts.py [--ranks 2 4] [--tokens 64 1024] [--rounds 7] [--steps 2] [--plot experts.png]

A block as Mixtral's: a router, 8 experts (512 features, 1,024 inside, float32), of which each token takes 2. Ranks are
processes of one host with one computing thread, each with E/p experts and tokens of its own; variants in turns in the
same processes:

- "ferrodist": ``fd.parallelize_experts``,
- "ferrodist, the same tokens": ``fd.parallelize`` with ``fd.ExpertParallel()``, for which every rank has all tokens,
- "torch over gloo" and "over ferrodist": the same routing and experts, and ``all_to_all_single`` of torch.distributed
  over groups with these backends,
- "one process": rank 0 alone with all tokens and experts, one thread, while the others sleep,
- "local work": each rank's experts on the rows that come to it, without router and messages.

Routing is balanced, or skewed by a bias of the router; "rows" is the share of the rank whose experts get most, of the
mean. A figure is the slowest rank's time, the median of the rounds; a ratio is the median of the rounds' ratios. The
loss, and the gradients of tokens, router and experts, are compared with those of one process, or the benchmark fails.

Where the time goes is that of the middle one of three more steps, under torch's profiler: the messages, the time in
which they move and that for which other ranks are waited for, and the matrix products. The rest of the median is
everything else: sorting, copies of rows, activations, dispatch.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from figures import (
    PARTS,
    SPREAD,
    StepProfile,
    draw_bars,
    median_ratio,
    parts_of,
    print_machine,
    print_table,
    profile_steps,
    run_with_meeting,
    slowest,
    spread,
    time_rounds,
    torch_world,
)
from torch import nn
from torch.nn import functional

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, INNER, NUM_EXPERTS, TOP = 512, 1024, 8, 2
ROUTINGS = {"balanced": 0.0, "skewed": 1.0}
OURS, SAME, ALONE, LOCAL = "ferrodist", "ferrodist, the same tokens", "one process", "local work"
THEIRS = {"torch over gloo": "gloo", "torch over ferrodist": "ferrodist"}
VARIANTS = (OURS, SAME, *THEIRS, ALONE, LOCAL)
KINDS = ("forward", "forward and backward")


class Experts(nn.Module):
    """Stacked experts: E of them, I features inside, H in and out."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, WIDTH, INNER) / INNER**0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute tokens (T, H), of which each has experts and weights (T, k)."""
        result = torch.zeros_like(hidden_states)
        # Gradients of elements [expert] would be as large as all experts', each.
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        for expert, (gate_up, down) in enumerate(weights):
            tokens, places = torch.where(top_k_index == expert)
            gate, up = functional.linear(hidden_states[tokens], gate_up).chunk(2, -1)
            made = functional.linear(functional.silu(gate) * up, down)
            result.index_add_(0, tokens, made * top_k_weights[tokens, places, None])
        return result


class Block(nn.Module):
    """A router and its experts; a skew makes the first experts more likely than the last."""

    def __init__(self, skew: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts: Any = Experts(NUM_EXPERTS)
        self.register_buffer("bias", -skew * torch.arange(1.0, NUM_EXPERTS + 1).log())

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of tokens (T, H), and their weights: (T, k) each."""
        logits = self.gate(tokens)
        index = torch.topk(logits + self.bias, TOP).indices
        return index, logits.gather(1, index).softmax(-1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute tokens: (T, H) to the same."""
        result: torch.Tensor = self.experts(tokens, *self.route(tokens))
        return result


class _Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.order = order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(grads[0]).index_copy_(0, ctx.order, grads[0]), None


class _Exchange(torch.autograd.Function):
    """Rows from each rank to each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: tuple[list[int], list[int]], group: Any) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        sent, received = counts
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(grads[0], ctx.counts[::-1], ctx.group), None, None  # type: ignore[no-untyped-call]


class TorchExperts(nn.Module):
    """Experts of this rank, to which all ranks send their tokens by torch.distributed."""

    def __init__(self, experts: Experts, group: Any) -> None:
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute this rank's tokens (T, H), of which each has experts and weights (T, k)."""
        num_ranks = dist.get_world_size(self.group)
        order = index.reshape(-1).argsort(stable=True)
        counts = index.reshape(-1).bincount(minlength=NUM_EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (each.view(num_ranks, -1).sum(1).tolist() for each in (counts, arriving))
        expert_ids, by_expert = (
            torch.arange(self.experts.num_experts).repeat(num_ranks).repeat_interleave(arriving).sort(stable=True)
        )
        pairs = tokens.unsqueeze(1).expand(-1, TOP, -1).reshape(-1, tokens.shape[1])
        rows: Any = _Exchange.apply(_Permute.apply(pairs, order), (sent, received), self.group)  # type: ignore[no-untyped-call]
        rows = _Permute.apply(rows, by_expert)  # type: ignore[no-untyped-call]
        made = self.experts(rows, expert_ids.unsqueeze(1), torch.ones(len(rows), 1))
        made = _Permute.apply(made, by_expert.argsort())  # type: ignore[no-untyped-call]
        returned: Any = _Exchange.apply(made, (received, sent), self.group)  # type: ignore[no-untyped-call]
        outputs: Any = _Permute.apply(returned, order.argsort())  # type: ignore[no-untyped-call]
        return torch.bmm(weights.unsqueeze(1), outputs.view(len(tokens), TOP, -1)).squeeze(1)


class Variant:
    """A module and the arguments of its forward, of which the first is tokens that get gradients."""

    def __init__(self, module: nn.Module, tokens: torch.Tensor, *others: torch.Tensor) -> None:
        self.module, self.tokens, self.others = module, tokens, others
        self.loss = torch.zeros(())

    def forward(self) -> None:
        """Compute the outputs."""
        with torch.no_grad():
            self.module(self.tokens, *self.others)

    def forward_and_backward(self) -> None:
        """Compute the loss, and gradients of the tokens and all parameters, which take the place of those before."""
        self.module.zero_grad()
        self.tokens = self.tokens.detach().requires_grad_()
        loss = self.module(self.tokens, *self.others).square().mean()
        loss.backward()
        self.loss = loss.detach()


def take_experts(experts: Experts, num_ranks: int, rank: int) -> Experts:
    """A rank's experts of all."""
    own = Experts(NUM_EXPERTS // num_ranks)
    own.load_state_dict({name: value.chunk(num_ranks)[rank] for name, value in experts.state_dict().items()})
    return own


def make_variants(group: fd.Backend, all_tokens: torch.Tensor, skew: float) -> tuple[dict[str, Variant], float]:
    """What is measured on this rank, and the rows of the rank that gets most, of the mean."""
    whole, mesh = Block(skew), fd.DeviceMesh(group, (group.world_size,), ("expert",))
    own_tokens = all_tokens.chunk(group.world_size)[group.rank]
    plan = {"experts": fd.ExpertParallel()}
    made = {
        OURS: Variant(fd.parallelize_experts(copy.deepcopy(whole), mesh, plan), own_tokens),
        SAME: Variant(fd.parallelize(copy.deepcopy(whole), mesh, plan), all_tokens),
    }
    own_experts = take_experts(whole.experts, group.world_size, group.rank)
    for variant, backend in THEIRS.items():
        block = copy.deepcopy(whole)
        block.experts = TorchExperts(copy.deepcopy(own_experts), dist.new_group(backend=backend))
        made[variant] = Variant(block, own_tokens)
    with torch.no_grad():
        index, _ = whole.route(all_tokens)
    expert_ids, order = index.reshape(-1).sort(stable=True)
    first = group.rank * own_experts.num_experts
    is_own = (expert_ids >= first) & (expert_ids < first + own_experts.num_experts)
    rows = all_tokens[order[is_own] // TOP]
    made[LOCAL] = Variant(own_experts, rows, (expert_ids[is_own] - first).unsqueeze(1), torch.ones(len(rows), 1))
    made[ALONE] = Variant(whole, all_tokens)
    most = expert_ids.bincount(minlength=NUM_EXPERTS).view(group.world_size, -1).sum(1).max().item()
    return made, most * group.world_size / len(expert_ids)


def check(variants: dict[str, Variant], group: fd.Backend) -> None:
    """Raise unless all variants that exchange tokens have the loss and the gradients of one process."""
    for variant in (OURS, SAME, *THEIRS, ALONE):
        variants[variant].forward_and_backward()
    expected = find_results(variants[ALONE])
    num_ranks, rank = group.world_size, group.rank
    own_part = {"tokens": expected["tokens"].chunk(num_ranks)[rank]}
    for name in ("gate_up_proj", "down_proj"):
        expected[name] = expected[name].chunk(num_ranks)[rank]
    for variant in (OURS, SAME, *THEIRS):
        found = find_results(variants[variant])
        if variant != SAME:  # losses of own tokens, whose mean is the loss of all
            for name in ("loss", "gate"):
                dist.all_reduce(found[name])
            means = ("loss", "gate", "tokens") if variant == OURS else tuple(found)
            found.update({name: found[name] / num_ranks for name in means})
        for name, value in {**expected, **(own_part if variant != SAME else {})}.items():
            error = ((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)).item()
            if not error < 1e-5:
                raise RuntimeError(f"{variant}: {name} is {error:.1e} off, relative to its largest element")


def find_results(variant: Variant) -> dict[str, torch.Tensor]:
    """The loss and the gradients: of tokens and router in full, of this rank's experts."""
    experts = getattr(variant.module.experts, "experts", variant.module.experts)
    grads = {
        "tokens": variant.tokens.grad,
        "gate": variant.module.gate.weight.grad,
        "gate_up_proj": experts.gate_up_proj.grad,
        "down_proj": experts.down_proj.grad,
    }
    found = {"loss": full(variant.loss), "tokens": full(grads["tokens"]), "gate": full(grads["gate"])}
    for name in ("gate_up_proj", "down_proj"):
        grad = grads[name]
        found[name] = grad.to_local() if isinstance(grad, fd.DTensor) else grad
    return {name: one.clone() for name, one in found.items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in full, if it is distributed; all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, fd.DTensor) else tensor


Found = tuple[dict[tuple[str, str], list[float]], dict[tuple[str, str], list[StepProfile]], float]
"""By kind and variant: the seconds of rounds, the profiles of steps; and the rows of the rank that gets most."""


def measure(group: fd.Backend, num_tokens: int, routing: str, options: argparse.Namespace, meeting_file: str) -> Found:
    """Compute as one rank."""
    with torch_world(group, meeting_file):
        generator = torch.Generator().manual_seed(1)
        all_tokens = torch.randn(num_tokens * group.world_size, WIDTH, generator=generator)
        variants, most_rows = make_variants(group, all_tokens, ROUTINGS[routing])
        check(variants, group)
        if group.rank:
            del variants[ALONE]
        seconds, profiles = {}, {}
        for kind in KINDS:
            steps: dict[str, Callable[[], None] | None] = {}
            for variant in VARIANTS:
                one = variants.get(variant)
                steps[variant] = one and (one.forward if kind == KINDS[0] else one.forward_and_backward)
            label = f"{group.world_size} ranks, {num_tokens} tokens each, {routing}, {kind}"
            times = time_rounds(steps, options.rounds, options.steps, label=label)
            seconds.update({(kind, variant): own for variant, own in times.items()})
            for variant, step in steps.items():
                dist.barrier()
                if step is not None:
                    profiles[kind, variant] = profile_steps(step)
            dist.barrier()
    return seconds, profiles, most_rows


def report(title: str, results: list[Found]) -> dict[str, dict[str, float]]:
    """Print a table for each kind, and return the medians in milliseconds, by the tables' titles."""
    times, panels = slowest([seconds for seconds, _, _ in results]), {}
    for kind in KINDS:
        rows = {}
        for variant in VARIANTS:
            own, middle = times[kind, variant], statistics.median(times[kind, variant])
            profiles = [found[kind, variant] for _, found, _ in results if (kind, variant) in found]
            rows[variant] = [*spread(own), f"{median_ratio(own, times[kind, LOCAL]):.2f}", *parts_of(profiles, middle)]
        heading = f"{kind}, {title}, rows {results[0][2]:.2f}"
        print_table(heading, [*SPREAD, "to local work", *PARTS], rows)
        panels[heading] = {variant: 1e3 * statistics.median(times[kind, variant]) for variant in VARIANTS}
    return panels


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024], help="of a rank")
    parser.add_argument("--routings", nargs="+", choices=list(ROUTINGS), default=list(ROUTINGS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a round")
    parser.add_argument("--plot", help="a PNG file for the times")
    options = parser.parse_args()
    wrong = [count for count in options.ranks if count < 1 or NUM_EXPERTS % count]
    if wrong:
        parser.error(
            f"{NUM_EXPERTS} experts don't divide over {wrong[0]} ranks: torch's part of the benchmark needs it"
        )
    print_machine()
    panels: dict[str, dict[str, float]] = {}
    for num_ranks in options.ranks:
        for num_tokens in options.tokens:
            for routing in options.routings:
                results = run_with_meeting(measure, num_ranks, num_tokens, routing, options)
                panels |= report(f"{num_ranks} ranks, {num_tokens} tokens each, {routing}", results)
    if options.plot:
        draw_bars(options.plot, panels, "ms", number="%.1f")


if __name__ == "__main__":
    main()
