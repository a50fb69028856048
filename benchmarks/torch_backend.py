"""torch's own programs on ferrodist and on gloo: a small all_reduce, DDP and FSDP2.

    python benchmarks/torch_backend.py [--rounds 7] [--steps 20] [--calls 20000]

Two ranks on one host, one computing thread each. The calls are ``torch.distributed.all_reduce`` of 8 bytes, whose
results are compared with the sum; the figure is the slower rank's median. The training is that of
``training_step.py``: four linear layers of 2048 x 2048 on 16 rows a rank with SGD, by torch's DistributedDataParallel
and by its fully_shard; its time is the slower rank's for a step. Both backends run in every round, each in processes
of its own; figures are medians of the rounds, ratios medians of the rounds' ratios. All variants end with the same
weights, to rounding, or the benchmark fails. The training also runs with a barrier in place of each collective, which
sends nothing and gives wrong weights: the difference to gloo is the most that any backend could win.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from figures import median_ratio, print_machine, run_with_meeting, torch_world
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import ferrodist as fd

WIDTH, ROWS, NUM_LAYERS = 2048, 16, 4
WARM_UP = 6
BACKENDS = ("gloo", "ferrodist")
NOTHING = "nothing sent"


class Result(NamedTuple):
    """The results of a rank."""

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


class _NotSent(AllGather, ReduceScatter):
    """FSDP2's collectives without what they are for; in memory of its own, as by default, or in the group's."""

    def __init__(self, *, is_lent: bool) -> None:
        self._is_lent = is_lent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate the buffers of the messages."""
        if self._is_lent:
            return dist.group.WORLD.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(size)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *_: object, async_op: bool = False, **__: object) -> dist.Work | None:
        """Meet."""
        return dist.barrier(async_op=async_op)


def data_parallel_alone(model: torch.nn.Sequential) -> torch.nn.Module:
    """`data_parallel` with nothing sent."""
    wrapped = data_parallel(model)
    wrapped.register_comm_hook(None, lambda _, bucket: _met(bucket.buffer()))
    return wrapped


def _met(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return dist.barrier(async_op=True).get_future().then(lambda _: tensor)


def sharded_alone(model: torch.nn.Sequential, *, is_lent: bool) -> torch.nn.Module:
    """`sharded`, or `sharded_in_own_memory`, with nothing sent."""
    sharded(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_custom_all_gather(_NotSent(is_lent=is_lent))
            module.set_custom_reduce_scatter(_NotSent(is_lent=is_lent))
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
    with torch_world(group, meeting_file, backend):
        return program()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--calls", type=int, default=20000, help="of a round")
    options = parser.parse_args()
    steps = options.steps
    programs: dict[str, dict[str, Callable[[], Result]]] = {
        "all_reduce of 8 bytes": dict.fromkeys(BACKENDS, lambda: call(options.calls)),
        "DDP": dict.fromkeys(BACKENDS, lambda: train(data_parallel, steps))
        | {NOTHING: lambda: train(data_parallel_alone, steps)},
        "FSDP2": dict.fromkeys(BACKENDS, lambda: train(sharded, steps))
        | {NOTHING: lambda: train(partial(sharded_alone, is_lent=False), steps)},
        "FSDP2, the group's memory": dict.fromkeys(BACKENDS, lambda: train(sharded_in_own_memory, steps))
        | {NOTHING: lambda: train(partial(sharded_alone, is_lent=True), steps)},
    }
    times: dict[tuple[str, str], list[float]] = {(name, way): [] for name in programs for way in programs[name]}
    norms: dict[str, set[float]] = {name: set() for name in programs}
    print_machine()
    for number in range(1, options.rounds + 1):
        for name, ways in programs.items():
            for way, program in ways.items():
                torch_backend = "ferrodist" if way == NOTHING else way
                results = run_with_meeting(measure, 2, torch_backend, program, backend="tcp", timeout=300)
                times[name, way].append(max(result.seconds for result in results))
                if way != NOTHING:
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
    heads = [f"{head:>9}" for head in ("gloo", "ferrodist", "least", "most", "nothing")]
    print(f"{'':26} {'':>4} {' '.join(heads)} {'times as fast':>14} {'at most':>8}")
    for name in dict.fromkeys(name for name, _ in times):
        unit, factor = ("us", 1e6) if "all_reduce" in name else ("ms", 1e3)
        theirs, ours, none = times[name, "gloo"], times[name, "ferrodist"], times.get((name, NOTHING), [])
        numbers = [statistics.median(theirs), statistics.median(ours), min(ours), max(ours)]
        texts = [f"{factor * each:9.1f}" for each in numbers]
        texts.append(f"{factor * statistics.median(none):9.1f}" if none else f"{'':9}")
        texts.append(f"{median_ratio(theirs, ours):14.2f}" + (f" {median_ratio(theirs, none):8.2f}" if none else ""))
        print(f"{name:26} {unit:>4} {' '.join(texts)}")


if __name__ == "__main__":
    main()
