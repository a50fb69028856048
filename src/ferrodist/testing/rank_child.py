"""The inside of a forked rank: what has to be put right after a fork, and how it speaks to its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ferrodist.testing.supervision import Stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ferrodist.testing.rank_program import Outcome, RankProgram

__all__ = ["STACK_SIGNAL", "fork_rank"]

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads to its file; it works while the rank is inside C code, too."""

_PR_SET_PDEATHSIG = 1


def fork_rank(
    program: RankProgram,
    rank: int,
    connection: Connection,
    stack_file: IO[bytes],
    forget_others: Callable[[], None],
) -> int:
    """Fork, and run ``program`` as ``rank`` in the child, which never returns from here.

    Args:
        program: What to run.
        rank: The child's rank.
        connection: The child's end of its pipe.
        stack_file: Where it writes its stacks when it gets `STACK_SIGNAL`.
        forget_others: Called in the child to close what is only the parent's or another rank's.

    Returns:
        The child's process id.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        forget_others()
        _settle(stack_file, libc, parent)
        program.run(rank, _PipeChannel(connection))
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may pass: the frames above belong to the parent's program
        traceback.print_exc()
    finally:
        # Not sys.exit: exit handlers, pytest's among them, are the parent's.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _settle(stack_file: IO[bytes], libc: ctypes.CDLL | None, parent: int) -> None:
    """Undo what a forked process inherits and must not keep."""
    if libc is not None:
        # No rank outlives a parent that was killed. The check closes the gap before the call.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    # The terminal's Ctrl-C reaches all processes; the parent answers it and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True, chain=False)
    # The parent's garbage is the parent's to finalize (a TemporaryDirectory would be removed under it).
    gc.freeze()
    # pytest's capture replaces sys.stdout by objects that only the parent reads; the descriptors reach it, or the
    # terminal.
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    # A pool of threads does not survive a fork, and many ranks share the cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _text_stream(descriptor: int) -> IO[str]:
    try:
        return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    except OSError:  # the parent has closed it
        return Path(os.devnull).open("w", encoding="utf-8")


class _PipeChannel:
    """A `Channel` over a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ended(self, outcome: Outcome) -> None:
        # Before the outcome: the parent may print its own text as soon as it has that.
        sys.stdout.flush()
        sys.stderr.flush()
        self._connection.send_bytes(_pack(Stage.ENDED, outcome))

    def await_close(self) -> None:
        self._connection.recv_bytes()

    def closed(self, outcome: Outcome | None) -> None:
        self._connection.send_bytes(_pack(Stage.CLOSED, outcome))


def _pack(stage: Stage, outcome: Outcome | None) -> bytes:
    """Pickle an outcome, or if that is impossible one that says why."""
    try:
        packed = pickle.dumps((stage, outcome))
        if outcome is not None and outcome.error is not None:
            pickle.loads(packed)  # an exception with its own __init__ may pickle and then not unpickle
    except Exception as error:  # noqa: BLE001 - a result's own code runs here
        assert outcome is not None
        return pickle.dumps((stage, _picklable(outcome, error)))
    return packed


def _picklable(outcome: Outcome, problem: Exception) -> Outcome:
    said = f"{type(problem).__name__}: {problem}"
    if outcome.error is None:
        summary = (
            f"it returned a {type(outcome.result).__name__} that cannot be pickled ({said}). Ranks that are processes"
            " can return only what pickles; ranks that are threads can return anything."
        )
        return replace(outcome, result=None, summary=summary)
    stand_in = RuntimeError(f"{outcome.summary} (a stand-in: the error itself does not pickle: {said})")
    return replace(outcome, error=stand_in)
