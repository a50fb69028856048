"""What must be done soon, but by no thread that notices it: a thread that does it."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Errands"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
"""How long the thread may take to end what it is in."""


class Errands:
    """Does one thing after the other, in the order in which they are put.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, errand: Callable[[], object]) -> None:
        """Have something done; it should not wait for anything that is put here.

        Takes no lock of Python's, so that the garbage collector may call it wherever it comes by.
        """
        self._queue.put(errand)

    def close(self) -> None:
        """Do what is there, and end the thread; what is put after that is not done."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while (errand := self._queue.get()) is not None:
            try:
                errand()
            except Exception:  # noqa: BLE001 - the others are to be done all the same
                _log.exception("an errand of %s failed", self._thread.name)
            del errand  # what it holds may be what somebody waits for the end of
