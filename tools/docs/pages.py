"""Helpers of the scripts that write pages of docs/ from the code."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_WIDTH = 80
"""Cells are not filled up with more spaces than to this."""


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, its columns aligned as far as lines of a usual length allow."""
    widths = [min(max(len(row[column]) for row in (head, *rows)), _MAX_WIDTH) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def wrap(text: str, indent: str = "") -> str:
    """Break text into lines of 100 columns, those after the first one indented."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write_page(script: str, render: Callable[[], str], arguments: Sequence[str] | None = None) -> None:
    """Write a page to where the command line says.

    Args:
        script: The path of the script, for its help.
        render: Renders the page.
        arguments: The command line; None is the process's own.
    """
    parser = argparse.ArgumentParser(prog=f"python {script}", description="Write the page.")
    parser.add_argument("--write", type=Path, metavar="PATH", help="a file; default: standard output")
    path: Path | None = parser.parse_args(arguments).write
    if path is None:
        sys.stdout.write(render())
    else:
        path.write_text(render(), encoding="utf-8")
