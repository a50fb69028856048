"""The time of a pipeline step, beside torch's pipelines, the schedule's prediction, and one process.

    python benchmarks/pipeline.py [--rounds 5] [--steps 10] [--plot pipeline.png]

Three questions, each with its own table:

1. Two ranks on one host, one computing thread each, train the same network by ferrodist and by
   torch.distributed.pipelining over gloo, with every schedule that both have, with small and large activations. They
   alternate in the same processes. A figure is the slower rank's time for a step, the median of the rounds; a ratio is
   the median of the rounds' ratios, above 1 where ferrodist is faster. Both have the gradients of one process, or the
   benchmark fails.
2. Four ranks whose stages only sleep, for a fixed time in each forward and each half of a backward: the time of a step
   beside the prediction of `predict`. More ranks than cores do no harm: the difference is the runtime's overhead.
3. Two stages on two ranks beside one process with one thread, which runs the same microbatches one after another while
   another one does so on the other core, since cores slow each other down: the share of the ideal speed, which is
   2 m / (m + 1) for m microbatches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from figures import draw_bars, print_machine, run_with_meeting, slowest, torch_world
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

import ferrodist as fd
from ferrodist.parallel.pipeline import Costs, build_schedule, predict
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = fd.PipelineSchedule
PEERS = {
    Kind.GPIPE: (schedules.ScheduleGPipe, 1),
    Kind.ONE_F_ONE_B: (schedules.Schedule1F1B, 1),
    Kind.INTERLEAVED_ONE_F_ONE_B: (schedules.ScheduleInterleaved1F1B, 2),
    Kind.LOOPED_BFS: (schedules.ScheduleLoopedBFS, 2),
    Kind.ZERO_BUBBLE_V: (schedules.ScheduleZBVZeroBubble, 2),
    Kind.DUAL_PIPE_V: (schedules.ScheduleDualPipeV, 2),
}
"""torch's schedule for each of ours, and how many stages a rank has."""

SIZES = {"4 KiB": (64, 16), "64 KiB": (256, 64), "1 MiB": (1024, 256)}
"""Of an activation: features, and samples of a microbatch."""

NUM_MICROBATCHES = 8
WARM_UP = 3


class Layer(nn.Module):
    """A stage: a linear layer and a nonlinearity."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)
            self.linear.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (samples, width) to the same shape."""
        return torch.tanh(self.linear(x))


@dataclass
class Contender:
    """One way to make a step.

    Args:
        step: Makes it.
        stages: This rank's, by their numbers.
    """

    step: Callable[[], None]
    stages: dict[int, nn.Module]

    def clear(self) -> None:
        """Drop all gradients."""
        for stage in self.stages.values():
            stage.zero_grad()


def make_ours(
    group: fd.Backend, kind: fd.PipelineSchedule, width: int, batch: tuple[torch.Tensor, torch.Tensor]
) -> Contender:
    """A step of ours."""
    stages = [Layer(width, seed) for seed in range(2 * PEERS[kind][1])]
    pipeline = fd.Pipeline(stages, group, NUM_MICROBATCHES, schedule=kind, loss_fn=functional.mse_loss)
    own = {number: stages[number] for number in pipeline.schedule.rank_stages[group.rank]}
    return Contender(lambda: pipeline.step(*batch), own)


def make_peer(rank: int, kind: fd.PipelineSchedule, width: int, batch: Sequence[torch.Tensor]) -> Contender:
    """A step of torch's."""
    peer, stages_per_rank = PEERS[kind]
    inputs, targets = batch
    ranks = build_schedule(kind, 2, NUM_MICROBATCHES, stages_per_rank).stage_ranks
    own = {number: Layer(width, number) for number, of in enumerate(ranks) if of == rank}
    stages = [PipelineStage(module, number, len(ranks), torch.device("cpu")) for number, module in own.items()]
    runner = peer(
        stages if issubclass(peer, schedules.PipelineScheduleMulti) else stages[0],
        NUM_MICROBATCHES,
        functional.mse_loss,
    )
    given: list[Any] = [inputs] if ranks[0] == rank else []
    keywords: dict[str, Any] = {"target": targets, "losses": []} if ranks[-1] == rank else {}

    def step() -> None:
        if keywords:
            keywords["losses"].clear()
        runner.step(*given, **keywords, return_outputs=False)

    return Contender(step, own)


