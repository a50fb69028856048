"""How far a long piece of work is, for those who want to show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    ProgressCallback = Callable[[int, int], None]
    """Told how many bytes are done, and of how many."""

__all__ = ["Progress"]


class Progress:
    """Counts bytes.

    Args:
        total: All of them.
        report: Called at the beginning, and whenever some are done; None is nobody.
    """

    def __init__(self, total: int, report: ProgressCallback | None) -> None:
        self._total = total
        self._done = 0
        self._report = report
        self.add(0)

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)
