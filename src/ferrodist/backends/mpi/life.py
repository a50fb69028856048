"""MPI's beginning and end in this process, which both block until all ranks of the job have come to them.

[Note: a thread for MPI's life]
mpi4py holds the interpreter's lock in MPI_Init_thread and in MPI_Finalize, so that no other thread can give up waiting
for them, nor be interrupted. They are called through ctypes instead, which lets go of the lock, by a thread that nobody
has to wait for. It is one thread for both, because MPI wants to be ended by the thread that has started it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline

__all__ = ["Life"]


class Life:
    """MPI in this process, from its start to its end.

    Args:
        mpi: The module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._library = ctypes.CDLL(mpi.__file__)  # in which the symbols of MPI are found that it was linked to
        self._process = os.getpid()
        self._begun = threading.Event()
        self._may_end = threading.Event()
        self._ended = threading.Event()
        self._code = 0
        threading.Thread(target=self._run, name="ferrodist-mpi-life", daemon=True).start()

    def begin(self, deadline: Deadline) -> bool:
        """Wait until MPI has started; False when it has not by the deadline, and goes on.

        Raises:
            RuntimeError: It can't.
        """
        if not self._begun.wait(deadline.remaining()):
            return False
        if self._code != 0:
            raise RuntimeError(f"MPI_Init_thread returned {self._code}")
        return True

    def end(self, patience: float | None) -> None:
        """End MPI if it has started, in the process that has started it; wait so many seconds for that, or for ever."""
        if self._begun.is_set() and os.getpid() == self._process:
            self._may_end.set()
            self._ended.wait(patience)

    def _run(self) -> None:
        mpi = self._mpi
        provided = ctypes.c_int()
        self._code = self._library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
        if self._code != 0:
            self._ended.set()
            self._begun.set()
            return
        for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self._begun.set()
        self._may_end.wait()
        self._library.MPI_Finalize()
        self._ended.set()
