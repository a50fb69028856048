"""What an `NcclBackend` says to tensors on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist.backends.call import Call
from ferrodist.errors import UnsupportedOpError

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

__all__ = ["HostAgreement"]


class HostAgreement:
    """`Collectives` of a group without any for tensors: its ranks agree, and give each other a few bytes.

    Args:
        group: The group.
        engine: What does it for the group's ranks, or None: then messages do.
    """

    def __init__(self, group: Backend, engine: Any) -> None:
        self._group = group
        self._engine = engine

    def reserve(self) -> int:
        """Take the next position among the group's collectives."""
        return int(self._group.agreement.reserve() if self._engine is None else self._engine.reserve())

    def await_turn(self, sequence: int) -> None:
        """See `Collectives`."""
        if self._engine is not None:
            self._engine.await_turn(sequence)

    def share(self, operation: str, payload: bytes, *, timeout: float, sequence: int) -> list[bytes]:
        """Give every rank the bytes of each, in rank order."""
        if self._engine is None:
            return self._group.agreement.reach(Call(operation=operation, payload=payload), timeout, sequence)
        shared: list[bytes] = self._engine.share(operation, payload, timeout=timeout, sequence=sequence)
        return shared

    def barrier(self, *, timeout: float, sequence: int) -> None:
        """Return when all ranks have called."""
        if self._engine is None:
            self._group.agreement.reach(Call(operation="barrier"), timeout, sequence)
        else:
            self._engine.barrier(timeout=timeout, sequence=sequence)

    def __getattr__(self, name: str) -> NoReturn:
        """There is no other collective."""
        if name.startswith("_") or name == "enqueue":
            raise AttributeError(name)
        raise UnsupportedOpError(
            f"{name} of a tensor on the CPU: group {self._group.name!r} carries tensors on GPUs alone. Make it with"
            " backend 'hybrid', which carries both, or pass tensor.cuda()"
        )
