"""The model of a collective's time on the native engine: the work of all ranks, over the processors that they have.

::

    time = max(work / min(p, P), chain) + turns * handover(p / P) / P

p ranks on h hosts, p / h = L on each, run on P processors: one machine's, also where the hosts are emulated. A size S
is a case's, in bytes. ``work`` is processor time of all ranks together:

    p * call                     checks and calls from Python, without the other ranks
    + copied bytes * copied_byte     to and from the slots in shared memory
    + folded bytes * folded_byte     inputs of a sum
    + lines * line                   records and flags of the others of a host, which another processor has written
    + messages * message             between hosts: the sender's and the receiver's part
    + sent bytes * sent_byte         the same

``chain`` is what ranks can only do one after the other: the first segment of a broadcast, and a copy of the whole.
``turns`` counts how often a rank must be given a processor for the others to go on: p times for each meeting of all. It
is 0 up to P ranks. So with more ranks than processors everything grows at least as p, and lines and messages as p * p;
and a handover takes longer, the more ranks share a processor.

A tensor goes in n segments of 512 KiB (256 KiB at most up to P ranks on one host). On one host (h = 1, L = p):

    ==============================  ========  =======================  ======  ==============
    S                               meetings  copied                   folded  chain, copied
    ==============================  ========  =======================  ======  ==============
    allreduce, to 4 KiB (*)         1         p S                      p p S
    allreduce                       2 n       (2 p - 1) S              p S
    reduce_scatter                  n         (p - 1) S                p S
    all_gather, n of S / p          n         (p + 1) S
    broadcast                       n         p S                              S + S / n
    all_to_all                      n         (2 p - 1) S
    ==============================  ========  =======================  ======  ==============

(*) 8 KiB with 3 and 4 ranks, 16 KiB with 2. Between hosts each rank sends each of the p - L others a message at each
meeting, and (p - L) S bytes go between hosts; for an allreduce 2 (p - 1) S where each rank has a host, and else
2 (h - 1) S, along a chain of hosts in 2 (h - 1) steps. From 64 KiB on a broadcast goes along it, too, in h - 1 steps,
if hosts have several ranks. Two ranks on two hosts exchange whole tensors.

The model has no term for caches, for the scheduler's choice of the next rank, nor for reading another process's memory
in place, which large tensors do up to P ranks (it saves a copy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ferrodist.bench.cases import Operation

if TYPE_CHECKING:
    from ferrodist.bench.cases import Case

_KIB = 1024
_INLINE_BYTES = 232  # of a rank's tensor in its arrival: see `max_inline_bytes` in native/transport/shm/group_memory.h
_SLOT_BYTES, _WIDE_SLOT_BYTES = 256 * _KIB, 512 * _KIB  # see src/ferrodist/backends/native/bootstrap.py
_NUM_SLOTS = 3  # see native/transport/shm/group_memory.h
_SMALLEST_SEGMENT_BYTES = 64 * _KIB  # see native/collectives/sizes.h, as for the others
_PARTNER_SEGMENT_BYTES = 128 * _KIB
_LEAST_CHAIN_BYTES = 64 * _KIB  # of a broadcast: see native/collectives/chain.cpp

RING_SIZES = (2, 4, 8, 16)  # each twice the one before

MODELLED = (
    Operation.ALLREDUCE,
    Operation.REDUCE_SCATTER,
    Operation.ALL_GATHER,
    Operation.BROADCAST,
    Operation.ALL_TO_ALL,
)
"""The operations that the model has formulas for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of a machine, in seconds of one processor's time, from `probes`."""

    processors: int
    call: float  # a collective of a group of one rank
    copied_byte: float  # while all processors copy
    folded_byte: float  # of an input of a sum, while all processors add
    line: float  # a cache line that another processor has written
    # From a process that wakes the next one and sleeps to that one, for `RING_SIZES` processes on one processor: the
    # more there are, the less of its caches each finds again.
    handovers: tuple[float, ...]
    message: float = 0.0  # a small message over TCP between hosts, sent and received; 0: there were none
    sent_byte: float = 0.0  # of a large one

    def handover(self, num_processes: float) -> float:
        """The time for some processes on each processor, between those that were measured on a logarithmic scale."""
        return float(np.interp(math.log2(num_processes), np.log2(RING_SIZES), self.handovers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The counts of a case: sums over all ranks."""

    turns: int
    lines: int
    copied_bytes: float = 0.0
    folded_bytes: float = 0.0
    chained_bytes: float = 0.0  # copied by ranks one after the other
    messages: int = 0
    sent_bytes: float = 0.0


def predict(case: Case, constants: Constants) -> float | None:
    """The seconds of a call; None if the model says nothing of the case.

    That is so for other operations, for hosts of unequal ranks, and between hosts without constants of a network.
    """
    num_ranks, processors = case.num_ranks, constants.processors
    is_unknown = case.num_hosts > 1 and constants.message == 0.0
    if case.operation not in MODELLED or num_ranks % case.num_hosts or is_unknown:
        return None
    work = work_of(case, processors)
    seconds = (
        num_ranks * constants.call
        + work.copied_bytes * constants.copied_byte
        + work.folded_bytes * constants.folded_byte
        + work.lines * constants.line
        + work.messages * constants.message
        + work.sent_bytes * constants.sent_byte
    )
    turns = work.turns / processors * constants.handover(num_ranks / processors) if num_ranks > processors else 0.0
    return max(seconds / min(num_ranks, processors), work.chained_bytes * constants.copied_byte) + turns


def work_of(case: Case, processors: int) -> Work:
    """Count the work of a modelled case; the formulas are at the top of this module."""
    if case.operation is Operation.ALLREDUCE:
        return _allreduce(case, processors)
    ranks, size = case.num_ranks, _size_of(case)
    through_slots = size if case.operation is not Operation.ALL_GATHER else size / ranks
    num_segments = 1 if through_slots <= _INLINE_BYTES else _num_segments(case, through_slots, processors)
    copied, folded, chained = (ranks + 1) * size, 0.0, 0.0  # of an all_gather
    if case.operation is Operation.REDUCE_SCATTER:
        copied, folded = (ranks - 1) * size, ranks * size
    elif case.operation is Operation.BROADCAST:
        if 1 < case.num_hosts < ranks and size >= _LEAST_CHAIN_BYTES:
            return _broadcast_in_chain(case, num_segments)
        copied, chained = ranks * size, size + size / num_segments
    elif case.operation is Operation.ALL_TO_ALL:
        copied = (2 * ranks - 1) * size
        num_segments = max(1, -(-int(size) // _slot_bytes(case, processors)))
    return _exchange(case, num_segments, copied=copied, folded=folded, sent=size, chained=chained)


def _allreduce(case: Case, processors: int) -> Work:
    ranks, hosts, size = case.num_ranks, case.num_hosts, _size_of(case)
    one_shot = (16 if ranks == 2 else 8 if ranks <= 4 else 4) * _KIB
    if ranks == 2 and hosts == 2 and size > _INLINE_BYTES:
        num_segments = -(-int(size) // _PARTNER_SEGMENT_BYTES)
        return _exchange(case, num_segments, copied=0, folded=4 * size, sent=2 * size)
    if size <= one_shot:
        return _exchange(case, 1, copied=ranks * size, folded=ranks * ranks * size, sent=ranks * size)
    num_segments = _num_segments(case, size, processors)
    if hosts in {1, ranks}:
        copied = (2 * ranks - 1) * size
        return _exchange(case, 2 * num_segments, copied=copied, folded=ranks * size, sent=2 * size)
    local = ranks // hosts
    steps = 2 * (hosts - 1)
    return Work(
        # All meet to begin; for each segment the ranks of a host meet twice, and the steps follow each other.
        turns=ranks + num_segments * (2 * ranks + steps * local),
        lines=2 * num_segments * ranks * local,
        copied_bytes=2 * hosts * (local - 1) * size + (steps + 1) * size,
        folded_bytes=(ranks + hosts - 1) * size,
        messages=2 * ranks * (ranks - local) + num_segments * steps * local,  # all meet to begin, and to end
        sent_bytes=steps * size,
    )


def _broadcast_in_chain(case: Case, num_segments: int) -> Work:
    ranks, hosts, size = case.num_ranks, case.num_hosts, _size_of(case)
    local = ranks // hosts
    meetings = 1 if num_segments < _NUM_SLOTS else 2  # all meet to begin, and to end if all slots were used
    return Work(
        turns=meetings * ranks + num_segments * (ranks + hosts - 1),
        lines=meetings * ranks * local + 2 * num_segments * ranks,  # a relay's flag, and that of each of its readers
        copied_bytes=(ranks + hosts - 1) * size,
        chained_bytes=size + hosts * size / num_segments,
        messages=meetings * ranks * (ranks - local) + 2 * num_segments * (hosts - 1),
        sent_bytes=(hosts - 1) * size,
    )


def _exchange(
    case: Case, meetings: int, *, copied: float, folded: float = 0.0, sent: float = 0.0, chained: float = 0.0
) -> Work:
    """Work with some meetings of all ranks, at which all send ``sent`` bytes for each rank of another host."""
    ranks = case.num_ranks
    local = ranks // case.num_hosts
    remote = ranks - local
    return Work(
        turns=meetings * ranks,
        lines=meetings * ranks * local,
        copied_bytes=copied,
        folded_bytes=folded,
        chained_bytes=chained,
        messages=meetings * ranks * remote,
        sent_bytes=remote * sent,
    )


def _size_of(case: Case) -> float:
    return float(case.num_elements * case.dtype.size_bytes)


def _slot_bytes(case: Case, processors: int) -> int:
    return _WIDE_SLOT_BYTES if case.num_ranks > processors or case.num_hosts > 1 else _SLOT_BYTES


def _num_segments(case: Case, size: float, processors: int) -> int:
    """The number of segments in which a tensor of some bytes goes through the slots."""
    segment = _slot_bytes(case, processors)
    if case.num_ranks <= processors:
        segment = min(max(int(size) // 4, _SMALLEST_SEGMENT_BYTES), segment)
    return -(-int(size) // segment)
