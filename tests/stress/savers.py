"""Jobs that save to one folder at a time, and jobs that are killed while they do.

Run by hand: ``python tests/stress/savers.py [rounds]``. Each line that it prints counts what happened; it ends with
status 1 when something failed, was torn, or was left. ``tests/faults/test_savers.py`` runs the parts with few rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ferrodist.checkpoint import DistCheckpointError, find_latest, load_distributed, save_distributed, verify

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

_FORK = multiprocessing.get_context("fork")
_NUM_ELEMENTS = 20_000
_WELL = ("saved", "loaded", "replaced while it was read")


def _state(version: int) -> dict[str, torch.Tensor]:
    """Tensors that have their version in every element, for several files."""
    return {str(number): torch.full((_NUM_ELEMENTS,), float(version)) for number in range(3)}


def _save(path: Path, version: int) -> None:
    save_distributed(_state(version), path, max_file_bytes=_NUM_ELEMENTS)


def _note(notes: Path, what: str) -> None:
    """Count something, where the process may be killed at any moment."""
    file = os.open(notes / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{what}\n".encode())
    os.close(file)


def _counts(notes: Path) -> Counter[str]:
    return Counter(line for file in notes.iterdir() for line in file.read_text().splitlines())


def _save_on(path: Path, notes: Path, job: int, num_saves: int | None) -> None:
    """A job that saves again and again."""
    torch.set_num_threads(1)
    number = 0
    while num_saves is None or number < num_saves:
        try:
            _save(path, 1000 * job + number % 1000)
            _note(notes, "saved")
        except Exception as error:
            _note(notes, f"save: {type(error).__name__}: {error}")
        number += 1


def _load_on(path: Path, notes: Path, end: Event) -> None:
    """A reader that loads again and again, and looks at every element."""
    torch.set_num_threads(1)
    while not end.is_set():
        try:
            found = load_distributed(path)
        except DistCheckpointError as error:
            # What is replaced while it is read is missing then, never another one's.
            _note(notes, _WELL[2] if "is missing" in str(error) else f"load: {error}")
            continue
        versions = {float(value) for tensor in found.values() for value in tensor.unique()}
        _note(notes, "loaded" if len(versions) == 1 else f"torn: {sorted(versions)}")


def _left(path: Path) -> list[str]:
    """What is in the folder of a checkpoint and not of it."""
    return [*map(str, verify(path).problems), *(each.name for each in path.glob(".saving-*"))]


def two_savers(folder: Path, num_jobs: int, num_saves: int) -> Counter[str]:
    """Jobs that save to one folder at once, and a reader: how often each thing happened."""
    path, notes, end = folder / "shared", folder / "notes", _FORK.Event()
    notes.mkdir(parents=True)
    _save(path, 0)
    jobs = [_FORK.Process(target=_save_on, args=(path, notes, job + 1, num_saves)) for job in range(num_jobs)]
    reader = _FORK.Process(target=_load_on, args=(path, notes, end))
    for each in (*jobs, reader):
        each.start()
    for each in jobs:
        each.join()
    end.set()
    reader.join()
    found = _counts(notes)
    found.update(f"ended with {each.exitcode}" for each in (*jobs, reader) if each.exitcode)
    if found["saved"] < num_jobs * num_saves:
        found["missing"] = num_jobs * num_saves - found["saved"]
    found.update(f"left: {each}" for each in _left(path))
    return found


def killed_savers(folder: Path, num_kills: int, seed: int) -> Counter[str]:
    """Jobs that are killed at any moment while another one saves to the same folder, and one to a folder beside."""
    rng = random.Random(seed)
    notes = folder / "notes"
    notes.mkdir(parents=True)
    paths = [folder / "runs" / "shared", folder / "runs" / "beside"]
    for path in paths:
        _save(path, 0)
    survivors = [_FORK.Process(target=_save_on, args=(path, notes, 1 + job, None)) for job, path in enumerate(paths)]
    for each in survivors:
        each.start()
    killed = 0
    for job in range(num_kills):
        victim = _FORK.Process(target=_save_on, args=(paths[0], notes, 10 + job, None))
        victim.start()
        time.sleep(rng.random() * 0.15)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        killed += victim.exitcode == -signal.SIGKILL
    for each in survivors:
        assert each.pid is not None
        os.kill(each.pid, signal.SIGKILL)
        each.join()
    for path in paths:
        versions = {float(value) for tensor in load_distributed(path).values() for value in tensor.unique()}
        _note(notes, "loaded" if len(versions) == 1 else f"torn: {sorted(versions)}")
        _save(path, 9999)
    if find_latest(folder / "runs") != str(paths[1]):
        _note(notes, "order: the checkpoint saved last is not the newest")
    found = _counts(notes)
    found.update(f"left: {each}" for path in paths for each in _left(path))
    found["killed"] += killed
    return found


def faults(found: Counter[str]) -> list[str]:
    """What should not have happened."""
    return [what for what, count in found.items() if count and what not in (*_WELL, "killed")]


def main(num_rounds: int) -> int:
    """Run all; the exit status."""
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "two jobs, one folder": lambda: two_savers(Path(folder, "two"), 2, 9 * num_rounds),
            "four jobs, one folder": lambda: two_savers(Path(folder, "four"), 4, 5 * num_rounds),
            "jobs killed": lambda: killed_savers(Path(folder, "killed"), 5 * num_rounds, seed=num_rounds),
        }
        for name, run in parts.items():
            found = run()
            sys.stdout.write(f"{name}: {', '.join(f'{what} {count}' for what, count in sorted(found.items()))}\n")
            status |= bool(faults(found))
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