def check(contender: Contender, width: int, num_stages: int, batch: Sequence[torch.Tensor]) -> None:
    """Raise unless a step gives the gradients of one process."""
    contender.clear()
    contender.step()
    whole = nn.Sequential(*[Layer(width, seed) for seed in range(num_stages)])
    for part, target in zip(*(tensor.chunk(NUM_MICROBATCHES) for tensor in batch), strict=True):
        (functional.mse_loss(whole(part), target) / NUM_MICROBATCHES).backward()
    for number, stage in contender.stages.items():
        for mine, expected in zip(stage.parameters(), whole[number].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-7)


def time_steps(contender: Contender, group: fd.Backend, num_steps: int) -> float:
    """Seconds for a step."""
    for _ in range(WARM_UP):
        contender.step()
    contender.clear()
    group.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        contender.step()
    group.barrier()
    return (time.perf_counter() - began) / num_steps


def compare_peers(group: fd.Backend, num_rounds: int, num_steps: int, meeting_file: str) -> dict[Any, list[float]]:
    """Question 1, as one rank."""
    found: dict[Any, list[float]] = {}
    with torch_world(group, meeting_file):
        for size, (width, samples) in SIZES.items():
            generator = torch.Generator().manual_seed(1)
            batch = [torch.randn(NUM_MICROBATCHES * samples, width, generator=generator) for _ in range(2)]
            for kind, (_, stages_per_rank) in PEERS.items():
                contenders = {
                    "ours": make_ours(group, kind, width, batch),
                    "torch": make_peer(group.rank, kind, width, batch),
                }
                for contender in contenders.values():
                    check(contender, width, 2 * stages_per_rank, batch)
                for _ in range(num_rounds):
                    for name, contender in contenders.items():
                        found.setdefault((size, kind.value, name), []).append(time_steps(contender, group, num_steps))
                if group.rank == 0:
                    print(f"measured {kind.value} with activations of {size}", flush=True)
    return found


class _Wait(torch.autograd.Function):
    """Passes a tensor on; its forward and backward take fixed times."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_seconds: float, backward_seconds: float) -> torch.Tensor:
        time.sleep(forward_seconds)
        ctx.seconds = backward_seconds
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Waiting(nn.Module):
    """A stage that takes time, and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 64))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (samples, 64) to the same shape; half of the backward is for x, and half for the weight."""
        return _Wait.apply(x, self.seconds, self.seconds) + _Wait.apply(self.weight, 0.0, self.seconds)


def compare_prediction(group: fd.Backend, num_rounds: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Question 2, as one rank: seconds for a step, and what was predicted."""
    torch.set_num_threads(1)
    found = {}
    for kind in Kind:
        schedule = build_schedule(kind, group.world_size, 2 * group.world_size)
        stages = [Waiting(seconds) for _ in range(schedule.num_stages)]
        # The first stage's input wants no gradient, so that there is no backward for it.
        inputs_cost = [0.0, *[seconds] * (schedule.num_stages - 1)]
        costs = Costs(forward=seconds, backward_input=inputs_cost, backward_weight=seconds)
        pipeline = fd.Pipeline(
            stages, group, schedule.num_microbatches, schedule=schedule, loss_fn=lambda output, _: output.sum()
        )
        batch = torch.zeros(schedule.num_microbatches, 64)
        contender = Contender(lambda of=pipeline, batch=batch: of.step(batch, batch), {})
        taken = statistics.median(time_steps(contender, group, 1) for _ in range(num_rounds))
        found[kind.value] = taken, predict(schedule, costs).duration
        if group.rank == 0:
            print(f"measured {kind.value} against its prediction", flush=True)
    return found


