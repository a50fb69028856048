"""Whether the ranks of a group have processors enough."""

from __future__ import annotations

import itertools
import operator
import os

import pytest

from ferrodist.backends.native.topology import CpuSet, is_oversubscribed

A, B = b"a" * 6, b"b" * 6


def rank(machine: bytes, usable: int, quota: int = 0xFFFF) -> CpuSet:
    return CpuSet(machine, usable, quota)


@pytest.mark.parametrize(
    ("ranks", "hosts", "crowded"),
    [
        ([rank(A, 0b11)] * 2, [0, 0], False),
        ([rank(A, 0b11)] * 3, [0, 0, 0], True),
        ([rank(A, 0b01), rank(A, 0b10)], [0, 0], False),
        ([rank(A, 0b01), rank(A, 0b01)], [0, 0], True),
        ([rank(A, 0b11)] * 4, [0, 0, 2, 2], True),
        ([rank(A, 0b11)] * 2 + [rank(B, 0b11)] * 2, [0, 0, 2, 2], False),
        ([rank(A, 0b1111, 2)] * 4, [0, 0, 2, 2], False),
        ([rank(A, 0b1111, 1)] * 4, [0, 0, 2, 2], True),
        ([rank(A, 0xFFFFFFFF, 4)] * 8, list(range(8)), False),
        ([rank(A, 0b0001)] * 3 + [rank(A, 0b1110)], [0] * 4, True),
        ([rank(A, 0b0011)] * 3 + [rank(A, 0b1111)], [0] * 4, True),
        ([rank(A, 0b0111), rank(A, 0b0011), rank(A, 0b0001)], [0] * 3, False),
        ([rank(A, (1 << 64) - 1)] * 64, [0] * 64, False),
        ([rank(A, (1 << 64) - 1)] * 65, [0] * 65, True),
    ],
    ids=[
        "enough",
        "too few",
        "one each",
        "the same one",
        "containers of one machine",
        "two machines",
        "within the quotas of two containers",
        "beyond the quotas",
        "one rank a container",
        "crowded beside idle ones",
        "crowded on a node beside an idle one",
        "one each, if the first ones give way",
        "as many",
        "one more",
    ],
)
def test_is_oversubscribed(ranks, hosts, crowded):
    """Processors are shared by machine, quotas by host; both must suffice, wherever the ranks are bound."""
    assert is_oversubscribed(ranks, hosts) is crowded


def test_every_way_to_bind_three_ranks():
    """The answer is that of trying all assignments of different processors to ranks."""
    for masks in itertools.product(range(1, 8), repeat=3):
        assignments = itertools.permutations((1, 2, 4))
        fits = any(all(map(operator.and_, masks, each)) for each in assignments)
        assert is_oversubscribed([rank(A, mask) for mask in masks], [0, 0, 0]) is not fits, masks


def test_the_cpu_set_of_a_process():
    """Another rank reads the set that this one has packed, and it is the system's."""
    own = CpuSet.of_this_process()
    assert len(own.pack()) == CpuSet.size()
    assert CpuSet.unpack(own.pack()) == own
    assert own.usable.bit_count() == len(os.sched_getaffinity(0))
    assert own.quota >= 1
