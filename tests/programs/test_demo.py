"""The demo and the example, as a user runs them: real processes over TCP."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist

if importlib.util.find_spec("sklearn") is None:  # which takes seconds to load
    pytest.skip("the extra 'demo' is not installed", allow_module_level=True)
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
pytest.importorskip("rich", reason="the extra 'demo' is not installed")

SOURCE = Path(ferrodist.__file__).parents[1]
EXAMPLE = SOURCE.parent / "examples" / "train_digits.py"
LIMIT = 100  # seconds; each takes about 10 where nothing else runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "FERRODIST_")


def run(folder, *arguments):
    """Run Python on ``arguments`` in ``folder``; its warnings are errors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_demo_trains_compares_and_plots(tmp_path):
    """Two ranks reach 97%, hold the same bits, agree with one rank, and the plot lies in the current folder."""
    done = run(tmp_path, "-m", "ferrodist", "demo", "--epochs", "6")
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("1 rank", "2 ranks"):
        epochs = re.findall(rf"^{title}: epoch +(\d+), step \d+ of 174, loss [\d.]+, test", done.stdout, re.MULTILINE)
        assert epochs == [str(epoch) for epoch in range(1, 7)]
        found = re.search(rf"^  {title}[^:\n]* test accuracy ([\d.]+)%", done.stdout, re.MULTILINE)
        assert float(found[1]) >= 97
    assert "The 2 ranks hold the same weights, bit for bit." in done.stdout
    difference, allowed = (
        float(re.search(rf"{label}: ([\d.e+-]+)", done.stdout)[1])
        for label in ("largest difference of a weight", "allowed")
    )
    assert 0 < difference < allowed < 1e-4
    assert done.stdout.endswith("\nplot: demo.png\n")
    assert is_png(tmp_path / "demo.png")


def test_the_example_under_the_launcher_and_alone(tmp_path):
    """The example is one program for any number of ranks, and reaches the same accuracy."""
    launched = run(tmp_path, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(EXAMPLE))
    alone = run(tmp_path, str(EXAMPLE))
    assert (launched.returncode, launched.stderr, alone.returncode, alone.stderr) == (0, "", 0, "")
    accuracies = [
        float(re.search(pattern, text)[1])
        for pattern, text in (
            (r"\[rank 0\] 2 rank\(s\): test accuracy ([\d.]+)%", launched.stdout),
            (r"1 rank\(s\): test accuracy ([\d.]+)%", alone.stdout),
        )
    ]
    assert min(accuracies) > 95
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80
