"""torch's own programs on ferrodist and on gloo: a small all_reduce, DDP and FSDP2.

    python benchmarks/torch_backend.py [--rounds 7] [--steps 20] [--calls 20000]

Two ranks on one host, one computing thread each. The calls are ``torch.distributed.all_reduce`` of 8 bytes, whose
results are compared with the sum; each rank's median counts, and the slower rank's of the two. The training is that of
``training_step.py``: four linear layers of 2048 x 2048 on 16 rows a rank with SGD, by torch's DistributedDataParallel
and by its fully_shard; its time is the slower rank's for a step. Both backends run in every round, each in processes of
its own; figures are medians of the rounds, ratios medians of the rounds' ratios. All ways end with the same weights,
to rounding, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import ferrodist as fd

WIDTH, ROWS, NUM_LAYERS = 2048, 16, 4
WARM_UP = 6
BACKENDS = ("gloo", "ferrodist")


class Result(NamedTuple):
    """What a rank gives back."""

    seconds: float
    norm: float  # of the weights at the end, of the whole model; of calls the last sum


def call(num_times: int) -> Result:
    """Sum 8 bytes over and over."""
    tensor, seconds = torch.zeros(1, dtype=torch.float64), []
    for number in range(num_times + 100):
        tensor.fill_(number + dist.get_rank())
        began = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
        if tensor.item() != 2 * number + 1:
            raise RuntimeError(f"the sum of {number} and {number + 1} is not {tensor.item()}")
    return Result(statistics.median(seconds[100:]), tensor.item())


def data_parallel(model: torch.nn.Sequential) -> torch.nn.Module:
    """The model in torch's DDP."""
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: torch.nn.Sequential) -> torch.nn.Module:
    """The model in torch's FSDP2."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_in_own_memory(model: torch.nn.Sequential) -> torch.nn.Module:
    """The same, told to take memory for communication from the group: ferrodist has some, gloo has none."""
    sharded(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def train(wrap: Callable[[torch.nn.Sequential], torch.nn.Module], num_steps: int) -> Result:
    """Train as one rank."""
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    began = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / num_steps
    weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return Result(seconds, math.sqrt(sum(each.detach().double().square().sum().item() for each in weights)))


def measure(group: fd.Backend, backend: str, program: Callable[[], Result], meeting_file: str) -> Result:
    """Run as one rank of a world of torch's."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size)
    result = program()
    dist.destroy_process_group()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--calls", type=int, default=20000, help="of a round")
    options = parser.parse_args()
    programs: dict[str, Callable[[], Result]] = {
        "all_reduce of 8 bytes": lambda: call(options.calls),
        "DDP": lambda: train(data_parallel, options.steps),
        "FSDP2": lambda: train(sharded, options.steps),
        "FSDP2, the group's memory": lambda: train(sharded_in_own_memory, options.steps),
    }
    times: dict[tuple[str, str], list[float]] = {(name, backend): [] for name in programs for backend in BACKENDS}
    norms: dict[str, set[float]] = {name: set() for name in programs}
    print(f"load average {os.getloadavg()[0]:.1f} at the beginning, of {os.cpu_count()} cores")
    for number in range(1, options.rounds + 1):
        for name, program in programs.items():
            for backend in BACKENDS:
                with tempfile.TemporaryDirectory() as folder:
                    results = run_ranks(measure, 2, backend, program, f"{folder}/meeting", backend="tcp", timeout=300)
                times[name, backend].append(max(result.seconds for result in results))
                norms[name] |= {result.norm for result in results}
        print(f"round {number} of {options.rounds}", flush=True)
    check(norms)
    report(times)


def check(norms: dict[str, set[float]]) -> None:
    """Raise unless all that train have the same weights."""
    found = set.union(*[norms[name] for name in norms if "all_reduce" not in name])
    if not math.isclose(min(found), max(found), rel_tol=1e-6):
        raise RuntimeError(f"the weights' norms differ: {norms}")


def report(times: dict[tuple[str, str], list[float]]) -> None:
    """Print the table: microseconds a call, milliseconds a step."""
    print(f"{'':26} {'':>4} {'gloo':>9} {'ferrodist':>10} {'least':>9} {'most':>9} {'times as fast':>14}")
    for name in dict.fromkeys(name for name, _ in times):
        unit, factor = ("us", 1e6) if "all_reduce" in name else ("ms", 1e3)
        theirs, ours = times[name, "gloo"], times[name, "ferrodist"]
        ratio = statistics.median(their / our for their, our in zip(theirs, ours, strict=True))
        numbers = [statistics.median(theirs), statistics.median(ours), min(ours), max(ours)]
        texts = " ".join(f"{factor * each:{9 + (place == 1)}.1f}" for place, each in enumerate(numbers))
        print(f"{name:26} {unit:>4} {texts} {ratio:14.2f}")


if __name__ == "__main__":
    main()
