"""Commands of the system and of other programs."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_command(
    command: Sequence[str], *, title: str, timeout: float, failure: type[Exception]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit code; raises ``failure`` after ``timeout`` seconds."""
    try:
        return subprocess.run(  # noqa: S603 - a fixed command
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise failure(f"{title} took more than {timeout} s") from None
