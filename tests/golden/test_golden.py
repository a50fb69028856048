"""What ferrodist puts on wires and into files is what it was, byte for byte.

Ranks of one job may run different releases of a protocol that has not changed, and checkpoints outlive the program that
wrote them. So each subject of `golden_recordings.SUBJECTS` is recorded here as it is now, from outside as far as that
goes, and compared with the recording in ``data``. A difference names the message, the field and the byte.

A change of a protocol or a format is deliberate: it takes another version number where there is one, and then

    python tests/golden/record.py [SUBJECT...]

which writes the recordings anew. Nothing else may change them: not a new place or name of a module, class or function,
which belongs into `golden_names.py`, the only place where this test imports what has no public name.

Random numbers, times, the version and the addresses of this machine are fixed, or left out of the recordings.
"""

from __future__ import annotations

import golden_checkpoints
import golden_recordings as recordings
import pytest


@pytest.mark.parametrize("subject", recordings.SUBJECTS)
def test_nothing_has_changed_on_wires_and_in_files(subject):
    """Else ranks of different releases misread each other, or what another release has saved."""
    differences = recordings.report(subject, recordings.record(subject))

    assert not differences, differences


def test_checkpoints_of_that_time_are_loaded():
    """Else programs lose what they have saved."""
    golden_checkpoints.load(recordings.load("checkpoints"))
