"""`ferrodist run` names the rank that failed, and not one of those that failed because of it: with real groups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

LIMIT = 100

# How rank 1 ends, what the launcher says of it, and what it gives back.
ENDS = {
    "exception": ("raise ValueError('bad luck')", "exit code 1", 1),
    "sys.exit": ("sys.exit(4)", "exit code 4", 4),
    "os._exit": ("os._exit(5)", "exit code 5", 5),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 128 + signal.SIGKILL),
}

IN_BARRIER = """
    import os, signal, sys
    import ferrodist as fd

    group = fd.init_process_group(timeout=60)
    group.barrier()
    if group.rank == 1:
        {end}
    group.barrier()
"""

IN_DDP = """
    import os, signal, sys
    import torch
    import ferrodist as fd

    group = fd.init_process_group(timeout=60)
    model = fd.DDP(torch.nn.Linear(4, 1))
    for step in range(10):
        loss = model(torch.ones(2, 4)).sum()
        if step == 5 and group.rank == 1:
            {end}
        loss.backward()
"""


def launch(tmp_path, program: str) -> subprocess.CompletedProcess:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "3", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False, text=True
    )


def check_report(done: subprocess.CompletedProcess, said: str, code: int) -> None:
    report = done.stderr[done.stderr.index("ferrodist: ") :]
    assert report.startswith(f"ferrodist: rank 1 failed first: {said}"), done.stderr
    assert done.returncode == code
    told = re.findall(r"  (failed because of it|failed after it|stopped because of it): (.*)", report)
    assert {title for title, _ in told} <= {"failed because of it", "stopped because of it"}, done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_the_rank_that_ended_is_named(tmp_path, end):
    """However a rank ends while the others wait for it, it is the one that is named, with its exit code."""
    statement, said, code = ENDS[end]
    check_report(launch(tmp_path, IN_BARRIER.format(end=statement)), said, code)


def test_the_rank_that_ended_in_training_is_named(tmp_path):
    """The same for a rank that ends in the middle of training, whose shutdown takes as long as the others'."""
    statement, said, code = ENDS["exception"]
    check_report(launch(tmp_path, IN_DDP.format(end=statement)), said, code)


def test_a_slow_shutdown_hides_no_cause(tmp_path):
    """Rank 0 says why it ends and then waits for the others, which therefore end first, with its exception."""
    program = IN_BARRIER.replace("group.rank == 1", "group.rank == 0").format(end=ENDS["exception"][0])
    done = launch(tmp_path, program)
    report = done.stderr[done.stderr.index("ferrodist: ") :]
    assert report.startswith("ferrodist: rank 0 failed first: exit code 1"), done.stderr
    assert "  | ValueError: bad luck" in report
    reason = (
        "ferrodist.errors.GroupAbortedError: rank 0 aborted group 'world': its program failed with ValueError: bad luck"
    )
    assert done.stderr.count(reason) == 2, done.stderr
