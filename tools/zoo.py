"""Distribute tiny models of many families in each way that ferrodist has, and compare each with one process.

::

    python tools/zoo.py                                            all cells: takes long
    python tools/zoo.py --families "Llama;BERT" --columns tensor   some; the others keep their stored outcomes

The outcomes go to ``docs/zoo.json``, and from there into ``docs/zoo.md``. A cell is a family distributed in one way. It
runs in a process of its own; its ranks are processes, too. `Outcome` has what it may come to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: cells are forked, and threads aren't

from model_zoo.columns import COLUMNS
from model_zoo.families import FAMILIES
from model_zoo.processes import run_in_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_zoo.outcomes import Outcome

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "zoo.json"


def run_one(family: str, column: str) -> Outcome:
    """Run a cell."""
    return run_in_process(partial(COLUMNS[column], FAMILIES[family]))


def merged(stored: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is stored, with new outcomes; those of other versions of torch and transformers are dropped."""
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    is_same = all(stored.get(name) == each for name, each in versions.items())
    before = stored["cells"] if is_same else {}
    cells = {
        family: {
            column: {**before.get(family, {}), **found.get(family, {})}[column]
            for column in COLUMNS
            if column in {**before.get(family, {}), **found.get(family, {})}
        }
        for family in FAMILIES
    }
    return {**versions, "cells": {family: each for family, each in cells.items() if each}}


def chosen(parser: argparse.ArgumentParser, text: str | None, known: Sequence[str]) -> list[str]:
    """The names of an option, separated by semicolons, or all of them."""
    if text is None:
        return list(known)
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such name: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; 1 if a cell is wrong, or ends in an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", metavar="NAME;...", help="the families, separated by semicolons; default: all")
    parser.add_argument("--columns", metavar="NAME;...", help="the columns, likewise")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="PATH", help="default: docs/zoo.json")
    options = parser.parse_args(arguments)
    families = chosen(parser, options.families, list(FAMILIES))
    columns = chosen(parser, options.columns, list(COLUMNS))
    warnings.simplefilter("ignore")  # of operators that are replicated, once for each cell
    is_bad = False
    for index, family in enumerate(families):
        for column in columns:
            begin = time.perf_counter()
            outcome = run_one(family, column)
            seconds = time.perf_counter() - begin
            print(f"{index + 1}/{len(families)} {family}, {column}: {outcome} [{seconds:.1f} s]", flush=True)
            is_bad |= outcome.kind in {"wrong", "error"}
            stored = json.loads(options.output.read_text()) if options.output.exists() else {}
            found = merged(stored, {family: {column: outcome.to_json()}})
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
