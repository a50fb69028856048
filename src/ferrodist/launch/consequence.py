"""Whether a rank failed because another did: its standard error says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["is_consequence"]

_TRACEBACK = b"Traceback (most recent call last):"
# What Python puts between the tracebacks of one chain of exceptions.
_CHAINS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
# Bars and spaces stand in front in exception groups.
_ERROR = re.compile(rb"[\s|]*ferrodist\.errors\.(?P<kind>PeerLostError|NoConnectionError|GroupAbortedError)\b")
_ABORTER = re.compile(rb"\brank (\d+) (?:aborted|of) group 'world'")


def is_consequence(lines: Iterable[bytes], rank: int) -> bool:
    """Whether the last exception printed, or one it came from, is ferrodist's error about another rank's end.

    A rank that catches its error and prints something else, or nothing, counts as one that failed of itself.

    Args:
        lines: The end of the rank's standard error.
        rank: The rank. An abort by itself is no consequence.
    """
    found, previous = False, b""
    for line in lines:
        if line.startswith(_TRACEBACK) and previous not in _CHAINS:
            found = False  # another exception; the program went on after what stood before
        error = _ERROR.match(line)
        if error is not None:
            aborter = _ABORTER.search(line) if error["kind"] == b"GroupAbortedError" else None
            found = aborter is None or int(aborter[1]) != rank
        if line.strip():
            previous = line.strip()
    return found
