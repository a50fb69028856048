"""``ferrodist demo``: train a small network on one rank and on several, and compare.

::

    command.py      the command: options, what is shown, the exit code
    worker.py       the program of a rank  ->  training.py  the model, the data, the loop
    progress.py     how far a run is: told by rank 0, shown by the command  ->  display.py
    results.py      what a run leaves for the command to read
    comparison.py   the difference between two runs, and what rounding explains
    plot.py         loss, accuracy and difference as a picture
"""

from __future__ import annotations

from ferrodist.demo.command import DemoOptions, add_demo_arguments, demo_options, run_demo

__all__ = ["DemoOptions", "add_demo_arguments", "demo_options", "run_demo"]
