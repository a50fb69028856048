"""Calls of torch's collectives that have been looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, TensorCollectives

    Run = Callable[[TensorCollectives, float, int], None]
    """Called with the engine, the seconds it may take, and its place among the group's collectives."""

__all__ = ["Collective", "Comparison"]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Collective:
    """A checked call.

    Args:
        name: Of the collective.
        device: Where its tensors are; None when it has none.
        results: What torch's ``Work.result()`` gives.
        run: Does it.
        finish: Called where its end is waited for.
    """

    name: str
    device: torch.device | None
    results: list[Any]
    run: Run
    finish: Callable[[], None] = _nothing


class Comparison:
    """Numbers that ranks must agree on before a call that counts on them, and for which engines don't look.

    Args:
        group: The ranks.
        name: Of the call.
        what: The numbers, for the error.
        numbers: They; as many on all ranks.
        count: A number that may differ.
    """

    def __init__(self, group: Backend, name: str, what: str, numbers: Sequence[int], count: int = 0) -> None:
        self._group = group
        self._name = name
        self._what = what
        self._own = torch.tensor([*numbers, count], dtype=torch.int64, device="cpu")
        self._found = torch.zeros(group.world_size, len(self._own), dtype=torch.int64, device="cpu")
        self.call = Collective(name, None, [], self._collect)

    @property
    def counts(self) -> list[int]:
        """Each rank's ``count``, once `call` has run."""
        found: list[int] = self._found[:, -1].tolist()
        return found

    def guard(self, call: Collective) -> Collective:
        """A call that comes after `call`, and raises instead where ranks disagree.

        Raises:
            CollectiveMismatchError: They do: on all ranks. The group goes on.
        """

        def run(engine: TensorCollectives, timeout: float, place: int) -> None:
            said = self._found[:, :-1].tolist()
            if any(numbers != said[0] for numbers in said):
                cast("Collectives", engine).barrier(timeout=timeout, sequence=place)  # the place was taken, on all
                raise CollectiveMismatchError(
                    f"the ranks of group {self._group.name!r} disagree about the {self._what} of {self._name}: "
                    + "; ".join(f"rank {rank} has {numbers}" for rank, numbers in enumerate(said))
                )
            call.run(engine, timeout, place)

        return replace(call, run=run)

    def _collect(self, engine: TensorCollectives, timeout: float, place: int) -> None:
        sizes = [len(self._own)] * self._group.world_size
        engine.all_gather(self._found.view(-1), self._own, sizes, dim=0, timeout=timeout, sequence=place)
