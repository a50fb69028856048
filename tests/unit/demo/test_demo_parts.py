"""The demo's options, progress, comparison and plot, each alone."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

if importlib.util.find_spec("sklearn") is None:  # which takes seconds to load
    pytest.skip("the extra 'demo' is not installed", allow_module_level=True)
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")
pytest.importorskip("rich", reason="the extra 'demo' is not installed")

from rich.console import Console

from ferrodist.cli.main import main
from ferrodist.demo import cli, comparison
from ferrodist.demo.cli import DemoOptions, run_demo
from ferrodist.demo.comparison import (
    TrainingDisplay,
    are_identical,
    compare_weights,
    follow_progress,
    save_plot,
)
from ferrodist.demo.worker import History, Progress, train
from ferrodist.installation import how_to_install
from ferrodist.testing import run_ranks

WEIGHTS = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([[0.5]], np.float32)}


def history(**changes):
    values = {
        "losses": [2.0, 1.0, 0.5, 0.25],
        "accuracies": [0.8, 0.98],
        "seconds": 1.5,
        "num_train": 96,
        "num_test": 10,
    }
    return History(**{**values, **changes})


def progress(step=3, accuracy=None):
    return Progress(step=step, num_steps=9, epoch=1, loss=0.125, accuracy=accuracy)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks must be 2 to 48, not 1"),
        (["--ranks", "49"], "--ranks must be 2 to 48, not 49"),
        (["--epochs", "0"], "--epochs must be 1 to 100000, not 0"),
        (["--epochs", "9" * 30], "--epochs must be 1 to 100000, not 999"),
        (["--seed", "-1"], "--seed must be 0 to"),
        (["--plot", "no/such/folder/demo.png"], "there is no folder"),
        (["--plot", "."], "is a folder"),
        (["--epochs", "many"], "invalid int value"),
    ],
)
def test_wrong_options_are_refused(arguments, text, capsys):
    """Each gets one line that names the option, and exit code 2, before anything runs."""
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_only_the_demo_checks_whether_its_plot_can_be_written(tmp_path, monkeypatch, capsys):
    """Only the demo cares whether its plot can be written; it says so before it trains."""
    (tmp_path / "demo.png").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["secret"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["demo"])
    assert "demo.png is a folder" in capsys.readouterr().err
    monkeypatch.setattr(cli.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--plot", str(tmp_path / "other.png")])
    assert "other.png can't be written" in capsys.readouterr().err


def test_a_rank_handles_ctrl_c_before_it_imports_torch():
    """Slow imports come after the signal's handler, so that Ctrl-C gives no tracebacks."""
    code = "import sys, ferrodist.demo.worker; sys.exit(any(name in sys.modules for name in ('torch', 'sklearn')))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_missing_extra_is_named_with_its_install_command(monkeypatch, capsys):
    """The error names the packages and the command."""
    find = importlib.util.find_spec
    hidden = ("sklearn", "rich")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    assert run_demo(DemoOptions()) == 1
    assert capsys.readouterr().err == (
        f"ferrodist: the demo needs scikit-learn, rich, which is not installed here: {how_to_install('demo')}\n"
    )


def test_a_failed_run_gives_its_exit_code(monkeypatch, capfd, tmp_path):
    """The exit code is the launcher's, and nothing is printed."""
    monkeypatch.setattr(comparison, "launch", lambda spec: 7)
    assert run_demo(DemoOptions(plot=tmp_path / "demo.png")) == 7
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "demo.png").exists()


def test_one_rank_and_two_train_the_same_model():
    """The loop gives the same weights on any number of ranks, up to rounding, and the same bits on each of them."""
    (alone, _), *_ = run_ranks(lambda group: train(group, num_epochs=1, seed=5, on_progress=lambda state: None), 1)
    results = run_ranks(lambda group: train(group, num_epochs=1, seed=5, on_progress=lambda state: None), 2)
    first, second = ({name: tensor.numpy() for name, tensor in weights.items()} for weights, _ in results)
    found = compare_weights({name: tensor.numpy() for name, tensor in alone.items()}, first, num_steps=29)
    assert are_identical([first, second])
    assert found.absolute <= found.bound
    assert results[0][1].losses == results[1][1].losses
    assert len(results[0][1].losses) == 29


