"""Latency and throughput of remote calls, beside torch's RPC, gRPC and Ray.

    python benchmarks/rpc.py [--rounds 5] [--seconds 1] [--without Ray] [--plot rpc.png]

Two processes on one host, one computing thread each; the function returns its argument. `rpc_systems.py` sets up each
system. Every system of every round has processes of its own, and no two run at once. Systems that are not installed
are named and left out: ``pip install grpcio ray``.

1. The round trip of a number: the median of the calls and their 99th percentile; with 3 ms between a result and the
   next call ("now and then"), and without ("back to back").
2. Calls a second of one thread, with 500 to 1,000 of them in flight.
3. Calls a second of 8 threads, each of which waits for its results.
4. Calls a second of both processes together, when each calls the other from one thread.
5. Round trips of float32 tensors. GiB/s count both directions; "a copy in memory" is the time to write the tensor once
   to memory that was used before: the least for any system that doesn't share the tensor's memory.

A figure is the median of the rounds; a ratio is the median of the rounds' ratios, above 1 where ferrodist is faster,
and below where it is slower. All results are compared with the arguments, or the benchmark fails; tensors are
rewritten before each call, which is not in the time, and neither is the comparison.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import torch
from rpc_systems import SYSTEMS, WARM_UP_SECONDS, System, checked, rate_of

from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Event

    import ferrodist as fd

OURS, *PEERS = SYSTEMS
COPY = "a copy in memory"
LATENCIES = ("now and then, median", "now and then, 99 %", "back to back, median", "back to back, 99 %")
RATES = ("1,000 under way", "8 threads", "both ways at once")
SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "128 MiB": 1 << 27}
"""Of tensors, in bytes."""

GAP_SECONDS = 0.003
MOST_UNDER_WAY = 1000
NUM_THREADS = 8
NUM_WARM_UP_TENSORS = 2
LEAST_TENSORS = 5

Found = dict[tuple[str, str], list[float]]
"""Seconds, or calls a second, of each round, by quantity and system."""


def measure(group: fd.Backend, name: str, seconds: float, folder: str, done: Event) -> dict[str, float]:
    """One system in one round, as one rank; the second rank serves."""
    torch.set_num_threads(1)
    with SYSTEMS[name](group, folder) as system:
        group.barrier()
        found = {}
        if group.rank == 0:
            rate_of(system.call, WARM_UP_SECONDS)
            found = measure_calls(system, seconds) | measure_tensors(system.echo, seconds)
            done.set()
        else:
            done.wait()  # which takes no processor, as a barrier might
        group.barrier()
    return found


def measure_copy(group: fd.Backend, seconds: float) -> dict[str, float]:
    """The time of copies, as the only rank."""
    del group
    torch.set_num_threads(1)
    targets = {size: torch.zeros(size // 4) for size in SIZES.values()}
    return measure_tensors(lambda tensor: targets[tensor.nbytes].copy_(tensor), seconds)


def measure_calls(system: System, seconds: float) -> dict[str, float]:
    """Questions 1 to 4."""
    now_and_then = time_calls(system, seconds, GAP_SECONDS)
    back_to_back = time_calls(system, seconds, 0)
    figures = [*now_and_then, *back_to_back, rate_under_way(system, seconds), rate_of_threads(system, seconds)]
    return dict(zip(LATENCIES + RATES, [*figures, system.rate_both_ways(seconds)], strict=True))


def time_calls(system: System, seconds: float, gap_seconds: float) -> tuple[float, float]:
    """Seconds of a call: the median, and what 99 % stay below."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        result = system.call(len(times))
        times.append(time.perf_counter() - began)
        checked(result, len(times) - 1)
        if gap_seconds:
            time.sleep(gap_seconds)
    times.sort()
    return statistics.median(times), times[round(0.99 * (len(times) - 1))]


