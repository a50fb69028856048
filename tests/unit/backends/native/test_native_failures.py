"""The engine's failures, as numbers on both sides of the bindings."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from ferrodist.backends.native import errors
from ferrodist.backends.native.binding import signature_of_record
from ferrodist.backends.native.errors import FailureKind

_HEADER = Path(__file__).parents[4] / "native" / "base" / "failure.h"


def test_all_failures_are_mapped():
    """Every kind of native/base/failure.h has its number in Python and a public error."""
    enumeration = re.search(r"enum class FailureKind : int \{(.*?)\};", _HEADER.read_text(), re.DOTALL)
    assert enumeration is not None
    names = re.findall(r"^    (\w+),", enumeration.group(1), re.MULTILINE)
    assert len(names) == len(FailureKind)
    assert [{"queue": "queued"}.get(name, name) for name in names] == [kind.name.lower() for kind in FailureKind]
    assert set(errors._ERRORS) == set(FailureKind)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((200, 0, 0), "operation 200("),
        ((1, 200, 0), "dtype 200[7]"),
        ((1, 0, 200), "reduction 200, "),
        ((255, 255, 255), "operation 255("),
    ],
)
def test_unknown_ids_are_shown_as_they_are(line, said):
    """Another rank's call of an operation, dtype or reduction that this build lacks is named in a mismatch."""
    call = signature_of_record(struct.pack("<BBBbiQ", *line, -1, -1, 7).ljust(64, b"\0"), 3)
    assert said in str(call)
    assert call.sequence == 3
