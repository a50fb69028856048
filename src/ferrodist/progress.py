"""Progress bars on terminals, with rich: an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import Progress, ProgressColumn

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self


class BarDisplay:
    """A context that shows bars, if there are any, beside what is printed on their console."""

    def __init__(self, console: Console, bars: Progress | None) -> None:
        self._console, self._bars = console, bars

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def open_bars(
    console: Console, *columns: ProgressColumn, auto_refresh: bool = True, transient: bool = False
) -> Progress | None:
    """Progress bars for a console, or None where it is a file, a pipe or a terminal that can't redraw.

    ``auto_refresh``: a thread redraws the bars. ``transient``: they vanish at the end.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(*columns, console=console, auto_refresh=auto_refresh, transient=transient)
