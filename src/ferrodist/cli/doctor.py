"""``ferrodist doctor``: what is there for ferrodist on this machine, in which versions, and why something is not.

Each probe is a function that looks at one thing and says whether it is there, and in words what it found; `PROBES`
lists them. A probe that fails itself is a finding, too. Libraries are loaded, which is how one learns whether they can
be, but not started: no MPI is initialized.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable, describe_error
from ferrodist.launch.output import write_stdout
from ferrodist.wording import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

if TYPE_CHECKING:
    Probe = Callable[[], tuple[bool, str]]


_MIN_COLUMNS = 30  # for what is found, in a narrow terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe has found.

    Args:
        name: Of what it looked for.
        is_there: Whether it can be used.
        detail: Versions and the like; of what is not there, why, and what to do.
    """

    name: str
    is_there: bool
    detail: str


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what is there, a line each, which a terminal gets broken to its width.

    Returns:
        0, whatever is not there: that is no failure of the look.
    """
    found = findings()
    if arguments.json:
        write_stdout(json.dumps([asdict(finding) for finding in found], indent=2) + "\n")
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    width = max(len(finding.name) for finding in found)
    for finding in found:
        write_stdout(
            _line(f"{'yes' if finding.is_there else 'no '}  {finding.name:<{width}}  ", finding.detail, columns)
        )
    return 0


def _line(head: str, detail: str, columns: int | None) -> str:
    """What is found, behind its name; broken into lines of so many columns, or else one line."""
    if columns is None:
        return f"{head}{detail}\n"
    columns = max(columns, len(head) + _MIN_COLUMNS)
    lines = textwrap.wrap(detail, columns - len(head), break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines) + "\n"


def findings() -> list[Finding]:
    """What all probes find."""
    return [_run(name, probe) for name, probe in PROBES.items()]


def _run(name: str, probe: Probe) -> Finding:
    try:
        is_there, detail = probe()
    except BackendUnavailable as error:
        is_there, detail = False, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what breaks a probe is what its reader looks for
        is_there, detail = False, f"the look at it failed: {describe_error(error)}"
    return Finding(name=name, is_there=is_there, detail=" ".join(detail.split()))


def _ferrodist() -> tuple[bool, str]:
    version = _version("ferrodist") or "run from its source tree"
    system = f"{platform.system()} {platform.machine()}"
    processors = counted(_num_processors(), "processor")
    return (
        True,
        f"{version}, Python {platform.python_version()}, {system}, {processors} for this process",
    )


def _torch() -> tuple[bool, str]:
    import torch  # noqa: PLC0415 - the command starts without

    from ferrodist.torch_private.versions import describe_version  # noqa: PLC0415 - nothing else needs it

    return True, f"{torch.__version__}, which {describe_version(torch.__version__)}"


def _tcp() -> tuple[bool, str]:
    return True, "needs nothing"


def _native() -> tuple[bool, str]:
    from ferrodist.backends.native.binding import load  # noqa: PLC0415 - it needs torch

    return True, f"the engine is {load().__file__}; gloo is it over TCP alone"


def _gpus() -> tuple[bool, str]:
    import torch  # noqa: PLC0415 - the command starts without

    from ferrodist.backends.nccl.communicator import why_no_gpu  # noqa: PLC0415 - it needs torch

    reason = why_no_gpu()
    if reason is not None:
        return False, reason
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
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
    "torch": _torch,
    "tcp backend": _tcp,
    "native backend": _native,
    "GPUs": _gpus,
    "nccl, hybrid backends": _nccl,
    "GPU fallback": _gpu_fallback,
    "mpi backend": _mpi,
    "ucc backend": _ucc,
    "chosen": _choice,
}
"""By name of what each looks for, in the order in which they are printed."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _num_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
