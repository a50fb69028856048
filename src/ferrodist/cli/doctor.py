"""``ferrodist doctor``: the backends, libraries and devices of this machine, with reasons for missing ones.

Each probe is a function that checks one thing and returns whether it is available, and a description; `PROBES` lists
them. A failing probe is a finding, too. Libraries are loaded, which is the only way to know that they can be, but not
started: no MPI is initialized.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable, describe_error
from ferrodist.installation import installed_version
from ferrodist.launch.cpu_binding import format_cpus, read_topology
from ferrodist.launch.host_limits import usable_cores
from ferrodist.launch.terminal import write_stdout
from ferrodist.wording import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    Probe = Callable[[], tuple[bool, str]]


_MIN_COLUMNS = 30  # for what is found, in a narrow terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a probe."""

    name: str
    is_there: bool
    detail: str  # versions and the like; for a missing component the reason and the remedy


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print one line per finding, wrapped to the width of a terminal; return 0, also with missing components."""
    found = findings()
    if arguments.json:
        write_stdout(json.dumps([asdict(finding) for finding in found], indent=2) + "\n")
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    width = max(len(finding.name) for finding in found)
    for finding in found:
        prefix = f"{'yes' if finding.is_there else 'no '}  {finding.name:<{width}}  "
        write_stdout(_format_line(prefix, finding.detail, columns))
    return 0


def _format_line(prefix: str, detail: str, columns: int | None) -> str:
    """Format a finding, wrapped to a number of columns, or else as one line."""
    if columns is None:
        return f"{prefix}{detail}\n"
    columns = max(columns, len(prefix) + _MIN_COLUMNS)
    lines = textwrap.wrap(detail, columns - len(prefix), break_long_words=False, break_on_hyphens=False)
    return prefix + f"\n{' ' * len(prefix)}".join(lines) + "\n"


def findings() -> list[Finding]:
    """Run all probes."""
    return [_run_probe(name, probe) for name, probe in PROBES.items()]


def _run_probe(name: str, probe: Probe) -> Finding:
    try:
        is_there, detail = probe()
    except BackendUnavailable as error:
        is_there, detail = False, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what breaks a probe is what its reader looks for
        is_there, detail = False, f"the look at it failed: {describe_error(error)}"
    return Finding(name=name, is_there=is_there, detail=" ".join(detail.split()))


def _ferrodist() -> tuple[bool, str]:
    version, python = installed_version() or "run from its source tree", platform.python_version()
    system, processors = f"{platform.system()} {platform.machine()}", counted(usable_cores(), "processor")
    return True, f"{version}, Python {python}, {system}, {processors} for this process"


def _numa() -> tuple[bool, str]:
    if not hasattr(os, "sched_setaffinity"):
        return False, "this system can't bind processes"
    nodes = [
        f"node {node} with CPUs {format_cpus(frozenset().union(*cores))} ({counted(len(cores), 'core')})"
        for node, cores in read_topology(frozenset(os.sched_getaffinity(0))).items()
    ]
    return True, f"{', '.join(nodes)}; ferrodist run --bind numa binds ranks to nodes, --bind core to cores"


def _torch() -> tuple[bool, str]:
    import torch  # noqa: PLC0415 - the command starts without

    from ferrodist.torch_private.versions import describe_version  # noqa: PLC0415 - nothing else needs it

    return True, f"{torch.__version__}, which {describe_version(torch.__version__)}"


def _native() -> tuple[bool, str]:
    from ferrodist.backends.native.binding import load  # noqa: PLC0415 - it needs torch

    return True, f"the engine is {load().__file__}; gloo is it over TCP alone"


def _gpus() -> tuple[bool, str]:
    import torch  # noqa: PLC0415 - the command starts without

    from ferrodist.backends.nccl.communicator import why_no_gpu  # noqa: PLC0415 - it needs torch

    reason = why_no_gpu()
    if reason is not None:
        return False, reason
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return True, f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _nccl() -> tuple[bool, str]:
    from ferrodist.backends.nccl.communicator import load_nccl, why_no_nccl  # noqa: PLC0415 - it needs torch

    reason = why_no_nccl()
    return reason is None, reason or load_nccl().description


def _gpu_fallback() -> tuple[bool, str]:
    if os.environ.get("FERRODIST_ENABLE_GPU_FALLBACK") == "1":
        return True, "GPU tensors go through host memory where there is no NCCL"
    return False, "FERRODIST_ENABLE_GPU_FALLBACK=1 turns it on, for want of NCCL"


def _mpi() -> tuple[bool, str]:
    from ferrodist.backends.mpi.runtime import library_version, why_no_mpi  # noqa: PLC0415 - the command starts without

    reason = why_no_mpi()
    return reason is None, reason or library_version()


def _ucc() -> tuple[bool, str]:
    from ferrodist.backends.ucc.bindings import load, why_no_ucc  # noqa: PLC0415 - the command starts without

    reason = why_no_ucc()
    return reason is None, reason or str(load())


def _choice() -> tuple[bool, str]:
    from ferrodist.backends.native.binding import is_native_available  # noqa: PLC0415 - it needs torch
    from ferrodist.backends.nccl.communicator import is_nccl_available  # noqa: PLC0415 - it needs torch

    host = "native" if is_native_available() else "tcp"
    choice = f"hybrid, if all other ranks can, else {host}" if is_nccl_available() else host
    return True, f"init_process_group() without a name makes: {choice}"


PROBES: Mapping[str, Probe] = {
    "ferrodist": _ferrodist,
    "NUMA nodes": _numa,
    "torch": _torch,
    "tcp backend": lambda: (True, "needs nothing"),
    "native backend": _native,
    "GPUs": _gpus,
    "nccl, hybrid backends": _nccl,
    "GPU fallback": _gpu_fallback,
    "mpi backend": _mpi,
    "ucc backend": _ucc,
    "chosen": _choice,
}
"""Probes by component, in printing order."""
