"""Timeouts and deadlines: a ``timeout`` in seconds becomes the time that is left."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_COLLECTIVE_TIMEOUT = 1800.0
"""The timeout in seconds of a blocking call unless the call, its group or FERRODIST_TIMEOUT sets another."""

LONG_WAIT_SECONDS = 30.0  # seconds of waiting for other ranks after which a warning names them

TIMEOUT_VARIABLE = "FERRODIST_TIMEOUT"  # the environment variable that sets the default timeout

# Longer waits are refused by poll(), which counts milliseconds in a C int (24.8 days), and on some platforms by
# Lock.acquire and Condition.wait (threading.TIMEOUT_MAX is about 292 years on Linux, but 49 days there).
_LONGEST_WAIT = 20 * 24 * 3600.0


def check_timeout(timeout: float) -> float:
    """Return ``timeout`` as a float, or raise unless it is a number of seconds, not negative and not NaN."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout >= 0:  # NaN is not either
        raise ValueError(f"timeout must be 0 or more seconds, not {timeout}")
    return float(timeout) if timeout < 1e300 else math.inf  # an int may be too large for a float


def default_timeout() -> float:
    """The default timeout of a blocking call in seconds: FERRODIST_TIMEOUT, else `DEFAULT_COLLECTIVE_TIMEOUT`."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_COLLECTIVE_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # NaN is not either
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0, as 600 or inf, not {text!r}")
    return seconds


def resolve_timeout(timeout: float | None) -> float:
    """Return a timeout as `check_timeout` does, or `default_timeout` for None."""
    return default_timeout() if timeout is None else check_timeout(timeout)


class Deadline:
    """A point in time by which a call must be done, ``timeout`` seconds from now, of which ``elapsed`` have passed.

    ``math.inf`` never passes. Only differences of the clock, in seconds, matter.
    """

    __slots__ = ("_clock", "_end", "_start", "timeout")

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic, *, elapsed: float = 0.0) -> None:
        self.timeout = check_timeout(timeout)
        self._clock = clock
        self._start = clock() - elapsed
        self._end = self._start + self.timeout

    def remaining(self) -> float:
        """Return the seconds left: never negative, and never more than a lock, or poll(), can wait for."""
        return min(max(0.0, self._end - self._clock()), _LONGEST_WAIT)

    def elapsed(self) -> float:
        """Return the seconds since the call began."""
        return self._clock() - self._start

    @property
    def expired(self) -> bool:
        """True once the deadline has passed."""
        return self._clock() >= self._end


def long_wait() -> Deadline:
    """Return the deadline after which a wait that begins now deserves a warning."""
    return Deadline(LONG_WAIT_SECONDS)


class Elapsed(NamedTuple):
    """The elapsed time of a call, and its timeout."""

    seconds: float
    timeout: float

    @classmethod
    def of(cls, deadline: Deadline) -> Elapsed:
        """Return a deadline's present elapsed time."""
        return cls(deadline.elapsed(), deadline.timeout)

    def __str__(self) -> str:
        allowed = float(f"{self.timeout:.4g}")  # a deadline made from another's remaining time is of 1.99997 s
        return f"{self.seconds:.2f} s of {allowed:g} s allowed"
