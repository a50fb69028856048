"""Ring attention over 1, 2 and 4 ranks: time, peak memory a rank, and what overlapping messages saves.

    python benchmarks/context_parallel.py [--tokens 8192 32768] [--ranks 1 2 4] [--rounds 3]

Causal attention of one sequence, 4 heads of 64, float32, forward and backward, ranks as processes with one computing
thread each. A figure is the slowest rank's time, the median of the rounds; variants alternate in the same processes.
Memory is the growth of a rank's peak resident memory over that before the inputs were made, inputs and gradients
included, in a fresh process. Outputs and gradients are compared with those of one process up to 8192 tokens, and
beyond with those of the same queries of the last 64 tokens.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import ferrodist as fd
from ferrodist.testing import run_ranks

HEADS, SIZE, CHECKED = 4, 64, 64
TOLERANCE = 1e-5


def make_inputs(length: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(4)]


def step(group: fd.Backend, parts: list[torch.Tensor], *, overlap: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A forward and a backward."""
    leaves = [part.requires_grad_() for part in parts[:3]]
    output = fd.ring_attention(*leaves, group=group, causal=True, overlap=overlap)
    return output.detach(), list(torch.autograd.grad(output, leaves, parts[3]))


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(group: fd.Backend, length: int) -> float:
    """MiB that a step adds to a rank's peak."""
    torch.set_num_threads(1)
    local = fd.context_shard(torch.empty(length), 0, group).shape[0]
    small = [torch.randn(1, HEADS, 64, SIZE) for _ in range(4)]
    step(group, small, overlap=True)
    before = peak_bytes()
    step(group, [torch.randn(1, HEADS, local, SIZE) for _ in range(4)], overlap=True)
    return (peak_bytes() - before) / 2**20


def measure_time(group: fd.Backend, length: int, rounds: int) -> dict[bool, list[float]]:
    """Seconds of each round, with and without overlap; the results are checked first."""
    torch.set_num_threads(1)
    whole = make_inputs(length)
    parts = [fd.context_shard(x, 2, group) for x in whole]
    output, grads = step(group, parts, overlap=True)
    check(whole, [fd.context_unshard(x, 2, group) for x in (output, *grads)])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for overlap in (True, False):
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


def main() -> None:
    """Print a line for each length and number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for length in options.tokens:
        for num_ranks in options.ranks:
            memory = max(run_ranks(lambda g, n=length: measure_memory(g, n), num_ranks, backend="native", timeout=600))
            rounds = options.rounds
            results = run_ranks(
                lambda g, n=length, r=rounds: measure_time(g, n, r), num_ranks, backend="native", timeout=600
            )
            overlapped, plain = (
                statistics.median(max(each) for each in zip(*[r[o] for r in results], strict=True))
                for o in (True, False)
            )
            print(
                f"{length} tokens, {num_ranks} ranks: {overlapped:.2f} s, {plain:.2f} s without overlap,"
                f" {memory:.0f} MiB a rank",
                flush=True,
            )


if __name__ == "__main__":
    main()
