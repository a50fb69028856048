"""The page for users of the crate agrees with the package."""

import re

import pytest
from page_tables import Page, exists

PAGE = Page("from-ferrotorch.md", "crate")


def test_every_row_says_where_the_name_is():
    """Each row names one crate item, once a module, and says what it is here, or none."""
    for heading, (_, table) in PAGE.sections().items():
        crate_names = [row[0] for row in table]
        assert len(set(crate_names)) == len(crate_names), heading
        for row in table:
            assert len(row) == 3, row
            crate, ours, _ = row
            assert re.fullmatch(r"`[^`]+`", crate), row
            assert ours == "none" or re.fullmatch(r"`fd\.[^`]+`(, `fd\.[^`]+`)*", ours), row


@pytest.mark.parametrize("name", PAGE.present_names())
def test_present_name_exists(name):
    """A name that the page says is there is there."""
    assert exists(name)
