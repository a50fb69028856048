"""Ring attention over 1, 2 and 4 ranks: time, peak memory a rank, and what overlapping messages saves.

    python benchmarks/context_parallel.py [--tokens 8192 32768] [--ranks 1 2 4] [--heads 4] [--rounds 3]
    python benchmarks/context_parallel.py --tokens 32768 --heads 1 --rounds 0         # memory only

Causal attention of one sequence, heads of 64, float32, forward and backward, ranks as processes with one computing
thread each. A time is the slowest rank's of a round; the median of the rounds and the fastest are printed, which is
the less disturbed on a machine that does other work. Variants alternate in the same processes, in turns the first.
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

SIZE, CHECKED = 64, 64
TOLERANCE = 1e-5


def make_inputs(length: int, heads: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, SIZE, generator=generator) for _ in range(4)]


def step(group: fd.Backend, parts: list[torch.Tensor], *, overlap: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A forward and a backward."""
    leaves = [part.requires_grad_() for part in parts[:3]]
    output = fd.ring_attention(*leaves, group=group, causal=True, overlap=overlap)
    return output.detach(), list(torch.autograd.grad(output, leaves, parts[3]))


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(group: fd.Backend, length: int, heads: int) -> float:
    """MiB that a step adds to a rank's peak."""
    torch.set_num_threads(1)
    local = fd.context_shard(torch.empty(length), 0, group).shape[0]
    small = [torch.randn(1, heads, 64, SIZE) for _ in range(4)]
    step(group, small, overlap=True)
    before = peak_bytes()
    step(group, [torch.randn(1, heads, local, SIZE) for _ in range(4)], overlap=True)
    return (peak_bytes() - before) / 2**20


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


def times(length: int, heads: int, num_ranks: int, rounds: int) -> str:
    """Median and fastest times with and without overlap, as text."""
    results = run_ranks(
        lambda group: measure_time(group, length, heads, rounds), num_ranks, backend="native", timeout=600
    )
    texts = []
    for overlap, name in ((True, "with overlap"), (False, "without")):
        slowest = [max(each) for each in zip(*[result[overlap] for result in results], strict=True)]
        texts.append(f"{name} median {statistics.median(slowest):.4f} s, fastest {min(slowest):.4f} s")
    return "; ".join(texts)


def main() -> None:
    """Print a line for each length and number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for length in options.tokens:
        for num_ranks in options.ranks:
            memory = max(
                run_ranks(
                    lambda g, n=length: measure_memory(g, n, options.heads), num_ranks, backend="native", timeout=600
                )
            )
            line = f"{length} tokens, {num_ranks} ranks: {memory:.0f} MiB a rank"
            if options.rounds:
                line += f"; {times(length, options.heads, num_ranks, options.rounds)}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
