"""``ferrodist doctor``: what is there for ferrodist on this machine, in which versions, and why something is not.

Each probe is a function that looks at one thing and returns a `Finding`; `PROBES` lists them. A probe that fails itself
is a finding, too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ferrodist.errors import describe_error

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Probe = Callable[[], "Finding"]

__all__ = ["PROBES", "Finding", "add_doctor_arguments", "findings", "run_doctor"]


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
    """Print what is there; it is no failure that something is not."""
    found = findings()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in found], indent=2) + "\n")
        return 0
    width = max(len(finding.name) for finding in found)
    for finding in found:
        mark = "yes" if finding.is_there else "no "
        sys.stdout.write(f"{mark}  {finding.name:<{width}}  {finding.detail}\n")
    return 0


def findings() -> list[Finding]:
    """What all probes find."""
    return [_run(probe) for probe in PROBES]


def _run(probe: Probe) -> Finding:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - what breaks a probe is what its reader looks for
        name = probe.__name__.strip("_").replace("_", " ")
        return Finding(name=name, is_there=False, detail=f"the look at it failed: {describe_error(error)}")


def _ferrodist() -> Finding:
    return Finding(
        name="ferrodist",
        is_there=True,
        detail=f"{_version('ferrodist') or 'run from its source tree'}, Python {platform.python_version()},"
        f" {platform.system()} {platform.machine()}, {_num_processors()} processors for this process",
    )


def _torch() -> Finding:
    import torch  # noqa: PLC0415 - the command starts without

    return Finding(name="torch", is_there=True, detail=str(torch.__version__))


def _tcp() -> Finding:
    return Finding(name="tcp backend", is_there=True, detail="needs nothing")


def _native() -> Finding:
    from ferrodist.backends.native.library import load  # noqa: PLC0415 - it needs torch

    where = load().__file__
    return Finding(name="native backend", is_there=True, detail=f"the engine is {where}; gloo is it over TCP alone")


def _gpus() -> Finding:
    import torch  # noqa: PLC0415 - the command starts without

    from ferrodist.backends.nccl.library import why_no_gpu  # noqa: PLC0415 - it needs torch

    reason = why_no_gpu()
    if reason is not None:
        return Finding(name="GPUs", is_there=False, detail=reason)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return Finding(name="GPUs", is_there=True, detail=f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _nccl() -> Finding:
    from ferrodist.backends.nccl.library import load_nccl, why_no_nccl  # noqa: PLC0415 - it needs torch

    reason = why_no_nccl()
    if reason is not None:
        return Finding(name="nccl, hybrid backends", is_there=False, detail=reason)
    return Finding(name="nccl, hybrid backends", is_there=True, detail=load_nccl().description)


def _gpu_fallback() -> Finding:
    name, is_on = "GPU fallback", os.environ.get("FERRODIST_ENABLE_GPU_FALLBACK") == "1"
    if is_on:
        return Finding(name=name, is_there=True, detail="GPU tensors go through host memory where there is no NCCL")
    return Finding(name=name, is_there=False, detail="FERRODIST_ENABLE_GPU_FALLBACK=1 turns it on, for want of NCCL")


def _mpi() -> Finding:
    from ferrodist.backends.mpi.library import library_version, why_no_mpi  # noqa: PLC0415 - the command starts without

    reason = why_no_mpi()
    return Finding(name="mpi backend", is_there=reason is None, detail=reason or library_version())


def _ucc() -> Finding:
    from ferrodist.backends.ucc.library import load, why_no_ucc  # noqa: PLC0415 - the command starts without

    reason = why_no_ucc()
    return Finding(name="ucc backend", is_there=reason is None, detail=reason or str(load()))


def _choice() -> Finding:
    from ferrodist.backends.native.library import is_native_available  # noqa: PLC0415 - it needs torch
    from ferrodist.backends.nccl.library import is_nccl_available  # noqa: PLC0415 - it needs torch

    host = "native" if is_native_available() else "tcp"
    choice = f"hybrid, if all other ranks can, else {host}" if is_nccl_available() else host
    return Finding(name="chosen", is_there=True, detail=f"init_process_group() without a name makes: {choice}")


PROBES: tuple[Probe, ...] = (_ferrodist, _torch, _tcp, _native, _gpus, _nccl, _gpu_fallback, _mpi, _ucc, _choice)
"""In the order in which they are printed."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _num_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
