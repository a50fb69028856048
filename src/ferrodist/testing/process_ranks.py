"""Ranks that are processes forked from this one.

`ProcessRanks` forks the ranks, receives their results and reaps them. A child resets the state that a fork must not
inherit, and runs the program. `_read_stack` reads the stack that `faulthandler` has written in a stuck child.

Results and errors are pickled. That is safe here and nowhere else: the pipe has no name, and both of its ends are this
program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import linecache
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.deadline import Deadline
from ferrodist.launch.signals import signal_name
from ferrodist.testing.supervisor import Event, Outcome, RankSet, Stage, is_own_frame

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

    from ferrodist.testing.supervisor import RankProgram

_STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a rank writes the stacks of its threads to its file, also while it is inside C code."""

_PR_SET_PDEATHSIG = 1


def _reset_after_fork(stack_file: IO[bytes], libc: ctypes.CDLL | None, parent: int) -> None:
    """Reset the state that a forked process must not inherit."""
    if libc is not None:
        # No rank outlives a parent that was killed. The check closes the gap before the call.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    # The terminal's Ctrl-C reaches all processes; the parent answers it and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=True, chain=False)
    # The parent's garbage is the parent's to finalize (a TemporaryDirectory would be removed under it).
    gc.freeze()
    # pytest's capture replaces sys.stdout by objects that only the parent reads; the descriptors reach it, or the
    # terminal.
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    # A pool of threads does not survive a fork, and many ranks share the cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _text_stream(descriptor: int) -> IO[str]:
    try:
        return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    except OSError:  # the parent has closed it
        return Path(os.devnull).open("w", encoding="utf-8")


def _report(connection: Connection, event: Event) -> None:
    """Send an event; in place of one that does not pickle, one that says why."""
    outcome = event.outcome
    try:
        packed = pickle.dumps(event)
        if outcome is not None and outcome.error is not None:
            pickle.loads(packed)  # an exception with its own __init__ may pickle and then not unpickle
    except Exception as problem:  # noqa: BLE001 - a result's own code runs here
        assert outcome is not None
        said = f"{type(problem).__name__}: {problem}"
        if outcome.error is None:
            summary = (
                f"it returned a {type(outcome.result).__name__} that cannot be pickled ({said}). Ranks that are"
                " processes can return only what pickles; ranks that are threads can return anything."
            )
            outcome = replace(outcome, result=None, summary=summary)
        else:
            stand_in = RuntimeError(f"{outcome.summary} (a stand-in: the error itself does not pickle: {said})")
            outcome = replace(outcome, error=stand_in)
        packed = pickle.dumps(replace(event, outcome=outcome))
    # Before the outcome: the parent may print its own text as soon as it has that.
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(packed)


_STACK_TIMEOUT_SECONDS = 1.0
_POLL_INTERVAL_SECONDS = 0.02

_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def _read_stack(file: IO[bytes], pid: int) -> str:
    """Return the stacks that ``pid`` was asked to write to ``file``, with source lines, outermost call first."""
    deadline = Deadline(_STACK_TIMEOUT_SECONDS)
    before = b""
    while True:
        # Not file.read: the position is shared with the writer.
        text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        if text and text == before:
            return _readable(text.decode(errors="replace"))
        if deadline.expired:
            return f"  (it did not answer a request for its stack within {_STACK_TIMEOUT_SECONDS:g} s; {_state(pid)})"
        before = text
        time.sleep(_POLL_INTERVAL_SECONDS)


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


_EXIT_TIMEOUT_SECONDS = 2.0
_THREAD_EXIT_TIMEOUT_SECONDS = 0.5
_lasting_threads: set[int] = set()  # system ids of threads of C libraries that did not end when they were waited for


