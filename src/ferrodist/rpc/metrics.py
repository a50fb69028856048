"""How an agent's calls have gone."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

_NUM_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """The calls of one agent's users so far; what agents say to each other of their own does not count.

    Args:
        in_flight: Its calls without a result.
        answered: Its calls that have one, or an exception that was raised there.
        timed_out: Its calls that it has given up.
        late: Results that came after that, and were dropped.
        served: Calls of others, and its own of itself, that were called here and have returned.
        failed: Those that raised, or could not be called.
        latency: Seconds from call to result, of its last 1000: the median, and what 90 % and 99 % of them stay below;
            0 before the first.
    """

    in_flight: int
    answered: int
    timed_out: int
    late: int
    served: int
    failed: int
    latency: tuple[float, float, float]


class Counters:
    """What is counted; threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"answered": 0, "timed_out": 0, "late": 0, "served": 0, "failed": 0}
        self._latencies: deque[float] = deque(maxlen=_NUM_KEPT)

    def count(self, what: str) -> None:
        """Add one to a field of `RpcStatistics`."""
        with self._lock:
            self._counts[what] += 1

    def count_answer(self, seconds: float) -> None:
        """A result has come, so long after the call."""
        with self._lock:
            self._counts["answered"] += 1
            self._latencies.append(seconds)

    def look(self, in_flight: int) -> RpcStatistics:
        """What has been counted."""
        with self._lock:
            counts, latencies = dict(self._counts), sorted(self._latencies)
        last = len(latencies) - 1
        median, most, nearly_all = (latencies[round(last * share)] if latencies else 0.0 for share in (0.5, 0.9, 0.99))
        return RpcStatistics(in_flight=in_flight, latency=(median, most, nearly_all), **counts)
