"""Worlds of torch, times of the slowest rank, profiles, tables and plots: what the benchmarks share."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile

from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import ferrodist as fd

BLUE, GRAY = "#08519c", "#bbbbbb"

_Key = TypeVar("_Key")
_WAIT = "_c10d_functional::wait_tensor"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
_PRODUCTS += ("_scaled_dot_product_flash_attention_for_cpu_backward",)


def run_with_meeting(
    program: Callable[..., Any], num_ranks: int, *arguments: Any, backend: str = "native", timeout: float = 3600
) -> list[Any]:
    """Run a program on ranks that are processes; its last argument is the file at which torch's ranks meet."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(program, num_ranks, *arguments, f"{folder}/meeting", backend=backend, timeout=timeout)


@contextlib.contextmanager
def torch_world(group: fd.Backend, meeting_file: str, backend: str = "gloo") -> Iterator[None]:
    """A block in which torch.distributed has the group's ranks, each with one computing thread."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{meeting_file}", rank=group.rank, world_size=group.world_size
    )
    yield
    torch.distributed.destroy_process_group()


def time_steps(step: Callable[[], object], num_steps: int, *, warm_up: int = 2) -> float:
    """Seconds for a step, after some that don't count."""
    for _ in range(warm_up):
        step()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - began) / num_steps


def time_rounds(
    steps: Mapping[_Key, Callable[[], object] | None], num_rounds: int, num_steps: int, *, label: str, warm_up: int = 2
) -> dict[_Key, list[float]]:
    """Seconds for a step of each variant in each round, in `torch_world`; the first variant is another in each round.

    Args:
        steps: The variants, the same on all ranks; None for one that this rank only waits for.
        num_rounds: The number of rounds.
        num_steps: The number of steps of a variant in a round.
        label: What is measured, shown by rank 0 as it goes on.
        warm_up: The number of steps before those, which don't count.
    """
    seconds: dict[_Key, list[float]] = {variant: [] for variant in steps}
    variants = list(steps)
    for number in range(num_rounds):
        first = number % len(variants)
        for variant in variants[first:] + variants[:first]:
            torch.distributed.barrier()  # over gloo, which sleeps: a rank that waits takes no core from the others
            step = steps[variant]
            if step is not None:
                seconds[variant].append(time_steps(step, num_steps, warm_up=warm_up))
        if torch.distributed.get_rank() == 0:
            print(f"{label}: round {number + 1} of {num_rounds}", flush=True)
    torch.distributed.barrier()
    return seconds


def slowest(results: Sequence[Mapping[_Key, list[float]]]) -> dict[_Key, list[float]]:
    """The slowest rank's figure of each round, of the ranks that measured a variant."""
    return {
        key: [max(each) for each in zip(*[result[key] for result in results if result[key]], strict=True)]
        for key in results[0]
    }


def median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(seconds, others, strict=True))


class StepProfile(NamedTuple):
    """Seconds of a rank's step, of each of its messages, and of all matrix products with those of attention."""

    seconds: float
    messages: list[float]
    products: float
    over: set[str]  # what has moved the messages: "ferrodist", "gloo"


def profile_steps(step: Callable[[], object], num_steps: int = 3) -> list[StepProfile]:
    """Where some steps spend their time, by torch's profiler. A message's time ends when its result is there."""
    step()
    return [_profile_step(step) for _ in range(num_steps)]


def _is_product(event: Any) -> bool:
    return bool(event.name.removeprefix("aten::") in _PRODUCTS)


def _is_inside_of_product(event: Any) -> bool:
    """Whether it is the operator on a shard of one on a torch DTensor, which has the same name."""
    outer = event.cpu_parent
    while outer is not None and not _is_product(outer):
        outer = outer.cpu_parent
    return outer is not None


