"""The trials of `tests/stress/savers.py`, a few rounds of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stress import savers

if TYPE_CHECKING:
    from pathlib import Path


def test_jobs_that_save_to_one_folder(tmp_path: Path) -> None:
    """All saves of two jobs to one folder succeed, no load is torn, and nothing else is left."""
    found = savers.two_savers(tmp_path, 2, 10)
    assert savers.faults(found) == []
    assert found["saved"] == 20
    assert found["loaded"]


def test_jobs_that_are_killed(tmp_path: Path) -> None:
    """The next save leaves nothing of those that were killed, and others to the folder go on undisturbed."""
    found = savers.killed_savers(tmp_path, 8, seed=1)
    assert savers.faults(found) == []
    assert found["killed"] == 8
    assert found["saved"] > 2
