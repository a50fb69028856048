"""The page docs/zoo.md agrees with the outcomes of make zoo, which it is generated from."""

import json
from pathlib import Path

from model_zoo.columns import COLUMNS
from model_zoo.families import FAMILIES
from zoo_page import RESULTS, TABLES, main

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"


def test_the_page_is_what_the_outcomes_give(tmp_path):
    """If this fails, run python tools/docs/zoo_page.py --write docs/zoo.md."""
    made = tmp_path / "page.md"
    main(["--write", str(made)])
    assert made.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


SLOW = "compile"  # a minute for each family; the page says where it has not been run


def test_cells_are_stored_and_none_is_wrong():
    """A family or a column that is added needs a run of make zoo; what can't be distributed has a reason."""
    cells = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]
    expected = [column for column in COLUMNS if column != SLOW]
    assert {name: [each for each in found if each != SLOW] for name, found in cells.items()} == dict.fromkeys(
        FAMILIES, expected
    )
    assert [column for columns in TABLES.values() for column in columns] == list(COLUMNS)
    for name, found in cells.items():
        for column, outcome in found.items():
            assert outcome["outcome"] == "ok" or outcome["reason"], (name, column)
            assert outcome["outcome"] in {"ok", "refused", "not applicable"}, (name, column)


def test_the_page_names_no_machine():
    """Paths and hosts of the machine that ran it say nothing to readers."""
    text = PAGE.read_text(encoding="utf-8") + RESULTS.read_text(encoding="utf-8")
    assert not [word for word in ("/work", "/tmp", "/home", "/root", "localhost", "127.0.0.1") if word in text]
