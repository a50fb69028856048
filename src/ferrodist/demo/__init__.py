"""``ferrodist demo``: train a small network on one rank and on several, and compare.

::

    cli.py         options
    comparison.py  the runs, their progress and comparison, the plot
    worker.py      the program of a rank: model, data and training loop
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo."""

    ranks: int = 2
    epochs: int = 12
    seed: int = 0
    plot: Path = Path("demo.png")
