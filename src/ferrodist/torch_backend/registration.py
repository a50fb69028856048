"""Telling torch that there is a backend of this name. torch loads this at its own import: it must stay small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.torch_private.c10d import keep_torchcomms_out, leave_flight_recorder_out

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "ferrodist"


def register() -> None:
    """Let ``torch.distributed.init_process_group("ferrodist")`` make groups; torch itself calls this at its import.

    A program calls it where that is switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). More calls do nothing.
    """
    import torch.distributed as dist  # noqa: PLC0415 - which is loaded only now

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])  # and see `_make`
        leave_flight_recorder_out(dist.distributed_c10d, NAME)
        keep_torchcomms_out(dist.distributed_c10d, NAME)


def _make(options: Any, pg_options: Any) -> ProcessGroup:
    import torch.distributed as dist  # noqa: PLC0415 - as above
    from torch import cuda  # noqa: PLC0415

    from ferrodist.torch_backend.registration_impl import make_process_group  # noqa: PLC0415 - loads much

    # What asks a backend for its devices takes the first that is not "cpu", and fails where this host has none: so with
    # torch for CUDA on a host without a driver. Asked now, not at torch's import, for which looking takes too long.
    if cuda.device_count():
        dist.Backend.backend_capability[NAME] = ["cpu", "cuda"]
    return make_process_group(options, pg_options)
