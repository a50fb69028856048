"""Attention over 1, 2 and 4 ranks: peak memory a rank, time, and what overlapping the ring's messages saves.

    python benchmarks/context_parallel.py --measure memory --tokens 32768 --heads 4
    python benchmarks/context_parallel.py --measure time --tokens 8192 --ranks 2 --rounds 11
    python benchmarks/context_parallel.py --measure time --tokens 8192 --ranks 2 --rounds 11 --mbit 500

Causal attention of one sequence, heads of 64, float32, forward and backward, ranks as processes with one computing
thread each.

Memory is the growth of a rank's peak resident memory in a fresh process, in a forward and in forward and backward. It
counts what a model has there: a hidden state of the rank's tokens, queries, keys and values made of it, which only
attention keeps for backward, the output, its gradient, and the gradients of all. "One process" is torch's attention
with the same around it. The C library's threshold of mmap is fixed, so that freed memory is not counted.

A time is the slowest rank's of a round; the median of the rounds and the fastest are printed. Variants alternate in the
same processes, in turns the first. Outputs and gradients are compared with those of one process up to 8192 tokens, and
beyond with those of the same queries of the last 64 tokens. With ``--mbit`` the ranks run in a network namespace whose
loopback device sends as many megabits a second, all ranks together, by the native engine over TCP.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, CHECKED = 64, 64
TOLERANCE = 1e-5
M_MMAP_THRESHOLD = -3  # of mallopt
METHODS = {"ring": fd.ring_attention, "ulysses": fd.ulysses_attention}


def make_inputs(length: int, heads: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, SIZE, generator=generator) for _ in range(4)]


def step(group: fd.Backend, parts: list[torch.Tensor], *, overlap: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A forward and a backward."""
    leaves = [part.requires_grad_() for part in parts[:3]]
    output = fd.ring_attention(*leaves, group=group, causal=True, overlap=overlap)
    return output.detach(), list(torch.autograd.grad(output, leaves, parts[3]))


def resident_bytes(name: str) -> int:
    """A memory size of this process, as "VmRSS" or its peak "VmHWM"."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def layer(attend: Callable[..., torch.Tensor], length: int, heads: int) -> list[int]:
    """The peaks after a forward of attention between projections, and after the backward."""
    x, grad = (torch.randn(1, length, heads * SIZE) for _ in range(2))
    x.requires_grad_()
    q, k, v = ((x * scale).view(1, length, heads, SIZE).transpose(1, 2) for scale in (1.0, 1.1, 1.2))
    output = attend(q, k, v).transpose(1, 2).reshape(x.shape)
    del q, k, v
    peaks = [resident_bytes("VmHWM")]
    torch.autograd.grad(output, x, grad)
    return [*peaks, resident_bytes("VmHWM")]


def measure_memory(group: fd.Backend, method: str | None, length: int, heads: int) -> list[float]:
    """MiB that a forward adds to a rank's memory, and forward and backward; without a method torch's attention."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    local = fd.context_shard(torch.empty(length), 0, group).shape[0]

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        if method is None:
            return scaled_dot_product_attention(*inputs, is_causal=True)
        return METHODS[method](*inputs, group=group, causal=True)

    layer(attend, min(local, 512), heads)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = resident_bytes("VmRSS")
    return [(peak - before) / 2**20 for peak in layer(attend, local, heads)]


def memory(length: int, heads: int, ranks: list[int]) -> None:
    """Print the memory of one process, and of a rank by each method."""
    alone: list[float] = []
    for method, num_ranks in [(None, 1), *((method, n) for method in METHODS for n in ranks)]:
        if method == "ulysses" and heads % num_ranks:
            continue
        results = run_ranks(
            lambda group, m=method: measure_memory(group, m, length, heads), num_ranks, backend="native", timeout=600
        )
        mib = [max(each) for each in zip(*results, strict=True)]
        alone = alone or mib
        shares = ", ".join(f"{one * num_ranks / other:.2f}" for one, other in zip(mib, alone, strict=True))
        name = f"{method}, {num_ranks} ranks" if method else "one process"
        print(
            f"{length} tokens, {name}: {mib[0]:.0f} MiB a rank in forward, {mib[1]:.0f} with backward; times the"
            f" number of ranks {shares} of one process's",
            flush=True,
        )


