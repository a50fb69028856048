"""What is measured: an operation on a number of ranks, for a type and a size."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_RANKS = 32
"""A sum of the inputs of this many ranks is exact in every type; see `workload`."""


class Operation(enum.Enum):
    """What is timed; the value is its name on the command line."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    SEND_RECV = "send_recv"
    """A message one way: half of the time in which it goes there and another one comes back."""
    SUBMIT = "submit"
    """The call that starts an asynchronous allreduce, until it returns."""
    OVERLAP = "overlap"
    """An asynchronous allreduce beside a computation: what both take, over the longer of the two."""
    INIT = "init_process_group"
    """Making the default group, and its first allreduce."""
    NEW_GROUP = "new_group"
    """Making another group of the same ranks, and its first allreduce."""

    @property
    def is_allreduce(self) -> bool:
        """Whether it does an allreduce of the case's size, at once or later."""
        return self in {Operation.ALLREDUCE, Operation.SUBMIT, Operation.OVERLAP}

    @property
    def is_asynchronous(self) -> bool:
        """Whether calls only start the operation."""
        return self in {Operation.SUBMIT, Operation.OVERLAP}

    @property
    def makes_groups(self) -> bool:
        """Whether it makes groups."""
        return self in {Operation.INIT, Operation.NEW_GROUP}

    @property
    def has_size(self) -> bool:
        """Whether it moves as many bytes as one asks for."""
        return not self.makes_groups and self is not Operation.BARRIER

    @property
    def reduces(self) -> bool:
        """Whether it adds, where the others move."""
        return self.is_allreduce or self is Operation.REDUCE_SCATTER

    @property
    def is_in_place(self) -> bool:
        """Whether the result replaces the input."""
        return self.is_allreduce or self is Operation.BROADCAST

    @property
    def has_parts(self) -> bool:
        """Whether a tensor consists of equal parts, one a rank."""
        return self in {Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL}


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
        operation: What is timed.
        num_ranks: Ranks.
        num_hosts: Hosts that they are spread over, the first ranks on the first.
        dtype: Of the elements.
        size_bytes: Of a rank's larger tensor: the whole result of an all_gather, the whole input of a reduce_scatter.
            0 where the operation has no size.
    """

    operation: Operation
    num_ranks: int
    num_hosts: int = 1
    dtype: DataType = DataType.FLOAT32
    size_bytes: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of the larger tensor: what the size holds, at least one, rounded up to equal parts where needed."""
        if not self.operation.has_size:
            return 0
        elements = max(1, self.size_bytes // self.dtype.size_bytes)
        return -(-elements // self.num_ranks) * self.num_ranks if self.operation.has_parts else elements

    @property
    def input_elements(self) -> int:
        """Elements that a rank gives."""
        return self.num_elements // (self.num_ranks if self.operation is Operation.ALL_GATHER else 1)

    @property
    def output_elements(self) -> int:
        """Elements that a rank gets."""
        return self.num_elements // (self.num_ranks if self.operation is Operation.REDUCE_SCATTER else 1)

    def partner_of(self, rank: int) -> int | None:
        """With whom a rank exchanges messages: the first rank and the last one do, which are of different hosts."""
        return {0: self.num_ranks - 1, self.num_ranks - 1: 0}.get(rank)
