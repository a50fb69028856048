"""Which ranks answer, and how far those are that do."""

from __future__ import annotations

from collections import Counter

from ferrodist.backends.liveness import LivenessProbe


def test_an_older_message_takes_no_progress_back():
    """A rank that has entered five collectives has done so, whatever an answer says that was sent before."""
    probe = LivenessProbe(lambda _: None, lambda *_: None)
    probe.note_progress(1, 5)
    probe.note_progress(1, 3)
    assert probe.has_entered(1, 4)
    assert not probe.has_entered(1, 5)


def test_ranks_are_silent_or_behind():
    """A rank is behind by what it says, or because it is silent; where no rank is, all are named."""
    progress = {1: 4, 2: 3}

    def ping(rank):
        if rank in progress:
            probe.note_progress(rank, progress[rank])
            probe.on_answer(rank)

    probe = LivenessProbe(ping, lambda is_done, _seconds: is_done())
    assert probe.find_silent([1, 2, 3], 1) == (3,)
    assert probe.find_behind([1, 2, 3], 3, 1) == (2, 3)
    assert probe.find_behind([1, 2], 2, 1) == (1, 2)


def test_other_signs_of_life():
    """Whatever comes from a rank shows that it is alive; a rank from which this one does not read may be."""
    reads = Counter()
    probe = LivenessProbe(
        lambda rank: reads.update([rank] * (rank == 1)), lambda *_: None, reads.get, lambda rank: rank == 2
    )
    assert probe.find_silent([1, 2, 3], 1) == (3,)
