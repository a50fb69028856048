"""torchrun starts programs on ferrodist's backend, again after a rank has failed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ferrodist

SOURCE = Path(ferrodist.__file__).parents[1]


def test_a_launcher_that_starts_again(tmp_path: Path) -> None:
    """torchrun: a rank raises, the other one says so, and both start again. Nobody destroys a group."""
    program = textwrap.dedent("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("ferrodist")
        rank = dist.get_rank()
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0:
            dist.barrier()
            if rank == 1:
                raise KeyError("of the program")
            try:
                dist.recv(torch.ones(1), 1)
            except Exception as error:
                print("raised", type(error).__name__, "of the program" in str(error), flush=True)
                raise
        for number in range(2):
            dist.destroy_process_group()
            dist.init_process_group("ferrodist")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(3):
            model(torch.ones(2, 4) * rank).sum().backward()
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(8)]
        works[-1].get_future().then(lambda done: done.value())
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"ended with {total.item()}\\n".encode())  # at once, for both ranks have one pipe
    """)
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRODIST_")}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("raised GroupAbortedError True") == 1
    assert done.stdout.count("ended with 2.0") == 2
