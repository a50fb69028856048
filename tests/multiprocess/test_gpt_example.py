"""The example of a GPT: all ways of training it learn the same from the standard library's sources."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "compare.py"


def test_all_ways_have_the_same_losses(tmp_path):
    """A small one: the losses agree to 1e-5, fall, and are drawn."""
    plot = tmp_path / "gpt.png"
    sizes = ["--steps", "20", "--width", "128", "--layers", "2", "--length", "32"]
    output = subprocess.run(
        [sys.executable, str(EXAMPLE), "--output", str(plot), *sizes],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    differences = [float(text) for text in re.findall(r"difference to one process (\S+)", output)]
    assert len(differences) == 4
    assert max(differences) < 1e-5
    losses = [float(text) for text in re.findall(r"loss ([\d.]+) nats", output)]
    assert losses[-1] < 5.3  # who knows nothing has log(256), 5.55
    assert plot.read_bytes().startswith(b"\x89PNG")