def measure_time(group: fd.Backend, length: int, heads: int, rounds: int) -> dict[bool, list[float]]:
    """Seconds of each round, with and without overlap; the results are checked first."""
    torch.set_num_threads(1)
    whole = make_inputs(length, heads)
    parts = [fd.context_shard(x, 2, group) for x in whole]
    output, grads = step(group, parts, overlap=True)
    check(whole, [fd.context_unshard(x, 2, group) for x in (output, *grads)])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for each in range(rounds):
        for overlap in (True, False) if each % 2 else (False, True):
            fd.barrier(group=group)
            start = time.perf_counter()
            step(group, parts, overlap=overlap)
            fd.barrier(group=group)
            seconds[overlap].append(time.perf_counter() - start)
    return seconds


def check(whole: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Compare with one process; of a long sequence the output and query's gradient of its last tokens."""
    q, k, v, grad = whole
    length = q.shape[2]
    is_short = length <= 8192
    first = 0 if is_short else length - CHECKED
    leaves = [x.clone().requires_grad_() for x in (q[:, :, first:], k, v)]
    mask = None if is_short else torch.ones(CHECKED, length, dtype=torch.bool).tril(first)
    expected = scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=is_short)
    grads = torch.autograd.grad(expected, leaves, grad[:, :, first:])
    pairs = [(results[0][:, :, first:], expected.detach()), (results[1][:, :, first:], grads[0])]
    pairs += [(results[2], grads[1]), (results[3], grads[2])] if is_short else []
    for one, other in pairs:
        error = float((one - other).abs().max() / other.abs().max())
        if error > TOLERANCE:
            raise SystemExit(f"a result differs from one process's by {error} of its largest value")


def times(length: int, heads: int, num_ranks: int, rounds: int, backend: str) -> str:
    """Median and fastest times with and without overlap, as text."""
    results = run_ranks(
        lambda group: measure_time(group, length, heads, rounds), num_ranks, backend=backend, timeout=600
    )
    texts = []
    for overlap, name in ((True, "with overlap"), (False, "without")):
        slowest = [max(each) for each in zip(*[result[overlap] for result in results], strict=True)]
        texts.append(f"{name} median {statistics.median(slowest):.4f} s, fastest {min(slowest):.4f} s")
    return "; ".join(texts)


def sent_bytes(length: int, heads: int, num_ranks: int) -> int:
    """What all ranks send in a forward and a backward: keys and values twice, and their gradients."""
    return 2 * 4 * length * heads * SIZE * (2 * (num_ranks - 1) + num_ranks * (num_ranks > 1))


def run_on_slow_link(mbit: float) -> None:
    """Run this program anew, where the loopback device is slow."""
    arguments = shlex.join([sys.executable, *sys.argv, "--backend", "gloo"])
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 128kb latency 400ms"
    script = f"ip link set lo up && {limit} && IS_LIMITED=1 exec {arguments}"
    os.execvp("unshare", ["unshare", "--net", "--map-root-user", "sh", "-c", script])  # noqa: S606, S607


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, help="megabits a second that all ranks together send")
    parser.add_argument("--backend", default="native", help="as of run_ranks, for times")
    options = parser.parse_args()
    if options.mbit and "IS_LIMITED" not in os.environ:
        run_on_slow_link(options.mbit)
    for length in options.tokens:
        if "memory" in options.measure:
            memory(length, options.heads, options.ranks)
        for num_ranks in options.ranks if "time" in options.measure else ():
            line = f"{length} tokens, {num_ranks} ranks: "
            line += times(length, options.heads, num_ranks, options.rounds, options.backend)
            if options.mbit:
                seconds = sent_bytes(length, options.heads, num_ranks) * 8 / options.mbit / 1e6
                line += f"; the messages take {seconds:.4f} s of the link"
            print(line, flush=True)


if __name__ == "__main__":
    main()
