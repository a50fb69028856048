"""Deadlines: one way to turn a ``timeout`` in seconds into the time that is left."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_COLLECTIVE_TIMEOUT = 1800.0
"""Seconds a blocking call may take when neither the call, nor its group, nor FERRODIST_TIMEOUT says otherwise."""

LONG_WAIT_SECONDS = 30.0
"""Seconds of waiting for other ranks after which a warning names them."""

TIMEOUT_VARIABLE = "FERRODIST_TIMEOUT"
"""The environment variable with another default."""

# Lock.acquire and Condition.wait refuse longer waits than this (threading.TIMEOUT_MAX is about 292 years on Linux, but
# 49 days on some platforms).
_LONGEST_WAIT = 30 * 24 * 3600.0


def check_timeout(timeout: float) -> float:
    """Return ``timeout`` as a float, or raise: it must be a number of seconds, not negative and not NaN."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout >= 0:  # NaN is not either
        raise ValueError(f"timeout must be 0 or more seconds, not {timeout}")
    return float(timeout) if timeout < 1e300 else math.inf  # an int may be too large for a float


def default_timeout() -> float:
    """Seconds a blocking call may take by default: FERRODIST_TIMEOUT, else `DEFAULT_COLLECTIVE_TIMEOUT`.

    Raises:
        ValueError: The variable holds no number of seconds above 0.
    """
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
    """A timeout as `check_timeout` returns it, or `default_timeout` for None."""
    return default_timeout() if timeout is None else check_timeout(timeout)


class Deadline:
    """A moment by which something must be done.

    Args:
        timeout: Seconds from now; ``math.inf`` never passes.
        clock: Where the time comes from, in seconds; only differences matter.
        elapsed: Seconds of them that have passed already.
    """

    __slots__ = ("_clock", "_end", "_start", "timeout")

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic, *, elapsed: float = 0.0) -> None:
        self.timeout = check_timeout(timeout)
        self._clock = clock
        self._start = clock() - elapsed
        self._end = self._start + self.timeout

    def remaining(self) -> float:
        """Seconds left: never negative, and never more than a lock can wait for."""
        return min(max(0.0, self._end - self._clock()), _LONGEST_WAIT)

    def elapsed(self) -> float:
        """Seconds since the deadline was made."""
        return self._clock() - self._start

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self._clock() >= self._end


def long_wait() -> Deadline:
    """When a wait that begins now has lasted long enough for a warning."""
    return Deadline(LONG_WAIT_SECONDS)


def before_warning(timeout: float) -> float:
    """How much of a wait there is until it has lasted long enough for a warning; what is no number stays as it is."""
    try:
        if timeout > LONG_WAIT_SECONDS:
            return LONG_WAIT_SECONDS
    except TypeError:
        pass
    return timeout


class Elapsed(NamedTuple):
    """How long something has taken, beside how long it might have."""

    seconds: float
    timeout: float

    @classmethod
    def of(cls, deadline: Deadline) -> Elapsed:
        """What a deadline says now."""
        return cls(deadline.elapsed(), deadline.timeout)

    def __str__(self) -> str:
        allowed = float(f"{self.timeout:.4g}")  # a deadline made of what another has left is of 1.99997 s
        return f"{self.seconds:.2f} s of {allowed:g} s allowed"
