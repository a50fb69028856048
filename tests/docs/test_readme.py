"""The README says what is true."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*command):
    """Run a command to its end and return its output; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_program_runs_under_the_launcher(tmp_path):
    """The first program trains on two ranks, and both print the same mean."""
    program = tmp_path / "program.py"
    program.write_text(BLOCKS[0])
    output = run(sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(program))
    printed = dict(re.findall(r"\[rank (\d)\] tensor\((.*?)\)", output))
    assert set(printed) == {"0", "1"}
    assert printed["0"] == printed["1"]


def test_test_example_runs(tmp_path):
    """The testing example passes as it stands."""
    program = tmp_path / "sums.py"
    program.write_text(BLOCKS[1])
    run(sys.executable, str(program))


def test_mismatch_message_is_the_one_shown():
    """The error in the README is what users see, to the letter."""
    shown = re.search(r"```\nCollectiveMismatchError: (.*?)```", README, re.DOTALL)
    expected = " ".join(shown[1].split())

    def program(group):
        for _ in range(7):
            fd.barrier()
        with pytest.raises(fd.CollectiveMismatchError) as caught:
            (fd.broadcast if group.rank == 2 else fd.allreduce)(torch.ones(1024))
        return str(caught.value)

    assert run_ranks(program, 4) == [expected] * 4
