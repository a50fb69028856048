"""The progress of a run: the tables as they come, and on a terminal a bar below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.progress import Bars

if TYPE_CHECKING:
    from collections.abc import Sequence


class RunDisplay(Bars):
    """Lines that stay, and on a terminal a bar below them; a context. The console is standard output by default."""

    def __init__(self, num_cases: int, console: Console | None = None) -> None:
        super().__init__(
            console or Console(),
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("case {task.fields[number]} of {task.fields[num_cases]}"),
            TimeElapsedColumn(),
            # A thread that redraws would take a processor from the ranks while they are timed.
            auto_refresh=False,
        )
        self._num_begun, self._num_rounds = 0, 1
        self._task = self.add_task("", total=num_cases, title="starting", number=0, num_cases=num_cases)

    def begin_case(self, title: str, num_rounds: int) -> None:
        """Show the next case."""
        self._num_begun, self._num_rounds = self._num_begun + 1, num_rounds
        self.update(self._task, completed=self._num_begun - 1, title=title, number=self._num_begun, refresh=True)

    def show_round(self, num_done: int) -> None:
        """Show the number of finished rounds of the case."""
        self.update(self._task, completed=self._num_begun - 1 + num_done / self._num_rounds, refresh=True)

    def print_lines(self, lines: Sequence[str]) -> None:
        """Print lines that stay."""
        self.console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        self.refresh()
