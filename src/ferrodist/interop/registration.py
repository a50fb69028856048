"""Telling torch that there is a backend of this name. torch loads this at its own import: it must stay small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["NAME", "register"]

NAME = "ferrodist"


def register() -> None:
    """Let ``torch.distributed.init_process_group("ferrodist")`` make groups; torch itself calls this at its import.

    A program calls it where that is switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). More calls do nothing.
    """
    import torch.distributed as dist  # noqa: PLC0415 - which is loaded only now
    from torch.backends import cuda  # noqa: PLC0415

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        # What asks a backend for its devices takes the first that is not "cpu", whether or not this torch knows it.
        devices = ["cpu", "cuda"] if cuda.is_built() else ["cpu"]  # type: ignore[no-untyped-call]
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=devices)
        # From torch 2.15 on its flight recorder hooks itself into groups by a backend that C++ made. A group written in
        # Python has none, and making the group would fail; the backends of this set are left out of it.
        recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
        if isinstance(recording, set):
            recording.add(NAME)


def _make(options: Any, pg_options: Any) -> ProcessGroup:
    from ferrodist.interop.opening import make_process_group  # noqa: PLC0415 - loads much

    return make_process_group(options, pg_options)
