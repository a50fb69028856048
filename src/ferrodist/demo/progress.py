"""How far a run is: rank 0 tells it through a named pipe, the command shows it.

The launcher passes on what ranks print line by line, which no progress bar survives; and it needs the main thread, for
signals. So the display has a pipe and a thread of its own.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run after a step.

    Args:
        step: Steps done.
        num_steps: Steps in all.
        epoch: The epoch, from 1.
        loss: Of the step.
        accuracy: On the test images, at the end of an epoch.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    accuracy: float | None = None


class ProgressWriter:
    """Rank 0's end of the pipe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def __call__(self, progress: Progress) -> None:
        """Tell how far the run is."""
        self._file.write(msgspec.json.encode(progress) + b"\n")

    def close(self) -> None:
        """Say nothing more."""
        self._file.close()


class ProgressPipe:
    """The command's end of the pipe, open inside the ``with`` block; a thread shows what comes.

    Args:
        path: Where to make the pipe.
        show: Shows a state; called in the thread. What it raises is raised when the block ends.
    """

    def __init__(self, path: Path, show: Callable[[Progress], None]) -> None:
        os.mkfifo(path, mode=0o600)
        # For reading and writing: neither end then waits for the other, and a rank's end is not the end of the pipe.
        self._file = os.fdopen(os.open(path, os.O_RDWR), "rb", buffering=0)
        self._show = show
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ferrodist-demo-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._file.fileno(), b"\n")  # an empty line: the end
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        pending = b""
        while True:
            *lines, pending = (pending + self._file.read(4096)).split(b"\n")
            for line in lines:
                if not line:
                    return
                if self._error is None:
                    try:
                        self._show(msgspec.json.decode(line, type=Progress))
                    # Raised later: unread, the pipe would fill and stop rank 0. SystemExit is what rich raises when
                    # the reader of its output has left.
                    except BaseException as error:  # noqa: BLE001
                        self._error = error
