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

    ``auto_refresh``: a thread redraws the bars. ``transient``: they vanish at the end.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(*columns, console=console, auto_refresh=auto_refresh, transient=transient)
