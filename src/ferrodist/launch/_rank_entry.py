"""Tie this process's life to its launcher's, bind it to its CPUs, then become the rank's program.

Run by path as ``python -I -S _rank_entry.py LAUNCHER_PID CPUS COMMAND...``: it imports nothing but the standard library
and costs about 15 ms per rank, in parallel. CPUS is a list such as ``0,1``; empty, they are the launcher's.

[Note: dying with the launcher] A launcher that is SIGKILLed can't clean up, so the kernel has to. On Linux
``PR_SET_PDEATHSIG`` does that, and it survives ``execve`` (except into a set-uid program). Setting it in a
``preexec_fn`` would run Python between fork and exec, which deadlocks if another thread held a lock at the fork; a
fresh interpreter that sets it and then replaces itself avoids that and leaves no process between launcher and rank. A
pipe watched by the child would need a thread or a second process in each rank.

The signal fires when the *thread* that forked ends. `launch` forks from the thread that waits for the ranks and does
not return before all have ended, so that thread outlives them. If the launcher died before ``prctl``, this process has
another parent than the named one, and kills itself. Other platforms lack the call: there, ranks of a SIGKILLed launcher
end when they next communicate or write. Processes started by a rank are out of the kernel's reach here; they end with
the rank only if the launcher is alive to signal the process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_NOT_BOUND = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # what shells use


def _die_with(launcher: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def _restore_signals() -> None:
    """Undo the interpreter's changes of signal handlers; the program expects the defaults."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _main(launcher: int, cpus: str, command: list[str]) -> int:
    _restore_signals()
    _die_with(launcher)
    if cpus:
        try:
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        except OSError as error:  # they went offline, or a control group took them away
            sys.stderr.write(f"ferrodist: cannot bind the rank to CPUs {cpus}: {error.strerror}\n")
            return _NOT_BOUND
    try:
        os.execvp(command[0], command)  # noqa: S606 - running the user's program is what a launcher is for
    except OSError as error:
        sys.stderr.write(f"ferrodist: cannot start {command[0]!r}: {error.strerror}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