class _Child:
    """The parent's view of one forked rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, self.far_end = Pipe()
        self.stack_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.pid = 0
        # Readable when the process has ended, even if a child of its own still holds the pipe. Linux only.
        self.pidfd: int | None = None
        self.stage: Stage | None = None
        self.status: int | None = None
        self.reaped = False

    def kill(self) -> None:
        if self.pid and not self.reaped:  # not reaped: the pid can't have gone to another process
            os.kill(self.pid, signal.SIGKILL)

    def reap(self, deadline: Deadline | None = None) -> bool:
        """Wait for the end of the process; False when it goes on. Without a deadline it must be known to end."""
        while self.pid and not self.reaped:
            try:
                pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            except ChildProcessError:  # someone else in this process has waited for it
                self.reaped = True
                break
            if pid:
                self.status, self.reaped = os.waitstatus_to_exitcode(status), True
            elif deadline is None or deadline.expired:
                return False
            elif self.pidfd is not None:
                wait_readable([self.pidfd], deadline.remaining())
            else:
                time.sleep(0.005)
        return True

    def close(self) -> None:
        self.connection.close()
        self.far_end.close()
        self.stack_file.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ProcessRanks(RankSet):
    """One forked process for each rank; a `RankSet`."""

    def __init__(self, program: RankProgram, world_size: int) -> None:
        others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        if others:
            note = (
                f"this process had other threads when it forked the ranks ({', '.join(others)}); a lock that one of"
                " them held at that moment stays locked in the ranks for ever. Fork before starting threads, or use"
                " ranks that are threads."
            )
            self.notes = [note]
        self._pending: list[Event] = []
        self._children: list[_Child] = []
        _await_ended_threads()
        try:
            self._children.extend(_Child(rank) for rank in range(world_size))
            with warnings.catch_warnings():
                # Python 3.12 warns of a fork beside threads. `notes` says so when it mattered.
                warnings.simplefilter("ignore", DeprecationWarning)
                for child in self._children:
                    self._fork(child, program)
        except BaseException:
            self.dispose()
            raise

    def _fork(self, child: _Child, program: RankProgram) -> None:
        """Fork a rank, which runs ``program`` and never returns from here."""
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        child.pid = os.fork()
        if child.pid:
            child.far_end.close()
            if hasattr(os, "pidfd_open"):
                with suppress(OSError):
                    child.pidfd = os.pidfd_open(child.pid)
            return
        status = 1
        try:
            child.connection.close()
            for other in self._children:  # a copy of another rank's pipe would hide that its end was closed
                if other is not child:
                    other.close()
            _reset_after_fork(child.stack_file, libc, parent)
            program.run(child.rank, partial(_report, child.far_end), child.far_end.recv_bytes)
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may pass: the frames above belong to the parent's program
            traceback.print_exc()
        finally:
            # Not sys.exit: exit handlers, pytest's among them, are the parent's.
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    @override
    def next_event(self, timeout: float) -> Event | None:
        deadline = Deadline(timeout)
        while not self._pending:
            sources: dict[Any, _Child] = {}
            for child in self._children:
                if not child.reaped:
                    if not child.connection.closed:
                        sources[child.connection] = child
                    if child.pidfd is not None:
                        sources[child.pidfd] = child
            ready = wait_readable(list(sources), deadline.remaining())
            if not ready:
                return None
            for source in ready:
                self._on_readable(sources[source], exited=isinstance(source, int))
        return self._pending.pop(0)

    def _on_readable(self, child: _Child, *, exited: bool) -> None:
        """Receive one child's messages, and its exit."""
        if child.reaped:
            return
        try:
            while not child.connection.closed and child.connection.poll():
                self._on_message(child, child.connection.recv_bytes())
        except (EOFError, OSError):
            child.connection.close()
            if child.pidfd is None:  # its exit would go unnoticed, and without the pipe it is of no use
                child.kill()
                exited = True
        if exited:
            child.reap()
            self._on_exit(child)

    def _on_message(self, child: _Child, message: bytes) -> None:
        try:
            event: Event = pickle.loads(message)
        except Exception as error:  # noqa: BLE001 - a result's own code runs here
            stage = Stage.ENDED if child.stage is None else Stage.CLOSED
            self._add_failure(
                child, stage, f"what it returned or raised cannot be unpickled here: {type(error).__name__}: {error}"
            )
        else:
            child.stage = event.stage
            self._pending.append(event)

    def _on_exit(self, child: _Child) -> None:
        if child.status is None:
            cause = "the process ended without a result"
        elif child.status < 0:
            cause = f"the process was killed by {signal_name(-child.status)}"
        else:
            cause = f"the process exited with status {child.status} without a result"
        if child.stage is None:
            self._add_failure(child, Stage.ENDED, cause)
            self._pending.append(Event(rank=child.rank, stage=Stage.CLOSED, outcome=None))
        elif child.stage is Stage.ENDED:
            self._add_failure(child, Stage.CLOSED, f"{cause}, while it closed its group")
        child.stage = Stage.CLOSED

    def _add_failure(self, child: _Child, stage: Stage, summary: str) -> None:
        child.stage = stage
        outcome = Outcome(rank=child.rank, time=time.monotonic(), summary=summary)
        self._pending.append(Event(rank=child.rank, stage=stage, outcome=outcome))

    @override
    def stack(self, rank: int) -> str:
        child = self._children[rank]
        if child.reaped:
            return "  (the process has just ended)"
        os.kill(child.pid, _STACK_SIGNAL)
        return _read_stack(child.stack_file, child.pid)

    @override
    def stop(self, ranks: Iterable[int]) -> None:
        children = [self._children[rank] for rank in ranks]
        for child in children:
            child.kill()
        for child in children:
            child.reap()
            child.stage = Stage.CLOSED
        stopped = {child.rank for child in children}
        self._pending = [event for event in self._pending if event.rank not in stopped]

    @override
    def release(self) -> None:
        for child in self._children:
            if not child.reaped and not child.connection.closed:
                with suppress(OSError):  # it has just died, which its pidfd or pipe will show
                    child.connection.send_bytes(b"close")

    @override
    def dispose(self) -> None:
        deadline = Deadline(_EXIT_TIMEOUT_SECONDS)
        for child in self._children:
            if child.pid and (child.stage is not Stage.CLOSED or not child.reap(deadline)):
                child.kill()
        for child in self._children:
            child.reap()
            child.close()


def _await_ended_threads() -> None:
    """Wait until threads that have ended in Python have ended in C.

    ``Thread.join`` returns before that. At a thread's very end C libraries may hold a lock, which would stay locked for
    ever in a process forked meanwhile. OpenSSL's thread events do: the first HMAC of a thread in the child would never
    return.
    """
    deadline = Deadline(_THREAD_EXIT_TIMEOUT_SECONDS)
    _lasting_threads.intersection_update(_system_threads())
    while unknown := _system_threads() - {thread.native_id for thread in threading.enumerate()} - _lasting_threads:
        if deadline.expired:
            _lasting_threads.update(unknown)
        time.sleep(0.0002)


def _system_threads() -> set[int]:
    """System ids of this process's threads; empty without a /proc."""
    try:
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}
    except OSError:
        return set()
