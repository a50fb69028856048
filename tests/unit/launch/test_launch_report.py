"""The text of the failure report."""

from __future__ import annotations

import signal

import pytest

from ferrodist.launch.failure_report import describe_exit, failure_report, format_ranks, stop_report
from ferrodist.launch.process_watch import RankExit
from ferrodist.launch.worker_group import GroupOutcome


def ended(rank: int, code: int, elapsed: float = 1.0, **values: bool) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, code=code, elapsed=elapsed, **values)


def outcome_of(*exits: RankExit, failure: RankExit | None = None, **values) -> GroupOutcome:
    defaults = {"stopped_by": None, "killed": frozenset(), "elapsed": 2.0}
    return GroupOutcome(exits=exits, first_failure=failure, **{**defaults, **values})


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2], "ranks 0, 2"), ([7, 0, 1, 5, 6], "ranks 0-1, 5-7")],
)
def test_ranks_are_named_in_runs(ranks, text):
    """Ranks are sorted, and neighbours are joined."""
    assert format_ranks(ranks) == text


def test_exits_are_described():
    """Exit codes are numbers, signals have names, and SIGKILL names its usual cause."""
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "SIGSEGV"
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert describe_exit(-60) == "signal 60"


def test_the_whole_report():
    """Cause first, then its last words, then what followed from it."""
    first = ended(2, -signal.SIGSEGV, 1.5)
    outcome = outcome_of(
        ended(4, 0, 1.0),
        first,
        ended(0, 1, 1.504),
        ended(3, -signal.SIGTERM, 1.6, stopped=True),
        ended(1, -signal.SIGKILL, 6.5, stopped=True),
        failure=first,
        killed=frozenset({1}),
        tail=(b"Traceback", b"caf\xe9"),
    )
    assert failure_report(outcome, host="node7", attempt=1, max_attempts=3) == (
        "ferrodist: rank 2 failed first: SIGSEGV, 1.500 s after start, on host node7 "
        "(pid 102, attempt 1 of 3)\n"
        "  the end of its stderr:\n"
        "  | Traceback\n"
        "  | caf\\xe9\n"
        "  failed after it: rank 0 (exit code 1, 0.004 s later)\n"
        "  stopped because of it: ranks 1, 3 (rank 1 did not end in time and had to be killed)\n"
    )
    assert outcome.exit_code == 128 + signal.SIGSEGV


def test_secondary_failures_are_listed_separately():
    """Ranks that failed because of the first are told from those that failed after it, and may have ended earlier."""
    first = ended(1, 4, 1.5)
    outcome = outcome_of(ended(0, 1, 1.25, is_secondary=True), first, ended(2, 3, 1.75), failure=first)
    assert failure_report(outcome, host="h", attempt=1, max_attempts=1).splitlines()[1:] == [
        "  failed because of it: rank 0 (exit code 1, 0.250 s earlier)",
        "  failed after it: rank 2 (exit code 3, 0.250 s later)",
    ]


def test_a_cause_on_another_host():
    """If the first failure names another rank as the reason, the report says so, and which ranks had exited by then."""
    first = ended(0, 1, 1.5, is_secondary=True)
    outcome = outcome_of(ended(1, 0, 1.25), first, ended(2, 1, 1.75, is_secondary=True), failure=first)
    assert failure_report(outcome, host="h", attempt=1, max_attempts=1).splitlines()[1:] == [
        "  it failed because of a rank that did not fail here, or had not ended",
        "  ended before it: rank 1 (exit code 0, 0.250 s earlier)",
        "  failed after it: rank 2 (exit code 1, 0.250 s later)",
    ]


def test_a_short_report_has_one_line():
    """Nothing is said about what did not happen, and long lines are clipped."""
    first = ended(0, 3)
    report = failure_report(outcome_of(first, failure=first), host="h", attempt=1, max_attempts=1)
    assert report == "ferrodist: rank 0 failed first: exit code 3, 1.000 s after start, on host h (pid 100)\n"
    long = failure_report(outcome_of(first, failure=first, tail=(b"x" * 9999,)), host="h", attempt=1, max_attempts=1)
    assert max(map(len, long.splitlines())) < 600


def test_exit_codes_after_a_signal_to_the_launcher():
    """Graceful ends give 0; otherwise a rank's own code, or 128 + the signal where ranks had to be killed."""
    term = signal.SIGTERM
    assert outcome_of(ended(0, 0), ended(1, 0), stopped_by=term).exit_code == 0
    assert outcome_of(ended(0, 0), ended(1, 5), stopped_by=term).exit_code == 5
    assert outcome_of(ended(0, -term), stopped_by=term).exit_code == 143
    killed = outcome_of(ended(0, -9), ended(1, -9), stopped_by=signal.SIGINT, killed=frozenset({0, 1}))
    assert killed.exit_code == 130
    assert stop_report(killed) == (
        "ferrodist: stopped by SIGINT after 2.000 s: ranks 0-1 ended "
        "(ranks 0-1 did not end in time and had to be killed)\n"
    )
