"""Progress bars on terminals, with rich: an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import Progress, ProgressColumn

if TYPE_CHECKING:
    from rich.console import Console


def open_bars(
    console: Console, *columns: ProgressColumn, auto_refresh: bool = True, transient: bool = False
) -> Progress | None:
    """Progress bars for a console, or None where it is a file, a pipe or a terminal that can't redraw.

    Args:
        console: The console.
        columns: The columns of each bar.
        auto_refresh: Whether a thread redraws the bars.
        transient: Whether the bars vanish at the end.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(*columns, console=console, auto_refresh=auto_refresh, transient=transient)
