"""The model of a collective's time: its counts on cases worked out by hand, and its constants from the probes."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ferrodist.bench.cases import Case, Operation
from ferrodist.bench.model import MODELLED, RING_SIZES, Constants, Work, predict, work_of

KIB, MIB = 1 << 10, 1 << 20
CONSTANTS = Constants(
    processors=2,
    call=1e-6,
    copied_byte=1e-10,
    folded_byte=5e-11,
    line=1e-8,
    handovers=(2e-6, 4e-6, 8e-6, 10e-6),
    message=4e-6,
    sent_byte=5e-10,
)


def counts(operation, ranks, size, *, hosts=1, processors=2):
    return work_of(Case(Operation(operation), ranks, hosts, size_bytes=size), processors)


@pytest.mark.parametrize(
    ("work", "meetings", "copied", "folded"),
    [
        (counts("allreduce", 4, 8), 1, 4 * 8, 16 * 8),  # each folds the inputs of all
        (counts("allreduce", 8, 4 * KIB), 1, 8 * 4 * KIB, 64 * 4 * KIB),
        (counts("allreduce", 8, 64 * KIB), 2, 15 * 64 * KIB, 8 * 64 * KIB),  # each folds a chunk
        (counts("allreduce", 8, MIB), 4, 15 * MIB, 8 * MIB),  # in two segments
        (counts("reduce_scatter", 8, MIB), 2, 7 * MIB, 8 * MIB),
        (counts("all_gather", 8, MIB), 1, 9 * MIB, 0),  # a part fits into a slot
        (counts("broadcast", 8, MIB), 2, 8 * MIB, 0),
        (counts("all_to_all", 8, MIB), 2, 15 * MIB, 0),
    ],
)
def test_meetings_and_bytes_on_one_host(work, meetings, copied, folded):
    """Through slots of 512 KiB, which ranks that share processors have."""
    ranks = 4 if copied == 32 else 8
    assert (work.turns, work.lines) == (meetings * ranks, meetings * ranks * ranks)
    assert (work.copied_bytes, work.folded_bytes) == (copied, folded)
    assert (work.messages, work.sent_bytes) == (0, 0)


def test_ranks_with_processors_of_their_own_have_smaller_segments():
    """256 KiB at most, a quarter of the tensor, and 64 KiB at least."""
    meetings = {size: counts("broadcast", 2, size).lines // 4 for size in (8, 64 * KIB, 512 * KIB, MIB, 4 * MIB)}
    assert meetings == {8: 1, 64 * KIB: 1, 512 * KIB: 4, MIB: 4, 4 * MIB: 16}
    assert counts("broadcast", 2, MIB).chained_bytes == MIB + MIB / 4


@pytest.mark.parametrize(
    ("work", "messages", "sent"),
    [
        (counts("broadcast", 8, 8, hosts=2), 8 * 4, 4 * 8),
        (counts("all_gather", 8, MIB, hosts=4), 8 * 6, 6 * MIB),
        (counts("allreduce", 2, MIB, hosts=2), 2 * 8, 2 * MIB),  # in segments of 128 KiB, whole
        (counts("allreduce", 4, 64 * KIB, hosts=4), 2 * 4 * 3, 3 * 2 * 64 * KIB),  # chunks there, and results back
        (counts("allreduce", 8, 64 * KIB, hosts=4), 2 * 8 * 6 + 6 * 2, 6 * 64 * KIB),  # the chain of hosts
        (counts("broadcast", 8, 64 * KIB, hosts=4), 8 * 6 + 2 * 3, 3 * 64 * KIB),
        (counts("broadcast", 8, 2 * MIB, hosts=4), 2 * 8 * 6 + 4 * 2 * 3, 3 * 2 * MIB),  # all meet at the end, too
        (counts("broadcast", 4, 64 * KIB, hosts=4), 4 * 3, 3 * 64 * KIB),  # from the root to each
    ],
)
def test_messages_and_bytes_between_hosts(work, messages, sent):
    """Each rank has a connection to each rank of another host."""
    assert (work.messages, work.sent_bytes) == (messages, sent)


def test_the_chain_of_hosts_folds_each_input_once():
    """And each host but the first folds the result of the one before."""
    work = counts("allreduce", 8, 64 * KIB, hosts=4)
    size = 64 * KIB
    assert work == Work(
        turns=8 + 2 * 8 + 6 * 2,
        lines=2 * 8 * 2,
        copied_bytes=2 * 4 * size + 7 * size,
        folded_bytes=11 * size,
        messages=work.messages,
        sent_bytes=work.sent_bytes,
    )


def test_the_time_is_all_work_over_the_processors_and_the_turns():
    """With a processor for each rank there are no turns; with two for eight there are, and four times the work."""
    barely = Case(Operation.ALL_GATHER, 2, size_bytes=8)
    assert predict(barely, CONSTANTS) == pytest.approx((2 * 1e-6 + 4 * 1e-8 + 24 * 1e-10) / 2)
    many = Case(Operation.ALL_GATHER, 8, size_bytes=MIB)
    work = 8 * 1e-6 + 9 * MIB * 1e-10 + 64 * 1e-8
    assert predict(many, CONSTANTS) == pytest.approx(work / 2 + 8 * 4e-6 / 2)
    # In parts of two segments of 64 KiB.
    assert predict(many, replace(CONSTANTS, processors=8)) == pytest.approx((work + 64 * 1e-8) / 8)
    # The readers of a broadcast wait for the root's first segment.
    chained = predict(Case(Operation.BROADCAST, 2, size_bytes=MIB), CONSTANTS)
    assert chained == pytest.approx(1.25 * MIB * 1e-10)


def test_a_handover_takes_as_long_as_among_as_many_processes():
    """In between by the logarithm, and at most what was measured for the most."""
    found = [CONSTANTS.handover(count) for count in (1, 1.5, 2, 4, 6, 8, 16, 32)]
    assert found == pytest.approx([2e-6, 2e-6, 2e-6, 4e-6, 4e-6 + 4e-6 * 0.5849625, 8e-6, 10e-6, 10e-6])


def test_the_model_says_when_it_says_nothing():
    """Of other operations, of hosts with unequal ranks, and between hosts before the network was measured."""
    assert all(predict(Case(one, 4, 2, size_bytes=8), CONSTANTS) for one in MODELLED)
    assert predict(Case(Operation.SEND_RECV, 2, size_bytes=8), CONSTANTS) is None
    assert predict(Case(Operation.ALLREDUCE, 3, 2, size_bytes=8), CONSTANTS) is None
    assert predict(Case(Operation.ALLREDUCE, 2, 2, size_bytes=8), replace(CONSTANTS, message=0.0)) is None


def test_the_probes_print_the_constants_of_a_machine():
    """In seconds: a byte takes less than a line, and that less than a process's turn."""
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, "-m", "ferrodist.bench.probes"], capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    assert set(found) == {"copied_byte", "folded_byte", "line", "handovers"}
    assert 0 < found["folded_byte"] < found["line"] < min(found["handovers"]) < 0.01
    assert len(found["handovers"]) == len(RING_SIZES)
    assert 0 < found["copied_byte"] < found["line"]
