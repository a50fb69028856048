"""How far a run is: a bar on a terminal, the tables as they come anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self


class Display(Protocol):
    """Shows a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def begin(self, title: str, num_rounds: int) -> None:
        """A case begins."""

    def show_round(self, number: int) -> None:
        """So many of its rounds are done."""

    def say(self, lines: Sequence[str]) -> None:
        """Print lines that stay."""


class LineDisplay:
    """Only what stays, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, title: str, num_rounds: int) -> None:
        """See `Display.begin`."""

    def show_round(self, number: int) -> None:
        """See `Display.show_round`."""

    def say(self, lines: Sequence[str]) -> None:
        """See `Display.say`."""
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


class BarDisplay:
    """A bar below what stays, for terminals."""

    def __init__(self, console: Console, num_cases: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("case {task.fields[number]} of {task.fields[num_cases]}"),
            TimeElapsedColumn(),
            console=console,
            # A thread that redraws would take a processor from the ranks while they are timed.
            auto_refresh=False,
        )
        self._number = 0
        self._task = self._bars.add_task("", total=num_cases, title="starting", number=0, num_cases=num_cases)
        self._num_rounds = 1

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, title: str, num_rounds: int) -> None:
        """See `Display.begin`."""
        self._number, self._num_rounds = self._number + 1, num_rounds
        self._bars.update(self._task, title=title, number=self._number, completed=self._number - 1, refresh=True)

    def show_round(self, number: int) -> None:
        """See `Display.show_round`."""
        self._bars.update(self._task, completed=self._number - 1 + number / self._num_rounds, refresh=True)

    def say(self, lines: Sequence[str]) -> None:
        """See `Display.say`."""
        self._console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        self._bars.refresh()


def make_display(num_cases: int) -> Display:
    """A bar when standard output is a terminal, else lines."""
    console = Console()
    return (
        BarDisplay(console, num_cases) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(console)
    )
