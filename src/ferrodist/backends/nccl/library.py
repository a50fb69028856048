"""NCCL here, or why there is none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.nccl.communicator import Library, open_library
from ferrodist.errors import BackendUnavailable, describe_error
from ferrodist.installation import how_to_install

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_nccl_available", "load_nccl", "why_no_nccl"]

_lock = threading.Lock()


class _Found:
    """What loading gave: it is tried once a process."""

    def __init__(self) -> None:
        self.library: Library | None = None
        self.reason: str | None = None


_found = _Found()


def why_no_nccl(open_it: Callable[[], Library] = open_library) -> str | None:
    """Why NCCL can't be used in this process, in words; None when it can."""
    reason = why_no_gpu()
    if reason is not None:
        return reason
    with _lock:
        if _found.library is None and _found.reason is None:
            try:
                _found.library = open_it()
            except ModuleNotFoundError as error:
                _found.reason = f"NVIDIA's binding nccl4py is not installed ({error}): {how_to_install('nccl')}"
            except ImportError as error:
                _found.reason = (
                    f"NVIDIA's binding nccl4py can't be imported ({describe_error(error)}): install it again, with"
                    " pip install --force-reinstall nccl4py"
                )
            except Exception as error:  # noqa: BLE001 - the loader of the binding has errors of its own
                _found.reason = (
                    f"nccl4py finds no NCCL ({describe_error(error)}): install nvidia-nccl-cu13, or have libnccl.so.2"
                    " where the system's loader looks"
                )
        return _found.reason


def why_no_gpu() -> str | None:
    """Why there is no CUDA device for this process, in words; None when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build of torch with it"
    if not torch.cuda.device_count():  # which leaves CUDA alone where it can: a process that has begun it can't fork
        return "torch sees no GPU: look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES"
    return None


def is_nccl_available() -> bool:
    """Whether this process has a GPU, NVIDIA's binding `nccl4py`, and an NCCL that it can load."""
    return why_no_nccl() is None


def load_nccl() -> Library:
    """NCCL.

    Raises:
        BackendUnavailable: There is none, with the reason.
    """
    reason = why_no_nccl()
    if reason is not None:
        raise BackendUnavailable(f"NCCL can't be used here: {reason}")
    assert _found.library is not None
    return _found.library
