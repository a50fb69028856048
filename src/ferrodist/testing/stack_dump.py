"""Reading what `faulthandler` wrote in another process."""

from __future__ import annotations

import linecache
import os
import re
import time
from pathlib import Path
from typing import IO

from ferrodist.deadline import Deadline
from ferrodist.testing.rank_program import is_own_frame

__all__ = ["read_stack"]

_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.02

_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def read_stack(file: IO[bytes], pid: int) -> str:
    """Return the stacks that ``pid`` was asked to write to ``file``, with source lines, outermost call first."""
    deadline = Deadline(_ANSWER_SECONDS)
    before = b""
    while True:
        # Not file.read: the position is shared with the writer.
        text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        if text and text == before:
            return _readable(text.decode(errors="replace"))
        if deadline.expired:
            return f"  (it did not answer a request for its stack within {_ANSWER_SECONDS:g} s; {_state(pid)})"
        before = text
        time.sleep(_POLL_SECONDS)


def _readable(dump: str) -> str:
    """Turn faulthandler's text, innermost call first and without source, into what a traceback looks like."""
    threads: list[str] = []  # the one that runs the rank's function first
    for block in dump.strip().split("\n\n"):
        head, *lines = block.replace(" (most recent call first)", "").splitlines()
        frames = list(reversed(lines))
        own = [i for i, line in enumerate(frames) if (frame := _FRAME.match(line)) and is_own_frame(frame["path"])]
        inner = frames[own[-1] + 1 :] if own else frames
        threads.insert(0 if own else len(threads), "\n".join([f"  {head}", *map(_with_source, inner or frames)]))
    return "\n".join(threads)


def _with_source(line: str) -> str:
    frame = _FRAME.match(line)
    if frame is None:
        return line
    source = linecache.getline(frame["path"], int(frame["line"])).strip()
    return f'  File "{frame["path"]}", line {frame["line"]}, in {frame["name"]}' + (f"\n    {source}" if source else "")


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "it has ended"
    letter = stat.rpartition(")")[2].split()[0]
    return {"T": "it is stopped by a signal", "D": "it waits for a device"}.get(letter, f"its state is {letter}")
