"""The engine's failures, as numbers on both sides of the bindings."""

from __future__ import annotations

import re
from pathlib import Path

from ferrodist.backends.native import failures
from ferrodist.backends.native.failures import FailureKind

_HEADER = Path(__file__).parents[3] / "native" / "base" / "failure.h"


def test_all_failures_are_mapped():
    """Every kind of native/base/failure.h has its number in Python and a public error."""
    enumeration = re.search(r"enum class FailureKind : int \{(.*?)\};", _HEADER.read_text(), re.DOTALL)
    assert enumeration is not None
    names = re.findall(r"^    (\w+),", enumeration.group(1), re.MULTILINE)
    assert len(names) == len(FailureKind)
    assert [{"queue": "queued"}.get(name, name) for name in names] == [kind.name.lower() for kind in FailureKind]
    assert set(failures._ERRORS) == set(FailureKind)
