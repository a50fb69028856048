"""The page docs/dtensor-operators.md agrees with the rules: it is generated from them."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from dtensor_operators import main

from ferrodist.tensor.ops.table import RULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dtensor-operators.md"


PINNED = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.skipif(version("torch").partition("+")[0] != PINNED, reason=f"the page is of torch {PINNED}'s operators")
def test_the_page_is_what_the_code_generates(tmp_path):
    """If this fails, run make support."""
    made = tmp_path / "page.md"
    main(["--write", str(made)])
    assert made.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_the_page_names_every_operator_that_has_a_rule():
    text = PAGE.read_text(encoding="utf-8")
    missing = [
        operator
        for operator in RULES
        if f"`{operator.overloadpacket.__name__}`" not in text
        and f"`{operator.overloadpacket.__name__}.{operator._overloadname}`" not in text
    ]
    assert not missing


def test_the_page_shows_the_strategies_of_a_matrix_product():
    """The well-known ones."""
    strategies = "(4,6) (6,8): R, R -> R; S(0), R -> S(0); S(1), S(0) -> P; R, S(1) -> S(1); P, R -> P; R, P -> P |"
    assert any(
        line.startswith("| `mm` ") and line.endswith(strategies) for line in PAGE.read_text("utf-8").splitlines()
    )