def _profile_step(step: Callable[[], object]) -> StepProfile:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
    calls, products, over = [], 0.0, set()
    for event in profiler.events():
        origin = event.name.partition(":")[0]
        if origin in ("ferrodist", "gloo") or event.name == _WAIT:
            calls.append((event.time_range.start, event.time_range.end, origin))
            over |= {origin} - {_WAIT.partition(":")[0]}
        elif _is_product(event) and not _is_inside_of_product(event):
            products += event.time_range.elapsed_us()
    messages: list[float] = []
    reached = 0.0
    for start, end, origin in sorted(calls):
        taken = max(0.0, end - max(start, reached))
        if origin == "gloo" or (origin == "ferrodist" and taken):  # and not a call inside of another
            messages.append(taken)
        elif messages:
            messages[-1] += taken
        reached = max(reached, end)
    return StepProfile(seconds, [1e-6 * one for one in messages], 1e-6 * products, over)


PARTS = ("messages", "moving, ms", "waiting, ms", "products, ms", "rest, ms")
"""The columns of `parts_of`."""


def parts_of(profiles: Sequence[Sequence[StepProfile]], seconds: float) -> list[str]:
    """The parts of a step of so many seconds, on the rank that waits least, from the ranks' profiles of some steps.

    Those of the step whose time is the middle one. A message moves from when the last rank comes to it, and the others
    wait until then.
    """
    by_step = sorted(zip(*profiles, strict=True), key=lambda step: max(one.seconds for one in step))
    step = by_step[len(by_step) // 2]
    own = min(step, key=lambda one: sum(one.messages))
    moving = sum(min(each) for each in zip(*[one.messages for one in step], strict=True))
    total = sum(own.messages)
    parts = (moving, total - moving, own.products, seconds - total - own.products)
    return [str(len(own.messages)), *[f"{1e3 * part:.1f}" for part in parts]]


def spread(seconds: Sequence[float]) -> list[str]:
    """Median, least and most in milliseconds: the columns of `SPREAD`."""
    return [f"{1e3 * one:.1f}" for one in (statistics.median(seconds), min(seconds), max(seconds))]


SPREAD = ("ms a step", "least", "most")


def print_machine() -> None:
    """Print the date, the machine and its load."""
    loads = f"load average {os.getloadavg()[0]:.1f} at the beginning"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {loads}; torch {torch.__version__},", end=" ")
    print(f"Python {platform.python_version()}", flush=True)


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Print a table in Markdown, a row for each key."""
    lines = [["", *columns], *[[name, *cells] for name, cells in rows.items()]]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for line in lines:
        print(f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |")


_MOST_PANELS = 8
"""The number of plots below one another."""


def draw_bars(
    path: str | Path,
    panels: Mapping[str, Mapping[str, float]],
    xlabel: str,
    *,
    number: str = "%.2f",
    line: float | None = None,
    color_of: Callable[[str], str] | None = None,
) -> None:
    """Draw bars into a PNG file.

    Args:
        path: The file.
        panels: The values of bars by their labels, by the titles of the plots: of few below one another, else in two
            columns.
        xlabel: What the values are.
        number: The format of the values beside their bars.
        line: A value to draw a line at.
        color_of: The color of a label's bar; by default ferrodist's are blue, and others gray.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for plots

    color_of = color_of or (lambda label: BLUE if label.startswith("ferrodist") else GRAY)
    num_columns = 1 if len(panels) <= _MOST_PANELS else 2
    sizes = [0.32 * len(values) + 0.7 for values in panels.values()]
    heights = [max(sizes[row : row + num_columns]) for row in range(0, len(sizes), num_columns)]
    figure = Figure(figsize=(8 * num_columns, sum(heights)), layout="constrained", dpi=150 // num_columns)
    plots = figure.subplots(len(heights), num_columns, squeeze=False, height_ratios=heights)
    for axes, (title, values) in zip(plots.flat, panels.items(), strict=False):
        labels = list(reversed(values))
        bars = axes.barh(labels, [values[label] for label in labels], color=[color_of(label) for label in labels])
        axes.bar_label(bars, fmt=number, padding=3)
        if line is not None:
            axes.axvline(line, color="#888888", linewidth=1, linestyle="--")
        axes.set(title=title, xlabel=xlabel)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")
