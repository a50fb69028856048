"""ferrodist as a backend of torch.distributed: ``init_process_group("ferrodist")`` in any program.

::

    registration.py    called by torch at its import            registration_impl.py   makes groups for torch
    process_group.py   FerrodistProcessGroup, torch's methods   torch_store.py         torch's stores as a Store
    argument_forms.py  options as an object or arguments        work.py                torch's Work objects
    general_calls.py   torch's collectives as CollectiveOps     futures.py             futures and their callbacks
    sparse.py          allreduce of sparse tensors              layouts.py             torch's tensors, flat
    buffer_pool.py     reused memory for torch's tensors        c10d_ops.py            c10d operators for tracing
    messages.py        sends and receives, their Works          callback_levels.py     the group of a thread's calls
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrodist.torch_backend.c10d_ops import use_c10d_kernels as use_c10d_kernels
    from ferrodist.torch_backend.registration import register as register
    from ferrodist.torch_backend.registration_impl import group_of as group_of

__all__ = ["group_of", "register", "use_c10d_kernels"]

# Loaded when first used: torch's import can do without the first two.
_MODULES = {"group_of": "registration_impl", "use_c10d_kernels": "c10d_ops", "register": "registration"}


if not TYPE_CHECKING:  # type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
