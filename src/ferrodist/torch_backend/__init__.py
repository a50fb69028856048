"""ferrodist as a backend of torch.distributed: ``init_process_group("ferrodist")`` in any program.

::

    registration.py    what torch calls at its import           opening.py      a group of ranks that torch has named
    process_group.py   FerrodistProcessGroup: torch's methods   torch_store.py  torch's stores as ours
    forms.py           what else may be passed to them          messages.py     its messages
    operations.py      its collectives, over our engines        layouts.py      torch's tensors as what engines take
    calls.py           one that has been looked at              lanes.py        how it goes
    sparse.py          allreduce of sparse tensors              works.py        what torch waits for
    completion.py      futures, and who completes them          ending.py       what a group waits for when it ends
    kernels.py         for what looks at torch's operators
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrodist.torch_backend.c10d_ops import use_c10d_kernels as use_c10d_kernels
    from ferrodist.torch_backend.process_group import group_of as group_of
    from ferrodist.torch_backend.registration import register as register

__all__ = ["group_of", "register", "use_c10d_kernels"]


if not TYPE_CHECKING:  # checkers refuse names that are not there

    def __getattr__(name: str) -> Any:
        if name == "group_of":
            from ferrodist.torch_backend.process_group import group_of  # noqa: PLC0415 - loads what torch's import can do without

            return group_of
        if name == "use_c10d_kernels":
            from ferrodist.torch_backend.c10d_ops import use_c10d_kernels  # noqa: PLC0415 - as above

            return use_c10d_kernels
        if name == "register":
            from ferrodist.torch_backend.registration import register  # noqa: PLC0415 - as above

            return register
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
