"""torchrun starts programs on ferrodist's backend, again after a rank has failed."""

from __future__ import annotations

import json
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


PROGRAM_WITH_OUTPUT = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    rank = os.environ["RANK"]
    print("apple" if rank == "0" else "pear", os.environ["ROLE_NAME"], os.environ["LOCAL_RANK"])
    print("error stream of", rank, file=sys.stderr)
    if rank == "1":
        raise KeyError("of the program")

main()
"""


def files_in(folder: Path) -> dict[str, str]:
    """The contents of the files of the only job in a folder, without lines of tracebacks."""
    (job,) = folder.iterdir()
    found = {}
    for path in sorted(job.rglob("*")):
        if path.is_file():
            lines = path.read_text().splitlines()
            found[str(path.relative_to(job))] = [
                line for line in lines if line.startswith(("apple", "pear", "error", "<"))
            ]
    return found


def test_log_files_are_those_of_torchrun(tmp_path: Path) -> None:
    """The same options give the same files with the same lines, and show the same lines, under both launchers."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM_WITH_OUTPUT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRODIST_")}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "<${role_name} ${local_rank} ${rank}> "
    options = ["--standalone", "--nproc-per-node", "2", "--role", "trainer", "--tee", "0:3,1:1", "--redirects", "1:2"]
    options += ["--local-ranks-filter", "0", "--duplicate-stdout-filters", "apple,plum"]
    shown, files, errors = {}, {}, {}
    for name, module in (("torchrun", ["torch.distributed.run"]), ("ferrodist", ["ferrodist", "run"])):
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-m", *module, *options, "--log-dir", str(folder), str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 1, done.stderr[-3000:]
        shown[name] = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("<")]
        files[name] = files_in(folder)
        (error,) = folder.rglob("error.json")
        errors[name] = json.loads(error.read_text())["message"]["message"]
    assert (
        shown["ferrodist"] == shown["torchrun"] == ["<trainer 0 0> apple trainer 0", "<trainer 0 0> error stream of 0"]
    )
    assert errors["ferrodist"] == errors["torchrun"] == "KeyError: 'of the program'"
    assert files["ferrodist"] == files["torchrun"]
    assert files["ferrodist"]["attempt_0/1/stderr.log"] == ["error stream of 1"]
