"""Calls of torch's collectives that have been looked at."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ferrodist.backends.call import MAX_PAYLOAD
from ferrodist.collectives.facts import read_facts
from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, TensorCollectives

    Run = Callable[[TensorCollectives, float, int], None]
    """Called with the engine, the seconds it may take, and its place among the group's collectives."""

__all__ = ["Collective", "Comparison"]

_DIGEST_SIZE = 16

_HEAD = struct.Struct(f"<Q{_DIGEST_SIZE}s")
"""A rank's number, and the digest of what it says; as much of the text as travels for free follows."""


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
    """What ranks must agree on before a call that counts on it, and for which engines don't look.

    Args:
        group: The ranks.
        name: Of the call.
        what: What they compare, for the error.
        said: This rank's.
        count: A number that may differ.
    """

    def __init__(self, group: Backend, name: str, what: str, said: str, count: int = 0) -> None:
        self._group = group
        self._name = name
        self._what = what
        digest = hashlib.blake2b(said.encode(), digest_size=_DIGEST_SIZE).digest()
        self._payload = (_HEAD.pack(count, digest) + said.encode())[:MAX_PAYLOAD]
        self._heads: list[tuple[int, bytes]] = []
        self._texts: list[str] = []
        self.call = Collective(name, None, [], self._share)

    @property
    def counts(self) -> list[int]:
        """Each rank's ``count``, once `call` has run."""
        return [count for count, _ in self._heads]

    def guard(self, call: Collective) -> Collective:
        """A call that comes after `call`, and raises instead where ranks disagree.

        Raises:
            CollectiveMismatchError: They do: on all ranks. The group goes on.
        """

        def run(engine: TensorCollectives, timeout: float, place: int) -> None:
            if len({digest for _, digest in self._heads}) != 1:
                # The place was taken, on all ranks. Where nothing was compared the group has failed: this raises why.
                cast("Collectives", engine).barrier(timeout=timeout, sequence=place)
                raise CollectiveMismatchError(
                    f"the ranks of group {self._group.name!r} disagree about the {self._what} of {self._name}: "
                    + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(self._texts))
                )
            call.run(engine, timeout, place)

        return replace(call, run=run)

    def _share(self, engine: TensorCollectives, timeout: float, place: int) -> None:
        # By a name that no other call has: ranks that make one are told of it, and take none of this for their data.
        name = f"{self._name}'s sizes"
        payloads = cast("Collectives", engine).share(name, self._payload, timeout=timeout, sequence=place)
        self._heads = read_facts(_HEAD, payloads, self._group, name)
        for payload in payloads:
            text = payload[_HEAD.size :].decode("ascii", "replace")
            self._texts.append(f"{text}..." if len(payload) == MAX_PAYLOAD else text)
