"""The launcher's report of a failed attempt: the first failure, its stderr, and the other ranks' exits."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ferrodist.launch.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ferrodist.launch.process_watch import RankExit
    from ferrodist.launch.worker_group import GroupOutcome

_MAX_TAIL_LINE = 500
_CLIPPED = " [...]"


def describe_exit(code: int) -> str:
    """Return ``exit code 3``, or the signal's name for a negative code."""
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "SIGKILL (sent by somebody, or by the kernel when memory ran out)"
    return signal_name(-code)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``: sorted, with ranges."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {text}" if single else f"ranks {text}"


def failure_report(
    outcome: GroupOutcome, *, host: str, attempt: int, max_attempts: int, logs: Path | None = None
) -> str:
    """Return the report on the first failure of an attempt, ending in a newline; ``logs`` has the rank's log files."""
    first = outcome.first_failure
    assert first is not None
    which = f", attempt {attempt} of {max_attempts}" if max_attempts > 1 else ""
    headline = (
        f"ferrodist: rank {first.rank} failed first: {describe_exit(first.code)}, {first.elapsed:.3f} s "
        f"after start, on host {host} (pid {first.pid}{which})"
    )
    lines = [headline]
    if outcome.tail:
        lines.append("  the end of its stderr:")
        lines += [f"  | {_clip(line)}" for line in outcome.tail]
    if logs is not None:
        lines.append(f"  its logs: {logs}")
    if first.is_secondary:
        lines.append("  it failed because of a rank that did not fail here, or had not ended")
        clean_exits = [exit_ for exit_ in outcome.exits[: outcome.exits.index(first)] if exit_.code == 0]
        lines += _related_exits("ended before it", clean_exits, first)
    later_exits = [exit_ for exit_ in outcome.exits if exit_ is not first and exit_.code != 0 and not exit_.stopped]
    secondary = [exit_ for exit_ in later_exits if exit_.is_secondary and not first.is_secondary]
    lines += _related_exits("failed because of it", secondary, first)
    lines += _related_exits("failed after it", [exit_ for exit_ in later_exits if exit_ not in secondary], first)
    stopped = [exit_.rank for exit_ in outcome.exits if exit_.stopped]
    if stopped:
        lines.append(f"  stopped because of it: {format_ranks(stopped)}{_kill_note(outcome)}")
    return "\n".join(lines) + "\n"


def stop_report(outcome: GroupOutcome) -> str:
    """Return one line on an attempt that was ended by a signal to the launcher."""
    assert outcome.stopped_by is not None
    ended = format_ranks(exit_.rank for exit_ in outcome.exits)
    return (
        f"ferrodist: stopped by {outcome.stopped_by.name} after {outcome.elapsed:.3f} s: {ended} ended"
        f"{_kill_note(outcome)}\n"
    )


def _related_exits(title: str, exits: Iterable[RankExit], first: RankExit) -> list[str]:
    """Return one line on exits related to the first failure, if any."""
    parts = []
    for exit_ in exits:
        code, later = describe_exit(exit_.code).partition(" (")[0], exit_.elapsed - first.elapsed
        parts.append(f"rank {exit_.rank} ({code}, {abs(later):.3f} s {'later' if later >= 0 else 'earlier'})")
    return [f"  {title}: {', '.join(parts)}"] if parts else []


def _kill_note(outcome: GroupOutcome) -> str:
    return f" ({format_ranks(outcome.killed)} did not end in time and had to be killed)" if outcome.killed else ""


def _clip(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace")
    return text if len(text) <= _MAX_TAIL_LINE else text[: _MAX_TAIL_LINE - len(_CLIPPED)] + _CLIPPED
