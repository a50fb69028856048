"""The examples of calls, as a user runs them: real processes under the launcher, and one alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist

SOURCE = Path(ferrodist.__file__).parents[1]
EXAMPLES = SOURCE.parent / "examples" / "rpc"
LIMIT = 100  # seconds; each takes about 5 where nothing else runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "FERRODIST_")


def run(folder, ranks, name, *options):
    """Run an example on so many ranks, or alone for 1; what rank 0 prints. Its warnings are errors."""
    launch = ["-m", "ferrodist", "run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / name), *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    if ranks > 1:
        assert all(line.startswith("[rank 0] ") for line in lines), done.stdout
    return "\n".join(line.removeprefix("[rank 0] ") for line in lines)


def numbers(pattern, text):
    """What a pattern finds in the one line that begins with it."""
    found = re.search(rf"^{pattern}$", text, re.MULTILINE)
    assert found is not None, text
    return [float(each) for each in found.groups()]


def is_png(path):
    """Whether a file is a picture."""
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_parameter_server(tmp_path):
    """The network learns, each push is counted, old ones are refused, and the parameters are freed at the end."""
    pytest.importorskip("sklearn", reason="the extra 'demo' is not installed")
    pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
    options = ["--pushes", "400", "--most-stale", "2", "--plot", "server.png"]
    output = run(tmp_path, 3, "parameter_server.py", *options)
    trainers, pushes, refused = numbers(r"(\d+) trainer\(s\), (\d+) pushes, (\d+) refused", output)
    assert (trainers, pushes) == (2, 400)
    [ages] = re.findall(r"^steps since the pull, and how often: (.*)$", output, re.MULTILINE)
    how_often = {int(age): int(count) for age, count in re.findall(r"(\d+) \((\d+)\)", ages)}
    assert min(how_often) >= 0
    assert sum(how_often.values()) == pushes
    assert sum(count for age, count in how_often.items() if age > 2) == refused
    loss, test_loss = numbers(r"loss ([\d.]+), test loss ([\d.]+)", output)
    assert max(loss, test_loss) < 0.5  # who knows nothing has log(10), 2.3
    assert numbers(r"test accuracy ([\d.]+)%", output)[0] > 88
    assert output.endswith("\nparameters freed, references left: 0")
    assert is_png(tmp_path / "server.png")


@pytest.mark.timeout(2 * LIMIT + 20)
def test_the_actors_and_the_learner(tmp_path):
    """The pole stays up several times as long as at first."""
    pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
    options = ["--updates", "60", "--most-steps", "150"]
    output = run(tmp_path, 3, "actor_learner.py", *options, "--plot", "returns.png")
    actors, episodes, _ = numbers(r"(\d+) actor\(s\), (\d+) episodes, (\d+) a second", output)
    assert (actors, episodes) == (2, 60 * 16)
    pattern = r"mean return: untrained ([\d.]+), trained ([\d.]+), most possible 150"
    untrained, trained = numbers(pattern, output)
    assert untrained < 30
    assert trained > 80
    assert is_png(tmp_path / "returns.png")


@pytest.mark.parametrize(("ranks", "layers"), [(1, 3), (4, 7)])
def test_inference_of_layers_that_are_spread(tmp_path, ranks, layers):
    """Every request has the answer of the model in one process, and goes with others."""
    pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
    plot = ["--plot", "stages.png"] if ranks > 1 else []
    sizes = ["--layers", str(layers), "--width", "32", "--requests", "203", "--batch-size", "10"]
    output = run(tmp_path, ranks, "spread_inference.py", *sizes, *plot)
    stages, requests, batches = numbers(r"(\d+) stage\(s\), (\d+) requests in (\d+) batches", output)
    assert (stages, requests) == (max(1, ranks - 1), 203)
    assert 21 <= batches < 203
    assert numbers(r"(\d+) requests a second, median (\d+) ms", output)[0] > 0
    assert numbers(r"largest difference to the model in one process: (\S+)", output)[0] < 1e-5
    assert not plot or is_png(tmp_path / "stages.png")
