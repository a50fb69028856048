"""Cells in processes of their own, so that neither a crash nor a hang of one ends the others."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from model_zoo.outcomes import Outcome, run_cell

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

TIME_LIMIT_SECONDS = 240.0


def run_in_process(compare: Callable[[], Outcome], time_limit: float = TIME_LIMIT_SECONDS) -> Outcome:
    """The outcome of a comparison in a process that is forked from this one.

    Args:
        compare: Returns the outcome, or raises.
        time_limit: Seconds after which the process is killed, and the outcome is an error.
    """
    context = get_context("fork")  # the models' libraries take 10 s to import
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(compare, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit):
            process.kill()  # its ranks end with it
            return Outcome(kind="error", reason=f"it was not done after {time_limit:g} s")
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return Outcome(kind="error", reason=f"its process ended {ended}")
    else:
        return outcome
    finally:
        process.join()
        receiver.close()


def _run(compare: Callable[[], Outcome], sender: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    sender.send(run_cell(compare))
