"""The table of torch's versions says what came of the tests, and the program's own list names the same versions."""

from __future__ import annotations

import re

import pytest
import torch_versions

from ferrodist.torch_private import versions
from ferrodist.torch_private.versions import TESTED_VERSIONS

PINNED = re.search(r"^torch==(.*)$", (torch_versions.ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def test_the_page_has_the_table_of_the_stored_results():
    """It is written by ``python tools/torch_versions.py table``; by hand it would not stay true."""
    page = torch_versions.PAGE.read_text()
    assert torch_versions.page_with_table(page) == page


def test_the_subjects_tests_exist():
    """A test file that is renamed is renamed there, too."""
    paths = [path for paths in torch_versions.SUBJECTS.values() for path in paths]
    assert [path for path in paths if not (torch_versions.ROOT / path).exists()] == []


@pytest.mark.parametrize("torch_version", TESTED_VERSIONS)
def test_a_version_that_is_called_tested_has_results_without_failures(torch_version):
    """`ferrodist doctor` calls no version tested whose tests were not run, all of them, or failed."""
    if torch_version == PINNED:
        return  # with which all tests run
    (result,) = [each for each in torch_versions.results() if each["torch"] == torch_version]
    assert result["subjects"].keys() == torch_versions.SUBJECTS.keys()
    assert not {subject: counts["failed"] for subject, counts in result["subjects"].items() if counts["failed"]}
    assert all(counts["passed"] for counts in result["subjects"].values())


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.15.0+cu132", "is tested"),
        ("2.13.0+cpu", "is tested"),
        ("2.15.1", "is not tested itself, but 2.15.0 is"),
        ("2.16.0a0+git1234567", "is newer than 2.15.0, the last that is tested"),
        ("3.0.0", "is newer than 2.15.0, the last that is tested"),
        ("2.9.1", "is older than 2.10, the oldest that is supported"),
        ("2.11.0", "is not tested; 2.10.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0 are"),
    ],
)
def test_what_is_said_of_a_version(version, said, monkeypatch):
    """One who has another torch than the tested ones learns which those are."""
    monkeypatch.setattr(versions, "TESTED_VERSIONS", ("2.10.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"))
    assert versions.describe_version(version) == said
