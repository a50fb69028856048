"""The progress of a run: the tables as they come, and on a terminal a bar below them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ferrodist.progress import BarDisplay, open_bars

if TYPE_CHECKING:
    from collections.abc import Sequence


class RunDisplay(BarDisplay):
    """Lines that stay, and on a terminal a bar below them; a context. The console is standard output by default."""

    def __init__(self, num_cases: int, console: Console | None = None) -> None:
        console = console or Console()
        bars = open_bars(
            console,
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("case {task.fields[number]} of {task.fields[num_cases]}"),
            TimeElapsedColumn(),
            # A thread that redraws would take a processor from the ranks while they are timed.
            auto_refresh=False,
        )
        super().__init__(console, bars)
        self._num_begun, self._num_rounds = 0, 1
        if self._bars is not None:
            self._task = self._bars.add_task("", total=num_cases, title="starting", number=0, num_cases=num_cases)

    def begin_case(self, title: str, num_rounds: int) -> None:
        """Show the next case."""
        self._num_begun, self._num_rounds = self._num_begun + 1, num_rounds
        self._update(0, title=title, number=self._num_begun)

    def show_round(self, num_done: int) -> None:
        """Show the number of finished rounds of the case."""
        self._update(num_done)

    def print(self, lines: Sequence[str]) -> None:
        """Print lines that stay."""
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        if self._bars is not None:
            self._bars.refresh()

    def _update(self, num_done: int, **fields: Any) -> None:
        if self._bars is not None:
            completed = self._num_begun - 1 + num_done / self._num_rounds
            self._bars.update(self._task, completed=completed, refresh=True, **fields)
