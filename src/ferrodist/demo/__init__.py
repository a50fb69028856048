"""``ferrodist demo``: train a small network on one rank and on several, and compare.

::

    cli.py        options, output, exit code
    worker.py     the program of a rank: model, data and training loop
    results.py    what ranks report to the command, and the comparison of two runs
    display.py    progress, and the plot
"""

from __future__ import annotations

from ferrodist.demo.cli import DemoOptions, add_demo_arguments, demo_options, run_demo

__all__ = ["DemoOptions", "add_demo_arguments", "demo_options", "run_demo"]
