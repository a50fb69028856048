"""The tested versions of torch."""

from __future__ import annotations

OLDEST_VERSION = "2.10"  # the oldest supported version

TESTED_VERSIONS = ("2.10.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""In ascending order. All tests run with the pinned one; docs/torch-versions has the results of the others."""


def describe_version(version: str) -> str:
    """Describe in a few words whether a version of torch is tested: "is tested", "is newer than ..."."""
    minor, tested = _minor(version), [_minor(each) for each in TESTED_VERSIONS]
    if version.partition("+")[0] in TESTED_VERSIONS:
        return "is tested"
    if minor in tested:
        return f"is not tested itself, but {TESTED_VERSIONS[tested.index(minor)]} is"
    if minor > tested[-1]:
        return f"is newer than {TESTED_VERSIONS[-1]}, the last that is tested"
    if minor < _minor(OLDEST_VERSION):
        return f"is older than {OLDEST_VERSION}, the oldest that is supported"
    return f"is not tested; {', '.join(TESTED_VERSIONS)} {'are' if len(tested) > 1 else 'is'}"


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