def test_the_demo_fails_below_97_percent(monkeypatch, capsys, tmp_path):
    """Too short a training ends with exit code 1 and says why; batches that don't divide by the ranks are all right."""

    def run(num_ranks, epochs, _seed, _show):
        found = run_ranks(lambda group: train(group, num_epochs=epochs, seed=3, on_progress=lambda _: None), num_ranks)
        weights = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors, _ in found]
        return found[0][1], weights

    monkeypatch.setattr(comparison, "_train", run)
    plot = tmp_path / "own.png"
    assert run_demo(DemoOptions(epochs=1, ranks=3, plot=plot)) == 1
    assert capsys.readouterr().out.endswith(f"plot: {plot}\nFAILED: test accuracy is below 97%\n")
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_equal_weights_do_not_differ():
    """The bound is eps x steps x largest weight, and 0 is within it."""
    found = compare_weights(WEIGHTS, WEIGHTS, num_steps=10)
    assert (found.absolute, found.relative, found.largest_weight) == (0, 0, 2)
    assert found.bound == pytest.approx(10 * 2 * 2**-23)
    assert found.absolute <= found.bound


@pytest.mark.parametrize(("change", "within"), [(2**-22, True), (1e-4, False), (float("nan"), False)])
def test_differences_are_compared_with_the_bound(change, within):
    """The largest difference counts, in itself and relative to its tensor; NaN is never within the bound."""
    other = {"a": WEIGHTS["a"], "b": WEIGHTS["b"] + np.float32(change)}
    found = compare_weights(WEIGHTS, other, num_steps=10)
    assert (found.absolute <= found.bound) is within
    if change == change:
        assert found.absolute == pytest.approx(change, rel=1e-2)
        assert found.relative == pytest.approx(2 * change, rel=1e-2)


def test_identical_means_bit_for_bit():
    """Zeros of different sign are equal numbers and different bits."""
    zero = {"a": np.zeros(1, np.float32)}
    assert are_identical([zero, zero])
    assert not are_identical([zero, {"a": -zero["a"]}])
    assert not are_identical([zero, {"b": zero["a"]}])


def test_progress_is_followed_to_its_end(tmp_path):
    """Rank 0's reports are shown in order, also the last ones; a file that no rank writes does no harm."""
    shown = []
    with follow_progress(tmp_path / "file", shown.append), (tmp_path / "file").open("wb", buffering=0) as file:
        for step in range(500):
            file.write(msgspec.json.encode(progress(step)) + b"\n")
    assert shown == [progress(step) for step in range(500)]
    with follow_progress(tmp_path / "unused", shown.append):
        pass
    assert len(shown) == 500


@pytest.mark.parametrize("kind", [ArithmeticError, SystemExit])
def test_a_display_that_fails_does_not_stop_rank_0(tmp_path, kind):
    """Rank 0 writes on, and the error is raised when the run is over; so is rich's exit when nobody reads."""

    def fail(_):
        raise kind("no terminal")

    def tell():
        with follow_progress(tmp_path / "file", fail), (tmp_path / "file").open("wb", buffering=0) as file:
            for step in range(5000):
                file.write(msgspec.json.encode(progress(step)) + b"\n")

    with pytest.raises(kind, match="no terminal"):
        tell()


def test_without_a_terminal_each_epoch_is_a_line():
    """Steps are not shown."""
    file = io.StringIO()
    with TrainingDisplay(Console(file=file)) as display:
        display.begin("2 ranks")
        display.show(progress())
        display.show(progress(accuracy=0.5))
    assert file.getvalue() == "2 ranks: epoch  1, step 3 of 9, loss 0.1250, test accuracy 50.0%\n"


def test_on_a_terminal_each_run_has_a_bar():
    """On a terminal each run has a bar with its loss, and the accuracy once there is one."""
    file = io.StringIO()
    with TrainingDisplay(Console(file=file, force_terminal=True, width=80)) as display:
        for title in ("1 rank", "2 ranks"):
            display.begin(title)
            display.show(progress(accuracy=0.5))
            display.show(progress(step=9))
    text = file.getvalue()
    assert all(part in text for part in ("1 rank", "2 ranks", "9 of 9 steps", "loss 0.1250", "accuracy 50.0%"))


def test_the_plot_is_a_png_file(tmp_path):
    """Equal and different runs, and runs of one epoch, are drawn without warnings."""
    for several in (history(), history(losses=[2.0, 1.0, 0.6, 0.25]), history(losses=[1.0], accuracies=[0.97])):
        one = history(losses=several.losses[:1], accuracies=[0.97]) if len(several.losses) == 1 else history()
        save_plot(tmp_path / "demo", one, several, num_ranks=2)
        assert (tmp_path / "demo").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
