"""`RpcStatistics`: how many calls an agent has made and served, and how long they took; and the counters behind it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

_NUM_LATENCIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """The calls of one agent's users so far; the agents' internal calls do not count.

    Args:
        in_flight: This rank's calls without a result.
        answered: This rank's calls that have a result, or an exception that was raised there.
        timed_out: This rank's calls that it has given up.
        late: Results that came after that, and were dropped.
        served: Calls of others, and this rank's own of itself, that were called here and have returned.
        failed: Calls here that raised, or could not be called.
        latency: Seconds from call to result, of the last 1000 calls: the median, and the bounds of 90 % and 99 % of
            them; 0 before the first.
    """

    in_flight: int
    answered: int
    timed_out: int
    late: int
    served: int
    failed: int
    latency: tuple[float, float, float]


class RpcMetrics:
    """The counters behind `RpcStatistics`; threads share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"answered": 0, "timed_out": 0, "late": 0, "served": 0, "failed": 0}
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)

    def count(self, field: str, latency: float | None = None) -> None:
        """Add one to a field of `RpcStatistics`; `latency` is in seconds from a call to its result."""
        with self._lock:
            self._counts[field] += 1
            if latency is not None:
                self._latencies.append(latency)

    def snapshot(self, in_flight: int) -> RpcStatistics:
        """The statistics so far."""
        with self._lock:
            counts, latencies = dict(self._counts), sorted(self._latencies)
        last = len(latencies) - 1
        median, p90, p99 = (latencies[round(last * share)] if latencies else 0.0 for share in (0.5, 0.9, 0.99))
        return RpcStatistics(in_flight=in_flight, latency=(median, p90, p99), **counts)
