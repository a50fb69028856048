"""The example of a GPT: all ways of training it learn the same from the standard library's sources."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist as fd
from ferrodist.backends.base import Backend
from ferrodist.testing import run_ranks

TRAIN = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"


@pytest.fixture(scope="module", autouse=True)
def _dynamo():
    """Load once what optimizers load, which takes longer than these trainings."""
    importlib.import_module("torch._dynamo")


def test_all_ways_have_the_same_losses(tmp_path, monkeypatch, capsys):
    """A small one: the losses agree to 1e-5, fall, and are drawn."""
    plot = tmp_path / "gpt.png"
    sizes = ["--steps", "20", "--width", "128", "--layers", "2", "--length", "32"]

    def run(command, check):
        """What the launcher would, on ranks that need not load torch."""
        assert check
        place = command.index(str(TRAIN))
        _train(int(command[place - 1]) if "ferrodist" in command else 1, command[place + 1 :])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--output", str(plot), *sizes])
    runpy.run_path(str(TRAIN.with_name("compare.py")), run_name="__main__")
    output = capsys.readouterr().out
    differences = [float(text) for text in re.findall(r"difference to one process (\S+)", output)]
    assert len(differences) == 4
    assert max(differences) < 1e-5
    losses = [float(text) for text in re.findall(r"last loss ([\d.]+)", output)]
    assert max(losses) < 5.3  # who knows nothing has log(256), 5.55
    assert plot.read_bytes().startswith(b"\x89PNG")


def _train(ranks: int, options: list[str]) -> None:
    def program(group: Backend) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(group.rank))
            patch.setattr(fd, "init_process_group", lambda: group)
            patch.setattr(sys, "argv", ["train.py", *options])
            runpy.run_path(str(TRAIN), run_name="__main__")

    run_ranks(program, ranks, backend="native")


def _losses(ranks: int, *options: str) -> list[float]:
    history = Path(options[-1])
    _train(ranks, ["--width", "128", "--layers", "1", "--length", "16", *options[:-1], "--history", str(history)])
    return json.loads(history.read_text())["losses"]


def test_a_stopped_training_goes_on_divided_in_another_way(tmp_path):
    """Saved by four ranks, FSDP over tensor parallel, and stopped; then by three, FSDP; and ended by two with DDP."""
    whole = _losses(2, "--steps", "9", "--batch-size", "6", str(tmp_path / "whole.json"))
    folder = ["--batch-size", "6", "--checkpoints", str(tmp_path / "checkpoints"), "--save-every", "3"]
    both = ["--parallel", "fsdp", "--tensor-parallel", "2"]
    # The learning rate's schedule is of 9 steps from the beginning.
    _losses(4, "--steps", "9", "--stop-after", "3", *both, *folder, str(tmp_path / "history.json"))
    _losses(3, "--steps", "9", "--stop-after", "6", "--parallel", "fsdp", *folder, str(tmp_path / "history.json"))
    losses = _losses(2, "--steps", "9", *folder, str(tmp_path / "history.json"))
    assert losses == pytest.approx(whole, rel=1e-5)
