"""The test suite itself: `pytest` alone collects all of it."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_files_have_names_of_their_own():
    """The folders are no packages: of two files with one name pytest refuses the second."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
