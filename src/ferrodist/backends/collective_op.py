"""One collective call as a value: what users' functions build, engines run, and ranks compare."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ferrodist.backends.signature import CollectiveSignature

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from typing_extensions import Self


class CollectiveKind(str, Enum):
    """The collectives that engines implement; each value is the name that ranks compare."""

    ALLREDUCE = "allreduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    SHARE = "share"

    __str__ = str.__str__
    __hash__ = str.__hash__  # Enum's own is a Python function


class CollectiveOp(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A checked collective call of this rank, as engines run it.

    In the table r stands for each rank. Tensors are None on ranks other than the root where the table says "root".
    The numbers of elements follow in parentheses; where there are none they are equal on all ranks.

        kind            effect                            source               out                   other fields
        allreduce       fold source over the ranks        all                  all                   reduction
        reduce          fold source over the ranks        all                  root                  reduction, root
        broadcast       copy the root's out to all ranks  (see below)          all                   root
        all_gather      concatenate the ranks' sources    all (counts[r])      all (sum of counts)   counts, dim
        gather          concatenate the ranks' sources    all (counts[r])      root (sum of counts)  counts, root
        scatter         divide the root's source          root (sum of counts) all (counts[r])       counts, root
        reduce_scatter  fold source, divide the result    all (sum of counts)  all (counts[r])       counts, dim,
                                                                                             reduction
        all_to_all      send part r of source to rank r   all (sum of counts)  all (of recv_counts)  counts,
                                                                                                     recv_counts, unit
        barrier         return when all ranks have called
        share           send the payload to all ranks                                                name, payload

    All tensors are one-dimensional and contiguous, of one dtype in `DTYPES`, on one device. ``out`` may be ``source``
    in allreduce and reduce. In other kinds they must not overlap, for an engine may write ``out`` before it has sent
    all of ``source``; only this rank's own part of one of them may be the other.

    Engines read a broadcast's elements from the root's ``out``. ``source`` has them before the call runs: `execute` and
    `submit` copy them to ``out``.
    """

    kind: CollectiveKind
    source: Any = None
    out: Any = None
    reduction: Any = None  # a ReduceOp or PremultipliedSum; None where nothing is folded
    root: int = -1  # -1: none
    counts: Sequence[int] = ()  # elements of each rank's part; in all_to_all, to send to each rank
    recv_counts: Sequence[int] = ()  # elements that come from each rank
    unit: int = 0  # elements that users count in: a row, or in an even exchange a whole part
    dim: int = -1  # the dim of users' tensors that is concatenated or split, from 0, or -1; ranks only compare it
    name: str = ""  # of a share, at most 24 ASCII characters
    payload: bytes = b""  # of this rank, which every rank receives; at most MAX_PAYLOAD
    timeout: float  # seconds

    @property
    def operation(self) -> str:
        """The name that ranks compare."""
        return self.name or self.kind.value

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor of the call, for its dtype and device."""
        found: torch.Tensor = self.out if self.source is None else self.source
        return found

    @property
    def device(self) -> torch.device | None:
        """The tensors' device; None for a call without tensors."""
        return None if self.source is None and self.out is None else self.tensor.device

    def replace(self, **changes: Any) -> Self:
        """Return the same call with other values of some fields."""
        return replace(self, **changes)

    def signature(self, sequence: int = 0, payload: bytes = b"") -> CollectiveSignature:
        """Return the description that ranks compare at this position; ``payload`` is sent with it to all ranks."""
        if self.device is None:
            return CollectiveSignature(operation=self.operation, sequence=sequence, payload=payload)
        tensor = self.tensor
        if self.kind is CollectiveKind.ALL_TO_ALL:
            count = self.unit
        elif self.counts:
            count = sum(self.counts)
        else:
            count = (self.out if self.kind is CollectiveKind.ALL_GATHER else tensor).numel()
        return CollectiveSignature(
            operation=self.kind.value,
            dtype=dtype_name(tensor.dtype),
            reduce_op="" if self.reduction is None else str(self.reduction),
            root=self.root,
            dim=self.dim,
            count=count,
            sequence=sequence,
            payload=payload,
        )


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
