"""Train the GPT of ``train.py`` in one process, with DDP, with FSDP, and with FSDP and tensor parallelism together.

The losses are drawn side by side.

    python examples/gpt/compare.py

Options that this doesn't know go to ``train.py``: ``--steps 50`` for a shorter look. The plot needs matplotlib:
pip install '.[demo]'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

TRAIN = Path(__file__).with_name("train.py")
STYLES = {"one process": ("#9ecae1", 6), "DDP": ("#08519c", 2.5), "FSDP": ("#d94801", 1), "FSDP x TP": ("#31a354", 0.6)}


def run(command: list[str], options: list[str]) -> dict[str, object]:
    """Run a training, and give its history."""
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history.json"
        subprocess.run([*command, *options, "--history", str(history)], check=True)  # noqa: S603 - of this program
        return json.loads(history.read_text())


def draw(histories: dict[str, dict[str, object]], num_ranks: int, path: Path) -> None:
    """Draw the losses, and how far they are from those of one process."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    loss_axes, difference_axes = figure.subplots(1, 2)
    figure.suptitle("A GPT on the standard library's sources: one process, and the same global batch on several ranks")
    alone = np.array(histories["one process"]["losses"])
    steps = np.arange(1, len(alone) + 1)
    for name, history in histories.items():
        color, line_width = STYLES[name]
        ranks = 2 * num_ranks if name == "FSDP x TP" else num_ranks
        label = name if name == "one process" else f"{name} on {ranks} ranks"
        loss_axes.plot(steps, history["losses"], color=color, linewidth=line_width, label=label)
        if name != "one process":
            difference = np.abs(np.array(history["losses"]) - alone) / alone
            difference_axes.plot(steps, difference, ".", color=color, markersize=4 * line_width, label=label)
    loss_axes.set(title="Training loss", xlabel="step", ylabel="nats a byte")
    difference_axes.set_yscale("symlog", linthresh=1e-8)
    difference_axes.set(title="Relative difference to one process", xlabel="step", ylim=(0, None))
    for axes in (loss_axes, difference_axes):
        axes.legend(frameon=False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of DDP and FSDP; twice as many with TP (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("gpt.png"), help="the plot (default: gpt.png)")
    options, others = parser.parse_known_args()
    launch = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node"]
    commands = {
        "one process": [sys.executable, str(TRAIN)],
        "DDP": [*launch, str(options.ranks), str(TRAIN), "--parallel", "ddp"],
        "FSDP": [*launch, str(options.ranks), str(TRAIN), "--parallel", "fsdp"],
        "FSDP x TP": [*launch, str(2 * options.ranks), str(TRAIN), "--parallel", "fsdp", "--tensor-parallel", "2"],
    }
    histories = {}
    for name, command in commands.items():
        print(f"== {name}", flush=True)
        histories[name] = run(command, others)
    draw(histories, options.ranks, options.output)
    alone = np.array(histories["one process"]["losses"])
    for name, history in histories.items():
        difference = np.abs(np.array(history["losses"]) / alone - 1).max()
        print(
            f"{name:12} {1e3 * history['seconds_per_step']:6.0f} ms a step, last loss {history['losses'][-1]:.4f},"
            f" largest relative difference to one process {difference:.1e}"
        )
    print(f"plot: {options.output}")


if __name__ == "__main__":
    main()