def rate_under_way(system: System, seconds: float) -> float:
    """Calls a second of one thread that waits for the older half whenever as many as may be are under way."""
    count, began = 0, time.perf_counter()
    started: list[object] = []
    while (taken := time.perf_counter() - began) < seconds:
        started += [system.start(count + number) for number in range(len(started), MOST_UNDER_WAY)]
        older = started[: MOST_UNDER_WAY // 2]
        checked(system.collect(older), list(range(count, count + len(older))))
        count += len(older)
        del started[: len(older)]
    system.collect(started)
    return count / taken


def rate_of_threads(system: System, seconds: float) -> float:
    """Calls a second of several threads."""
    rates: list[float] = []
    threads = [threading.Thread(target=lambda: rates.append(rate_of(system.call, seconds))) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(rates) < NUM_THREADS:
        raise RuntimeError(f"{NUM_THREADS - len(rates)} of {NUM_THREADS} threads failed")
    return sum(rates)


def measure_tensors(echo: Callable[[torch.Tensor], torch.Tensor], seconds: float) -> dict[str, float]:
    """Question 5: the median of the calls, for each size."""
    found = {}
    for label, size_bytes in SIZES.items():
        tensor = torch.arange(size_bytes // 4, dtype=torch.float32)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < LEAST_TENSORS + NUM_WARM_UP_TENSORS:
            tensor += 1
            began = time.perf_counter()
            result = echo(tensor)
            times.append(time.perf_counter() - began)
            if not torch.equal(result, tensor):
                raise RuntimeError(f"an echo of {label} came back as something else")
            del result  # which may hold memory that the next one wants
        found[label] = statistics.median(times[NUM_WARM_UP_TENSORS:])
    return found


def run_round(number: int, names: Sequence[str], seconds: float) -> dict[tuple[str, str], float]:
    """All systems once; each round begins with another one."""
    found = {}
    first = number % len(names)
    for name in [*names[first:], *names[:first]]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if name == COPY:
                results = run_ranks(measure_copy, 1, seconds, backend="native", timeout=600)
            else:
                done = multiprocessing.get_context("fork").Event()
                results = run_ranks(measure, 2, name, seconds, folder, done, backend="native", timeout=600)
        found.update({(quantity, name): figure for quantity, figure in results[0].items()})
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement in a round")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], help="systems to leave out")
    parser.add_argument("--plot", help="a PNG file for the ratios")
    options = parser.parse_args()
    reasons = {name: "as --without says" if name in options.without else SYSTEMS[name].missing() for name in PEERS}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{name} is left out: {reason}", flush=True)
    names = [OURS, *[name for name in PEERS if reasons[name] is None], COPY]
    distributions = [SYSTEMS[name].distribution for name in names[:-1]]
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in distributions)
    print(f"{versions}, Python {platform.python_version()}, {os.cpu_count()} processors")
    found: Found = {}
    for number in range(options.rounds):
        for key, figure in run_round(number, names, options.seconds).items():
            found.setdefault(key, []).append(figure)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    print_calls(found, names)
    print_tensors(found, names)
    if options.plot:
        draw(found, names, options.plot)


def ratio_of(found: Found, quantity: str, name: str) -> float:
    """The speed of ferrodist relative to another system."""
    pairs = zip(found[quantity, OURS], found[quantity, name], strict=True)
    return statistics.median(our / their if quantity in RATES else their / our for our, their in pairs)


def print_calls(found: Found, names: Sequence[str]) -> None:
    """The table of numbers."""
    print(f"\n{'a number there and back':32} {'':>8} {'median':>9} {'least':>9} {'most':>9} {'ratio':>8}")
    for quantity in LATENCIES + RATES:
        unit, factor = ("us", 1e6) if quantity in LATENCIES else ("calls/s", 1)
        for name in names[:-1]:
            figures = [factor * figure for figure in found[quantity, name]]
            columns = f"{statistics.median(figures):9.0f} {min(figures):9.0f} {max(figures):9.0f}"
            print(f"{f'{quantity}: {name}':32} {unit:>8} {columns} {ratio_of(found, quantity, name):8.2f}")


def print_tensors(found: Found, names: Sequence[str]) -> None:
    """The table of tensors."""
    print(f"\n{'a tensor there and back':32} {'ms':>9} {'least':>9} {'most':>9} {'GiB/s':>8} {'ratio':>8}")
    for label, size_bytes in SIZES.items():
        for name in names:
            figures = [1e3 * figure for figure in found[label, name]]
            middle = statistics.median(figures)
            columns = f"{middle:9.3f} {min(figures):9.3f} {max(figures):9.3f}"
            rate = (size_bytes if name == COPY else 2 * size_bytes) / 2**30 / (middle / 1e3)
            print(f"{f'{label}: {name}':32} {columns} {rate:8.2f} {ratio_of(found, label, name):8.3f}")


def draw(found: Found, names: Sequence[str], path: str) -> None:
    """Draw how many times as fast ferrodist is."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for plots

    figure = Figure(figsize=(10, 6.5), layout="constrained", dpi=150)
    others = [name for name in names if name in PEERS]
    shades = dict(zip(PEERS, ("#08519c", "#3182bd", "#9ecae1"), strict=True))
    for axes, title, quantities in zip(
        figure.subplots(1, 2), ("a number", "a tensor"), (LATENCIES + RATES, tuple(SIZES)), strict=True
    ):
        for place, name in enumerate(others):
            ratios = [ratio_of(found, quantity, name) for quantity in quantities]
            rows = [row + 0.8 * (place + 0.5) / len(others) - 0.4 for row in range(len(quantities))]
            # Bars begin at 1: to the left of it ferrodist is slower.
            widths = [ratio - 1 for ratio in ratios]
            bars = axes.barh(rows, widths, 0.8 / len(others), left=1, color=shades[name], label=name)
            axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=7)
        axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
        axes.set(xscale="log", title=f"{title} there and back", xlabel="how many times as fast ferrodist is")
        axes.set_yticks(range(len(quantities)), quantities)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= tick <= high])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    if others:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(others), frameon=False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
