"""What the user sees while the demo trains: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID
    from typing_extensions import Self

    from ferrodist.demo.progress import Progress


class Display(Protocol):
    """Shows the state of runs, one after the other."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, title: str) -> None:
        """A run begins."""

    def show(self, progress: Progress) -> None:
        """It has come so far. Called in a thread of its own."""


class LineDisplay:
    """A line at the end of each epoch, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, title: str) -> None:
        """See `Display.begin`."""
        self._title = title

    def show(self, progress: Progress) -> None:
        """See `Display.show`."""
        if progress.accuracy is not None:
            self._console.print(
                f"{self._title}: epoch {progress.epoch:2}, step {progress.step} of {progress.num_steps},"
                f" loss {progress.loss:.4f}, test accuracy {progress.accuracy:.1%}",
                highlight=False,
                soft_wrap=True,
            )


class BarDisplay:
    """A progress bar for each run, for terminals."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._accuracy = "-"

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, title: str) -> None:
        """See `Display.begin`."""
        self._accuracy = "-"
        self._task = self._bars.add_task(title, total=1, loss="-", accuracy="-")

    def show(self, progress: Progress) -> None:
        """See `Display.show`."""
        assert self._task is not None
        if progress.accuracy is not None:
            self._accuracy = f"{progress.accuracy:.1%}"
        self._bars.update(
            self._task,
            completed=progress.step,
            total=progress.num_steps,
            loss=f"{progress.loss:.4f}",
            accuracy=self._accuracy,
        )


def make_display() -> Display:
    """Bars when standard output is a terminal, else lines."""
    console = Console()
    return BarDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(console)
