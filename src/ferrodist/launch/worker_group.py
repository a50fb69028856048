"""The ranks of one attempt on this host: start them, watch them, end them together.

Everything happens in one thread, around one ``poll``: ranks that end, signals to forward, output to carry,
and the deadline before SIGKILL. So there is nothing to lock, and no thread that could be lost.

Each rank leads a session of its own. Ctrl-C at the terminal then reaches the launcher alone, which passes it
on once; and what a rank started belongs to the rank's process group, and ends with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import RankFailedError
from ferrodist.launch import _rank_entry
from ferrodist.launch.output import LinePrefixer, OutputPump, rank_prefix
from ferrodist.launch.process_watch import (
    CAUSE_SECONDS,
    EXIT_POLL_INTERVAL,
    STOPPING,
    ExitWatch,
    RankExit,
    SignalInbox,
    is_consequence,
    surviving_members,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

_REPEAT_WINDOW = 0.1
"""Seconds in which a stop signal counts once: GNU ``timeout`` signals its child, then its child's group."""

_STDIN = 0
_LONGEST_POLL = 3600.0  # poll() counts milliseconds in a C int

# What a rank ends with when it is asked to: the signals themselves, and the same as a shell or a handler
# reports them.
_STOPPED_CODES = frozenset(
    {0, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """What to run as one rank.

    Args:
        rank: Its number in the job.
        command: Program and arguments.
        environment: The whole environment.
        owns_stdin: Whether it reads what the user types. One rank may; several would fight for it. Where that is a
            terminal, text without a line's end appears when nothing follows, as a prompt should.
        descriptors: What it inherits beside its standard streams.
    """

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    owns_stdin: bool = False
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """Where the ranks' output goes.

    Args:
        stdout: Descriptor for their standard output.
        stderr: Descriptor for their standard error.
        prefixed: False lets the (only) rank write to the launcher's own streams itself.
    """

    stdout: int
    stderr: int
    prefixed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """How an attempt ended.

    Args:
        exits: Every rank, in the order in which they ended.
        first_failure: The first rank that failed of itself before anything else ended the group, or, where every
            failure was a consequence, the first of these.
        stopped_by: The signal that asked the launcher to stop, if one came.
        killed: Ranks that were still there when SIGKILL was sent.
        elapsed: Seconds the attempt took.
        tail: Last lines of the first failure's standard error, without newlines.
        output_error: Why some of the ranks' output could not be written, if a reader that left was not the reason.
    """

    exits: tuple[RankExit, ...]
    first_failure: RankExit | None
    stopped_by: signal.Signals | None
    killed: frozenset[int]
    elapsed: float
    tail: tuple[bytes, ...] = ()
    output_error: OSError | None = None

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: the first failure's, 128 + N for signal N, 0 if there was none."""
        if self.first_failure is not None:
            return _shell_code(self.first_failure.code)
        failed = [exit_ for exit_ in self.exits if exit_.code != 0]
        if self.stopped_by is None or not failed:
            return 0
        # A rank that had to be killed did not choose its exit code; the signal that asked for its end stands
        # in.
        own = [exit_.code for exit_ in failed if exit_.rank not in self.killed]
        return _shell_code(own[0]) if own else 128 + self.stopped_by


def _stdin_is_terminal() -> bool:
    return sys.__stdin__ is not None and os.isatty(_STDIN)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


class WorkerGroup:
    """The processes of one attempt. Leaving the ``with`` block ends and reaps whatever is left.

    Args:
        ranks: What to run; each is asked for when it is started.
        timeout_before_kill: Seconds between asking the ranks to end and SIGKILL.
        inbox: Signals sent to the launcher.
        sinks: Where the output goes.
    """

    def __init__(
        self, ranks: Iterable[RankProcess], *, timeout_before_kill: float, inbox: SignalInbox, sinks: Sinks
    ) -> None:
        self._ranks = ranks
        self._timeout_before_kill = timeout_before_kill
        self._inbox = inbox
        self._sinks = sinks
        self._clock = Deadline(math.inf)
        self._watch = ExitWatch()
        self._pump = OutputPump()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by pid
        self._rank_of: dict[int, int] = {}
        self._errors: dict[int, LinePrefixer] = {}  # standard error by rank
        self._exits: list[RankExit] = []
        self._first_failure: RankExit | None = None
        self._suspect: RankExit | None = None  # the first failure that was a consequence
        self._cause_deadline = Deadline(math.inf)
        self._stopped_by: signal.Signals | None = None
        self._kill_deadline: Deadline | None = None
        self._last_stop: tuple[signal.Signals, float] | None = None
        self._num_interrupts = 0
        self._gave_up = False
        self._stopping = False
        self._killed: frozenset[int] | None = None

    def __enter__(self) -> Self:
        try:
            for rank in self._ranks:
                self._start(rank)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(self) -> GroupOutcome:
        """Watch until every rank has ended and its output is written.

        The first rank that fails stops the others: SIGTERM, then SIGKILL when `timeout_before_kill` has
        passed; where its failure is a consequence, the rank that caused it first has `CAUSE_SECONDS` to end. The
        first SIGINT, SIGTERM or SIGHUP to the launcher stops them too, and the ranks get it as it came; a second
        SIGINT or SIGTERM kills at once, and gives up on output that nobody reads.
        """
        while not self._is_finished():
            ready = self._poll()
            for pid, code in self._watch.take():
                self._on_exit(pid, code)
            for number in self._inbox.take():
                self._on_signal(number)
            self._look_for_cause()
            self._pump.read(ready)
            self._pump.show_prompt()
            if self._all_exited:
                self._settle()
            if self._kill_deadline is not None and self._kill_deadline.expired:
                self._kill()
            if self._all_exited and self._killed is not None:
                self._pump.read_rest()
            self._pump.write()
        failure = self._first_failure
        tail = self._errors[failure.rank].tail if failure is not None else ()
        return GroupOutcome(
            exits=tuple(self._exits),
            first_failure=failure,
            stopped_by=self._stopped_by,
            killed=self._killed or frozenset(),
            elapsed=self._clock.elapsed(),
            tail=tuple(tail),
            output_error=self._pump.error,
        )

    @property
    def _all_exited(self) -> bool:
        return len(self._exits) == len(self._processes)

    def _is_finished(self) -> bool:
        if not self._all_exited or self._killed is None:
            return False
        return self._pump.at_end and (self._gave_up or self._pump.blocked_sink is None)

    def _start(self, rank: RankProcess) -> None:
        entry = (sys.executable, "-I", "-S", str(Path(_rank_entry.__file__)), str(os.getpid()))
        pipe = subprocess.PIPE if self._sinks.prefixed else None
        try:
            process = subprocess.Popen(  # noqa: S603 - the program to run is the user's own
                (*entry, *rank.command),
                env=dict(rank.environment),
                pass_fds=rank.descriptors,
                stdin=None if rank.owns_stdin else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,
            )
            self._processes[process.pid] = process
            self._rank_of[process.pid] = rank.rank
            self._watch.add(process.pid)
            self._connect(rank, process.stdout, self._sinks.stdout)
            self._errors[rank.rank] = self._connect(rank, process.stderr, self._sinks.stderr)
        except OSError as error:
            raise RankFailedError(
                f"rank {rank.rank} could not be started: {error}; the ranks before it were ended",
                ranks=(rank.rank,),
            ) from error

    def _connect(self, rank: RankProcess, stream: IO[bytes] | None, sink: int) -> LinePrefixer:
        on_terminal = os.isatty(sink)
        prefixer = LinePrefixer(rank_prefix(rank.rank, colour=on_terminal and not os.environ.get("NO_COLOR")))
        if stream is not None:
            with stream:
                source = os.dup(stream.fileno())
            self._pump.add(source, sink, prefixer, prompts=on_terminal and rank.owns_stdin and _stdin_is_terminal())
        return prefixer

    def _poll(self) -> frozenset[int]:
        """Wait until something can be done; returns the descriptors that are ready."""
        poller = select.poll()
        limit = _LONGEST_POLL
        poller.register(self._inbox.fileno(), select.POLLIN)
        watch = self._watch.fileno()
        if watch is not None:
            poller.register(watch, select.POLLIN)
        elif not self._all_exited:
            limit = EXIT_POLL_INTERVAL
        for source in self._pump.sources:
            poller.register(source, select.POLLIN)
        limit = min(limit, self._pump.seconds_to_prompt())
        if self._pump.blocked_sink is not None:
            poller.register(self._pump.blocked_sink, select.POLLOUT)
        if not self._stopping:
            limit = min(limit, self._cause_deadline.remaining())
        if self._killed is None:
            if self._kill_deadline is not None:
                limit = min(limit, self._kill_deadline.remaining())
            if self._all_exited and self._pump.at_end:
                limit = 0.0
        return frozenset(descriptor for descriptor, _ in poller.poll(math.ceil(limit * 1000)))

    def _on_exit(self, pid: int, code: int) -> None:
        rank, stopped = self._rank_of[pid], self._stopping and code in _STOPPED_CODES
        consequence = False
        if code != 0 and not stopped:
            self._pump.catch_up(self._errors[rank])
            consequence = is_consequence(self._errors[rank].tail, rank)
        exit_ = RankExit(
            rank=rank,
            pid=pid,
            code=code,
            elapsed=self._clock.elapsed(),
            stopped=stopped,
            consequence=consequence,
        )
        self._exits.append(exit_)
        if code == 0 or self._stopping:
            return
        if not consequence:
            self._blame(exit_)
        elif self._suspect is None:
            self._suspect = exit_
            self._cause_deadline = Deadline(CAUSE_SECONDS)

    def _look_for_cause(self) -> None:
        """Blame the first failure, though another rank caused it, when that one does not end, or did not fail."""
        if self._suspect is None or self._stopping:
            return
        if self._all_exited or self._cause_deadline.expired:
            self._blame(self._suspect)

    def _blame(self, exit_: RankExit) -> None:
        self._first_failure = exit_
        self._stop(signal.SIGTERM)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self._ask_for_stacks()
            return
        if number not in STOPPING:
            self._signal_groups(number)
            return
        now, last = self._clock.elapsed(), self._last_stop
        if last is not None and last[0] == number and now - last[1] < _REPEAT_WINDOW:
            return
        self._last_stop = (number, now)
        self._stopped_by = self._stopped_by or number
        if number != signal.SIGHUP:
            self._num_interrupts += 1
        if self._num_interrupts > 1:
            self._gave_up = True
            self._kill()
        else:
            self._first_failure = self._first_failure or self._suspect
            self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        if self._kill_deadline is None:
            self._kill_deadline = Deadline(self._timeout_before_kill)
        self._signal_groups(number)

    def _settle(self) -> None:
        """All ranks have ended: wait for what they started to finish writing, but not for ever."""
        if self._kill_deadline is None:
            self._kill_deadline = Deadline(self._timeout_before_kill)
        if self._pump.at_end:
            self._kill()

    def _kill(self) -> None:
        if self._killed is None:
            self._killed = frozenset(self._rank_of.values()) - {exit_.rank for exit_ in self._exits}
            self._signal_groups(signal.SIGKILL)

    def _ask_for_stacks(self) -> None:
        """Send SIGUSR1 to the ranks, and to what they started, but for those it would kill."""
        for pid in surviving_members(self._processes, signal.SIGUSR1):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # as below
                os.kill(pid, signal.SIGUSR1)

    def _signal_groups(self, number: signal.Signals) -> None:
        for pid in self._processes:
            # Nobody left to signal, or (not on Linux) only a zombie, or a rank that took another user's
            # identity.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _close(self) -> None:
        """Kill, reap, close: whatever happened before, nothing of the group remains."""
        self._signal_groups(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._watch.close()
        self._pump.close()
