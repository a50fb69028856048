"""The rows of docs/from-ferrotorch.md, and programs that check the notes of single rows."""

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
    """The rows whose note matches a pattern, as parameters of a test."""
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in ROWS if re.search(says, row[3])]


def resolve(ours):
    """The owner and the value of the first name in a cell."""
    path = re.match(r"`fd\.([\w.]+)", ours)[1]
    owner, value = None, fd
    for name in path.split("."):
        owner, value = (
            value,
            inspect.getattr_static(value, name, None) if inspect.isclass(value) else getattr(value, name),
        )
    return owner, value


class Shown(dict):
    """Programs of two ranks that check the notes of some tables, by the crate's names.

    Args:
        headings: The headings of the tables.
        elsewhere: Rows that another test checks, each with its file below tests/.
        untold: Rows that no program can check here, each with the reason.
    """

    def __init__(self, *headings, elsewhere=None, untold=None):
        super().__init__()
        self.headings = headings
        self.elsewhere = elsewhere or {}
        self.untold = untold or {}
        self._names = {row[1].strip("`") for row in ROWS if row[0] in headings}

    def row(self, *names):
        """Register a program for rows of these tables."""

        def keep(program):
            for name in names:
                assert name in self._names, name
                self[name] = program
            return program

        return keep

    def missing(self):
        """The rows with a note that no program checks."""
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
        """Names that these tables don't have, and files that don't exist."""
        files = {name for name in self.elsewhere.values() if not (Path(__file__).parents[1] / name).exists()}
        return sorted(({*self.elsewhere, *self.untold} - self._names) | files)
