"""The worker group: the ranks of one attempt on this host, started, watched and ended together.

Everything happens in one thread, around one ``poll``: exits of ranks, signals to forward, output to carry, and the
deadline before SIGKILL. So there is nothing to lock, and no thread that could be lost.

Each rank leads a session of its own. Ctrl-C at the terminal then reaches the launcher alone, which forwards it once;
and a rank's children belong to the rank's process group, and end with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import RankFailedError
from ferrodist.launch import _rank_entry
from ferrodist.launch.output import LinePrefixer, OutputPump, rank_prefix
from ferrodist.launch.process_watch import (
    EXIT_POLL_INTERVAL,
    ROOT_CAUSE_TIMEOUT,
    ExitWatch,
    RankExit,
    is_secondary_failure,
)
from ferrodist.launch.rank_logs import StreamOutput
from ferrodist.launch.signals import SignalInbox, members_that_survive
from ferrodist.resource_limits import limit_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Self

_REPEAT_WINDOW_SECONDS = 0.1
"""Seconds in which repeated stop signals count once: GNU ``timeout`` signals its child, then its child's group."""

_STDIN = 0
_MAX_POLL_SECONDS = 3600.0  # poll() counts milliseconds in a C int

# Exit codes of a rank that was asked to end: the signals themselves, and as a shell or a handler reports them.
_STOPPED_CODES = {0, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of one rank."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]  # the full one
    # One rank may read the user's input. On a terminal its unfinished lines are shown after a delay, as prompts.
    owns_stdin: bool = False
    descriptors: tuple[int, ...] = ()  # inherited beside its standard streams
    cpus: frozenset[int] = frozenset()  # it is bound to them; none: the launcher's
    prefix: str | None = None  # of its lines; None: the usual one
    stdout: StreamOutput = field(default_factory=StreamOutput)
    stderr: StreamOutput = field(default_factory=StreamOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """The descriptors to which the ranks' output goes."""

    stdout: int
    stderr: int
    prefixed: bool = True  # False lets the only rank write to the launcher's own streams itself


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The outcome of an attempt."""

    exits: tuple[RankExit, ...]  # all ranks', in order
    # the first that failed by itself before anything else ended the group, or was secondary if all were
    first_failure: RankExit | None
    stopped_by: signal.Signals | None  # the signal that asked the launcher to stop
    killed: frozenset[int]  # still alive when SIGKILL was sent
    elapsed: float
    tail: tuple[bytes, ...] = ()  # last lines of the first failure's standard error, without newlines
    output_error: OSError | None = None  # of writing the ranks' output, other than a closed pipe

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: the first failure's, 128 + N for signal N, 0 on success."""
        if self.first_failure is not None:
            return _shell_code(self.first_failure.code)
        failed = [exit_ for exit_ in self.exits if exit_.code != 0]
        if self.stopped_by is None or not failed:
            return 0
        # A killed rank did not choose its exit code; the signal that asked for its end stands in.
        own = [exit_.code for exit_ in failed if exit_.rank not in self.killed]
        return _shell_code(own[0]) if own else 128 + self.stopped_by


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


class WorkerGroup:
    """The processes of one attempt. Leaving the ``with`` block ends and reaps all of them."""

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
        self._stderr_prefixers: dict[int, LinePrefixer] = {}  # standard error by rank
        self._exits: list[RankExit] = []
        self._first_failure: RankExit | None = None
        self._secondary_failure: RankExit | None = None  # the first secondary failure
        self._root_cause_deadline = Deadline(math.inf)
        self._stopped_by: signal.Signals | None = None
        self._kill_deadline: Deadline | None = None
        self._last_stop_signal: tuple[signal.Signals, float] | None = None
        self._num_interrupts = 0
        self._discards_output = False
        self._stopping = False
        self._killed: frozenset[int] = frozenset()  # ranks that were alive when SIGKILL was sent
        self._has_swept = False  # whether the process groups were sent SIGKILL, which ends a successful attempt, too

    def __enter__(self) -> Self:
        try:
            for rank in self._ranks:
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self) -> GroupOutcome:
        """Watch until every rank has ended and its output is written.

        The first rank that fails stops the others: SIGTERM, then SIGKILL after `timeout_before_kill`; if its failure is
        secondary, the rank that caused it first has `ROOT_CAUSE_TIMEOUT` to end. The first SIGINT, SIGTERM or SIGHUP to
        the launcher stops them too, and is forwarded as it is; a second SIGINT or SIGTERM kills at once, and drops
        unread output. Processes that the ranks leave behind are always killed at the end.
        """
        while not self._is_finished():
            ready = self._poll()
            for pid, code in self._watch.take():
                self._on_exit(pid, code)
            for signum in self._inbox.take():
                self._on_signal(signum)
            self._check_root_cause()
            self._pump.read(ready)
            self._pump.show_prompt()
            if self._all_exited:
                self._await_output()
            if self._kill_deadline is not None and self._kill_deadline.expired:
                self._kill()
            if self._all_exited and self._has_swept:
                self._pump.read_rest()
            self._pump.write()
        failure = self._first_failure
        tail = self._stderr_prefixers[failure.rank].tail if failure is not None else ()
        return GroupOutcome(
            exits=tuple(self._exits),
            first_failure=failure,
            stopped_by=self._stopped_by,
            killed=self._killed,
            elapsed=self._clock.elapsed(),
            tail=tuple(tail),
            output_error=self._pump.error,
        )

    @property
    def _all_exited(self) -> bool:
        return len(self._exits) == len(self._processes)

    def _is_finished(self) -> bool:
        if not (self._all_exited and self._has_swept):
            return False
        return self._pump.at_end and (self._discards_output or self._pump.blocked_sink is None)

    def _start(self, rank: RankProcess) -> None:
        cpus = ",".join(map(str, sorted(rank.cpus)))
        entry = (sys.executable, "-I", "-S", str(Path(_rank_entry.__file__)), str(os.getpid()), cpus)
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
            self._connect(rank, process.stdout, self._sinks.stdout, rank.stdout)
            self._stderr_prefixers[rank.rank] = self._connect(rank, process.stderr, self._sinks.stderr, rank.stderr)
        except OSError as error:
            raise RankFailedError(
                f"rank {rank.rank} could not be started: {limit_text(error) or error}; the ranks before it were ended",
                ranks=(rank.rank,),
            ) from error

    def _connect(self, rank: RankProcess, stream: IO[bytes] | None, sink: int, output: StreamOutput) -> LinePrefixer:
        on_terminal = os.isatty(sink)
        colour = on_terminal and not os.environ.get("NO_COLOR")
        prefixer = LinePrefixer(
            rank_prefix(rank.rank, colour=colour) if rank.prefix is None else os.fsencode(rank.prefix)
        )
        if stream is not None:
            with stream:
                source = os.dup(stream.fileno())
            has_user = rank.owns_stdin and sys.__stdin__ is not None and os.isatty(_STDIN)
            self._pump.add(source, sink, prefixer, prompts=on_terminal and has_user, output=output)
        return prefixer

    def _poll(self) -> frozenset[int]:
        """Wait for an event, and return the ready descriptors."""
        poller = select.poll()
        limit = _MAX_POLL_SECONDS
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
            limit = min(limit, self._root_cause_deadline.remaining())
        if not self._has_swept:
            if self._kill_deadline is not None:
                limit = min(limit, self._kill_deadline.remaining())
            if self._all_exited and self._pump.at_end:
                limit = 0.0
        return frozenset(descriptor for descriptor, _ in poller.poll(math.ceil(limit * 1000)))

    def _on_exit(self, pid: int, code: int) -> None:
        rank, stopped = self._rank_of[pid], self._stopping and code in _STOPPED_CODES
        is_secondary = False
        if code != 0 and not stopped:
            self._pump.catch_up(self._stderr_prefixers[rank])
            is_secondary = is_secondary_failure(self._stderr_prefixers[rank].tail, rank)
        elapsed = self._clock.elapsed()
        exit_ = RankExit(rank=rank, pid=pid, code=code, elapsed=elapsed, stopped=stopped, is_secondary=is_secondary)
        self._exits.append(exit_)
        if code == 0 or self._stopping:
            return
        if not is_secondary:
            self._set_first_failure(exit_)
        elif self._secondary_failure is None:
            self._secondary_failure = exit_
            self._root_cause_deadline = Deadline(ROOT_CAUSE_TIMEOUT)

    def _check_root_cause(self) -> None:
        """Blame a secondary failure if the rank that caused it does not end in time, or did not fail."""
        if self._secondary_failure is None or self._stopping:
            return
        if self._all_exited or self._root_cause_deadline.expired:
            self._set_first_failure(self._secondary_failure)

    def _set_first_failure(self, exit_: RankExit) -> None:
        self._first_failure = exit_
        self._stop(signal.SIGTERM)

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum not in self._inbox.stop_signals:
            if signum == signal.SIGUSR1:
                self._request_stacks()
            else:
                self._signal_groups(signum)
            return
        now, last = self._clock.elapsed(), self._last_stop_signal
        if last is not None and last[0] == signum and now - last[1] < _REPEAT_WINDOW_SECONDS:
            return
        self._last_stop_signal = (signum, now)
        self._stopped_by = self._stopped_by or signum
        if signum != signal.SIGHUP:
            self._num_interrupts += 1
        if self._num_interrupts > 1:
            self._discards_output = True
            self._kill()
        else:
            self._first_failure = self._first_failure or self._secondary_failure
            self._stop(signum)

    def _stop(self, signum: signal.Signals) -> None:
        self._stopping = True
        self._kill_deadline = self._kill_deadline or Deadline(self._timeout_before_kill)
        self._signal_groups(signum)

    def _await_output(self) -> None:
        """All ranks have ended: wait a limited time for their children's output."""
        self._kill_deadline = self._kill_deadline or Deadline(self._timeout_before_kill)
        if self._pump.at_end:
            self._kill()

    def _kill(self) -> None:
        if not self._has_swept:
            self._has_swept = True
            self._killed = frozenset(self._rank_of.values()) - {exit_.rank for exit_ in self._exits}
            self._signal_groups(signal.SIGKILL)

    def _request_stacks(self) -> None:
        """Send SIGUSR1 to the ranks and their children, except those it would kill."""
        for pid in members_that_survive(self._processes, signal.SIGUSR1):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)

    def _signal_groups(self, signum: signal.Signals) -> None:
        for pid in self._processes:
            # No process is left, or (not on Linux) only a zombie, or a rank has changed its user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signum)

    def __exit__(self, *_exception: object) -> None:
        """Kill, reap and close everything."""
        self._signal_groups(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._watch.close()
        self._pump.close()
