"""Debug modes see collectives of ferrodist where a program asks for that."""

import subprocess
import sys
from pathlib import Path


def test_modes_see_collectives():
    """In a process of its own, for kernels are the whole process's."""
    program = Path(__file__).with_name("c10d_kernels.py")
    found = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=110, check=False)
    assert found.stdout.endswith("all right\n"), found.stdout + found.stderr
