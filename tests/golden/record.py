"""Record anew what the golden test compares: python tests/golden/record.py [SUBJECT...], all of them without a name.

Prints what changes by that. See `test_golden.py` for when it may.
"""

from __future__ import annotations

import sys

import golden_recordings as recordings


def main(subjects: list[str]) -> None:
    """Record these."""
    for subject in subjects or recordings.SUBJECTS:
        found = recordings.record(subject)
        try:
            changes = recordings.report(subject, found)
        except FileNotFoundError:
            changes = f"{subject} is recorded for the first time"
        recordings.save(subject, found)
        sys.stdout.write(f"{changes or f'{subject} is as it was'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
