"""Progress bars on terminals, with rich: an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import Progress, ProgressColumn

if TYPE_CHECKING:
    from rich.console import Console


class Bars(Progress):
    """Progress bars; nothing where the console is a file, a pipe or a terminal that can't redraw. A context.

    ``auto_refresh``: a thread redraws the bars. ``transient``: they vanish at the end.
    """

    def __init__(
        self, console: Console, *columns: ProgressColumn, auto_refresh: bool = True, transient: bool = False
    ) -> None:
        nowhere = not console.is_terminal or console.is_dumb_terminal
        super().__init__(*columns, console=console, auto_refresh=auto_refresh, transient=transient, disable=nowhere)

    def stop(self) -> None:
        """End the display; older versions of rich print an empty line also without one."""
        if not self.disable:
            super().stop()
