"""The displays of ``ferrodist ckpt`` with rich: the table of a checkpoint, and progress bars."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ferrodist.progress import Bars
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.checkpoint.tools.inspect import Inspection, StateEntry

_MAX_VALUE_LENGTH = 60
_MAX_WIDTH = 100_000


@contextlib.contextmanager
def show_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on standard error, if that is a terminal; yields a callback for bytes done and total."""
    if sys.stderr is None:
        yield None
        return
    with Bars(
        Console(stderr=True),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        transient=True,
    ) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def render_inspection(inspection: Inspection) -> str:
    """Render a table of the state, with a summary before and problems after it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("state", "value or shape", "dtype", "size", "placement", "parts"):
        table.add_column(title, justify="right" if title in ("size", "parts") else "left", overflow="fold")
    for entry in inspection.state:
        table.add_row(*_row(entry))
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    # Names may look like markup or emoji codes.
    console = Console(file=io.StringIO(), force_terminal=is_terminal, highlight=False, markup=False, emoji=False)
    if not is_terminal:  # lines in a pipe are not folded
        console.width = console.measure(table, options=console.options.update(width=_MAX_WIDTH)).maximum
    files = _count(len(inspection.files), "file")
    tensors = f"{_count(inspection.num_tensors, 'tensor')} of {_count(inspection.num_elements, 'element')}"
    ranks = _count(inspection.world_size, "rank")
    console.print(inspection.url, soft_wrap=True)
    console.print(f"saved by {ranks}, {inspection.created}, {inspection.producer}", soft_wrap=True)
    console.print(f"{files}, {_size(inspection.size_bytes)}; {tensors}\n", soft_wrap=True)
    console.print(table)
    console.print()
    for problem in inspection.problems:
        console.print(f"WRONG: {problem}", style="red", soft_wrap=True)
    if not inspection.problems:
        console.print("All files are there; 'ferrodist ckpt verify' reads and checks what is in them.", soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined] # it is the StringIO
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _row(entry: StateEntry) -> tuple[str | Text, ...]:
    name = "  " * (len(entry.place) - 1) + entry.place[-1] if entry.place else "(all)"
    tensor, value = entry.tensor, entry.value or ""
    if entry.kind not in ("tensor", "array"):
        if entry.kind == "per_rank":
            value = f"PerRank of {counted(int(value), 'rank')}"
        elif entry.kind != "value":
            value = f"{entry.kind} of {value}"
        return name, Text(value if len(value) <= _MAX_VALUE_LENGTH else f"{value[:_MAX_VALUE_LENGTH]}...", style="dim")
    if tensor is None:
        return name, Text("missing", style="red")
    dtype = tensor.dtype if entry.kind == "tensor" else f"{tensor.dtype} (NumPy)"
    size = _size(tensor.size_bytes)
    return name, str(list(tensor.shape)), dtype, size, tensor.placement, str(tensor.num_shards)


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _count(number: int, noun: str) -> str:
    """Return a number with thousands separators and its noun; `counted` has none."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
