"""What is measured: a collective on a number of ranks, for a type and a size."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["MAX_RANKS", "Case", "Collective", "DataType"]

MAX_RANKS = 32
"""A sum of the inputs of this many ranks is exact in every type; see `workload`."""


class Collective(enum.Enum):
    """An operation; the value is its name on the command line."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"

    @property
    def reduces(self) -> bool:
        """Whether it adds, where the others move."""
        return self in {Collective.ALLREDUCE, Collective.REDUCE_SCATTER}

    @property
    def is_in_place(self) -> bool:
        """Whether the result replaces the input."""
        return self in {Collective.ALLREDUCE, Collective.BROADCAST}


class DataType(enum.Enum):
    """A type of elements, with what arithmetic in it can hold."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self is DataType.FLOAT32 else 2

    @property
    def significand_bits(self) -> int:
        """Whole numbers up to 2 to this power are exact."""
        return {DataType.FLOAT32: 24, DataType.FLOAT16: 11, DataType.BFLOAT16: 8}[self]

    @property
    def start_exponent(self) -> int:
        """Inputs are scaled by 2 to this power, from where repeated sums have room to grow."""
        return -14 if self is DataType.FLOAT16 else -60

    @property
    def growth_bits(self) -> int:
        """Inputs of 1 to 8, so scaled, may grow by 2 to this power and stay finite."""
        return 26 if self is DataType.FLOAT16 else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the comparison.

    Args:
        collective: The operation.
        num_ranks: Ranks, all on this host.
        dtype: Of the elements.
        size_bytes: Of a rank's larger tensor: the whole result of an all_gather, the whole input of a reduce_scatter.
            0 for a barrier.
    """

    collective: Collective
    num_ranks: int
    dtype: DataType = DataType.FLOAT32
    size_bytes: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of the larger tensor: what the size holds, at least one, rounded up to equal parts where needed."""
        if self.collective is Collective.BARRIER:
            return 0
        elements = max(1, self.size_bytes // self.dtype.size_bytes)
        if self.collective.is_in_place:
            return elements
        return -(-elements // self.num_ranks) * self.num_ranks

    @property
    def input_elements(self) -> int:
        """Elements that a rank gives."""
        return self.num_elements // (self.num_ranks if self.collective is Collective.ALL_GATHER else 1)

    @property
    def output_elements(self) -> int:
        """Elements that a rank gets."""
        return self.num_elements // (self.num_ranks if self.collective is Collective.REDUCE_SCATTER else 1)
