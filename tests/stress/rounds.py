"""Groups that are made and destroyed again and again at one address, by ranks that are faster and slower than others.

    python tests/stress/rounds.py --rounds 200

For each way to meet and each backend: how many rounds came out right, and how long they took.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import ferrodist as fd
from ferrodist.backends.native import is_native_available

__all__ = ["WAYS", "run_rounds"]

_TIMEOUT = 20.0
_SLOWEST_SECONDS = 0.03

for _name in fd.__all__:
    getattr(fd, _name)

_fork = multiprocessing.get_context("fork")

_BACKENDS = ["tcp", *["native", "gloo"] * is_native_available()]

WAYS = [(backend, way) for backend in _BACKENDS for way in ("tcp", "file", "env")]
"""Each backend with each way to meet."""


def _run_rank(rank: int, world_size: int, where: tuple[str, str, int], rounds: int, seed: int) -> int:
    """Be a rank; returns how many rounds gave the right sum."""
    torch.set_num_threads(1)
    backend, way, port = where
    draw = random.Random(f"{seed} {rank}")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["FERRODIST_SECRET"] = "rounds"
    folder = Path(tempfile.gettempdir()) / f"ferrodist-rounds-{port}"
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{folder}", "env": "env://"}[way]
    num_right = 0
    for _ in range(rounds):
        tensor = torch.full((3,), float(rank + 1))
        fd.init_process_group(backend, init_method=method, timeout=_TIMEOUT)
        tensor = fd.allreduce(tensor)
        num_right += bool((tensor == world_size * (world_size + 1) / 2).all())
        time.sleep(draw.choice([0.0, 0.0, draw.uniform(0.0, _SLOWEST_SECONDS)]))
        fd.destroy_process_group()
    return num_right


def run_rounds(backend: str, way: str, *, rounds: int, world_size: int = 3, seed: int = 0) -> tuple[int, str]:
    """Run them; how many came out right on all ranks, and what was raised, if anything was."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [_fork.Pipe(duplex=False) for _ in range(world_size)]

    def body(rank: int) -> None:
        try:
            result: Any = _run_rank(rank, world_size, (backend, way, port), rounds, seed)
        except BaseException:
            result = traceback.format_exc()
        pipes[rank][1].send(result)

    ranks = [_fork.Process(target=body, args=(rank,)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    results: list[Any] = []
    for reader, _ in pipes:
        results.append(reader.recv() if reader.poll(_TIMEOUT + rounds) else "no end in time")
    for process, ends in zip(ranks, pipes, strict=True):
        process.kill()
        process.join()
        process.close()
        for end in ends:
            end.close()
    raised = "\n".join(f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str))
    return min((result for result in results if isinstance(result, int)), default=0) if not raised else 0, raised


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_failed = 0
    for backend, way in WAYS:
        started = time.monotonic()
        num_right, raised = run_rounds(backend, way, rounds=options.rounds, world_size=options.ranks, seed=options.seed)
        num_failed += num_right != options.rounds
        print(f"{backend} by {way}: {num_right} of {options.rounds} rounds right, {time.monotonic() - started:.0f} s")
        if raised:
            print(raised)
        sys.stdout.flush()
    sys.exit(num_failed)


if __name__ == "__main__":
    _main()
