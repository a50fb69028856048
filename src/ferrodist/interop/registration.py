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

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, pg_options: Any) -> ProcessGroup:
    from ferrodist.interop.opening import make_process_group  # noqa: PLC0415 - loads much

    return make_process_group(options, pg_options)
