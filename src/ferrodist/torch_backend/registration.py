"""Registration of the backend with torch. torch loads this module at its own import, so it must stay small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.torch_private.c10d import keep_torchcomms_out, leave_flight_recorder_out

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "ferrodist"


def register() -> None:
    """Register the backend of ``torch.distributed.init_process_group("ferrodist")``; torch calls this at its import.

    A program calls it where that is switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). Further calls do nothing.
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

    # torch takes a backend's first device other than "cpu", and fails if the host has none, as with torch for CUDA on a
    # host without a driver. Checked here, and not at torch's import, because the check takes too long.
    if cuda.device_count():
        dist.Backend.backend_capability[NAME] = ["cpu", "cuda"]
    return make_process_group(options, pg_options)
