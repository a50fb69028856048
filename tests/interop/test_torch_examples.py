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


@pytest.mark.parametrize("name", ["accelerate_digits.py", "fabric_digits.py"])
def test_it_learns_the_digits(name):
    """Two ranks under torchrun: most digits are right after a few epochs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)],
        env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.findall(r"([\d.]+)% of 357 digits are right", done.stdout)[-1]) > 85
