"""The conformance suite of collectives on NCCL's engine, over a fake of NCCL for CPU tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from nccl_fakes import fake_groups, send_cpu_tensors_to_nccl

from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives import oracle
from ferrodist.testing.conformance.collectives.oracle import check_bits
from ferrodist.testing.conformance.collectives.suite import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from ferrodist.testing.conformance.collectives.oracle import CollectiveCheck


_OF_ANOTHER_KIND = {
    "small_floats_round_once": "NCCL adds float16 and bfloat16 in their own precision",
    "extremes_follow_the_rules": "of 0.0 and -0.0 NCCL's engine takes the one that its order says",
    "allreduce_of_every_dtype_and_operation": "both; test_nccl_reductions.py has it without these",
    "reduce_of_every_dtype_and_operation": "the same",
    "reduce_scatter_of_every_dtype_and_operation": "the same",
    "aborts_reach_waiting_ranks": "the first asynchronous call of a group waits for the other ranks",
    "mismatches_within_a_collective": "it may return before the error comes; test_nccl_failures.py has that",
    "tensors_of_every_dtype": "a tensor that is received on a GPU must be of known shape and dtype",
    "sizes_around_the_inline_limit": "the same",
    "tags_keep_messages_apart": "the same",
    "every_receive_tells_the_sender": "the same",
    "rings_and_batches": "the same",
    "wrong_shapes_are_said": "the same",
    "late_messages": "the same",
    "objects_from_rank_to_rank": "the same",
    "wrong_numbers_are_refused": "the same",
    "groups_that_were_closed_are_refused": "the same",
    "aborts_reach_messages": "the same",
}
"""Checks that don't apply to NCCL, by name, with the reason; other tests take their place."""

_CHECKS = [check for check in COLLECTIVE_CHECKS if check.__name__ not in _OF_ANOTHER_KIND]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: check.__name__)
def test_collectives_conform(world_size: int, check: CollectiveCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check that applies to NCCL passes on its engine."""
    send_cpu_tensors_to_nccl(monkeypatch)
    monkeypatch.setattr(oracle, "check_bits", partial(check_bits, any_nan=True))  # which NaN is the GPU's choice
    run_ranks(check, world_size, backend=partial(fake_groups, timeout=30.0), timeout=60.0)