def make_real_stages() -> list[nn.Module]:
    """Two stages of equal cost, large enough that messages are little."""
    return [nn.Sequential(*[Layer(1024, 10 * stage + number) for number in range(4)]) for stage in range(2)]


def compare_one_process(group: fd.Backend, num_rounds: int) -> dict[int, tuple[float, float]]:
    """Question 3, as one rank: for each number of microbatches the seconds of a step, and of one process."""
    torch.set_num_threads(1)
    found = {}
    for num_microbatches in (4, 8, 16):
        generator = torch.Generator().manual_seed(1)
        # With inputs that want gradients both stages have as much to do.
        batch = [
            fd.Microbatches(torch.randn(128, 1024, generator=generator) for _ in range(num_microbatches))
            for _ in range(2)
        ]
        for part in batch[0]:
            part.requires_grad_()
        stages = make_real_stages()
        pipeline = fd.Pipeline(stages, group, num_microbatches, schedule=Kind.ONE_F_ONE_B, loss_fn=functional.mse_loss)
        whole = nn.Sequential(*make_real_stages())

        def alone(whole: nn.Module = whole, batch: list[fd.Microbatches] = batch) -> None:
            for part, target in zip(*batch, strict=True):
                functional.mse_loss(whole(part), target).backward()

        both = Contender(lambda of=pipeline, batch=batch: of.step(*batch), {})
        times = [(time_steps(both, group, 1), time_steps(Contender(alone, {}), group, 1)) for _ in range(num_rounds)]
        together, single = (statistics.median(column) for column in zip(*times, strict=True))
        found[num_microbatches] = together, single
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--plot", help="a PNG file for the ratios")
    options = parser.parse_args()
    print_machine()
    ratios = print_peers(slowest(run_with_meeting(compare_peers, 2, options.rounds, options.steps, timeout=1800)))
    print(f"\n{'four ranks that wait':28} {'ms a step':>10} {'predicted':>10} {'ratio':>8}")
    for kind, (taken, predicted) in run_ranks(
        compare_prediction, 4, options.rounds, 0.05, backend="native", timeout=900
    )[0].items():
        print(f"{kind:28} {1e3 * taken:10.1f} {1e3 * predicted:10.1f} {taken / predicted:8.3f}")
    print(f"\n{'two stages on two ranks':28} {'ms a step':>10} {'alone':>10} {'of ideal':>8}")
    found = run_ranks(compare_one_process, 2, options.rounds, backend="native", timeout=900)[0]
    for count, (taken, alone) in found.items():
        ideal = alone / 2 * (count + 1) / count
        print(f"{f'{count} microbatches':28} {1e3 * taken:10.1f} {1e3 * alone:10.1f} {ideal / taken:8.2f}")
    if options.plot:
        shades = dict(zip(SIZES, ("#08519c", "#3182bd", "#9ecae1"), strict=True))
        bars = {f"{kind}, {size}": ratio for (size, kind), ratio in ratios.items()}
        title = "torch over gloo: time of a step beside ferrodist's"
        draw_bars(options.plot, {title: bars}, "ratio", line=1, color_of=lambda label: shades[label.split(", ")[-1]])


def print_peers(times: dict[Any, list[float]]) -> dict[tuple[str, str], float]:
    """The first table; the ratios by size and schedule."""
    print(f"{'activation, schedule':28} {'ours, ms':>10} {'torch, ms':>10} {'ratio':>8} {'least':>8} {'most':>8}")
    ratios = {}
    for size, kind, name in times:
        if name == "ours":
            ours, theirs = times[size, kind, "ours"], times[size, kind, "torch"]
            of = sorted(their / our for our, their in zip(ours, theirs, strict=True))
            ratios[size, kind] = statistics.median(of)
            middle = [1e3 * statistics.median(each) for each in (ours, theirs)]
            figures = f"{middle[0]:10.2f} {middle[1]:10.2f} {ratios[size, kind]:8.2f} {of[0]:8.2f} {of[-1]:8.2f}"
            print(f"{f'{size}, {kind}':28} {figures}")
    return ratios


if __name__ == "__main__":
    main()
