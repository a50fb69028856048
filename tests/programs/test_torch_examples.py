"""The examples of other libraries on torch's backend, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist

SOURCE = Path(ferrodist.__file__).parents[1]
EXAMPLES = SOURCE.parent / "examples" / "torch_backend"
LIMIT = 100  # seconds; each takes about 10 where nothing else runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "FERRODIST_")


def run(command):
    """Run a command outside of what launched this process, and give what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("name", ["accelerate_digits.py", "fabric_digits.py"])
def test_it_learns_the_digits(name):
    """Two ranks under torchrun: most digits are right after a few epochs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, str(EXAMPLES / name)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.findall(r"([\d.]+)% of 357 digits are right", done.stdout)[-1]) > 85


REFUSED = """
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
dist.init_process_group("ferrodist")
try:
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="ferrodist")])
finally:
    dist.destroy_process_group()
"""


def test_accelerate_is_told_of_a_backend_by_torch_alone():
    """If this fails, Accelerate takes names of backends on CPUs now: the page that says which line to write is old."""
    done = run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", REFUSED]
    )
    assert done.returncode
    assert "Your assigned backend ferrodist is not available, please use gloo" in done.stderr + done.stdout
