"""``ferrodist ckpt``: look at checkpoints, check, compare, reshard and convert them.

::

    command.py   the commands: options, what is printed, the exit code  ->  display.py  tables and bars, with rich

What needs torch is imported when a command runs; the work itself is in `ferrodist.checkpoint`.
"""

from __future__ import annotations

from ferrodist.ckpt.command import add_ckpt_arguments, run_ckpt

__all__ = ["add_ckpt_arguments", "run_ckpt"]
