"""What the figures were taken on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A computer, as it was when the run began.

    Args:
        processor: The model's name.
        num_processors: Processors that this process may use.
        caches: Size by name, such as "L3" and "32768K".
        memory_bytes: Of main memory.
        huge_pages: The kernel's policy for large pages, such as "madvise".
        system: Kernel and machine.
        python: Version of the interpreter.
        load: Mean number of runnable processes over the minute before.
    """

    processor: str
    num_processors: int
    caches: dict[str, str]
    memory_bytes: int
    huge_pages: str
    system: str
    python: str
    load: float

    @property
    def is_busy(self) -> bool:
        """Whether others had so much to do that the figures can't be trusted."""
        return self.load > 0.3 * self.num_processors


def describe_machine() -> Machine:
    """This machine, now; what it does not tell is empty or 0."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    policy = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return Machine(
        processor=found[1].strip() if found else platform.processor() or platform.machine(),
        num_processors=len(os.sched_getaffinity(0)),
        caches=_caches(),
        memory_bytes=_memory("MemTotal"),
        huge_pages=policy[1] if policy else "",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


def available_bytes() -> int:
    """Memory that new programs can have; 0 where the system does not say."""
    return _memory("MemAvailable")


def _memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _caches() -> dict[str, str]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type"), "")
        caches[f"L{_read(index / 'level')}{kind}"] = _read(index / "size")
    return caches


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""
