"""Private names of `torch.distributed`.

`torch_backend.registration` imports it while torch is imported: it must stay small, and imports nothing itself.

======================================  ========================================================================
`_FR_SELF_RECORDING_BACKENDS`           2.15: names of backends that the flight recorder skips
`_maybe_attach_flight_recorder`         2.15: attaches the flight recorder to a new group
`new_comm`                              2.12 on, where torchcomms is installed: makes a group of torchcomms
`_torchcomms_handles_backend`           2.14 on: torchcomms is asked whether it has a backend before it is used
======================================  ========================================================================
"""

from __future__ import annotations

import functools
from typing import Any


def leave_flight_recorder_out(c10d: Any, name: str) -> None:
    """Exclude the groups of a backend from torch's flight recorder.

    The recorder attaches itself to a group's C++ backend. A group written in Python has none, and making it would fail.
    Without the names, as before 2.15, there is nothing to do. ``c10d`` is `torch.distributed.distributed_c10d`.
    """
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(recording, set):
        recording.add(name)
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    # "cpu:ferrodist,cuda:nccl" has another name too, but then the Python backend is the whole group.
    @functools.wraps(attach)
    def attach_to_others(pg: Any, *arguments: Any, **named: Any) -> None:
        if not getattr(pg, "is_written_in_python", False):
            attach(pg, *arguments, **named)

    c10d._maybe_attach_flight_recorder = attach_to_others


def keep_torchcomms_out(c10d: Any, name: str) -> None:
    """Raise a clear error if torch asks torchcomms for the groups of a backend that torchcomms does not have.

    Before 2.14 torch asks it for all groups if ``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1`` is set. Later versions ask only
    for the backends that it has. ``c10d`` is `torch.distributed.distributed_c10d`.
    """
    make = getattr(c10d, "new_comm", None)
    if make is None or hasattr(c10d, "_torchcomms_handles_backend"):
        return

    @functools.wraps(make)
    def make_others(backend: str, *arguments: Any, **named: Any) -> Any:
        if backend == name:
            from ferrodist.errors import UnsupportedOpError  # noqa: PLC0415 - seldom needed

            raise UnsupportedOpError(
                f"torchcomms has no backend {name!r}, and this torch asks it for every group: unset"
                " TORCH_DISTRIBUTED_USE_TORCHCOMMS, or use torch 2.14 or newer"
            )
        return make(backend, *arguments, **named)

    c10d.new_comm = make_others
