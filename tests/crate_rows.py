"""The rows of docs/from-ferrotorch.md, and programs that show what single rows say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from page_tables import Page

import ferrodist as fd

__all__ = ["PAGE", "ROWS", "Shown", "resolve", "rows_that"]

PAGE = Page("from-ferrotorch.md", "crate")
ROWS = [(heading, *row) for heading, (_, table) in PAGE.sections().items() for row in table]

_SHOWN_BY_EACH_ROW = re.compile(
    r"property|attribute|also an? `\w+`|`torch\.\w+`$|a `torch\.nn\.Module`|a buffer|the same$|call the module$"
)
"""Notes whose rows are the parameters of a test of their own."""


def rows_that(says):
    """The rows whose note holds a pattern, as parameters of a test."""
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in ROWS if re.search(says, row[3])]


def resolve(ours):
    """What the first name of a cell stands for, and what has it."""
    path = re.match(r"`fd\.([\w.]+)", ours)[1]
    owner, value = None, fd
    for name in path.split("."):
        owner, value = (
            value,
            inspect.getattr_static(value, name, None) if inspect.isclass(value) else getattr(value, name),
        )
    return owner, value


class Shown(dict):
    """Programs of two ranks, by the crate's names in some tables of the page: what a row says, a program shows.

    Args:
        headings: Of the tables.
        elsewhere: Rows that a test of more ranks or of another kind shows, each with its file, below tests/.
        untold: Rows that no program can show here, each with the reason.
    """

    def __init__(self, *headings, elsewhere=None, untold=None):
        super().__init__()
        self.headings = headings
        self.elsewhere = elsewhere or {}
        self.untold = untold or {}
        self._names = {row[1].strip("`") for row in ROWS if row[0] in headings}

    def row(self, *names):
        """Have a program show rows; the names must be of these tables."""

        def keep(program):
            for name in names:
                assert name in self._names, name
                self[name] = program
            return program

        return keep

    def missing(self):
        """The rows with a note that nothing shows."""
        known = {*self, *self.elsewhere, *self.untold}
        return [
            row
            for row in ROWS
            if row[0] in self.headings
            and row[1].strip("`") not in known
            and row[2] != "none"
            and row[3]
            and not _SHOWN_BY_EACH_ROW.match(row[3])
        ]

    def unknown(self):
        """What is said of rows that these tables don't have, and files that are not there."""
        files = {name for name in self.elsewhere.values() if not (Path(__file__).parent / name).exists()}
        return sorted(({*self.elsewhere, *self.untold} - self._names) | files)
