"""The guide to calls says what is true: its code runs."""

import pathlib
import re
import subprocess
import sys

import pytest

from ferrodist.rpc import RpcContext
from ferrodist.testing import run_ranks

GUIDE = (pathlib.Path(__file__).parents[2] / "docs" / "rpc.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
(FUNCTIONS,) = [number for number, block in enumerate(BLOCKS) if "FUNCTIONS = {" in block]
PROGRAMS = [block for block in BLOCKS[:FUNCTIONS] if "run_ranks" not in block]
TESTS = [block for block in BLOCKS[:FUNCTIONS] if "run_ranks" in block]


@pytest.mark.parametrize(("number", "printed"), [(0, "[rank 0] tensor([3., 3., 3.])"), (1, "[rank 0] [9, 9]")])
def test_program_runs_under_the_launcher(number, printed, tmp_path):
    """Two ranks call each other, and the result is the one in the comment."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number])
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.strip() for line in done.stdout.splitlines() if line.startswith("[rank")] == [printed]
    assert printed.removeprefix("[rank 0] ") in PROGRAMS[number]


def test_every_block_is_run():
    """Programs are those above, and there is one example of a test."""
    assert (len(PROGRAMS), len(TESTS)) == (2, 1)


def test_test_example_runs():
    """The example of a test passes as it stands."""
    exec(TESTS[0], {"__name__": "example"})


def test_calls_do_what_is_said(tmp_path):
    """What follows the functions is called by rank 0 of three, block after block, and asserts what comes."""
    source = tmp_path / "functions.py"  # a traceback has lines of files only
    source.write_text(BLOCKS[FUNCTIONS])

    def program(group):
        names = {"__name__": "guide"}
        exec(compile(BLOCKS[FUNCTIONS], str(source), "exec"), names)
        with RpcContext(group, names["FUNCTIONS"], name=f"worker{group.rank}") as agent:
            if group.rank == 0:
                names["agent"] = agent
                for block in BLOCKS[FUNCTIONS + 1 :]:
                    exec(block, names)

    run_ranks(program, 3)
